"""Time to first token and decode speed, side by side: all methods in one process, their repeats interleaved, one step at a time."""

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pod.eval.stats import spread

_WARM_UP_TOKENS = 16


@dataclass
class Contestant:
    """A model with a filled cache, and the next token to feed. seconds: of every timed repeat."""

    name: str
    model: Any
    cache: Any
    token: Tensor | None = None
    first_token_seconds: float = 0.0
    seconds: list[float] = field(default_factory=list)


@torch.no_grad()
def fill(contestant: Contestant, prompt: Tensor) -> None:
    """Read the prompt [B, n] into the cache and time it up to the first token, after a short pass that warms up the model."""
    contestant.model(input_ids=prompt[:, :_WARM_UP_TOKENS], logits_to_keep=1)
    began = _now(prompt)
    output = contestant.model(
        input_ids=prompt, past_key_values=contestant.cache, use_cache=True, logits_to_keep=1
    )
    contestant.token = output.logits[:, -1].argmax(-1, keepdim=True)
    contestant.first_token_seconds = _now(prompt) - began


@torch.no_grad()
def decode(contestant: Contestant, steps: int) -> float:
    """Greedy decoding of `steps` tokens per row; returns the seconds that it took."""
    token = contestant.token
    assert token is not None, "fill() comes first"
    began = _now(token)
    for _ in range(steps):
        output = contestant.model(
            input_ids=token, past_key_values=contestant.cache, use_cache=True, logits_to_keep=1
        )
        token = output.logits[:, -1].argmax(-1, keepdim=True)
    contestant.token = token
    return _now(token) - began


def race(contestants: list[Contestant], steps: int, repeats: int) -> None:
    """One warm-up round, then `repeats` timed rounds; every round lets each contestant decode `steps` tokens, in turns.

    The order moves by one from round to round, so that no one always runs on another's warm or cold caches.
    """
    for round_number in range(repeats + 1):
        shift = round_number % len(contestants)
        for contestant in contestants[shift:] + contestants[:shift]:
            seconds = decode(contestant, steps)
            if round_number:
                contestant.seconds.append(seconds)


def speeds(contestant: Contestant, base: Contestant | None, steps: int, batch: int = 1) -> dict[str, Any]:
    """Tokens per second (median, min, max over the repeats) and the ratio to `base`, taken round by round."""
    result: dict[str, Any] = {
        "time_to_first_token_seconds": contestant.first_token_seconds,
        "decode_tokens_per_second": spread([steps * batch / seconds for seconds in contestant.seconds]),
        "seconds_per_repeat": contestant.seconds,
    }
    if base is not None:
        pairs = zip(base.seconds, contestant.seconds, strict=True)
        result["speed_over_full"] = spread([other / own for other, own in pairs])
    return result


def _now(tensor: Tensor) -> float:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
    return time.perf_counter()
