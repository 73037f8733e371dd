"""SentencePiece, tiktoken and tekken files against the libraries that define them and against a second implementation."""

import base64
import importlib.util
import json
import sys
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from pod.data import tokenizer_files
from pod.data.tokenizer_files import (
    LLAMA3_PATTERN,
    LLAMA3_SPECIAL_TOKENS,
    TEKKEN_SPECIAL_TOKENS,
    cut_whitespace,
    load_tokenizer_file,
)
from pod.data.tokenizers import (
    BoundaryTokens,
    Encoder,
    load_tokenizer,
    tokenizer_sha256,
    vocabulary_size,
)

TEKKEN_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
)


def real_file(name):
    """A file of the package mistral-common."""
    spec = importlib.util.find_spec("mistral_common")
    path = Path(spec.origin).parent / "data" / name if spec and spec.origin else None
    if path is None or not path.exists():
        pytest.skip(f"mistral-common with {name} is not installed")
    return path


def ids(arrays):
    return [array.tolist() for array in arrays]


# --- SentencePiece ---------------------------------------------------------------------------------------------------


def pieces_by_tokenizers(processor):
    """The same model in the tokenizers library. Of merges that make the same piece the one with the longer left part comes
    first, so that of equal scores the leftmost wins, as in sentencepiece."""
    size = processor.get_piece_size()
    vocabulary = {processor.id_to_piece(number): number for number in range(size)}
    merges = []
    for piece, number in vocabulary.items():
        if not (processor.is_control(number) or processor.is_byte(number) or processor.is_unknown(number)):
            for cut in range(1, len(piece)):
                left, right = piece[:cut], piece[cut:]
                if left in vocabulary and right in vocabulary:
                    merges.append((-processor.get_score(number), -cut, left, right))
    merges.sort()
    model = models.BPE(
        vocabulary, [merge[2:] for merge in merges], unk_token="<unk>", fuse_unk=True, byte_fallback=True
    )
    backend = Tokenizer(model)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return backend


def test_sentencepiece_model_of_mistral(hard_texts):
    sentencepiece = pytest.importorskip("sentencepiece")
    path = real_file("tokenizer.model.v1")
    tokenizer = load_tokenizer(path)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
    expected = [processor.encode(text) for text in hard_texts]
    assert ids(Encoder(tokenizer)(hard_texts)) == expected
    assert tokenizer(hard_texts, add_special_tokens=False)["input_ids"] == expected
    assert expected == [encoding.ids for encoding in pieces_by_tokenizers(processor).encode_batch(hard_texts)]
    assert tokenizer("  a") == {"input_ids": [1, *processor.encode("  a")]}
    assert (tokenizer.bos_token, tokenizer.bos_token_id) == ("<s>", 1)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("</s>", 2)
    assert (tokenizer.unk_token_id, tokenizer.pad_token, tokenizer.pad_token_id) == (0, None, None)
    assert BoundaryTokens.from_policy("tokenizer", tokenizer) == BoundaryTokens((1,), ())
    assert BoundaryTokens.from_policy("bos+eos", tokenizer) == BoundaryTokens((1,), (2,))
    assert vocabulary_size(tokenizer) == len(tokenizer) == tokenizer.vocab_size == 32000
    assert tokenizer.all_special_ids == [0, 1, 2]


def test_sentencepiece_model_has_the_identity_that_transformers_gives_it():
    """So that data from `tokenizer.model` fits a checkpoint of the same model with `tokenizer.json`."""
    sentencepiece = pytest.importorskip("sentencepiece")
    path = real_file("tokenizer.model.v1")
    backend = pieces_by_tokenizers(sentencepiece.SentencePieceProcessor(model_file=str(path)))
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    assert tokenizer_sha256(load_tokenizer(path)) == tokenizer_sha256(fast)


@pytest.fixture(scope="module")
def unigram(tmp_path_factory):
    """A model unlike LLaMA's: unigram, normalising, no bytes, no space in front, symbols of the user."""
    sentencepiece = pytest.importorskip("sentencepiece")
    import inspect
    import io

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(inspect.getsource(json.decoder).splitlines()),
        model_writer=model,
        vocab_size=300,
        model_type="unigram",
        normalization_rule_name="nmt_nfkc_cf",
        add_dummy_prefix=False,
        user_defined_symbols=["[IMG]", "<tool>"],
        bos_id=-1,
        eos_id=3,
        pad_id=0,
        unk_id=1,
        minloglevel=2,
    )
    path = tmp_path_factory.mktemp("unigram") / "spiece.model"
    path.write_bytes(model.getvalue())
    return path


def test_sentencepiece_model_of_another_kind(unigram, hard_texts):
    sentencepiece = pytest.importorskip("sentencepiece")
    tokenizer = load_tokenizer(unigram)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(unigram))
    texts = [*hard_texts, "[IMG] <tool>x</s>"]
    assert ids(Encoder(tokenizer)(texts)) == [processor.encode(text) for text in texts]
    assert processor.piece_to_id("[IMG]") in Encoder(tokenizer)(["[IMG]"])[0].tolist()
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (None, 3, 0)
    assert BoundaryTokens.from_policy("tokenizer", tokenizer) == BoundaryTokens((), ())
    with pytest.raises(ValueError, match="no bos token"):
        BoundaryTokens.from_policy("bos", tokenizer)


# --- tiktoken --------------------------------------------------------------------------------------------------------


def trained(pattern, size):
    """(byte string → rank, tokenizers' own BPE with those tokens), byte-level, trained on a little code."""
    import inspect

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    text = inspect.getsource(json.decoder) + " ".join(f"{' ' * n}x{'=' * n}" for n in range(40)) * 5
    backend.train_from_iterator([text], trainer)
    vocabulary = backend.get_vocab()
    to_byte = {letter: value for value, letter in bytes_to_unicode().items()}
    ranks = {bytes(to_byte[letter] for letter in token): number for token, number in vocabulary.items()}
    assert sorted(ranks.values()) == list(range(size))
    return ranks, backend


def write_tiktoken(path, ranks):
    lines = [b"%s %d\n" % (base64.b64encode(token), rank) for token, rank in ranks.items()]
    path.write_bytes(b"".join(lines))
    return path


@pytest.fixture(scope="module")
def llama3_like():
    return trained(LLAMA3_PATTERN, 700)


@pytest.fixture
def known_700(monkeypatch):
    monkeypatch.setitem(tokenizer_files.TIKTOKEN_KINDS, 700, (LLAMA3_PATTERN, LLAMA3_SPECIAL_TOKENS))


def test_tiktoken_file(llama3_like, known_700, tmp_path, hard_texts):
    tiktoken = pytest.importorskip("tiktoken")
    ranks, backend = llama3_like
    path = write_tiktoken(tmp_path / "tokenizer.model", ranks)
    tokenizer = load_tokenizer(path)
    oracle = tiktoken.Encoding("x", pat_str=LLAMA3_PATTERN, mergeable_ranks=ranks, special_tokens={})
    encoded = ids(Encoder(tokenizer)(hard_texts))
    assert encoded == [oracle.encode_ordinary(text) for text in hard_texts]
    assert encoded == [encoding.ids for encoding in backend.encode_batch(hard_texts)]
    assert encoded != [list(text.encode()) for text in hard_texts]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (700, 701, None)
    assert BoundaryTokens.from_policy("tokenizer", tokenizer) == BoundaryTokens((700,), ())
    assert vocabulary_size(tokenizer) == len(tokenizer) == 956
    # Names of special tokens in a text are text.
    assert max(Encoder(tokenizer)(["<|eot_id|></s><|begin_of_text|>"])[0]) < 700
    # The identity is the one of the same tokenizer in transformers.
    copy = Tokenizer.from_str(backend.to_str())
    copy.add_special_tokens([AddedToken(name, normalized=False) for name in LLAMA3_SPECIAL_TOKENS])
    assert tokenizer_sha256(tokenizer) == tokenizer_sha256(PreTrainedTokenizerFast(tokenizer_object=copy))
    # A folder as the authors publish it: this file, and nothing of transformers.
    (tmp_path / "params.json").write_text("{}")
    assert tokenizer_sha256(load_tokenizer(tmp_path)) == tokenizer_sha256(tokenizer)


def test_special_tokens_of_llama_3():
    """Ids from the model's card and generation settings."""
    pattern, names = tokenizer_files.TIKTOKEN_KINDS[128_000]
    number = {name: 128_000 + place for place, name in enumerate(names)}
    assert pattern == LLAMA3_PATTERN and len(names) == len(number) == 256
    assert number["<|begin_of_text|>"] == 128_000 and number["<|end_of_text|>"] == 128_001
    assert number["<|start_header_id|>"] == 128_006 and number["<|end_header_id|>"] == 128_007
    assert number["<|eot_id|>"] == 128_009 and number["<|reserved_special_token_250|>"] == 128_255


def test_pattern_of_llama_3():
    split = pre_tokenizers.Split(Regex(LLAMA3_PATTERN), behavior="isolated")
    text = "It's 12345678 x_y  (don'T) zwölf\r\n \n\tend...\n  "
    assert [piece for piece, _ in split.pre_tokenize_str(text)] == [
        *("It", "'s", " ", "123", "456", "78", " x", "_y", " ", " (", "don", "'T", ")", " zwölf"),
        *("\r\n \n", "\tend", "...\n", "  "),
    ]


def test_changed_tiktoken_file_is_read_again(llama3_like, known_700, tmp_path):
    """tiktoken's own reader would go on with a copy that it keeps by path."""
    pytest.importorskip("tiktoken")
    ranks, _ = llama3_like
    path = write_tiktoken(tmp_path / "tokenizer.model", ranks)
    before = tokenizer_sha256(load_tokenizer(path))
    names = list(ranks)
    write_tiktoken(path, dict(zip([names[1], names[0], *names[2:]], ranks.values(), strict=True)))
    assert tokenizer_sha256(load_tokenizer(path)) != before


def test_endless_whitespace(llama3_like, known_700, tmp_path):
    """tiktoken panics beyond about a million whitespace characters in a row."""
    pytest.importorskip("tiktoken")
    tokenizer = load_tokenizer(write_tiktoken(tmp_path / "tokenizer.model", llama3_like[0]))
    for text in ("a" + " \t" * 600_000 + "<|eot_id|>", " " * 1_300_000):
        encoded = Encoder(tokenizer)([text])[0]
        assert tokenizer.decode(encoded) == text and max(encoded) < 700
    assert cut_whitespace("ab", 2) == ["ab"]
    assert cut_whitespace("a  b", 2) == ["a  b"]
    assert cut_whitespace("a   b", 2) == ["a  ", " b"]
    assert cut_whitespace("     ", 2) == ["  ", "  ", " "]
    assert cut_whitespace("    b", 2) == ["  ", "  b"]
    assert cut_whitespace("a b c d e", 1) == ["a b c d e"]


# --- tekken ----------------------------------------------------------------------------------------------------------


def write_tekken(path, ranks, *, num_special=20, kept=None, special=None, **config):
    by_rank = sorted(ranks, key=ranks.__getitem__)
    vocab = [
        {"rank": number, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for number, token in enumerate(by_rank)
    ]
    content = {
        "config": {
            "pattern": TEKKEN_PATTERN,
            "num_vocab_tokens": len(vocab),
            "default_vocab_size": num_special + (len(vocab) if kept is None else kept),
            "default_num_special_tokens": num_special,
            "version": "v3",
        }
        | config,
        "vocab": vocab,
    }
    if special is not None:
        content["special_tokens"] = [
            {"rank": rank, "token_str": name, "is_control": True} for rank, name in enumerate(special)
        ]
    path.write_text(json.dumps(content))
    return path


@pytest.fixture(scope="module")
def tekken_like():
    return trained(TEKKEN_PATTERN, 600)


@pytest.mark.parametrize("kept", [600, 450])
def test_tekken_file(tekken_like, tmp_path, hard_texts, kept):
    """Files list more tokens than the model uses: the last ones do not count."""
    pytest.importorskip("tiktoken")
    ranks, backend = tekken_like
    tokenizer = load_tokenizer(write_tekken(tmp_path / "tekken.json", ranks, num_special=30, kept=kept))
    settings = json.loads(backend.to_str())
    used = {token for token, number in backend.get_vocab().items() if number < kept}
    settings["model"]["vocab"] = {
        token: number + 30 for token, number in backend.get_vocab().items() if token in used
    }
    settings["model"]["merges"] = [pair for pair in settings["model"]["merges"] if "".join(pair) in used]
    oracle = Tokenizer.from_str(json.dumps(settings))
    encoded = ids(Encoder(tokenizer)(hard_texts))
    assert encoded == [encoding.ids for encoding in oracle.encode_batch(hard_texts)]
    assert vocabulary_size(tokenizer) == len(tokenizer) == 30 + kept
    named = (tokenizer.unk_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert named == (0, 1, 2, 11)
    names = {number: name for name, number in tokenizer.get_vocab().items()}
    assert [names[number] for number in range(30)] == [
        *TEKKEN_SPECIAL_TOKENS,
        *(f"<SPECIAL_{number}>" for number in range(20, 30)),
    ]
    assert (names[3], names[9], names[10], names[14]) == ("[INST]", "[TOOL_CALLS]", "[IMG]", "[PREFIX]")
    assert (names[17], names[19]) == ("[SYSTEM_PROMPT]", "[TOOL_CONTENT]")
    assert min(Encoder(tokenizer)(["<s>[INST]</s>"])[0]) >= 30


def test_tekken_file_that_lists_its_special_tokens(tekken_like, tmp_path):
    pytest.importorskip("tiktoken")
    names = ["</s>", "<s>", "[MINE]"]
    path = write_tekken(tmp_path / "tekken.json", tekken_like[0], num_special=5, special=names)
    tokenizer = load_tokenizer(path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 0, None)
    assert tokenizer.get_vocab()["[MINE]"] == 2 and tokenizer.get_vocab()["<SPECIAL_4>"] == 4


def test_tekken_file_of_mistral():
    tiktoken = pytest.importorskip("tiktoken")
    path = real_file("tekken_240911.json")
    tokenizer = load_tokenizer(path)
    assert vocabulary_size(tokenizer) == len(tokenizer) == 131_072
    content = json.loads(path.read_text())
    ranks = {base64.b64decode(token["token_bytes"]): token["rank"] for token in content["vocab"][:130_072]}
    oracle = tiktoken.Encoding(
        "x", pat_str=content["config"]["pattern"], mergeable_ranks=ranks, special_tokens={}
    )
    text = "Bonjour, ça va? def f(x):\n        return {1234: 'ſ 中文 😀'}\r\n</s>[INST]"
    assert tokenizer(text) == {"input_ids": [1, *(1000 + rank for rank in oracle.encode_ordinary(text))]}


# --- all of them -----------------------------------------------------------------------------------------------------


@pytest.fixture
def each_kind(unigram, llama3_like, tekken_like, known_700, tmp_path):
    pytest.importorskip("tiktoken")
    return [
        load_tokenizer(unigram),
        load_tokenizer(write_tiktoken(tmp_path / "any name", llama3_like[0])),
        load_tokenizer(write_tekken(tmp_path / "some.json", tekken_like[0])),
    ]


def test_interface_that_data_preparation_uses(each_kind):
    kinds = [type(tokenizer).__name__ for tokenizer in each_kind]
    assert kinds == ["SentencePieceTokenizer", "TiktokenTokenizer", "TiktokenTokenizer"]
    for tokenizer in each_kind:
        text = "def decode(self, s):"
        plain = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer([text, ""], add_special_tokens=False)["input_ids"] == [plain, []]
        assert tokenizer([])["input_ids"] == [] and Encoder(tokenizer)([]) == []
        assert tokenizer.decode(plain) == text
        end = tokenizer.eos_token_id
        assert (
            tokenizer.decode([end, *plain, end, end])
            == f"{tokenizer.eos_token}{text}{tokenizer.eos_token * 2}"
        )
        assert tokenizer.decode([end, *plain, end, end], skip_special_tokens=True) == text
        assert tokenizer.decode(Encoder(tokenizer)([text])[0]) == text
        assert tokenizer.decode([plain[0], end, plain[0], end]).count(tokenizer.decode([plain[0]])) == 2
        copy = ForkingPickler.loads(ForkingPickler.dumps(tokenizer))
        assert tokenizer_sha256(copy) == tokenizer_sha256(tokenizer)
        vocabulary = tokenizer.get_vocab()
        vocabulary.clear()
        assert len(tokenizer.get_vocab()) == len(tokenizer) > 256
        surrogates = Encoder(tokenizer)(["a\ud83d\ude00", "\udfff", "b\x00"])
        assert ids(surrogates) == ids(Encoder(tokenizer)(["a😀", "\ufffd", "b\x00"]))
        with pytest.raises(TypeError):
            tokenizer("a", truncation=True)


def changed_rank(ranks, old, new):
    return {token: new if rank == old else rank for token, rank in ranks.items()}


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda r, p: p.write_bytes(b""), "is no tokenizer that can be read here: give a tokenizer.json"),
        (lambda r, p: p.write_bytes(b"\x00\xff" * 500), "is no tokenizer that can be read here"),
        (lambda r, p: p.write_text("just words\n"), "is no tokenizer that can be read here"),
        (lambda r, p: p.write_text('{"a": 1}'), "is no tokenizer that can be read here"),
        (lambda r, p: p.write_text('{"config": {'), "is damaged: Expecting"),
        (lambda r, p: p.write_text('{"model": {"type": "BPE"}}'), "is damaged: "),
        (lambda r, p: p.write_text('{"config": {}, "vocab": []}'), "tekken .* is damaged: KeyError 'pattern'"),
        (lambda r, p: p.mkdir(), "cannot read the tokenizer .*: Is a directory"),
        (lambda r, p: None, "cannot read the tokenizer .*: No such file"),
        (lambda r, p: write_tiktoken(p, dict(list(r.items())[:-1])), "has 699 ranks, and only 128,000, 700"),
        (lambda r, p: write_tiktoken(p, changed_rank(r, 5, 6)), "700 ranks where 700 are expected, each once"),
        (lambda r, p: write_tiktoken(p, changed_rank(r, 699, 700)), "each once"),
        (
            lambda r, p: write_tiktoken(p, {b"\x00\x01 new" if t == b"A" else t: n for t, n in r.items()}),
            "no token for 1 of the 256 bytes",
        ),
        (
            lambda r, p: p.write_bytes(write_tiktoken(p, r).read_bytes()[:-30] + b"\n? 12"),
            "damaged at line [67]",
        ),
        (lambda r, p: write_tekken(p, r, kept=800), "700 ranks where 800 are expected, each once"),
        (lambda r, p: write_tekken(p, r, num_special=10), "20 special tokens for 10 places"),
        (lambda r, p: write_tekken(p, r, default_vocab_size="many"), "damaged: ValueError"),
    ],
)  # fmt: skip
def test_damaged_files_are_named_in_one_line(llama3_like, known_700, tmp_path, damage, message):
    pytest.importorskip("tiktoken")
    path = tmp_path / "tokenizer.model"
    damage(llama3_like[0], path)
    with pytest.raises(ValueError, match=message) as raised:
        load_tokenizer_file(path)
    assert "\n" not in str(raised.value) and str(path) in str(raised.value)


def test_truncated_sentencepiece_file_is_refused(unigram, tmp_path):
    path = tmp_path / "tokenizer.model"
    for size in (1, 100, 2000):
        path.write_bytes(unigram.read_bytes()[:size])
        with pytest.raises(ValueError, match="is no tokenizer that can be read here"):
            load_tokenizer(path)


@pytest.mark.parametrize(
    "library, content, what",
    [("sentencepiece", b"\n\x0e", "SentencePiece files"), ("tiktoken", None, "tiktoken and tekken files")],
)
def test_missing_library_is_named(llama3_like, known_700, tmp_path, monkeypatch, library, content, what):
    path = write_tiktoken(tmp_path / "tokenizer.model", llama3_like[0])
    if content is not None:
        path.write_bytes(content)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(
        ValueError, match=rf"reading {what} needs the package {library}: pip install 'pod-kv\[tokenizers\]'"
    ):
        load_tokenizer(path)
