"""Near duplicates: found as often as the formula says, the first one kept, the same lists whatever runs them."""

import json
import os
from types import SimpleNamespace

import numpy as np
import pytest

from pod.data import minhash
from pod.data.args import DataArgs
from pod.data.documents import Document, SourceReport
from pod.data.minhash import NearDuplicates, removed_documents
from pod.data.token_store import Part, PartWriter
from pod.data.tokenizers import identity

pytest.importorskip("datatrove")

VOCABULARY = np.array(
    [f"{a}{b}{c}" for a in "bdfgklmnprst" for b in "aeiou" for c in ("n", "r", "st", "l", "x")]
)


class StandIn:
    """What NearDuplicates asks of a job, with documents in memory: lists of texts or of token arrays, one per unit."""

    def __init__(self, folder, contents, sources=None, **settings):
        self.work_dir, self.contents = folder, contents
        self.sources = sources or [0] * len(contents)
        self.args = DataArgs(workers=1, **settings)
        self.request = {"reading": {"test": len(contents)}}

    def parts(self):
        return [part for _, part in self.needed_units()]

    def needed_units(self):
        for number, source in enumerate(self.sources):
            folder = self.work_dir / f"part-{number}"
            if not folder.exists():
                folder.mkdir(parents=True)
                with PartWriter(folder, np.dtype("<u2")) as part:
                    for document in self.documents_of(self.units()[number]):
                        place, digest = identity(document)
                        part.add([np.zeros(3, dtype=np.uint32)], [place], [digest])
                    part.finish(f"unit {number}", SourceReport("memory"))
            yield number, Part(folder, source)

    def units(self):
        return [SimpleNamespace(number=number, source=source) for number, source in enumerate(self.sources)]

    def documents_of(self, unit, report=None):
        for record, content in enumerate(self.contents[unit.number]):
            tokens = content if isinstance(content, np.ndarray) else None
            yield Document("" if tokens is not None else content, "memory", f"{unit.number}:{record}", tokens)


def removed_of(job):
    return [found.tolist() for found in removed_documents(job, job.parts())]


def random_words(rng, count):
    """Words with frequencies like a text's: rank r about as often as 1 / r."""
    ranks = np.exp(rng.random(count) * np.log(len(VOCABULARY))).astype(int)
    return VOCABULARY[np.minimum(ranks, len(VOCABULARY)) - 1]


def edited(rng, words, share):
    """A copy with `share` of its words replaced."""
    copy = words.copy()
    where = rng.random(len(words)) < share
    copy[where] = random_words(rng, int(where.sum()))
    return copy


def similarity(one, two):
    first, second = ({tuple(text[at : at + 5]) for at in range(len(text) - 4)} for text in (one, two))
    return len(first & second) / len(first | second)


def test_found_as_often_as_the_formula_says_and_nothing_else(tmp_path):
    rng = np.random.default_rng(0)
    pairs = 120
    originals = [random_words(rng, 300) for _ in range(pairs)]
    units, expected = [[" ".join(words) for words in originals]], []
    for share in (0.01, 0.02, 0.03, 0.05):
        copies = [edited(rng, words, share) for words in originals]
        near = np.array([similarity(one, two) for one, two in zip(originals, copies, strict=True)])
        probability = 1 - (1 - near**8) ** 14
        expected.append((probability.sum(), np.sqrt((probability * (1 - probability)).sum())))
        # each share is compared with the originals alone: copies of copies would help each other
        job = StandIn(tmp_path / f"{share}", [units[0], [" ".join(words) for words in copies]])
        kept_first, found = removed_of(job)
        assert kept_first == []
        mean, deviation = expected[-1]
        assert abs(len(found) - mean) <= 4 * deviation + 1, (share, len(found), mean, deviation)
    assert expected[0][0] > 0.99 * pairs and 0.1 * pairs < expected[3][0] < 0.6 * pairs


def test_distinct_texts_stay(tmp_path):
    rng = np.random.default_rng(1)
    texts = [" ".join(random_words(rng, 200)) for _ in range(400)]
    halves = [
        f"{one[: len(one) // 2]} {two[len(two) // 2 :]}"
        for one, two in zip(texts[:50], texts[50:100], strict=True)
    ]
    job = StandIn(tmp_path, [texts, halves])  # half of a text in common: s = 1/3, found once in 500
    none, few = removed_of(job)
    assert none == [] and len(few) <= 2


def near_copies(rng, words, count):
    return [" ".join(edited(rng, words, 0.005)) for _ in range(count)]


@pytest.fixture
def clusters():
    """Three units with two clusters (of 5 and of 3 documents) among distinct texts, and the lists that must come out."""
    rng = np.random.default_rng(2)
    first, second = random_words(rng, 400), random_words(rng, 400)
    alone = [" ".join(random_words(rng, 400)) for _ in range(6)]
    a, b = near_copies(rng, first, 5), near_copies(rng, second, 3)
    units = [
        [alone[0], a[0], alone[1]],
        [b[0], a[1], alone[2], b[1]],
        [alone[3], a[2], a[3], alone[4], b[2], a[4], alone[5]],
    ]
    return units, [[], [1, 3], [1, 2, 4, 5]]


def test_the_first_of_each_cluster_is_kept(tmp_path, clusters):
    units, expected = clusters
    job = StandIn(tmp_path, units)
    assert removed_of(job) == expected
    report = removed_documents(job, job.parts()).report
    assert (report["documents"], report["clusters"], report["removed"]) == (14, 2, 6)
    assert report["first_removed"][:2] == ["unit 1: document 1", "unit 1: document 3"]
    assert sorted(path.suffix for path in minhash.near_dir(job).iterdir() if path.is_dir()) == []


@pytest.mark.parametrize(("groups", "workers"), [(1, 1), (2, 1), (3, 1), (400, 3)])
def test_groups_and_workers_do_not_matter(tmp_path, clusters, monkeypatch, groups, workers):
    units, expected = clusters
    monkeypatch.setattr(minhash, "MAX_GROUPS", groups)
    job = StandIn(tmp_path, [*units, []])
    job.args.workers = workers
    assert len(NearDuplicates(job).groups) <= groups
    assert removed_of(job) == [*expected, []]


def test_lists_are_a_sequence_read_at_each_access(tmp_path, clusters):
    units, expected = clusters
    job = StandIn(tmp_path, units)
    removed = removed_documents(job, job.parts())
    assert len(removed) == 3 and removed[-1].tolist() == expected[2] and removed[1].dtype == np.uint32
    assert [one.tolist() for one in removed[1:]] == expected[1:]
    with pytest.raises(IndexError):
        removed[3]


def test_exact_copies_and_layout(tmp_path):
    text = " ".join(random_words(np.random.default_rng(3), 60))
    other = text.replace(" ", "\n  ", 20).upper() + " !!!"
    numbers = text + " 1999 12.5", text + " 2024 7"
    job = StandIn(tmp_path, [[text, other, text], list(numbers)])
    assert removed_of(job) == [[1, 2], [0, 1]]


@pytest.mark.parametrize("text", ["", "one two three four", "!?.,", "\ud800"])
def test_what_has_no_five_words_is_never_a_duplicate(tmp_path, text):
    job = StandIn(tmp_path, [[text, text]])
    assert removed_of(job) == [[]]


def test_scripts_without_spaces_and_broken_characters(tmp_path):
    chinese = "数据处理是机器学习的重要步骤我们需要去除重复的文档以便提高模型的质量"
    thai = "การประมวลผลข้อมูลเป็นขั้นตอนสำคัญของการเรียนรู้ของเครื่อง"
    broken = "one two three \ud800 four five six seven"
    job = StandIn(
        tmp_path,
        [
            [chinese, thai, broken],
            [chinese + "。", "แมว" * 20, broken, "今天天气很好我们去公园散步吧明天也去"],
        ],
    )
    assert removed_of(job) == [[], [0, 2]]


def test_token_documents_are_compared_by_their_ids(tmp_path):
    rng = np.random.default_rng(4)
    ids = rng.integers(0, 50000, 500).astype(np.uint32)
    changed = ids.copy()
    changed[100] = 7
    different = rng.integers(0, 50000, 500).astype(np.uint32)
    job = StandIn(tmp_path, [[ids, different], [changed]])
    assert removed_of(job) == [[], [0]]


def test_signatures_in_chunks_equal_datatroves_own(tmp_path):
    from datatrove.pipeline.dedup import MinhashDedupSignature

    block = minhash.signature_block(tmp_path)
    words = random_words(np.random.default_rng(5), 2 * minhash.SHINGLES_AT_A_TIME + 77)
    shingles = block.get_shingles(" ".join(words))
    assert shingles.shape == (len(words) - 4, 1)
    whole = MinhashDedupSignature.get_signature(block, shingles)
    assert block.get_signature(shingles) == whole
    assert np.array(whole).shape == (14, 8)


def test_signatures_are_the_same_for_ever(tmp_path):
    """What is removed decides bytes: neither NumPy nor datatrove may change it unseen."""
    block = minhash.signature_block(tmp_path)
    shingles = block.get_shingles("One two, three FOUR five-six seven 8!")
    signature = block.get_signature(shingles)
    assert len(shingles) == 4 and (signature[0][0], signature[13][7]) == (
        420801314452551838,
        760320279624072686,
    )


def test_goes_on_after_a_kill_at_any_step(tmp_path, clusters):
    units, expected = clusters
    job = StandIn(tmp_path, units)
    near = NearDuplicates(job)
    near.run("sign", 0)
    near.run("sign", 1)
    folder = near.folder
    # killed while group 1 was written: its mark is not there, one file is half, and it was being sorted
    (folder / "sign-00001.json").unlink()
    file = folder / "signatures/bucket_003/00001.minhash.sig"
    file.write_bytes(file.read_bytes()[:100])
    near = NearDuplicates(job)
    assert [near.is_done("sign", number) for number in range(3)] == [True, False, False]
    with pytest.raises(ValueError, match="step sign is not complete"):
        near.run("match", 0)
    for number in range(3):
        near.run("sign", number)
    near.run("match", 5)
    (folder / "match-00005.json").unlink()
    (folder / "matches/00005_00.dups").write_bytes(b"\x01\x02")
    with pytest.raises(ValueError, match="step match is not complete"):
        near.run("cluster", 0)
    (folder / "clusters").mkdir()
    (folder / "clusters/000000.clusters").write_bytes(np.array([0, 0, 1, 0], dtype="<u4").tobytes())
    assert removed_of(job) == expected


def test_finished_lists_are_not_made_again(tmp_path, clusters, monkeypatch):
    units, expected = clusters
    job = StandIn(tmp_path, units)
    assert removed_of(job) == expected
    monkeypatch.setattr(NearDuplicates, "_sign", lambda *_: pytest.fail("signed again"))
    assert removed_of(job) == expected
    near = NearDuplicates(job)
    assert all(near.is_done(step, 0) for step in ("sign", "match", "cluster"))
    near.run("sign", 0)
    assert sorted(path.name for path in near.folder.iterdir()) == ["near.json", "removed.bin", "starts.bin"]


def test_a_source_that_changed_is_refused(tmp_path, clusters):
    units, _ = clusters
    for change, message in (
        (lambda unit: unit.__setitem__(1, unit[1] + " x"), "1:1 has changed since"),
        (lambda unit: unit.pop(), "unit 1 has 3 documents, 4 when it was tokenised"),
        (lambda unit: unit.append("more"), "1:4 has changed since"),
    ):
        job = StandIn(tmp_path / message[:6] / str(len(message)), [list(unit) for unit in units])
        parts = job.parts()
        change(job.contents[1])
        with pytest.raises(ValueError, match=message) as caught:
            removed_documents(job, parts)
        assert "\n" not in str(caught.value)


def test_documents_beyond_max_documents_are_no_candidates(tmp_path):
    rng = np.random.default_rng(6)
    words = random_words(rng, 300)
    a, b, c = near_copies(rng, words, 3)
    alone = [" ".join(random_words(rng, 300)) for _ in range(4)]
    # source 0 may give three documents: `a` is its fourth and must not take `b` and `c` with it
    job = StandIn(tmp_path, [alone[:2], [alone[2], a], [b, c, alone[3]]], [0, 0, 1], max_documents=3)
    assert removed_of(job) == [[], [], [1]]
    assert json.loads((minhash.near_dir(job) / minhash.REPORT).read_text())["documents"] == 6


def test_another_reading_has_another_folder(tmp_path):
    job = StandIn(tmp_path, [["a"]])
    before = minhash.near_dir(job)
    job.request = {"reading": {"test": "another"}}
    assert minhash.near_dir(job) != before


def test_nothing_on_the_console_and_nothing_outside_the_work_folder(tmp_path, clusters, monkeypatch, capfd):
    units, expected = clusters
    home, here = tmp_path / "home", tmp_path / "here"
    home.mkdir()
    here.mkdir()
    monkeypatch.chdir(here)
    for name in ("HOME", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(home))
    job = StandIn(tmp_path / "work", units)
    NearDuplicates(job).run("sign", 0)
    for number in (1, 2):
        NearDuplicates(job).run("sign", number)
    for number in range(minhash.NUM_BUCKETS):
        NearDuplicates(job).run("match", number)
    NearDuplicates(job).run("cluster", 0)
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")
    assert os.listdir(home) == [] and os.listdir(here) == []
    assert removed_of(job) == expected


def test_without_datatrove_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    job = StandIn(tmp_path, [["a"]])
    with pytest.raises(ValueError, match=r"pip install 'pod-kv\[datatrove\]'") as caught:
        removed_documents(job, job.parts())
    assert "\n" not in str(caught.value)


def test_lists_of_another_run_are_refused(tmp_path, clusters):
    job = StandIn(tmp_path, clusters[0])
    with pytest.raises(ValueError, match="are of 3 parts, asked for 2"):
        removed_documents(job, job.parts()[:2])


def test_first_document_of_the_next_part_is_not_counted_twice(tmp_path, monkeypatch):
    """Parts of one group stand one after the other in a list; a removed document belongs to exactly one of them."""
    monkeypatch.setattr(minhash, "MAX_GROUPS", 1)
    rng = np.random.default_rng(6)
    one, two = (" ".join(random_words(rng, 100)) for _ in range(2))
    assert removed_of(StandIn(tmp_path, [[one, two], [one], [two, one]])) == [[], [0], [0, 1]]


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_long_texts_are_hashed_in_chunks_without_a_gap(tmp_path, monkeypatch, chunk):
    shingles = np.random.default_rng(7).integers(0, 2**31, (200, 1)).astype(np.uint64)
    block = minhash.signature_block(tmp_path)
    whole = block.get_signature(shingles)
    monkeypatch.setattr(minhash, "SHINGLES_AT_A_TIME", chunk)
    assert block.get_signature(shingles) == whole
