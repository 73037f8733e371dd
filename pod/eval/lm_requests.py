"""Requests of lm-eval as token ids: encoded as lm-eval does it, shortened by the task's own rule. Needs a tokenizer, no model.

Encoding equals `lm_eval.models.huggingface.HFLM` (lm-eval 0.4.13, MIT) for whatever fits the model; what does not fit is shortened here
and not by dropping its start: that would lose the beginning-of-sequence token and, in a chat template, the system message.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pod.eval.budget import length_class
from pod.eval.runners.base import prompt_hash

Drop = Literal["middle", "start", "end", "document", "none"]
DROPS: tuple[Drop, ...] = ("middle", "start", "end", "document", "none")
TOO_LONG = ("truncate", "skip", "error")
DEFAULT_NEW_TOKENS = 256  # HFLM.max_gen_toks
_ROUNDS = 8  # of shortening; pieces of text that are joined anew may encode to a few tokens more


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What a task allows to be done to its prompts, from `metadata.pod` of its YAML.

    truncation: the part that is dropped of a prompt that is too long: its middle, start or end, the middle of its document
        (`doc["document"]`, see `pod.eval.documents`), or none.
    chat_template: whether its prompts go into the chat template.
    max_prompt_tokens: the longest prompt (tokens), whatever the model reads; None = what the model reads.
    keep: with truncation `document`, the part of the document that stays: start or end.
    """

    truncation: Drop = "middle"
    chat_template: bool = False
    max_prompt_tokens: int | None = None
    keep: Literal["start", "end"] = "start"

    def __post_init__(self) -> None:
        if self.truncation not in DROPS:
            raise ValueError(f"metadata.pod.truncation = {self.truncation!r}: known are {', '.join(DROPS)}")


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """One request as token ids.

    key: its id in the journal: request type, task, document, index, repeat.
    context, continuation: token ids; generation has no continuation.
    new_tokens: tokens to generate at most; settings: of the generation, normalized.
    dropped: tokens by which the prompt was shortened; skipped: why it is not answered.
    """

    key: str
    kind: str
    args: tuple[Any, ...]
    context: tuple[int, ...] = ()
    continuation: tuple[int, ...] = ()
    new_tokens: int = 0
    settings: dict[str, Any] = field(default_factory=dict)
    dropped: int = 0
    skipped: str | None = None

    @property
    def fed(self) -> int:
        """Tokens fed after the compressed prompt. Scoring holds one context token out, so that even a one-token answer is predicted from the
        compressed cache; generation feeds every new token but the last."""
        if self.kind == "generate_until":
            return self.new_tokens - 1
        return len(self.continuation)

    @property
    def length(self) -> int:
        """Tokens in the cache at the end."""
        if self.kind == "generate_until":
            return len(self.context) + self.fed
        return len(self.context) + len(self.continuation) - 1


def request_key(request: Any, repeat: int = 0) -> str:
    """The id of an lm-eval `Instance` within a run: type, task, document, index (choice), repeat."""
    return f"{request.request_type}/{request.task_name}/{request.doc_id}/{request.idx}/{repeat}"


def request_keys(requests: Iterable[Any]) -> list[str]:
    """Keys of requests in order; lm-eval repeats the same object for `repeats: k`, which are told apart by their occurrence."""
    seen: dict[str, int] = {}
    keys = []
    for request in requests:
        base = request_key(request)
        keys.append(request_key(request, seen.get(base, 0)))
        seen[base] = seen.get(base, 0) + 1
    return keys


class Encoder:
    """Text to token ids under a length limit.

    tokenizer: of the model; max_length: the longest sequence that the model reads (tokens); too_long: what happens to prompts that
    exceed it: `truncate` by the task's rule, `skip`, or `error`.
    """

    def __init__(self, tokenizer: Any, max_length: int, too_long: str = "truncate"):
        if too_long not in TOO_LONG:
            raise ValueError(f"too_long = {too_long!r}: known are {', '.join(TOO_LONG)}")
        if not isinstance(max_length, int) or max_length < 2:
            raise ValueError(f"max_length = {max_length!r} must be a whole number of at least 2 tokens")
        self.tokenizer, self.max_length, self.too_long = tokenizer, max_length, too_long
        self._templated: dict[str, tuple[str, str, str]] = {}

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without context: BOS, else EOS."""
        bos = self.tokenizer.bos_token_id
        return self.tokenizer.eos_token_id if bos is None else bos

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids; special tokens as the tokenizer adds them, unless the text begins with one already."""
        if special and text.startswith(self.tokenizer.decode(self.prefix_token_id)):
            special = False
        return list(self.tokenizer.encode(text, **({} if special else {"add_special_tokens": False})))

    def requests(self, requests: Sequence[Any], rule: Rule) -> list[Encoded]:
        """Every request, in order. Raises: ValueError for a prompt that is too long when that is an error."""
        keys = request_keys(requests)
        return [self.request(request, rule, key) for request, key in zip(requests, keys, strict=True)]

    def request(self, request: Any, rule: Rule, key: str | None = None) -> Encoded:
        """One `loglikelihood` or `generate_until` request of lm-eval."""
        key = request_key(request) if key is None else key
        if request.request_type == "generate_until":
            return self._generation(request, rule, key)
        return self._likelihood(request, rule, key)

    def _generation(self, request: Any, rule: Rule, key: str) -> Encoded:
        from lm_eval.models.utils import normalize_gen_kwargs

        text, given = request.args
        settings = dict(normalize_gen_kwargs(given, DEFAULT_NEW_TOKENS))
        new_tokens = int(settings.pop("max_gen_toks"))
        if not 1 <= new_tokens < self.max_length:
            raise ValueError(
                f"{request.task_name} generates {new_tokens} tokens and the model reads {self.max_length}: generate from 1 to "
                f"{self.max_length - 1}"
            )
        ids = self.encode(text) or [self.prefix_token_id]
        return Encoded(
            key=key,
            kind="generate_until",
            args=request.args,
            context=tuple(ids),
            new_tokens=new_tokens,
            settings=settings,
        )

    def _likelihood(self, request: Any, rule: Rule, key: str) -> Encoded:
        context, continuation = self.pair(*request.args)
        return Encoded(
            key=key,
            kind=request.request_type,
            args=request.args,
            context=tuple(context),
            continuation=tuple(continuation),
        )

    def pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Ids of a context and of its continuation, encoded together and split where the context alone ends (lm-eval's way)."""
        if not context:
            ids = self.encode(continuation, special=False)
            if ids[0] == self.prefix_token_id:
                return ids[:1], ids[1:]
            return [self.prefix_token_id], ids
        stripped = context.rstrip()
        continuation, context = context[len(stripped) :] + continuation, stripped
        ids = self.encode(context)
        return ids, self.encode(context + continuation)[len(ids) :]

    def apply_chat_template(self, messages: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The messages in the tokenizer's chat template."""
        return self.tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )


@dataclass(frozen=True, kw_only=True)
class Size:
    """A cache that requests need: `length` tokens at the end (a length class), `fed` of them after the prompt (a power of two)."""

    length: int
    fed: int


def size_of(encoded: Encoded) -> Size:
    """The size of the cache for a request: from its own length only, so that an answer does not depend on its batch."""
    fed = 0 if encoded.fed < 1 else 1 << (encoded.fed - 1).bit_length()
    return Size(length=length_class(len(encoded.context) + max(encoded.fed, 1)), fed=fed)


def hash_of(encoded: Encoded) -> str:
    """Hash of the prompt as the model reads it (token ids)."""
    return prompt_hash(encoded.context)
