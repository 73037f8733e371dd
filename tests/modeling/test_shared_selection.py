"""PoD with a ranking: what a block holds, counted in bytes against the rule, and how it ages."""

from fractions import Fraction

import pytest
import torch
from oracles_ranked import AdaKV
from torch.overrides import TorchFunctionMode

import pod
from pod.modeling.methods import pyramidkv
from pod.modeling.methods.base import round_sums
from pod.modeling.methods.pyramidkv import block_budgets, layer_budgets

LAYERS, HEADS, HEAD_DIM = 5, 2, 8  # of the tiny model; its plan: tests/modeling/conftest.py


def filled(tools, spec, length, decoded=0, windows=(4, 60), **options):
    model = tools.make_pod("llama", torch.float32, windows=windows)
    cache = pod.make_cache(model, spec, **options)
    ids = tools.random_ids(1, length + decoded)
    with torch.no_grad():
        model(ids[:, :length], past_key_values=cache)
        for t in range(length, length + decoded):
            model(ids[:, t : t + 1], past_key_values=cache)
    return cache


def held_by(layer, head):
    """How many tokens a KV head holds and, of a lead, their positions in the first row."""
    for group in layer.head_groups:
        heads = group.leads + group.followers
        if head in heads:
            chose = group.shares and head in group.leads
            return group.held, group.positions[0, heads.index(head)] if chose else None
    raise AssertionError(f"nothing holds head {head}")


def payload_of(cache):
    held = cache.nbytes_by_part()
    return sum(held[name] for name in ("keys", "window_keys", "values", "near_keys", "near_values"))


def rule_bytes(cache, tools, seen, windows):
    """Keys and values that METHODS demands, from the positions that each lead kept."""
    layers, total = cache.groups[0].layers, 0
    for layer in range(LAYERS):
        for head in range(HEADS):
            lead = tools.lead[layer][head]
            if lead is None:
                total += 2 * sum(windows)
                continue
            kept = held_by(layers[lead], head)[1]
            near = ((kept < windows[0]) | (seen - kept < windows[1])).sum()
            total += len(kept) + (len(kept) if lead == layer else int(near))
    return total * HEAD_DIM * 4


@pytest.mark.parametrize("spec", ["pod+snapkv", "pod+pyramidkv", "pod+expected_attention"])
@pytest.mark.parametrize("decoded", [0, 1, 45, 200])
def test_followers_hold_own_keys_of_proximal_tokens_only(tools, spec, decoded):
    windows, options = (4, 60), {} if "expected" in spec else {"window": 8}
    cache = filled(tools, spec, 400, decoded, windows, budget=150, **options)
    payload = payload_of(cache)
    rule = rule_bytes(cache, tools, 400 + decoded, windows)
    assert abs(payload - rule) <= 0.02 * rule  # growth slack of small buffers
    full_snapkv = 2 * LAYERS * HEADS * (150 + decoded) * HEAD_DIM * 4
    assert payload < full_snapkv


class NumbersRead(TorchFunctionMode):
    """Counts how often numbers are read out of a tensor.

    On a GPU each time waits for all that was queued before.
    """

    count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += getattr(func, "__name__", "") in ("tolist", "item", "__int__", "__float__", "__bool__")
        return func(*args, **(kwargs or {}))


def test_decoding_does_not_wait_for_the_device(tools):
    """What is proximal is known on the host: it was read when the prompt ended."""
    cache = filled(tools, "pod+snapkv", 200, 2, budget=80, window=8)
    model, token = tools.make_pod("llama", torch.float32, windows=(4, 60)), tools.random_ids(1, 1)
    with torch.no_grad(), NumbersRead() as read:
        model(token, past_key_values=cache)
    assert not read.count


def test_all_distant_tokens_save_the_share_of_the_plan(tools):
    """The upper bound: half of the bytes of every pair that follows, and all of a window's."""
    cache = filled(tools, "pod+snapkv", 600, windows=(0, 1), budget=300, window=1)
    payload = payload_of(cache)
    snapkv = 2 * LAYERS * HEADS * 300 * HEAD_DIM * 4
    saved = pod.SharingPlan(tools.lead).asymptotic_saving
    assert abs(payload / snapkv - (1 - saved)) <= 0.01


def test_a_block_keeps_the_same_tokens(tools):
    cache = filled(tools, "pod+snapkv", 200, windows=(4, 30), budget=80, window=8)
    layers = cache.groups[0].layers
    owners = [row[0] for row in tools.lead]
    assert [held_by(layer, 0)[0] for layer, own in zip(layers, owners, strict=True) if own is not None] == [
        80
    ] * 4
    kept = [held_by(layers[lead], 0)[1] for lead in sorted({own for own in owners if own is not None})]
    assert all(not torch.equal(kept[0], other) for other in kept[1:])  # blocks choose on their own


def test_layer_budgets_by_hand():
    assert layer_budgets(100, 5, 20, 9, seen=1000) == [191, 146, 100, 54, 9]
    assert layer_budgets(100, 5, 20, 9, seen=140) == [140, 120, 100, 80, 60]
    assert layer_budgets(100, 5, 20, 9, seen=100) == layer_budgets(100, 5, 20, 9, seen=60) == [100] * 5
    assert layer_budgets(100, 1, 20, 9, seen=1000) == [100]


LEAD = ((0, 0), (0, 1), (0, 1), (3, 1), (3, 4))


@pytest.mark.parametrize("seen", [100, 110, 150, 191, 400])
def test_budgets_of_blocks_keep_the_total(seen):
    budgets = layer_budgets(100, 5, 20, 9, seen)
    assert sum(budgets) == 500 and budgets == sorted(budgets, reverse=True) and budgets[0] <= seen
    rows = block_budgets(budgets, 100, 8, LEAD)
    for head in range(2):
        assert 500 - 5 <= sum(row[head] for row in rows) <= 500
        assert max(row[head] for row in rows) <= seen
    assert rows[0][0] == rows[1][0] == rows[2][0] and rows[3][0] == rows[4][0]


@pytest.mark.parametrize("spec", ["pyramidkv", "pod+pyramidkv"])
def test_budgets_are_computed_once_per_chunk(tools, monkeypatch, spec):
    """Not once per layer: with many layers and small chunks that took longer than the model."""
    calls = []
    monkeypatch.setattr(
        pyramidkv, "layer_budgets", lambda *args, **kwargs: calls.append(1) or layer_budgets(*args, **kwargs)
    )
    plain = tools.make_pod("llama", torch.float32, plan=spec.startswith("pod"), windows=(4, 60))
    cache = pod.make_cache(plain, spec, budget=100, window=8, prefill="streaming", chunk_size=50)
    with torch.no_grad():
        plain(tools.random_ids(1, 190), past_key_values=cache)
    assert len(calls) == 4


@pytest.mark.parametrize("spec", ["pyramidkv", "pod+pyramidkv"])
@pytest.mark.parametrize("length", [110, 150, 189, 300])
def test_a_pyramid_fills_its_budget(tools, spec, length):
    """Also where the first layer's share exceeds the prompt."""
    plain = tools.make_pod("llama", torch.float32, plan=spec.startswith("pod"), windows=(4, 60))
    cache = pod.make_cache(plain, spec, budget=100, window=8)
    with torch.no_grad():
        plain(tools.random_ids(1, length), past_key_values=cache)
    layers, lead = cache.groups[0].layers, plain.config.sharing_plan.lead
    for head in range(HEADS):
        held = [held_by(x, head)[0] for x, row in zip(layers, lead, strict=True) if row[head] is not None]
        assert len(held) * 99 < sum(held) <= len(held) * 100
        if spec == "pyramidkv":
            assert held[0] == min(length, 191)


@torch.no_grad()
def test_heads_hold_what_ada_kv_gives_them_and_nothing_else(tools):
    """As the oracle counts, other numbers in every row; the layer's total is the budget, in bytes too."""
    model, ids = tools.make_pod("llama", plan=False), tools.random_ids(3, 40)
    options = {"budget": 12, "window": 3, "kernel": 3, "pool": "avg", "safeguard": 0.1}
    cache, found = pod.make_cache(model, "adakv", **options), []
    model(ids, past_key_values=cache)
    for group in cache.groups:
        held = [[held_by(layer, head)[0] for head in range(HEADS)] for layer in group.layers]
        oracle = AdaKV(model, **options)
        oracle.run(ids[group.rows[0]], [("prompt", 40)])
        assert held == oracle.held() and all(sum(layer) == HEADS * 12 for layer in held)
        found.append(held)
    assert len(found) == 3 and found[0] != found[1] != found[2]
    parts = cache.nbytes_by_part()
    assert parts["keys"] == parts["values"] == 3 * LAYERS * HEADS * 12 * HEAD_DIM * 8
    model(ids[:, :9], past_key_values=cache)
    assert all(
        sum(held_by(layer, h)[0] for h in range(HEADS)) <= HEADS * 12 for layer in cache.groups[0].layers
    )


def test_without_its_safeguard_a_head_may_keep_its_window_alone():
    """Counts of the layer's best 40 tokens, and what four heads with budgets of 10 are given."""
    for safeguard, sizes in ((0, [31, 3, 3, 3]), (0.2, [27, 4, 5, 4]), (1, [10, 10, 10, 10])):
        share = Fraction(str(safeguard))
        assert round_sums((1 - share) * own + share * 10 for own in (31, 3, 3, 3)) == sizes


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        ("pod+adakv", {"budget": 40}, "followers copy the choice of their lead"),
        ("adakv", {"budget": 32}, "budget = 32 must exceed window = 32: raise the budget"),
        ("adakv", {"budget": 40, "kernel": 4}, "adakv: kernel = 4 must be odd"),
        ("adakv", {"budget": 40, "safeguard": 1.5}, "safeguard = 1.5 must lie between 0 and 1"),
        ("expected_attention", {"budget": 4}, "budget = 4 must exceed num_sink_tokens = 4: raise the budget"),
        ("pod+expected_attention", {"budget": 9, "num_future_positions": 0}, "must be at least 1"),
        ("expected_attention", {"budget": 9, "epsilon": -0.1}, "epsilon = -0.1 must be at least 0"),
        ("pod+snapkv", {"budget": 32}, "must exceed window = 32"),
    ],
)
def test_rankings_refuse_in_one_line(tools, spec, options, message):
    with pytest.raises(ValueError, match=message) as error:
        pod.make_cache(tools.make_pod("llama", plan=spec.startswith("pod")), spec, **options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("windows", [(2, 5), (3, 17), (1, 30)], ids=str)
@pytest.mark.parametrize(
    "spec", ["pod+expected_attention", "pod+snapkv", "pod+snapkv+int4", "pod+pyramidkv+int8"]
)
@torch.no_grad()
def test_rows_held_together_equal_rows_alone(tools, spec, windows):
    """Rows held together equal rows alone, for two turns, the second in chunks.

    What is proximal differs by row, so own keys are held of some tokens that are distant.
    """
    model, ids = tools.make_pod("llama", windows=windows), tools.random_ids(4, 60)
    codec = {"group_size": 2, "residual": 3} if "int" in spec else {}

    def logits(rows):
        ranking = {"num_sink_tokens": 2} if "expected" in spec else {"window": 3, "kernel": 3}
        cache, outputs, start = pod.make_cache(model, spec, budget=12, **ranking, **codec), [], 0
        for widths in ([30], *[[1]] * 16, [5, 4], *[[1]] * 5):
            cache.begin_prompt(sum(widths) if sum(widths) > 1 else 0)
            for width in widths:
                outputs.append(model(rows[:, start : start + width], past_key_values=cache).logits)
                start += width
        return torch.cat(outputs, dim=1)

    alone = torch.cat([logits(row[None]) for row in ids])
    assert (logits(ids) - alone).abs().max() <= 1e-9
