"""Held-out text never meets the training rows."""

import numpy as np
import pytest

from pod.data import DataArgs, held_out_tokens, long_sequences, prepare

FRACTION = 0.3


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
    assert 20 < report["other_split"] < 60 and report["other_split"] + report["documents"] == 120
    held = held_out_tokens(args, tokenizer, 900)
    assert held.shape == (900,) and held.dtype == np.int64
    sequences = long_sequences(args, tokenizer, 8, 48, seed=1)
    assert sequences.shape == (8, 48) and sequences.dtype == np.int64
    # Words are random, so a shared run of four tokens means a shared document.
    assert not training & fourgrams(held)
    assert not training & fourgrams(sequences.reshape(-1))


def test_held_out_tokens_are_whole_documents_in_a_fixed_order(args, tokenizer, make_text):
    held = held_out_tokens(args, tokenizer, 800).tolist()
    assert held_out_tokens(args, tokenizer, 300).tolist() == held[:300]
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
    with pytest.raises(
        ValueError, match=r"1000000 held-out tokens asked for, \d+ available .*held_out_fraction"
    ):
        held_out_tokens(args, tokenizer, 10**6)
    with pytest.raises(ValueError, match="1000 sequences of 64 tokens asked for"):
        long_sequences(args, tokenizer, 1000, 64)
    args.held_out_fraction = 0
    with pytest.raises(ValueError, match="held_out_fraction is 0, so nothing is held out"):
        held_out_tokens(args, tokenizer, 10)
