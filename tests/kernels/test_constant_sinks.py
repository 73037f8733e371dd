"""Constant sinks in every implementation of attention: against an n x n softmax with one more column,
written here."""

import flash_emulation
import flex_eager
import pytest
import torch

import pod  # noqa: F401  (registers the implementations)
from pod.modeling.model.attend import IMPLEMENTATIONS, Segments, Sink, Tokens, Visibility, attend
from pod.modeling.model.sharing import Roles

NAMES = ("out", "q", "k", "v", "sink logits", "sink values")
CASES = [  # batch, KV heads, groups, n, window
    (2, 2, 3, 1, 4),
    (2, 2, 3, 63, 8),
    (1, 1, 1, 40, 1),
    (2, 3, 2, 70, 500),
    (1, 2, 4, 300, 129),
]


def packed(batch, n):
    """Documents of unlike length, padding inside the first row and at the end of all."""
    rows = torch.stack([torch.arange(n) // (3 + n // (2 + row)) for row in range(batch)])
    rows[0, n // 3 : n // 2] = -1
    rows[:, n - n // 9 :] = -1
    return rows


def inputs_of(batch, heads, groups, n, d=8, dtype=torch.float64):
    """q, k, v, and a sink about as heavy as the heaviest token."""
    generator = torch.Generator().manual_seed(n + d)
    shapes = (batch, heads * groups, n, d), (batch, heads, n, d), (batch, heads, n, d), (heads * groups,)
    q, k, v, logits, values = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in (*shapes, (heads, d))
    )
    return [x.to(dtype) for x in (1.5 * q, 1.5 * k, 1.5 * v, 2 + logits, 3 * values)]


def oracle(q, k, v, logits, values, window, docs=None, scale=0.4):
    """Output and log-sum-exp: each query's softmax over its window and one more column, at every position."""
    groups, n = q.shape[1] // k.shape[1], q.shape[2]
    distance = torch.arange(n)[:, None] - torch.arange(n)
    seen = ((distance >= 0) & (distance < window)).expand(q.shape[0], n, n)
    real = torch.ones(q.shape[0], n, dtype=torch.bool)
    if docs is not None:
        begins = docs.diff(dim=1, prepend=docs[:, :1] - 1) != 0
        number = begins.cumsum(1)
        seen = seen & (number[:, :, None] == number[:, None, :])
        real = docs >= 0
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    table = (scale * q @ k.transpose(2, 3)).masked_fill(~seen[:, None], float("-inf"))
    table = torch.cat((table, logits[None, :, None, None].expand(*table.shape[:3], 1)), -1)
    own = values.repeat_interleave(groups, 0)[None, :, None]
    weights = table.softmax(-1)
    out = weights[..., :-1] @ v + weights[..., -1:] * own
    lse = table.logsumexp(-1)
    return out * real[:, None, :, None], lse.masked_fill(~real[:, None], float("-inf"))


def run(q, k, v, logits, values, window, docs=None, scale=0.4, backend="auto", roles=None):
    segments = None if docs is None else Segments.of_documents(docs, q.shape[0])
    see = Visibility(0, window)
    sink = Sink(logits, values)
    return attend(q, Tokens(k, v), None, see, segments, scale, backend, roles, sink)


def gradients(function, inputs, **options):
    leaves = [x.clone().requires_grad_() for x in inputs]
    out, lse = function(*leaves, **options)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    if options.get("backend") in ("flash", "emulated"):  # they leave padding out, whatever its gradient is
        grad = grad.masked_fill(lse.isinf()[..., None], float("nan"))
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))], lse.detach()


def check(found, truth, atol=1e-11):
    (found, lse), (truth, true_lse) = found, truth
    for name, a, b in zip(NAMES, found, truth, strict=True):
        assert a.shape == b.shape, name
        assert (a - b).norm() <= atol * (1 + b.norm()), name
    torch.testing.assert_close(lse, true_lse, rtol=0, atol=10 * atol)


@pytest.fixture
def everywhere(monkeypatch):
    """What CUDA runs, with emulated ops: ``emulated`` and ``flex``."""
    flash_emulation.install(monkeypatch)
    flex_eager.install(monkeypatch)


@pytest.mark.parametrize("with_docs", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("backend", ["reference", "flash", "emulated", "flex"])
def test_output_lse_and_all_gradients(backend, case, with_docs, everywhere):
    batch, *_, n, window = case
    options = {"window": window, "docs": packed(batch, n) if with_docs else None}
    inputs = inputs_of(*case[:4])
    check(gradients(run, inputs, backend=backend, **options), gradients(oracle, inputs, **options))


@pytest.mark.parametrize("backend", ["reference", "flash", "emulated", "flex"])
def test_without_gradients(backend, everywhere):
    inputs, docs = inputs_of(2, 2, 3, 63), packed(2, 63)
    with torch.no_grad():
        out, lse = run(*inputs, window=8, docs=docs, backend=backend)
    truth, true_lse = oracle(*inputs, window=8, docs=docs)
    torch.testing.assert_close(out, truth, rtol=0, atol=1e-11)
    torch.testing.assert_close(lse, true_lse, rtol=0, atol=1e-11)


@pytest.mark.parametrize("backend", ["reference", "flash"])
def test_gradients_of_the_sink_alone(backend):
    """As where everything else is frozen."""
    inputs, sums = inputs_of(2, 2, 3, 63), []
    for function, options in ((run, {"backend": backend}), (oracle, {})):
        sink = [x.clone().requires_grad_() for x in inputs[3:]]
        out, _ = function(*inputs[:3], *sink, window=8, **options)
        sums.append(torch.autograd.grad(out.square().sum(), sink))
    for found, truth in zip(*sums, strict=True):
        torch.testing.assert_close(found, truth, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("backend", ["reference", "flash"])
@pytest.mark.parametrize("windows", [(0, 2), (1,), (0, 1, 2)], ids=str)
def test_only_heads_that_keep_their_windows_have_a_sink(windows, backend):
    leads = tuple(head for head in range(3) if head not in windows)
    inputs = inputs_of(2, 3, 2, 63)
    out, lse = run(*inputs, window=8, backend=backend, roles=Roles(leads, windows=windows))
    sink_free = [*inputs[:3], torch.full((6,), float("-inf"), dtype=torch.float64), inputs[4]]
    for head in range(3):
        own = slice(2 * head, 2 * head + 2)
        truth = oracle(*inputs, window=8) if head in windows else oracle(*sink_free, window=10**6)
        torch.testing.assert_close(out[:, own], truth[0][:, own], rtol=0, atol=1e-11)
        torch.testing.assert_close(lse[:, own], truth[1][:, own], rtol=0, atol=1e-11)


def test_tiles_change_nothing(monkeypatch):
    """The output is merged a few rows at a time."""
    from pod.modeling.model import sinks

    inputs = inputs_of(2, 2, 3, 63)
    whole = gradients(run, inputs, window=8, backend="flash")
    monkeypatch.setitem(sinks._TILE_ELEMENTS, "cpu", 2 * 6 * 8 * 5)
    check(gradients(run, inputs, window=8, backend="flash"), whole, atol=1e-13)


def test_16_bits_are_as_near_as_their_inputs_allow():
    inputs = inputs_of(2, 2, 3, 63, dtype=torch.bfloat16)
    truth, _ = gradients(oracle, [x.double() for x in inputs], window=8)
    found, _ = gradients(run, inputs, window=8, backend="flash")
    for name, a, b in zip(NAMES, found, truth, strict=True):
        assert a.dtype == torch.bfloat16, name
        assert (a.double() - b).norm() <= 2 * 2**-8 * b.norm(), name


def test_a_sink_that_does_not_fit():
    q, k, v, logits, values = inputs_of(1, 2, 3, 5)
    with pytest.raises(ValueError, match=r"sink are \[5\] and \[2, 8\], expected \[6\] and \[2, 8\]"):
        run(q, k, v, logits[:5], values, window=3)
    with pytest.raises(ValueError, match="'grouped' cannot run: a constant sink"):
        run(q[:, :, -1:], k, v, logits, values, window=None, backend="grouped")
    assert set(IMPLEMENTATIONS) >= {"reference", "flash", "grouped"}
