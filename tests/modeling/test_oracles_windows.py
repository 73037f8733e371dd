"""streamingllm, lm_infinite and wa against their oracles."""

import pytest
import torch
from oracle_checks import MODELS, assert_agrees
from oracle_tools import TURNS, NaiveDecoder
from oracles_windows import LMInfinite, StreamingLLM, WindowAttention

import pod

CASES = {
    "streamingllm": (StreamingLLM, {"budget": 12, "num_sink_tokens": 3}),
    "lm_infinite": (LMInfinite, {"budget": 12, "num_sink_tokens": 3}),
    "wa": (WindowAttention, {"budget": 12}),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("spec", CASES)
def test_equals_the_oracle(tools, spec, name):
    family, changes = MODELS[name]
    model, ids = tools.make_pod(family, plan=False, **changes), tools.random_ids(1, 50)[0]
    oracle, options = CASES[spec]
    assert_agrees(model, oracle(model, **options), lambda: pod.make_cache(model, spec, **options), ids, TURNS)


@pytest.mark.parametrize("family", ["qwen2-yarn", "llama-tied-biased-llama3"])
@pytest.mark.parametrize("spec", CASES)
def test_scaled_rope(tools, spec, family):
    """YaRN multiplies queries and keys by a factor, at whatever position they are rotated."""
    model, ids = tools.make_pod(family, plan=False), tools.random_ids(1, 50)[0]
    oracle, options = CASES[spec]
    make = lambda: pod.make_cache(model, spec, **options)  # noqa: E731
    assert_agrees(model, oracle(model, **options), make, ids, TURNS, ((), (7,)))


@pytest.mark.parametrize("spec", CASES)
@pytest.mark.parametrize("budget", [4, 5, 16])
def test_smallest_windows(tools, spec, budget):
    """One recent token besides three sinks; a window as long as the first prompt."""
    model, ids = tools.make_pod("llama", plan=False), tools.random_ids(1, 28)[0]
    oracle, options = CASES[spec]
    options, turns = (
        options | {"budget": budget},
        [("prompt", 16), ("decode", 4), ("prompt", 3), ("decode", 5)],
    )
    assert_agrees(
        model,
        oracle(model, **options),
        lambda: pod.make_cache(model, spec, **options),
        ids,
        turns,
        ((), (1,)),
    )


@pytest.mark.parametrize("spec", CASES)
def test_oracle_with_room_for_everything_is_full_attention(tools, spec):
    model, ids = tools.make_pod("llama", plan=False), tools.random_ids(1, 50)[0]
    oracle, options = CASES[spec]
    out = oracle(model, **(options | {"budget": 53})).run(ids, TURNS)
    assert (out - NaiveDecoder(model).run(ids, TURNS)).abs().max() <= 1e-12


@pytest.mark.parametrize("spec", CASES)
@torch.no_grad()
def test_turns_do_not_matter(tools, spec):
    model, ids = tools.make_pod("llama", plan=False), tools.random_ids(1, 50)[0]
    oracle, options = CASES[spec]
    once = oracle(model, **options).run(ids, [("prompt", 50)])
    assert (oracle(model, **options).run(ids, TURNS) - once).abs().max() <= 1e-12


def test_far_sinks_keep_the_largest_distance(tools):
    """Beyond the budget lm_infinite cannot tell how far a sink is, streamingllm neither; wa has no sinks."""
    model = tools.make_pod("llama", plan=False)
    q, keys = torch.randn(3, 8, dtype=torch.float64), torch.randn(9, 8, dtype=torch.float64)
    for oracle in (LMInfinite, StreamingLLM):
        decoder = oracle(model, budget=9, num_sink_tokens=3)
        near, far = (decoder.logits(q, i, keys, decoder.visible(i)) for i in (20, 90))
        assert (near - far).abs().max() <= 1e-12
