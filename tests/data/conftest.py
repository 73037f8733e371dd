"""A tokenizer made on the spot.

It has one token per word `w0 … w4999`, so that tests can ask for exact document lengths.
"""

import hashlib
import io
from pathlib import Path

import numpy as np
import pytest

NUM_WORDS = 5000
HARD_TEXTS = [
    "",
    " ",
    "a",
    " leading space",
    "  two leading spaces, two trailing  ",
    "\n\nnew lines first",
    "tabs\tand\t\ttabs\t",
    "line\r\nline\r\n\r\n  line\rline",
    "def f(x):\n    if x:\n        return {'a': [1, 22, 333, 4444, 55555], \"b\": x**2}\n\t# done\n",
    # Runs of spaces of every length, as in tables and deeply nested code.
    *(f"x{' ' * length}y{' ' * length}\n" for length in range(1, 70)),
    " " * 1000 + "=" * 1001 + "-" * 999 + "_" * 65,
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa abababababababababab ACGT" * 50,
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich; ça va, naïve café, ſ ß ẞ İ ı",
    "e\u0301 combining, \u212b Ångström, \ufb01 ligature, \u00bd half, \uff21\uff22 fullwidth, \u1e9b\u0323",
    "中文字符和日本語のテキスト、한국어 텍스트。Русский текст; Ελληνικά; "
    "עברית עם ניקוד; العربية ١٢٣; हिन्दी; ไทย",
    "😀😃 👨‍👩‍👧‍👦 🏳️‍🌈 🇩🇪 \U0001f9ff\U000e0067 \U0010ffff",
    "\x00\x01\x02 control \x7f\x85\xa0 "
    "no-break\u2003em\u200bzero\u200d\ufeffbom\u2028line\u2029paragraph\u3000wide",
    "▁already ▁escaped▁▁ pieces",
    "<s>text</s> <unk> <pad> <|endoftext|> <|im_start|>user<|im_end|> [INST] [/INST] <0x0A> "
    "<|begin_of_text|>",
    "I'll we'VE They'Re it's 'S 'ſ ''ll can't",
    "https://example.org/a_b-c?d=e&f=%20#g 3.14159 1,234,567.89 0xDEADBEEF 1e-10 2026-11-21T22:08:26Z",
    "camelCaseHTTPServerError snake_case_name SCREAMING_CASE kebab-case",
    "q" * 5000,
    "!?!?!?...,,,;;;:::((()))[[[]]]{{{}}}<<<>>>***///\\\\\\|||~~~```'''\"\"\"$$$%%%^^^&&&@@@###",
    "�� replacement \ufffe\uffff \ud7ff\ue000",
]


def build_word_tokenizer(num_words=NUM_WORDS, prefix="w", **special):
    """Whitespace tokenizer with ids 0 <unk>, 1 <bos>, 2 <eos>, then `prefix0`, `prefix1`, …"""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<unk>": 0, "<bos>": 1, "<eos>": 2}
    vocabulary |= {f"{prefix}{number}": number + 3 for number in range(num_words)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"bos_token": "<bos>", "eos_token": "<eos>", **special}
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", **special)


@pytest.fixture(scope="session")
def tokenizer():
    return build_word_tokenizer()


@pytest.fixture(scope="session")
def byte_tokenizer():
    """Byte-level BPE trained on a little Python code."""
    import inspect
    import json

    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    backend = ByteLevelBPETokenizer()
    backend.train_from_iterator([inspect.getsource(json.decoder)], vocab_size=400, show_progress=False)
    return PreTrainedTokenizerFast(tokenizer_object=backend._tokenizer)


@pytest.fixture(scope="session")
def make_text():
    """make_text(length, seed) → a text of exactly `length` words."""

    def make(length, seed=0):
        return " ".join(f"w{number}" for number in np.random.default_rng(seed).integers(0, NUM_WORDS, length))

    return make


@pytest.fixture
def corpus(tmp_path, make_text):
    """corpus(lengths) → a folder of text files of those lengths in words."""

    def make(lengths, name="texts"):
        folder = tmp_path / name
        folder.mkdir()
        for number, length in enumerate(lengths):
            (folder / f"{number:05d}.txt").write_text(make_text(int(length), seed=number))
        return folder

    return make


@pytest.fixture
def packed_folder(tmp_path, tokenizer):
    """packed_folder(name, **changes) → a folder of packed rows as preparation publishes it.

    It has 3 shards, 2 sources and held-out text. `changes` replace keys of the manifest's details. Rows have
    64 tokens of the word tokenizer; row 0 holds one whole document.
    """
    from pod.data.rows.shards import write_packed_rows
    from pod.data.tokens.tokenizers import tokenizer_sha256

    def make(name="data", **changes):
        lengths = [[64], [40, 24], [20, 20, 20], [10] * 6, [63], [2] * 32, [30, 30], [50, 13]]
        ids = iter(np.random.default_rng(0).integers(3, NUM_WORDS + 3, 1000))
        rows = [[np.array([next(ids) for _ in range(length)]) for length in row] for row in lengths]
        held_out_lengths = io.BytesIO()
        np.save(held_out_lengths, np.array([10, 5, 5, 5, 5, 10], dtype="<i8"))
        held_out = {
            "held_out.tokens.bin": np.arange(3, 43, dtype="<u2").tobytes(),
            "held_out.lengths.npy": held_out_lengths.getvalue(),
        }
        write_packed_rows(
            tmp_path / name,
            rows,
            context_length=64,
            vocab_size=NUM_WORDS + 3,
            tokenizer_sha256=tokenizer_sha256(tokenizer),
            details={**packed_details(lengths, held_out), **changes},
            shard_bytes=3 * 64 * 2,
        )
        for file, content in held_out.items():
            (tmp_path / name / file).write_bytes(content)
        return tmp_path / name

    return make


def packed_details(lengths, held_out):
    """What a manifest says beside its shards, for rows of those document lengths."""
    intervals = packed_intervals(np.concatenate(lengths))
    tokens = [interval["tokens_after"] for interval in intervals]
    share = sum(tokens) // 2
    weights = [
        {
            "interval": interval["name"],
            "source": source,
            "weight": weight,
            "tokens_before": 800 * weight,
            "tokens_after": 9,
        }
        for interval in intervals
        for source, weight in enumerate((0.75, 0.25))
    ]
    files = [
        {"file": file, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for file, content in held_out.items()
    ]
    return {
        "tokenizer_source": None,
        "request": {"seed": 3, "settings": {"packing": "best_fit"}},
        "read": {
            "units": 3,
            "units_of_all": 4,
            "documents": 140,
            "special_documents": 2,
            "sources": packed_sources(tokens),
        },
        "policies": {
            "duplicates": 5,
            "cut_pieces": 8,
            "skipped_long": 9,
            "skipped_long_tokens": 900,
            "dropped_short": 0,
        },
        "intervals": intervals,
        "balance": {
            "equal_share_tokens": share,
            "largest_deviation": max(abs(count - share) for count in tokens) / share,
            "notes": [
                "interval 32–64 ran dry: it has 200 tokens, but its share is 300; the missing tokens come "
                "from the others"
            ],
        },
        "weights": weights,
        "held_out": {"documents": 6, "tokens": 40, "token_dtype": "uint16", "files": files},
    }


def packed_intervals(sizes):
    """Reports of the intervals below and from 32 tokens; the sources held twice as much."""
    intervals = []
    for low, high in ((1, 32), (32, 65)):
        inside = sizes[(sizes >= low) & (sizes < high)]
        counts = {"documents": len(inside), "tokens": int(inside.sum())}
        before = {f"{name}_before": 2 * count for name, count in counts.items()}
        after = {f"{name}_after": count for name, count in counts.items()}
        intervals.append({"name": f"{low}–{high - 1}", "passes": 0.5, "ran_dry": low > 1, **before, **after})
    return intervals


def packed_sources(tokens_after):
    """Reports of two sources that gave so many tokens."""
    both = {
        "documents": 70,
        "empty": 1,
        "skipped": 0,
        "records_skipped": 2,
        "skipped_files": ["a.jsonl line 3 is not JSON"],
    }
    one = {"source": "texts", "files": 2, "characters": 5000, "filtered": 4, "tokens": 900}
    two = {
        "source": "more/*.txt",
        "files": 1,
        "characters": 700,
        "filtered": 1,
        "tokens": 300,
    }
    return [
        {**both, **one, "origins": {"wiki": 60, "web": 10}, "tokens_after": tokens_after[0]},
        {**both, **two, "origins": {}, "tokens_after": tokens_after[1]},
    ]


@pytest.fixture(scope="session")
def hard_texts():
    """Texts on which tokenizers differ when they are nearly the same."""
    return HARD_TEXTS


@pytest.fixture
def small_steps(monkeypatch):
    """Many work shards and shards in a small corpus; forked workers inherit it."""
    from pod.data.read import work_shards
    from pod.data.run import writing

    monkeypatch.setattr(work_shards, "GROUP_BYTES", 4_000)
    monkeypatch.setattr(work_shards, "SMALLEST_GROUP_BYTES", 4_000)
    monkeypatch.setattr(writing, "DEFAULT_SHARD_BYTES", 2_000)


@pytest.fixture
def no_pictures(monkeypatch):
    """They take longer than everything else in a small corpus."""
    from pod.data.run import publish

    monkeypatch.setattr(publish, "draw_lengths", lambda *_: None)


@pytest.fixture(autouse=True)
def hub_revision(monkeypatch):
    """hub_revision[0] is the commit of every data set of the hub, which no test asks."""
    from pod.data.read import hub

    commit = ["0123abc"]
    monkeypatch.setattr(hub, "revision_of", lambda name: None if Path(name).is_dir() else commit[0])
    return commit
