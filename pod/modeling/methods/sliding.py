"""Keys and values of some KV heads that are held whole at first, and later only where the first and recent tokens are.

What RazorAttention's other heads, SimLayerKV's lazy layers and a local window have in common. Keys keep their rotation, so
the order in which tokens lie in the ring of recent ones does not matter.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pod.modeling.shipped.attend import EVERYTHING, Tokens, attend, merge, span, takes_gradients
from pod.modeling.shipped.config import PodConfig
from pod.modeling.shipped.grouped import attend_slots
from pod.modeling.shipped.step import CacheLayer, Step
from pod.modeling.shipped.stores import NATIVE, Codec, Recent, Store

Biased = tuple[Tokens[Tensor], float]
"""Tokens, and what is added to their logits."""


class Pair(NamedTuple):
    """A store of keys and one of values that hold the same tokens."""

    keys: Store
    values: Store

    @classmethod
    def of(cls, codec: Codec, evicts: bool = False) -> "Pair":
        """Stores of every token; ``evicts``: ``keep`` will be used."""
        return cls(codec.tokens("keys", evicts), codec.tokens("values", evicts))

    def append(self, tokens: Tokens[Tensor], past: int) -> None:
        for store, x in zip(self, tokens, strict=True):
            store.append(x, past)

    def read(self, length: int) -> Tokens[Tensor]:
        return Tokens(self.keys.read(length), self.values.read(length))

    def attend_decode(
        self, q: Tensor, length: int, scale: float, also: Sequence[Biased] = ()
    ) -> tuple[Tensor, Tensor]:
        """Output and weights of queries ``[b, Hq, 1, d]`` on what is held of ``length`` tokens, and on further ones."""
        if takes_gradients(q):  # whose backward comes when tokens have been written over
            tokens = [store.read(length).clone() for store in self]
        else:
            tokens = [store.read(length) if store.has_window else store.view(length) for store in self]
        count = self.keys.used_slots(length)
        out, _, weights = attend_slots(q, *tokens, scale, also=also, num_slots=count)  # type: ignore[arg-type]
        return out, weights

    def settle(self, length: int) -> None:
        for store in self:
            store.settle(length)

    def keep(self, index: Tensor, length: int) -> None:
        for store in self:
            store.keep(index, length)

    def predicted_nbytes(self, length: int) -> int:
        return sum(store.predicted_nbytes(length) for store in self if not store.is_empty)


class SlidingTokens:
    """Tokens of rows that are alike: a *window* of sinks and recent tokens, and those that came *beside* it.

    Before the first ``trim`` there is no window and everything is beside it. ``trim`` moves what stays into the
    window; from then on decoded tokens enter the window and push the oldest recent token out, while the tokens of a
    later prompt gather beside the window until the next ``trim``.

    Args:
        codec: makes the stores.
        num_sink_tokens: first tokens that never leave.

    Attributes:
        num_recent: tokens of the ring, None before the first ``trim``.
        entered: tokens that the window has taken since it was made; the last ``num_recent`` of them are in the ring.
        num_beside: tokens beside the window; the first ``settled_beside`` of them have come to rest.
    """

    def __init__(self, codec: Codec, num_sink_tokens: int):
        self.codec, self.num_sink_tokens = codec, num_sink_tokens
        self.num_recent: int | None = None
        self.window: Pair | None = None
        self.entered = 0
        self._open()

    def _open(self) -> None:
        self.beside = Pair.of(self.codec)
        self.num_beside = self.settled_beside = 0

    @property
    def held(self) -> int:
        """Tokens held per row and head."""
        return self.num_in_window + self.num_beside

    @property
    def num_in_window(self) -> int:
        return 0 if self.num_recent is None else min(self.entered, self.num_sink_tokens + self.num_recent)

    # -- what comes and goes ---------------------------------------------------------------------------------

    def append(self, tokens: Tokens[Tensor]) -> None:
        """Hold new tokens beside the window."""
        self.beside.append(tokens, self.num_beside)
        self.num_beside += tokens.keys.shape[2]

    def trim(self, num_recent: int) -> list[Tokens[Tensor]]:
        """Keep the sinks and the last ``num_recent`` tokens, in the window; nothing is left beside it.

        A ring of the same size goes on where it is: packed tokens are not packed again.

        Returns:
            The tokens that are dropped, if any.
        """
        if not self.held or (not self.num_beside and num_recent == self.num_recent):
            return []
        sinks, before, after = self.num_sink_tokens, self.entered, self.entered + self.num_beside
        oldest = max(sinks, before - (self.num_recent or 0))  # the first recent token held
        tokens = self._in_order()
        dropped = _span(tokens, oldest, max(oldest, after - num_recent))
        if self.window is None or num_recent != self.num_recent:
            parts = [_span(tokens, 0, min(sinks, after)), _span(tokens, oldest, after)]
            stay = Tokens(*(torch.cat(pair, dim=2) for pair in zip(*parts, strict=True)))
            make = self.codec.window
            self.window = Pair(*(make(part, sinks, num_recent) for part in ("keys", "values")))
            self.window.append(stay, 0)
            self.num_recent, self.entered = num_recent, stay.keys.shape[2]
        else:
            self.window.append(self.beside.read(self.num_beside), before)
            self.entered = after
        self._open()
        return [dropped] if dropped.keys.shape[2] else []

    def _in_order(self) -> Tokens:
        """Everything held, in the order in which it entered."""
        if self.window is None:
            return self.beside.read(self.num_beside)
        if self.num_beside:
            new = self.beside.read(self.num_beside)
        else:
            new = _span(self.window.read(self.entered), 0, 0)
        rows = [(self.entered, self.num_beside)] * new.keys.shape[0]
        return Tokens(*(Recent(store, x, rows) for store, x in zip(self.window, new, strict=True)))

    def settle(self) -> None:
        """A prompt has ended or a token was decoded: let the stores come to rest."""
        if self.window is not None:
            self.window.settle(self.entered)
        if self.num_beside:
            self.beside.settle(self.num_beside)
        self.settled_beside = self.num_beside

    # -- attention -------------------------------------------------------------------------------------------

    def attend(self, q: Tensor, new: Tokens[Tensor], step: Step, scale: float) -> Tensor:
        """Hold the rotated tokens of a pass and attend: ``[b, Hq, m, d]`` for its queries of the same shape."""
        if step.is_decode:
            return self.attend_decode(q, new, scale)[0]
        return self.attend_prompt(q, new, step)

    def attend_prompt(
        self, q: Tensor, new: Tokens[Tensor], step: Step, more: Sequence[Biased] = ()
    ) -> Tensor:
        """As ``attend`` for a chunk of a prompt, whose queries all see ``more`` tokens too."""
        self.append(new)
        if self.num_beside > q.shape[2]:
            new = self.beside.read(self.num_beside)
        if not more and self.window is None:
            return attend(q, new, backend=step.chunk_backend)[0]
        backend = step.merging_backend(q, new.keys, new.values)
        parts = [attend(q, new, backend=backend)]
        if self.window is not None:
            more = [(self.window.read(self.entered), 0.0), *more]
        for tokens, bias in more:
            out, lse = attend(q, tokens, visibility=EVERYTHING, backend=backend)
            parts.append((out, lse + bias))
        return merge(parts)[0]

    def attend_decode(
        self,
        q: Tensor,
        new: Tokens[Tensor],
        scale: float,
        leave: Callable[[Tokens[Tensor] | None], Sequence[Biased]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """As ``attend`` for one decoded token per row.

        Args:
            leave: called with the token that the new one replaces (None while there is room), which is then not seen
                any more; gives what is seen instead. Without it the query still sees the token that leaves.

        Returns:
            ``[b, Hq, 1, d]``, and the weights ``[b, h, G, columns]`` of the tokens held, then of what else is seen.
        """
        if self.window is None:
            self.append(new)
            return self.beside.attend_decode(q, self.num_beside, scale)
        if leave is None:
            found = self.window.attend_decode(q, self.entered, scale, [(new, 0.0)])
            self._slide(new)
            return found
        also = leave(self._leaving())
        self._slide(new)
        return self.window.attend_decode(q, self.entered, scale, also)

    def _slide(self, new: Tokens[Tensor]) -> None:
        assert self.window is not None and self.num_beside == 0
        self.window.append(new, self.entered)
        self.entered += 1

    def _leaving(self) -> Tokens[Tensor] | None:
        """View of the token of the window that the next one replaces; None while there is room."""
        assert self.window is not None and self.num_recent is not None
        if self.entered < self.num_sink_tokens + self.num_recent:
            return None
        slot = self.num_sink_tokens + (self.entered - self.num_sink_tokens) % self.num_recent
        return _span(self.window.read(self.entered), slot, slot + 1)

    # -- bookkeeping -----------------------------------------------------------------------------------------

    def stores(self) -> dict[str, Store]:
        """By name, as ``CacheLayer.stores``."""
        window = (
            {} if self.window is None else {f"window_{name}": x for name, x in self.window._asdict().items()}
        )
        return window | self.beside._asdict()

    def predicted_nbytes(self) -> int:
        window = 0 if self.window is None else self.window.predicted_nbytes(self.entered)
        beside = self.beside.predicted_nbytes(self.settled_beside)
        if self.num_beside > self.settled_beside:  # native until they settle
            batch, heads, _, head_dim = self.beside.keys.shape
            new = 2 * (self.num_beside - self.settled_beside) * batch * heads * head_dim
            beside += new * self.beside.keys.dtype.itemsize
        return window + beside


class SlidingLayer(CacheLayer):
    """A layer that holds ``tokens`` of rows that are alike, for all of its KV heads."""

    def __init__(
        self, config: PodConfig, num_sink_tokens: int, num_recent_tokens: int, codec: Codec = NATIVE
    ):
        super().__init__()
        self.num_sink_tokens, self.num_recent_tokens, self.codec = num_sink_tokens, num_recent_tokens, codec
        self.scale = config.head_dim**-0.5
        self.clear()

    def clear(self) -> None:
        self.tokens = SlidingTokens(self.codec, self.num_sink_tokens)

    def stores(self) -> dict[str, Any]:
        return self.tokens.stores()

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        q, k = step.rope.pair(q, k)
        return self.tokens.attend(q, Tokens(k, v), step, self.scale)

    def settle(self, step: Step) -> None:
        if step.ends_prompt or step.is_decode:
            self.tokens.settle()

    def predicted_nbytes(self, length: int) -> int:
        """For the tokens held now; ``length`` tokens were seen."""
        return self.tokens.predicted_nbytes()


def _span(tokens: Tokens, start: int, stop: int) -> Tokens[Tensor]:
    return Tokens(*(span(x, start, stop) for x in tokens))
