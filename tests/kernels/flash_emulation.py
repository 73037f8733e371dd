"""What the flash libraries' ops do on packed sequences, in plain PyTorch.

It is for tests of everything around these ops without a GPU. The backward is flash's own formula, from the
*given* output and log-sum-exp. Results are poisoned where no sequence writes, and what the libraries demand
of their inputs is asserted.
"""

import torch

from pod.modeling.model import varlen
from pod.modeling.model.attend import IMPLEMENTATIONS, Implementation
from pod.modeling.model.varlen import attend_on_cuda


def check(q, k, v, call):
    for name, x, bounds, longest in (
        ("queries", q, call.bounds[0], call.longest[0]),
        ("keys", k, call.bounds[1], call.longest[1]),
    ):
        assert x.dim() == 3 and x.stride(-1) == 1, name
        assert bounds.dtype == torch.int32 and bounds.is_contiguous() and bounds.device == x.device, name
        lengths = bounds.diff()
        assert bounds[0] == 0 and bounds[-1] == x.shape[0] and (lengths > 0).all(), name
        assert lengths.max() == longest, name
    assert k.shape == v.shape and v.stride(-1) == 1 and q.shape[1] % k.shape[1] == 0
    assert len(call.bounds[0]) == len(call.bounds[1])


def sequences(q, k, v, call):
    """Slices of each sequence, and its logits ``[Hq, rows, columns]``, causal from the bottom right."""
    groups = q.shape[1] // k.shape[1]
    for (a, b), (c, d) in zip(*(torch.stack((x[:-1], x[1:]), 1).tolist() for x in call.bounds), strict=True):
        own_q, own_k, own_v = (x.transpose(0, 1).double() for x in (q[a:b], k[c:d], v[c:d]))
        own_k, own_v = (x.repeat_interleave(groups, 0) for x in (own_k, own_v))
        logits = own_q @ own_k.transpose(1, 2) * call.scale
        distance = torch.arange(b - a)[:, None] + (d - c) - (b - a) - torch.arange(d - c)
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if call.causal:
            hidden |= distance < 0
        if call.window is not None:
            hidden |= (distance >= call.window) | (distance < 0)
        yield slice(a, b), slice(c, d), own_q, own_k, own_v, logits.masked_fill(hidden, float("-inf"))


def forward(q, k, v, call):
    check(q, k, v, call)
    out = torch.full_like(q, float("nan"))
    wide = torch.promote_types(q.dtype, torch.float32)
    lse = torch.full((q.shape[1], q.shape[0]), float("nan"), dtype=wide)
    for rows, _, _, _, own_v, logits in sequences(q, k, v, call):
        out[rows] = (logits.softmax(-1) @ own_v).transpose(0, 1).to(q.dtype)
        lse[:, rows] = logits.logsumexp(-1).to(wide)
    return out, lse


def backward(grad, q, k, v, out, lse, call):
    check(q, k, v, call)
    assert grad.shape == out.shape == q.shape and grad.stride(-1) == 1
    assert lse.shape == (q.shape[1], q.shape[0]) and lse.is_contiguous()
    grads = [torch.full_like(x, float("nan")) for x in (q, k, v)]
    for rows, columns, own_q, own_k, own_v, logits in sequences(q, k, v, call):
        own_grad, own_out = (x[rows].transpose(0, 1).double() for x in (grad, out))
        weights = (logits - lse[:, rows, None].double()).exp()
        delta = (own_grad * own_out).sum(-1, keepdim=True)
        slope = weights * (own_grad @ own_v.transpose(1, 2) - delta) * call.scale
        per_query_head = slope @ own_k, slope.transpose(1, 2) @ own_q, weights.transpose(1, 2) @ own_grad
        for target, where, x in zip(grads, (rows, columns, columns), per_query_head, strict=True):
            x = x.unflatten(0, (target.shape[1], -1)).sum(1)
            target[where] = x.transpose(0, 1).to(target.dtype)
    return tuple(grads)


def install(monkeypatch):
    """Let ``attend(…, backend="emulated")`` run what ``flash`` runs on CUDA, with these ops."""
    replace_ops(monkeypatch, forward, backward)
    monkeypatch.setitem(IMPLEMENTATIONS, "emulated", Implementation(attend_on_cuda, lambda call: None))


def replace_ops(monkeypatch, forward, backward):
    """Let ``varlen`` run these in place of PyTorch's."""
    monkeypatch.setattr(varlen, "op_forward", forward)
    monkeypatch.setattr(varlen, "op_backward", backward)
