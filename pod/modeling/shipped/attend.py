"""One attention operation for prefill, chunks behind a filled cache, decoding, training and every method.

``attend(q, tokens, lead, visibility)`` gives the output and the log-sum-exp of its logits, so that parts of one softmax that
were attended apart merge exactly (``merge``). Implementations are registered in ``IMPLEMENTATIONS``: they run
wherever torch runs and travel with exported checkpoints.
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from .sharing import Roles
from .sinks import Sink

_log = logging.getLogger(__name__)
Span = tuple[int, int]


class TokenSource(Protocol):
    """Keys or values that are no plain tensor ``[B, h, n, d]`` with column = position: rings, packed tokens."""

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
    """Keys and values ``[B, H, n, d]`` of the same ``n`` tokens in the order of their positions; keys rotated."""

    keys: SourceT
    values: SourceT

    def span(self, start: int, stop: int) -> "Tokens[Tensor]":
        """``stop - start`` of them: views where they are tensors."""
        return Tokens(*(span(x, start, stop) for x in self))


class Lead(NamedTuple):
    """What heads that follow take from their leads for distant tokens (PoD, §2.2).

    Attributes:
        queries: ``[B, F·G, m, d]``; keys: ``[B, F, n, d]``, of the ``F`` KV heads that follow; rotated.
    """

    queries: Tensor
    keys: Source


class Visibility(NamedTuple):
    """Which of ``n`` tokens a query sees; the queries are the last ``m`` of the ``n`` positions.

    Attributes:
        num_sink_tokens, num_recent_tokens: a query at position ``i`` sees ``j < n_s`` and ``i - j < n_r`` (of the past);
            ``n_r = None`` = all of it. With a lead the other tokens are seen through it.
        causal: False = every query sees all ``n`` tokens, which all came before the queries, in whatever order they are.
        positions: int ``[B, H, n]`` of tokens that were selected, ascending, -1 = no token; ``start`` is then the position
            of the first query.
    """

    num_sink_tokens: int = 0
    num_recent_tokens: int | None = None
    causal: bool = True
    positions: Tensor | None = None
    start: int = 0


CAUSAL = Visibility()
EVERYTHING = Visibility(causal=False)


class Segment(NamedTuple):
    """Tokens that see each other only: columns of the queries and of the keys in neighbouring rows of the batch."""

    rows: Span
    queries: Span
    keys: Span

    @property
    def past(self) -> int:
        """Tokens before the first query."""
        return self.keys[1] - self.keys[0] - (self.queries[1] - self.queries[0])

    def slices(self, see: Visibility, has_lead: bool, cuts_windows: bool = True) -> Iterator["Slice"]:
        """What its queries see, of which no mask grows with the segment. Slices of the same rows belong to one softmax.

        Rows below ``h = n_s + n_r`` see every token before them; later rows the window, the sinks, and distant tokens
        ``n_s <= j <= i - n_r`` through their lead.

        Args:
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
        lead: whether with the lead's queries and keys.
        causal: aligned at the bottom right; with a ``window`` of w tokens only the w newest visible ones count.
        mask: additive ``[rows, columns]``, where an implementation puts one in place of a window.
    """

    rows: Span
    columns: Span
    lead: bool = False
    causal: bool = True
    window: int | None = None
    mask: Tensor | None = None


class Segments:
    """The documents of a batch, or what each row of a cache holds and gets: made once in a pass, for all of its layers.

    Attributes:
        all: every segment; columns in none are padding and get a zero output.
        columns: of documents, padding included; None = not known.
        memo: what implementations derive from the segments, by a key of their own.
    """

    def __init__(self, segments: Sequence[Segment], columns: int | None = None):
        self.all, self.columns = tuple(segments), columns
        self.memo: dict[Any, Any] = {}

    @classmethod
    def whole(cls, batch: int, num_queries: int, length: int) -> "Segments":
        """All rows alike."""
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
        """Runs of equal ids ``[batch or 1, n]``, -1 = padding; ids are copied to the host, which waits for the device."""
        found = []
        for i, row in enumerate(doc_ids.detach().cpu()):
            rows = (i, i + 1) if doc_ids.shape[0] == batch else (0, batch)
            values, lengths = torch.unique_consecutive(row, return_counts=True)
            ends = lengths.cumsum(0).tolist()
            spans = zip([0, *ends[:-1]], ends, values.tolist(), strict=True)
            found += [Segment(rows, (start, end), (start, end)) for start, end, value in spans if value >= 0]
        return cls(found, doc_ids.shape[1])

    def derived(self, key: Any, make: Callable[[], Any]) -> Any:
        """``make()``, once for each key; tensors that may serve a later pass that trains."""
        if key not in self.memo:
            with torch.inference_mode(False):
                self.memo[key] = make()
        return self.memo[key]


class Call(NamedTuple):
    """A checked call of ``attend`` in which all heads play one role. An implementation that takes no
    ``sink`` must refuse one."""

    q: Tensor
    tokens: Tokens
    lead: Lead | None
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
        run: a ``Call`` to the output ``[B, Hq, m, d]`` and the log-sum-exp ``[B, Hq, m]``, at least fp32; a ``DecodeCall`` is written to.
        unsupported: why it cannot run a call; None = it can.
    """

    run: Callable[[Any], Any]
    unsupported: Callable[[Any], str | None]


IMPLEMENTATIONS: dict[str, Implementation] = {}
"""What ``PodConfig.attention_backend`` may name."""
AUTO_ORDER = ["grouped", "flash", "flex", "reference"]
"""What ``auto`` tries, in this order; ``flex`` is there where ``pod.kernels`` is, and runs on CUDA only."""
_said: set[tuple[str, ...]] = set()


def choose(what: str, table: Mapping[str, Any], order: Sequence[str], call: Any, backend: str) -> Any:
    """The entry of an operation's table that will run: with ``auto`` the first of ``order`` that can, else the one that was asked
    for, and no other. Entries have ``unsupported``, which says why a call cannot run (None = it can).

    Raises:
        ValueError: an unknown name, one that cannot run, or nothing that ``auto`` could take.
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
    """Once in a process: what ``auto`` chose and why; a warning where it was not the first choice."""
    case = (what, device, chosen, *refused.values())
    if torch.compiler.is_compiling() or case in _said:
        return
    _said.add(case)
    reasons = "; ".join(f"{name} cannot run: {reason}" for name, reason in refused.items())
    message = f"{what} on {device} runs {chosen}" + (f", as {reasons}" if reasons else "")
    _log.log(logging.WARNING if refused else logging.INFO, message)


def check_backend(name: str) -> None:
    """Raise ``ValueError`` for an implementation that is not registered."""
    if name != "auto" and name not in IMPLEMENTATIONS:
        known = ", ".join(["auto", *sorted(IMPLEMENTATIONS)])
        raise ValueError(f"attention_backend = {name!r} is not available here; choose one of {known}")


def attend(
    q: Tensor,
    tokens: Tokens,
    lead: Lead | None = None,
    visibility: Visibility = CAUSAL,
    segments: Segments | None = None,
    scale: float | None = None,
    backend: str = "auto",
    roles: Roles | None = None,
    sink: Sink | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of ``m`` queries, the last of ``n`` positions, to ``n`` tokens (paper eqs. 3 and 4 with a lead).

    Args:
        q: ``[B, Hq, m, d]``, rotated; query head ``i`` belongs to KV head ``i // G``, ``Hq = G·H``.
        tokens: keys and values of the ``n`` tokens, those of the queries included (unless ``visibility.causal`` is False).
        segments: documents, or rows of unlike length; None = all rows are alike.
        scale: factor on logits, ``1/sqrt(d)`` when None.
        backend: ``auto`` or the name of an implementation, which then runs or raises.
        roles: which KV heads lead and see everything with their own keys, follow ``lead``, or see the window of
            ``visibility`` only; None = all see what ``visibility`` says, through ``lead`` if there is one.
        sink: a logit of every query head and a value of every KV head that join each softmax, at every
            position, of heads that keep their windows (with ``roles``) or of all heads (without). Padding
            still gets nothing.

    Returns:
        ``[B, Hq, m, d]`` with gradients for all tensors, and the log-sum-exp ``[B, Hq, m]`` of the logits in at least fp32,
        with gradients from ``reference`` only; -inf and a zero output where a query sees nothing.

    Raises:
        ValueError: shapes that do not fit, or a backend that cannot run.
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
    out, lse = (merge_heads([(part[0], part[i]) for part in parts], call.groups) for i in (1, 2))  # type: ignore[misc]
    return out, lse


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
    """One softmax over what several calls attended to: outputs ``[B, Hq, m, d]`` and log-sum-exps to the same of all.

    Gradients need log-sum-exps that have them, as those of ``reference``.
    """
    if len(parts) == 1:
        return parts[0]
    lses = torch.stack([lse for _, lse in parts])
    total = lses.logsumexp(0)
    shares = (lses - total.masked_fill(total == float("-inf"), 0.0)).exp().unsqueeze(-1)
    out = sum((share * out for share, (out, _) in zip(shares, parts, strict=True)), start=torch.zeros(()))
    return out.to(parts[0][0].dtype), total


_PARTS, _LARGE, _IN_PARTS = 64, 1 << 18, (torch.float32, torch.float64)
"""Of a weight that is multiplied in parts: most of them, fewest numbers, dtypes."""


class Linear(nn.Linear):
    """``nn.Linear``. One row through a large weight, as a decoded token is, is on CPUs a batch of products of parts of the weight,
    twice as fast on one core, which all cores share; MKL gives one product with one row to one core."""

    def forward(self, x: Tensor) -> Tensor:
        weight, parts = self.weight, math.gcd(self.out_features, _PARTS)
        is_plain = type(weight) is nn.Parameter and weight.device.type == "cpu" and weight.dtype in _IN_PARTS
        if not is_plain or x.numel() != x.shape[-1] or weight.numel() < _LARGE or torch.is_grad_enabled():
            return super().forward(x)
        # transposed from rows: the same numbers as a column take a slow product
        columns = x.reshape(1, 1, -1).expand(parts, -1, -1).transpose(1, 2)
        out = torch.bmm(weight.unflatten(0, (parts, -1)), columns).view(*x.shape[:-1], -1)
        return out if self.bias is None else out + self.bias


def take_rows(x: Any, rows: Span) -> Any:
    """These rows of the batch, as a view; None stays None."""
    if x is None or rows == (0, x.shape[0]):
        return x
    return x[slice(*rows)] if isinstance(x, Tensor) else x.rows(slice(*rows))


def tile_elements(device: torch.device) -> int:
    """Numbers to work on at a time: as fp32 they stay in a CPU's cache; elsewhere 256 MB, so that launches are few."""
    return 1 << 20 if device.type == "cpu" else 1 << 26


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """What logits, norms and sums are computed in: fp32, or fp64 for fp64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x²) + eps) · weight`` over the last dimension; fp64 stays exact."""
    wide = x.to(compute_dtype(x.dtype))
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def takes_gradients(*tensors: Any) -> bool:
    """Whether a gradient will be taken through one of these."""
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in tensors)


def span(x: Source, start: int, stop: int) -> Tensor:
    """Tokens ``[B, h, stop - start, d]``: a view of a tensor."""
    return x[:, :, start:stop] if isinstance(x, Tensor) else x.span(start, stop)


def take_heads(x: Any, heads: Sequence[int], groups: int = 1) -> Any:
    """Heads ``heads`` (each ``groups`` wide) of ``[B, h, …]``: a view when they are neighbours, else a copy."""
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
            f"q, k, v are {list(q.shape)}, {shape}, {list(values.shape)}: k and v must be [B, H, n, d] with the "
            "B and d of q, and H must divide its heads"
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
    """Raise ``ValueError`` unless a sink is of all of these heads."""
    found = list(sink.logits.shape), list(sink.values.shape)
    expected = [query_heads], [heads, head_dim]
    if found != expected:
        raise ValueError(
            f"logits and values of the sink are {found[0]} and {found[1]}, expected {expected[0]} and {expected[1]}"
        )


def _shape(x: Source, like: Source) -> list[int]:
    """The shape of ``x``; sources that are no tensors have room for more tokens than there are, which does not count."""
    both = isinstance(x, Tensor) and isinstance(like, Tensor)
    return [*x.shape[:2], (x if both else like).shape[2], x.shape[3]]


def _check_lead(lead: Lead, call: Call, shape: list[int], followers: int) -> None:
    expected = [shape[0], followers * call.groups, *call.q.shape[2:]], [shape[0], followers, *shape[2:]]
    if (list(lead.queries.shape), _shape(lead.keys, call.tokens.keys)) != expected:
        raise ValueError(
            f"lead queries and keys are {list(lead.queries.shape)} and {list(lead.keys.shape)}, "
            f"expected {expected[0]} and {expected[1]}"
        )
