"""Which documents train: duplicates, held-out split, caps and cutting, against an oracle of plain loops."""

import hashlib
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pod.data.args import DataArgs
from pod.data.documents import DOCUMENT, PIECE, splitmix64
from pod.data.selection import Counts, Selection, select

MASK = 2**64 - 1


class FakePart:
    """A part of the token store in memory. documents: (tokens, place, digest0, digest1) each."""

    def __init__(self, source, documents, name="unit"):
        self.source, self.name = source, name
        self.documents = np.zeros(len(documents), DOCUMENT)
        for record, (tokens, place, *digest) in zip(self.documents, documents, strict=True):
            record["tokens"], record["place"], record["digest"] = tokens, place, digest
        self.num_documents = len(documents)

    def index(self, start, stop):
        return self.documents[start:stop].copy()


def arguments(num_sources=1, **changes):
    options = {"context_length": 8, "shortest_interval": 2, "held_out_fraction": 0.0} | changes
    return DataArgs(sources=[f"source {number}" for number in range(num_sources)], **options)


def mix(value):
    value = (int(value) + 0x9E3779B97F4A7C15) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def oracle(parts, args):
    """(pieces, held-out pieces, counts per source), the long way round."""
    seen, read = set(), Counter()
    pieces, held, counts = [], [], [Counter() for _ in args.sources]
    hashes = [hashlib.sha256() for _ in args.sources]
    for number, part in enumerate(parts):
        count, start = counts[part.source], 0
        for length, place, digest in part.documents.tolist():
            first, start = start, start + length
            read[part.source] += 1
            if args.max_documents is not None and read[part.source] > args.max_documents:
                count["capped"] += 1
                continue
            hashes[part.source].update(b"".join(int(one).to_bytes(8, "little") for one in digest))
            if args.deduplicate and tuple(digest) in seen:
                count["duplicates"] += 1
                continue
            seen.add(tuple(digest))
            key = mix(digest[0] ^ mix(0))
            if place / 2**64 < args.held_out_fraction:
                count["other_split"] += 1
                held.append((place, (number, part.source, length, first, key)))
                continue
            count["documents"] += 1
            count["tokens"] += length
            if length > args.context_length and args.long_documents == "skip":
                count["skipped_long"] += 1
                count["skipped_long_tokens"] += length
                continue
            count["cut_documents"] += length > args.context_length
            offset = cut = 0
            while offset < length or cut == 0:
                size = min(args.context_length, length - offset)
                least = args.shortest_interval if args.short_documents == "drop" else 0
                if size < max(args.min_tokens, least):
                    count["dropped_short"] += 1
                    count["dropped_short_tokens"] += size
                else:
                    pieces.append((number, part.source, size, first + offset, mix(digest[0] ^ mix(cut))))
                offset, cut = offset + args.context_length, cut + 1
    for count, fingerprint in zip(counts, hashes, strict=True):
        count["fingerprint"] = fingerprint.hexdigest()
    return pieces, [piece for _, piece in sorted(held, key=lambda item: item[0])], counts


places = st.one_of(st.integers(0, MASK), st.sampled_from([0, 2**62, 2**62 + 1, 2**63 - 1, 2**63, MASK]))
digests = st.one_of(st.integers(0, 3), st.sampled_from([2**48 - 1, 2**48, 2**63, MASK]))
documents = st.tuples(st.integers(0, 40), places, digests, st.integers(0, 1))


@st.composite
def corpora(draw):
    num_sources = draw(st.integers(1, 3))
    sizes = draw(
        st.lists(st.tuples(st.integers(0, num_sources - 1), st.lists(documents, max_size=9)), max_size=5)
    )
    parts = [FakePart(source, content) for source, content in sorted(sizes, key=lambda item: item[0])]
    args = arguments(
        num_sources,
        max_documents=draw(st.sampled_from([None, None, 1, 5])),
        deduplicate=draw(st.booleans()),
        long_documents=draw(st.sampled_from(["cut", "skip"])),
        short_documents=draw(st.sampled_from(["keep", "drop"])),
        shortest_interval=draw(st.integers(2, 8)),
        min_tokens=draw(st.integers(1, 5)),
        held_out_fraction=draw(st.sampled_from([0.0, 0.25, 0.5, 0.3])),
    )
    return parts, args


@settings(max_examples=120, deadline=None)
@given(corpora(), st.sampled_from([1, 2, 3, 7, 100]), st.sampled_from([1, 2, 5, 100]))
def test_same_as_plain_loops(tmp_path_factory, corpus, chunk, at_once):
    parts, args = corpus
    folder = tmp_path_factory.mktemp("selection")
    found = select(parts, args, folder, chunk_documents=chunk, scan_documents=at_once)
    pieces, held, counts = oracle(parts, args)
    assert found.pieces(0, found.num_pieces).tolist() == pieces
    assert found.held_out(0, found.num_held_out).tolist() == held
    assert found.held_out_tokens == sum(piece[2] for piece in held)
    for counted, expected in zip(found.sources, counts, strict=True):
        assert {name: value for name, value in vars(counted).items() if value} == {
            name: value for name, value in expected.items() if value
        }
    for name in ("duplicates", "tokens", "dropped_short_tokens", "other_split"):
        assert getattr(found.total, name) == sum(count[name] for count in counts)
    assert sorted(file.name for file in folder.iterdir()) == ["held_out.bin", "pieces.bin", "select.json"]
    assert Selection.open(folder) == found


def random_parts(number=3000):
    digest = splitmix64(np.arange(number, dtype=np.uint64))
    digest[number // 2 :: 3] = digest[: len(digest[number // 2 :: 3])]
    place, tokens = splitmix64(digest ^ np.uint64(1)), 1 + splitmix64(digest) % 30
    content = list(zip(tokens.tolist(), place.tolist(), digest.tolist(), [5] * number, strict=True))
    return [FakePart(0, content[start : start + 700]) for start in range(0, number, 700)]


def files(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_bytes_do_not_depend_on_chunks_or_on_the_cut_into_parts_of_duplicates(tmp_path):
    args = arguments(held_out_fraction=0.2)
    select(random_parts(), args, tmp_path / "a")
    select(random_parts(), args, tmp_path / "b", chunk_documents=13, scan_documents=17)
    assert files(tmp_path / "a") == files(tmp_path / "b")
    pieces, held, counts = oracle(random_parts(), args)
    found = Selection.open(tmp_path / "a")
    assert found.pieces(0, 10**9).tolist() == pieces and found.held_out(0, 10**9).tolist() == held
    assert counts[0]["duplicates"] == found.total.duplicates > 400


def test_bytes_stay_the_same_for_ever(tmp_path):
    """Data prepared by an older version must stay reproducible: these bytes may change only with the format's version."""
    select(random_parts(), arguments(held_out_fraction=0.2), tmp_path)
    found = {name: hashlib.sha256(data).hexdigest()[:16] for name, data in files(tmp_path).items()}
    assert found["pieces.bin"] == "11eaf7572e4e7196" and found["held_out.bin"] == "0ba81b5e355e3ff7"


def test_long_document_is_named(tmp_path):
    parts = [
        FakePart(0, [(4, 0, 1, 1)], "first"),
        FakePart(0, [(4, 0, 2, 2)] * 3 + [(9, 0, 3, 3)], "books.jsonl"),
    ]
    message = (
        "document 4 of books.jsonl has 9 tokens, the context holds 8: set data.long_documents to cut or skip"
    )
    with pytest.raises(ValueError, match=message):
        select(parts, arguments(long_documents="error"), tmp_path, chunk_documents=2)
    held = arguments(long_documents="error", held_out_fraction=0.5)
    assert select(parts, held, tmp_path).held_out(0, 9)["length"].tolist() == [4, 4, 9]  # uncut


def test_explicit_intervals_decide_what_is_short(tmp_path):
    args = arguments(short_documents="drop", intervals=[5], shortest_interval=2)
    found = select([FakePart(0, [(4, 0, 1, 1), (5, 0, 2, 2), (12, 0, 3, 3)])], args, tmp_path)
    assert found.pieces(0, 9)["length"].tolist() == [5, 8]
    assert (found.total.dropped_short, found.total.dropped_short_tokens) == (2, 8)
    args.min_tokens = 6
    found = select([FakePart(0, [(5, 0, 2, 2), (12, 0, 3, 3)])], args, tmp_path / "least")
    assert found.pieces(0, 9)["length"].tolist() == [8]


def test_large_corpora_of_64_bit_places_and_starts(tmp_path):
    """Token starts beyond 2**32 inside one part."""
    part = FakePart(0, [(2**32 - 8, 0, number, 0) for number in range(3)])
    found = select([part], arguments(context_length=2**31), tmp_path)
    expected = [document * (2**32 - 8) + cut * 2**31 for document in range(3) for cut in range(2)]
    assert found.pieces(0, 9)["start"].tolist() == expected


def test_finished_selection_is_kept_and_an_unfinished_one_made_again(tmp_path):
    parts = random_parts(200)
    found = select(parts, arguments(), tmp_path)
    before = files(tmp_path)
    assert select([], arguments(), tmp_path) == found
    (tmp_path / "pieces.bin").write_bytes(before["pieces.bin"][:-1])
    with pytest.raises(
        ValueError, match=r"pieces.bin is missing or not whole: delete .*select.json and select again"
    ):
        select(parts, arguments(), tmp_path)
    (tmp_path / "select.json").unlink()
    assert select(parts, arguments(), tmp_path) == found and files(tmp_path) == before


def test_pieces_by_number(tmp_path):
    found = select(random_parts(200), arguments(), tmp_path)
    everything = found.pieces(0, found.num_pieces)
    numbers = np.array([5, 3, 3, 150, 0, found.num_pieces - 1])
    assert found.take(numbers).tolist() == everything[numbers].tolist()
    assert found.take(np.array([], np.int64)).dtype == PIECE
    assert found.pieces(7, 9).tolist() == everything[7:9].tolist()


def test_counts_reach_the_manifest(tmp_path):
    found = select(random_parts(50), arguments(), tmp_path)
    told = found.as_dict()
    assert (
        set(told["total"]) == set(vars(Counts())) and told["sources"][0]["documents"] == found.total.documents
    )
    assert "folder" not in told
