"""One attention operation for prefill, chunks behind a filled cache, decoding, training and every method.

``attend(q, tokens, lead, visibility)`` gives the output and the log-sum-exp of its logits. So parts of one
softmax that were attended apart merge exactly (``merge``). Implementations are registered in
``IMPLEMENTATIONS``. They run wherever torch runs, and travel with exported checkpoints.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from .sharing import Roles
from .sinks import Sink

_log = logging.getLogger(__name__)
Span = tuple[int, int]


class TokenSource(Protocol):
    """Keys or values that are no plain tensor ``[B, h, n, d]`` with column = position.

    Rings and packed tokens are such sources.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """``(B, h, n, d)``."""
        ...

    def span(self, start: int, stop: int) -> Tensor:
        """Tokens ``[B, h, stop - start, d]`` at these positions."""
        ...

    def heads(self, heads: Sequence[int]) -> "Source": ...

    def rows(self, rows: slice) -> "Source": ...


Source = Tensor | TokenSource
SourceT = TypeVar("SourceT", bound=Source)


class Tokens(NamedTuple, Generic[SourceT]):
    """Keys and values ``[B, H, n, d]`` of the same ``n`` tokens in the order of their positions.

    The keys are rotated.
    """

    keys: SourceT
    values: SourceT

    def span(self, start: int, stop: int) -> "Tokens[Tensor]":
        """The tokens from ``start`` to ``stop``: views where they are tensors."""
        return Tokens(*(span(x, start, stop) for x in self))


class SharedQK(NamedTuple):
    """What heads that follow take from their leads for distant tokens (PoD, §2.2).

    Attributes:
        queries: ``[B, F·G, m, d]`` of the ``F`` KV heads that follow, rotated.
        keys: ``[B, F, n, d]`` of these heads, rotated.
    """

    queries: Tensor
    keys: Source


class Visibility(NamedTuple):
    """Which of ``n`` tokens a query sees. The queries are the last ``m`` of the ``n`` positions.

    Attributes:
        num_sink_tokens, num_recent_tokens: of the past, a query at position ``i`` sees ``j < n_s`` and
            ``i - j < n_r``. ``n_r = None`` = all of the past. With a lead, the other tokens are seen through
            it.
        causal: False = every query sees all ``n`` tokens. They all came before the queries, in whatever order
            they are.
        positions: int ``[B, H, n]``, the positions of tokens that were selected, ascending. -1 = no token.
        start: the position of the first query, where there are ``positions``.
    """

    num_sink_tokens: int = 0
    num_recent_tokens: int | None = None
    causal: bool = True
    positions: Tensor | None = None
    start: int = 0


CAUSAL = Visibility()
EVERYTHING = Visibility(causal=False)


class Segment(NamedTuple):
    """Tokens that see only each other: columns of queries and of keys in neighbouring rows of the batch."""

    rows: Span
    queries: Span
    keys: Span

    @property
    def past(self) -> int:
        """Tokens before the first query."""
        return self.keys[1] - self.keys[0] - (self.queries[1] - self.queries[0])

    def slices(self, see: Visibility, has_lead: bool, cuts_windows: bool = True) -> Iterator["Slice"]:
        """What the segment's queries see, in slices of which no mask grows with the segment.

        Slices of the same rows belong to one softmax. Rows below ``h = n_s + n_r`` see every token before
        them. Later rows see the window, the sinks, and through their lead the distant tokens
        ``n_s <= j <= i - n_r``.

        Args:
            see: what a query sees.
            has_lead: whether there is a lead.
            cuts_windows: False = a window without sinks and lead is one slice of all rows.
        """
        (row, last_row), (column, last_column) = self.queries, self.keys
        n_s, n_r = see.num_sink_tokens, see.num_recent_tokens
        if n_r is None or not (cuts_windows or has_lead or n_s):
            yield Slice(self.queries, self.keys, causal=see.causal, window=n_r)
            return
        first = min(row + max(n_s + n_r - self.past, 0), last_row)
        if first > row:
            yield Slice((row, first), (column, last_column - (last_row - first)))
        if first < last_row:
            late = first, last_row
            yield Slice(late, (last_column - (last_row - first) - n_r + 1, last_column), window=n_r)
            if n_s:
                yield Slice(late, (column, column + n_s), causal=False)
            if has_lead:
                yield Slice(late, (column + n_s, last_column - n_r), lead=True)


class Slice(NamedTuple):
    """Rows of queries on columns of keys.

    Attributes:
        lead: whether the lead's queries and keys are used.
        causal: whether the mask is causal, aligned at the bottom right.
        window: with a window of w tokens, only the w newest visible ones count.
        mask: additive ``[rows, columns]``, where an implementation puts one in place of a window.
    """

    rows: Span
    columns: Span
    lead: bool = False
    causal: bool = True
    window: int | None = None
    mask: Tensor | None = None


class Segments:
    """The documents of a batch, or what each row of a cache holds and gets.

    They are made once in a pass, for all of its layers.

    Attributes:
        all: every segment. Columns that are in no segment are padding and get a zero output.
        columns: how many columns the documents have, padding included. None = not known.
        memo: what implementations derive from the segments, by a key of their own.
    """

    def __init__(self, segments: Sequence[Segment], columns: int | None = None):
        self.all, self.columns = tuple(segments), columns
        self.memo: dict[Any, Any] = {}

    @classmethod
    def whole(cls, batch: int, num_queries: int, length: int) -> "Segments":
        """One segment for all rows, which are alike."""
        return cls([Segment((0, batch), (0, num_queries), (0, length))])

    @classmethod
    def of_rows(cls, past: Sequence[int], counts: Sequence[int]) -> "Segments":
        """Left-aligned rows: ``counts[b]`` new tokens behind ``past[b]``."""
        pairs = list(zip(past, counts, strict=True))
        if len(set(pairs)) == 1:
            return cls.whole(len(pairs), pairs[0][1], sum(pairs[0]))
        return cls([Segment((row, row + 1), (0, m), (0, p + m)) for row, (p, m) in enumerate(pairs) if m])

    @classmethod
    def of_documents(cls, doc_ids: Tensor, batch: int) -> "Segments":
        """One segment for each run of equal ids ``[batch or 1, n]``, -1 = padding.

        The ids are copied to the host, which waits for the device.
        """
        found = []
        for i, row in enumerate(doc_ids.detach().cpu()):
            rows = (i, i + 1) if doc_ids.shape[0] == batch else (0, batch)
            values, lengths = torch.unique_consecutive(row, return_counts=True)
            ends = lengths.cumsum(0).tolist()
            spans = zip([0, *ends[:-1]], ends, values.tolist(), strict=True)
            found += [Segment(rows, (start, end), (start, end)) for start, end, value in spans if value >= 0]
        return cls(found, doc_ids.shape[1])

    def derived(self, key: Any, make: Callable[[], Any]) -> Any:
        """``make()``, once for each key. Its tensors may serve a later pass that trains."""
        if key not in self.memo:
            with torch.inference_mode(False):
                self.memo[key] = make()
        return self.memo[key]


class Call(NamedTuple):
    """A checked call of ``attend`` in which all heads play one role.

    An implementation that takes no ``sink`` must refuse one.
    """

    q: Tensor
    tokens: Tokens
    lead: SharedQK | None
    visibility: Visibility
    segments: Segments
    scale: float
    sink: Sink | None = None

    @property
    def groups(self) -> int:
        """``G``: query heads per KV head."""
        return self.q.shape[1] // self.tokens.keys.shape[1]


class Implementation(NamedTuple):
    """How attention runs, or decoding (``decode.DecodeCall``).

    Attributes:
        run: computes, for a ``Call``, the output ``[B, Hq, m, d]`` and the log-sum-exp ``[B, Hq, m]`` in at
            least fp32. For a ``DecodeCall`` it writes to the call's ``out``.
        unsupported: why it cannot run a call. None = it can.
    """

    run: Callable[[Any], Any]
    unsupported: Callable[[Any], str | None]


IMPLEMENTATIONS: dict[str, Implementation] = {}
"""What ``PodConfig.attention_backend`` may name."""
AUTO_ORDER = ["grouped", "flash", "flex", "reference"]
"""What ``auto`` tries, in this order. ``flex`` is there where ``pod.kernels`` is, and runs on CUDA only."""
_said: set[tuple[str, ...]] = set()


def choose(what: str, table: Mapping[str, Any], order: Sequence[str], call: Any, backend: str) -> Any:
    """The entry of an operation's table that will run.

    With ``auto`` it is the first of ``order`` that can run. Else it is the one that was asked for, and no
    other. Entries have ``unsupported``, which says why a call cannot run (None = it can).

    Raises:
        ValueError: the name is unknown, the named entry cannot run, or nothing can that ``auto`` could take.
    """
    if backend == "auto":
        q, refused = getattr(call, "q", call), {}
        for name in order:
            if name not in table:
                continue
            reason = table[name].unsupported(call)
            if reason is None:
                if q.device.type != "cpu":
                    _say_once(what, q.device.type, name, refused)
                return table[name]
            refused[name] = reason
        raise ValueError(f"no {what} backend runs on {q.dtype} on {q.device.type}")
    if backend not in table:
        raise ValueError(
            f"{what} backend {backend!r} is unknown; choose auto or one of {', '.join(sorted(table))}"
        )
    if (reason := table[backend].unsupported(call)) is not None:
        raise ValueError(f"{what} backend {backend!r} cannot run: {reason}; choose auto or another backend")
    return table[backend]


def _say_once(what: str, device: str, chosen: str, refused: Mapping[str, str]) -> None:
    """Say once in a process what ``auto`` chose and why. It is a warning if it was not the first choice."""
    case = (what, device, chosen, *refused.values())
    if torch.compiler.is_compiling() or case in _said:
        return
    _said.add(case)
    reasons = "; ".join(f"{name} cannot run: {reason}" for name, reason in refused.items())
    message = f"{what} on {device} runs {chosen}" + (f", as {reasons}" if reasons else "")
    _log.log(logging.WARNING if refused else logging.INFO, message)


def check_backend(name: str) -> None:
    """Check that an implementation is registered.

    Raises:
        ValueError: it is not.
    """
    if name != "auto" and name not in IMPLEMENTATIONS:
        known = ", ".join(["auto", *sorted(IMPLEMENTATIONS)])
        raise ValueError(f"attention_backend = {name!r} is not available here; choose one of {known}")


def attend(
    q: Tensor,
    tokens: Tokens,
    lead: SharedQK | None = None,
    visibility: Visibility = CAUSAL,
    segments: Segments | None = None,
    scale: float | None = None,
    backend: str = "auto",
    roles: Roles | None = None,
    sink: Sink | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of ``m`` queries, the last of ``n`` positions, to ``n`` tokens.

    With a lead it is that of the paper's eqs. 3 and 4.

    Args:
        q: ``[B, Hq, m, d]``, rotated. Query head ``i`` belongs to KV head ``i // G``, and ``Hq = G·H``.
        tokens: keys and values of the ``n`` tokens, those of the queries included (unless
            ``visibility.causal`` is False).
        segments: documents, or rows of unlike length. None = all rows are alike.
        scale: factor on logits, ``1/sqrt(d)`` when None.
        backend: ``auto`` or the name of an implementation, which then runs or raises.
        roles: which KV heads lead and see everything with their own keys, which follow ``lead``, and which
            see the window of ``visibility`` only. None = all see what ``visibility`` says, through ``lead``
            if there is one.
        sink: a logit of every query head and a value of every KV head. They join each softmax, at every
            position, of heads that keep their windows (with ``roles``) or of all heads (without). Padding
            still gets nothing.

    Returns:
        The output ``[B, Hq, m, d]`` with gradients for all tensors, and the log-sum-exp ``[B, Hq, m]`` of the
        logits in at least fp32. The log-sum-exp has gradients from ``reference`` only. Where a query sees
        nothing, it is -inf and the output is zero.

    Raises:
        ValueError: shapes do not fit, or the backend cannot run.
    """
    if segments is None:
        segments = Segments.whole(q.shape[0], q.shape[2], tokens.keys.shape[2])
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    call = Call(q, tokens, lead, visibility, segments, factor, sink)
    if roles is not None and roles.num_heads != tokens.keys.shape[1]:
        raise ValueError(f"roles are of {roles.num_heads} KV heads, the keys of {tokens.keys.shape[1]}")
    _check(call, range(tokens.keys.shape[1]) if roles is None else roles.followers)
    order = AUTO_ORDER if q.shape[2] == 1 else AUTO_ORDER[1:]  # "grouped" takes one query per row
    calls = [(None, call)] if roles is None else list(_by_role(call, roles))
    parts = [
        (heads, *choose("attention", IMPLEMENTATIONS, order, one, backend).run(one)) for heads, one in calls
    ]
    if len(parts) == 1:
        return parts[0][1:]
    outs = [(part[0], part[1]) for part in parts]
    lses = [(part[0], part[2]) for part in parts]
    return merge_heads(outs, call.groups), merge_heads(lses, call.groups)  # type: ignore[misc]


def _by_role(call: Call, roles: Roles) -> Iterator[tuple[Sequence[int], Call]]:
    """A call for the heads of each role."""
    alone = call._replace(lead=None, sink=None)
    windows = alone
    if call.sink is not None and roles.windows:
        windows = alone._replace(sink=call.sink.of_heads(roles.windows))
    calls = alone._replace(visibility=CAUSAL), call._replace(sink=None), windows
    for heads, one in zip((roles.leads, roles.followers, roles.windows), calls, strict=True):
        if heads:
            tokens = Tokens(*(take_heads(x, heads) for x in call.tokens))
            yield heads, one._replace(q=take_heads(call.q, heads, call.groups), tokens=tokens)


def merge(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """One softmax over what several calls attended to.

    It merges their outputs ``[B, Hq, m, d]`` and log-sum-exps to the output and log-sum-exp over all tokens.
    Gradients need log-sum-exps that have gradients, as those of ``reference`` do.
    """
    if len(parts) == 1:
        return parts[0]
    lses = torch.stack([lse for _, lse in parts])
    total = lses.logsumexp(0)
    shares = (lses - total.masked_fill(total == float("-inf"), 0.0)).exp().unsqueeze(-1)
    out = sum((share * out for share, (out, _) in zip(shares, parts, strict=True)), start=torch.zeros(()))
    return out.to(parts[0][0].dtype), total


def take_rows(x: Any, rows: Span) -> Any:
    """These rows of the batch, as a view. None stays None."""
    if x is None or rows == (0, x.shape[0]):
        return x
    return x[slice(*rows)] if isinstance(x, Tensor) else x.rows(slice(*rows))


def tile_elements(device: torch.device) -> int:
    """How many numbers to work on at a time.

    On a CPU they stay in its cache as fp32. Elsewhere they take 256 MB, so that launches are few.
    """
    return 1 << 20 if device.type == "cpu" else 1 << 26


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """What logits, norms and sums are computed in: fp32, or fp64 for fp64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def takes_gradients(*tensors: Any) -> bool:
    """Whether a gradient will be taken through one of these."""
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in tensors)


def span(x: Source, start: int, stop: int) -> Tensor:
    """Tokens ``[B, h, stop - start, d]``: a view of a tensor."""
    return x[:, :, start:stop] if isinstance(x, Tensor) else x.span(start, stop)


def take_heads(x: Any, heads: Sequence[int], groups: int = 1) -> Any:
    """Heads ``heads`` (each ``groups`` wide) of ``[B, h, …]``.

    They are a view when they are neighbours, else a copy.
    """
    if not isinstance(x, Tensor):
        return x.heads(heads)
    if heads[-1] - heads[0] == len(heads) - 1:
        return x[:, heads[0] * groups : (heads[-1] + 1) * groups]
    return x[:, [head * groups + g for head in heads for g in range(groups)]]


def merge_heads(parts: Sequence[tuple[Sequence[int], Tensor]], groups: int) -> Tensor:
    """Inverse of ``take_heads`` over disjoint head sets: ``[B, Hq, …]`` in the order of the heads."""
    if len(parts) == 1:
        return parts[0][1]
    pieces = {}
    for heads, tensor in parts:
        pieces.update(zip(heads, tensor.split(groups, dim=1), strict=True))
    return torch.cat([pieces[head] for head in sorted(pieces)], dim=1)


def _check(call: Call, followers: Sequence[int]) -> None:
    q, (keys, values) = call.q, call.tokens
    batch, heads, _, head_dim = shape = list(keys.shape)
    if _shape(values, keys) != shape or [batch, head_dim] != [q.shape[0], q.shape[3]] or q.shape[1] % heads:
        raise ValueError(
            f"q, k, v are {list(q.shape)}, {shape}, {list(values.shape)}: k and v must be [B, H, n, d] "
            "with the B and d of q, and H must divide its heads"
        )
    n_s, n_r = call.visibility[:2]
    if n_r is not None and (n_s < 0 or n_r < 1):
        raise ValueError(f"need n_s >= 0 and n_r >= 1, got {n_s} and {n_r}")
    if call.segments.columns not in (None, q.shape[2]):
        raise ValueError(f"doc_ids have {call.segments.columns} columns, expected {q.shape[2]}")
    if call.lead is not None:
        _check_lead(call.lead, call, shape, len(followers))
    if call.sink is not None:
        check_sink(call.sink, q.shape[1], heads, head_dim)


def check_sink(sink: Sink, query_heads: int, heads: int, head_dim: int) -> None:
    """Check that a sink is of all of these heads.

    Raises:
        ValueError: it is not.
    """
    found = list(sink.logits.shape), list(sink.values.shape)
    expected = [query_heads], [heads, head_dim]
    if found != expected:
        raise ValueError(
            f"logits and values of the sink are {found[0]} and {found[1]}, "
            f"expected {expected[0]} and {expected[1]}"
        )


def _shape(x: Source, like: Source) -> list[int]:
    """The shape of ``x``.

    Sources that are no tensors have room for more tokens than there are. That room does not count.
    """
    both = isinstance(x, Tensor) and isinstance(like, Tensor)
    return [*x.shape[:2], (x if both else like).shape[2], x.shape[3]]


def _check_lead(lead: SharedQK, call: Call, shape: list[int], followers: int) -> None:
    expected = [shape[0], followers * call.groups, *call.q.shape[2:]], [shape[0], followers, *shape[2:]]
    if (list(lead.queries.shape), _shape(lead.keys, call.tokens.keys)) != expected:
        raise ValueError(
            f"lead queries and keys are {list(lead.queries.shape)} and {list(lead.keys.shape)}, "
            f"expected {expected[0]} and {expected[1]}"
        )
