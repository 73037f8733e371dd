"""Comparison of a cache with an oracle.

It is made over models and over the ways in which a prompt can be cut into passes.
"""

import torch
from oracle_tools import NaiveDecoder, run_cache

MODELS = {  # family of conftest.py and changes to it; g = query heads per KV head
    "llama-g1": ("llama-linear-mha", {}),
    "llama-g3": ("llama", {}),
    "llama-g4": ("llama", {"num_attention_heads": 8}),
    "qwen3-g1": ("qwen3", {"num_key_value_heads": 6}),
    "qwen3-g3": ("qwen3-g3", {}),
    "qwen3-g4": ("qwen3", {"num_attention_heads": 8}),
}
WIDTHS = ((), (7,), (13, 2))


@torch.no_grad()
def assert_agrees(model, oracle, make_cache, ids, turns, widths=WIDTHS, full=None):
    """Logits of ``oracle`` and of caches from ``make_cache()`` agree within 1e-9 for every cut.

    Both differ from full attention.

    Args:
        ids: ``[n]`` tokens, fed as ``turns``.
        full: logits ``[n, vocab]`` that a method which does nothing would give; full attention when None.
    """
    expected = oracle.run(ids, turns)
    full = NaiveDecoder(model).run(ids, turns) if full is None else full
    assert (expected - full).abs().max() > 1e-3
    for cut in widths:
        cache = make_cache()
        error = (run_cache(model, cache, ids[None], turns, cut)[0] - expected).abs().max(dim=-1).values
        assert error.max() <= 1e-9, f"cut {cut}: error {error.max():.1e}, first at {first(error > 1e-9)}"
    return cache


def first(flags) -> int:
    return int(flags.nonzero()[0])
