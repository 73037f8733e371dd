"""SimLayerKV: who is lazy, when that is decided, what a lazy layer holds, bytes, packing and refusals."""

import math

import oracles_ranked
import pytest
import torch
from oracle_tools import run_cache
from rule_bytes import rule_nbytes

import pod
from pod.modeling.methods.simlayerkv import lazy_mass

SIZES = {"num_sink_tokens": 4, "num_recent_tokens": 6}


def make(model, spec="simlayerkv", **options):
    return pod.make_cache(model, spec, **(SIZES | options))


def feed(model, cache, ids, *widths):
    """Logits of consecutive passes of these widths."""
    outputs, start = [], cache.get_seq_length()
    for width in widths:
        outputs.append(model(ids[:, start : start + width], past_key_values=cache).logits)
        start += width
    return torch.cat(outputs, 1)


def layers_of(cache, row=0):
    (group,) = [group for group in cache.groups if row in group.rows]
    assert group.rows == [row]
    return group.layers


def held(cache, row=0):
    return [layer.tokens.held for layer in layers_of(cache, row)]


def lazy(cache, row=0):
    return [layer.is_lazy for layer in layers_of(cache, row)]


def masses(cache, row=0):
    return [layer.mass for layer in layers_of(cache, row)]


def measured(cache):
    return sum(size for name, size in cache.nbytes_by_part().items() if name != "bookkeeping")


def test_mass_by_definition():
    torch.manual_seed(0)
    n, w = 30, 7
    future = torch.ones(w, n, dtype=torch.bool).triu(n - w + 1)
    rows = torch.randn(1, 3, w, n).double().masked_fill(future, -math.inf).softmax(-1)
    for sinks, recent in ((4, 6), (0, 1), (2, 25), (4, 30)):
        total = 0.0
        for place, i in enumerate(range(n - w, n)):  # each query has a window of its own
            near = set(range(sinks)) | set(range(max(0, i - recent + 1), i + 1))
            total += sum(float(rows[0, head, place, j]) for head in range(3) for j in near)
        assert float(lazy_mass(rows, sinks, recent)) == pytest.approx(total / (3 * w), abs=1e-12)
    assert float(lazy_mass(rows, 4, 30)) == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("detector", ["decode", "prefill"])
@torch.no_grad()
def test_lazy_layers_hold_sinks_and_window_and_the_others_all(tools, detector):
    model, ids = tools.make_pod("llama", plan=False), tools.random_ids(1, 80)
    probe = make(model, detector=detector, threshold=1.0)
    feed(model, probe, ids, 40, 1)
    order = sorted(masses(probe))
    cache = make(model, detector=detector, threshold=(order[1] + order[2]) / 2)
    expected = [mass > cache_threshold(cache) for mass in masses(probe)]
    assert sum(expected) == 3 and lazy(probe) == [False] * 5
    feed(model, cache, ids, 40)
    assert held(cache) == (
        [40] * 5 if detector == "decode" else [10 if is_lazy else 40 for is_lazy in expected]
    )
    feed(model, cache, ids, *[1] * 20)
    if detector == "prefill":
        assert lazy(cache) == expected
    assert 0 < sum(lazy(cache)) < 5
    assert held(cache) == [10 if is_lazy else 60 for is_lazy in lazy(cache)]
    stayed = lazy(cache)
    feed(model, cache, ids, 5)
    assert all(now or not before for now, before in zip(lazy(cache), stayed, strict=True))


def cache_threshold(cache):
    return cache.make_child(cache.config, 0).threshold


@pytest.mark.parametrize("detector", ["decode", "prefill"])
@torch.no_grad()
def test_threshold_1_is_full_attention_and_0_makes_every_layer_lazy(tools, detector):
    model, ids = tools.make_pod("qwen3-g3", plan=False), tools.random_ids(2, 60)
    widths = (23, 10, *[1] * 9, 7, *[1] * 5)
    full = feed(model, pod.make_cache(model, "full"), ids, *widths)
    none = make(model, detector=detector, threshold=1.0)
    assert (feed(model, none, ids, *widths) - full).abs().max() <= 1e-12
    every = make(model, detector=detector, threshold=0.0)
    assert (feed(model, every, ids, *widths) - full).abs().max() > 1e-3
    assert held(every, 0) == held(every, 1) == [10] * 5


@torch.no_grad()
def test_prefill_judges_the_last_queries_of_the_prompt_however_it_is_fed(tools):
    model, ids = tools.make_pod("llama", plan=False), tools.random_ids(1, 50)
    found = []
    for widths in ([50], [47, 3], [10] * 5, [1] * 50):
        cache = make(model, detector="prefill", num_last_queries=8, threshold=1.0)
        cache.begin_prompt(50)
        feed(model, cache, ids, *widths)
        found.append(torch.tensor(masses(cache), dtype=torch.float64))
        assert all(layer.queries.observed is None for layer in layers_of(cache))
    assert all((other - found[0]).abs().max() <= 1e-9 for other in found)
    fewer = make(model, detector="prefill", num_last_queries=3, threshold=1.0)
    feed(model, fewer, ids, 50)
    assert (torch.tensor(masses(fewer)) - found[0]).abs().max() > 1e-3


@torch.no_grad()
def test_each_sequence_decides_for_itself(tools):
    """Rows of different length, content and laziness; then copies of one row that go on differently."""
    model, ids = tools.make_pod("llama", plan=False), tools.random_ids(3, 60)
    mask = torch.ones(3, 60, dtype=torch.long)
    mask[1, :13] = 0
    probe = make(model, threshold=1.0)
    model(ids[:, :40], attention_mask=mask[:, :40], past_key_values=probe)
    model(ids[:, 40:41], attention_mask=mask[:, :41], past_key_values=probe)
    options = {"threshold": sorted(mass for row in range(3) for mass in masses(probe, row))[7]}
    cache = make(model, **options)
    model(ids[:, :40], attention_mask=mask[:, :40], past_key_values=cache)
    order = torch.tensor([1, 0, 1])
    cache.reorder_cache(order)
    for t in range(40, 55):
        together = model(ids[:, t : t + 1], attention_mask=mask[order, : t + 1], past_key_values=cache).logits
    decisions = []
    for row, source in enumerate(order.tolist()):
        alone = make(model, **options)
        padding = 13 if source == 1 else 0
        model(ids[source : source + 1, padding:40], past_key_values=alone)
        for t in range(40, 55):
            logits = model(ids[row : row + 1, t : t + 1], past_key_values=alone).logits
        assert (together[row] - logits[0]).abs().max() <= 1e-9
        assert held(cache, row) == held(alone) and lazy(cache, row) == lazy(alone)
        decisions.append(lazy(alone))
    assert any(decision != decisions[0] for decision in decisions)


@torch.no_grad()
def test_a_layer_judged_busy_is_judged_again_after_the_next_prompt(tools):
    model, ids = tools.make_pod("llama", plan=False), tools.random_ids(1, 80)
    cache = make(model, threshold=1.0)
    first = feed(model, cache, ids, 30, 1) is not None and masses(cache)
    feed(model, cache, ids, *[1] * 5)
    assert masses(cache) == first  # by the first generated token only
    feed(model, cache, ids, 8)
    assert masses(cache) == first
    feed(model, cache, ids, 1)
    assert all(new != old for new, old in zip(masses(cache), first, strict=True))


@torch.no_grad()
def test_last_layer_can_be_exempt(tools):
    model, ids = tools.make_pod("llama", plan=False), tools.random_ids(1, 60)
    for detector in ("decode", "prefill"):
        cache = make(model, detector=detector, threshold=0.0, exempt_last_layer=True)
        feed(model, cache, ids, 40, 1, 1)
        assert held(cache) == [10] * 4 + [42]


@pytest.mark.parametrize("detector", ["decode", "prefill"])
@pytest.mark.parametrize("lazy_layers", [[], [1, 3], [4]])
@torch.no_grad()
def test_given_layers_are_lazy_from_the_prompt_on(tools, lazy_layers, detector):
    """Logits are those of a model whose given layers see sinks and window only.

    This holds behind a prompt that saw all; no detector judges.
    """
    model, ids = tools.make_pod("qwen3-g3", plan=False), tools.random_ids(1, 60)
    turns = [("prompt", 30), ("decode", 12), ("prompt", 9), ("decode", 9)]
    naive = oracles_ranked.SimLayerKV(model, threshold=2.0, detector=detector, num_recent_tokens=6)
    naive.lazy = [layer in lazy_layers for layer in range(5)]
    cache = make(model, detector=detector, threshold=0.0, lazy_layers=lazy_layers)
    out = run_cache(model, cache, ids, turns, (7,))
    assert (out[0] - naive.run(ids[0], turns)).abs().max() <= 1e-9
    assert held(cache) == [10 if layer in lazy_layers else 60 for layer in range(5)]
    found = [layer.decisions(0) for layer in layers_of(cache)]
    assert [one["lazy"] for one in found] == naive.lazy and {one["mass"] for one in found} == {None}


@torch.no_grad()
def test_random_layers_are_drawn_by_the_seed_from_those_given(tools):
    model, ids = tools.make_pod("llama", plan=False), tools.random_ids(1, 40)

    def drawn(**options):
        cache = make(model, **options)
        feed(model, cache, ids, 40)
        assert [layer.judges_next for layer in layers_of(cache)] == [False] * 5
        return tuple(index for index, is_lazy in enumerate(lazy(cache)) if is_lazy)

    found = {drawn(num_lazy_layers=2, seed=seed) for seed in range(40)}
    assert len(found) == 10 and all(len(layers) == 2 for layers in found)  # of 10 pairs
    assert drawn(num_lazy_layers=2, seed=7) == drawn(num_lazy_layers=2, seed=7)
    assert {drawn(num_lazy_layers=1, lazy_layers=[4, 2], seed=seed) for seed in range(9)} == {(2,), (4,)}
    assert drawn(num_lazy_layers=0) == () and drawn(num_lazy_layers=5) == (0, 1, 2, 3, 4)


@torch.no_grad()
def test_a_layer_says_what_it_decided_and_why(tools):
    model, ids = tools.make_pod("llama", plan=False), tools.random_ids(1, 41)
    probe = make(model, threshold=1.0)
    feed(model, probe, ids, 40, 1)
    cache = make(model, threshold=sorted(masses(probe))[2])
    feed(model, cache, ids, 40, 1)
    found = [layer.decisions(0) for layer in layers_of(cache)]
    assert found == [{"lazy": float(mass > sorted(masses(probe))[2]), "mass": mass} for mass in masses(probe)]


@pytest.mark.parametrize("spec", ["simlayerkv", "simlayerkv+int4"])
@pytest.mark.parametrize("detector", ["decode", "prefill"])
@torch.no_grad()
def test_bytes_are_those_of_the_rule_and_do_not_grow(tools, spec, detector):
    model, ids = (
        tools.make_pod("llama", plan=False, dtype=torch.float32, head_dim=32),
        tools.random_ids(2, 400),
    )
    options = {"num_recent_tokens": 60, "detector": detector}
    if spec != "simlayerkv":
        options |= {"group_size": 16, "residual": 16}
    cache = make(model, spec, threshold=0.0, **options)
    sizes = []
    for widths in ([200], [1] * 60, [1] * 90):
        feed(model, cache, ids, *widths)
        sizes.append(measured(cache))
        assert abs(sizes[-1] / rule_nbytes(cache) - 1) < 0.01
    assert sizes[1] == sizes[2]
    assert sizes[0] > sizes[1] if detector == "decode" else sizes[0] == sizes[1]
    tokens = 64 * 128  # bytes of one head's keys in fp32
    if spec != "simlayerkv":
        # sinks, residual and a group native; the rest in 3 groups of 16 tokens: 32 codes, 2 scales with zeros
        tokens = (4 + 16 + 16) * 128 + 3 * 16 * (16 + 2 * 4)
    assert sizes[2] == 2 * 5 * 2 * 2 * tokens  # rows, layers, KV heads, key and value
    busy = make(model, spec, threshold=1.0, **options)
    feed(model, busy, ids, 200, *[1] * 10)
    assert abs(measured(busy) / rule_nbytes(busy) - 1) < 0.01 and measured(busy) > 1.5 * sizes[2]


@torch.no_grad()
def test_streaming_prefill_bounds_the_prompt(tools):
    model, ids = tools.make_pod("llama", plan=False), tools.random_ids(1, 300)
    cache = make(model, threshold=0.0, detector="prefill", prefill="streaming", chunk_size=16)
    most = []
    forward = type(layers := cache.make_child(model.config, 0)).flush
    assert layers.tokens.held == 0

    def flush(self, step):
        most.append(self.tokens.held)
        forward(self, step)

    type(layers).flush = flush
    try:
        feed(model, cache, ids, 300)
    finally:
        type(layers).flush = forward
    assert max(most) == 10 + 16 and held(cache) == [10] * 5


@torch.no_grad()
def test_dropped_tokens_are_never_read(tools):
    """Room for growth filled with NaN after every pass."""
    model, ids = tools.make_pod("qwen3-g3", plan=False), tools.random_ids(1, 70)
    probe = make(model, threshold=1.0)
    feed(model, probe, ids, 30, 1)
    threshold = sorted(masses(probe))[2]
    outputs = []
    for poison in (False, True):
        cache, logits = make(model, threshold=threshold), []
        for widths in ([17], [13], [1] * 9, [11], [1] * 6):
            logits.append(feed(model, cache, ids, *widths))
            for layer in layers_of(cache) if poison else []:
                tokens = layer.tokens
                for pair, length in ((tokens.window, tokens.entered), (tokens.beside, tokens.num_beside)):
                    for buffer in pair or ():
                        if not buffer.is_empty:
                            buffer.data[:, :, buffer.used_slots(length) :] = math.nan
        outputs.append(torch.cat(logits, 1))
        assert 0 < sum(lazy(cache)) < 5
    assert outputs[1].isfinite().all() and torch.equal(*outputs)


def test_requests_that_cannot_work_are_refused(tools):
    model, shared = tools.make_pod("llama", plan=False), tools.make_pod("llama")
    for target, options, message in [
        (model, {"detector": "first"}, "choose decode or prefill"),
        (model, {"num_recent_tokens": 0}, "must be at least 1"),
        (model, {"num_sink_tokens": -1}, "must be at least 0"),
        (model, {"num_last_queries": 0}, "must be at least 1"),
        (model, {"threshold": "high"}, "must be a number"),
        (model, {"budget": 100}, "takes no budget"),
        (model, {"prefill": "lazy"}, "choose exact or streaming"),
        (shared, {}, "without a sharing plan"),
        (model, {"lazy_layers": [5]}, "different layers from 0 to 4"),
        (model, {"lazy_layers": [1, 1]}, "different layers"),
        (model, {"lazy_layers": "1-3"}, "must be a list"),
        (model, {"lazy_layers": [1], "num_lazy_layers": 2}, "at least num_lazy_layers = 2"),
        (model, {"num_lazy_layers": 1, "exempt_last_layer": True}, "needs a detector"),
    ]:
        with pytest.raises(ValueError, match=message) as error:
            make(target, **options)
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="decides while it runs"):
        make(shared, "pod+simlayerkv")


@torch.no_grad()
def test_tokens_are_packed_once_the_layer_is_judged(tools):
    """Until the first generated token they stay native: a lazy layer packs its window, and nothing twice."""
    model, ids = (
        tools.make_pod("llama", plan=False, dtype=torch.float32, head_dim=32),
        tools.random_ids(1, 200),
    )
    options = {"num_recent_tokens": 60, "group_size": 16, "residual": 16}
    native, packed = (
        make(model, threshold=0.0, **SIZES | {"num_recent_tokens": 60}),
        make(model, "simlayerkv+int4", threshold=0.0, **options),
    )
    for cache in (native, packed):
        feed(model, cache, ids, 150)
    assert measured(packed) == pytest.approx(measured(native), rel=0.01)
    assert abs(measured(packed) / rule_nbytes(packed) - 1) < 0.01
    full = {}
    for cache in (native, packed):
        full[cache] = feed(model, cache, ids, 1)
    assert torch.equal(*full.values())  # the first generated token still attends to native tokens
    assert measured(packed) < 0.75 * measured(native)
    ring = layers_of(packed)[0].tokens.window.values.read(151)
    exact = layers_of(native)[0].tokens.window.values.read(151)
    code = (exact.amax(-1) - exact.amin(-1)).max() / 15
    assert 0 < (ring - exact).abs().max() <= 0.51 * code


def test_streaming_prefill_needs_the_detector_that_judges_prompts(tools):
    model = tools.make_pod("llama", plan=False)
    with pytest.raises(ValueError, match="choose detector='prefill'"):
        pod.make_cache(model, "simlayerkv", prefill="streaming")
    pod.make_cache(model, "simlayerkv", prefill="streaming", detector="prefill")
    pod.make_cache(model, "simlayerkv", prefill="streaming", lazy_layers=[0])
