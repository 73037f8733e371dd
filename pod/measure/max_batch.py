"""The largest batch that fits, or the longest prompt, found by trying.

PoD Table 3 and D2O Table 3 report such batches. They are measured here in the way of FlexGen and LCKV.

A try reads a random prompt of x tokens per row into the method's cache, and decodes y tokens of every row,
one at a time. It fits when the GPU does not run out of memory. Where there is a limit in bytes, it fits when
weights, cache and activations stay below the limit. Two small tries give the bytes per row, from which the
search guesses the largest batch. Bisection then finds it.

Batches are whole numbers: 41 and 57 rows differ by 1.39x, while the bytes allow 1.41x. Therefore the result
also has the number of rows that would fit if rows could be cut.
"""

import collections
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from pod.measure.measured_memory import Meter, free_memory, next_token, now, weight_bytes
from pod.modeling.placement import free_unused

_KEPT = 200  # characters of an error


class Tries:
    """What is known about the batches of one method: whether they fit, and how many bytes they take.

    Args:
        make_cache: a function that makes a new cache.
        prompt: tokens per row that are read.
        generated: tokens per row that are decoded.
        limit: bytes that weights, cache and activations may take; None = until the GPU is full.

    Attributes:
        peaks: batch → peak bytes of a try that fitted.
        failed: batch → why a try did not fit.
    """

    def __init__(
        self,
        model: Any,
        make_cache: Callable[..., Any],
        prompt: int,
        generated: int,
        limit: int | None,
        seed: int = 0,
    ):
        self.model, self.make_cache, self.limit = model, make_cache, limit
        self.prompt, self.generated, self.seed = prompt, generated, seed
        self.weights = weight_bytes(model)
        self.peaks: dict[int, int] = {}
        self.failed: dict[int, str] = {}

    def fits(self, batch: int) -> bool:
        """Whether a batch of so many rows fits. Each batch is tried once.

        Errors other than a lack of memory are raised.
        """
        if batch not in self.peaks and batch not in self.failed:
            try:
                self.peaks[batch] = self._peak(batch)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                self.failed[batch] = " ".join(f"{type(error).__name__}: {error}".split())[:_KEPT]
            self._free()
        return batch in self.peaks

    def _passes(self, cache: Any, token: Tensor) -> Iterator[None]:
        """Read rows into a new cache, then decode tokens; yield after each pass, which gives one new token.

        The last new token is not fed again.

        Args:
            token: the rows to read, [B, n].
        """
        for _ in range(self.generated):
            token = next_token(self.model, cache, token)
            yield

    @torch.no_grad()
    def _peak(self, batch: int) -> int:
        """The peak bytes of a try, weights included.

        Raises:
            MemoryError: the peak is beyond the limit. Without a limit, CUDA raises its own error.
        """
        room = None if self.limit is None else self.limit - self.weights
        if room is not None and room < 0:
            raise MemoryError(f"the weights alone take {self.weights:,} bytes")
        with Meter(self.model, room) as meter:
            rows, cache = self._start(batch)
            return self.weights + max(meter.restart() for _ in self._passes(cache, rows))

    def _start(self, batch: int) -> tuple[Tensor, Any]:
        """The rows that a try reads, and a new cache for it."""
        return random_rows(self.model, batch, self.prompt, self.seed), self.make_cache()

    @torch.no_grad()
    def throughput(self, batch: int) -> dict[str, float]:
        """Generated tokens per second, summed over the rows.

        Returns:
            `tokens_per_second`, in which the time includes reading the prompt, as FlexGen counts it; and
            `decode_tokens_per_second`, of decoding alone, when more than one token is generated.
        """
        rows = random_rows(self.model, batch, self.prompt, self.seed)
        passes = self._passes(self.make_cache(), rows)
        began = now(rows.device)
        next(passes)
        read = now(rows.device)
        collections.deque(passes, maxlen=0)
        ended = now(rows.device)
        self._free()
        rates = {"tokens_per_second": batch * self.generated / (ended - began)}
        if self.generated > 1:
            rates["decode_tokens_per_second"] = batch * (self.generated - 1) / (ended - read)
        return rates

    def _free(self) -> None:
        """Free the GPU memory of a try, also what a failed try left in reference cycles."""
        device = next(self.model.parameters()).device
        if device.type == "cuda":
            free_unused(device)


class LongTries(Tries):
    """Tries with one long row, for the longest prompt that fits (IMDC Table 1).

    A "batch" of b means one row of b times ``prompt`` tokens here.

    Args:
        make_cache: a function that makes a new cache for a number of tokens.
    """

    def _start(self, batch: int) -> tuple[Tensor, Any]:
        tokens = batch * self.prompt
        return random_rows(self.model, 1, tokens, self.seed), self.make_cache(tokens)


def random_rows(model: Any, batch: int, length: int, seed: int = 0) -> Tensor:
    """Random tokens [batch, length] on the model's device."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(model.config.vocab_size, (batch, length), generator=generator)
    return tokens.to(next(model.parameters()).device)


def search(tries: Tries, most: int) -> dict[str, Any]:
    """Find the largest batch of at most `most` rows that fits.

    Returns:
        A dictionary for JSON:

        - `batch`: the rows of the largest batch; 0 when not one row fits.
        - `fractional_batch`: the rows that would fit if rows could be cut (`fractional`); None = not known.
        - `bytes_per_row`: see `bytes_per_row`; None when fewer than two batches fitted.
        - `peak_bytes`, `failed`: peak bytes, or the reason why it did not fit, of each batch that was tried.
        - `most_reached`: whether `most` rows fit, so that larger batches were not tried.
    """
    limit, guess = memory_limit(tries), 1
    if most > 1 and all(tries.fits(batch) for batch in (1, 2)):
        guess = (
            most if limit is None or not bytes_per_row(tries.peaks) else int(fractional(tries.peaks, limit))
        )
    batch = largest(tries.fits, guess, most)
    two = len(tries.peaks) > 1
    limit = memory_limit(tries)
    return {
        "batch": batch,
        "fractional_batch": fractional(tries.peaks, limit) if two and limit is not None else None,
        "bytes_per_row": bytes_per_row(tries.peaks) if two else None,
        "peak_bytes": {str(rows): size for rows, size in sorted(tries.peaks.items())},
        "failed": {str(rows): reason for rows, reason in sorted(tries.failed.items())},
        "most_reached": batch == most,
    }


def memory_limit(tries: Tries) -> int | None:
    """The bytes that weights, cache and activations may take; None on a CPU without a limit.

    It is the limit of the tries. Without one, it is what the weights take and what the GPU has free.
    """
    device = next(tries.model.parameters()).device
    if tries.limit is not None or device.type != "cuda":
        return tries.limit
    return tries.weights + free_memory(device)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or an error that led to it, is a lack of memory.

    When memory runs out while a CUDA graph is being captured, another error follows and hides the first one.
    """
    while error is not None:
        text = str(error)
        if (
            isinstance(error, (torch.OutOfMemoryError, MemoryError))
            or "out of memory" in text
            or "not enough memory" in text
            or "ALLOC_FAILED" in text
        ):
            return True
        error = error.__cause__ or error.__context__
    return False


def largest(fits: Callable[[int], bool], guess: int, most: int = sys.maxsize) -> int:
    """The largest batch of at most `most` rows that fits; 0 when not even one row fits.

    The search goes outwards from a guess, in steps that double, and then by bisection.

    Args:
        fits: says whether a batch of so many rows fits.
        guess: the first batch to try.
    """
    low, high, batch, width = 0, most + 1, guess, 1
    while high - low > 1:
        batch = min(max(batch, low + 1), high - 1)
        if fits(batch):
            low = batch
        else:
            high = batch
        if high > most:  # no batch was too large yet
            batch = low + width
        else:
            batch = high - width if low == 0 else (low + high) // 2
        width *= 2
    return low


def bytes_per_row(peaks: dict[int, int]) -> float:
    """Bytes by which the peak grows with each row: between the smallest and the largest batch that fitted.

    Args:
        peaks: rows of a batch → peak bytes, of at least two batches.
    """
    first = min(peaks)
    last = max(peaks)
    return (peaks[last] - peaks[first]) / (last - first)


def fractional(peaks: dict[int, int], limit: float) -> float:
    """The number of rows that would fit into `limit` bytes if rows could be cut.

    It lies on the line through the peaks of the smallest and the largest batch that fitted.
    """
    last = max(peaks)
    return last + (limit - peaks[last]) / bytes_per_row(peaks)
