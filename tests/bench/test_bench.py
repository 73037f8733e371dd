"""Decode speed, from the byte model to the largest batch.

Covers the byte model against counting, caches that are filled without a prompt, races, and largest batches.
"""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import transformers

import pod
from pod.bench import decode_speed, run
from pod.bench.args import FULL, SHAPES, STOCK, BenchArgs, bench_method
from pod.bench.decode_bytes import (
    Sizes,
    budget_at,
    held_per_row,
    is_modelled,
    needed,
    read_per_row,
    read_per_step,
    spread_plan,
    uses_plan,
)
from pod.bench.decode_speed import make_cache, make_entry
from pod.bench.dense_decode import PEERS, dense_peers
from pod.measure import random_cache
from pod.measure.random_cache import fill_with_random_tokens
from pod.measure.speed_comparison import RaceEntry
from pod.modeling.model.decode import DECODERS
from pod.modeling.model.kv_buffer import KVBuffer
from pod.modeling.model.window_buffer import WindowBuffer
from pod.recipe import Recipe, field_docs, fields_of, load_recipe

WINDOWS = (2, 6)
LEAD = [[0, 0], [0, 1], [0, 1], [3, 1]]
ROLES = [[0, None], [None, 1], [0, None], [3, 1]]
POD = bench_method("pod")
CPU = torch.device("cpu")


TINY = [
    "bench.shapes=tiny",
    "model.num_sink_tokens=2",
    "model.num_recent_tokens=6",
    "bench.repeats=1",
    "bench.steps=2",
]


def make_bench(lead, *settings, bits=None):
    """Dense and planned model of one set of weights."""
    recipe = load_recipe(None, [*TINY, *settings])
    bench_plan = run.plan_bench(recipe)
    sizes = replace(bench_plan.sizes, plan=pod.SharingPlan(lead=lead, bits=bits))
    return run.load(recipe, bench_plan._replace(sizes=sizes), [CPU])


@pytest.fixture(autouse=True)
def no_collections(monkeypatch):
    """Collecting garbage takes a second in a process that has loaded everything."""
    monkeypatch.setattr("gc.collect", lambda: 0)


@pytest.fixture
def bench():
    return make_bench(LEAD, "bench.steps=3", "bench.repeats=2")


def buffers_of(cache):
    return [buffer for layer in cache.layers for buffer in layer.kv_buffers().values() if not buffer.is_empty]


# -- recipe --------------------------------------------------------------------------------


def test_methods_are_those_of_evaluations():
    method = bench_method("pod+int4[tau=0.7,group_size=16,skip_share=0.25]")
    assert (method.spec, method.options) == ("pod+int4", {"tau": 0.7, "group_size": 16, "skip_share": 0.25})
    assert (
        uses_plan(method) and not uses_plan(bench_method("int4")) and not uses_plan(bench_method("snapkv@9"))
    )
    found = BenchArgs(methods=["full", "pod", "pod[tau=0.7]"]).raced_methods
    assert [method.name for method in found] == ["pod", "pod[tau=0.7]"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"methods": ["pot"]}, "unknown method 'pot'; did you mean 'pod'"),
        ({"methods": ["pod[tau]"]}, "each parameter once with its value"),
        ({"methods": ["pod", "pod"]}, "besides full, and none twice"),
        ({"methods": ["full"]}, "at least one method besides full"),
        ({"methods": ["pod-unadapted"]}, "the benchmark sets both itself"),
        ({"methods": ["model:cla"]}, "the benchmark sets both itself"),
        ({"methods": ["pod[capacity=9]"]}, "the benchmark sets both itself"),
        ({"methods": ["pod[tau=0.7,skip_share=2]"]}, "skip_share = 2"),
        ({"methods": [" "]}, "method ' ': '' is no part"),
        ({"methods": ["pod+int4", "int4 + pod"]}, "besides full, and none twice"),
        ({"shapes": "llama3-7b"}, "did you mean 'llama3-8b'"),
        ({"lengths": [8, 8]}, "lengths is .8, 8.: give at least one number, and none twice"),
        ({"batch_sizes": [0]}, "batch_sizes.0. is 0: it should be greater than 0"),
        ({"steps": 0}, "steps is 0"),
        ({"repeats": 0}, "repeats is 0"),
        ({"share_followers": 1.0}, "share_followers is 1.0"),
        ({"share_followers": 0.5, "share_windows": 0.6}, "share_windows 0.6 add up to more than 1"),
    ],
)
def test_wrong_values_are_one_line(values, message):
    with pytest.raises(ValueError, match=message) as caught:
        BenchArgs(**values)
    assert "\n" not in str(caught.value)


def test_every_field_is_documented():
    assert set(fields_of(BenchArgs)) == set(field_docs(BenchArgs))


# -- bytes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("layers", "heads"), [(32, 8), (4, 2), (1, 3), (5, 3), (2, 1)])
@pytest.mark.parametrize(
    "shares",
    [
        (0.0, 0.0),
        (0.3, 0.0),
        (0.7, 0.0),
        (0.97, 0.0),
        (0.0, 0.5),
        (0.3, 0.65),
        (0.1, 0.3),
        (0.0, 1.0),
        (0.5, 0.5),
    ],
)
def test_made_up_plans_have_the_shares_asked_for(layers, heads, shares):
    pairs, plan = layers * heads, spread_plan([None] * layers, heads, *shares)
    assert plan.num_windows == round(shares[1] * pairs)
    rows = zip(*plan.lead, strict=True)
    blocks, windows = zip(
        *((len(plan.blocks(h)), row.count(None)) for h, row in enumerate(rows)), strict=True
    )
    assert max(blocks) - min(blocks) <= 1 >= max(windows) - min(windows)
    wanted = pairs - plan.num_windows - round(shares[0] * pairs)
    assert plan.num_leads == max(wanted, sum(count < layers for count in windows))


def test_layers_trained_with_windows_keep_them():
    plan = spread_plan([9, None, 9, None, None, None], 2, 0.5)
    assert plan.lead[0] == plan.lead[2] == (None, None) and plan.num_windows == 4 == plan.num_followers


def counted(lead, length, groups, head_dim, element, windows, method):
    """Bytes of a step for one row, by walking over every pair and token."""
    share, shares = method.options.get("skip_share", 0), uses_plan(method)
    skips = round(share * sum(a not in (i, None) for i, row in enumerate(lead) for a in row))
    total = 0
    for layer, row in enumerate(lead):
        for head, own in enumerate(row):
            leads = not shares or own == layer
            above = next((row[head] for row in lead[layer + 1 :] if row[head] is not None), None)
            has_users = own is not None and above == own
            sees_window_only = shares and own is None
            skip = not leads and not sees_window_only and skips > 0
            skips -= skip
            for token in range(length):
                distant = windows[0] <= token < length - windows[1]
                if distant and sees_window_only:
                    continue
                total += 0 if distant and skip else head_dim * element  # value
                total += head_dim * element if leads or not distant else 0  # key
                if distant and shares and not skip and (not leads or has_users):
                    total += 4 * groups  # logits
    return total


def sizes_of(lead, groups=3, head_dim=16, weights=1000, read=900, bits=None):
    plan = pod.SharingPlan(lead=lead, bits=bits)
    dense = pod.SharingPlan.dense(plan.num_layers, plan.num_key_value_heads)
    return Sizes(plan, dense, (WINDOWS,) * len(lead), groups, head_dim, 2, weights, read)


def ceiling(sizes, method, length, batch):
    full, own = (read_per_step(sizes, one, length, batch) for one in (FULL, method))
    return full / own


@pytest.mark.parametrize("length", [1, 7, 8, 9, 100])
@pytest.mark.parametrize("text", ["full", "pod", "pod[tau=0.7,skip_share=0.5]", "pod[tau=0.7,skip_share=1]"])
@pytest.mark.parametrize("lead", [LEAD, ROLES])
def test_bytes_of_a_step_are_those_counted(length, text, lead):
    sizes, method = sizes_of(lead), bench_method(text)
    expected = counted(lead, length, 3, 16, 2, WINDOWS, method)
    assert read_per_row(sizes, method, length) == pytest.approx(expected, rel=1e-12)
    full = counted(lead, length, 3, 16, 2, WINDOWS, FULL)
    assert ceiling(sizes, method, length, 5) == pytest.approx((900 + 5 * full) / (900 + 5 * expected))


def test_packed_tokens_cost_their_codes_and_their_groups():
    sizes = sizes_of(LEAD, 2, 128)
    for text, bits, tokens, size in (
        ("int4", 4, 10**9, 128 * 5 / 8),
        ("int8[group_size=64]", 8, 10**9, 128 * 8.5 / 8),
        ("int4", 4, 100, 256),  # the newest tokens are native
    ):
        assert sizes.token_bytes(bench_method(text), bits, tokens) == pytest.approx((size, size), rel=1e-5)
    key, value = sizes_of(LEAD, 2, 80).token_bytes(bench_method("int4"), 4, 10**9)
    assert (key, value) == pytest.approx((40 + 4 * 80 / 32, 40 + 4 * 2), rel=1e-5), (
        "two groups of 40 channels"
    )
    assert not is_modelled(bench_method("snapkv@9")) and not is_modelled(STOCK)
    whole, packed = (
        read_per_row(sizes, POD, 10**6),
        read_per_row(sizes_of(LEAD, 2, 128, bits=(16, 4, 4, 16)), POD, 10**6),
    )
    saved = 2 + 2 + 1  # values of two heads in two layers, and the key of the head that leads there
    assert whole - packed == pytest.approx(saved * 10**6 * (256 - 80), rel=1e-3), "a plan's own bits"


def test_ceilings_at_llama3_8b_shapes_are_those_promised():
    """1.34x at batch 4, 1.20x at batch 1; largest batches 1.27, 1.30, 1.36, 1.41x for a window of 4,096."""
    config = SimpleNamespace(**SHAPES["llama3-8b"])
    sizes = Sizes.of(config, spread_plan([None] * 32, 8, 0.7), (16, 4080), 2)
    assert sizes.weights / 2 == pytest.approx(8.03e9, rel=1e-3)
    assert sizes.weights - sizes.read == 2 * 128256 * 4096
    assert ceiling(sizes, POD, 131072, 4) == pytest.approx(1.34, abs=0.005)
    assert ceiling(sizes, POD, 131072, 1) == pytest.approx(1.20, abs=0.005)
    for prompt, ratio in ((2048, 1.27), (4096, 1.30), (8192, 1.36), (16384, 1.41)):
        n = prompt + 8192
        assert held_per_row(sizes, FULL, n) / held_per_row(sizes, POD, n) == pytest.approx(ratio, abs=0.006)


def test_weights_of_experts_are_held_by_all_and_read_of_some():
    """Mixtral-8x7B: 46.7 billion weights, 12.9 of them for a token."""
    config = SimpleNamespace(
        **{**SHAPES["llama3-8b"], "vocab_size": 32000},
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=14336,
    )
    sizes = Sizes.of(config, spread_plan([None] * 32, 8, 0.7), (16, 4080), 2)
    assert sizes.weights / 2 == pytest.approx(46.7e9, rel=2e-3)
    assert sizes.read / 2 == pytest.approx(12.9e9 - 32000 * 4096, rel=4e-3)


@pytest.mark.parametrize("lead", [LEAD, ROLES])
def test_bytes_held_are_those_of_a_real_cache(lead):
    bench = make_bench(lead)
    norms = sum(p.nbytes for name, p in bench.planned.named_parameters() if "norm" in name)
    assert bench.sizes.weights == sum(p.nbytes for p in bench.planned.parameters()) - norms
    assert bench.sizes.weights - bench.sizes.read == bench.planned.model.embed_tokens.weight.nbytes
    for method in (FULL, POD):
        model = bench.model_of(method)
        cache, _ = make_cache(bench, method, 100, 512, "auto")
        fill_with_random_tokens(model, cache, 3, 100)
        cache.engine.greedy(model, torch.zeros(3, 1, dtype=torch.long), 1)
        parts = cache.nbytes_by_part()
        buffers = parts.pop("decode_buffers")
        parts.pop("bookkeeping")
        held = 3 * held_per_row(bench.sizes, method, 512, on_cpu=True)
        logits = 3 * 4 * 512 * 4 * 2  # rows, query heads, tokens, bytes, and their exponentials on a CPU
        assert sum(parts.values()) == held - logits
        assert logits <= buffers < 1.1 * logits + 10_000
        assert held - 3 * held_per_row(bench.sizes, method, 512) == logits / 2


# -- caches --------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [2, 5, 8, 9, 70, 300])
@pytest.mark.parametrize(("lead", "method"), [(LEAD, FULL), (LEAD, POD), (ROLES, POD)])
def test_filled_caches_have_random_numbers_in_every_used_slot(lead, method, monkeypatch, length):
    monkeypatch.setattr(random_cache, "_CHUNK", 64 * 2 * 2 * 16)  # 64 tokens at a time
    written, appends = {}, {kind: kind.append for kind in (KVBuffer, WindowBuffer)}

    def recorded(buffer, x, past):
        written.setdefault(id(buffer), set()).update(range(past, past + x.shape[2]))
        appends[type(buffer)](buffer, x, past)

    for kind in appends:
        monkeypatch.setattr(kind, "append", recorded)
    bench = make_bench(lead)
    cache, note = make_cache(bench, method, length, 400, "auto")
    fill_with_random_tokens(bench.model_of(method), cache, 2, length)
    assert note is None and cache.get_seq_length() == length and cache.lengths.tolist() == [length] * 2
    for buffer in buffers_of(cache):
        used = buffer.data[:, :, : buffer.used_slots(length)]
        assert (used != 0).all() and not (buffer.data[:, :, buffer.used_slots(length) :] != 0).any()
        sinks, recent = WINDOWS if buffer.has_window else (0, length)
        assert written[id(buffer)] >= {*range(min(sinks, length)), *range(max(0, length - recent), length)}
        assert len(written[id(buffer)]) < 300 or not buffer.has_window, "old tokens of a window are not made"


@pytest.mark.parametrize("text", ["full", "pod", "pod[tau=0.7,skip_share=0.5]"])
@pytest.mark.parametrize("lead", [LEAD, ROLES])
def test_the_engine_on_a_filled_cache_decodes_as_the_ordinary_pass(text, lead):
    method, bench = bench_method(text), make_bench(lead)
    model, found = bench.model_of(method), []
    for capacity in (64, None):
        tau = {"tau": 0.7} if "tau" in text else {}
        cache = pod.make_cache(model, method.spec, **tau, **({"capacity": capacity} if capacity else {}))
        fill_with_random_tokens(model, cache, 2, 40, method.options.get("skip_share", 0))
        one = RaceEntry(text, model, cache, torch.zeros(2, 1, dtype=torch.long))
        one.decode(7)
        assert cache.get_seq_length() == 47
        with torch.no_grad():
            found.append(model(torch.tensor([[7], [8]]), past_key_values=cache).logits)
    assert (found[0] - found[1]).abs().max() < 1e-4 * found[1].abs().max()


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_the_share_asked_for_passes_the_gate(share):
    """A pair whose whole group passes reads no distant value: NaN there does not show."""
    model = make_bench(LEAD, "model.num_recent_tokens=30").planned
    pairs = [(i, h) for i, row in enumerate(LEAD) for h, own in enumerate(row) if own != i]
    unread = 0
    for layer, head in pairs:
        cache = pod.make_cache(model, "pod", capacity=64, tau=0.7)
        fill_with_random_tokens(model, cache, 1, 60, share)
        cache.layers[layer].all_values.data[:, head, WINDOWS[0] : 30] = float("nan")
        with torch.no_grad():
            unread += bool(model(torch.tensor([[3]]), past_key_values=cache).logits.isfinite().all())
    assert unread == share * len(pairs)


@pytest.mark.parametrize(
    "text", ["pod+int4[group_size=16]", "int8[group_size=16]", "snapkv@40", "snapkv@20%"]
)
def test_what_the_engine_does_not_serve_runs_through_the_ordinary_cache_and_says_so(bench, text):
    one, note = make_entry(bench, bench_method(text), 2, 200, 250, "auto")
    has_engine = one.cache.engine is not None
    assert has_engine == (note is None) and one.cache.get_seq_length() == 200
    assert has_engine or note == "without the decode engine: it does not support this method"
    assert one.decode(3) > 0 and one.cache.get_seq_length() == 203
    assert bench.dense.config.attention_backend == bench.planned.config.attention_backend == "auto"
    full, _ = make_entry(bench, FULL, 2, 200, 250, "auto")
    assert one.cache.nbytes < 0.8 * full.cache.nbytes


def test_all_models_share_their_weights(bench):
    ids = torch.randint(258, (2, 30), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours, theirs = bench.dense(ids).logits, bench.stock(ids).logits
    assert (ours - theirs).abs().max() < 1e-5
    models = bench.dense, bench.planned, bench.stock
    assert len({model.lm_head.weight.data_ptr() for model in models}) == 1


def test_budgets_are_taken_at_the_length(bench):
    """In tokens, as a share, or as many as fill what the plan holds."""
    sizes = bench.sizes
    found = [
        budget_at(sizes, bench_method(f"snapkv{budget}"), 200) for budget in ("@40", "@12.5%", "@pod", "")
    ]
    share = 1 - sizes.plan.saving(200, *sizes.windows[0])
    assert found == [40, 25, int(200 * share), int(200 * share)] and 0.4 < share < 0.95


# -- races ---------------------------------------------------------------------------------


class Clock:
    """Seconds by name in place of a stop watch, and who ran when."""

    def __init__(self, monkeypatch, seconds):
        self.turns, self.lengths, self.seconds = [], {}, seconds
        real = RaceEntry.decode

        def decode(one, steps):
            real(one, steps)
            backend = one.cache.engine.backend
            self.turns.append((one.name, steps))
            self.lengths.setdefault(one.name, []).append(one.cache.get_seq_length())
            return self.seconds[one.name, backend]

        monkeypatch.setattr(RaceEntry, "decode", decode)


def test_a_race_is_fair_and_its_figures_follow_from_its_seconds(monkeypatch):
    clock = Clock(
        monkeypatch, {("full", "grouped"): 2.0, ("pod", "auto"): 0.5, ("pod[tau=0.7]", "auto"): 4.0}
    )
    settings = "bench.steps=3", "bench.repeats=2", "bench.stock=false"
    bench = make_bench(LEAD, *settings, "bench.methods=pod,pod[tau=0.7]")
    found = decode_speed.compare(bench, bench.args.raced_methods, 2, 50, "grouped")
    row = found["methods"]["pod"]
    assert row["tokens_per_second"]["median"] == 3 * 2 / 0.5 and row["full_tokens_per_second"]["median"] == 3
    assert row["speed_over_full"] == {"median": 4.0, "min": 4.0, "max": 4.0, "repeats": 2}
    assert found["methods"]["pod[tau=0.7]"]["speed_over_full"]["median"] == 0.5
    assert row["length"] == 50
    limit = ceiling(bench.sizes, POD, (50 + 59) // 2, 2)
    assert row["byte_ceiling"] == limit and row["share_of_ceiling"] == pytest.approx(4.0 / limit)
    assert row["bytes_per_second"] == pytest.approx(row["bytes_per_step"] * 6)
    assert row["full_bytes_per_second"] == pytest.approx(row["full_bytes_per_step"] * 1.5)
    names = [name for name, steps in clock.turns if steps == 3]
    assert names[:6] == ["full", "pod", "pod", "full", "full", "pod"]
    # both stand at the same length in every round, and nothing had to grow
    assert clock.lengths["pod"][1:] == clock.lengths["full"][1:4]
    assert clock.lengths["pod[tau=0.7]"][1:] == clock.lengths["full"][4:]
    capacity = 50 + 2 * 3 * 3
    assert row["bytes_by_part"]["values"] == 2 * 8 * capacity * 16 * 4
    assert found["full"]["bytes_by_part"]["keys"] == 2 * 8 * capacity * 16 * 4


def test_the_dense_cache_takes_its_fastest_backend(bench, monkeypatch):
    clock = Clock(monkeypatch, {("full", "grouped"): 2.0, ("full", "sdpa"): 1.0})

    def broken(call):
        raise RuntimeError("no such\nkernel")

    with dense_peers():
        monkeypatch.setitem(DECODERS, "broken", DECODERS["grouped"]._replace(run=broken))
        name, tried = decode_speed.fastest_backend(bench, 1, 40)
        assert name == "sdpa" and tried["sdpa"] == 1.0 / 8 and tried["grouped"] == 2.0 / 8
        assert tried["broken"] == "RuntimeError: no such kernel"
        assert "cannot run" in tried["triton"] and "flash_attn" in tried["flash_attn"]
        assert "reference" not in tried
        clock.seconds["full", "grouped"] = 0.5
        assert decode_speed.fastest_backend(bench, 1, 40)[0] == "grouped"
    assert not set(PEERS) & set(DECODERS)


def test_dense_peers_compute_dense_attention_and_nothing_else(bench):
    found = []
    with dense_peers():
        for backend in ("grouped", "sdpa"):
            cache, _ = make_cache(bench, FULL, 30, 64, backend)
            fill_with_random_tokens(bench.dense, cache, 2, 30)
            with torch.no_grad():
                found.append(bench.dense(torch.tensor([[4], [5]]), past_key_values=cache).logits)
        assert (found[0] - found[1]).abs().max() < 1e-5
        for lead in (LEAD, ROLES):
            other = make_bench(lead)
            with pytest.raises(ValueError, match="it serves dense caches only"):
                make_entry(other, POD, 2, 30, 64, "sdpa")


def test_one_that_fails_does_not_stop_the_others(bench, monkeypatch):
    bad, late = bench_method("pod[tau=7]"), bench_method("pod[tau=0.9]")
    real = RaceEntry.decode

    def decode(one, steps):
        if one.name == late.name and one.cache.get_seq_length() > 45:
            raise torch.OutOfMemoryError("no room\nleft")
        return real(one, steps)

    monkeypatch.setattr(RaceEntry, "decode", decode)
    result = decode_speed.compare(bench, [bad, late, POD], 1, 40, "grouped")
    found = result["methods"]
    assert "tau = 7" in found["pod[tau=7]"]["error"]
    assert found[late.name] == {"error": "OutOfMemoryError: no room left"}
    assert found["pod"]["engine"] and found["pod"]["note"] is None
    assert "pod[tau=7]                     failed: pod: tau = 7" in run.table(result)


def test_nothing_goes_on_without_the_dense_cache(bench, monkeypatch):
    real = RaceEntry.decode

    def decode(one, steps):
        if one.cache.get_seq_length() > 45:
            raise RuntimeError("an illegal memory access")
        return real(one, steps)

    monkeypatch.setattr(RaceEntry, "decode", decode)
    with pytest.raises(RuntimeError, match="illegal memory"):
        decode_speed.compare(bench, [POD, bench_method("pod[tau=0.9]")], 1, 40, "grouped")


# -- launcher ------------------------------------------------------------------------------


def recipe_of(tmp_path, *settings) -> Recipe:
    return load_recipe(None, [f"output_dir={tmp_path}", *TINY, *settings])


def test_a_run_writes_and_prints_every_setting(tmp_path, capsys):
    recipe = recipe_of(
        tmp_path, "bench.lengths=[40]", "bench.batch_sizes=[1,2]", "bench.methods=pod,pod[tau=0.7]"
    )
    run.run_bench(recipe)
    written = json.loads((tmp_path / "bench" / "bench.json").read_text())
    assert [(s["batch"], s["length"]) for s in written["settings"]] == [(1, 40), (2, 40)]
    for setting in written["settings"]:
        assert set(setting["methods"]) == {"pod", "pod[tau=0.7]", "transformers"}
        assert all(row["speed_over_full"]["repeats"] == 1 for row in setting["methods"].values())
    assert written["share_followers"] == 0.75
    assert {"commit", "versions", "hardware"} <= set(written["environment"])
    output = capsys.readouterr().out
    assert "batch 2, 40 tokens; the dense cache" in output and "2 sink and 6 recent tokens" in output


def test_the_figures_of_an_earlier_run_are_kept(tmp_path, capsys):
    (tmp_path / "bench").mkdir()
    file = tmp_path / "bench" / "bench.json"
    file.write_text("measured before")
    run.run_bench(recipe_of(tmp_path, "bench.lengths=[40]", "bench.batch_sizes=[1]", "bench.methods=pod"))
    (kept,) = tmp_path.glob("bench/bench-????????.json")
    assert kept.read_text() == "measured before" and f"are kept as {kept}" in capsys.readouterr().out
    assert json.loads(file.read_text())["settings"]


OWN = ["bench.shapes=null", "bench.lengths=[300]", "bench.methods=pod"]


@pytest.mark.parametrize("bits", [None, (16, 4, 4, 16)])
def test_a_model_of_ones_own_with_a_plan(tmp_path, bits):
    """The plan's bits are measured too: a layer in 4 bits holds less."""
    order = ((2, 3, 0, 1),) * 4
    pod.SharingPlan(lead=LEAD, bits=bits, head_order=order).save(tmp_path / "p.json")
    settings = [*OWN, "model.path=package:tiny", f"model.plan={tmp_path / 'p.json'}"]
    result = run.run_bench(recipe_of(tmp_path, *settings))
    assert result["plan"] == str(tmp_path / "p.json") and result["share_followers"] == 1 / 2
    rows = result["settings"][0]["methods"]
    assert "error" not in rows["transformers"]
    held, sizes = rows["pod"]["bytes_by_part"], run.plan_bench(recipe_of(tmp_path, *settings)).sizes
    native = 300 * 16 * 4  # of a head's keys or values
    assert sizes.plan.bits == bits
    assert (held["values"] < 7.5 * native) == (bits is not None)


@pytest.mark.parametrize("kind", ["export", "sliding", "qwen2"])
def test_models_of_other_kinds(tmp_path, kind):
    """Models of three other kinds are timed.

    They are an export under its own plan; layers trained with windows, which `full` keeps; and biases, which
    the stock model has too.
    """
    if kind == "export":
        own_windows = {"num_sink_tokens": 3, "num_recent_tokens": 29}
        made = pod.load_model("package:tiny", plan=pod.SharingPlan(lead=LEAD), **own_windows)
        made.save_pretrained(tmp_path / "m")
        other = tmp_path / "plan" / "plan.json"  # of another model, and not asked for
        other.parent.mkdir()
        pod.SharingPlan(lead=((0,) * 2,) * 4).save(other)
    else:
        sizes = SHAPES["tiny"] | {"max_position_embeddings": 1024}
        config = {
            "sliding": lambda: transformers.MistralConfig(**sizes, sliding_window=32),
            "qwen2": lambda: transformers.Qwen2Config(**sizes),
        }[kind]()
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "m")
    unset = ["model.num_sink_tokens=null", "model.num_recent_tokens=null"] if kind == "export" else []
    result = run.run_bench(recipe_of(tmp_path, *OWN, *unset, f"model.path={tmp_path / 'm'}"))
    rows, full = result["settings"][0]["methods"], result["settings"][0]["full"]
    assert not any("error" in row for row in rows.values())
    assert ("not_measured" in rows["transformers"]) == (kind == "export")
    assert result["windows"] == ([3, 29] if kind == "export" else [2, 6])
    assert kind != "export" or result["share_followers"] == 1 / 2
    assert (result["plan"] == "the model's own") == (kind == "export")
    dense = 2 * 8 * 308 * 16 * 4  # keys and values of 8 pairs
    stored = sum(
        size for part, size in full["bytes_by_part"].items() if part not in ("decode_buffers", "bookkeeping")
    )
    assert stored == (2 * 8 * 32 * 16 * 4 if kind == "sliding" else dense)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["bench.shapes=null", "model.path=package:tiny", "bench.lengths=[8192]"],
            "exceed the model's 8192 positions",
        ),
        (
            ["bench.batch_sizes=[100000000]"],
            r"batch 100000000 at 8192 tokens: pod needs [\d.]+ GB with the weights and the dense cache",
        ),
        (["bench.methods=pod[tua=0.7]"], "no parameter 'tua'"),
        (["bench.methods=snapkv@20"], "budget = 20 must exceed window"),
        (["model.plan=nowhere.json"], "nowhere.json does not exist"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_measured(tmp_path, monkeypatch, settings, message):
    monkeypatch.setattr(decode_speed, "compare", lambda *_: pytest.fail("measured"))
    with pytest.raises(ValueError, match=message) as caught:
        run.run_bench(recipe_of(tmp_path, *settings))
    assert "\n" not in str(caught.value)


def test_the_stock_model_is_left_out_where_it_does_not_fit(tmp_path, monkeypatch):
    recipe = recipe_of(tmp_path, "bench.lengths=[40,400]", "bench.methods=pod")
    sizes = run.plan_bench(recipe).sizes
    full, own, other = (held_per_row(sizes, one, 408, True) for one in (FULL, POD, STOCK))
    assert needed(sizes, POD, 1, 408, True) == sizes.weights + full + own and own < other
    monkeypatch.setattr("pod.measure.measured_memory.free_memory", lambda _: sizes.weights + full + own + 1)
    reasons = run._check_memory(recipe.bench, sizes, [CPU])
    assert list(reasons) == [(1, 400)] and "are free" in reasons[1, 400]


def test_dry_run_states_bytes_and_ceilings(root):
    text = run.estimate(load_recipe(root / "configs" / "bench_llama3_8b.yaml"))
    assert text.startswith(
        "Plan: generated, 70% of the pairs follow, 0% keep their window; windows of 16 sink and 4080"
    )
    assert "Weights: 16.06 GB, of which a decode step reads 15.01 GB. 179 of 256" in text
    assert "62.364 read  1.343x" in text and "69.391 size" in text
