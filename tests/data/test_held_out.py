"""Held-out text never meets the training rows."""

from dataclasses import replace

import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing

from pod.data import DataArgs, held_out, long_sequences, prepare, units
from pod.data.documents import Document
from pod.data.tokenizers import BoundaryTokens, identity, load_tokenizer

FRACTION = 0.3


def head(args, tokenizer, num_tokens, prepared=None):
    """The first tokens of the held-out documents, in the order of their places."""
    documents = held_out._split_documents(args, tokenizer, "held_out", prepared)
    return np.concatenate(documents)[:num_tokens].astype(np.int64)


@pytest.fixture
def args(corpus):
    sizes = np.random.default_rng(3).integers(10, 90, 120)
    return DataArgs(
        sources=[str(corpus(sizes))], context_length=64, shortest_interval=16, held_out_fraction=FRACTION
    )


def fourgrams(tokens):
    tokens = [int(token) for token in tokens]
    return {tuple(tokens[at : at + 4]) for at in range(len(tokens) - 3)}


def test_held_out_and_training_are_disjoint_and_complete(args, tokenizer, tmp_path, make_text):
    data = prepare(args, tokenizer, tmp_path / "data")
    training = set()
    for index in range(len(data)):
        row = data[index]
        for doc in range(int(row["doc_ids"].max()) + 1):
            training |= fourgrams(row["input_ids"][row["doc_ids"] == doc])
    report = data.manifest["read"]
    assert 20 < report["other_split"] < 60 and report["other_split"] + report["train_documents"] == 120
    held = head(args, tokenizer, 900)
    assert held.shape == (900,) and held.dtype == np.int64
    sequences = long_sequences(args, tokenizer, 8, 48, seed=1)
    assert sequences.shape == (8, 48) and sequences.dtype == np.int64
    # Words are random, so a shared run of four tokens means a shared document.
    assert not training & fourgrams(held)
    assert not training & fourgrams(sequences.reshape(-1))


def test_held_out_tokens_are_whole_documents_in_a_fixed_order(args, tokenizer, make_text):
    held = head(args, tokenizer, 800).tolist()
    assert head(args, tokenizer, 300).tolist() == held[:300]
    sizes = np.random.default_rng(3).integers(10, 90, 120)
    texts = [tokenizer(make_text(int(size), seed))["input_ids"] for seed, size in enumerate(sizes)]
    at = 0
    while at < 800:
        matches = [text for text in texts if text[: 800 - at] == held[at : at + len(text)]]
        assert len(matches) == 1
        at += len(matches[0])


def test_long_documents_come_first_and_nothing_overlaps(args, tokenizer, make_text):
    sizes = np.random.default_rng(3).integers(10, 90, 120)
    texts = [tokenizer(make_text(int(size), seed))["input_ids"] for seed, size in enumerate(sizes)]
    long = sum(size >= 48 for size in sizes)
    sequences = long_sequences(args, tokenizer, long + 20, 48, seed=2, split="all")
    heads = {tuple(text[:48]) for text in texts if len(text) >= 48}
    assert {tuple(sequence) for sequence in sequences[:long].tolist()} == heads
    grams = [gram for sequence in sequences for gram in fourgrams(sequence)]
    assert len(grams) == len(set(grams)) == (long + 20) * 45
    assert (sequences == long_sequences(args, tokenizer, long + 20, 48, seed=2, split="all")).all()
    assert (sequences != long_sequences(args, tokenizer, long + 20, 48, seed=3, split="all")).any()
    with pytest.raises(ValueError, match=f"{long + 20} sequences of 48 tokens asked for, {long} available"):
        long_sequences(args, tokenizer, long + 20, 48, split="all", short_documents="skip")


def test_plain_sources_use_all_documents(args, tokenizer):
    everything = long_sequences(args.sources, tokenizer, 5, 40, seed=0)
    assert (everything == long_sequences(args, tokenizer, 5, 40, seed=0, split="all")).all()


def test_too_much_is_refused(args, tokenizer):
    with pytest.raises(ValueError, match="1000 sequences of 64 tokens asked for"):
        long_sequences(args, tokenizer, 1000, 64)
    args.held_out_fraction = 0
    with pytest.raises(ValueError, match="held_out_fraction is 0, so nothing is held out"):
        head(args, tokenizer, 10)


@pytest.fixture
def unread(monkeypatch):
    """Reading the sources is an error from `unread()` on."""

    def forbid():
        monkeypatch.setattr(held_out, "_chosen", lambda *_: pytest.fail("read the sources again"))

    return forbid


def test_prepared_data_gives_the_same_held_out_text(args, tokenizer, tmp_path, unread):
    args = replace(args, boundary_tokens="eos", max_documents=100)
    prepare(args, tokenizer, tmp_path / "data")
    tokens = head(args, tokenizer, 700)
    sequences = long_sequences(args, tokenizer, 8, 48, seed=1)
    unread()
    found = head(args, tokenizer, 700, prepared=tmp_path / "data")
    assert found.dtype == np.int64 and found.tolist() == tokens.tolist()
    assert head(args, tokenizer, 31, prepared=tmp_path / "data").tolist() == tokens[:31].tolist()
    found = long_sequences(args, tokenizer, 8, 48, seed=1, prepared=str(tmp_path / "data"))
    assert found.dtype == np.int64 and found.tolist() == sequences.tolist()
    # Settings of the draw do not matter, those of reading do.
    other = replace(args, target_tokens=100, context_length=32, packing="one_per_row")
    assert head(other, tokenizer, 700, prepared=tmp_path / "data").tolist() == tokens.tolist()


def test_prepared_data_of_other_settings_or_damaged_is_not_used(args, tokenizer, tmp_path, corpus, make_text):
    prepare(args, tokenizer, tmp_path / "data")
    for change in ({"boundary_tokens": "eos"}, {"max_documents": 100}):
        changed = replace(args, **change)
        tokens = head(changed, tokenizer, 500, prepared=tmp_path / "data").tolist()
        assert tokens == head(changed, tokenizer, 500).tolist()
        assert tokens != head(args, tokenizer, 500).tolist()
    assert len(head(replace(args, held_out_fraction=0.02), tokenizer, 500, prepared=tmp_path / "data")) < 500
    expected = head(args, tokenizer, 500).tolist()
    assert head(args, tokenizer, 500, prepared=tmp_path / "nothing").tolist() == expected
    file = tmp_path / "data" / "held_out.tokens.bin"
    file.write_bytes(file.read_bytes()[:200])
    assert head(args, tokenizer, 500, prepared=tmp_path / "data").tolist() == expected
    everything = long_sequences(args, tokenizer, 20, 40, split="all", prepared=tmp_path / "data")
    assert (everything == long_sequences(args, tokenizer, 20, 40, split="all")).all()
    (tmp_path / "texts" / "00003.txt").write_text(make_text(90, seed=1234))
    changed = head(args, tokenizer, 10, prepared=tmp_path / "data")
    assert changed.tolist() == head(args, tokenizer, 10).tolist()


def test_sources_are_read_as_preparation_reads_them(tmp_path, tokenizer, monkeypatch):
    """Identical texts once, max_documents counted behind the filter."""
    texts = ["w1 w2 w3", "w4 w5", "w1 w2 w3", "w6", "w1 w2 w3 ", "w7 w8 w9", "w10 w11"]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text)

    def lengths(**settings):
        args = DataArgs(sources=[str(tmp_path)], **settings)
        documents = held_out._split_documents(args, tokenizer, "all", None)
        return sorted(map(len, documents))

    assert lengths() == [1, 2, 2, 3, 3, 3]
    assert lengths(deduplicate=False) == [1, 2, 2, 3, 3, 3, 3]
    assert lengths(document_filter="data_helpers:five_characters") == [2, 2, 3, 3, 3]
    assert lengths(document_filter="data_helpers:five_characters", max_documents=4) == [2, 3, 3]
    with pytest.raises(ValueError, match="holds no text"):
        lengths(text_field="body", include=["0.txt"], document_filter="data_helpers:none")
    monkeypatch.setattr(units, "GROUP_BYTES", 12)  # several units, over which max_documents counts on
    assert len(units.plan_units(DataArgs(sources=[str(tmp_path)]))) > 3
    assert lengths(document_filter="data_helpers:five_characters", max_documents=4) == [2, 3, 3]
    assert lengths(max_documents=6, deduplicate=False) == [1, 2, 3, 3, 3, 3]


def test_split_is_a_property_of_the_opening(make_text):
    texts = [make_text(60, seed) for seed in range(1000)]
    places = np.array([identity(Document(text, "", ""))[0] for text in texts], dtype=np.uint64) / 2**64
    assert 60 < (places < 0.1).sum() < 140 and 450 < (places < 0.5).sum() < 550
    # Layout, marks, case and the end of a text do not move it.
    for text in texts[:50]:
        other = "\n ** " + text.upper().replace(" ", ",\n ") + " another end"
        assert identity(Document(text, "", ""))[0] == identity(Document(other, "", ""))[0]


@pytest.mark.parametrize(
    "policy, before, after",
    [("none", [], []), ("bos", [1], []), ("eos", [], [2]), ("bos+eos", [1], [2]), ("tokenizer", [], [])],
)
def test_boundary_policies(corpus, tokenizer, make_text, policy, before, after):
    args = DataArgs(sources=[str(corpus([5, 7]))], boundary_tokens=policy)
    found = held_out._split_documents(args, tokenizer, "all", None)
    words = [
        tokenizer.convert_tokens_to_ids(make_text(size, seed).split()) for seed, size in enumerate((5, 7))
    ]
    assert sorted(tokens.tolist() for tokens in found) == sorted([*before, *ids, *after] for ids in words)


def test_boundary_tokens_of_the_tokenizer_itself(tmp_path, tokenizer, byte_tokenizer):
    tokenizer.save_pretrained(tmp_path)
    copy = load_tokenizer(tmp_path)
    copy.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", 1)]
    )
    assert BoundaryTokens.from_policy("tokenizer", copy) == BoundaryTokens((1,), ())
    with pytest.raises(ValueError, match="boundary_tokens='bos' but the tokenizer has no bos token"):
        BoundaryTokens.from_policy("bos", byte_tokenizer)
