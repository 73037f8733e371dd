"""Fused Triton attention without a GPU: its kernels in the interpreter against sums from the definition.

Output, log-sum-exp and every gradient are compared. The interpreter is chosen when triton is imported, so it
runs in another process: this file, started as a script. ``test_kernels_compile.py`` compiles the kernels for
real chips.
"""

import json
from typing import NamedTuple

import interpreter
import pytest
import test_chunks
import torch
from interpreter import needs_triton

import pod  # noqa: F401  (registers the implementations)
from pod.modeling.model.attend import Call, Segments, SharedQK, Sink, Tokens, Visibility, attend

NAMES = ("out", "lse", "q", "k", "v", "q_lead", "k_lead")
SINK_NAMES = (*NAMES[:5], "sink logits", "sink values")
SCALE = 0.4


class Case(NamedTuple):
    """One call. See ``test_chunks.made`` for rows and sizes.

    Attributes:
        past, counts: of tokens, by row; with ``documents`` (ids of a row) there is no past.
        windows: ``(n_s, n_r)``; ``n_r`` None = everything.
        tile: queries and keys of the forward kernel and that for dQ; the kernel for dK swaps them.
    """

    past: list[int]
    counts: list[int]
    windows: tuple[int, int | None]
    heads: int = 1
    groups: int = 1
    d: int = 16
    has_lead: bool = True
    causal: bool = True
    documents: list[list[int]] | None = None
    tile: tuple[int, int] = (16, 16)
    dtype: str = "float32"
    is_strided: bool = False
    has_sink: bool = False


def packed(*lengths: int) -> list[int]:
    """Ids of documents of these lengths; a negative one is padding."""
    ids: list[int] = []
    for number, length in enumerate(lengths):
        ids += [number if length > 0 else -1] * abs(length)
    return ids


CASES = {
    "one token": Case([0], [1], (4, 8), groups=3),
    "sinks, window and lead, GQA": Case([0], [50], (3, 17), heads=2, groups=2, tile=(32, 16)),
    "regions that end with a block": Case([0], [80], (16, 32)),
    "wide tiles": Case([0], [90], (5, 40), tile=(32, 16), d=24),
    "odd head counts": Case([0], [33], (0, 7), heads=3, groups=1, d=32, tile=(32, 32)),
    "one recent token": Case([0], [50], (0, 1)),
    "windows larger than the sequence": Case([0], [40], (4, 400)),
    "sinks larger than the sequence": Case([0], [40], (400, 4)),
    "windows that touch": Case([0], [45], (20, 9)),
    "many sinks": Case([0], [80], (37, 20)),
    "ragged rows": Case([0, 0, 0], [17, 33, 1], (3, 9)),
    "ragged chunks behind a past": Case([9, 0, 41], [5, 2, 5], (3, 9), groups=2),
    "a long chunk behind a past": Case([35], [40], (0, 33), is_strided=True),
    "a row without new tokens": Case([5, 20, 3], [4, 0, 9], (3, 4)),
    "a window": Case([0], [70], (0, 18), has_lead=False),
    "sinks and a window": Case([20], [33], (4, 9), has_lead=False, tile=(16, 32)),
    "causal": Case([0, 7], [60, 43], (0, None), has_lead=False, tile=(32, 16)),
    "tokens that all came before": Case([-10], [40], (0, None), groups=2, has_lead=False, causal=False),
    "head dimension 80": Case([3], [50], (2, 20), d=80, tile=(32, 32)),
    "documents": Case([0], [90], (3, 9), documents=[packed(20, -5, 31, 1, 21, -12)], groups=2),
    "documents of every row": Case(
        [0, 0], [60, 60], (2, 13), documents=[packed(-3, 40, -10, 7), packed(12, 48)], tile=(32, 16)
    ),
    "one document in two rows": Case([0, 0], [40, 40], (1, 5), documents=[packed(11, -9, 20)]),
    "only padding in a tile": Case([0], [70], (1, 5), documents=[packed(10, -50, 10)], has_lead=False),
    "a window with sinks": Case([0], [70], (0, 18), groups=3, has_lead=False, has_sink=True),
    "documents with sinks": Case(
        [0], [90], (0, 9), documents=[packed(20, -5, 31, 1, 21, -12)], heads=2, has_lead=False, has_sink=True
    ),
    "half precision": Case([0], [70], (3, 20), groups=2, dtype="float16", tile=(32, 32)),
    "half precision, documents": Case(
        [0], [60], (2, 9), d=32, documents=[packed(30, -4, 26)], dtype="float16", tile=(32, 32)
    ),
}


def segments_of(case: Case) -> Segments:
    if case.documents is None:
        return Segments.of_rows(case.past, case.counts)
    return Segments.of_documents(torch.tensor(case.documents), len(case.past))


def inputs_of(case: Case) -> list[torch.Tensor]:
    """q, k, v and the lead's q, k; NaN in columns that no row uses."""
    rows, dtype = (case.past, case.counts), getattr(torch, case.dtype)
    found = test_chunks.made(rows, case.heads, case.groups, case.d, dtype)
    for x in found:
        if case.documents is not None:
            padding = torch.tensor(case.documents) < 0
            x.masked_fill_(padding[:, None, :, None], float("nan"))
    if case.is_strided:  # channels that are no neighbours, and tokens before heads
        found = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in found[:2]] + [
            x.transpose(1, 2).contiguous().transpose(1, 2) for x in found[2:]
        ]
    found = found if case.has_lead else found[:3]
    if case.has_sink:
        generator = torch.Generator().manual_seed(5)
        shapes = (case.heads * case.groups,), (case.heads, case.d)
        found += [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    return found


def naive_with_sink(case: Case, segments: Segments, q, k, v, logits, values):
    """By the definition: the sink's weight is ``exp(logit)`` among the sum of all."""
    out, lse = naive(case, segments, q, k, v)
    own, values = logits.exp()[None, :, None], values.repeat_interleave(case.groups, 0)[None, :, None]
    total = lse.exp() + own
    merged = (out * lse.exp()[..., None] + own[..., None] * values) / total[..., None]
    sees = lse > -torch.inf
    return merged * sees[..., None], total.log().masked_fill(~sees, -torch.inf)


def naive(case: Case, segments: Segments, q, k, v, q_lead=None, k_lead=None):
    """Segment by segment, every logit from the definition."""
    followers = tuple(range(case.heads)) if case.has_lead else None
    see = *case.windows, followers
    out = torch.zeros_like(q)
    lse = torch.full(q.shape[:3], -torch.inf, dtype=q.dtype)
    for segment in segments.all:
        (row, last_row), rows, columns = segment.rows, slice(*segment.queries), slice(*segment.keys)
        for b in range(row, last_row):
            cuts = rows, columns, columns, rows, columns
            pairs = zip((q, k, v, q_lead, k_lead), cuts, strict=True)
            own_q, own_k, own_v, far_q, far_k = (x if x is None else x[b : b + 1, :, c] for x, c in pairs)
            counts = [segment.past], [segment.queries[1] - segment.queries[0]]
            found = test_chunks.truth(counts, see, own_q, own_k, own_v, far_q, far_k, SCALE, case.causal)
            place = slice(b, b + 1), slice(None), rows
            out[place], lse[place] = found
    return out, lse


def fused(backend: str, case: Case, segments: Segments, q, k, v, *lead):
    see = Visibility(*case.windows, causal=case.causal)
    if case.has_sink:
        return attend(q, Tokens(k, v), None, see, segments, SCALE, backend, sink=Sink(*lead))
    return attend(q, Tokens(k, v), SharedQK(*lead) if lead else None, see, segments, SCALE, backend)


def results(function, inputs) -> list[torch.Tensor]:
    """Output, log-sum-exp and the inputs' gradients.

    The output's gradient holds NaN where the output is 0.
    """
    leaves = [x.clone().requires_grad_() for x in inputs]
    out, lse = function(*leaves)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    if function.args[0] == "triton":
        assert not lse.requires_grad
        grad = grad.masked_fill(lse.isinf()[..., None], float("nan"))
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))]


def relative(found: torch.Tensor, truth: torch.Tensor, size_of_zero: float) -> float:
    """Relative error; infinite where others are -inf. A truth of zeros is measured by ``size_of_zero``."""
    finite = truth.isfinite()
    if not torch.equal(found[~finite].double(), truth[~finite]):
        return float("inf")
    size = truth[finite].norm().item()
    return (found[finite].double() - truth[finite]).norm().item() / (size if size > 1e-9 else size_of_zero)


def errors(case: Case) -> dict[str, list[float]]:
    """Name → ``[error, limit]``: twice the error of the reference in this dtype, and rounding.

    A weight is ``exp(logit - lse)``, both rounded to fp32: its relative error is the logit's absolute error.
    """
    from functools import partial

    import triton

    from pod.kernels import triton_prefill

    m, n = case.tile
    tile = triton_prefill.Tile(m, n, triton.next_power_of_2(case.d), 4, 1)
    of_keys = tile._replace(BLOCK_M=n, BLOCK_N=m)
    triton_prefill.tiles = lambda dtype, head_dim, chip: triton_prefill.Tiles(tile, tile, of_keys)

    inputs, segments = inputs_of(case), segments_of(case)
    exact = [x.double() for x in inputs]
    truth = results(partial(naive_with_sink if case.has_sink else naive, case, segments), exact)
    found = results(partial(fused, "triton", case, segments), inputs)
    plain = results(partial(fused, "reference", case, segments), inputs)
    assert found[0].dtype == inputs[0].dtype and found[1].dtype == torch.float32
    size = max(x.norm().item() for x in truth[2:])
    logit = max(1.0, truth[1][truth[1].isfinite()].abs().max().item())
    rounding = torch.finfo(inputs[0].dtype).eps + torch.finfo(torch.float32).eps * logit
    answer = {}
    names = SINK_NAMES if case.has_sink else NAMES
    for name, a, b, c in zip(names, found, plain, truth, strict=False):
        answer[name] = [relative(a, c, size), 2 * (relative(b, c, size) + rounding)]
    return answer


def interpret() -> dict:
    """Errors of every case; `broken` is why the interpreter does not run here at all."""
    if (why := interpreter.broken()) is not None:
        return why
    torch.use_deterministic_algorithms(True)  # what is not written holds NaN
    assert torch.empty_like(torch.zeros(3)).isnan().all()
    refused = unsupported(torch.zeros(1, 1, 1, 16, dtype=torch.bfloat16))
    return {"errors": {name: errors(case) for name, case in CASES.items()}, "refused": refused}


@pytest.fixture(scope="module")
def interpreted():
    return interpreter.answers(__file__)


@needs_triton
@pytest.mark.parametrize("name", CASES)
def test_interpreted_kernels_are_as_exact_as_the_reference(interpreted, name):
    found = interpreted["errors"][name]
    names = SINK_NAMES if CASES[name].has_sink else NAMES
    assert list(found) == list(names if CASES[name].has_lead or CASES[name].has_sink else names[:5])
    assert not {what: pair for what, pair in found.items() if not pair[0] <= pair[1] < 0.01}


# -- what is seen --------------------------------------------------------------------------------------------


def seen_by(segments: Segments, shape: tuple[int, int, int], see: Visibility) -> torch.Tensor:
    """``[near or distant, B, m, n]``: which keys queries see with their own, and with their lead's."""
    batch, num_queries, num_keys = shape
    found = torch.zeros(2, batch, num_queries, num_keys, dtype=torch.bool)
    for segment in segments.all:
        i = torch.arange(*segment.queries)[:, None] - segment.queries[0] + segment.past
        j = torch.arange(*segment.keys) - segment.keys[0]
        visible = (j <= i) | (not see.causal)
        near = torch.ones_like(visible)
        if see.num_recent_tokens is not None:
            near = (j < see.num_sink_tokens) | (i - j < see.num_recent_tokens)
        for row in range(*segment.rows):
            place = row, slice(*segment.queries), slice(*segment.keys)
            found[0][place] = visible & near
            found[1][place] = visible & ~near
    return found


@needs_triton
@pytest.mark.parametrize("name", CASES)
def test_runs_of_queries_and_of_keys_say_what_is_seen(name):
    from pod.kernels.triton_prefill import runs_of

    case = CASES[name]
    segments, see = segments_of(case), Visibility(*case.windows, causal=case.causal)
    shape = len(case.past), max(case.counts), max(segment.keys[1] for segment in segments.all)
    runs = runs_of(segments, shape, see)
    truth = seen_by(segments, shape, see)

    start, sink_end, window, stop = runs.queries[..., None].unbind(1)
    assert ((start <= sink_end) & (sink_end <= window) & (window <= stop)).all()
    column = torch.arange(shape[2])
    near = (start <= column) & (column < sink_end) | (window <= column) & (column < stop)
    distant = (sink_end <= column) & (column < window)
    assert torch.equal(torch.stack([near, distant]).expand_as(truth), truth)

    first, middle, last = runs.keys[:, :, None].unbind(1)
    assert ((first <= middle) & (middle <= last)).all()
    row = torch.arange(shape[1])[:, None]
    near, distant = (first <= row) & (row < middle), (middle <= row) & (row < last)
    assert torch.equal(torch.stack([near, distant]).expand_as(truth), truth)


@needs_triton
def test_runs_are_made_once_in_a_pass_and_shared_by_rows_that_are_alike():
    from pod.kernels import triton_prefill

    q, k, v, *_ = test_chunks.made(([0, 0], [9, 9]), d=16)
    segments = Segments.whole(2, 9, 9)
    call = Call(q, Tokens(k, v), None, Visibility(2, 3), segments, 1.0)
    runs = triton_prefill._runs(call, 9)
    assert runs is triton_prefill._runs(call._replace(scale=2.0), 9)
    assert runs is not triton_prefill._runs(call._replace(visibility=Visibility(2, 4)), 9)
    assert runs.queries.shape == (1, 4, 9) and runs.keys.shape == (1, 3, 9)


# -- where it runs -------------------------------------------------------------------------------------------


def unsupported(q: torch.Tensor, **changes) -> str | None:
    from pod.kernels import triton_prefill

    segments = Segments.whole(q.shape[0], q.shape[2], q.shape[2])
    call = Call(q, Tokens(q, q), None, Visibility(), segments, 1.0)
    return triton_prefill.unsupported(call._replace(**changes))


@needs_triton
def test_what_cannot_run_is_refused_in_one_line():
    q = torch.zeros(1, 2, 4, 16)
    positions = Visibility(positions=torch.zeros(1, 2, 4))
    other = "keys, values or a lead of another dtype than the queries (torch.float32)"
    assert unsupported(q.double()) == "dtype torch.float64 (float32, float16 or bfloat16)"
    assert unsupported(q[..., :8]) == "head_dim 8 (16 to 256)"
    assert unsupported(torch.zeros(1, 1, 4, 320)) == "head_dim 320 (16 to 256)"
    assert unsupported(q, visibility=positions) == "tokens with positions of their own"
    assert unsupported(q, tokens=Tokens(q, q.half())) == other
    assert unsupported(q, lead=SharedQK(q, q.half())) == other
    assert unsupported(q, scale=-0.5) == "scale -0.5 (greater than 0)"
    with pytest.raises(
        ValueError, match=r"'triton' cannot run: device cpu .CUDA, or TRITON_INTERPRET=1.; choose auto"
    ):
        attend(q, Tokens(q, q), backend="triton")


@needs_triton
def test_bfloat16_is_refused_by_the_interpreter(interpreted):
    """It multiplies the bit patterns."""
    assert interpreted["refused"] == "bfloat16 under TRITON_INTERPRET=1"


def test_without_triton_it_says_so(monkeypatch):
    def missing():
        raise ImportError("No module named 'triton'")

    monkeypatch.setattr("pod.kernels._prefill", missing)
    q = torch.zeros(1, 2, 4, 16)
    with pytest.raises(ValueError, match="'triton' cannot run: Triton cannot be imported .No module named"):
        attend(q, Tokens(q, q), backend="triton")


@needs_triton
@pytest.mark.parametrize("lacks", ["no C compiler: Triton …", "no /usr/include/Python.h: Triton …"])
def test_what_triton_needs_is_named(monkeypatch, lacks):
    """Of a GPU machine, as far as the reasons look."""
    from types import SimpleNamespace

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr("pod.toolchain.missing", lambda: lacks)
    q = SimpleNamespace(device=torch.device("cuda"), is_cuda=True, dtype=torch.bfloat16, shape=(1, 2, 8, 64))
    assert unsupported(q) == lacks  # type: ignore[arg-type]


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("d", [16, 64, 80, 128, 256])
def test_on_a_gpu(dtype, d):
    """The shipped tiles, against fp64, next to the error of the reference in this dtype."""
    ids = torch.tensor([packed(300, -20, 700, 480), packed(1400, -100)]).cuda()
    for documents, see in ((ids, Visibility(16, 200)), (None, Visibility(16, 200)), (None, Visibility())):
        inputs = [x.cuda() for x in test_chunks.made(([0, 0], [1500, 1500]), 3, 2, d)]
        used = inputs if see.num_recent_tokens else inputs[:3]

        def run(backend, dtype, used=used, see=see, documents=documents):
            segments = None if documents is None else Segments.of_documents(documents, 2)
            leaves = [x.to(dtype).requires_grad_() for x in used]
            q, k, v, *lead = leaves
            out, _ = attend(
                q, Tokens(k, v), SharedQK(*lead) if lead else None, see, segments, backend=backend
            )
            return [out, *torch.autograd.grad(out.square().sum(), leaves)]

        truth = run("reference", torch.float64)
        for exact, a, b in zip(truth, run("triton", dtype), run("reference", dtype), strict=True):
            error, of_reference = ((x.double() - exact).norm() / exact.norm() for x in (a, b))
            assert error <= 2 * (of_reference + torch.finfo(dtype).eps)


if __name__ == "__main__":
    print(json.dumps(interpret()))
