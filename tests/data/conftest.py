"""A tokenizer made on the spot: one token per word `w0 … w4999`, so that tests can ask for exact document lengths."""

import numpy as np
import pytest

NUM_WORDS = 5000


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
