"""Models and caches of the engine's tests, and how they are fed."""

import torch

import pod

WINDOWS = [(4, 11), (0, 1), (2, 200)]
SIZES = ("num_sink_tokens", "num_recent_tokens")


ROLES = [[None, 0], [1, None], [1, 0], [None, None], [1, 4]]
"""Windows in the first layer, inside blocks, and as a whole layer."""
PLANS = {"roles": ROLES, "windows": [[None, None]] * 5}
KINDS = ["full", "pod", *PLANS]


def make(tools, kind, windows=(4, 11), **changes):
    """A model that is dense, or follows the plan of the model tests, or one of `PLANS`."""
    if kind not in PLANS:
        return tools.make_pod("qwen3-g3", windows=windows, plan=kind == "pod", **changes)
    stock, sizes = tools.make_stock("qwen3-g3", **changes), dict(zip(SIZES, windows, strict=True))
    return pod.load_model(stock, plan=pod.SharingPlan(PLANS[kind]), **sizes)


def make_cache(model, kind, **options):
    """A cache by the kind of its model, with a codec behind it: `roles+int4`."""
    name, plus, codec = kind.partition("+")
    return pod.make_cache(model, ("pod" if name in PLANS else name) + plus + codec, **options)


def feed(model, cache, ids, mask=None):
    with torch.no_grad():
        return model(ids, attention_mask=mask, past_key_values=cache).logits


def decode(model, cache, ids, mask=None):
    """Feed the columns of ``ids`` one at a time; their logits ``[B, m, V]``."""
    out = []
    for column in range(ids.shape[1]):
        if mask is not None:
            mask = torch.cat((mask, torch.ones_like(mask[:, :1])), dim=1)
        out.append(feed(model, cache, ids[:, column : column + 1], mask))
    return torch.cat(out, dim=1)
