"""Runs of models that lie on two simulated devices, started as a script: see `simulated_runs.py`.

Each run is done on the CPU first, then with the layers on "sim:0" and "sim:1", which raise an error where
tensors of the two meet.
"""

import contextlib
import copy
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import simulated_device
import torch
from conftest import FAMILIES, LEAD, lead_for, make_pod, make_stock, random_ids
from method_table import ROWS, Row
from peft import LoraConfig, get_peft_model
from simulated_runs import (
    answer_of,
    conversation,
    evaluated,
    evaluations_compared,
    explored,
    generated,
    largest_difference,
    model_of,
    serve,
    with_room_to_pack,
)
from torch import nn
from transformers.dynamic_module_utils import get_class_from_dynamic_module

import pod
from pod.bench import run as bench_run
from pod.modeling.model.sink_constants import SinkConstants
from pod.modeling.placement import dispatch, is_spread, module_names, named, places_of
from pod.recipe import load_recipe

HALVES = "00111"
"""The device of each layer: the border cuts the block of head 0 and that of head 1."""
BY_TURNS = "01011"
"""The same for layers that do not stand side by side."""


def on_both(model: nn.Module, layers: str = HALVES, end: str = "") -> nn.Module:
    """A copy with its layers on the two devices; norm and output weights lie on ``end``, or with the last."""
    config = model.config
    devices = [torch.device("sim", int(number)) for number in ("0", *layers, end or layers[-1])]
    places = named(module_names(config), devices, config.tie_word_embeddings)
    return dispatch(copy.deepcopy(model), places)


def devices_of(cache: Any) -> list[str]:
    """The devices on which tokens of the cache lie."""
    return sorted(key for key, size in cache.nbytes_by_device().items() if size)


def methods() -> Iterator[dict]:
    """Every method and composition: a padded prompt, a chunk and tokens, saved and loaded between two of
    them."""
    models: dict[str, tuple[nn.Module, nn.Module]] = {}
    for row in (*ROWS, *with_room_to_pack()):
        if row.model not in models:
            model = model_of(row)
            models[row.model] = model, on_both(model)
        made: list[Any] = []

        def make_cache(model: nn.Module, row: Row = row, made: list = made) -> object:
            made.append(pod.make_cache(model, row.spec, **row.options))
            return made[-1]

        one, two = models[row.model]
        found = [conversation(one, make_cache, "cpu"), conversation(two, make_cache, "sim:0")]
        yield answer_of(row.id, *found) | {"devices": devices_of(made[-1])}


def layouts() -> Iterator[dict]:
    """What a model holds of itself, by turns too: greedy tokens and beams behind a conversation, of a padded
    batch."""
    specs = "full", "pod", "cla", "window", "pod+int4", "cla+int4", "pod+snapkv", "pod+quest"
    rows = {row.id: row for row in ROWS}
    for spec in specs:
        row = rows[spec]
        model = model_of(row)

        def make_cache(model: nn.Module, row: Row = row) -> object:
            return pod.make_cache(model, row.spec, **row.options)

        expected = generated(model, make_cache, "cpu", 3)
        for layers in (HALVES, BY_TURNS):
            found = generated(on_both(model, layers), make_cache, "sim:0", 3)
            yield answer_of(f"{spec}, layers on {layers}", expected, found)


def families() -> Iterator[dict]:
    """Every family from a folder, weights read to their devices: logits with padding and documents, without a
    cache."""
    for family in FAMILIES:
        stock = make_stock(family)
        plan = pod.SharingPlan(lead_for(stock))
        options = {"plan": plan, "num_sink_tokens": 4, "num_recent_tokens": 11, "dtype": torch.float64}
        with tempfile.TemporaryDirectory() as folder:
            stock.save_pretrained(folder)
            one = pod.load_model(folder, **options)
            two = pod.load_model(folder, device_map="balanced", **options)
        results = []
        for model, device in ((one, "cpu"), (two, "sim:0")):
            ids, mask = random_ids(2, 30).to(device), torch.ones(2, 30, dtype=torch.long)
            mask[1, :7] = 0
            doc_ids = torch.arange(30).expand(2, -1) // 17
            with torch.no_grad():
                padded = model(
                    ids, attention_mask=mask.to(device), use_cache=False, output_hidden_states=True
                )
                packed = model(ids, doc_ids=doc_ids.to(device), labels=ids, use_cache=False)
            logits = [padded.logits, padded.hidden_states[2], packed.logits, packed.loss[None]]
            results.append({"logits": logits, "reads": {}})
        yield answer_of(family, *results) | {"devices": sorted({str(one) for one in places_of(two)})}


def bytes_of(model: nn.Module, layers: str) -> dict[str, Any]:
    """Bytes by device after the same prompt: of the spread cache, and those of each layer of a whole one
    added up."""
    whole, spread = pod.make_cache(model), on_both(model, layers)
    cache = pod.make_cache(spread)
    with torch.no_grad():
        model(random_ids(2, 40), past_key_values=whole)
        spread(random_ids(2, 40).to("sim:0"), past_key_values=cache)
    planned = {"sim:0": whole.nbytes_by_part()["bookkeeping"], "sim:1": 0}
    for layer, number in zip(whole.layers, layers, strict=True):
        planned[f"sim:{number}"] += sum(tensor.untyped_storage().nbytes() for _, tensor in layer.parts())
    return {"found": cache.nbytes_by_device(), "planned": planned, "total": cache.nbytes}


def bytes_by_device() -> Iterator[dict]:
    """Where a cache lies."""
    for name, plan in (("pod", True), ("dense", False)):
        for layers in (HALVES, BY_TURNS):
            yield {"name": f"{name}, {layers}", **bytes_of(make_pod("llama", plan=plan), layers)}


def saved_and_moved() -> Iterator[dict]:
    """A cache that one device saved, read by a model on two, and the other way round."""
    model = make_pod("llama")
    spread = on_both(model)
    ids = random_ids(2, 40)
    for name, first, second in (("to two", model, spread), ("to one", spread, model)):
        device = "cpu" if second is model else "sim:0"
        cache = pod.make_cache(first)
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            first(ids[:, :39].to(first.device), past_key_values=cache)
            pod.save_cache(first, cache, Path(folder, "cache"))
            moved = pod.load_cache(second, Path(folder, "cache"))
            found = second(ids[:, 39:].to(device), past_key_values=moved).logits[:, -1]
            expected = model(ids, use_cache=False).logits[:, -1]
        yield {
            "name": name,
            "difference": largest_difference([expected], [found]),
            "same tokens": True,
            "devices": devices_of(moved),
        }


def exported() -> Iterator[dict]:
    """An export whose code runs in plain transformers, by the map that transformers makes of it."""
    model = make_pod("llama", use_cache=True)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        # as AutoModelForCausalLM does where this package is not installed
        of_export = get_class_from_dynamic_module("llama.PodForCausalLM", folder)
        places = dict(zip(module_names(model.config), [f"sim:{i}" for i in "00011111"], strict=True))
        spread = of_export.from_pretrained(folder, dtype=torch.float64, device_map=places)
    ids = random_ids(2, 30)
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    with torch.no_grad():
        expected = {"logits": [model(ids).logits], "tokens": [model.generate(ids, **options)]}
        there = ids.to("sim:0")
        found = {
            "logits": [spread(there).logits],
            "tokens": [spread.generate(there, **options)],
            "reads": {},
        }
    assert isinstance(spread, nn.Module) and not isinstance(spread, type(model)), "the export's own code"
    yield answer_of("export", expected, found) | {
        "devices": sorted({str(x.device) for x in spread.parameters()})
    }


def refused() -> Iterator[dict]:
    """What does not work on two devices says so."""
    model = make_pod("llama", plan=False)
    said = {}
    for layers in ("00011", HALVES):
        try:
            pod.make_cache(on_both(model, layers), "minicache", share=0.1)
        except ValueError as error:
            said[layers] = str(error)
    yield {"minicache": said}


def engine() -> Iterator[dict]:
    """The decode engine steps aside, with the same tokens."""
    model = make_pod("llama", use_cache=True)
    spread, ids = on_both(model), random_ids(2, 20)
    options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    cache = pod.make_cache(spread, "pod", capacity=60)
    tokens = [spread.generate(ids.to("sim:0"), past_key_values=cache, **options)]
    expected = {"logits": [torch.zeros(1)], "tokens": [model.generate(ids, **options)]}
    try:
        cache.engine.greedy(spread, tokens[0][:, -1:], 1)
        refusal = None
    except ValueError as error:
        refusal = str(error)
    answer = answer_of("engine", expected, {"logits": [torch.zeros(1)], "tokens": tokens, "reads": {}})
    yield answer | {"steps": cache.engine.steps, "without": cache.engine.without_graph(), "refused": refusal}


def loaded() -> Iterator[dict]:
    """Ways to load: a model in memory that lies on two devices already, and `auto`, which takes one device
    where that is enough."""
    one = make_pod("llama")
    two = on_both(one)
    again = pod.load_model(two, plan=pod.SharingPlan(LEAD), num_sink_tokens=4, num_recent_tokens=11)
    room = pod.load_model(one, device_map="auto", max_memory={"sim:1": 2**30, "sim:0": "1GiB"})
    yield {
        "in memory": [str(device) for device in places_of(again)],
        "auto": sorted({str(weight.device) for weight in room.parameters()}),
        "spread": [is_spread(model) for model in (one, two, again, room)],
    }


def reads() -> Iterator[dict]:
    """How often the host waits in a padded prompt, a chunk and a token: with layers on one device, and on
    both."""
    found = {}
    for name, layers in (("one", "00000"), ("both", HALVES)):
        steps = conversation(on_both(make_pod("llama"), layers), pod.make_cache, "sim:0")["reads"]
        found[name] = {step: sum(counts.values()) for step, counts in steps.items()}
    yield found


def adapters() -> Iterator[dict]:
    """An adapter merged into a base that is read to both, and kept beside it."""
    ids, plan = random_ids(1, 12), pod.SharingPlan(LEAD)
    with tempfile.TemporaryDirectory() as folder:
        base, adapter = f"{folder}/base", f"{folder}/adapter"
        stock = make_stock()
        stock.save_pretrained(base)
        settings = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        tuned = get_peft_model(stock, settings)
        tuned.peft_config["default"].base_model_name_or_path = base
        tuned.save_pretrained(adapter)
        merged = {"plan": plan, "num_sink_tokens": 4, "num_recent_tokens": 11, "dtype": "float64"}
        for name, load, options in (
            ("merged", pod.load_model, merged),
            ("beside", pod.load_adapter, {"dtype": "float64"}),
        ):
            one, two = load(adapter, **options), load(adapter, device_map="balanced", **options)
            with torch.no_grad():
                logits = [one(ids).logits], [two(ids.to("sim:0")).logits]
            devices = sorted({str(weight.device) for weight in two.parameters()})
            yield {
                "name": name,
                "difference": largest_difference(*logits),
                "same tokens": True,
                "devices": devices,
            }


def exploring() -> Iterator[dict]:
    """The measurements behind a plan, on a dense model that lies on two devices."""
    model = make_pod(plan=False)
    expected = explored(model, "cpu")
    yield answer_of("costs, similarity, loss", expected, explored(on_both(model), "sim:0"))
    beside = on_both(model, "0" * model.config.num_hidden_layers, end="1")
    yield answer_of("norm and output weights alone", expected, explored(beside, "sim:0"))


def evaluation() -> Iterator[dict]:
    """A whole evaluation on both: scores, answers and bytes as on one device."""
    lies: set[bool] = set()
    load = pod.load_model

    def watched(*arguments: Any, **options: Any) -> Any:
        model = load(*arguments, **options)
        lies.add(is_spread(model))
        return model

    expected = evaluated("cpu")
    pod.load_model = watched
    try:
        found = evaluated("balanced")
    finally:
        pod.load_model = load
    yield evaluations_compared(expected, found) | {"spread": sorted(lies)}


def benched() -> Iterator[dict]:
    """`pod bench` of random weights and of a folder: rows of every method, and where the models lay."""
    lies: list[list[str]] = []
    load, of_cpu = bench_run.load, torch.Generator

    def watched(*arguments: Any) -> Any:
        bench = load(*arguments)
        for model in (bench.dense, bench.planned, bench.stock):
            lies.append(sorted({str(device) for device in places_of(model)}))
        return bench

    bench_run.load = watched
    torch.Generator = lambda device="cpu": of_cpu(
        "cpu"
    )  # the simulated device has none, and computes on the CPU
    with tempfile.TemporaryDirectory() as folder:
        make_stock().float().save_pretrained(f"{folder}/model")
        for name, settings in {
            "random": {"bench.shapes": "tiny"},
            "folder": {"bench.shapes": None, "model.path": f"{folder}/model"},
        }.items():
            lies.clear()
            settings |= {
                "output_dir": f"{folder}/{name}",
                "bench.device": "balanced",
                "bench.methods": ["pod", "snapkv[window=8]@50%", "int4"],
                "bench.lengths": [60],
                "bench.batch_sizes": [2],
                "bench.steps": 2,
                "bench.repeats": 1,
                "model.dtype": "float32",
                "model.num_sink_tokens": 2,
                "model.num_recent_tokens": 6,
            }
            recipe = load_recipe(None, [f"{key}={json.dumps(value)}" for key, value in settings.items()])
            with contextlib.redirect_stdout(sys.stderr):  # results go to stdout
                found = bench_run.run_bench(recipe)["settings"][0]
            errors = [row.get("error") or row.get("not_measured") for row in found["methods"].values()]
            yield {
                "name": name,
                "methods": list(found["methods"]),
                "errors": [error for error in errors if error],
                "no graph": found["full"]["no_graph"],
                "devices": list(lies),
            }
    bench_run.load, torch.Generator = load, of_cpu


def constants() -> Iterator[dict]:
    """Constant sinks: a prompt, a chunk and tokens, with and without a cache."""
    torch.manual_seed(1)
    has_windows = [None in row for row in LEAD]
    logits = tuple(tuple(torch.randn(6).tolist()) if has else None for has in has_windows)
    values, keys = (tuple(torch.randn(2, 8).tolist() if has else None for has in has_windows) for _ in "vk")
    windows = {"num_sink_tokens": 0, "num_recent_tokens": 11}
    sinks = {"sinks": "constant", "sink_constants": SinkConstants(logits, values, keys)}
    plan = pod.SharingPlan(LEAD, **sinks, **windows)  # type: ignore[arg-type]
    model = pod.load_model(make_stock("llama"), plan=plan)
    spread = on_both(model)
    found = [conversation(one, pod.make_cache, device) for one, device in ((model, "cpu"), (spread, "sim:0"))]
    for one, device, run in zip((model, spread), ("cpu", "sim:0"), found, strict=True):
        with torch.no_grad():
            run["logits"].append(one(random_ids(2, 40).to(device), use_cache=False).logits)
    yield answer_of("constant sinks", *found)


PARTS: dict[str, Callable[[], Iterator[dict]]] = {
    "methods": methods,
    "layouts": layouts,
    "families": families,
    "bytes": bytes_by_device,
    "saved": saved_and_moved,
    "exported": exported,
    "refused": refused,
    "engine": engine,
    "reads": reads,
    "adapters": adapters,
    "loaded": loaded,
    "exploring": exploring,
    "evaluation": evaluation,
    "constants": constants,
    "benched": benched,
}

if __name__ == "__main__":
    simulated_device.register()
    torch.set_num_threads(1)
    serve(PARTS, sys.argv[1:])
