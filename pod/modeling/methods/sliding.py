"""``SlidingTokens``: hold all tokens while a prompt is fed, and later only the first and the recent ones.

RazorAttention uses it for heads that are no retrieval heads, SimLayerKV for lazy layers, and the method
``local_window`` (in this file) for all layers. Keys keep their rotation, so the order in which the ring holds
recent tokens does not matter.
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
"""Tokens, and a number to add to their logits."""


class Pair(NamedTuple):
    """A buffer of keys and a buffer of values of the same tokens. See ``KVBuffer`` for the methods."""

    keys: KVBuffer
    values: KVBuffer

    @classmethod
    def of(cls, quantizer: KVQuantizer, evicts: bool = False) -> "Pair":
        """Two buffers of every token.

        Args:
            quantizer: makes the buffers.
            evicts: whether ``keep`` will be called.
        """
        return cls(quantizer.tokens("keys", evicts), quantizer.tokens("values", evicts))

    def append(self, tokens: Tokens[Tensor], past: int) -> None:
        """Write new tokens ``[b, h, m, d]`` behind the ``past`` tokens that every row has."""
        for buffer, x in zip(self, tokens, strict=True):
            buffer.append(x, past)

    def read(self, length: int) -> Tokens[Tensor]:
        """The slots in use after ``length`` tokens, ``[b, h, used slots, d]``."""
        return Tokens(self.keys.read(length), self.values.read(length))

    def attend_decode(
        self, q: Tensor, length: int, scale: float, also: Sequence[Biased] = ()
    ) -> tuple[Tensor, Tensor]:
        """Attention of queries ``[b, Hq, 1, d]`` to all tokens held.

        Args:
            q: the queries.
            length: number of tokens appended so far; a window holds some of them.
            scale: factor on the logits.
            also: further tokens to attend to.

        Returns:
            The output ``[b, Hq, 1, d]``, and the weights ``[b, h, G, columns]`` of the slots in use, then of
            the tokens in ``also``.
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
    """The mean of all tokens that left a window, and their number (RazorAttention, eq. 4), in at least fp32.

    Args:
        is_on: False = tokens that leave are forgotten, and the mean stays empty.

    Attributes:
        count: how many tokens left.
        mean: of their keys and of their values, ``[b, h, 1, d]`` each. None while no token has left.
    """

    def __init__(self, is_on: bool = True):
        self.is_on, self.count = is_on, 0
        self.mean: tuple[Tensor, ...] | None = None  # of keys and of values, [b, h, 1, d]

    def add(self, tokens: Tokens[Tensor]) -> None:
        """Update the mean with ``c`` tokens ``[b, h, c, d]`` that leave: ``k̂ += (mean(k) - k̂) c / N_d``."""
        if not self.is_on:
            return
        new = tokens.keys.shape[2]
        compute = compute_dtype(tokens.keys.dtype)
        self.count += new
        means = [x.to(compute) if new == 1 else x.mean(2, keepdim=True, dtype=compute) for x in tokens]
        if self.mean is not None:
            means = [old.lerp(x, new / self.count) for old, x in zip(self.mean, means, strict=True)]
        elif new == 1:
            means = [x.clone() for x in means]
        self.mean = tuple(means)

    def seen(self, dtype: torch.dtype) -> list[Biased]:
        """The mean as a token in ``dtype``, with ``log(count)`` to add to its logits. Empty = no mean yet."""
        if self.mean is None:
            return []
        return [(Tokens(*(x.to(dtype) for x in self.mean)), math.log(self.count))]

    def tensors(self) -> list[Tensor]:
        """The tensors of the mean."""
        return [] if self.mean is None else list(self.mean)

    def select_rows(self, index: Tensor) -> None:
        """Keep, repeat or reorder rows of the batch."""
        take_rows_of(self, index)


class SlidingTokens:
    """Tokens of rows of equal length: a *window* of sinks and recent tokens, and tokens *beside* the window.

    Before the first ``trim`` there is no window, and all tokens are beside it. ``trim`` makes the window and
    moves the tokens that stay into it. From then on, a decoded token enters the window and pushes the oldest
    recent token out. The tokens of a later prompt are stored beside the window until the next ``trim``.

    Args:
        quantizer: makes the buffers.
        num_sink_tokens: number of first tokens, which never leave.
        left: a compensation token for the tokens that leave, to which queries attend. With it, a decoded
            token attends after the token that it replaces has left. None = there is none, and a decoded token
            attends before.

    Attributes:
        window: the buffers of the window. None before the first ``trim``.
        beside: the buffers of the tokens beside the window.
        num_recent: slots of the window's ring, 0 before the first ``trim``.
        entered: how many tokens were appended to the window since it was made.
        num_beside: number of tokens beside the window.
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
        """How many tokens each row and head holds."""
        return min(self.entered, self.num_sink_tokens + self.num_recent) + self.num_beside

    # -- what comes and goes ---------------------------------------------------------------------------------

    def append(self, tokens: Tokens[Tensor]) -> None:
        """Store new tokens ``[b, h, m, d]`` beside the window."""
        self.beside.append(tokens, self.num_beside)
        self.num_beside += tokens.keys.shape[2]

    def trim(self, num_recent: int) -> None:
        """Keep only the sinks and the last ``num_recent`` tokens, in the window; none is left beside it.

        A ring that keeps its size only gets new tokens, so that packed tokens are not packed again.
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
        """All tokens held, in the order of their positions."""
        new = self.beside.read(self.num_beside)
        if self.window is None:
            return new
        rows = [(self.entered, self.num_beside)] * new.keys.shape[0]
        return Tokens(*(Recent(buffer, x, rows) for buffer, x in zip(self.window, new, strict=True)))

    def flush(self) -> None:
        """Flush the buffers, when a prompt has ended or a token was decoded; see ``KVBuffer.flush``."""
        if self.window is not None:
            self.window.flush(self.entered)
        if self.num_beside:
            self.beside.flush(self.num_beside)

    # -- attention -------------------------------------------------------------------------------------------

    def attend(self, q: Tensor, new: Tokens[Tensor], step: Step, scale: float) -> Tensor:
        """Store the new tokens of a pass, and compute the attention of its queries to all tokens held.

        Args:
            q: ``[b, Hq, m, d]``, rotated.
            new: ``[b, h, m, d]``, keys rotated.
            step: the pass.
            scale: factor on the logits.

        Returns:
            ``[b, Hq, m, d]``.
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
            The output, and the weights ``[b, h, G, columns]`` of the slots of the window, then of the new
            token, or of the compensation token.
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
        """Append a token to the window. If this is full, the token overwrites the oldest recent one."""
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
    """A layer that holds ``SlidingTokens`` for all of its KV heads, in rows of equal length."""

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

    From then on the window slides. A decoded token attends to all tokens held and to itself before the oldest
    token leaves.
    """

    def __init__(self, config: PodConfig, layer_idx: int, request: Request):
        super().__init__(config, layer_idx, 0, request.budget, request.quantizer)

    def flush(self, step: Step) -> None:
        if step.ends_prompt and not step.is_decode:
            self.tokens.trim(self.num_recent_tokens)
        super().flush(step)


BUILDERS = {"local_window": Builder(build=cache_of(LocalLayer))}
