"""FM, IM and IMDC in the unit.

Memories and bytes step by step, positions, pruners, rows, packed memories, refusals. Logits against the naive
oracle are in test_oracles_imdc.py, schedules in test_imdc_schedule.py.
"""

from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from oracle_tools import TURNS, run_cache
from oracles_imdc import Chunked
from rule_bytes import rule_nbytes
from test_imdc_schedule import chunk_sizes

import pod
from pod.modeling.methods import imdc
from pod.modeling.methods.base import Request
from pod.modeling.methods.imdc import Settings, prompt_schedule
from pod.modeling.model.rope import Rope

SLOT = 2 * 5 * 2 * 8 * 8  # bytes: keys and values, layers, KV heads, head_dim, fp64
COMMON = {"budget": 16, "chunk_size": 12, "window": 2}


def payload(cache):
    return sum(size for part, size in cache.nbytes_by_part().items() if part != "bookkeeping")


def held(cache):
    return [[layer.held for layer in group.layers] for group in cache.groups]


@pytest.mark.parametrize("spec", ["fm", "im", "imdc", "imdc(streamingllm)"])
@pytest.mark.parametrize("function", ["linear", "square-sqrt"])
@torch.no_grad()
def test_memory_follows_the_schedule(tools, spec, function):
    """Memory follows the schedule for 70 tokens, one at a time.

    Before each chunk ends everything is held, then min(m_i, what is there) slots.
    """
    model, ids = tools.make_pod("llama", plan=False), tools.random_ids(1, 70)
    variant = spec.partition("(")[0]
    options = COMMON if variant == "fm" else COMMON | {"function": function}
    cache = pod.make_cache(model, spec, **options)
    plan = prompt_schedule(Settings(variant, function, 16, 12, 5), 70)
    assert len(plan.boundaries) == 6 and plan.memory is not None
    cache.begin_prompt(70)
    memory = [0] * 5
    for done in range(1, 71):
        model(ids[:, done - 1 : done], past_key_values=cache)
        memory = [slots + 1 for slots in memory]
        if done in plan.boundaries:
            chunk = plan.boundaries.index(done)
            memory = [min(slots, plan.memory[layer][chunk]) for layer, slots in enumerate(memory)]
        assert held(cache) == [memory]
        assert rule_nbytes(cache) == sum(memory) * SLOT // 5
        assert 0 <= payload(cache) - rule_nbytes(cache) <= SLOT  # a slot per layer to grow into
    assert memory == [16] * 5 and payload(cache) == 16 * SLOT


@torch.no_grad()
def test_decoded_tokens_are_appended(tools):
    model, ids = tools.make_pod("llama", plan=False), tools.random_ids(2, 90)
    cache = pod.make_cache(model, "imdc", **COMMON)
    model(ids[:, :60], past_key_values=cache)
    for count in range(1, 21):
        model(ids[:, 59 + count : 60 + count], past_key_values=cache)
        assert held(cache) == [[16 + count] * 5] and rule_nbytes(cache) == 2 * (16 + count) * SLOT
    model(ids[:, 80:], past_key_values=cache)
    assert held(cache) == [[16] * 5]


@pytest.mark.parametrize("spec", ["imdc(snapkv)", "imdc(streamingllm)"])
@torch.no_grad()
def test_positions_never_exceed_memory_and_chunk(tools, monkeypatch, spec):
    """A prompt of 400 tokens in chunks of 20: no key or query is turned beyond max(c_i + m_{i-1})."""
    model, ids, largest = tools.make_pod("llama", plan=False), tools.random_ids(1, 400), []
    turn = Rope.turn

    def noted(rope, x, slots):
        largest.append(slots.stop)
        return turn(rope, x, slots)

    monkeypatch.setattr(Rope, "turn", noted)
    cache = pod.make_cache(model, spec, budget=20, chunk_size=20, window=3)
    out = model(ids, past_key_values=cache).logits
    plan = prompt_schedule(Settings("imdc", "linear", 20, 20, 5), 400)
    assert max(largest) == max(chunk_sizes(plan)) + 1 == 30  # c + m̂ = 20 + 10
    assert out.isfinite().all()


@torch.no_grad()
def test_streamingllm_pruner_equals_streamingllm_tokens(tools):
    """The memory is the first 3 and the last 13 tokens.

    The keys of layer 0, which no chunk changes, say so.
    """
    model, ids = tools.make_pod("llama", plan=False), tools.random_ids(1, 77)
    cache = pod.make_cache(model, "fm(streamingllm)", budget=16, chunk_size=9, num_sink_tokens=3)
    model(ids, past_key_values=cache)
    layer = model.model.layers[0]
    _, keys, _ = layer.self_attn._project(layer.input_layernorm(model.model.embed_tokens(ids)))
    kept = cache.groups[0].layers[0].tokens.keys.read(16)
    assert torch.equal(kept, keys[:, :, [0, 1, 2, *range(64, 77)]])


def test_pruners():
    """SnapKV ranks what lies before its window; a memory no larger than the window is the last slots."""
    keys = torch.zeros(1, 1, 9, 4)
    keys[0, 0, 2], keys[0, 0, 5] = 3.0, 2.0
    queries = torch.ones(1, 2, 2, 4)

    def pruner(inner):
        params = {"window": 2, "kernel": 1, "pool": "avg", "num_sink_tokens": 3}
        request = Request(spec="imdc", params=params, budget=8, inner=inner)
        config = pod.PodConfig(hidden_size=8, num_attention_heads=2, num_key_value_heads=1)  # scale 0.5
        layer = imdc.MemoryLayer(config, 0, request)
        layer.queries.observed = queries
        return lambda size: layer.choose(keys, size, None)

    snap = pruner("snapkv")
    assert snap(4).tolist() == [[[2, 5, 7, 8]]]
    assert snap(5).tolist() == [[[0, 2, 5, 7, 8]]]  # of equal scores the lower slot
    assert snap(2).tolist() == [[[7, 8]]] and snap(1).tolist() == [[[8]]]
    ends = pruner("streamingllm")
    assert ends(5).tolist() == [[[0, 1, 2, 7, 8]]]
    assert ends(3).tolist() == [[[0, 1, 2]]] and ends(2).tolist() == [[[0, 1]]]


@pytest.mark.parametrize("function", ["linear", "adaptive"])
@torch.no_grad()
def test_rows_in_a_padded_batch_equal_rows_alone(tools, function):
    """Rows in a padded batch equal rows alone.

    Left padding, rows of 70, 41 and 9 tokens with schedules of their own, two turns, a cut of 13 columns.
    """
    model, ids = tools.make_pod("llama", plan=False), tools.random_ids(3, 92)
    options = COMMON | {"function": function}
    mask = torch.ones(3, 92, dtype=torch.long)
    mask[1, :29], mask[2, :61] = 0, 0
    cache, columns = pod.make_cache(model, "imdc", **options), []
    cache.begin_prompt(70)
    for start, end in [(0, 13), (13, 44), (44, 70), (70, 71), (71, 92)]:
        arguments = {"attention_mask": mask[:, :end], "past_key_values": cache}
        columns.append(model(ids[:, start:end], **arguments).logits)
    together = torch.cat(columns, 1)
    for row, padding in enumerate([0, 29, 61]):
        alone = pod.make_cache(model, "imdc", **options)
        turns = [("prompt", 70 - padding), ("decode", 1), ("prompt", 21)]
        expected = run_cache(model, alone, ids[row : row + 1, padding:], turns)[0]
        assert (together[row, padding:] - expected).abs().max() <= 1e-9


@pytest.mark.parametrize("spec", ["imdc(snapkv)+int8", "imdc(streamingllm)+int8", "fm+int8"])
@torch.no_grad()
def test_packed_memory(tools, spec):
    """Any cut of the prompts gives the same logits; fewer bytes than native, and the predicted ones."""
    model, ids = tools.make_pod("llama", plan=False), tools.random_ids(1, 50)
    options = {"budget": 20, "chunk_size": 14, "window": 3}
    outputs = []
    for cut in ((), (7,), (1,)):
        cache = pod.make_cache(model, spec, group_size=4, residual=4, **options)
        outputs.append(run_cache(model, cache, ids, TURNS, cut))
        assert payload(cache) == pytest.approx(rule_nbytes(cache), rel=0.02)
    assert max((out - outputs[0]).abs().max() for out in outputs) <= 1e-9
    native = pod.make_cache(model, spec.removesuffix("+int8"), **options)
    exact = run_cache(model, native, ids, TURNS)
    assert payload(cache) < 0.7 * payload(native)
    assert torch.equal(outputs[0][:, :10], exact[:, :10])  # the first chunk finds no memory
    assert (outputs[0] - exact).abs().max() > 1e-6


@torch.no_grad()
def test_chunks_shorter_than_the_window(tools):
    """A chunk of 5 ranks by its own 5 queries.

    It does so though the window is 9 and the chunk before left queries, too.
    """
    model, ids = tools.make_pod("llama", plan=False), tools.random_ids(1, 50)
    options = {"budget": 14, "chunk_size": 5, "window": 9}
    expected = Chunked(model, mode="im", **options).run(ids[0], TURNS)
    out = run_cache(model, pod.make_cache(model, "im", **options), ids, TURNS, (4,))[0]
    assert (out - expected).abs().max() <= 1e-9


@pytest.mark.parametrize("family", ["qwen2-yarn", "llama-tied-biased-llama3"])
@torch.no_grad()
def test_scaled_rotations(tools, family):
    """YaRN multiplies every rotated key and query by a factor, for the pruner as well."""
    model, ids = tools.make_pod(family, plan=False), tools.random_ids(1, 50)
    expected = Chunked(model, **COMMON).run(ids[0], TURNS)
    for cut in ((), (7,)):
        out = run_cache(model, pod.make_cache(model, "imdc", **COMMON), ids, TURNS, cut)[0]
        assert (out - expected).abs().max() <= 1e-9


@torch.no_grad()
def test_adaptive_gives_more_to_layers_that_retain_more(tools):
    """Layer 3 retains all of its memory and the others none: it gets what the others leave above m_0."""
    model, ids = tools.make_pod("llama", plan=False), tools.random_ids(1, 70)
    cache = pod.make_cache(model, "im", **(COMMON | {"function": "adaptive"}))
    cache.begin_prompt(70)
    plan = prompt_schedule(Settings("im", "adaptive", 16, 12, 5), 70)
    model(ids[:, : plan.boundaries[1]], past_key_values=cache)
    layers = cache.groups[0].layers
    for index, layer in enumerate(layers):
        layer.retention = Fraction(1 if index == 3 else 0)
    model(ids[:, plan.boundaries[1] : plan.boundaries[2]], past_key_values=cache)
    first, before, now = plan.memory[0][0], plan.memory[0][1], plan.memory[0][2]
    there = before + chunk_sizes(plan)[2]
    assert [layer.held for layer in layers] == [first] * 3 + [min(there, 5 * now - 4 * first)] + [first]


@torch.no_grad()
def test_sharing_of_memories_is_seen(tools, monkeypatch):
    """Adaptive differs from linear, and a planned size that is one token off changes the logits."""
    model, ids = tools.make_pod("llama", plan=False), tools.random_ids(1, 70)

    def logits(**changes):
        return model(ids, past_key_values=pod.make_cache(model, "imdc", **(COMMON | changes))).logits

    expected = logits()
    assert (logits(function="adaptive") - expected).abs().max() > 1e-6
    plan = prompt_schedule

    def smaller(settings, length, before=0):
        schedule = plan(settings, length, before)
        return replace(schedule, memory=tuple(tuple(m - 1 for m in sizes) for sizes in schedule.memory))

    monkeypatch.setattr(imdc, "prompt_schedule", smaller)
    assert (logits() - expected).abs().max() > 1e-6


@torch.no_grad()
def test_generate(tools):
    """Greedy tokens of a padded batch are those of the rows alone, however generate() cuts the prompt."""
    model, ids = tools.make_pod("llama", plan=False), tools.random_ids(2, 50)
    mask = torch.ones(2, 50, dtype=torch.long)
    mask[1, :17] = 0
    arguments = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    together = [
        model.generate(
            ids,
            attention_mask=mask,
            past_key_values=pod.make_cache(model, "imdc", **COMMON),
            prefill_chunk_size=chunk,
            **arguments,
        )[:, -8:]
        for chunk in (None, 7)
    ]
    alone = [
        model.generate(
            ids[row : row + 1, start:], past_key_values=pod.make_cache(model, "imdc", **COMMON), **arguments
        )[0, -8:]
        for row, start in ((0, 0), (1, 17))
    ]
    assert torch.equal(together[0], together[1]) and torch.equal(together[0], torch.stack(alone))


def test_refusals(tools):
    dense, shared = tools.make_pod("llama", plan=False), tools.make_pod("llama")
    for model, spec, options, message in [
        (dense, "imdc", {}, "needs a budget"),
        (dense, "imdc", {"budget": 64, "function": "cubic"}, "choose linear, sqrt"),
        (dense, "imdc", {"budget": 64, "chunk_size": 0}, "chunk_size = 0 must be at least 1"),
        (dense, "imdc", {"budget": 32}, "budget = 32 must exceed window = 32"),
        (dense, "imdc", {"budget": 64, "pool": "sum"}, "pool = 'sum'"),
        (
            dense,
            "imdc(streamingllm)",
            {"budget": 64, "num_sink_tokens": -1},
            "num_sink_tokens = -1 must be at least 0",
        ),
        (dense, "imdc(h2o)", {"budget": 64}, r"choose imdc\(snapkv\), imdc\(streamingllm\)"),
        (dense, "fm", {"budget": 64, "function": "linear"}, "fm has no parameter 'function'"),
        (shared, "pod+imdc", {"budget": 64}, "no common distant keys"),
    ]:
        with pytest.raises(ValueError, match=message):
            pod.make_cache(model, spec, **options)
    cache = pod.make_cache(dense, "imdc", budget=64, chunk_size=16)
    with pytest.raises(ValueError, match="chunk 32 of 32 would have -14 tokens.*raise chunk_size"):
        dense(tools.random_ids(1, 512), past_key_values=cache)
    assert pod.make_cache(dense, "imdc(streamingllm)", budget=5, chunk_size=4).spec == "imdc(streamingllm)"
