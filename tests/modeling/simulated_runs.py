"""Runs on the simulated device, started as a script: `python simulated_runs.py PART`, with a part of `PARTS`.

Each run is done on the CPU first, then on the device. A line of JSON for each: its name, the largest difference of the
two, and the host's reads of each step on the device.
"""

import copy
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import simulated_device
import torch
from conftest import FAMILIES, make_pod, make_stock, random_ids
from method_table import ROWS, Row
from torch import Tensor, nn

import pod
from pod.eval import runner
from pod.recipe import load_recipe
from pod.training.plans import choose, costs
from pod.training.plans.similarity import jensen_shannon_similarity

DEVICE = "sim:0"
PROMPT, CHUNK, DECODED = 30, 8, 2
LENGTHS = 30, 17
"""Real tokens of the two rows' prompts; the second is padded on the left."""


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


def conversation(model: nn.Module, make_cache: Callable[[nn.Module], object], device: str) -> dict:
    """Logits of a padded prompt, a chunk and decoded tokens; the cache is saved and loaded before the last token."""
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
            state = copy.deepcopy(cache.state())
            cache = make_cache(model)
            cache.from_state(state)
        with simulated_device.watch() as counted, torch.no_grad():
            out = model(ids[:, start:stop], attention_mask=mask[:, :stop], past_key_values=cache)
        logits.append(out.logits[0])  # the second row's prompt begins with padding
        logits.append(out.logits[1, -1:])
        reads[name] = dict(counted)
    return {"logits": logits, "reads": reads}


def compared(name: str, run: Callable[[nn.Module, str], dict], model: nn.Module) -> dict:
    """One run on the CPU and on the device."""
    expected = run(model, "cpu")
    found = run(moved(model), DEVICE)
    answer = {"name": name, "difference": largest_difference(expected["logits"], found["logits"])}
    answer["reads"] = found["reads"]
    answer["same tokens"] = all(
        torch.equal(one, simulated_device.to_host(other))
        for one, other in zip(expected.get("tokens", []), found.get("tokens", []), strict=True)
    )
    return answer


def model_of(row: Row) -> nn.Module:
    if row.model in ("dense", "pod"):
        return make_pod("llama", plan=row.model == "pod")
    windows = {"num_sink_tokens": 0, "num_recent_tokens": 20} if row.model == "window" else {}
    return pod.load_model(make_stock("llama"), layout=row.model, **windows)


def methods() -> Iterator[dict]:
    """Every method and composition."""
    models = {}
    for row in ROWS:
        model = models.setdefault(row.model, model_of(row))

        def run(model: nn.Module, device: str, row: Row = row) -> dict:
            return conversation(model, lambda model: pod.make_cache(model, row.spec, **row.options), device)

        yield compared(row.id, run, model)


def generated(model: nn.Module, device: str) -> dict:
    """Greedy, beams and a padded batch by `generate()`, behind a conversation with the default cache."""
    found = conversation(model, pod.make_cache, device)
    ids = random_ids(2, 20).to(device)
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[1, :7] = 0
    mask = mask.to(device)
    options = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    tokens = []
    for name, more in (("greedy", {}), ("beams", {"num_beams": 2})):
        with simulated_device.watch() as counted:
            tokens.append(model.generate(ids, **options, **more))
        found["reads"][name] = dict(counted)
    return {**found, "tokens": tokens}


def families() -> Iterator[dict]:
    """Every family with a plan, and one without."""
    for family in FAMILIES:
        yield compared(family, generated, make_pod(family))
    yield compared("llama, dense", generated, make_pod("llama", plan=False))


def trained(model: nn.Module, device: str) -> dict:
    """The loss and every gradient of two packed documents and a padded row."""
    ids = random_ids(2, 48)
    labels = ids.clone()
    labels[1, :9] = -100
    doc_ids = torch.zeros_like(ids)
    doc_ids[0, 20:] = 1
    model = model.train()
    with simulated_device.watch() as counted:
        loss = model(ids.to(device), labels=labels.to(device), doc_ids=doc_ids.to(device)).loss
        loss.backward()
    gradients = [weight.grad for _, weight in sorted(model.named_parameters()) if weight.grad is not None]
    return {"logits": [loss.detach()[None], *gradients], "reads": {"step": dict(counted)}}


def training() -> Iterator[dict]:
    """Every family with a plan."""
    for family in FAMILIES:
        yield compared(family, trained, make_pod(family))


def explored(model: nn.Module, device: str) -> dict:
    """What `pod explore` measures on one sequence, and the loss of a plan."""
    ids = random_ids(1, 60)
    on_device = ids.to(device)
    heads, groups = model.config.num_key_value_heads, model.config.num_key_value_groups
    layers = model.config.num_hidden_layers
    order = torch.arange(groups).expand(layers, layers, heads, heads, groups)
    with simulated_device.watch() as counted:
        found = list(costs.measure_costs(model, on_device, 9, order).values())
        found.append(costs.measure_query_head_errors(model, on_device, 9))
        rows = torch.stack(list(costs.record_attention_rows(model, on_device, 9)))
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
        settings = {
            "output_dir": folder,
            "model.path": "package:tiny",
            "eval.text": [str(text)],
            "eval.device": device,
            "eval.methods": ["full", "snapkv[window=8]@50%", "int4"],
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


def evaluation() -> Iterator[dict]:
    """A whole evaluation: scores, answers and bytes."""
    expected, found = evaluated("cpu"), evaluated(DEVICE)
    scores = [torch.tensor([one[2] for one in samples]) for samples in (expected, found)]
    others = [[(*one[:2], *one[3:]) for one in samples] for samples in (expected, found)]
    yield {
        "name": f"evaluation, {len(expected)} samples",
        "difference": largest_difference(scores[:1], scores[1:]),
        "same tokens": others[0] == others[1],
        "reads": {},
    }


def device() -> Iterator[dict]:
    """What the device itself refuses and counts."""
    here, there = torch.ones(3), torch.ones(3, device=DEVICE)
    other = torch.ones(3, device="sim:1")
    wrong = {
        "add": lambda: there + other,
        "mm": lambda: there[None] @ here[:, None],
        "index_select": lambda: there.index_select(0, torch.tensor([1])),
        "index_put_": lambda: (
            there.__setitem__(slice(0, 2), here[:2]) or here.index_put_((there.long(),), here)
        ),
        "numpy": lambda: there.numpy(),
        "0-dim": lambda: there + torch.tensor(1.0),
        "index of the host": lambda: there[torch.tensor([1])],
        "copy": lambda: there.copy_(here),
    }
    refused = []
    for name, call in wrong.items():
        try:
            call()
        except (simulated_device.MixedDevices, TypeError):
            refused.append(name)
    with simulated_device.watch() as reads:
        float(there[0])
        there.tolist()
        there.cpu()
        there.nonzero()
        torch.bincount(there.long())
        there[there > 0]
        there + 1
    counted = sorted({name.partition(" at ")[0] for name in reads})
    yield {"refused": refused, "reads": counted}


PARTS = {
    "device": device,
    "methods": methods,
    "families": families,
    "training": training,
    "exploring": exploring,
    "evaluation": evaluation,
}

if __name__ == "__main__":
    simulated_device.register()
    torch.set_num_threads(1)
    for found in PARTS[sys.argv[1]]():
        print(json.dumps(found), flush=True)
