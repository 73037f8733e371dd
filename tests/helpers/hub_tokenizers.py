"""Tokenizer files of every family that loads, as its checkpoints on the hub have them, with few tokens."""

import json
from pathlib import Path
from typing import NamedTuple

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

OWN_CLASS = object()
"""Stands for the class that the family's files name."""


class Hub(NamedTuple):
    """What the files of a family have.

    Attributes:
        tokenizer_class: as tokenizer_config.json names it.
        kind: "bytes" (bytes as letters) or "pieces" (pieces, with bytes for what is not in the vocabulary).
        tokens: the special tokens that tokenizer_config.json names.
        starts: whether every text begins with bos_token.
        prefix: what stands before the first letter of a text in pieces.
    """

    tokenizer_class: str
    kind: str
    tokens: dict[str, str]
    starts: bool = False
    prefix: str = "▁"


_MISTRAL = Hub(
    "LlamaTokenizer",
    "pieces",
    {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    starts=True,
)
_QWEN = Hub("Qwen2Tokenizer", "bytes", {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"})
_END_OF_TEXT = "<|end_of_text|>"

FAMILIES = {
    "llama": Hub(
        "PreTrainedTokenizerFast",
        "bytes",
        {"bos_token": "<|begin_of_text|>", "eos_token": _END_OF_TEXT},
        starts=True,
    ),
    "mistral": _MISTRAL,
    "mixtral": _MISTRAL,
    "qwen2": _QWEN,
    "qwen3": _QWEN,
    "qwen3_moe": _QWEN,
    "phi3": Hub(
        "LlamaTokenizer",
        "pieces",
        {
            "bos_token": "<s>",
            "eos_token": "<|endoftext|>",
            "pad_token": "<|endoftext|>",
            "unk_token": "<unk>",
        },
    ),
    "granite": Hub(
        "GPT2Tokenizer",
        "bytes",
        dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), _END_OF_TEXT),
    ),
    "smollm3": Hub(
        "PreTrainedTokenizerFast", "bytes", {"eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    ),
    "olmo2": Hub("GPT2Tokenizer", "bytes", {"eos_token": "<|endoftext|>", "pad_token": "<|pad|>"}),
    "gemma3_text": Hub(
        "GemmaTokenizer",
        "pieces",
        {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"},
        starts=True,
        prefix="",
    ),
}
"""By ``model_type``."""


def byte_level() -> Tokenizer:
    """As in the files of Llama 3, Qwen, Granite, OLMo 2 and SmolLM3: bytes as letters, without merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def with_byte_fallback(hub: Hub) -> Tokenizer:
    """As in the files of Llama 2, Mistral, Mixtral, Phi-3 and Gemma: spaces as ▁, bytes for other letters."""
    special = list(dict.fromkeys(hub.tokens.values()))
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = [*special, *bytes_, "▁", *"abcdefghijklmnopqrstuvwxyzH"]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    backend = Tokenizer(
        models.BPE(vocab=vocab, merges=[], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    parts = [normalizers.Prepend(hub.prefix)] if hub.prefix else []
    backend.normalizer = normalizers.Sequence([*parts, normalizers.Replace(" ", "▁")])
    return backend


def backend_of(hub: Hub) -> Tokenizer:
    """The tokenizer of a family's tokenizer.json."""
    backend = byte_level() if hub.kind == "bytes" else with_byte_fallback(hub)
    special = list(dict.fromkeys(hub.tokens.values()))
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    if hub.starts:
        first = hub.tokens["bos_token"]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{first} $A", special_tokens=[(first, backend.token_to_id(first))]
        )
    return backend


def write_files(folder: Path, model_type: str, tokenizer_class: object = OWN_CLASS) -> Tokenizer:
    """Write tokenizer.json, tokenizer_config.json and the part of config.json that tokenizers read."""
    hub = FAMILIES[model_type]
    backend = backend_of(hub)
    backend.save(str(folder / "tokenizer.json"))
    named = hub.tokenizer_class if tokenizer_class is OWN_CLASS else tokenizer_class
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": named, **hub.tokens}))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, "vocab_size": 400}))
    return backend
