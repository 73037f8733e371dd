"""Build prompts to a length: count tokens, find the largest size that fits, make rows when they are read."""

from collections.abc import Callable, Sequence
from typing import Any

NAMES = {f"{thousands}k": 1024 * thousands for thousands in (1, 2, 4, 8, 16, 32, 64, 128)}
"""Lengths in tokens by the names that tasks carry."""

BUILT = {"num_fewshot": 0, "repeats": 1, "fewshot_config": {"samples": []}}
"""lm-eval's settings for tasks whose rows are built when they are read (`LazyRows`).

The empty list of examples matters: without it lm-eval would read every row to draw few-shot examples.
"""

_CHAT_SLACK = 4  # tokens that the borders of a chat template may add when they meet the text


class LazyRows(Sequence):
    """Rows of a data set that are built one by one, when they are read.

    So 500 prompts of 128K tokens cost nothing at the start.

    The class has what lm-eval needs of a data set: length, index, iteration, `features`.

    Args:
        count: number of rows.
        make: maps a row's number to the row.
        fields: the keys of every row.
        keep: build a row once and keep it. Rows that are long and cheap are better built again.
    """

    def __init__(
        self, count: int, make: Callable[[int], dict[str, Any]], fields: Sequence[str], keep: bool = True
    ):
        self._count, self._make, self._keep = count, make, keep
        self._made: dict[int, dict[str, Any]] = {}
        self.features = dict.fromkeys(fields)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self._count:
            raise IndexError(f"row {index} of {self._count}")
        if index in self._made:
            return self._made[index]
        row = self._make(index)
        if self._keep:
            self._made[index] = row
        return row


def count_tokens(tokenizer: Any, text: str) -> int:
    """Tokens of a prompt as a model reads it, special tokens included."""
    return len(tokenizer(text, verbose=False).input_ids)


def chat_tokens(tokenizer: Any) -> int:
    """Tokens that the tokenizer's chat template adds to one user message, at most; 0 without a template."""
    if not getattr(tokenizer, "chat_template", None):
        return 0
    message = [{"role": "user", "content": "x"}]
    text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    return len(tokenizer(text, add_special_tokens=False).input_ids) - 1 + _CHAT_SLACK


def largest_fit(
    tokens_of: Callable[[int], int],
    room: int,
    *,
    smallest: int,
    largest: int | None = None,
    guess: int | None = None,
    near: float = 1.0,
) -> int:
    """The largest size whose prompt has at most `room` tokens.

    It is found in a few tries, because tokens grow almost linearly with size.

    Args:
        tokens_of: tokens of the prompt of a size; roughly increasing.
        smallest, largest: the range of sizes; None = no largest.
        guess: the size to try first.
        near: stop at a prompt that fills at least this share of `room`.
    Raises:
        ValueError: when even the prompt of the smallest size does not fit.
    """
    low, used = smallest, tokens_of(smallest)
    if used > room:
        raise ValueError(f"the shortest prompt has {used} tokens, {room} fit: take a greater length")
    high, beyond = (None, 0) if largest is None else (largest + 1, 0)
    size = guess or 2 * smallest
    for attempt in range(64):
        size = max(low + 1, size if high is None else min(size, high - 1))
        if high is not None and low + 1 >= high:
            break
        tokens = tokens_of(size)
        if tokens <= room:
            low, used = size, tokens
            if used >= near * room:
                break
        else:
            high, beyond = size, tokens
        size = _next_size(low, used, high, beyond, room, attempt)
    return low


def _next_size(low: int, used: int, high: int | None, beyond: int, room: int, attempt: int) -> int:
    """The next size to try.

    Between a size that fits and one that does not, it is interpolated linearly, and every third time it is
    the middle. When no size is known that does not fit, the size grows in proportion.

    Args:
        low, used: the largest size that fits, and its tokens.
        high, beyond: the smallest size that does not fit, and its tokens; None and 0 if unknown.
    """
    if high is None or not beyond:
        return low + max(1, round(low * (room - used) / max(1, used)))
    if attempt % 3 == 2:
        return (low + high) // 2
    return low + int((high - low) * (room - used) / max(1, beyond - used))
