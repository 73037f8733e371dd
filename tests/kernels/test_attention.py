"""PoD attention: the reference against loops written from the paper.

The flash backend is held against the reference.
"""

import math

import pytest
import torch
from attention_inputs import operations

import pod  # noqa: F401  (connects the kernels)
from pod.modeling.model.attend import AUTO_ORDER, IMPLEMENTATIONS, Segments, Tokens, attend

api, flash, reference = map(operations, ("auto", "flash", "reference"))
NAMES = ("q", "k", "v", "q_lead", "k_lead")


def tensors(batch, heads, groups, n, d, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes: list = [
        (batch, heads * groups, n, d),
        *[(batch, heads, n, d)] * 2,
        (batch, heads * groups, n, d),
        (batch, heads, n, d),
    ]
    return [torch.randn(s, generator=generator, dtype=torch.float64).mul(1.5).to(dtype) for s in shapes]


def loops(q, k, v, q_lead, k_lead, num_sink, num_recent, docs=None):
    """Equations 3 and 4, one query at a time, gate and all."""
    batch, query_heads, n, d = q.shape
    groups = query_heads // k.shape[1]
    out = torch.zeros_like(q)
    for b in range(batch):
        ids = [0] * n if docs is None else docs[b].tolist()
        for h in range(query_heads):
            kv = h // groups
            for i in range(n):
                if ids[i] < 0:
                    continue
                start = min(j for j in range(n) if ids[j] == ids[i])
                seen = list(range(start, i + 1))
                near = [j for j in seen if j - start < num_sink or i - j < num_recent]
                far = [j for j in seen if j not in near]
                a_near = (k[b, kv, near] @ q[b, h, i]) / math.sqrt(d)
                o_near = a_near.softmax(0) @ v[b, kv, near]
                if not far:
                    out[b, h, i] = o_near
                    continue
                a_far = (k_lead[b, kv, far] @ q_lead[b, h, i]) / math.sqrt(d)
                gate = a_near.exp().sum() / (a_near.exp().sum() + a_far.exp().sum())
                out[b, h, i] = gate * o_near + (1 - gate) * (a_far.softmax(0) @ v[b, kv, far])
    return out


def gradients(function, inputs, *args, **kwargs):
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = function(*leaves, *args, **kwargs)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(
        out.dtype
    )
    grads = torch.autograd.grad((out * weights).sum(), leaves, allow_unused=True)
    return out, [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads, strict=True)]


def relative(a, b, size_of_zero=1.0):
    """Relative error; a truth that is exactly zero is measured against ``size_of_zero``."""
    size = b.norm().item()
    return (a - b).norm().item() / (size if size > 1e-9 else size_of_zero)


def packed(batch, n, seed=3):
    """Random documents, with padding in the middle of one row and at the end of all."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for b in range(batch):
        cuts = torch.randperm(n - 2, generator=generator)[:3].sort().values + 1
        row = torch.bucketize(torch.arange(n), cuts, right=True)
        row[row == 1] = -1 if b == 0 else 1
        row[n - n // 8 :] = -1
        rows.append(row)
    return torch.stack(rows)


@pytest.mark.parametrize("windows", [(0, 1), (2, 3), (4, 30), (5, 1)])
@pytest.mark.parametrize("with_docs", [False, True])
def test_reference_follows_the_paper(windows, with_docs):
    inputs = tensors(2, 2, 2, 19, 4, torch.float64)
    docs = packed(2, 19) if with_docs else None
    expected = loops(*inputs, *windows, docs)
    torch.testing.assert_close(
        reference.pod_attention(*inputs, *windows, doc_ids=docs), expected, rtol=0, atol=1e-12
    )


def test_reference_blocks_do_not_change_the_result(monkeypatch):
    inputs = tensors(1, 2, 3, 37, 8, torch.float64)
    whole = reference.pod_attention(*inputs, 3, 9)
    monkeypatch.setattr("pod.modeling.model.reference._BLOCK_ELEMENTS", 6 * 37 * 5)
    torch.testing.assert_close(reference.pod_attention(*inputs, 3, 9), whole, rtol=0, atol=1e-13)


SHAPES = [  # n, n_s, n_r
    (1, 4, 8),
    (3, 4, 8),
    (12, 4, 8),
    (13, 4, 8),
    (63, 4, 8),
    (200, 0, 1),
    (131, 0, 40),
    (257, 16, 100),
    (500, 3, 197),
    (64, 4, 400),
]


@pytest.mark.parametrize("groups", [1, 3, 4])
@pytest.mark.parametrize(
    ("shape", "with_docs"),
    [(s, docs) for s in SHAPES for docs in (False, True) if s[0] >= 12 or not docs],
    ids=str,
)
def test_flash_equals_reference_with_all_gradients(groups, shape, with_docs):
    n, *windows = shape
    docs = packed(2, n) if with_docs else None
    inputs = tensors(2, 2, groups, n, 16)
    out, grads = gradients(flash.pod_attention, inputs, *windows, doc_ids=docs)
    truth, true_grads = gradients(
        reference.pod_attention, [x.double() for x in inputs], *windows, doc_ids=docs
    )
    assert relative(out, truth) <= 2e-6
    size = max(x.norm().item() for x in true_grads)
    for name, grad, true in zip(NAMES, grads, true_grads, strict=True):
        assert relative(grad, true, size) <= 2e-6, name


def test_flash_in_double_is_the_reference():
    inputs = tensors(1, 2, 3, 150, 8, torch.float64)
    docs = packed(1, 150)
    out, grads = gradients(flash.pod_attention, inputs, 4, 20, doc_ids=docs)
    truth, true_grads = gradients(reference.pod_attention, inputs, 4, 20, doc_ids=docs)
    for a, b in zip([out, *grads], [truth, *true_grads], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_bfloat16_is_as_good_as_its_rounding():
    inputs = tensors(1, 2, 3, 300, 16)
    rounded = [x.bfloat16() for x in inputs]
    truth = reference.pod_attention(*[x.double() for x in rounded], 4, 50)
    error = relative(flash.pod_attention(*rounded, 4, 50).double(), truth)
    reference_error = relative(reference.pod_attention(*rounded, 4, 50).double(), truth)
    assert error <= 2 * (reference_error + torch.finfo(torch.bfloat16).eps)


@pytest.mark.parametrize("with_docs", [False, True])
def test_causal_is_dense_attention(with_docs):
    q, k, v, *_ = tensors(2, 2, 3, 77, 8)
    docs = packed(2, 77) if with_docs else None
    out, grads = gradients(flash.causal_attention, (q, k, v), doc_ids=docs)
    truth, true_grads = gradients(reference.causal_attention, [x.double() for x in (q, k, v)], doc_ids=docs)
    for a, b in zip([out, *grads], [truth, *true_grads], strict=True):
        assert relative(a, b) <= 2e-6


def test_strided_inputs_and_outputs():
    """Heads as the model makes them: a transposed view of a projection."""
    q, k, v, q_lead, k_lead = (
        x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors(2, 2, 2, 90, 8)
    )
    out, grads = gradients(flash.pod_attention, (q, k, v, q_lead, k_lead), 4, 16)
    inputs = [x.contiguous() for x in (q, k, v, q_lead, k_lead)]
    truth, true_grads = gradients(flash.pod_attention, inputs, 4, 16)
    for a, b in zip([out, *grads], [truth, *true_grads], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_dispatch_names_what_is_wrong(monkeypatch):
    q, k, v, q_lead, k_lead = tensors(1, 2, 2, 8, 4)
    with pytest.raises(ValueError, match="'nope' is unknown; choose auto"):
        api.pod_attention(q, k, v, q_lead, k_lead, 1, 2, backend="nope")
    with pytest.raises(ValueError, match="cannot run"):
        api.causal_attention(q.int(), k.int(), v.int(), backend="flash")
    with pytest.raises(ValueError, match="must divide"):
        api.causal_attention(q[:, :3], k, v)
    with pytest.raises(ValueError, match="n_r >= 1"):
        api.pod_attention(q, k, v, q_lead, k_lead, 1, 0)
    with pytest.raises(ValueError, match="doc_ids"):
        api.causal_attention(q, k, v, doc_ids=torch.zeros(1, 7))
    assert AUTO_ORDER == ["grouped", "flash", "flex", "reference"]
    with pytest.raises(ValueError, match="'grouped' cannot run: more than one query"):
        api.causal_attention(q, k, v, backend="grouped")
    seen = []
    for name in AUTO_ORDER:
        entry = IMPLEMENTATIONS[name]
        run = lambda call, name=name, entry=entry: seen.append(name) or entry.run(call)  # noqa: E731
        monkeypatch.setitem(IMPLEMENTATIONS, name, entry._replace(run=run))
    api.causal_attention(q, k, v)
    attend(q[:, :, -1:], Tokens(k, v))
    assert seen == ["flash", "grouped"]


@pytest.mark.parametrize("backend", ["flash", "reference"])
@pytest.mark.parametrize("followers", [[], [1], [0, 3], [1, 2, 4], [0, 1, 2, 3, 4]], ids=str)
@pytest.mark.parametrize("with_docs", [False, True])
def test_mixed_heads_are_each_their_own_kind(backend, followers, with_docs):
    """Every KV head alone, with all gradients; each lead's heads are given in the followers' order."""
    q, k, v, q_lead, k_lead = tensors(2, 5, 2, 61, 8, torch.float64)
    docs = packed(2, 61) if with_docs else None
    query_heads = [head * 2 + g for head in followers for g in range(2)]
    lead = (q_lead[:, query_heads], k_lead[:, followers]) if followers else ()

    def mixed(q, k, v, q_lead=None, k_lead=None):
        return api.mixed_attention(q, k, v, q_lead, k_lead, followers, 3, 9, doc_ids=docs, backend=backend)

    def head_by_head(q, k, v, q_lead=None, k_lead=None):
        outs = []
        for head in range(5):
            own = q[:, 2 * head : 2 * head + 2], k[:, head : head + 1], v[:, head : head + 1]
            if head in followers:
                f = followers.index(head)
                of_lead = q_lead[:, 2 * f : 2 * f + 2], k_lead[:, f : f + 1]
                outs.append(reference.pod_attention(*own, *of_lead, 3, 9, doc_ids=docs))
            else:
                outs.append(reference.causal_attention(*own, doc_ids=docs))
        return torch.cat(outs, dim=1)

    out, grads = gradients(mixed, (q, k, v, *lead))
    truth, true_grads = gradients(head_by_head, (q, k, v, *lead))
    for a, b in zip((out, *grads), (truth, *true_grads), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


def test_each_kind_of_head_is_a_call(monkeypatch):
    seen = []

    def noted(call):
        led = call.lead and call.lead.queries.shape[1]
        seen.append((led, call.q.shape[1], call.visibility[:2], call.segments.all, call.scale))
        return entry.run(call)

    entry = IMPLEMENTATIONS["flash"]
    monkeypatch.setitem(IMPLEMENTATIONS, "flash", entry._replace(run=noted))
    q, k, v, q_lead, k_lead = tensors(1, 3, 2, 8, 4)
    api.mixed_attention(q, k, v, q_lead[:, :2], k_lead[:, :1], [1], 1, 2, scale=0.5)
    whole = Segments.whole(1, 8, 8).all
    assert seen == [(None, 4, (0, None), whole, 0.5), (2, 2, (1, 2), whole, 0.5)]
    dense = api.mixed_attention(q, k, v, None, None, [], 1, 2)
    assert torch.equal(dense, api.causal_attention(q, k, v))
    pod_heads = api.mixed_attention(q, k, v, q_lead, k_lead, [0, 1, 2], 1, 2)
    assert torch.equal(pod_heads, api.pod_attention(q, k, v, q_lead, k_lead, 1, 2))
    assert [heads for _, heads, *_ in seen[2:]] == [6, 6, 6, 6]


def test_mixed_attention_names_what_is_wrong():
    q, k, v, q_lead, k_lead = tensors(1, 3, 2, 8, 4)
    for followers in ([1, 1], [-1], [3]):
        with pytest.raises(ValueError, match="roles are of 4 KV heads, the keys of 3"):
            api.mixed_attention(q, k, v, q_lead, k_lead, followers, 1, 2)
    with pytest.raises(
        ValueError, match=r"lead queries and keys are \[1, 6, 8, 4\].*expected \[1, 2, 8, 4\]"
    ):
        api.mixed_attention(q, k, v, q_lead, k_lead, [1], 1, 2)
    with pytest.raises(ValueError, match=r"expected \[1, 0, 8, 4\]"):
        api.mixed_attention(q, k, v, q_lead, k_lead, [], 1, 2)
    with pytest.raises(ValueError, match="n_r >= 1"):
        api.mixed_attention(q, k, v, q_lead, k_lead, [0, 1, 2], 1, 0)
