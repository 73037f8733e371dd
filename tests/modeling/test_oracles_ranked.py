"""Methods that rank tokens by attention against their oracles.

Logits and kept tokens are compared, over families, turns and chunks.
"""

import math
from fractions import Fraction

import oracles_ranked as oracles
import pytest
import torch
from oracle_tools import TURNS, length_of, run_cache
from rule_bytes import layer_nbytes

import pod

FAMILIES = {
    "llama-g3": ("llama", {}),
    "llama-g1": ("llama-linear-mha", {}),
    "qwen3-g3": ("qwen3-g3", {}),
    "llama-g4": ("llama", {"num_attention_heads": 8, "head_dim": 8}),
    "qwen3-g4": ("qwen3", {"num_attention_heads": 8, "head_dim": 8}),
}
CONVERSATIONS = {
    "usual": TURNS,
    "short-first": [("prompt", 4), ("decode", 20), ("prompt", 3), ("decode", 5)],
    "prompt-after-prompt": [("prompt", 17), ("prompt", 2), ("decode", 1), ("prompt", 20), ("decode", 3)],
}
WIDTHS = [(13, 17), (1, 2)]
SNAP = {"budget": 14, "window": 4, "kernel": 3, "pool": "avg"}
KVZIP = {"budget": 13, "chunk_size": 9, "num_sink_tokens": 2, "repeat_ids": [[5, 9, 3], [7, 2], [4]]}
ROCO = {
    "budget": 14,
    "num_sink_tokens": 2,
    "num_recent_tokens": 3,
    "protect_prefill": 0.2,
    "protect_decode": 0.3,
}
D2O = {"budget": 16, "num_sink_tokens": 2, "alpha": 2.5}
SIMLAYER = {"num_sink_tokens": 2, "num_recent_tokens": 6, "num_last_queries": 5, "lazy_share": 0.6}
# name: oracle, spec, parameters. "gate_share", "lazy_share": see `resolve`.
RANKED = {
    "full": (oracles.Full, "full", {}),
    "snapkv": (oracles.SnapKV, "snapkv", SNAP),
    "snapkv-max": (oracles.SnapKV, "snapkv", SNAP | {"kernel": 5, "pool": "max"}),
    "pyramidkv": (oracles.PyramidKV, "pyramidkv", {"budget": 13, "window": 3, "kernel": 5, "beta": 3}),
    "adakv": (oracles.AdaKV, "adakv", SNAP),
    "adakv-max": (oracles.AdaKV, "adakv", SNAP | {"pool": "max", "safeguard": 0.0}),
    "expected_attention": (oracles.ExpectedAttention, "expected_attention", {"budget": 13}),
    "expected_attention-near": (
        oracles.ExpectedAttention,
        "expected_attention",
        {"budget": 14, "num_sink_tokens": 0, "num_future_positions": 5, "epsilon": 0},
    ),
    "kvzip": (oracles.KVzip, "kvzip", KVZIP),
    "h2o": (oracles.H2O, "h2o", {"budget": 13}),
    "h2o-recent": (oracles.H2O, "h2o", {"budget": 12, "num_recent_tokens": 2}),
    "roco": (oracles.RoCo, "roco", ROCO),
    "roco-defaults": (oracles.RoCo, "roco", {"budget": 24}),
    "roco-half": (  # 0.3 of 5 tokens are 2, in decimals
        oracles.RoCo,
        "roco",
        {"budget": 5, "num_sink_tokens": 2, "num_recent_tokens": 1, "protect_prefill": 0.3},
    ),
    "d2o": (oracles.D2O, "d2o", D2O | {"gate_share": 0.4}),
    "d2o-normalized": (oracles.D2O, "d2o", D2O | {"gate_share": 0.6, "normalize_gate": True, "beta": 0.7}),
    "d2o-uniform": (oracles.D2O, "d2o", {"budget": 17, "gate": 1000.0}),
    "d2o-values": (
        oracles.D2O,
        "d2o",
        D2O | {"gate_share": 0.4, "similarity": "values", "budget_rule": "printed", "recent_share": 0.75},
    ),
    "d2o-both": (oracles.D2O, "d2o", D2O | {"gate_share": 0.4, "similarity": "both", "merge": "average"}),
    "d2o-average": (oracles.D2O, "d2o", D2O | {"gate": 1000.0, "merge": "average", "recent_share": 1.0}),
    "simlayerkv": (oracles.SimLayerKV, "simlayerkv", SIMLAYER | {"detector": "decode"}),
    "simlayerkv-prefill": (oracles.SimLayerKV, "simlayerkv", SIMLAYER | {"detector": "prefill"}),
    "simlayerkv-exempt": (
        oracles.SimLayerKV,
        "simlayerkv",
        SIMLAYER
        | {"detector": "prefill", "exempt_last_layer": True, "lazy_share": 0.8, "num_last_queries": 1},
    ),
    "local_window": (oracles.LocalWindow, "local_window", {"budget": 11}),
}

ONE_EACH = [name for name, (_, spec, _) in RANKED.items() if name in (spec, "simlayerkv-prefill")]
# judged by the first decoded token; by the whole text
STREAMED = [name for name in ONE_EACH if name not in ("full", "simlayerkv", "kvzip")]


def at_share(values: list[float], share: float) -> float:
    """A threshold in the middle of a gap, which ``share`` of the values exceed: no rounding decides."""
    ordered = sorted(values, reverse=True)
    cut = round(share * len(ordered))
    return (ordered[cut - 1] + ordered[cut]) / 2


def resolve(oracle, model, ids, params):
    """Parameters whose gate or threshold separates the layers of this very model when it reads ``ids``."""
    params, turns = dict(params), [("prompt", len(ids) - 1), ("decode", 1)]
    for share, name, values in [
        ("gate_share", "gate", lambda probe: probe.variances),
        ("lazy_share", "threshold", lambda probe: probe.history[0]),
    ]:
        if share in params:
            wanted = params.pop(share)
            probe = oracle(model, **params, **{name: math.inf})
            probe.run(ids, turns)
            params[name] = at_share(values(probe), wanted)
    return params


def held_tokens(model, cache) -> list[int]:
    """Tokens held per layer by the only group of rows, mean over KV heads."""
    (group,) = cache.groups
    per_token = 2 * model.config.num_key_value_heads * model.config.head_dim * 8
    return [
        layer.held if hasattr(layer, "held") else layer_nbytes(layer, group.seen) / per_token
        for layer in group.layers
    ]


@torch.no_grad()
def compare(tools, name, family, turns, widths, chunk=0):
    oracle, spec, params = RANKED[name]
    family, changes = FAMILIES[family]
    model = tools.make_pod(family, plan=False, **changes)
    ids = tools.random_ids(1, length_of(turns))
    params = resolve(oracle, model, ids[0, :31], params)
    naive = oracle(model, **params, **({"chunk_size": chunk} if chunk else {}))
    expected = naive.run(ids[0], turns)
    options = params | ({"prefill": "streaming", "chunk_size": chunk} if chunk else {})
    cache = pod.make_cache(model, spec, **options)
    logits = run_cache(model, cache, ids, turns, widths)[0]
    assert (logits - expected).abs().max() <= 1e-9
    if name != "full":
        assert (model(ids).logits[0] - expected).abs().max() > 1e-3
        assert held_tokens(model, cache) == [sum(heads) / len(heads) for heads in naive.held()]
    return naive


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ONE_EACH)
def test_conversation_equals_the_oracle(tools, name, family):
    compare(tools, name, family, TURNS, ())


@pytest.mark.parametrize("name", [name for name in RANKED if name not in ONE_EACH])
def test_other_parameters(tools, name):
    compare(tools, name, "llama-g3", TURNS, (), chunk=0)
    compare(tools, name, "qwen3-g4", TURNS, (8,), chunk=11)


@pytest.mark.parametrize("turns", list(CONVERSATIONS)[1:])
@pytest.mark.parametrize("name", ONE_EACH)
def test_other_conversations(tools, name, turns):
    compare(tools, name, "qwen3-g3", CONVERSATIONS[turns], ())


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@pytest.mark.parametrize("name", ONE_EACH)
def test_exact_prefill_does_not_depend_on_the_passes(tools, name, widths):
    compare(tools, name, "llama-g3", TURNS, widths)


@pytest.mark.parametrize("name", STREAMED)
def test_streaming_prefill_in_passes_that_cut_chunks(tools, name):
    compare(tools, name, "llama-g3", TURNS, (13, 17), chunk=9)


@pytest.mark.parametrize("chunk", [1, 16])
@pytest.mark.parametrize("name", STREAMED)
def test_streaming_chunk_sizes(tools, name, chunk):
    compare(tools, name, "qwen3-g3", TURNS, (), chunk)


# -- the oracles themselves ----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_layers", [1, 2, 5, 30, 32])
@pytest.mark.parametrize("budget", [12, 64, 2048])
@pytest.mark.parametrize("beta", [2, 20])
@pytest.mark.parametrize("length", [1.1, 1.5, 10])  # of the prompt, in budgets
def test_pyramid_adds_up_along_a_line(num_layers, budget, beta, length):
    seen = round(length * budget)
    budgets = oracles.pyramid(num_layers, budget, 8, beta, seen)
    assert sum(budgets) == num_layers * budget and min(budgets) >= 8 and max(budgets) <= seen
    top = max(9, math.floor(budget / beta + 0.5), 2 * budget - seen)
    ends = 2 * budget - top, top
    line = torch.linspace(*ends, num_layers) if num_layers > 1 else torch.tensor([budget])
    assert (torch.tensor(budgets) - line).abs().max() <= 1 + 1e-3


def test_largest_pyramid_layer_of_the_paper():
    assert max(oracles.pyramid(32, 2048, 8, 20, 32768)) == 3994  # "about 4K" of a mean of 2048


@pytest.mark.parametrize("n", [9, 10, 11, 14, 20, 23, 24, 100])
@pytest.mark.parametrize("num_alpha", [0, 1, 3, 5])
@pytest.mark.parametrize("alpha", [Fraction(3), Fraction(5, 2)])
def test_d2o_layer_budgets_are_the_largest(n, num_alpha, alpha):
    """By bisection on S."""
    weights = [alpha] * num_alpha + [Fraction(1)] * (5 - num_alpha)
    budgets = oracles.layer_budgets(weights, 10, n)
    if n <= 10:
        assert budgets == [n] * 5
        return
    low, high = Fraction(0), Fraction(100)
    for _ in range(60):
        middle = (low + high) / 2
        fits = sum(min(Fraction(n), weight * middle) for weight in weights) <= 50
        low, high = (middle, high) if fits else (low, middle)
    assert sum(budgets) <= 50
    found = [min(Fraction(n), weight * low) for weight in weights]
    assert all(
        math.floor(exact + Fraction(1, 10**9)) == got for exact, got in zip(found, budgets, strict=True)
    )


@torch.no_grad()
def test_d2o_merge_weights_sum_to_one(tools):
    model = tools.make_pod("llama", plan=False)
    naive = oracles.D2O(model, budget=12, num_sink_tokens=2, gate=1.65)
    naive.run(tools.random_ids(1, 50)[0], TURNS)
    assert len(naive.weight_sums) > 100 and max(abs(total - 1) for total in naive.weight_sums) <= 1e-12
