"""Held-out text never meets the training rows.

It is all that explore, training and evaluation read beside them.
"""

import shutil

import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing

from pod.data import DataArgs, held_out_documents, long_sequences, prepare, source_documents
from pod.data.read.documents import Document, SourceReport
from pod.data.run.job import Job
from pod.data.run.read_sources import documents_of, encode
from pod.data.tokens.tokenizers import BoundaryTokens, identity
from pod.tokenizer import load_tokenizer

SIZES = np.random.default_rng(3).integers(10, 90, 120)
pytestmark = pytest.mark.usefixtures("no_pictures")


@pytest.fixture
def args(corpus):
    return settings(corpus(SIZES))


def settings(*sources, **changes):
    options = {"context_length": 64, "shortest_interval": 16, "target_tokens": 10**6, "held_out_tokens": 600}
    return DataArgs(sources=list(map(str, sources)), workers=1, **{**options, **changes})


@pytest.fixture
def texts(tokenizer, make_text):
    """Ids of the documents of the corpus."""
    return [tokenizer(make_text(int(size), seed))["input_ids"] for seed, size in enumerate(SIZES)]


def trained(data):
    return [document for row in range(len(data)) for document in data.documents(row)]


def fourgrams(tokens):
    tokens = [int(token) for token in tokens]
    return {tuple(tokens[at : at + 4]) for at in range(len(tokens) - 3)}


def test_held_out_and_training_are_disjoint_and_complete(args, tokenizer, tmp_path, texts):
    data = prepare(args, tokenizer, tmp_path / "data")
    held = held_out_documents(data.path, tokenizer)
    assert sum(min(len(one), 64) for one in held[:-1]) < 600 <= sum(min(len(one), 64) for one in held)
    assert {tuple(one.tolist()) for one in held} < set(map(tuple, texts))
    # Words are random, so a shared run of four tokens means a shared document.
    training = set().union(*map(fourgrams, trained(data)))
    assert not training & set().union(*map(fourgrams, held))
    rest = [len(one) % 64 for one in texts if len(one) % 64 == 1]  # nothing to predict
    assert sum(map(len, held)) + sum(map(len, trained(data))) == sum(map(len, texts)) - sum(rest)
    told = data.manifest["held_out"]
    assert (told["documents"], told["tokens"]) == (len(held), sum(map(len, held)))


def test_another_seed_holds_out_the_same_text_when_all_is_read(args, tokenizer, tmp_path):
    contents = []
    for seed in (0, 5):
        prepare(args, tokenizer, tmp_path / str(seed), seed=seed)
        contents.append([one.tolist() for one in held_out_documents(tmp_path / str(seed))])
    assert contents[0] == contents[1] and len(contents[0]) > 9


def test_less_is_the_beginning_of_more(args, tokenizer, tmp_path):
    more = held_out_documents(prepare(args, tokenizer, tmp_path / "more").path)
    args.held_out_tokens = 200
    less = held_out_documents(prepare(args, tokenizer, tmp_path / "less").path)
    assert 2 < len(less) < len(more)
    assert [one.tolist() for one in less] == [one.tolist() for one in more[: len(less)]]


def test_at_most_a_fifth_of_a_small_corpus_is_held_out(args, tokenizer, tmp_path):
    args.held_out_tokens = 10**6
    held = held_out_documents(prepare(args, tokenizer, tmp_path / "data").path)
    assert 10 < len(held) < 36
    args.held_out_tokens = 0
    assert held_out_documents(prepare(args, tokenizer, tmp_path / "none").path) == []


def test_documents_longer_than_the_context_are_held_out_whole(corpus, tokenizer, tmp_path, make_text):
    args = settings(corpus([200] * 120), held_out_tokens=640)
    held = held_out_documents(prepare(args, tokenizer, tmp_path / "data").path)
    assert len(held) == 10  # each counts with the 64 tokens of the context
    whole = {tuple(tokenizer(make_text(200, seed))["input_ids"]) for seed in range(120)}
    assert {tuple(one.tolist()) for one in held} < whole


def test_prepared_data_is_closed(args, tokenizer, tmp_path, capsys):
    """Without its sources it is up to date, and gives the same held-out text."""
    prepare(args, tokenizer, tmp_path / "data")
    expected = [one.tolist() for one in held_out_documents(tmp_path / "data")]
    shutil.rmtree(args.sources[0])
    data = prepare(args, tokenizer, tmp_path / "data")
    assert "is up to date" in capsys.readouterr().out and len(data)
    assert [one.tolist() for one in held_out_documents(tmp_path / "data", tokenizer)] == expected
    args.held_out_tokens = 100  # less than there is
    prepare(args, tokenizer, tmp_path / "data")
    assert "is up to date" in capsys.readouterr().out
    args.held_out_tokens = 700
    with pytest.raises(ValueError, match="does not exist here: give a file"):
        prepare(args, tokenizer, tmp_path / "data", overwrite=True)


def test_held_out_text_that_cannot_be_read_is_one_line(args, tokenizer, byte_tokenizer, tmp_path):
    with pytest.raises(ValueError, match=r"has no manifest.json: run `pod data` first"):
        held_out_documents(tmp_path / "data")
    prepare(args, tokenizer, tmp_path / "data")
    with pytest.raises(ValueError, match="prepared with another tokenizer than the model's"):
        held_out_documents(tmp_path / "data", byte_tokenizer)
    file = tmp_path / "data" / "held_out.tokens.bin"
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(ValueError, match=r"held_out.tokens.bin has 200 bytes, but the manifest says \d+"):
        held_out_documents(tmp_path / "data")


def test_long_documents_come_first_and_nothing_overlaps(args, tokenizer, texts):
    documents = source_documents(args.sources, tokenizer)
    assert sorted(one.tolist() for one in documents) == sorted(texts)
    long = int((SIZES >= 48).sum())
    sequences = long_sequences(documents, long + 20, 48, seed=2)
    assert sequences.shape == (long + 20, 48) and sequences.dtype == np.int64
    heads = {tuple(text[:48]) for text in texts if len(text) >= 48}
    assert {tuple(sequence) for sequence in sequences[:long].tolist()} == heads
    grams = [gram for sequence in sequences for gram in fourgrams(sequence)]
    assert len(grams) == len(set(grams)) == (long + 20) * 45
    assert (sequences == long_sequences(documents, long + 20, 48, seed=2)).all()
    assert (sequences != long_sequences(documents, long + 20, 48, seed=3)).any()


def test_all_text_makes_as_many_sequences_as_it_has_tokens_for(args, tokenizer):
    """What is held out, as many tokens as are asked for, always suffices."""
    documents = source_documents(args.sources, tokenizer)
    total = sum(map(len, documents))
    assert len(long_sequences(documents, total // 40, 40)) == total // 40
    with pytest.raises(
        ValueError, match=f"{total // 40 + 1} sequences of 40 tokens, but only {total // 40} are available"
    ):
        long_sequences(documents, total // 40 + 1, 40)


def test_split_is_a_property_of_the_opening(make_text):
    texts = [make_text(60, seed) for seed in range(1000)]
    keys = [identity(Document(text, "", "")).held_out_key for text in texts]
    keys = np.array(keys, dtype=np.uint64) / 2**64
    assert 60 < (keys < 0.1).sum() < 140 and 450 < (keys < 0.5).sum() < 550
    # Layout, marks, case and the end of a text do not move it.
    for text in texts[:50]:
        other = "\n ** " + text.upper().replace(" ", ",\n ") + " another end"
        one, two = (identity(Document(same, "", "")) for same in (text, other))
        assert one.held_out_key == two.held_out_key


@pytest.mark.parametrize(
    "policy, before, after",
    [("none", [], []), ("bos", [1], []), ("eos", [], [2]), ("bos+eos", [1], [2]), ("tokenizer", [], [])],
)
def test_boundary_policies(corpus, tokenizer, make_text, policy, before, after):
    args = DataArgs(sources=[str(corpus([5, 7]))], boundary_tokens=policy, target_tokens=4096)
    job = Job(args, tokenizer, "unused")
    found = encode(job, list(documents_of(job, job.work_shards[0], SourceReport(""))))
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
