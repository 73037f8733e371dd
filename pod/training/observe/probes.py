"""What evaluation during training asks of a model besides held-out text, as token ids: passkeys and texts to continue."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Passkey:
    """A prompt that hides a number, and the number: what the model must say next.

    Attributes:
        prompt, answer: token ids.
        depth: where the number stands, 0 = at the beginning, 1 = at the end.
    """

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    depth: float


@dataclass(frozen=True)
class Probes:
    """Made by `make_probes`.

    Attributes:
        prompts: token ids of the texts that are continued.
        texts: these texts.
        end_ids: tokens at which a continuation ends.
        decode: token ids to text; None shows ids only.
    """

    passkeys: tuple[Passkey, ...] = ()
    prompts: tuple[tuple[int, ...], ...] = ()
    texts: tuple[str, ...] = ()
    end_ids: frozenset[int] = field(default_factory=frozenset)
    decode: Callable[[list[int]], str] | None = None


def make_probes(
    tokenizer: Any, passkeys: Sequence[tuple[str, str, float]] = (), samples: Sequence[str] = ()
) -> Probes:
    """Probes for a tokenizer of transformers.

    Args:
        passkeys: (prompt, number, depth); the number follows the prompt after a space.
        samples: texts to continue.
    """
    end = getattr(tokenizer, "eos_token_id", None)
    return Probes(
        passkeys=tuple(_passkey(tokenizer, *passkey) for passkey in passkeys),
        prompts=tuple(tuple(tokenizer(text)["input_ids"]) for text in samples),
        texts=tuple(samples),
        end_ids=frozenset() if end is None else frozenset([end]),
        decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=True),
    )


def _passkey(tokenizer: Any, prompt: str, key: str, depth: float) -> Passkey:
    """Prompt and number are tokenised together, because their border may lie inside a token; then split."""
    alone, whole = tokenizer(prompt)["input_ids"], tokenizer(f"{prompt} {key}")["input_ids"]
    shared = 0
    while shared < min(len(alone), len(whole) - 1) and alone[shared] == whole[shared]:
        shared += 1
    return Passkey(prompt=tuple(whole[:shared]), answer=tuple(whole[shared:]), depth=depth)
