"""`attend` for queries behind a filled cache.

Every implementation is held against fp64 sums written from the definition. Columns that no row uses hold NaN.
``emulated`` is what ``flash`` runs on CUDA, its op replaced by plain PyTorch.
"""

import flash_emulation
import pytest
import test_decode
import torch
from attention_inputs import with_lse

import pod  # noqa: F401  (registers the implementations)
from pod.modeling.model import flash
from pod.modeling.model.attend import (
    EVERYTHING,
    Segments,
    SharedQK,
    Tokens,
    Visibility,
    attend,
    merge,
    take_heads,
)
from pod.modeling.model.sharing import Roles
from pod.modeling.model.window_buffer import Recent, WindowBuffer

NAN = float("nan")
BACKENDS = ["reference", "flash", "emulated"]
ROWS = {  # past and new tokens of every row
    "one token": ([9, 0, 41, 300], [1, 1, 1, 1]),
    "one token, alike": ([30, 30], [1, 1]),
    "five": ([0, 7, 300, 41], [5, 2, 5, 1]),
    "forty": ([3, 0, 60, 14], [40, 33, 1, 17]),
    "forty, alike": ([23, 23], [40, 40]),
    "a row without new tokens": ([5, 20, 3], [4, 0, 9]),
    "three hundred": ([0, 130], [300, 257]),
    "nothing before": ([0, 0, 0], [17, 30, 1]),
}
SEES = {  # n_s, n_r, and the heads of three that follow
    "causal": (0, None, None),
    "window": (0, 9, None),
    "one recent": (0, 1, None),
    "sinks and window": (3, 9, None),
    "lead": (3, 9, (0, 1, 2)),
    "lead without sinks": (0, 4, (0, 1, 2)),
    "wide windows": (30, 200, (0, 1, 2)),
    "some heads": (4, 13, (0, 2)),
    "everything": (0, None, None),
}


@pytest.fixture(autouse=True)
def emulate(monkeypatch):
    flash_emulation.install(monkeypatch)


def made(rows, heads=3, groups=2, d=8, dtype=torch.float64, seed=0):
    """q, k, v, q_lead, k_lead with NaN where a row has no token."""
    past, counts = rows
    generator = torch.Generator().manual_seed(seed + sum(past))
    m, n = max(counts), max(p + c for p, c in zip(past, counts, strict=True))
    sizes = [(heads * groups, m), (heads, n), (heads, n), (heads * groups, m), (heads, n)]
    found = [
        torch.randn(len(past), h, size, d, generator=generator, dtype=torch.float64) * 1.5
        for h, size in sizes
    ]
    for x in found:
        for row, (p, c) in enumerate(zip(past, counts, strict=True)):
            x[row, :, c if x.shape[1] > heads else p + c :] = NAN
    return [x.to(dtype) for x in found]


def truth(rows, see, q, k, v, q_lead, k_lead, scale, causal=True):
    """Output and log-sum-exp in fp64, row by row and head by head."""
    (past, counts), (n_s, n_r, followers) = rows, see
    groups = q.shape[1] // k.shape[1]
    out, lse = torch.zeros_like(q), torch.full(q.shape[:3], -torch.inf, dtype=q.dtype)
    for b, (p, c) in enumerate(zip(past, counts, strict=True)):
        i, j = torch.arange(p, p + c)[:, None], torch.arange(p + c)
        for h in range(q.shape[1] if c else 0):
            kv = h // groups
            seen = (j <= i) | (not causal)
            logits = q[b, h, :c] @ k[b, kv, : p + c].T * scale
            near = torch.ones_like(seen) if n_r is None else (j < n_s) | (i - j < n_r)
            if followers and kv in followers:
                f = followers.index(kv)
                own = q_lead[b, f * groups + h % groups, :c] @ k_lead[b, f, : p + c].T * scale
                logits = torch.where(near, logits, own)
            elif not followers:
                seen = seen & near
            logits = logits.masked_fill(~seen, -torch.inf)
            out[b, h, :c] = logits.softmax(-1) @ v[b, kv, : p + c]
            lse[b, h, :c] = logits.logsumexp(-1)
    return out, lse


def found_by(backend, rows, see, q, k, v, q_lead, k_lead, scale, causal=True, segments=None):
    n_s, n_r, followers = see
    segments = Segments.of_rows(*rows) if segments is None else segments
    lead, roles = None, None
    if followers is not None:
        lead, leads = SharedQK(q_lead, k_lead), [head for head in range(k.shape[1]) if head not in followers]
        roles = Roles(tuple(leads), tuple(followers))
    return attend(q, Tokens(k, v), lead, Visibility(n_s, n_r, causal), segments, scale, backend, roles)


def followed(inputs, see, groups=2):
    """The inputs with the lead tensors of the heads that follow only."""
    q, k, v, q_lead, k_lead = inputs
    if see[2] is None:
        return [q, k, v, q_lead, k_lead]
    return [q, k, v, take_heads(q_lead, see[2], groups), take_heads(k_lead, see[2])]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("see", SEES)
@pytest.mark.parametrize("rows", ROWS)
def test_output_log_sum_exp_and_every_gradient(rows, see, backend):
    rows, causal, see = ROWS[rows], see != "everything", SEES[see]
    inputs = followed(made(rows), see)
    used = inputs if see[2] else inputs[:3]

    def run(function):
        leaves = [x.clone().requires_grad_() for x in used]
        out, lse = function(*leaves, *inputs[len(used) :], 0.4, causal)
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
        total = (out * weights).sum()
        if backend == "reference":  # the only one whose log-sum-exp has a gradient
            total = total + (lse * weights[..., 0])[lse.isfinite()].sum()
        return [lse.detach(), out.detach(), *torch.autograd.grad(total, leaves)], lse

    found, lse = run(lambda *x: found_by(backend, rows, see, *x))
    exact, _ = run(lambda *x: truth(rows, see, *x))
    assert lse.requires_grad == (backend == "reference")
    for name, a, b in zip(("lse", "out", "q", "k", "v", "q_lead", "k_lead"), found, exact, strict=False):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11, msg=lambda m, name=name: f"{name}: {m}")
    with torch.no_grad():  # another way through the code
        for a, b in zip(
            found_by(backend, rows, see, *inputs, 0.4, causal), (found[1], found[0]), strict=True
        ):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("see", ["window", "sinks and window", "lead", "some heads"])
@pytest.mark.parametrize("rows", ["one token", "five", "forty", "forty, alike", "three hundred"])
def test_tokens_of_a_window(rows, see, backend):
    """Keys are held in a ring and the chunk behind it; what has left the window is nowhere."""
    (past, counts), see = ROWS[rows], SEES[see]
    rows = ROWS[rows]
    q, k, v, q_lead, k_lead = followed(made(rows), see)
    exact = truth(rows, see, q, k, v, q_lead, k_lead, 0.4)

    def recent(x, heads):
        buffer, x = WindowBuffer(see[0], see[1]), x[:, heads].nan_to_num(7.0)
        if max(past):
            buffer.append_ragged(x[:, :, : max(past)], Segments.of_rows([0] * len(past), past))
        chunk = torch.stack(
            [
                torch.nn.functional.pad(x[b, :, p : p + c], (0, 0, 0, max(counts) - c))
                for b, (p, c) in enumerate(zip(*rows, strict=True))
            ]
        )
        return Recent(buffer, chunk, list(zip(*rows, strict=True)))

    if see[2] in (None, (0, 1, 2)):
        keys, values = recent(k, slice(None)), v if see[2] else recent(v, slice(None))
        found = found_by(backend, rows, see, q, keys, values, q_lead, k_lead, 0.4)
    else:  # as layers of both kinds call it: their leads hold every key, their followers a window
        of_followers = [take_heads(x, see[2], 2 if x is q else 1) for x in (q, v)]
        keys = recent(k, list(see[2]))
        found = found_by(
            backend, rows, (*see[:2], (0, 1)), of_followers[0], keys, of_followers[1], q_lead, k_lead, 0.4
        )
        exact = tuple(take_heads(x, see[2], 2) for x in exact)
    for a, b in zip(found, exact, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("see", ["causal", "sinks and window", "lead", "some heads"])
@pytest.mark.parametrize(
    "rows", [([40, 40], [5, 5]), ([60, 33, 90], [1, 7, 6]), ([0, 70], [41, 20])], ids=str
)
def test_packed_tokens(rows, see, backend, monkeypatch):
    """Buffers of 4 bits, read a tile at a time; spoilt slots hold NaN."""
    monkeypatch.setattr(flash, "_TILE_TOKENS", 16)
    see, lengths = SEES[see], [p + c for p, c in zip(*rows, strict=True)]
    case = test_decode.Case(
        lengths, [[0, 1, 2]], num_heads=3, group_size=16, residual=4, dtype="float32", spare=0
    )
    q, *_, q_lead, _ = made(rows, d=16, dtype=torch.float32)
    torch.manual_seed(1)
    tokens = [torch.randn(len(lengths), 3, case.capacity, 16) for _ in range(3)]
    (k, own_k), (v, own_v), (k_lead, own_lead) = (
        test_decode.packed(case, x, per_channel)
        for x, per_channel in zip(tokens, (True, False, True), strict=True)
    )
    followers = see[2] or (0, 1, 2)
    q_lead = take_heads(q_lead, followers, 2)
    exact = truth(rows, see, q.double(), own_k, own_v, q_lead.double(), own_lead[:, list(followers)], 0.4)
    found = found_by(backend, rows, see, q, k, v, q_lead, k_lead.heads(followers), 0.4)
    for a, b in zip(found, exact, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cut", [1, 17, 60])
def test_parts_of_one_softmax_merge(cut, backend):
    """Parts of one softmax merge: tokens before a cut, in any order, and those behind it.

    A row that has none gives -inf and nothing else.
    """
    rows = ROWS["forty, alike"]
    q, k, v, *_ = made(rows)
    whole = truth(rows, SEES["everything"], q, k, v, None, None, 0.4, causal=False)
    order = torch.randperm(cut, generator=torch.Generator().manual_seed(0))
    parts = [
        attend(q, Tokens(k[:, :, order], v[:, :, order]), None, EVERYTHING, scale=0.4, backend=backend),
        attend(q, Tokens(k[:, :, cut:], v[:, :, cut:]), None, EVERYTHING, scale=0.4, backend=backend),
    ]
    nothing = torch.full_like(q, 3.0), torch.full(q.shape[:3], -torch.inf, dtype=q.dtype)
    for found in (merge(parts), merge([nothing, *parts]), merge([merge(parts[:1]), parts[1], nothing])):
        for a, b in zip(found, whole, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-11)
    out, lse = merge([nothing, nothing])
    assert not out.any() and (lse == -torch.inf).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_of_fresh_rows_gives_nothing(backend):
    docs = torch.tensor([[-1, -1, 0, 0, 0, 1, 1], [0, 0, 0, -1, 2, 2, -1]])
    q, k, v, *_ = made(([0, 0], [7, 7]))
    out, lse = with_lse(q, k, v, doc_ids=docs, backend=backend)
    padding = (docs < 0)[:, None].expand(lse.shape)
    assert not out[padding].any() and (lse[padding] == -torch.inf).all() and lse[~padding].isfinite().all()


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("see", ["causal", "window", "sinks and window", "lead"])
@pytest.mark.parametrize("backend", ["reference", "flash"])
def test_bfloat16_loses_little_more_than_the_rounding_of_its_output(backend, see, d):
    n_s, n_r, followers = {"causal": SEES["causal"]}.get(see, (16, 600, SEES[see][2]))
    see = (0 if see == "window" else n_s, n_r, followers and (0, 1))
    for rows in (([2048], [40]), ([0], [2100]), ([2047, 2100], [1, 33])):
        inputs = [x * 0.7 for x in made(rows, heads=2, groups=1, d=d, dtype=torch.bfloat16)]
        exact, true_lse = truth(rows, see, *[x.double() for x in inputs], d**-0.5)
        out, lse = found_by(backend, rows, see, *inputs, d**-0.5)
        rounding = (exact.bfloat16().double() - exact).norm()
        assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
        assert (out.double() - exact).norm() <= 2 * rounding
        used = true_lse.isfinite()
        assert torch.equal(used, lse.isfinite()) and (lse - true_lse)[used].abs().max() < 1e-4


def test_one_token_is_served_by_grouped_products():
    rows = ROWS["one token, alike"]
    inputs = made(rows)
    exact = truth(rows, SEES["causal"], *inputs, 0.4)
    for a, b in zip(found_by("grouped", rows, SEES["causal"], *inputs, 0.4), exact, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
def test_one_token_behind_packed_ones_reads_no_spare_slot(backend):
    case = test_decode.Case([41, 41], [[0, 1, 2]], num_heads=3, group_size=16, residual=4, dtype="float32")
    rows = [40, 40], [1, 1]
    q, *_ = made(rows, d=16, dtype=torch.float32)
    torch.manual_seed(1)
    tokens = [torch.randn(2, 3, case.capacity, 16) for _ in range(2)]
    (k, own_k), (v, own_v) = (test_decode.packed(case, x, i == 0) for i, x in enumerate(tokens))
    exact = truth(rows, SEES["causal"], q.double(), own_k, own_v, None, None, 0.4)
    found = found_by(backend, rows, SEES["causal"], q, k, v, None, None, 0.4)
    for a, b in zip(found, exact, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


def test_no_call_of_the_cuda_path_grows_with_rows_times_tokens(monkeypatch):
    """Sequences of every call are bounded: what the op gets are rows and columns, no mask."""
    seen = []

    def watching(q, k, v, call):
        seen.append((call.longest, call.causal, call.window))
        return flash_emulation.forward(q, k, v, call)

    flash_emulation.replace_ops(monkeypatch, watching, flash_emulation.backward)
    rows, see = ([300], [40]), SEES["lead"]
    found_by("emulated", rows, see, *made(rows), 0.4)
    assert seen == [((40, 48), True, 9), ((40, 3), False, None), ((40, 328), True, None)]
