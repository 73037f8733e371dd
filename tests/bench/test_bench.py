"""Decode speed: the byte model against counting, caches that are filled without a prompt, duels, largest batches."""

import argparse
import importlib
import itertools
import json
import sys
from types import SimpleNamespace

import pytest
import torch

import pod
from pod.bench import decode_speed, run
from pod.bench.args import FULL, SHAPES, BenchArgs, parse_method
from pod.bench.decode_bytes import (
    Sizes,
    ceiling,
    held_per_row,
    read_per_row,
    spread_plan,
    token_bytes,
    weight_bytes,
)
from pod.bench.decode_speed import Bench, fill, make_cache, sizes_of
from pod.bench.dense_decode import PEERS, dense_peers
from pod.modeling.shipped.decode import DECODERS
from pod.modeling.shipped.stores import TokenStore
from pod.recipe import Recipe, field_docs, fields_of, load_recipe

WINDOWS = (2, 6)
LEAD = [[0, 0], [0, 1], [0, 1], [3, 1]]
ROLES = [[0, None], [None, 1], [0, None], [3, 1]]
POD = parse_method("pod")
CPU = torch.device("cpu")


def make_models(lead):
    """Dense and planned model of one set of weights."""
    torch.manual_seed(0)
    return decode_speed.random_models(SHAPES["tiny"], lead, WINDOWS, 4096, torch.float32, CPU)


@pytest.fixture(scope="module")
def models():
    return make_models(LEAD)


@pytest.fixture(scope="module")
def models_with_windows():
    return make_models(ROLES)


@pytest.fixture(autouse=True)
def no_collections(monkeypatch):
    """Collecting garbage takes a second in a process that has loaded everything."""
    monkeypatch.setattr(decode_speed.gc, "collect", lambda: 0)


@pytest.fixture
def bench(models):
    return Bench(dense=models[0], planned=models[1], steps=3, repeats=2)


def stores_of(cache):
    return [store for layer in cache.layers for store in layer.stores().values() if not store.is_empty]


# -- recipe ----------------------------------------------------------------------------------------------------------


def test_methods_are_read_with_their_options():
    method = parse_method("pod+int4  tau=0.7 group_size=16 skip_share=0.25")
    assert (method.spec, method.options, method.skip_share) == (
        "pod+int4",
        {"tau": 0.7, "group_size": 16},
        0.25,
    )
    assert method.name == "pod+int4 tau=0.7 group_size=16 skip_share=0.25"
    assert (
        method.uses_plan
        and not parse_method("int4").uses_plan
        and not parse_method("snapkv budget=9").uses_plan
    )
    assert [m.name for m in BenchArgs(methods=["full", "pod", "pod tau=0.7"]).contestants()] == [
        "pod",
        "pod tau=0.7",
    ]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"methods": ["pot"]}, "unknown method 'pot'; did you mean 'pod'"),
        ({"methods": ["pod tau"]}, "'tau' in 'pod tau' is not name=value"),
        ({"methods": ["pod tau="]}, "is not name=value"),
        ({"methods": ["pod", "pod"]}, "expected different methods"),
        ({"methods": ["full"]}, "at least one besides full"),
        ({"methods": ["pod-unadapted"]}, "write 'pod'"),
        ({"methods": ["pod capacity=9"]}, "leave capacity out"),
        ({"methods": ["pod tau=0.7 skip_share=2"]}, "skip_share = 2"),
        ({"methods": [" "]}, "an empty name"),
        ({"shapes": "llama3-7b"}, "did you mean 'llama3-8b'"),
        ({"shape_changes": {"num_hidden_layers": 2}}, "shape_changes needs shapes"),
        (
            {"shapes": "tiny", "shape_changes": {"num_layers": 2}},
            "unknown size in shape_changes 'num_layers'; did you mean 'num_hidden_layers'",
        ),
        ({"shapes": "tiny", "shape_changes": {"head_dim": 0}}, "shape_changes.head_dim is 0"),
        ({"lengths": [8, 8]}, "lengths is .8, 8., allowed are different"),
        ({"batch_sizes": [0]}, "batch_sizes.0. is 0: it should be greater than 0"),
        ({"steps": 0}, "steps is 0"),
        ({"repeats": 0}, "repeats is 0"),
        ({"share_followers": 1.0}, "share_followers is 1.0"),
        ({"share_followers": 0.5, "share_windows": 0.6}, "share_windows 0.6, together more than 1"),
    ],
)
def test_wrong_values_are_one_line(values, message):
    with pytest.raises(ValueError, match=message) as caught:
        BenchArgs(**values)
    assert "\n" not in str(caught.value)


def test_every_field_is_documented():
    assert set(fields_of(BenchArgs)) == set(field_docs(BenchArgs))


# -- bytes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layers", "heads"), [(32, 8), (4, 2), (1, 3), (5, 3), (2, 1)])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 0.97])
def test_made_up_plans_follow_in_the_share_asked_for(layers, heads, share):
    plan = pod.SharingPlan(lead=spread_plan(layers, heads, share))
    most = (layers - 1) / layers
    assert plan.share_followers == pytest.approx(min(share, most), abs=0.5 / (layers * heads) + 1e-9)
    blocks = [len(plan.blocks(head)) for head in range(heads)]
    assert max(blocks) - min(blocks) <= 1


@pytest.mark.parametrize(("layers", "heads"), [(32, 8), (4, 2), (1, 3), (5, 3), (2, 1)])
@pytest.mark.parametrize("shares", [(0.0, 0.5), (0.3, 0.65), (0.1, 0.3), (0.0, 1.0), (0.5, 0.5)])
def test_made_up_plans_have_the_windows_asked_for(layers, heads, shares):
    pairs, plan = layers * heads, pod.SharingPlan(lead=spread_plan(layers, heads, *shares))
    assert plan.num_windows == round(shares[1] * pairs)
    rows = zip(*plan.lead, strict=True)
    blocks, windows = zip(
        *((len(plan.blocks(h)), row.count(None)) for h, row in enumerate(rows)), strict=True
    )
    assert max(blocks) - min(blocks) <= 1 >= max(windows) - min(windows)
    wanted = pairs - plan.num_windows - round(shares[0] * pairs)
    assert plan.num_leads == max(wanted, sum(count < layers for count in windows))


def counted(lead, length, groups, head_dim, element, windows, method):
    """Bytes of a step for one row, by walking over every pair and token."""
    skips = round(method.skip_share * sum(a not in (i, None) for i, row in enumerate(lead) for a in row))
    total = 0
    for layer, row in enumerate(lead):
        for head, own in enumerate(row):
            leads = not method.uses_plan or own == layer
            above = next((row[head] for row in lead[layer + 1 :] if row[head] is not None), None)
            has_users = own is not None and above == own
            sees_window_only = method.uses_plan and own is None
            skip = not leads and not sees_window_only and skips > 0
            skips -= skip
            for token in range(length):
                distant = windows[0] <= token < length - windows[1]
                if distant and sees_window_only:
                    continue
                total += 0 if distant and skip else head_dim * element  # value
                total += head_dim * element if leads or not distant else 0  # key
                if distant and method.uses_plan and not skip and (not leads or has_users):
                    total += 4 * groups  # logits
    return total


@pytest.mark.parametrize("length", [1, 7, 8, 9, 100])
@pytest.mark.parametrize("text", ["full", "pod", "pod tau=0.7 skip_share=0.5", "pod tau=0.7 skip_share=1"])
@pytest.mark.parametrize("lead", [LEAD, ROLES])
def test_bytes_of_a_step_are_those_counted(length, text, lead):
    sizes = Sizes(tuple(map(tuple, lead)), 3, 16, 2, 1000, 900, *WINDOWS)
    method = parse_method(text)
    expected = counted(lead, length, 3, 16, 2, WINDOWS, method)
    assert read_per_row(sizes, method, length) == pytest.approx(expected, rel=1e-12)
    full = counted(lead, length, 3, 16, 2, WINDOWS, FULL)
    assert ceiling(sizes, method, FULL, length, 5) == pytest.approx((900 + 5 * full) / (900 + 5 * expected))


def test_packed_tokens_cost_their_codes_and_their_groups():
    sizes = Sizes(tuple(map(tuple, LEAD)), 2, 128, 2, 0, 0, *WINDOWS)
    assert token_bytes(sizes, parse_method("int4"), 10**9) == pytest.approx(128 * 5 / 8, rel=1e-5)  # 5 bits
    assert token_bytes(sizes, parse_method("int8 group_size=64"), 10**9) == pytest.approx(
        128 * 8.5 / 8, rel=1e-5
    )
    assert token_bytes(sizes, parse_method("int4"), 100) == 256, "the newest tokens are native"
    assert ceiling(sizes, parse_method("snapkv budget=9"), FULL, 100, 1) is None


def test_ceilings_at_llama3_8b_shapes_are_those_promised():
    """1.34x at batch 4, 1.20x at batch 1; largest batches 1.27, 1.30, 1.36, 1.41x for a window of 4,096."""
    config = SimpleNamespace(tie_word_embeddings=False, **SHAPES["llama3-8b"])
    held, read = weight_bytes(config, 2)
    assert held / 2 == pytest.approx(8.03e9, rel=1e-3) and held - read == 2 * 128256 * 4096
    lead = tuple(map(tuple, spread_plan(32, 8, 0.7)))
    sizes = Sizes(lead, 4, 128, 2, held, read, 16, 4080)
    assert ceiling(sizes, POD, FULL, 131072, 4) == pytest.approx(1.34, abs=0.005)
    assert ceiling(sizes, POD, FULL, 131072, 1) == pytest.approx(1.20, abs=0.005)
    for prompt, ratio in ((2048, 1.27), (4096, 1.30), (8192, 1.36), (16384, 1.41)):
        n = prompt + 8192
        assert held_per_row(sizes, FULL, n) / held_per_row(sizes, POD, n) == pytest.approx(ratio, abs=0.006)


@pytest.mark.parametrize("lead", [LEAD, ROLES])
def test_bytes_held_are_those_of_a_real_cache(lead):
    models = make_models(lead)
    bench = Bench(dense=models[0], planned=models[1])
    weights = sum(p.nbytes for p in models[1].parameters()) - sum(
        p.nbytes for name, p in models[1].named_parameters() if "norm" in name
    )
    assert bench.sizes.weights == weights
    assert bench.sizes.weights - bench.sizes.read == models[1].model.embed_tokens.weight.nbytes
    for text in ("full", "pod"):
        method = parse_method(text)
        cache, _ = make_cache(bench.model_of(method), method, 512, "auto")
        fill(bench.model_of(method), cache, 3, 100)
        cache.engine.greedy(bench.model_of(method), torch.zeros(3, 1, dtype=torch.long), 1)
        parts = cache.nbytes_by_part()
        buffers = parts.pop("decode_buffers")
        parts.pop("bookkeeping")
        held = 3 * held_per_row(bench.sizes, method, 512, on_cpu=True)
        logits = 3 * 4 * 512 * 4 * 2  # rows, query heads, tokens, bytes, and their exponentials on a CPU
        assert sum(parts.values()) == held - logits
        assert logits <= buffers < 1.1 * logits + 10_000
        assert held - 3 * held_per_row(bench.sizes, method, 512) == logits / 2
    tied = SimpleNamespace(**{**vars(models[0].config), "tie_word_embeddings": True})
    assert weight_bytes(tied, 4) == (bench.sizes.read, bench.sizes.read)


# -- caches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 5, 8, 9, 70, 300])
def test_filled_caches_have_random_numbers_in_every_used_slot(
    models, models_with_windows, monkeypatch, length
):
    monkeypatch.setattr(decode_speed, "_CHUNK", 64 * 2 * 2 * 16)  # 64 tokens at a time
    written, append = {}, TokenStore.append

    def recorded(store, x, past):
        written.setdefault(id(store), set()).update(range(past, past + x.shape[2]))
        append(store, x, past)

    monkeypatch.setattr(TokenStore, "append", recorded)
    for model, text in zip((*models, models_with_windows[1]), ("full", "pod", "pod"), strict=True):
        written.clear()  # addresses are used again
        cache, note = make_cache(model, parse_method(text), 400, "auto")
        fill(model, cache, 2, length)
        assert note is None and cache.get_seq_length() == length and cache.lengths.tolist() == [length] * 2
        for store in stores_of(cache):
            used = store.data[:, :, : store.used_slots(length)]
            assert (used != 0).all() and not (store.data[:, :, store.used_slots(length) :] != 0).any()
            sinks, recent = WINDOWS if store.has_window else (0, length)
            assert written[id(store)] >= {*range(min(sinks, length)), *range(max(0, length - recent), length)}
            assert len(written[id(store)]) < 300 or not store.has_window, (
                "old tokens of a window are not made"
            )


@pytest.mark.parametrize("text", ["full", "pod", "pod tau=0.7 skip_share=0.5"])
@pytest.mark.parametrize("lead", [LEAD, ROLES])
def test_the_engine_on_a_filled_cache_decodes_as_the_ordinary_pass(text, lead):
    method, (dense, planned) = parse_method(text), make_models(lead)
    bench = Bench(dense=dense, planned=planned)
    model, found = bench.model_of(method), []
    for capacity in (64, None):
        options = {} if capacity is None else {"capacity": capacity}
        cache = pod.make_cache(model, method.spec, **options, **method.options)
        fill(model, cache, 2, 40, method.skip_share)
        runner = decode_speed._warmed(decode_speed.Runner(text, model, cache, method=method), 2)
        runner.decode(5)
        assert runner.length == 40 + 2 + 5
        with torch.no_grad():
            found.append(model(torch.tensor([[7], [8]]), past_key_values=cache).logits)
    assert (found[0] - found[1]).abs().max() < 1e-4 * found[1].abs().max()


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_the_share_asked_for_passes_the_gate(models, share):
    """A pair whose whole group passes reads no distant value: NaN there does not show."""
    model = models[1]
    pairs = [(i, h) for i, row in enumerate(LEAD) for h, own in enumerate(row) if own != i]
    unread = 0
    for layer, head in pairs:
        cache = pod.make_cache(model, "pod", capacity=64, tau=0.7)
        fill(model, cache, 1, 60, share)
        cache.layers[layer].all_values.data[:, head, WINDOWS[0] : 50] = float("nan")
        with torch.no_grad():
            unread += bool(model(torch.tensor([[3]]), past_key_values=cache).logits.isfinite().all())
    assert unread == share * len(pairs)


@pytest.mark.parametrize("spec", ["pod+int4 group_size=16", "int8 group_size=16", "snapkv budget=40"])
def test_what_the_engine_does_not_serve_runs_through_the_ordinary_cache_and_says_so(bench, spec):
    method = parse_method(spec)
    runner = decode_speed.start_runner(bench, method, 2, 200, 250, "auto")
    has_engine = runner.cache.engine is not None
    assert has_engine == (runner.note is None) and runner.length == 200
    assert has_engine or runner.note.startswith("ordinary cache, no engine: ")
    assert runner.decode(3) > 0 and runner.length == 203
    assert bench.dense.config.attention_backend == bench.planned.config.attention_backend == "auto"
    if not spec.startswith("snapkv"):
        full = decode_speed.start_runner(bench, FULL, 2, 200, 250, "auto")
        assert runner.cache.nbytes < 0.8 * full.cache.nbytes


def test_stock_model_is_the_dense_model(models):
    ids = torch.randint(258, (2, 30), generator=torch.Generator().manual_seed(1))
    stock = decode_speed.stock_model(models[0])
    with torch.no_grad():
        ours, theirs = models[0](ids).logits, stock(ids).logits
    assert (ours - theirs).abs().max() < 1e-5
    assert stock.lm_head.weight.data_ptr() == models[0].lm_head.weight.data_ptr(), "the same weights, once"
    assert models[1].lm_head.weight.data_ptr() == models[0].lm_head.weight.data_ptr()
    config = pod.PodConfig(**(models[0].config.to_dict() | {"attention_qkv_bias": True}))
    assert decode_speed.stock_model(SimpleNamespace(config=config)) is None


# -- duels -----------------------------------------------------------------------------------------------------------


class Clock:
    """Seconds by name in place of a stop watch, and who ran when."""

    def __init__(self, monkeypatch, seconds):
        self.turns, self.lengths, self.seconds = [], {}, seconds
        real = decode_speed.Runner.decode

        def decode(runner, steps):
            real(runner, steps)
            self.turns.append((runner.name, runner.backend, steps))
            self.lengths.setdefault(runner.name, []).append(runner.length)
            return self.seconds[runner.name, runner.backend]

        monkeypatch.setattr(decode_speed.Runner, "decode", decode)


def test_a_duel_is_fair_and_its_figures_follow_from_its_seconds(bench, monkeypatch):
    clock = Clock(monkeypatch, {("full", "grouped"): 2.0, ("pod", "auto"): 0.5, ("pod tau=0.7", "auto"): 4.0})
    bench.full_backend = "grouped"
    methods = [POD, parse_method("pod tau=0.7")]
    found = decode_speed.compare(bench, methods, 2, 50)
    row = found["methods"]["pod"]
    assert (
        row["tokens_per_second"]["median"] == 3 * 2 / 0.5 and row["full_tokens_per_second"]["median"] == 3.0
    )
    assert row["speed_over_full"] == {"median": 4.0, "min": 4.0, "max": 4.0, "repeats": 2}
    assert found["methods"]["pod tau=0.7"]["speed_over_full"]["median"] == 0.5
    assert row["length"] == 50
    middle = (50 + 59) // 2
    limit = ceiling(bench.sizes, POD, FULL, middle, 2)
    assert row["byte_ceiling"] == limit and row["share_of_ceiling"] == 4.0 / limit
    assert row["bytes_per_second"] == pytest.approx(row["bytes_per_step"] * 6)
    assert row["full_bytes_per_second"] == pytest.approx(row["full_bytes_per_step"] * 1.5)
    names = [name for name, _, steps in clock.turns if steps == 3]
    assert names[:6] == ["full", "pod", "pod", "full", "full", "pod"]
    # both stand at the same length in every round, and nothing had to grow
    assert clock.lengths["pod"][1:] == clock.lengths["full"][1:4]
    assert clock.lengths["pod tau=0.7"][1:] == clock.lengths["full"][4:]
    capacity = 50 + 2 * 3 * 3
    assert row["bytes_by_part"]["values"] == 2 * 8 * capacity * 16 * 4
    assert found["full"]["bytes_by_part"]["keys"] == 2 * 8 * capacity * 16 * 4


def test_the_dense_cache_takes_its_fastest_backend(bench, monkeypatch):
    clock = Clock(monkeypatch, {("full", "grouped"): 2.0, ("full", "sdpa"): 1.0, ("full", "slow"): 3.0})

    def broken(call):
        raise RuntimeError("no such\nkernel")

    with dense_peers():
        monkeypatch.setitem(DECODERS, "broken", DECODERS["grouped"]._replace(run=broken))
        monkeypatch.setitem(DECODERS, "slow", DECODERS["grouped"])
        bench.skip = {"full slow": "left out"}
        name, tried = decode_speed.fastest_backend(bench, 1, 40)
        assert name == "sdpa" and tried["sdpa"] == 1.0 / 8 and tried["grouped"] == 2.0 / 8
        assert tried["broken"] == "RuntimeError: no such kernel" and tried["slow"] == "left out"
        assert (
            "cannot run" in tried["triton"]
            and "cannot run" in tried["flash_attn"]
            and "reference" not in tried
        )
        clock.seconds["full", "grouped"] = 0.5
        assert decode_speed.fastest_backend(bench, 1, 40)[0] == "grouped"
    assert not set(PEERS) & set(DECODERS)


def test_dense_peers_compute_dense_attention_and_nothing_else(bench):
    found = []
    with dense_peers():
        for backend in ("grouped", "sdpa"):
            cache, _ = make_cache(bench.dense, FULL, 64, backend)
            fill(bench.dense, cache, 2, 30)
            with torch.no_grad():
                found.append(bench.dense(torch.tensor([[4], [5]]), past_key_values=cache).logits)
        assert (found[0] - found[1]).abs().max() < 1e-5
        cache, _ = make_cache(bench.planned, POD, 64, "sdpa")
        fill(bench.planned, cache, 2, 30)
        with (
            torch.no_grad(),
            pytest.raises(ValueError, match="'sdpa' cannot run: it serves dense caches only"),
        ):
            bench.planned(torch.tensor([[4], [5]]), past_key_values=cache)


def test_one_that_fails_does_not_stop_the_others(bench, monkeypatch):
    bench.full_backend, bench.backend = "grouped", "auto"
    bad, late = parse_method("pod tau=7"), parse_method("int8 group_size=16")
    asked = iter([False, False, True])
    bench.skip = {"pod tau=0.5": "skipped"}
    methods = [bad, parse_method("pod tau=0.5"), POD, late]
    found = decode_speed.compare(bench, methods, 1, 40, lambda: next(asked))["methods"]
    assert "tau = 7" in found["pod tau=7"]["error"] and found["pod tau=0.5"] == {"error": "skipped"}
    assert found["pod"]["engine"] and found["pod"]["note"] is None
    assert "the time for this benchmark was up" in found[late.name]["error"]
    text = run.table(decode_speed.compare(bench, [bad, POD], 1, 40))
    assert "pod tau=7                failed: pod: tau = 7" in text


# -- launcher --------------------------------------------------------------------------------------------------------

TINY = [
    "bench.shapes=tiny",
    "model.num_sink_tokens=2",
    "model.num_recent_tokens=6",
    "bench.repeats=1",
    "bench.steps=2",
]


def recipe_of(tmp_path, *settings) -> Recipe:
    return load_recipe(None, [f"output_dir={tmp_path}", *TINY, *settings])


def test_a_run_writes_and_prints_every_setting(tmp_path, capsys):
    recipe = recipe_of(
        tmp_path, "bench.lengths=[40]", "bench.batch_sizes=[1,2]", "bench.methods=pod,pod tau=0.7"
    )
    run.run_bench(recipe)
    written = json.loads((tmp_path / "bench" / "bench.json").read_text())
    assert [(s["batch"], s["length"]) for s in written["settings"]] == [(1, 40), (2, 40)]
    for setting in written["settings"]:
        assert set(setting["methods"]) == {"pod", "pod tau=0.7", "transformers"}
        assert all(row["speed_over_full"]["repeats"] == 1 for row in setting["methods"].values())
    assert written["share_followers"] == 0.75 and "follower" in written["byte_model"]
    output = capsys.readouterr().out
    assert "batch 2, 40 tokens; full holds" in output and "pod tau=0.7" in output


def test_a_model_of_ones_own_with_a_plan(tmp_path):
    pod.SharingPlan(lead=LEAD).save(tmp_path / "p.json")
    settings = ["bench.shapes=null", "model.path=package:tiny", f"model.plan={tmp_path / 'p.json'}"]
    settings += ["bench.lengths=[40]", "bench.methods=pod", "bench.full_backend=grouped"]
    result = run.run_bench(recipe_of(tmp_path, *settings))
    assert result["plan"] == str(tmp_path / "p.json") and result["share_followers"] == 1 / 2
    assert "error" not in result["settings"][0]["methods"]["pod"]
    assert "error" not in result["settings"][0]["methods"]["transformers"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["bench.shapes=null", "model.path=package:tiny", "bench.lengths=[8192]"],
            "pass the model's 8192 positions",
        ),
        (
            ["bench.batch_sizes=[100000000]"],
            r"batch 100000000 at 8192 tokens needs [\d.]+ GB \(weights .*full .*pod ",
        ),
        (["bench.methods=pod tua=0.7"], "no parameter 'tua'"),
        (["bench.backend=tritn"], "bench.backend is 'tritn', allowed: auto"),
        (["bench.full_backend=sdp"], "bench.full_backend is 'sdp', allowed: fastest"),
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
    assert decode_speed.most_bytes({"weights": 1.0, "full": 2.0, "pod": 3.0, "int4": 4.0}) == 7.0
    sizes = run._sizes(recipe)
    needed = decode_speed.bytes_needed(sizes, recipe.bench.contestants(), 1, 400 + 8, True)
    monkeypatch.setattr("pod.measure.memory.free_memory", lambda _: decode_speed.most_bytes(needed) + 1)
    reasons = run._check_memory(recipe, CPU)
    assert list(reasons) == [(1, 400)] and "are free" in reasons[1, 400]


def test_dry_run_states_bytes_and_ceilings(root):
    text = run.estimate(load_recipe(root / "configs" / "bench_llama3_8b.yaml"))
    assert "Weights: 16.06 GB, of which a decode step reads 15.01 GB. 179 of 256" in text
    assert "62.364 read  1.343x" in text and "69.391 held" in text


# -- benchmarks ------------------------------------------------------------------------------------------------------


@pytest.fixture
def script(root, monkeypatch):
    """`script("max_batch")` imports a benchmark."""
    monkeypatch.setattr(sys, "path", [str(root / "benchmarks"), *sys.path])
    return importlib.import_module


def test_tokens_per_second_tiny(script, tmp_path, monkeypatch):
    module = script("tokens_per_second")
    out = tmp_path / "x.json"
    arguments = argparse.Namespace(tiny=True, out=out, failed={"batch 2: pod": "broke"}, budget=1000.0)
    sizes = module.setting_of(True) | {"extras": ["pod tau=0.7"], "length": 70}
    monkeypatch.setattr(module, "setting_of", lambda tiny: sizes)
    assert module.main(arguments) == 0
    found = json.loads(out.read_text())
    assert {"environment", "rows", "parts"} <= set(found)
    assert found["parts"]["batch 2"]["methods"]["pod"] == {"error": "broke"}
    names = [row["name"] for row in found["rows"]]
    assert len(names) == 3 and all(row["met"] is None for row in found["rows"])
    assert found["rows"][0]["figure"] is None and found["rows"][1]["figure"] > 0
    # a second start in the same place measures nothing again; `failed` says that it is the same run
    monkeypatch.setattr(module, "measure", lambda *_: pytest.fail("measured again"))
    assert module.main(arguments) == 0


def test_max_batch_tiny(script, models, bench):
    module = script("max_batch")
    one = module.Tries(bench, POD, 64, None)
    assert one.fits(1) and one.fits(2)
    row = one.peaks[2] - one.peaks[1]
    assert row == pytest.approx(held_per_row(bench.sizes, POD, 64, on_cpu=True), rel=0.2), (
        "nothing had to grow"
    )
    budget = int(one.peaks[1] + 6.5 * row)
    found = module.measure(bench, 64, budget, budget)
    assert found["methods"]["pod"]["batch"] == 7 and found["methods"]["pod"][
        "fractional_batch"
    ] == pytest.approx(7.5, abs=0.01)
    assert found["theory"] == pytest.approx(1 / (1 - 4 / 16 * (64 - 8) / 64))
    assert (
        found["ratio"] == pytest.approx(found["theory"], rel=0.1)
        and found["whole_ratio"] == 7 / found["methods"]["full"]["batch"]
    )
    lower = module.Tries(bench, FULL, 64, budget)
    assert [
        lower.fits(b) for b in (found["methods"]["full"]["batch"], found["methods"]["full"]["batch"] + 1)
    ] == [True, False]
    row = module.row_of(found, 32, 32, False)
    assert row["met"] is (found["ratio"] / found["theory"] >= 0.97)
    with pytest.raises(ValueError, match="not one row of 64 tokens fits"):
        module.measure(bench, 64, budget, bench.sizes.weights)


def test_all_sizes_agree(models):
    """The estimate of a recipe and the models that are measured speak of the same bytes."""
    recipe = load_recipe(None, TINY)
    lead = spread_plan(4, 2, 0.7)
    torch.manual_seed(0)
    planned = pod.load_model(models[0], plan=pod.SharingPlan(lead=lead))
    assert run._sizes(recipe) == sizes_of(planned.config, 4)
    assert list(itertools.chain(*lead)).count(0) >= 2
