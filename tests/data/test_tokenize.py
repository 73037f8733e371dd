"""Boundary tokens, tokenizer identity, duplicates, the held-out split, policies for long and short documents."""

import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing

from pod.data import DataArgs, tokenizer_sha256
from pod.data.tokenize import (
    BoundaryTokens,
    ReadReport,
    in_split,
    load_tokenizer,
    read_into_spool,
    select_documents,
    split_position,
    tokenize_documents,
    vocabulary_size,
)


def spooled(args, tokenizer, folder):
    report = ReadReport()
    spool, pieces = read_into_spool(args, tokenizer, folder, report)
    documents = [
        spool.tokens(start, start + length).tolist()
        for start, length in zip(pieces.starts, pieces.lengths, strict=True)
    ]
    return documents, pieces, report


def words(text, tokenizer):
    return tokenizer.convert_tokens_to_ids(text.split())


@pytest.mark.parametrize(
    "policy, before, after",
    [("none", (), ()), ("bos", (1,), ()), ("eos", (), (2,)), ("bos+eos", (1,), (2,)), ("tokenizer", (), ())],
)
def test_boundary_policies(corpus, tokenizer, make_text, tmp_path, policy, before, after):
    args = DataArgs(sources=[str(corpus([5, 7]))], boundary_tokens=policy, held_out_fraction=0, context_length=32,
                    shortest_interval=8)  # fmt: skip
    documents, _, report = spooled(args, tokenizer, tmp_path)
    expected = [
        [*before, *words(make_text(size, seed), tokenizer), *after] for seed, size in enumerate((5, 7))
    ]
    assert documents == expected
    assert report.documents == 2 and report.tokens == sum(map(len, expected))


def test_boundary_tokens_of_the_tokenizer_itself(tmp_path, tokenizer):
    tokenizer.save_pretrained(tmp_path)
    copy = load_tokenizer(tmp_path)
    copy.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", 1)]
    )
    assert BoundaryTokens.from_policy("tokenizer", copy) == BoundaryTokens((1,), ())


def test_missing_boundary_token_is_named(byte_tokenizer):
    with pytest.raises(ValueError, match="boundary_tokens='bos' but the tokenizer has no bos token"):
        BoundaryTokens.from_policy("bos", byte_tokenizer)


def test_tokenizer_identity_survives_saving_and_use(tmp_path, byte_tokenizer, tokenizer):
    identity = tokenizer_sha256(byte_tokenizer)
    byte_tokenizer.save_pretrained(tmp_path)
    byte_tokenizer(["a", "longer text"], truncation=True, max_length=2)
    assert identity == tokenizer_sha256(load_tokenizer(tmp_path)) == tokenizer_sha256(byte_tokenizer)
    assert identity != tokenizer_sha256(tokenizer)
    assert vocabulary_size(tokenizer) == 5003
    with pytest.raises(ValueError, match="no tokenizer in .*nothing.*: give its folder or hub id"):
        load_tokenizer(tmp_path / "nothing")


def test_batches_keep_order_and_tokens(corpus, tokenizer, make_text):
    sizes = np.random.default_rng(0).integers(1, 40, 600)
    args = DataArgs(sources=[str(corpus(sizes))], deduplicate=False)
    documents = select_documents(args, "all", ReadReport())
    result = [
        tokens.tolist() for _, tokens in tokenize_documents(documents, tokenizer, BoundaryTokens((), ()))
    ]
    assert result == [words(make_text(int(size), seed), tokenizer) for seed, size in enumerate(sizes)]


def test_identical_texts_are_kept_once(tmp_path, tokenizer):
    for number, text in enumerate(["w1 w2 w3", "w4 w5", "w1 w2 w3", "w1 w2 w3 "]):
        (tmp_path / f"{number}.txt").write_text(text)
    report = ReadReport()
    kept = list(select_documents(DataArgs(sources=[str(tmp_path)]), "all", report))
    assert [document.text for document in kept] == [
        "w1 w2 w3",
        "w4 w5",
        "w1 w2 w3 ",
    ] and report.duplicates == 1
    kept = list(select_documents(DataArgs(sources=[str(tmp_path)], deduplicate=False), "all", ReadReport()))
    assert len(kept) == 4


def test_split_is_a_property_of_the_text(make_text):
    texts = [make_text(60, seed) for seed in range(2000)]
    held = [in_split(text, "held_out", 0.1) for text in texts]
    assert 150 < sum(held) < 250
    assert [not flag for flag in held] == [in_split(text, "train", 0.1) for text in texts]
    assert all(in_split(text, "all", 0.1) for text in texts)
    # A larger fraction only adds documents; layout, marks, case and the end of a text do not move it.
    assert all(in_split(text, "held_out", 0.2) for text, flag in zip(texts, held, strict=True) if flag)
    for text in texts[:50]:
        assert split_position(text) == split_position(
            "\n ** " + text.upper().replace(" ", ",\n ") + " another end"
        )


@pytest.mark.parametrize(
    "long_documents, short_documents, expected",
    [
        ("cut", "keep", [16, 16, 16, 16, 8, 16, 5, 3]),
        ("cut", "drop", [16, 16, 16, 16, 8, 16]),
        ("skip", "keep", [16, 5, 3]),
        ("skip", "drop", [16]),
    ],
)
def test_long_and_short_policies(corpus, tokenizer, tmp_path, long_documents, short_documents, expected):
    args = DataArgs(
        sources=[str(corpus([40, 33, 16, 5, 3, 1]))],
        context_length=16,
        shortest_interval=8,
        long_documents=long_documents,
        short_documents=short_documents,
        held_out_fraction=0,
    )
    documents, pieces, _ = spooled(args, tokenizer, tmp_path)
    sizes = [len(document) for document in documents]
    assert sorted(sizes) == sorted(expected)
    left_out = 98 - sum(expected)
    assert pieces.skipped_long_tokens + pieces.dropped_short_tokens == left_out
    assert pieces.cut_documents == (2 if long_documents == "cut" else 0)


def test_cut_pieces_are_the_document(corpus, tokenizer, make_text, tmp_path):
    args = DataArgs(sources=[str(corpus([40]))], context_length=16, shortest_interval=8, held_out_fraction=0)
    documents, _, _ = spooled(args, tokenizer, tmp_path)
    assert [token for document in documents for token in document] == words(
        make_text(40, 0), tokenizer
    ) and list(map(len, documents)) == [
        16,
        16,
        8,
    ]


def test_long_document_under_policy_error_is_named(corpus, tokenizer, tmp_path):
    args = DataArgs(
        sources=[str(corpus([4, 40]))], context_length=16, shortest_interval=8, long_documents="error",
        held_out_fraction=0,
    )  # fmt: skip
    with pytest.raises(
        ValueError, match=r"document .*00001.txt has 40 tokens, the context holds 16: set data.long_doc"
    ):
        read_into_spool(args, tokenizer, tmp_path, ReadReport())
    assert not (tmp_path / "spool.bin").exists()


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"sources": []}, "sources is empty"),
        ({"context_length": 1}, "context_length must be at least 2, got 1"),
        ({"shortest_interval": 4096}, "shortest_interval 4096 is longer than context_length 2048"),
        ({"target_tokens": 100}, "target_tokens 100 is less than one row of 2048"),
        ({"exhausted": "repeat"}, "never ends without target_tokens"),
        ({"max_documents": 0}, "max_documents must be at least 1 or null"),
        ({"held_out_fraction": 1.0}, r"held_out_fraction must be in \[0, 1\), got 1.0"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        DataArgs(**settings)
