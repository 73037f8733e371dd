"""Random inputs of PoD attention, and its output with all gradients."""

import torch

NAMES = ("out", "q", "k", "v", "q_lead", "k_lead")


def tensors(batch, heads, groups, n, d, dtype=torch.float64, device="cpu"):
    generator = torch.Generator().manual_seed(n + d)
    query, key = (batch, heads * groups, n, d), (batch, heads, n, d)
    shapes = (query, key, key, query, key)
    return [
        torch.randn(s, generator=generator, dtype=torch.float64).mul(1.5).to(device, dtype) for s in shapes
    ]


def gradients(function, inputs, *args, **kwargs):
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = function(*leaves, *args, **kwargs)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    grads = torch.autograd.grad((out * weights.to(out)).sum(), leaves)
    return [out.detach(), *grads]
