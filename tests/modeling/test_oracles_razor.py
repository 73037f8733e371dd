"""RazorAttention against its oracle, and the compensation token against explicit copies."""

import pytest
import torch
from oracle_checks import MODELS, assert_agrees
from oracle_tools import TURNS, NaiveDecoder, length_of, run_cache
from oracles_razor import Razor

import pod

SHORT = {"num_sink_tokens": 2, "num_recent_tokens": 6, "compression": 4}
LONG_TURNS = [("prompt", 14), ("decode", 3), ("prompt", 20), ("decode", 9), ("prompt", 2), ("decode", 2)]
CONVERSATIONS = {
    "usual": TURNS,
    "short then long": LONG_TURNS,
    "shorter than the sinks": [("prompt", 1), ("decode", 49)],
}


def full_heads(model):
    """Some heads of some layers; layer 1 and 3 keep none, layer 4 keeps all."""
    heads = model.config.num_key_value_heads
    return [[0], [], [heads - 1], [], list(range(heads))]


def make(model, **options):
    return pod.make_cache(model, "razor", heads=full_heads(model), **options)


@pytest.mark.parametrize("name", MODELS)
def test_equals_the_oracle(tools, name):
    family, changes = MODELS[name]
    model, ids = tools.make_pod(family, plan=False, **changes), tools.random_ids(1, 50)[0]
    assert_agrees(
        model, Razor(model, full=full_heads(model), **SHORT), lambda: make(model, **SHORT), ids, TURNS
    )


@pytest.mark.parametrize("turns", CONVERSATIONS.values(), ids=CONVERSATIONS)
@pytest.mark.parametrize(
    "options",
    [SHORT, SHORT | {"num_sink_tokens": 0}, SHORT | {"num_recent_tokens": 1, "compression": 3.2}],
    ids=str,
)
def test_windows_that_grow_and_slide(tools, turns, options):
    model, ids = tools.make_pod("llama", plan=False), tools.random_ids(1, 50)[0]
    assert_agrees(
        model,
        Razor(model, full=full_heads(model), **options),
        lambda: make(model, **options),
        ids,
        turns,
        ((), (3,)),
    )


@pytest.mark.parametrize("family", ["llama", "qwen3-g3"])
@torch.no_grad()
def test_compensation_equals_copies_of_the_mean_token(tools, family):
    """A token of weight N_d in the cache is N_d copies of it: eq. 5."""
    model, ids = tools.make_pod(family, plan=False), tools.random_ids(1, 50)[0]
    copies = Razor(model, full=full_heads(model), explicit=True, **SHORT).run(ids, TURNS)
    held = run_cache(model, make(model, **SHORT), ids[None], TURNS)[0]
    assert (held - copies).abs().max() <= 1e-9
    without = Razor(model, full=full_heads(model), **SHORT)
    without.compensation = lambda layer, head: []
    expected = without.run(ids, TURNS)
    assert (expected - copies).abs().max() > 1e-3
    held = run_cache(model, make(model, compensation=False, **SHORT), ids[None], TURNS)[0]
    assert (held - expected).abs().max() <= 1e-9


@torch.no_grad()
def test_room_for_everything_is_full_attention(tools):
    model, ids = tools.make_pod("llama", plan=False), tools.random_ids(1, 50)[0]
    full = NaiveDecoder(model).run(ids, TURNS)
    options = SHORT | {"num_recent_tokens": 50}
    assert (Razor(model, full=full_heads(model), **options).run(ids, TURNS) - full).abs().max() <= 1e-12
    assert (run_cache(model, make(model, **options), ids[None], TURNS)[0] - full).abs().max() <= 1e-9


def test_window_grows_with_a_later_prompt_but_is_never_filled_back(tools):
    """24 tokens: window 6. At 48 tokens it may hold 12, but only 10 are left; then it slides again."""
    model, ids = tools.make_pod("llama", plan=False), tools.random_ids(1, 80)[0]
    windows = []
    for turns in ([("prompt", 24)], [("decode", 20)], [("prompt", 4)], [("decode", 2)], [("decode", 1)]):
        windows += turns
        oracle = Razor(model, full=[[]] * 5, **SHORT)
        oracle.run(ids[: length_of(windows)], windows)
        held = [entry.position for entry in oracle.entries[1][0]]
        dropped = sorted(entry.position for entry in oracle.dropped[1][0])
        start = {24: 18, 44: 38, 48: 38, 50: 38, 51: 39}[length_of(windows)]
        assert held == [0, 1, *range(start, length_of(windows))] and dropped == list(range(2, start))
