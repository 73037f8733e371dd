"""Keys and values of some KV heads that are held whole at first, and later only where the first and recent tokens are.

What RazorAttention's other heads and SimLayerKV's lazy layers have in common. Keys keep their rotation, so the order in
which tokens lie in the ring of recent ones does not matter.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from pod.modeling.shipped.attend import attend
from pod.modeling.shipped.blocked import Source, blocked_attention
from pod.modeling.shipped.step import Step
from pod.modeling.shipped.stores import Codec, Store
from pod.modeling.shipped.strips import strip_attention


class Tokens(NamedTuple):
    """Keys and values ``[b, h, c, d]`` of the same ``c`` tokens."""

    keys: Tensor
    values: Tensor


class Pair(NamedTuple):
    """A store of keys and one of values that hold the same tokens."""

    keys: Store
    values: Store

    def append(self, tokens: Tokens, past: int) -> None:
        for store, x in zip(self, tokens, strict=True):
            store.append(x, past)

    def read(self, length: int) -> Tokens:
        return Tokens(self.keys.read(length), self.values.read(length))

    def settle(self, length: int) -> None:
        for store in self:
            store.settle(length)

    def select_rows(self, index: Tensor) -> None:
        for store in self:
            store.select_rows(index)

    def predicted_nbytes(self, length: int) -> int:
        return sum(store.predicted_nbytes(length) for store in self if not store.is_empty)


class Column(NamedTuple):
    """Tokens that one decoded query sees.

    Attributes:
        bias: added to their logits.
        hidden: index of one that it does not see.
    """

    tokens: Tokens
    bias: float = 0.0
    hidden: int | None = None


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
        self.beside = Pair(self.codec.tokens("keys"), self.codec.tokens("values"))
        self.num_beside = self.settled_beside = 0

    @property
    def held(self) -> int:
        """Tokens held per row and head."""
        return self.num_in_window + self.num_beside

    @property
    def num_in_window(self) -> int:
        if self.num_recent is None:
            return 0
        return min(self.entered, self.num_sink_tokens + self.num_recent)

    def _slot(self, index: int) -> int:
        """Slot of the ``index``-th token that entered."""
        assert self.num_recent is not None and index >= self.num_sink_tokens
        return self.num_sink_tokens + (index - self.num_sink_tokens) % self.num_recent

    # -- what comes and goes ---------------------------------------------------------------------------------

    def append(self, tokens: Tokens) -> None:
        """Hold new tokens beside the window."""
        self.beside.append(tokens, self.num_beside)
        self.num_beside += tokens.keys.shape[2]

    def slide(self, tokens: Tokens) -> None:
        """Take one decoded token into the window, over the oldest recent one when it is full."""
        assert self.window is not None and self.num_beside == 0
        self.window.append(tokens, self.entered)
        self.entered += 1

    def trim(self, num_recent: int) -> list[Tokens]:
        """Keep the sinks and the last ``num_recent`` tokens, in the window; nothing is left beside it.

        Returns:
            The tokens that are dropped, in parts: views, to be read before the next change.
        """
        if self.window is not None and num_recent == self.num_recent:
            return self._trim_same()
        tokens = self.beside.read(self.num_beside) if self.num_beside else None
        if self.window is not None:
            ordered = self._in_order()
            tokens = ordered if tokens is None else Tokens(*map(_join, zip(ordered, tokens, strict=True)))
        if tokens is None:
            return []
        self.num_recent, self.entered = num_recent, tokens.keys.shape[2]
        self.window = Pair(
            *(self.codec.window(part, self.num_sink_tokens, num_recent) for part in ("keys", "values"))
        )
        self.window.append(tokens, 0)
        self._open()
        dropped = self.entered - num_recent - self.num_sink_tokens
        return [_cut(tokens, self.num_sink_tokens, dropped)] if dropped > 0 else []

    def _trim_same(self) -> list[Tokens]:
        """Without touching what stays in the ring: packed tokens are not packed again."""
        assert self.window is not None and self.num_recent is not None
        if not self.num_beside:
            return []
        tokens, before = self.beside.read(self.num_beside), self.entered
        after = before + self.num_beside
        first, stop = (max(self.num_sink_tokens, end - self.num_recent) for end in (before, after))
        dropped = []
        if first < min(stop, before):
            held = self._recent(first, min(stop, before))
            dropped.append(held)
        if stop > max(first, before):
            start = max(first, before)
            dropped.append(_cut(tokens, start - before, stop - start))
        self.window.append(tokens, before)
        self.entered = after
        self._open()
        return dropped

    def _recent(self, first: int, stop: int) -> Tokens:
        """Copies of the tokens that entered as number ``first … stop - 1``, all of them in the ring."""
        assert self.window is not None
        tokens = self.window.read(self.entered)
        slots = [self._slot(index) for index in range(first, stop)]
        index = torch.tensor(slots, device=tokens.keys.device)
        return Tokens(*(x.index_select(2, index) for x in tokens))

    def _in_order(self) -> Tokens:
        """Everything in the window, oldest token first."""
        assert self.window is not None and self.num_recent is not None
        sinks = min(self.entered, self.num_sink_tokens)
        first = max(sinks, self.entered - self.num_recent)
        tokens = self.window.read(self.entered)
        if first == self.entered:
            return Tokens(*(x[:, :, :sinks] for x in tokens))
        recent = self._recent(first, self.entered)
        return Tokens(*(torch.cat((x[:, :, :sinks], y), 2) for x, y in zip(tokens, recent, strict=True)))

    def settle(self) -> None:
        """A prompt has ended or a token was decoded: let the stores come to rest."""
        if self.window is not None:
            self.window.settle(self.entered)
        if self.num_beside:
            self.beside.settle(self.num_beside)
        self.settled_beside = self.num_beside

    # -- attention -------------------------------------------------------------------------------------------

    def attend_prompt(
        self, q: Tensor, new: Tokens, step: Step, scale: float, more: list[Source] | None = None
    ) -> Tensor:
        """Hold a chunk of a prompt and attend: ``[b, Hq, m, d]`` for its queries of the same shape.

        Args:
            more: further sources that every query sees.
        """
        fresh = not self.held and not more
        self.append(new)
        if fresh and step.backend != "reference":
            return attend(q, Tokens(new.keys, new.values), backend=step.backend)[0]
        if not self.num_in_window and not more and step.backend != "reference":
            return strip_attention(q, *self.beside.read(self.num_beside), scale)
        queries = q.unflatten(1, (new.keys.shape[1], -1))
        sources = list(more or ())
        if self.num_in_window:
            assert self.window is not None
            sources.append(Source(queries, *self.window.read(self.entered), visible=everything))
        first = self.num_beside - q.shape[2]  # place of the first query beside the window
        sources.append(Source(queries, *self.beside.read(self.num_beside), visible=causal(self.num_beside)))
        places = torch.arange(first, self.num_beside, device=q.device).expand(q.shape[0], -1)
        return blocked_attention(sources, places, scale)

    def attend_decode(
        self,
        q: Tensor,
        new: Tokens,
        scale: float,
        leave: Callable[[Tokens | None], list[Column]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attend with one decoded token to all that is held and to itself; then hold it.

        Args:
            q: ``[b, Hq, 1, d]``.
            leave: called with the token that the new one replaces (None while there is room), which is then not seen
                any more; gives what is seen instead. Without it the query still sees the token that leaves.

        Returns:
            ``[b, Hq, 1, d]``, and the weights ``[b, h, G, columns]``: first the tokens held, last the new one.
        """
        columns = []
        if self.window is not None:  # read once, before the new token takes the slot of the oldest
            held, leaving = self.window.read(self.entered), self._leaving_slot()
            columns.append(Column(held, hidden=None if leave is None else leaving))
            if leave is not None:
                columns += leave(None if leaving is None else _cut(held, leaving, 1))
        elif self.num_beside:
            columns.append(Column(self.beside.read(self.num_beside)))
        queries = q.unflatten(1, (new.keys.shape[1], -1)).squeeze(3) * scale
        out, weights = attend_columns(queries, [*columns, Column(new)])
        if self.window is None:
            self.append(new)
        else:
            self.slide(new)
        return out, weights

    def _leaving_slot(self) -> int | None:
        """Slot of the window whose token the next decoded one replaces; None while there is room."""
        assert self.num_recent is not None
        if self.entered < self.num_sink_tokens + self.num_recent:
            return None
        return self._slot(self.entered - self.num_recent)

    # -- bookkeeping -----------------------------------------------------------------------------------------

    def _pairs(self) -> Iterator[tuple[str, Pair]]:
        if self.window is not None:
            yield "window_keys", self.window
        yield "keys", self.beside

    def parts(self) -> Iterator[tuple[str, Tensor]]:
        for name, pair in self._pairs():
            yield from ((name, tensor) for tensor in pair.keys.tensors())
            yield from (("values", tensor) for tensor in pair.values.tensors())

    def select_rows(self, index: Tensor) -> None:
        for _, pair in self._pairs():
            pair.select_rows(index)

    def predicted_nbytes(self) -> int:
        window = 0 if self.window is None else self.window.predicted_nbytes(self.entered)
        beside = self.beside.predicted_nbytes(self.settled_beside)
        if self.num_beside > self.settled_beside:  # native until they settle
            batch, heads, _, head_dim = self.beside.keys.shape
            new = 2 * (self.num_beside - self.settled_beside) * batch * heads * head_dim
            beside += new * self.beside.keys.dtype.itemsize
        return window + beside


def attend_columns(queries: Tensor, columns: list[Column]) -> tuple[Tensor, Tensor]:
    """One softmax of scaled queries ``[b, h, G, d]`` over all columns.

    Returns:
        ``[b, h·G, 1, d]`` and the weights ``[b, h, G, columns]`` in at least fp32.
    """
    compute = torch.promote_types(queries.dtype, torch.float32)
    logits = []
    for tokens, bias, hidden in columns:
        part = (queries @ tokens.keys.transpose(2, 3)).to(compute)
        if bias:
            part += bias
        if hidden is not None:
            part[..., hidden] = float("-inf")
        logits.append(part)
    weights = torch.cat(logits, dim=-1).softmax(-1)
    shares = weights.to(queries.dtype).split([part.shape[-1] for part in logits], dim=-1)
    out = sum(
        (share @ column.tokens.values for share, column in zip(shares, columns, strict=True)),
        start=torch.zeros_like(queries),
    )
    return out.flatten(1, 2).unsqueeze(2), weights


def everything(query: Tensor) -> Tensor:
    """Visibility of a source whose tokens all came before the queries."""
    return torch.ones((*query.shape, 1), dtype=torch.bool, device=query.device)


def causal(length: int) -> Callable[[Tensor], Tensor]:
    """Visibility of ``length`` tokens at places 0, 1, …, for queries given by their places."""

    def visible(query: Tensor) -> Tensor:
        return torch.arange(length, device=query.device) <= query[..., None]

    return visible


def _join(pair: tuple[Tensor, Tensor]) -> Tensor:
    return torch.cat(pair, dim=2)


def _cut(tokens: Tokens, start: int, count: int) -> Tokens:
    return Tokens(*(x[:, :, start : start + count] for x in tokens))
