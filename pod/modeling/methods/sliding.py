"""Hold all tokens of some KV heads at first, and later only the first and the recent ones.

RazorAttention's other heads, SimLayerKV's lazy layers and the local window (in this file) have this in
common. Keys keep their rotation, so the order in which tokens lie in the ring of recent ones does not matter.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pod.modeling.methods.base import Builder, Request, cache_of
from pod.modeling.model.attend import EVERYTHING, Tokens, attend, compute_dtype, merge, takes_gradients
from pod.modeling.model.config import PodConfig
from pod.modeling.model.grouped import attend_slots
from pod.modeling.model.kv_buffer import KVBuffer, take_rows_of
from pod.modeling.model.kv_quantizer import KVQuantizer
from pod.modeling.model.step import CacheLayer, Step
from pod.modeling.model.window_buffer import Recent

Biased = tuple[Tokens[Tensor], float]
"""Tokens, and the number that is added to their logits."""


class Pair(NamedTuple):
    """A buffer of keys and one of values that hold the same tokens."""

    keys: KVBuffer
    values: KVBuffer

    @classmethod
    def of(cls, quantizer: KVQuantizer, evicts: bool = False) -> "Pair":
        """Buffers that hold every token.

        Args:
            evicts: whether ``keep`` will be used.
        """
        return cls(quantizer.tokens("keys", evicts), quantizer.tokens("values", evicts))

    def append(self, tokens: Tokens[Tensor], past: int) -> None:
        for buffer, x in zip(self, tokens, strict=True):
            buffer.append(x, past)

    def read(self, length: int) -> Tokens[Tensor]:
        return Tokens(self.keys.read(length), self.values.read(length))

    def attend_decode(
        self, q: Tensor, length: int, scale: float, also: Sequence[Biased] = ()
    ) -> tuple[Tensor, Tensor]:
        """Output and weights of queries ``[b, Hq, 1, d]`` that attend to what is held.

        Args:
            length: number of tokens appended so far; a window holds some of them.
            also: further tokens to attend to.
        """
        if takes_gradients(q):  # by the backward pass, later tokens may have been written over these
            tokens = [buffer.read(length).clone() for buffer in self]
        else:
            tokens = [buffer.read(length) if buffer.has_window else buffer.view(length) for buffer in self]
        count = self.keys.used_slots(length)
        found = attend_slots(q, *tokens, scale, also=also, num_slots=count)  # type: ignore[arg-type]
        out, _, weights = found
        return out, weights

    def flush(self, length: int) -> None:
        for buffer in self:
            buffer.flush(length)

    def keep(self, index: Tensor, length: int) -> None:
        for buffer in self:
            buffer.keep(index, length)


class CompensationToken:
    """The mean of all tokens that left, and their number (RazorAttention, eq. 4), in at least fp32."""

    def __init__(self, is_on: bool = True):
        self.is_on, self.count = is_on, 0
        self.mean: tuple[Tensor, ...] | None = None  # of keys and of values, [b, h, 1, d]

    def add(self, tokens: Tokens[Tensor]) -> None:
        """Take tokens ``[b, h, c, d]`` that leave into the mean: ``k̂ += (k - k̂) c / N_d``."""
        if not self.is_on:
            return
        new, compute = tokens.keys.shape[2], compute_dtype(tokens.keys.dtype)
        self.count += new
        means = [x.to(compute) if new == 1 else x.mean(2, keepdim=True, dtype=compute) for x in tokens]
        if self.mean is not None:
            means = [old.lerp(x, new / self.count) for old, x in zip(self.mean, means, strict=True)]
        elif new == 1:
            means = [x.clone() for x in means]
        self.mean = tuple(means)

    def seen(self, dtype: torch.dtype) -> list[Biased]:
        """What a query sees of the tokens that left: nothing while no token has left."""
        if self.mean is None:
            return []
        return [(Tokens(*(x.to(dtype) for x in self.mean)), math.log(self.count))]

    def tensors(self) -> list[Tensor]:
        return [] if self.mean is None else list(self.mean)

    def select_rows(self, index: Tensor) -> None:
        take_rows_of(self, index)


class SlidingTokens:
    """Tokens of rows that are alike: a *window* of sinks and recent tokens, and tokens *beside* the window.

    Before the first ``trim`` there is no window, and all tokens are beside it. ``trim`` moves what stays into
    the window. From then on a decoded token enters the window and pushes the oldest recent token out. The
    tokens of a later prompt gather beside the window until the next ``trim``.

    Args:
        quantizer: makes the buffers.
        num_sink_tokens: number of first tokens, which never leave.
        left: takes in what leaves and is seen in its place. With it, a decoded token attends after the token
            that it replaces has left; without it, before.

    Attributes:
        num_recent: tokens of the ring, 0 before the first ``trim``.
        entered: tokens that the window has taken since it was made; the last ``num_recent`` of them are in
            the ring.
        num_beside: tokens beside the window.
    """

    def __init__(self, quantizer: KVQuantizer, num_sink_tokens: int, left: CompensationToken | None = None):
        self.quantizer, self.num_sink_tokens, self.left = quantizer, num_sink_tokens, left
        self.window: Pair | None = None
        self.num_recent = self.entered = 0
        self._open()

    def _open(self) -> None:
        self.beside = Pair.of(self.quantizer)
        self.num_beside = 0

    @property
    def held(self) -> int:
        """Tokens held per row and head."""
        return min(self.entered, self.num_sink_tokens + self.num_recent) + self.num_beside

    # -- what comes and goes ---------------------------------------------------------------------------------

    def append(self, tokens: Tokens[Tensor]) -> None:
        """Hold new tokens beside the window."""
        self.beside.append(tokens, self.num_beside)
        self.num_beside += tokens.keys.shape[2]

    def trim(self, num_recent: int) -> None:
        """Keep the sinks and the last ``num_recent`` tokens in the window; nothing is left beside it.

        A ring that keeps its size goes on where it is, so that packed tokens are not packed again.
        """
        if not self.num_beside:
            return
        sinks = self.num_sink_tokens
        before, after = self.entered, self.entered + self.num_beside
        oldest = max(sinks, before - self.num_recent)  # the first recent token held
        tokens = self._in_order()
        if self.left is not None and after - num_recent > oldest:
            self.left.add(tokens.span(oldest, after - num_recent))
        if self.window is None or num_recent != self.num_recent:
            parts = [tokens.span(0, min(sinks, after)), tokens.span(oldest, after)]
            stay = Tokens(*(torch.cat(pair, dim=2) for pair in zip(*parts, strict=True)))
            make = self.quantizer.window
            self.window = Pair(*(make(part, sinks, num_recent) for part in ("keys", "values")))
            self.window.append(stay, 0)
            self.num_recent, self.entered = num_recent, stay.keys.shape[2]
        else:
            self.window.append(self.beside.read(self.num_beside), before)
            self.entered = after
        self._open()

    def _in_order(self) -> Tokens:
        """Everything held, in the order in which it entered."""
        new = self.beside.read(self.num_beside)
        if self.window is None:
            return new
        rows = [(self.entered, self.num_beside)] * new.keys.shape[0]
        return Tokens(*(Recent(buffer, x, rows) for buffer, x in zip(self.window, new, strict=True)))

    def flush(self) -> None:
        """A prompt has ended or a token was decoded: let the buffers come to rest."""
        if self.window is not None:
            self.window.flush(self.entered)
        if self.num_beside:
            self.beside.flush(self.num_beside)

    # -- attention -------------------------------------------------------------------------------------------

    def attend(self, q: Tensor, new: Tokens[Tensor], step: Step, scale: float) -> Tensor:
        """Hold the rotated tokens of a pass, and attend to what is held.

        Queries and output are ``[b, Hq, m, d]``.
        """
        if step.is_decode:
            return self.attend_decode(q, new, scale)[0]
        return self.attend_prompt(q, new, step)

    def attend_prompt(self, q: Tensor, new: Tokens[Tensor], step: Step) -> Tensor:
        """Do the same as ``attend``, for a chunk of a prompt."""
        self.append(new)
        if self.num_beside > q.shape[2]:
            new = self.beside.read(self.num_beside)
        if self.window is None:
            return attend(q, new, backend=step.chunk_backend)[0]
        backend = step.merging_backend(q, new.keys, new.values)
        parts = [attend(q, new, backend=backend)]
        left = [] if self.left is None else self.left.seen(q.dtype)
        for tokens, bias in [(self.window.read(self.entered), 0.0), *left]:
            out, lse = attend(q, tokens, visibility=EVERYTHING, backend=backend)
            parts.append((out, lse + bias))
        return merge(parts)[0]

    def attend_decode(self, q: Tensor, new: Tokens[Tensor], scale: float) -> tuple[Tensor, Tensor]:
        """Do the same as ``attend``, for one decoded token per row.

        Returns:
            The output, and the weights ``[b, h, G, columns]`` of the tokens held, then of what else is seen.
        """
        if self.window is None:
            self.append(new)
            return self.beside.attend_decode(q, self.num_beside, scale)
        if self.left is None:
            found = self.window.attend_decode(q, self.entered, scale, [(new, 0.0)])
            self._slide(new)
            return found
        self._slide(new)
        return self.window.attend_decode(q, self.entered, scale, self.left.seen(compute_dtype(q.dtype)))

    def _slide(self, new: Tokens[Tensor]) -> None:
        """Let the window take a token. When it is full, the token replaces the oldest recent one."""
        assert self.window is not None and self.num_beside == 0
        if self.left is not None and self.entered >= self.num_sink_tokens + self.num_recent:
            slot = self.num_sink_tokens + (self.entered - self.num_sink_tokens) % self.num_recent
            self.left.add(self.window.read(self.entered).span(slot, slot + 1))
        self.window.append(new, self.entered)
        self.entered += 1

    # -- bookkeeping -----------------------------------------------------------------------------------------

    def kv_buffers(self) -> dict[str, KVBuffer]:
        """The buffers by name, as in ``CacheLayer.kv_buffers``."""
        window = {} if self.window is None else self.window._asdict()
        return {f"window_{name}": buffer for name, buffer in window.items()} | self.beside._asdict()


class SlidingLayer(CacheLayer):
    """A layer that holds ``tokens`` of rows that are alike, for all of its KV heads."""

    def __init__(
        self,
        config: PodConfig,
        layer_idx: int,
        num_sink_tokens: int,
        num_recent_tokens: int,
        quantizer: KVQuantizer,
    ):
        super().__init__()
        self.layer_idx = layer_idx
        self.num_sink_tokens = num_sink_tokens
        self.num_recent_tokens = num_recent_tokens
        self.quantizer = quantizer
        self.scale = config.head_dim**-0.5
        self.clear()

    def clear(self) -> None:
        self.tokens = SlidingTokens(self.quantizer, self.num_sink_tokens)

    def kv_buffers(self) -> dict[str, Any]:
        return self.tokens.kv_buffers()

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        q, k = step.ropes[self.layer_idx].pair(q, k)
        return self.tokens.attend(q, Tokens(k, v), step, self.scale)

    def flush(self, step: Step) -> None:
        if step.ends_prompt or step.is_decode:
            self.tokens.flush()


class LocalLayer(SlidingLayer):
    """A local window: read the prompt with full attention, then keep only the most recent ``budget`` tokens.

    From then on the window slides. A decoded token attends to what is held and to itself before the oldest
    token leaves.
    """

    def __init__(self, config: PodConfig, layer_idx: int, request: Request):
        super().__init__(config, layer_idx, 0, request.budget, request.quantizer)

    def flush(self, step: Step) -> None:
        if step.ends_prompt and not step.is_decode:
            self.tokens.trim(self.num_recent_tokens)
        super().flush(step)


BUILDERS = {"local_window": Builder(build=cache_of(LocalLayer))}
