"""Runs on the simulated device, started as a script: `python simulated_runs.py PART`, with a part of `PARTS`.

Each run is done on the CPU first, then on the device. A line of JSON for each: its name, the largest
difference of the two, and the host's reads of each step on the device. Without a part, parts are read from
the standard input, one a line, and an empty line follows the results of each.
"""

import copy
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import simulated_device
import torch
from conftest import FAMILIES, make_pod, make_stock, random_ids
from method_table import ROWS, Row
from test_sinks_of_models import plan_for
from torch import Tensor, nn

import pod
from pod.eval import runner
from pod.plan import choose, costs, divergence
from pod.plan.needles import Prompt
from pod.plan.recording import record_attention_rows
from pod.plan.similarity import jensen_shannon_similarity
from pod.recipe import load_recipe
from pod.training.args import TrainArgs
from pod.training.run.activations import save_activations

DEVICE = "sim:0"
PROMPT, CHUNK, DECODED = 30, 8, 2
LENGTHS = 30, 17
"""Real tokens of the two rows' prompts; the second is padded on the left."""
GENERATED = {"greedy": {}, "beams": {"num_beams": 2}}
"""Ways to generate tokens, by name."""

STORES = {
    "keep": {},
    "offload": {"shared_qk": "offload"},
    "recompute": {"shared_qk": "recompute"},
    "keep, hidden states offloaded": {"offload_checkpoints": True},
    "offload, hidden states offloaded": {"shared_qk": "offload", "offload_checkpoints": True},
    "recompute, hidden states offloaded": {"shared_qk": "recompute", "offload_checkpoints": True},
    "keep, feed-forward layers in tiles": {"mlp_tile_tokens": 20},
}
"""Settings of training with activation checkpoints, by name."""


def moved(model: nn.Module) -> nn.Module:
    """A copy on the device; `to()` gives tied weights a wrapper each, which CUDA would not."""
    copied = copy.deepcopy(model).to(DEVICE)
    copied.tie_weights()
    return copied


def difference(expected: Tensor, found: Tensor) -> float:
    return float((expected - simulated_device.to_host(found)).abs().max())


def largest_difference(expected: list[Tensor], found: list[Tensor]) -> float:
    assert len(expected) == len(found)
    return max(difference(one, other) for one, other in zip(expected, found, strict=True))


def saved_and_loaded(model: nn.Module, cache: Any) -> Any:
    """The cache as a file gives it back."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "cache.safetensors"
        pod.save_cache(model, cache, file)
        return pod.load_cache(model, file)


def conversation(model: nn.Module, make_cache: Callable[[nn.Module], object], device: str) -> dict:
    """Logits of a padded prompt, a chunk and decoded tokens.

    The cache is saved and loaded before the last token.
    """
    total = PROMPT + CHUNK + DECODED
    ids = random_ids(2, total).to(device)
    mask = torch.ones(2, total, dtype=torch.long)
    mask[1, : PROMPT - LENGTHS[1]] = 0
    mask = mask.to(device)
    cache = make_cache(model)
    steps = [("prompt", 0, PROMPT), ("chunk", PROMPT, PROMPT + CHUNK)]
    steps += [(f"token {i}", PROMPT + CHUNK + i, PROMPT + CHUNK + i + 1) for i in range(DECODED)]
    logits, reads = [], {}
    for name, start, stop in steps:
        if name == f"token {DECODED - 1}":
            cache = saved_and_loaded(model, cache)
        with simulated_device.watch() as counted, torch.no_grad():
            out = model(ids[:, start:stop], attention_mask=mask[:, :stop], past_key_values=cache)
        logits.append(out.logits[0])  # the second row's prompt begins with padding
        logits.append(out.logits[1, -1:])
        reads[name] = dict(counted)
    return {"logits": logits, "reads": reads}


def generated(
    model: nn.Module, make_cache: Callable[[nn.Module], object], device: str, new_tokens: int
) -> dict:
    """Tokens of a padded batch by `generate()`, behind a conversation with a cache of the same kind."""
    found = conversation(model, make_cache, device)
    ids = random_ids(2, 20).to(device)
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[1, :7] = 0
    mask = mask.to(device)
    options = {"attention_mask": mask, "max_new_tokens": new_tokens, "do_sample": False, "eos_token_id": None}
    tokens = []
    for name, more in GENERATED.items():
        if make_cache is not pod.make_cache:  # which generate() calls itself
            options["past_key_values"] = make_cache(model)
        with simulated_device.watch() as counted:
            tokens.append(model.generate(ids, **options, **more))
        found["reads"][name] = dict(counted)
    return {**found, "tokens": tokens}


def answer_of(name: str, expected: dict, found: dict) -> dict:
    """What two runs have in common, and the reads of the second."""
    answer = {"name": name, "difference": largest_difference(expected["logits"], found["logits"])}
    answer["reads"] = found["reads"]
    answer["same tokens"] = all(
        torch.equal(one, simulated_device.to_host(other))
        for one, other in zip(expected.get("tokens", []), found.get("tokens", []), strict=True)
    )
    return answer


def compared(name: str, run: Callable[[nn.Module, str], dict], model: nn.Module) -> dict:
    """One run on the CPU and on the device."""
    return answer_of(name, run(model, "cpu"), run(moved(model), DEVICE))


def model_of(row: Row) -> nn.Module:
    if row.model in ("dense", "pod"):
        return make_pod("llama", plan=row.model == "pod")
    windows = {"num_sink_tokens": 0, "num_recent_tokens": 20} if row.model == "window" else {}
    return pod.load_model(make_stock("llama"), layout=row.model, **windows)


def with_room_to_pack() -> list[Row]:
    """Compositions that drop a token for each decoded one, of so many tokens that some are packed."""
    sizes = {"budget": 22, "group_size": 4, "residual": 4}
    specs = "h2o+int4", "roco+int8", "d2o+int4", "d2o-streaming+int4"
    rows = [row for row in ROWS if row.id in specs]
    assert len(rows) == len(specs)
    return [replace(row, options=row.options | sizes, name=f"{row.id}, packed") for row in rows]


def methods() -> Iterator[dict]:
    """Every method and composition."""
    models = {}
    for row in (*ROWS, *with_room_to_pack()):
        if row.model not in models:
            model = model_of(row)
            models[row.model] = {"cpu": model, DEVICE: moved(model)}

        def make_cache(model: nn.Module, row: Row = row) -> object:
            return pod.make_cache(model, row.spec, **row.options)

        found = [generated(model, make_cache, device, 2) for device, model in models[row.model].items()]
        yield answer_of(row.id, *found)


def with_constant_sinks() -> nn.Module:
    """A plan with all roles, whose windows have constants in the place of first tokens."""
    stock = make_stock("llama")
    return pod.load_model(stock, plan=plan_for(stock))


def families() -> Iterator[dict]:
    """Every family with a plan, and one without."""

    def run(model: nn.Module, device: str) -> dict:
        return generated(model, pod.make_cache, device, 3)

    for family in FAMILIES:
        yield compared(family, run, make_pod(family))
    yield compared("llama, dense", run, make_pod("llama", plan=False))
    yield compared("llama, constant sinks", run, with_constant_sinks())


def trained(model: nn.Module, device: str, **settings) -> dict:
    """The loss and every gradient of two packed documents and a padded row, with settings of `train`."""
    ids = random_ids(2, 48)
    labels = ids.clone()
    labels[1, :9] = -100
    doc_ids = torch.zeros_like(ids)
    doc_ids[0, 20:] = 1
    model = model.train()
    save_activations(model, TrainArgs(**settings), row_length=ids.shape[1])
    with simulated_device.watch() as counted:
        loss = model(ids.to(device), labels=labels.to(device), doc_ids=doc_ids.to(device)).loss
        loss.backward()
    gradients = [weight.grad for _, weight in sorted(model.named_parameters()) if weight.grad is not None]
    return {"logits": [loss.detach()[None], *gradients], "reads": {"step": dict(counted)}}


def training() -> Iterator[dict]:
    """Every family with a plan: without checkpoints on the CPU, there without and with them.

    The first family and the layout whose layers hand on keys and values get all settings, the others one
    each.
    """
    models = {family: make_pod(family) for family in FAMILIES}
    models["cla"] = pod.load_model(make_stock("llama"), layout="cla")
    models["constant sinks"] = with_constant_sinks()
    for number, (name, model) in enumerate(models.items()):
        expected = trained(copy.deepcopy(model), "cpu", gradient_checkpointing="none")
        yield answer_of(name, expected, trained(moved(model), DEVICE, gradient_checkpointing="none"))
        stores = list(STORES)
        for store in stores if name in ("llama", "cla") else [stores[number % len(stores)]]:
            found = trained(moved(model), DEVICE, gradient_checkpointing="full", **STORES[store])
            yield answer_of(f"{name}, {store}", expected, found)


def explored(model: nn.Module, device: str) -> dict:
    """What `pod explore` measures on one sequence, and the loss of a plan."""
    ids = random_ids(1, 60)
    on_device = ids.to(device)
    heads, groups = model.config.num_key_value_heads, model.config.num_key_value_groups
    layers = model.config.num_hidden_layers
    order = torch.arange(groups).expand(layers, layers, heads, heads, groups)
    with simulated_device.watch() as counted:
        reading = costs.TextWithGradients.of(model, on_device, 9)
        found = list(costs.measure_costs(model, reading, order).values())
        found.append(costs.measure_query_head_errors(model, reading))
        prompt = Prompt(ids[0], torch.tensor([50, 51, 57]))
        found.append(costs.measure_retrieval(model, prompt))
        share = torch.zeros(layers, heads)
        share[::2] = 1
        value, slopes = divergence.measure_under(model, prompt.input_ids, prompt.answers, share)
        found += [torch.tensor([value], dtype=torch.float64), slopes]
        rows = torch.stack(list(record_attention_rows(model, on_device, 9)))
        found.append(jensen_shannon_similarity(rows))
        plan = make_pod(plan=True).config.sharing_plan
        found.append(torch.tensor([choose.plan_loss(model, plan, [ids[0]])], dtype=torch.float64))
    return {"logits": found, "reads": {"sequence": dict(counted)}}


def exploring() -> Iterator[dict]:
    """The measurements behind a plan."""
    yield compared("costs, similarity, loss", explored, make_pod(plan=False))


def evaluated(device: str) -> list[tuple]:
    """(method, task, score, answer, bytes) of each sample of a whole evaluation with `eval.device`."""
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder, "text.txt")
        text.write_text("".join(f"Sentence number {i}, said {i * 7919 % 97} times. " for i in range(80)))
        plan = pod.SharingPlan([[0, 0], [0, None], [2, 2], [None, 2]])  # of tiny, on the dense weights
        plan.save(Path(folder, "plan.json"))
        settings = {
            "output_dir": folder,
            "model.path": "package:tiny",
            "eval.text": [str(text)],
            "eval.device": device,
            "model.plan": str(Path(folder, "plan.json")),
            "model.num_sink_tokens": 4,
            "model.num_recent_tokens": 60,
            "eval.methods": ["full", "pod-unadapted", "snapkv[window=8]@50%", "int4"],
            "eval.tasks": ["perplexity", "passkey"],
            "eval.text_length": 256,
            "eval.min_context": 128,
            "eval.text_sequences": 2,
            "eval.passkey_lengths": [420],
            "eval.passkey_depths": [0.5],
            "eval.passkey_samples": 1,
            "eval.passkey_new_tokens": 4,
            "eval.batch_size": 2,
        }
        recipe = load_recipe(None, [f"{key}={json.dumps(value)}" for key, value in settings.items()])
        results = runner.evaluate(recipe, log=lambda line: None)
    found = []
    for method, result in results.items():
        for task, part in result["parts"].items():
            for one in part["samples"]:
                found.append((method, task, one["score"], one.get("answer"), one.get("bytes")))
    return found


def evaluations_compared(expected: list[tuple], found: list[tuple]) -> dict:
    """How the samples of two evaluations differ: in scores, and in anything else."""
    scores = [torch.tensor([one[2] for one in samples]) for samples in (expected, found)]
    others = [[(*one[:2], *one[3:]) for one in samples] for samples in (expected, found)]
    return {
        "name": f"evaluation, {len(expected)} samples",
        "difference": largest_difference(scores[:1], scores[1:]),
        "same tokens": others[0] == others[1],
    }


def evaluation() -> Iterator[dict]:
    """A whole evaluation: scores, answers and bytes."""
    yield evaluations_compared(evaluated("cpu"), evaluated(DEVICE)) | {"reads": {}}


def refused(calls: dict[str, Callable[[], object]]) -> list[str]:
    """The names of the calls that the device refuses."""
    names = []
    for name, call in calls.items():
        try:
            call()
        except (RuntimeError, TypeError):  # MixedDevices, no such device, no numpy
            names.append(name)
    return names


def mixing() -> dict[str, Callable[[], object]]:
    """Operations over the host and a device, by what CUDA says to them."""
    here, there = torch.ones(3), torch.ones(3, device=DEVICE)
    return {
        "add": lambda: there + here,
        "mm": lambda: there[None] @ here[:, None],
        "cat": lambda: torch.cat((there, here)),
        "index_select": lambda: there.index_select(0, torch.tensor([1])),
        "index a host tensor": lambda: here[there.long()],
        "values of the host": lambda: there.index_put_((torch.tensor([0, 1, 2]),), here),
        "numpy": lambda: there.numpy(),
        "allowed: a number": lambda: there + torch.tensor(1.0),
        "allowed: index of the host": lambda: there[torch.tensor([1])],
        "allowed: mask of the host": lambda: there[torch.tensor([True, False, True])],
        "allowed: copy": lambda: there.copy_(here),
    }


def mixing_two() -> dict[str, Callable[[], object]]:
    """Operations over two devices, by what CUDA says to them."""
    one, two = torch.ones(3, device="sim:0"), torch.ones(3, device="sim:1")
    return {
        "add": lambda: one + two,
        "add a number": lambda: one + two[0],
        "mm": lambda: one[None] @ two[:, None],
        "cat": lambda: torch.cat((one, two)),
        "index": lambda: one[two.long()],
        "mask": lambda: one[two > 0],
        "where": lambda: torch.where(one > 0, one, two),
        "make on a third": lambda: torch.ones(3, device="sim:2"),
        "move to a third": lambda: one.to("sim:2"),
        "allowed: copy": lambda: one.copy_(two),
        "allowed: to": lambda: one.to("sim:1") + two,
    }


def reading() -> dict[str, Callable[[], object]]:
    """Calls for which the host waits, and at the end some for which it does not."""
    there = torch.tensor([1.0, 2.0, 2.0], device=DEVICE)
    whole, mask = there.long(), there > 1
    return {
        "item": lambda: there[0].item(),
        "float": lambda: float(there[0]),
        "if": lambda: bool(mask.any()),
        "tolist": there.tolist,
        "cpu": there.cpu,
        "to": lambda: there.to("cpu"),
        "copy_": lambda: torch.zeros(3).copy_(there),
        "nonzero": mask.nonzero,
        "where": lambda: torch.where(mask),
        "index by a mask": lambda: there[mask],
        "write by a mask": lambda: there.index_put_((mask,), there[1:] + 1),
        "masked_select": lambda: there.masked_select(mask),
        "unique": there.unique,
        "unique_consecutive": there.unique_consecutive,
        "bincount": whole.bincount,
        "repeat_interleave": lambda: there.repeat_interleave(whole),
        "equal": lambda: torch.equal(there, there),
        "index": lambda: there.cpu()[int(whole[0])],
        "free: arithmetic": lambda: (there + 1).sum(),
        "free: fill by a mask": lambda: there.masked_fill_(mask, 2.0),
        "free: repeat_interleave": lambda: there.repeat_interleave(whole, output_size=5),
        "free: to the device": lambda: torch.ones(3).to(DEVICE),
    }


def over_both() -> dict[str, object]:
    """A backward pass from the second device to the first, and what is made on either."""
    x = torch.tensor([1.0, 2.0], device="sim:0", requires_grad=True)
    (2 * (3 * x).to("sim:1") ** 2).sum().backward()
    assert x.grad is not None
    with torch.accelerator.device_index(1):
        current = torch.ones(2, device="sim")
    made = torch.ones(2, device="sim:1").new_tensor([1.0])
    devices = [str(one.device) for one in (x.grad, current, made, torch.arange(3, device="sim:1"))]
    return {"gradient": simulated_device.to_host(x.grad).tolist(), "devices": devices}


def device() -> Iterator[dict]:
    """What the device itself refuses and counts."""
    reads = {}
    for name, call in reading().items():
        with simulated_device.watch() as counted:
            call()
        reads[name] = counted.total()
    yield {
        "refused": refused(mixing()),
        "refused of two": refused(mixing_two()),
        "reads": reads,
        "over both": over_both(),
    }


PARTS = {
    "device": device,
    "methods": methods,
    "families": families,
    "training": training,
    "exploring": exploring,
    "evaluation": evaluation,
}


def print_results(parts: dict[str, Callable[[], Iterator[dict]]], part: str) -> None:
    for found in parts[part]():
        print(json.dumps(found), flush=True)


def serve(parts: dict[str, Callable[[], Iterator[dict]]], names: list[str]) -> None:
    """Print the results of these parts.

    Without names, print those that the standard input names, an empty line behind each.
    """
    for name in names:
        print_results(parts, name)
    for line in () if names else sys.stdin:
        print_results(parts, line.strip())
        print(flush=True)


if __name__ == "__main__":
    simulated_device.register()
    torch.set_num_threads(1)
    serve(PARTS, sys.argv[1:])
