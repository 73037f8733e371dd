"""Window attention: the reference against loops, the flash backend against the reference.

Also what it asks for.
"""

import math

import pytest
import torch
from attention_inputs import operations

api, flash, reference = map(operations, ("auto", "flash", "reference"))
SHAPES = [(1, 8), (7, 8), (8, 8), (9, 8), (63, 1), (200, 40), (257, 256), (500, 129)]  # n, window


def tensors(batch, heads, groups, n, d, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, heads * groups, n, d), (batch, heads, n, d), (batch, heads, n, d)]
    return [torch.randn(s, generator=generator, dtype=torch.float64).mul(1.5).to(dtype) for s in shapes]


def packed(batch, n):
    """Documents of different lengths, padding inside the first row and at the end of all."""
    rows = torch.stack([torch.arange(n) // (3 + n // (2 + row)) for row in range(batch)])
    rows[0, n // 3 : n // 2] = -1
    rows[:, n - n // 9 :] = -1
    return rows


def loops(q, k, v, window, docs=None):
    """One query at a time over the window's tokens of its own document."""
    batch, query_heads, n, d = q.shape
    groups = query_heads // k.shape[1]
    out = torch.zeros_like(q)
    for b in range(batch):
        start = 0
        for i in range(n):
            if docs is not None and i and docs[b, i] != docs[b, i - 1]:
                start = i
            if docs is not None and docs[b, i] < 0:
                continue
            seen = slice(max(start, i - window + 1), i + 1)
            for h in range(query_heads):
                weights = (k[b, h // groups, seen] @ q[b, h, i] / math.sqrt(d)).softmax(0)
                out[b, h, i] = weights @ v[b, h // groups, seen]
    return out


def gradients(function, inputs, *args, **kwargs):
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = function(*leaves, *args, **kwargs)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    return out.detach(), torch.autograd.grad((out * weights.to(out.dtype)).sum(), leaves)


@pytest.mark.parametrize("with_docs", [False, True])
@pytest.mark.parametrize("window", [1, 4, 19, 50])
def test_reference_sees_the_window_only(window, with_docs):
    inputs = tensors(2, 2, 3, 23, 4)
    docs = packed(2, 23) if with_docs else None
    out = reference.window_attention(*inputs, window, doc_ids=docs)
    assert (out - loops(*inputs, window, docs)).abs().max() <= 1e-12


@pytest.mark.parametrize("groups", [1, 3, 4])
@pytest.mark.parametrize("with_docs", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_flash_equals_reference_with_all_gradients(groups, with_docs, shape):
    n, window = shape
    docs = packed(2, n) if with_docs else None
    inputs = tensors(2, 2, groups, n, 8)
    out, grads = gradients(flash.window_attention, inputs, window, doc_ids=docs)
    truth, true_grads = gradients(reference.window_attention, inputs, window, doc_ids=docs)
    for name, a, b in zip(("out", "q", "k", "v"), (out, *grads), (truth, *true_grads), strict=True):
        assert (a - b).norm() <= 1e-11 * (1 + b.norm()), name


def test_window_of_the_whole_row_is_causal_attention():
    inputs = tensors(1, 2, 2, 90, 8)
    for window in (90, 91, 10**6):
        out = api.window_attention(*inputs, window, backend="flash")
        assert torch.equal(out, api.causal_attention(*inputs, backend="flash"))


def test_bfloat16_is_as_good_as_its_rounding():
    inputs = tensors(1, 2, 3, 300, 16, torch.bfloat16)
    truth = reference.window_attention(*[x.double() for x in inputs], 50)
    error = (flash.window_attention(*inputs, 50).double() - truth).norm() / truth.norm()
    reference_error = (reference.window_attention(*inputs, 50).double() - truth).norm() / truth.norm()
    assert error <= 2 * (reference_error + torch.finfo(torch.bfloat16).eps)


def test_dispatch_names_what_is_wrong():
    q, k, v = tensors(1, 2, 2, 8, 4)
    with pytest.raises(ValueError, match="n_r >= 1, got 0"):
        api.window_attention(q, k, v, 0)
    with pytest.raises(ValueError, match="must divide"):
        api.window_attention(q[:, :3], k, v, 2)
    with pytest.raises(ValueError, match="'nope' is unknown"):
        api.window_attention(q, k, v, 2, backend="nope")
    assert torch.equal(api.window_attention(q, k, v, 2), flash.window_attention(q, k, v, 2))
