"""Time to first token and decode speed of methods, side by side.

All methods run in one process, and take turns in every round of timing.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any, TypeVar

import torch
from torch import Tensor

from pod.measure.measured_memory import next_token, now
from pod.modeling.model.attend import IMPLEMENTATIONS, Call, Implementation
from pod.modeling.placement import is_spread

WARM_UP_TOKENS = 16
"""Tokens of the pass that `warm_up` runs."""
T = TypeVar("T")


@dataclass
class RaceEntry:
    """A model with a filled cache, and the next token to feed.

    Attributes:
        name: of the method.
        token: [B, 1], the next token to feed; None before `read_prompt`.
        prompt_seconds: the seconds of every timed reading of the prompt.
        seconds: the seconds of every timed repeat of decoding.
        failed: the error because of which it is out of the race; None while it takes part.
    """

    name: str
    model: Any = None
    cache: Any = None
    token: Tensor | None = None
    prompt_seconds: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    failed: Exception | None = None

    @contextmanager
    def trying(self) -> Iterator[None]:
        """Keep an error of the block in `failed`, so that the failure of one method does not stop the others.

        The cache of an entry that failed is freed.
        """
        try:
            yield
        except Exception as error:  # noqa: BLE001 - compilers and drivers raise anything
            self.failed, self.cache = error, None

    @torch.no_grad()
    def decode(self, steps: int) -> float:
        """Decode `steps` tokens per row greedily, with the cache's engine if it has one.

        An engine runs on one device. Where the model lies on several, its layers run one by one.

        Returns:
            The seconds that this took.
        """
        token, engine = self.token, getattr(self.cache, "engine", None)
        assert token is not None, "read_prompt() comes first"
        began = now(token.device)
        if engine is not None and not is_spread(self.model):
            token = engine.greedy(self.model, token, steps)[:, -1:]
        else:
            for _ in range(steps):
                token = next_token(self.model, self.cache, token)
        self.token = token
        return now(token.device) - began


def _no_attention(call: Call) -> tuple[Tensor, Tensor]:
    """An attention whose output and log-sum-exp are zeros."""
    lse = torch.zeros(call.q.shape[:3], dtype=torch.float32, device=call.q.device)
    return torch.zeros_like(call.q), lse


@contextmanager
def without_attention(model: Any) -> Iterator[None]:
    """Let attention give zeros (the backend ``zeros``) while the block runs, so that prompts are read fast.

    Projections, methods and packing work as always.
    """
    IMPLEMENTATIONS["zeros"] = Implementation(_no_attention, lambda call: None)
    before, model.config.attention_backend = model.config.attention_backend, "zeros"
    try:
        yield
    finally:
        model.config.attention_backend = before
        del IMPLEMENTATIONS["zeros"]


@torch.no_grad()
def warm_up(model: Any, prompt: Tensor) -> None:
    """Run a short pass without a cache."""
    model(input_ids=prompt[:, :WARM_UP_TOKENS], use_cache=False, logits_to_keep=1)


@torch.no_grad()
def read_prompt(entry: RaceEntry, prompt: Tensor) -> None:
    """Read the prompt [B, n] into the entry's new cache, and note the seconds up to the first token.

    The time includes the method's compression.
    """
    began = now(prompt.device)
    entry.token = next_token(entry.model, entry.cache, prompt)
    entry.prompt_seconds.append(now(prompt.device) - began)


def race(entries: Sequence[RaceEntry], steps: int, repeats: int) -> None:
    """Run one warm-up round, then `repeats` timed rounds.

    In every round each entry decodes `steps` tokens, one entry after the other. The order moves by one from
    round to round, so that no entry always finds the processor's caches as the same other entry left them.
    An entry that fails is out, and the others go on.
    """
    for turn in range(repeats + 1):
        for one in in_turns(entries, turn):
            with one.trying():
                if one.failed is None:
                    took = one.decode(steps)
                    if turn < 2:  # the first timed round, turn 1, drops the seconds of the warm-up
                        one.seconds = []
                    one.seconds.append(took)


def in_turns(items: Sequence[T], turn: int) -> list[T]:
    """The items in the order of round number `turn`: those from there on first, then the others.

    Example: a, b, c in turn 1 are b, c, a.
    """
    shift = turn % max(1, len(items))
    return [*items[shift:], *items[:shift]]


def spread(values: Sequence[float]) -> dict[str, float | int]:
    """The median, minimum, maximum and count of repeated measurements."""
    return {"median": median(values), "min": min(values), "max": max(values), "repeats": len(values)}
