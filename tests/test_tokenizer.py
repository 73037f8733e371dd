"""pod/tokenizer.py: tokenizers of the families' files, whatever else is installed, and tokens that the model does not have."""

import json
import os
import subprocess
import sys

import pytest
import sentencepiece
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

import pod
from pod.data.tokens.tokenizers import Encoder
from pod.models import byte_tokenizer
from pod.tokenizer import pad_id

TEXT = "Hello  12 naïve\n\tdef f(x):"
SPECIAL = ["<unk>", "<s>", "</s>"]


def byte_level():
    """As in the files of Llama 3, Qwen, Granite, Phi-4, OLMo 2 and SmolLM3: bytes as letters, here without merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def with_byte_fallback(prefix="▁"):
    """As in the files of Llama 2, Mistral, Mixtral, Phi-3 and Gemma: spaces as ▁, bytes for what is not in the vocabulary."""
    pieces = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghijklmnopqrstuvwxyzH"]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    backend = Tokenizer(
        models.BPE(vocab=vocab, merges=[], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    parts = [normalizers.Prepend(prefix)] if prefix else []
    backend.normalizer = normalizers.Sequence([*parts, normalizers.Replace(" ", "▁")])
    return backend


FAMILIES = {
    "llama": ("PreTrainedTokenizerFast", byte_level),
    "mistral": ("LlamaTokenizer", with_byte_fallback),
    "mixtral": ("LlamaTokenizer", with_byte_fallback),
    "qwen2": ("Qwen2Tokenizer", byte_level),
    "qwen3": ("Qwen2Tokenizer", byte_level),
    "qwen3_moe": ("Qwen2Tokenizer", byte_level),
    "phi3": ("GPT2Tokenizer", byte_level),
    "granite": ("GPT2Tokenizer", byte_level),
    "smollm3": ("PreTrainedTokenizerFast", byte_level),
    "olmo2": ("GPT2Tokenizer", byte_level),
    "gemma3_text": ("GemmaTokenizer", lambda: with_byte_fallback("")),
}


def write_files(folder, model_type, tokenizer_class, make):
    backend = make()
    backend.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": tokenizer_class}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    config = {"model_type": model_type, "vocab_size": 400}
    (folder / "config.json").write_text(json.dumps(config))
    return backend


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_files_of_every_family_load_and_pad_left(model_type, tmp_path):
    backend = write_files(tmp_path, model_type, *FAMILIES[model_type])
    tokenizer = pod.load_tokenizer(tmp_path)
    text = "hello def" if model_type.startswith(("qwen", "gemma")) else TEXT  # their classes bring a regex
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == backend.encode(text).ids
    assert tokenizer.padding_side == "left"


@pytest.mark.parametrize("model_type, tokenizer_class", [("mistral", "LlamaTokenizer"), ("mixtral", None)])
def test_mistral_loads_where_mistral_common_is_installed(model_type, tokenizer_class, tmp_path):
    """A package of that name, newer than transformers asks for, without the modules that transformers imports of it."""
    backend = write_files(tmp_path, model_type, tokenizer_class, with_byte_fallback)
    site = tmp_path / "site"
    for name in ("mistral_common", "mistral_common-99.0.dist-info"):
        (site / name).mkdir(parents=True)
    (site / "mistral_common" / "__init__.py").write_text("__version__ = '99.0'\n")
    about = "Metadata-Version: 2.1\nName: mistral-common\nVersion: 99.0\n"
    (site / "mistral_common-99.0.dist-info" / "METADATA").write_text(about)
    code = (
        "import sys, json, pod\n"
        "from transformers.utils.import_utils import is_mistral_common_available\n"
        "assert is_mistral_common_available()\n"
        "print(json.dumps(pod.load_tokenizer(sys.argv[1])(sys.argv[2])['input_ids']))\n"
    )
    path = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), TEXT],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == backend.encode(TEXT).ids


def test_a_sentencepiece_file_alone_is_enough(tmp_path):
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("the quick brown fox jumps over the lazy dog\n" * 50)
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(tmp_path / "tokenizer"),
        model_type="bpe",
        vocab_size=300,
        byte_fallback=True,
        minloglevel=2,
    )
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 300}))
    own = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    text = "the lazy fox jumps over the dog"
    found = pod.load_tokenizer(tmp_path)(text, add_special_tokens=False)["input_ids"]
    assert found == own.encode(text) and len(found) < len(text)


@pytest.fixture
def beyond(tmp_path):
    """A model of 258 tokens whose tokenizer has 260: a padding token and one of a chat template were added."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    tokens = {"eos_token_id": 256, "bos_token_id": 256, "pad_token_id": 257}
    config = LlamaConfig(vocab_size=258, num_key_value_heads=1, initializer_range=0.2, **sizes, **tokens)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


@torch.no_grad()
def test_padding_that_the_model_does_not_have_changes_nothing(beyond):
    tokenizer, model = pod.load_tokenizer(beyond), pod.load_model(beyond, dtype=torch.float64)
    texts = ["a longer text than the other", "short"]
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    assert tokenizer.pad_token_id == 258 and (batch["input_ids"] == 258).any()
    assert pad_id(tokenizer) == 256
    alone = [model(tokenizer(text, return_tensors="pt")["input_ids"]).logits[0, -1] for text in texts]
    together = model(**batch, labels=batch["input_ids"])
    assert (together.logits[:, -1] - torch.stack(alone)).abs().max() < 1e-10
    assert together.loss.isfinite()
    # one row ends first, at the token that it says second, and is fed padding from then on
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 258}
    whole = model.generate(**batch, eos_token_id=None, **options)
    n = batch["input_ids"].shape[1]
    end = next(int(t) for t in whole[0, n:] if t not in whole[1, n:])
    ended = model.generate(**batch, eos_token_id=end, **options)
    assert (ended[0, n:] == 258).any()
    assert torch.equal(ended[1], whole[1])


def test_text_with_a_token_that_the_model_does_not_have_is_refused_by_name(beyond):
    tokenizer = pod.load_tokenizer(beyond)
    said = r"holds the token '<\|im_start\|>' \(id 259\).*the tokenizer has 260 tokens, the model 258"
    for encode in (tokenizer, tokenizer.encode, lambda text: tokenizer(["a", text], padding=True)):
        with pytest.raises(ValueError, match=said):
            encode("a <|im_start|> b")
    with pytest.raises(ValueError, match=said):
        Encoder(tokenizer)(["a", "<|im_start|>"])
    assert tokenizer.decode(tokenizer("a b")["input_ids"]) == "a b"
