"""Tokenizer files that stand alone: SentencePiece, tiktoken, tekken and `tokenizer.json`, told apart by their content.

The first three are read by the libraries that define them, not converted: transformers' conversion of a SentencePiece model
drops a space at the start of a text, and a merge list cannot say that of equal scores the leftmost wins, which changes runs of
spaces in code. The libraries are also two to six times as fast. What they find in a text is text: `</s>` or `<|eot_id|>` in a
document becomes ordinary tokens, never the special one.
"""

from __future__ import annotations

import base64
import binascii
import importlib
import json
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from pod.data.records import one_line

LLAMA3_PATTERN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_RESERVED = "<|reserved_special_token_{}|>"
LLAMA3_SPECIAL_TOKENS = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    *map(_RESERVED.format, range(4)),
    "<|start_header_id|>",
    "<|end_header_id|>",
    _RESERVED.format(4),
    "<|eot_id|>",
    *map(_RESERVED.format, range(5, 251)),
)
# Tekken files before version 7 do not list their special tokens; these come first, fillers after them.
TEKKEN_SPECIAL_TOKENS = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]"),
    *("[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)
# A tiktoken file holds byte strings and ranks only. Which pattern cuts a text before merging, and which special tokens follow,
# stands in the model's code, so a file is read only if its number of ranks says whose it is.
TIKTOKEN_KINDS = {128_000: (LLAMA3_PATTERN, LLAMA3_SPECIAL_TOKENS)}
# tiktoken's regular expressions give up (a panic) between 400,000 and 1,000,000 whitespace characters in a row.
LONGEST_WHITESPACE = 400_000
_TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n")
NAMED_TOKENS = {
    "bos_token": ("<|begin_of_text|>", "<s>"),
    "eos_token": ("<|end_of_text|>", "</s>"),
    "pad_token": ("<pad>",),
    "unk_token": ("<unk>",),
}


class FileTokenizer:
    """A tokenizer file with as much of transformers' interface as preparing data needs.

    `vocabulary` is token → id with transformers' spelling, so that `tokenizer_sha256` is that of the same tokenizer loaded by
    transformers; `special` is id → name of the control tokens, which no text becomes, and the unknown token. `bos_token`, `eos_token`, `pad_token`,
    `unk_token` and their ids are None where the file has none.
    """

    is_fast = False

    def __init__(
        self, path: Path, vocabulary: dict[str, int], special: dict[int, str], named: dict[str, int | None]
    ):
        self.name_or_path = str(path)
        self._vocabulary = vocabulary
        self._special = special
        self.all_special_ids = sorted(special)
        self.bos_token_id = named.get("bos_token")
        self.eos_token_id = named.get("eos_token")
        self.pad_token_id = named.get("pad_token")
        self.unk_token_id = named.get("unk_token")
        for name in NAMED_TOKENS:
            number = named.get(name)
            setattr(self, name, None if number is None else special[number])

    def __reduce__(self) -> tuple[Any, ...]:
        return load_tokenizer_file, (self.name_or_path,)

    def __len__(self) -> int:
        return len(self._vocabulary)

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""
        return len(self._vocabulary)

    def get_vocab(self) -> dict[str, int]:
        """Token → id."""
        return dict(self._vocabulary)

    def __call__(
        self,
        text: str | Sequence[str],
        add_special_tokens: bool = True,
        return_attention_mask: bool = False,
        verbose: bool = True,
    ) -> dict[str, Any]:
        """`{"input_ids": ids}`, a list for one text, a list of lists for several.

        `add_special_tokens` puts the beginning-of-text token in front, as the LLaMA family's tokenizers do. There is neither
        mask nor warning, `return_attention_mask` and `verbose` are there for callers of transformers' tokenizers.
        """
        texts = [text] if isinstance(text, str) else list(text)
        encoded = self._encode(texts)
        if add_special_tokens and self.bos_token_id is not None:
            encoded = [[self.bos_token_id, *ids] for ids in encoded]
        return {"input_ids": encoded[0] if isinstance(text, str) else encoded}

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of `token_ids`; special tokens by their names or left out, bytes that are no UTF-8 as U+FFFD."""
        ids = [int(number) for number in token_ids]
        cuts = [-1, *(place for place, number in enumerate(ids) if number in self._special), len(ids)]
        parts = []
        for start, stop in pairwise(cuts):
            if stop - start > 1:
                parts.append(self._decode(ids[start + 1 : stop]))
            if stop < len(ids) and not skip_special_tokens:
                parts.append(self._special[ids[stop]])
        return "".join(parts)

    def _encode(self, texts: list[str]) -> list[list[int]]:
        raise NotImplementedError

    def _decode(self, ids: list[int]) -> str:
        raise NotImplementedError


class SentencePieceTokenizer(FileTokenizer):
    """A SentencePiece model (LLaMA 1 and 2, Mistral before tekken), read by `sentencepiece`."""

    def __init__(self, path: Path, processor: Any):
        self._processor = processor
        size = processor.get_piece_size()
        pieces = [processor.id_to_piece(number) for number in range(size)]
        special = {n: pieces[n] for n in range(size) if processor.is_control(n) or processor.is_unknown(n)}
        named = {
            f"{name}_token": number if (number := getattr(processor, f"{name}_id")()) >= 0 else None
            for name in ("bos", "eos", "pad", "unk")
        }
        super().__init__(path, {piece: number for number, piece in enumerate(pieces)}, special, named)

    def _encode(self, texts: list[str]) -> list[list[int]]:
        # One thread: preparing data runs a process for each core.
        return self._processor.encode(texts, num_threads=1) if texts else []

    def _decode(self, ids: list[int]) -> str:
        return self._processor.decode(ids)


class TiktokenTokenizer(FileTokenizer):
    """Byte-level BPE by ranks (LLaMA 3's own file, Mistral's tekken), read by `tiktoken`.

    Args:
        ranks: byte string → id; a smaller id merges earlier.
        pattern: regular expression that cuts a text into the pieces within which merging happens.
        special: name → id.
    """

    def __init__(self, path: Path, ranks: dict[bytes, int], pattern: str, special: dict[str, int]):
        tiktoken = _library("tiktoken", "tiktoken and tekken files")
        self._encoding = tiktoken.Encoding(
            path.name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special
        )
        letters = byte_letters()
        vocabulary = {"".join(map(letters.__getitem__, token)): number for token, number in ranks.items()}
        named = {
            name: next((special[token] for token in tokens if token in special), None)
            for name, tokens in NAMED_TOKENS.items()
        }
        super().__init__(
            path, vocabulary | special, {number: name for name, number in special.items()}, named
        )

    def _encode(self, texts: list[str]) -> list[list[int]]:
        return [self._encode_one(text) for text in texts]

    def _encode_one(self, text: str) -> list[int]:
        parts = cut_whitespace(text, LONGEST_WHITESPACE)
        if len(parts) == 1:
            return self._encoding.encode_ordinary(text)
        return [number for part in parts for number in self._encoding.encode_ordinary(part)]

    def _decode(self, ids: list[int]) -> str:
        return self._encoding.decode(ids, errors="replace")


def load_tokenizer_file(path: str | Path) -> Any:
    """The tokenizer of one file, by its content: `tokenizer.json`, tekken, tiktoken (LLaMA 3) or SentencePiece.

    Raises `ValueError` in one line when the file is missing, empty, damaged or something else, and when the library that
    reads it is not installed.
    """
    path = Path(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read the tokenizer {str(path)!r}: {error.strerror}") from error
    if content.lstrip()[:1] == b"{":
        return _load_json(path, content)
    if _TIKTOKEN_LINE.match(content):
        return _load_tiktoken(path, content)
    sentencepiece = _library("sentencepiece", "SentencePiece files")
    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(content)
    except (RuntimeError, ValueError) as error:
        raise _not_a_tokenizer(path) from error
    return SentencePieceTokenizer(path, processor)


def _load_json(path: Path, content: bytes) -> Any:
    try:
        settings = json.loads(content)
    except ValueError as error:
        raise ValueError(f"the tokenizer {str(path)!r} is damaged: {one_line(error)}") from error
    if "config" in settings and "vocab" in settings:
        return _load_tekken(path, settings)
    if "model" not in settings:
        raise _not_a_tokenizer(path)
    from transformers import PreTrainedTokenizerFast

    try:
        return PreTrainedTokenizerFast(tokenizer_file=str(path))
    except Exception as error:  # the tokenizers library raises bare Exception
        raise ValueError(f"the tokenizer {str(path)!r} is damaged: {one_line(error)}") from error


def _load_tekken(path: Path, settings: dict[str, Any]) -> TiktokenTokenizer:
    """Special tokens take the first ids, then come the ranks; files list more ranks than the model uses."""
    try:
        config = settings["config"]
        listed = settings.get("special_tokens")
        if listed is None:
            names = dict(enumerate(TEKKEN_SPECIAL_TOKENS))
        else:
            names = {int(token["rank"]): str(token["token_str"]) for token in listed}
        num_special = int(config.get("default_num_special_tokens") or len(names))
        num_ranks = (
            int(config.get("default_vocab_size") or num_special + len(settings["vocab"])) - num_special
        )
        vocab = settings["vocab"][:num_ranks]
        ranks = {base64.b64decode(token["token_bytes"]): num_special + token["rank"] for token in vocab}
        pattern = str(config["pattern"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"the tekken tokenizer {str(path)!r} is damaged: {type(error).__name__} {one_line(error)}"
        ) from error
    _check_ranks(path, ranks, range(num_special, num_special + num_ranks))
    if max(names) >= num_special:
        raise ValueError(
            f"the tekken tokenizer {str(path)!r} is damaged: {len(names)} special tokens for {num_special} places"
        )
    special = {names.get(number, f"<SPECIAL_{number}>"): number for number in range(num_special)}
    return TiktokenTokenizer(path, ranks, pattern, special)


def _load_tiktoken(path: Path, content: bytes) -> TiktokenTokenizer:
    # Not tiktoken.load: it caches a file by its path and would go on with the old content after a change.
    ranks = {}
    for number, line in enumerate(content.splitlines(), 1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise ValueError(
                f"the tiktoken file {str(path)!r} is damaged at line {number}: {one_line(error)}"
            ) from error
    if len(ranks) not in TIKTOKEN_KINDS:
        known = ", ".join(f"{size:,}" for size in TIKTOKEN_KINDS)
        raise ValueError(
            f"the tiktoken file {str(path)!r} has {len(ranks):,} ranks, and only {known} (LLaMA 3) is known by its pattern and "
            "special tokens, which no such file holds: give a folder with tokenizer.json"
        )
    _check_ranks(path, ranks, range(len(ranks)))
    pattern, names = TIKTOKEN_KINDS[len(ranks)]
    return TiktokenTokenizer(
        path, ranks, pattern, {name: number for number, name in enumerate(names, len(ranks))}
    )


def _check_ranks(path: Path, ranks: dict[bytes, int], expected: range) -> None:
    """Each rank once, and a token for each byte, so that any text has tokens."""
    if sorted(ranks.values()) != list(expected):
        raise ValueError(
            f"the tokenizer {str(path)!r} is damaged: {len(ranks):,} ranks where {len(expected):,} are expected, each once"
        )
    missing = [value for value in range(256) if bytes([value]) not in ranks]
    if missing:
        raise ValueError(
            f"the tokenizer {str(path)!r} is damaged: no token for {len(missing)} of the 256 bytes"
        )


def byte_letters() -> list[str]:
    """The letter by which byte-level tokenizers spell each of the 256 bytes (GPT-2): itself where it can be seen, else one
    from U+0100 on, in order."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [value for value in range(256) if value not in visible]
    return [chr(value) if value in visible else chr(0x100 + hidden.index(value)) for value in range(256)]


def cut_whitespace(text: str, longest: int) -> list[str]:
    """`text` in parts, cut only where more than `longest` whitespace characters follow each other."""
    if len(text) <= longest:
        return [text]
    cuts = [match.end() for match in re.finditer(rf"\s{{{longest}}}(?=\s)", text)]
    return [text[start:stop] for start, stop in pairwise([0, *cuts, len(text)])]


def _not_a_tokenizer(path: Path) -> ValueError:
    return ValueError(
        f"{str(path)!r} is no tokenizer that can be read here: give a tokenizer.json, a SentencePiece model, LLaMA 3's "
        "tiktoken tokenizer.model or a tekken.json"
    )


def _library(name: str, what: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(
            f"reading {what} needs the package {name}: pip install 'pod-kv[tokenizers]'"
        ) from error
