"""CUDA graphs and fused kernels in `pod bench`.

Every entry of a race that can have them has them. Every row says which it had, and a ratio without both
stands beside it. Graphs and kernels are counted stand-ins on the CPU.
"""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from pod.bench import decode_speed, run
from pod.bench.args import STOCK, bench_method
from pod.bench.dense_decode import dense_peers
from pod.engine import decode_engine as engine_module
from pod.kernels import fused
from pod.measure.speed_comparison import RaceEntry
from pod.modeling.model.decode import RECORDABLE
from pod.recipe import load_recipe

LEAD = [[0, 0], [0, 1], [0, 1], [3, 1]]
SETTINGS = [
    "bench.shapes=tiny",
    "model.num_sink_tokens=2",
    "model.num_recent_tokens=6",
    "bench.steps=3",
    "bench.repeats=2",
    "bench.methods=pod,snapkv@40",
]
POD, SNAPKV = bench_method("pod"), bench_method("snapkv@40")


@pytest.fixture
def gpu(monkeypatch):
    """Count graphs and fused kernels.

    Graphs run what they recorded, and fused kernels compute what the plain form does.
    """
    counts = SimpleNamespace(recorded=0, replayed=0, fused=0)

    def record(steps, restart):
        counts.recorded += 1
        restart()
        out = steps()
        restart()

        def replay():
            counts.replayed += 1
            steps()

        return SimpleNamespace(replay=replay), out

    def gate(*tensors):
        counts.fused += 1
        return fused.REFERENCE.gate(*tensors)

    kernels = fused.REFERENCE._replace(gate=gate)

    def choose(x, backend="auto"):
        return kernels if backend in ("auto", "triton") else fused.REFERENCE

    def obstacle(bound):
        known = all(layer.can_be_recorded() for layer in bound.step.layers)
        return None if known else "the decode kernel asks the device for lengths"

    monkeypatch.setattr(engine_module, "_record", record)
    monkeypatch.setattr(engine_module._Bound, "obstacle_to_recording", obstacle)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(fused, "choose", choose)
    monkeypatch.setattr(decode_speed, "races_on", lambda device: 2)
    monkeypatch.setattr("gc.collect", lambda: 0)
    RECORDABLE.add("grouped")  # in place of our kernel, which needs a GPU
    with dense_peers():
        yield counts
    RECORDABLE.discard("grouped")


@pytest.fixture
def bench():
    recipe = load_recipe(None, SETTINGS)
    return run.load(recipe, run.plan_bench(recipe), [torch.device("cpu")])


@pytest.mark.parametrize("backend", ["auto", "sdpa"])
def test_the_dense_cache_has_graph_and_fused_kernels_with_every_backend(gpu, bench, backend):
    one, _ = decode_speed.make_entry(bench, decode_speed.FULL, 1, 60, 100, backend)
    assert decode_speed.why_slower_path(one) == {"no_graph": None, "no_fused": None}
    assert one.cache.engine.graphs == 1 == gpu.recorded
    gpu.replayed = gpu.fused = 0
    one.decode(3)
    assert (gpu.replayed, gpu.fused) == (3, 3 * 4)  # layers


def test_a_plain_engine_finds_the_same_tokens_without_both(gpu, bench):
    found = []
    for plain in (False, True):
        torch.manual_seed(0)
        one, _ = decode_speed.make_entry(bench, POD, 2, 60, 100)
        one.cache.engine.plain = plain
        gpu.replayed = gpu.fused = 0
        found.append(one.cache.engine.greedy(one.model, torch.zeros(2, 1, dtype=torch.long), 5))
        assert (gpu.replayed, gpu.fused) == ((0, 0) if plain else (5, 5 * 4))
    assert torch.equal(*found)
    assert decode_speed.why_slower_path(one) == {"no_graph": "switched off", "no_fused": "switched off"}
    one.cache.engine.plain = False
    one.decode(2)
    assert decode_speed.why_slower_path(one) == {"no_graph": None, "no_fused": None} and gpu.replayed == 2
    assert one.cache.engine.graphs == 1, "the graph of before serves again"


def timed(monkeypatch, seconds):
    """Replace the stop watch: seconds come by name and by whether the engine was plain.

    Also keeps the lengths at every timed end.
    """
    lengths, real = {}, RaceEntry.decode

    def decode(one, steps):
        real(one, steps)
        engine = getattr(one.cache, "engine", None)
        lengths.setdefault(one.name, []).append(one.cache.get_seq_length())
        return seconds[one.name, engine is not None and engine.plain]

    monkeypatch.setattr(RaceEntry, "decode", decode)
    return lengths


def test_a_ratio_without_both_stands_beside(gpu, bench, monkeypatch):
    seconds = {
        ("full", False): 1.0,
        ("pod", False): 0.5,
        ("snapkv@40", False): 2.0,
        ("transformers", False): 9.0,
    }
    seconds |= {("full", True): 6.0, ("pod", True): 4.0}
    lengths = timed(monkeypatch, seconds)
    found = decode_speed.compare(bench, [POD, SNAPKV, STOCK], 1, 60, "sdpa")
    rows = found["methods"]
    ratios = {name: row["speed_over_full"]["median"] for name, row in rows.items()}
    alike = {name: row["like_for_like"]["speed_over_full"]["median"] for name, row in rows.items()}
    assert ratios == {"pod": 2.0, "snapkv@40": 0.5, "transformers": 1.0 / 9.0}
    assert alike == {"pod": 1.5, "snapkv@40": 3.0, "transformers": 6.0 / 9.0}
    assert (found["full"]["no_graph"], found["full"]["no_fused"]) == (None, None)
    assert (rows["pod"]["no_graph"], rows["pod"]["no_fused"]) == (None, None)
    for name in ("snapkv@40", "transformers"):
        assert rows[name]["no_graph"] and rows[name]["no_fused"]
    # two races of three rounds of three tokens, both at the same length, in the room that was reserved
    assert lengths["pod"][1:] == lengths["full"][1:7] == [63, 66, 69, 72, 75, 78]
    assert (
        lengths["transformers"][-1] == lengths["full"][-1] == 60 + 3 * 2 * 9 == bench.args.capacity_for(60, 2)
    )
    assert gpu.recorded == 2, "one graph of full and one of pod: nothing moved, nothing was recorded again"


def test_the_table_says_who_had_what(gpu, bench, monkeypatch):
    seconds = dict.fromkeys(
        [(name, plain) for name in ("full", "pod", "snapkv@40") for plain in (False, True)], 1.0
    )
    timed(monkeypatch, seconds)
    text = run.table(decode_speed.compare(bench, [POD, SNAPKV], 1, 60, "sdpa"))
    assert "attention backend: sdpa, graph: yes, fused: yes\n" in text
    head, pod, snapkv, *reasons = text.splitlines()[1:]
    place = slice(head.index("graph"), head.index("x alike"))
    assert pod[place].split() == ["yes", "yes"] and snapkv[place].split() == ["no", "no"]
    assert reasons == [
        "  no graph: snapkv@40: it has no decode engine, and its passes wait for the host",
        "  no fused kernels: snapkv@40: its modules run one by one",
    ]


def test_where_there_are_none_one_race_is_enough(bench, monkeypatch):
    timed(monkeypatch, {("full", False): 1.0, ("pod", False): 0.5})
    found = decode_speed.compare(bench, [POD], 1, 60, "grouped")
    assert "like_for_like" not in found["methods"]["pod"]
    assert found["full"]["no_graph"] == "there are none on a cpu" == found["methods"]["pod"]["no_graph"]
    assert "graph: no (there are none on a cpu)" in run.table(found)


def test_one_that_fails_without_them_keeps_its_figures(gpu, bench, monkeypatch):
    real = RaceEntry.decode

    def decode(one, steps):
        if one.name == "pod" and one.cache.engine.plain:
            raise RuntimeError("no room\nleft")
        return real(one, steps)

    monkeypatch.setattr(RaceEntry, "decode", decode)
    row = decode_speed.compare(bench, [POD], 1, 60, "sdpa")["methods"]["pod"]
    assert row["like_for_like"] == {"error": "RuntimeError: no room left"}
    assert row["speed_over_full"]["repeats"] == 2 and row["bytes"] > 0


@pytest.mark.parametrize(
    ("packages", "attention"), [({"flash-attn-4"}, "sdpa"), ({"flash-attn"}, "flash_attention_2")]
)
def test_the_stock_model_takes_flash_attn_where_it_is(monkeypatch, packages, attention):
    """Not where only flash-attn-4 is, whose modules lie in a folder of the same name."""
    monkeypatch.setattr(run, "version", lambda name: "1" if name in packages else None)
    assert run.stock_attention(torch.device("cuda")) == attention
    assert run.stock_attention(torch.device("cpu")) == "sdpa"
