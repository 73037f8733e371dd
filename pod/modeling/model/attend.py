"""One attention operation for prefill, chunks behind a filled cache, decoding, training and every method.

``attend(q, tokens, lead, visibility)`` gives the output and the log-sum-exp of its logits. With both, the
results of several calls on disjoint tokens combine exactly into one softmax over all of them (``merge``).
Implementations are registered in ``IMPLEMENTATIONS``. They run wherever torch runs, and are part of exported
checkpoints.
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
"""``(start, stop)``: the indices ``start … stop - 1``."""


class TokenSource(Protocol):
    """Keys or values ``[B, h, n, d]``, ``n`` counting positions, that are not stored as such a tensor.

    Examples are rings (``window_buffer.Recent``) and packed tokens (``packed.Packed``).
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """``(B, h, n, d)``."""
        ...

    def span(self, start: int, stop: int) -> Tensor:
        """The tokens at positions ``start … stop - 1``, ``[B, h, stop - start, d]``."""
        ...

    def heads(self, heads: Sequence[int]) -> "Source":
        """The same for these heads only."""
        ...

    def rows(self, rows: slice) -> "Source":
        """The same for these rows of the batch only."""
        ...


Source = Tensor | TokenSource
"""Keys or values ``[B, h, n, d]``."""
SourceT = TypeVar("SourceT", bound=Source)


class Tokens(NamedTuple, Generic[SourceT]):
    """Keys and values ``[B, H, n, d]`` of the same ``n`` tokens in the order of their positions.

    The keys are rotated.
    """

    keys: SourceT
    values: SourceT

    def span(self, start: int, stop: int) -> "Tokens[Tensor]":
        """The tokens ``start … stop - 1``: views where keys and values are tensors."""
        return Tokens(*(span(x, start, stop) for x in self))


class SharedQK(NamedTuple):
    """Queries and keys of leads, with which followers compute their logits of distant tokens (PoD, §2.2).

    Attributes:
        queries: ``[B, F·G, m, d]``, rotated: for each of ``F`` KV heads that follow, the queries of its lead.
        keys: ``[B, F, n, d]``, rotated: for each of these KV heads, the keys of its lead.
    """

    queries: Tensor
    keys: Source


class Visibility(NamedTuple):
    """Which of ``n`` tokens a query sees. The queries are the last ``m`` of the ``n`` positions.

    Attributes:
        num_sink_tokens, num_recent_tokens: ``n_s`` and ``n_r``. A query at position ``i`` sees the tokens
            ``j <= i`` for which ``j < n_s`` or ``i - j < n_r``. ``n_r = None``: it sees every ``j <= i``. If
            the call has a lead, the query sees the other tokens ``j <= i`` through the lead.
        causal: False = every query sees all ``n`` tokens, in whatever order they are. All of them must have
            come before the queries.
        positions: int ``[B, H, n]``, ascending: the position of each token, where only some tokens are held.
            -1 = no token. None = the position is the index.
        start: the position of the first query. It is read only if there are ``positions``.
    """

    num_sink_tokens: int = 0
    num_recent_tokens: int | None = None
    causal: bool = True
    positions: Tensor | None = None
    start: int = 0


CAUSAL = Visibility()
"""A query sees itself and every token before it."""
EVERYTHING = Visibility(causal=False)
"""A query sees every token."""


class Segment(NamedTuple):
    """Tokens that see only each other, such as a document, in one or several consecutive rows of the batch.

    Attributes:
        rows: the rows of the batch.
        queries: the columns of the segment's queries, in each of these rows.
        keys: the columns of its keys and values. The last ones belong to the tokens of the queries.
    """

    rows: Span
    queries: Span
    keys: Span

    @property
    def past(self) -> int:
        """How many tokens of the segment come before its first query."""
        return self.keys[1] - self.keys[0] - (self.queries[1] - self.queries[0])

    def slices(self, see: Visibility, has_lead: bool, cuts_windows: bool = True) -> Iterator["Slice"]:
        """Cut what the segment's queries see into slices whose masks need no memory that grows with it.

        Slices of the same rows belong to one softmax. Queries at positions below ``n_s + n_r`` see every
        token before them. A later query ``i`` sees the window, the sinks, and through its lead the distant
        tokens ``n_s <= j <= i - n_r``.

        Args:
            see: what a query sees.
            has_lead: whether there is a lead.
            cuts_windows: False = a window without sinks and lead becomes one slice of all rows.
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
    """A block of logits: some queries (rows) times some keys (columns).

    Attributes:
        rows: columns of the pass with the queries.
        columns: columns of the tokens with the keys and values.
        lead: whether the lead's queries and keys are used, instead of the own ones.
        causal: whether the mask is causal, aligned at the bottom right.
        window: a number ``w`` = each row sees only the ``w`` newest of its visible columns. None = all.
        mask: additive, ``[rows, columns]``. An implementation may set it in place of ``window``.
    """

    rows: Span
    columns: Span
    lead: bool = False
    causal: bool = True
    window: int | None = None
    mask: Tensor | None = None


class Segments:
    """All segments of a batch: its documents, or each cache row's old and new tokens.

    They are made once in a pass, for all of its layers.

    Attributes:
        all: every segment. Columns that are in no segment are padding and get a zero output.
        columns: how many columns the documents have, padding included. None = not known.
        memo: the results of ``derived`` by key.
    """

    def __init__(self, segments: Sequence[Segment], columns: int | None = None):
        self.all, self.columns = tuple(segments), columns
        self.memo: dict[Any, Any] = {}

    @property
    def end(self) -> int:
        """The column behind the last key of all segments. Sources may have slots for more tokens."""
        return max((segment.keys[1] for segment in self.all), default=0)

    @classmethod
    def whole(cls, batch: int, num_queries: int, length: int) -> "Segments":
        """One segment for all ``batch`` rows, each with ``num_queries`` queries behind older tokens.

        ``length`` counts the tokens of a row, those of the queries included.
        """
        return cls([Segment((0, batch), (0, num_queries), (0, length))])

    @classmethod
    def of_rows(cls, past: Sequence[int], counts: Sequence[int]) -> "Segments":
        """Segments of left-aligned rows: row ``b`` gets ``counts[b]`` new tokens behind its ``past[b]``."""
        pairs = list(zip(past, counts, strict=True))
        if len(set(pairs)) == 1:
            return cls.whole(len(pairs), pairs[0][1], sum(pairs[0]))
        return cls([Segment((row, row + 1), (0, m), (0, p + m)) for row, (p, m) in enumerate(pairs) if m])

    @classmethod
    def of_documents(cls, doc_ids: Tensor, batch: int) -> "Segments":
        """One segment for each run of equal ids.

        The ids are copied to the host, which waits for the device.

        Args:
            doc_ids: ``[batch, n]``, or ``[1, n]`` for rows that are all alike. -1 = padding.
            batch: rows of the batch.
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
        """The result of ``make()``, which is called once for each key.

        It runs outside of inference mode, so that its tensors may serve a later pass that trains.
        """
        if key not in self.memo:
            with torch.inference_mode(False):
                self.memo[key] = make()
        return self.memo[key]


class Call(NamedTuple):
    """Checked arguments of ``attend``, for heads that all have the same role.

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
    """One way to compute attention (``Call``), or attention of a decoded token (``decode.DecodeCall``).

    Attributes:
        run: takes a ``Call``, and returns the output ``[B, Hq, m, d]`` and the log-sum-exp ``[B, Hq, m]`` in
            at least fp32. Or takes a ``DecodeCall``, and writes to the call's ``out``.
        unsupported: takes a call, and returns the reason why it cannot run. None = it can.
    """

    run: Callable[[Any], Any]
    unsupported: Callable[[Any], str | None]


IMPLEMENTATIONS: dict[str, Implementation] = {}
"""Implementations by the names that ``PodConfig.attention_backend`` takes."""
AUTO_ORDER = ["grouped", "flash", "flex", "reference"]
"""Implementations that ``auto`` tries, in this order.

``flex`` exists only where ``pod.kernels`` is installed, and runs on CUDA only.
"""
_said: set[tuple[str, ...]] = set()


def choose(what: str, table: Mapping[str, Any], order: Sequence[str], call: Any, backend: str) -> Any:
    """Choose the entry of an operation's table that will run.

    Args:
        what: name of the operation, for messages.
        table: entries by name, each with an ``unsupported`` as ``Implementation`` has it.
        order: names that ``auto`` tries, one after the other. Names that are not in the table are skipped.
        call: arguments of the operation, for ``unsupported``.
        backend: ``auto``, or the name of the one entry that may run.

    Raises:
        ValueError: the name is unknown, the named entry cannot run the call, or ``auto`` finds none that can.
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
    """Log once in a process what ``auto`` chose and why: as a warning if it was not the first choice."""
    case = (what, device, chosen, *refused.values())
    if torch.compiler.is_compiling() or case in _said:
        return
    _said.add(case)
    reasons = "; ".join(f"{name} cannot run: {reason}" for name, reason in refused.items())
    message = f"{what} on {device} runs {chosen}" + (f", as {reasons}" if reasons else "")
    _log.log(logging.WARNING if refused else logging.INFO, message)


def check_backend(name: str) -> None:
    """Refuse a name that is neither ``auto`` nor in ``IMPLEMENTATIONS`` (``ValueError``)."""
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
    """Attention of ``m`` queries to ``n`` tokens, the last ``m`` of which are those of the queries.

    With a lead, it is PoD's attention (eqs. 3 and 4 of the paper).

    Args:
        q: ``[B, Hq, m, d]``, rotated. Query head ``i`` belongs to KV head ``i // G``, and ``Hq = G·H``.
        tokens: keys and values of the ``n`` tokens, those of the queries included (unless
            ``visibility.causal`` is False).
        lead: queries and keys of the leads, for heads that follow.
        visibility: which tokens a query sees.
        segments: documents, or rows of unequal length. None = all rows are alike.
        scale: factor on logits, ``1/sqrt(d)`` when None.
        backend: ``auto`` or the name of an implementation, which then runs or raises.
        roles: the role of each KV head. Leads see everything with their own keys, followers see distant
            tokens through ``lead``, and windows see only the window of ``visibility``. None = every head sees
            what ``visibility`` says, and the other tokens through ``lead`` if there is one.
        sink: a logit of every query head and a value of every KV head, which are added to each softmax at
            every position. With ``roles``, this happens only in heads that keep their windows, without them
            in all heads. Padding still gets a zero output.

    Returns:
        The output ``[B, Hq, m, d]``, which has gradients for all tensors, and the log-sum-exp ``[B, Hq, m]``
        of the logits in at least fp32, which has gradients only from ``reference``. Where a query sees
        nothing, the output is zero and the log-sum-exp is -inf.

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
    """The KV heads of each role, with a call for these heads alone. Roles without heads are left out."""
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
    """Combine the results of calls on disjoint tokens into that of one softmax over all of them.

    Gradients are exact only if the log-sum-exps have gradients, as those of ``reference`` do.

    Args:
        parts: output ``[B, Hq, m, d]`` and log-sum-exp ``[B, Hq, m]`` of each call.

    Returns:
        The output and the log-sum-exp over all tokens, in the same shapes.
    """
    if len(parts) == 1:
        return parts[0]
    lses = torch.stack([lse for _, lse in parts])
    total = lses.logsumexp(0)
    shares = (lses - total.masked_fill(total == float("-inf"), 0.0)).exp().unsqueeze(-1)
    out = sum((share * out for share, (out, _) in zip(shares, parts, strict=True)), start=torch.zeros(()))
    return out.to(parts[0][0].dtype), total


def take_rows(x: Any, rows: Span) -> Any:
    """The rows ``rows`` of a tensor or source, as a view. None stays None."""
    if x is None or rows == (0, x.shape[0]):
        return x
    return x[slice(*rows)] if isinstance(x, Tensor) else x.rows(slice(*rows))


def tile_elements(device: torch.device) -> int:
    """How many numbers to work on at a time.

    On a CPU, so many fp32 numbers (4 MiB) stay in its cache. Elsewhere they take 256 MiB, so that kernel
    launches are few.
    """
    return 1 << 20 if device.type == "cpu" else 1 << 26


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which logits, norms and sums are computed: fp32, or fp64 for fp64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def takes_gradients(*tensors: Any) -> bool:
    """Whether autograd records operations on these: it is enabled, and one is a tensor that requires it."""
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in tensors)


def span(x: Source, start: int, stop: int) -> Tensor:
    """Tokens ``start … stop - 1`` as a tensor ``[B, h, stop - start, d]``: a view if ``x`` is a tensor."""
    return x[:, :, start:stop] if isinstance(x, Tensor) else x.span(start, stop)


def take_heads(x: Any, heads: Sequence[int], groups: int = 1) -> Any:
    """The heads ``heads`` of a tensor or source ``[B, h, …]``: a view if they are consecutive, else a copy.

    With ``groups`` = ``G``, ``x`` is ``[B, G·h, …]``, and each KV head stands for its ``G`` query heads.
    """
    if not isinstance(x, Tensor):
        return x.heads(heads)
    if heads[-1] - heads[0] == len(heads) - 1:
        return x[:, heads[0] * groups : (heads[-1] + 1) * groups]
    return x[:, [head * groups + g for head in heads for g in range(groups)]]


def merge_heads(parts: Sequence[tuple[Sequence[int], Tensor]], groups: int) -> Tensor:
    """The inverse of ``take_heads``: put tensors of disjoint heads together, in ascending order of the heads.

    Args:
        parts: KV heads, ascending, and the tensor ``[B, groups·len(heads), …]`` of these heads.
        groups: query heads per KV head.
    """
    if len(parts) == 1:
        return parts[0][1]
    pieces = {}
    for heads, tensor in parts:
        pieces.update(zip(heads, tensor.split(groups, dim=1), strict=True))
    return torch.cat([pieces[head] for head in sorted(pieces)], dim=1)


def _check(call: Call, followers: Sequence[int]) -> None:
    """Refuse shapes that do not fit each other, and impossible windows (``ValueError``)."""
    q, (keys, values) = call.q, call.tokens
    shape = list(keys.shape)
    batch, heads, _, head_dim = shape
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
    """Refuse a sink whose logits are not ``[query_heads]`` or values not ``[heads, head_dim]``.

    Raises:
        ValueError: the sink has other shapes.
    """
    found = list(sink.logits.shape), list(sink.values.shape)
    expected = [query_heads], [heads, head_dim]
    if found != expected:
        raise ValueError(
            f"logits and values of the sink are {found[0]} and {found[1]}, "
            f"expected {expected[0]} and {expected[1]}"
        )


def _shape(x: Source, like: Source) -> list[int]:
    """The shape of ``x``, with the number of tokens of ``like`` unless both are tensors.

    The reason: a source that is no tensor may have slots for more tokens than there are.
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
