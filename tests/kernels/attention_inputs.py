"""Random inputs of attention, its output with all gradients, and `attend` by the names of what heads do."""

from functools import partial
from types import SimpleNamespace

import torch

from pod.modeling.model.attend import Segments, SharedQK, Tokens, Visibility, attend
from pod.modeling.model.sharing import Roles

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


def segments_of(doc_ids, batch):
    """Documents as `attend` takes them; None = every row is one."""
    return None if doc_ids is None else Segments.of_documents(doc_ids, batch)


def with_lse(
    q, k, v, lead=None, windows=(0, None), doc_ids=None, scale=None, backend="auto", segments=None, roles=None
):
    """Output and log-sum-exp; ``windows`` are ``(n_s, n_r)``."""
    segments = segments_of(doc_ids, q.shape[0]) if segments is None else segments
    return attend(q, Tokens(k, v), lead, Visibility(*windows), segments, scale, backend, roles)


def _causal(q, k, v, **options):
    return with_lse(q, k, v, **options)[0]


def _window(q, k, v, num_recent_tokens, **options):
    return with_lse(q, k, v, None, (0, num_recent_tokens), **options)[0]


def _pod(q, k, v, q_lead, k_lead, num_sink_tokens, num_recent_tokens, **options):
    windows = num_sink_tokens, num_recent_tokens
    return with_lse(q, k, v, SharedQK(q_lead, k_lead), windows, **options)[0]


def _mixed(q, k, v, q_lead, k_lead, followers, num_sink_tokens, num_recent_tokens, **options):
    lead = None if q_lead is None else SharedQK(q_lead, k_lead)
    leads = tuple(head for head in range(k.shape[1]) if head not in followers)
    options["roles"] = Roles(leads, tuple(followers))
    return with_lse(q, k, v, lead, (num_sink_tokens, num_recent_tokens), **options)[0]


def operations(backend):
    """``attend`` with this backend for heads that all lead, all see a window, all follow, or some of them."""
    found = {"causal": _causal, "window": _window, "pod": _pod, "mixed": _mixed}
    return SimpleNamespace(**{f"{k}_attention": partial(run, backend=backend) for k, run in found.items()})
