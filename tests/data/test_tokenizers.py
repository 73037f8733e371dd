"""Encoding, identities, boundary tokens, and special tokens inside texts.

Also what load_tokenizer makes of a path.
"""

import copy
import hashlib
import json
import re

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from pod.data.read.documents import Document
from pod.data.tokens.tokenizers import (
    BoundaryTokens,
    Encoder,
    identity,
    tokenizer_sha256,
    vocabulary_size,
)
from pod.tokenizer import load_tokenizer


@pytest.fixture
def chat_tokenizer(byte_tokenizer):
    """Byte-level BPE with special tokens, one of them for unknown words.

    One added word is not special.
    """
    backend = Tokenizer.from_str(byte_tokenizer.backend_tokenizer.to_str())
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<|endoftext|>"
    )
    tokenizer.add_tokens(["ordinaryword"])
    return tokenizer


def plain(tokenizer, texts):
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


def ids(arrays):
    assert all(array.dtype == np.uint32 and array.ndim == 1 for array in arrays)
    return [array.tolist() for array in arrays]


def test_identity_of_a_tokenizer_keeps_its_value(tokenizer):
    """Checkpoints and manifests hold it."""
    from tokenizers import decoders

    vocabulary = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(
        models.BPE(vocab=vocabulary | {"Ġd": 256, "Ġde": 257}, merges=[("Ġ", "d"), ("Ġd", "e")])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    assert tokenizer_sha256(tokenizer) == "9640b9c19500bdcfbc42978b969233e3c7f79ff643e63bf4d6e957054722c55b"
    assert (
        tokenizer_sha256(PreTrainedTokenizerFast(tokenizer_object=backend))
        == "ac826e493b8fd584daf1066e56be3d5f4b5f17f48220dacbc8d6375ac8120f00"
    )


@pytest.mark.parametrize("kind", ["byte_tokenizer", "tokenizer", "chat_tokenizer"])
def test_encoder_is_the_tokenizer_itself(request, kind, hard_texts):
    tokenizer = request.getfixturevalue(kind)
    expected = plain(tokenizer, hard_texts)
    encoder = Encoder(tokenizer)
    assert ids(encoder(hard_texts)) == expected
    assert ids(encoder(tuple(hard_texts[:1]))) == expected[:1]
    assert encoder([]) == []


def test_encoder_heeds_no_truncation_and_no_padding(byte_tokenizer, tmp_path):
    texts = ["a", "def f(x): return x" * 20, ""]
    expected = plain(byte_tokenizer, texts)
    backend = Tokenizer.from_str(byte_tokenizer.backend_tokenizer.to_str())
    backend.enable_truncation(3)
    backend.enable_padding(length=7)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    assert tokenizer.backend_tokenizer.truncation is not None
    encoder = Encoder(tokenizer)
    assert ids(encoder(texts)) == expected
    tokenizer(texts, truncation=True, max_length=2, padding="max_length")
    assert ids(encoder(texts)) == expected
    # post-processors with special tokens do not apply either
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="! $A", special_tokens=[("!", 0)])
    assert ids(encoder(texts)) == expected


def test_encoder_takes_no_shortcut_past_a_tokenizer_that_does_more(byte_tokenizer, monkeypatch):
    class Shouting(PreTrainedTokenizerFast):
        def _encode_plus(self, text, **options):
            return super()._encode_plus([item.upper() for item in text], **options)

    texts = ["def f", "x"]
    shouting = Shouting(tokenizer_object=byte_tokenizer.backend_tokenizer)
    assert ids(Encoder(shouting)(texts)) == plain(byte_tokenizer, ["DEF F", "X"])
    # … and takes it otherwise: the call that also works out offsets is not used.
    encoder = Encoder(byte_tokenizer)
    monkeypatch.setattr(PreTrainedTokenizerFast, "__call__", None)
    assert ids(encoder(texts)) == [
        encoding.ids for encoding in byte_tokenizer.backend_tokenizer.encode_batch(texts)
    ]


@pytest.mark.parametrize("kind", ["byte_tokenizer", "tokenizer"])
def test_surrogates_and_nuls(request, kind):
    tokenizer = request.getfixturevalue(kind)
    texts = ["w1 \ud83d\ude00 w2", "\udc00", "w3", "a\ud800", "w4\x00 \x00"]
    repaired = ["w1 😀 w2", "\ufffd", "w3", "a\ufffd", "w4\x00 \x00"]
    assert ids(Encoder(tokenizer)(texts)) == plain(tokenizer, repaired)
    with pytest.raises(TypeError):
        Encoder(tokenizer)(["w1", 5])


def test_special_tokens_spelled_in_a_text(chat_tokenizer, byte_tokenizer):
    texts = ["a</s>b", "plain < /s >", "<|endoftext|> twice <|endoftext|>", "ordinaryword", "<s", "<s>"]
    encoder = Encoder(chat_tokenizer)
    encoded = ids(encoder(texts))
    assert encoded == plain(chat_tokenizer, texts)
    end = chat_tokenizer.eos_token_id
    assert encoded[0] == [*plain(chat_tokenizer, ["a"])[0], end, *plain(chat_tokenizer, ["b"])[0]]
    assert sum(encoder.holds_special) == 3
    encoder(texts[:2])
    assert encoder.holds_special == [True, False]
    # transformers' own switch turns it off, in whatever state the backend was left.
    chat_tokenizer.split_special_tokens = True
    encoder = Encoder(chat_tokenizer)
    assert ids(encoder(texts)) == plain(chat_tokenizer, texts)
    assert ids(encoder(texts[:3])) == plain(byte_tokenizer, texts[:3])
    assert not any(encoder.holds_special)
    chat_tokenizer(["a"], split_special_tokens=False)
    assert ids(encoder(texts[:3])) == plain(byte_tokenizer, texts[:3])
    chat_tokenizer.split_special_tokens = False
    assert ids(encoder(texts)) == encoded


def test_unknown_words_are_not_counted_as_special_tokens(tokenizer):
    encoder = Encoder(tokenizer)
    assert ids(encoder(["nobody knows w1", "w1 <unk>", "w1 <eos>"])) == [[0, 0, 4], [4, 0], [4, 2]]
    assert encoder.holds_special == [False, True, True]


def test_no_text_has_more_tokens_than_are_foretold(byte_tokenizer, tokenizer, hard_texts):
    """Also where a tokenizer rewrites what it reads."""
    from tokenizers import normalizers

    growing = copy.deepcopy(byte_tokenizer)
    growing.backend_tokenizer.normalizer = normalizers.NFKD()
    for one in (byte_tokenizer, tokenizer, growing):
        encoder, texts = Encoder(one), [*hard_texts, "\ufdfa" * 50]
        for text, found in zip(texts, encoder(texts), strict=True):
            assert len(found) <= encoder.most_tokens(len(text.encode()))
    assert len(Encoder(growing)(["\ufdfa"])[0]) > Encoder(byte_tokenizer).most_tokens(3)


def key_of_opening(text):
    """The definition, spelled out again."""
    opening = " ".join(re.findall(r"[^\W_]+", text[:1920].lower())[:48])
    return int(hashlib.sha256(opening.encode("utf-8", "surrogatepass")).hexdigest()[:16], 16)


def test_identity_of_a_document(make_text, hard_texts):
    texts = [*hard_texts, *(make_text(length, seed=length) for length in (1, 47, 48, 49, 500)), "\ud800 a"]
    for text in texts:
        key, digest, num_bytes = identity(Document(text, "s", "n"))
        assert key == key_of_opening(text) < 2**64
        expected = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8]
        assert digest.to_bytes(8, "little") == expected
        assert num_bytes == len(text.encode("utf-8", "surrogatepass"))
    assert len({identity(Document(text, "s", "n"))[1] for text in texts}) == len(texts)
    key, digest, num_bytes = identity(Document(texts[-2], "other", "name", origin="elsewhere"))
    copy = identity(Document("\n * " + texts[-2].upper().replace(" ", ", ") + " end", "s", "n"))
    assert copy[0] == key and copy[1] != digest


def test_identity_of_a_document_of_tokens():
    tokens = np.arange(200, dtype=np.uint32) + 70_000
    key, digest, size = identity(Document("", "s", "n", tokens))
    raw = b"".join(int(token).to_bytes(4, "little") for token in tokens)
    assert digest.to_bytes(8, "little") == hashlib.sha256(raw).digest()[:8] and size == len(tokens)
    assert key == int(hashlib.sha256(raw[:256]).hexdigest()[:16], 16)
    other = tokens.copy()
    other[64] += 1
    assert identity(Document("", "s", "n", other))[0] == key
    assert identity(Document("", "s", "n", other))[1] != digest
    other[63] += 1
    assert identity(Document("", "s", "n", other))[0] != key
    strided = np.repeat(tokens, 2)[::2]
    assert identity(Document("", "s", "n", strided)) == (key, digest, 200)
    # 4,000 documents divide evenly over keys.
    keys = [identity(Document(f"text number {n}", "s", "n"))[0] for n in range(4000)]
    assert 300 < sum(key < 2**64 // 10 for key in keys) < 500


def test_identity_of_a_tokenizer_survives_saving_and_use(tmp_path, byte_tokenizer, tokenizer):
    sha256 = tokenizer_sha256(byte_tokenizer)
    byte_tokenizer.save_pretrained(tmp_path)
    byte_tokenizer(["a", "longer text"], truncation=True, max_length=2)
    Encoder(byte_tokenizer)(["more"])
    assert sha256 == tokenizer_sha256(load_tokenizer(tmp_path)) == tokenizer_sha256(byte_tokenizer)
    assert sha256 != tokenizer_sha256(tokenizer)
    assert vocabulary_size(tokenizer) == 5003


@pytest.mark.parametrize(
    "policy, before, after",
    [
        ("none", (), ()),
        ("bos", (1,), ()),
        ("eos", (), (2,)),
        ("bos+eos", (1,), (2,)),
        ("tokenizer", (1, 1), (2,)),
    ],
)
def test_boundary_policies(tokenizer, tmp_path, policy, before, after):
    tokenizer.save_pretrained(tmp_path)
    copy = load_tokenizer(tmp_path)
    copy.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> <bos> $A <eos>", special_tokens=[("<bos>", 1), ("<eos>", 2)]
    )
    assert BoundaryTokens.from_policy(policy, copy) == BoundaryTokens(before, after)


def test_missing_boundary_token_is_named(byte_tokenizer):
    for policy, missing in (("bos", "bos"), ("eos", "eos"), ("bos+eos", "bos")):
        with pytest.raises(
            ValueError,
            match=rf"boundary_tokens='{re.escape(policy)}' but the tokenizer has no {missing} token",
        ):
            BoundaryTokens.from_policy(policy, byte_tokenizer)


def test_boundary_tokens_that_cannot_be_told_are_refused(byte_tokenizer):
    class Lower:
        def __call__(self, text, add_special_tokens):
            return {"input_ids": [7, 8] if add_special_tokens else [1]}

    with pytest.raises(
        ValueError, match=r"encodes 'a' as \[7, 8\] with special tokens and as \[1\] without them: set bos"
    ):
        BoundaryTokens.from_policy("tokenizer", Lower())


def test_paths_are_loaded_by_what_they_are(chat_tokenizer, tmp_path, monkeypatch):
    chat_tokenizer.save_pretrained(tmp_path)
    sha256 = tokenizer_sha256(chat_tokenizer)
    folder, beside = load_tokenizer(tmp_path), load_tokenizer(str(tmp_path / "tokenizer.json"))
    assert sha256 == tokenizer_sha256(folder) == tokenizer_sha256(beside)
    assert folder.eos_token == beside.eos_token == "</s>"
    (tmp_path / "tokenizer_config.json").unlink()
    alone = load_tokenizer(tmp_path / "tokenizer.json")
    assert sha256 == tokenizer_sha256(alone) and alone.eos_token is None
    assert load_tokenizer(alone) is alone
    calls = []

    def from_pretrained(source, **options):
        calls.append((str(source), options))
        return copy.copy(alone)

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", from_pretrained)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    load_tokenizer(tmp_path / "model.gguf")
    load_tokenizer(tmp_path, gguf_file="model.gguf")
    load_tokenizer("owner/name")
    no_code = {"trust_remote_code": False}
    assert calls == [
        (str(tmp_path), no_code | {"gguf_file": "model.gguf"}),
        (str(tmp_path), no_code | {"gguf_file": "model.gguf"}),
        ("owner/name", no_code),
    ]


def test_code_of_a_checkpoint_is_not_run(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "own_config.OwnConfig"}})
    )
    (tmp_path / "own_config.py").write_text("raise SystemExit('this ran')\n")
    assert tokenizer_sha256(load_tokenizer(tmp_path)) == tokenizer_sha256(tokenizer)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own_config.Own", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="no tokenizer in .*contains custom code"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("gone/tokenizer.model", None, r"no such file\): give its folder, its hub id or its tokenizer.json"),
        ("gone.json", None, "no such file"),
        ("empty/config.json", b"{}", "no tokenizer in .*empty"),
        ("bad/tokenizer.json", b"{", "no tokenizer in .*bad"),
        ("bad/tokenizer.model", b"{", "no tokenizer in .*bad"),
    ],
)
def test_what_is_no_tokenizer_is_named_in_one_line(tmp_path, name, content, message):
    path = tmp_path / name
    if content is not None:
        path.parent.mkdir()
        path.write_bytes(content)
        path = path.parent
    with pytest.raises(ValueError, match=message) as raised:
        load_tokenizer(path)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 500
