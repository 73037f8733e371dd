"""Distillation, progressive sharing and adapters on several ranks. `worker_cheaper.py OUT`."""

import hashlib
import json
import os
import signal
import sys
from pathlib import Path

import tiny
import torch

from pod.training.observe.observers import Observer

BASE = {"dtype": "float32", "loss_chunk_mib": 1, "save_every_steps": 0}
DISTILL = {"distill_logits": 0.6, "distill_attention": 0.5, "distill_temperature": 2.0}
CONTEXT = {**DISTILL, "distill_context": 4.0}
LORA = {"method": "lora", "lora_rank": 2, "learning_rate": 1e-2}
RUN = {**BASE, "max_steps": 6, "learning_rate": 1e-2, "warmup_ratio": 1 / 6}
PROMPT = torch.arange(40).reshape(1, 40) % tiny.VOCAB


def randomised_adapters(model, settings):
    """`add_lora` with adapters that do something: peft starts their second factor at zero."""
    from pod.training.run.lora import add_lora

    adapted = add_lora(model, settings)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.03)
    return adapted


def growing(plan):
    """A schedule of three stages over the first four steps."""
    import numpy as np

    from pod.training.run.progressive import PlanSchedule, growing_plans

    generator = np.random.default_rng(0)
    plans = growing_plans(generator.random((4, 4, 3)), generator.random((4, 3)), plan, 3)
    return PlanSchedule(list(zip((0, 2, 4), plans, strict=True)))


def make_trainer(folder, data, settings, observers=(), progressive=False):
    from pod.data import PackedDataset
    from pod.training.args import TrainArgs
    from pod.training.run.distill import needs_teacher
    from pod.training.run.mesh import start_processes
    from pod.training.run.trainer import Trainer

    args = TrainArgs(**settings)
    model = tiny.make_model(plan=tiny.SHARING if progressive else True)
    return Trainer(
        args, model, PackedDataset(data), start_processes(args.sequence_parallel_size), folder,
        schedule=growing(model.config.sharing_plan) if progressive else None,
        observers=list(observers),
        teacher=tiny.make_model(plan=False) if needs_teacher(args, "pod") else None,
    )  # fmt: skip


def gradients(name, out, data, settings) -> None:
    """One step: objective, its parts and the raw gradients of what is trained."""
    from deepspeed.utils import safe_get_full_grad

    from pod.training.run import trainer as module
    from pod.training.run.mesh import stop_processes

    module.add_lora = randomised_adapters
    trainer = make_trainer(out / name, data, {**BASE, **settings})
    engine, update, found = trainer.engine, trainer.engine.step, {}

    def record_then_update():
        if engine.is_gradient_accumulation_boundary():
            for key, parameter in engine.module.model.named_parameters():
                if parameter.requires_grad:
                    found[key] = safe_get_full_grad(parameter).clone()
        update()

    engine.step = record_then_update
    values = trainer.step()
    if trainer.mesh.rank == 0:
        torch.save(found, out / f"{name}.pt")
        tiny.write_result(out, name, {key: value for key, value in values.items() if key != "data_wait_s"})
    stop_processes()


def compare(name, reference, out) -> None:
    """Adds the largest difference from the run `reference` to the result `name`."""
    got, expected = (torch.load(out / f"{run}.pt", weights_only=True) for run in (name, reference))
    errors = {key: float((got[key] - want).norm() / want.norm()) for key, want in expected.items()}
    result = json.loads((out / f"{name}.json").read_text())
    result["names_equal"] = set(got) == set(expected)
    result["gradient_error"] = max(errors.values())
    result["smallest"] = min(float(want.norm()) for want in expected.values())
    tiny.write_result(out, name, result)


class Watcher(Observer):
    """Notes the plan in force at every step; optionally sends this process SIGTERM after one of them."""

    def __init__(self, stop_after):
        self.stop_after, self.leads, self.local = stop_after, [], []

    def observe(self, trainer, step):
        if step:
            self.leads.append(trainer.causal_model.model.lead)
            self.local.append(trainer.ulysses.lead if trainer.ulysses else None)
        if step == self.stop_after and trainer.mesh.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return {}


def fingerprint(trainer) -> str:
    """Of master weights and both moments, gathered from all ranks."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    digest = hashlib.sha256()
    for _, parameter in trainer.engine.module.model.named_parameters():
        if parameter.requires_grad:
            digest.update(safe_get_full_fp32_param(parameter).numpy().tobytes())
            for key in ("exp_avg", "exp_avg_sq"):
                digest.update(safe_get_full_optimizer_state(parameter, key).numpy().tobytes())
    return digest.hexdigest()


def trained_logits(trainer):
    """Logits of the prompt under the trained weights, gathered from all ranks into a fresh model."""
    import deepspeed

    from pod.training.run.lora import add_lora

    weights = {}
    for name, parameter in trainer.engine.module.model.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            weights[name] = parameter.detach().float().clone()
    model = tiny.make_model(plan=trainer.causal_model.config.lead)
    whole = add_lora(model, trainer.lora) if trainer.lora else model
    whole.load_state_dict(weights, strict=False)
    with torch.no_grad():
        return model.eval()(input_ids=PROMPT).logits


def run(name, out, folder, data, settings, progressive=False, stop_after=None) -> None:
    """Train; writes what the run ended with."""
    from pod.training.run.mesh import stop_processes

    watcher = Watcher(stop_after)
    trainer = make_trainer(folder, data, settings, [watcher], progressive)
    state = trainer.train()
    states = trainer.engine.optimizer.optimizer.state.values()
    moments = sum(value.numel() for one in states for value in one.values() if value.numel() > 1)
    (moments,) = trainer.mesh.sum([float(moments)])
    trained = [p for p in trainer.engine.module.parameters() if p.requires_grad]
    result = {
        "step": state.step,
        "hash": fingerprint(trainer) if trainer.lora else None,
        "leads": watcher.leads,
        "local": watcher.local,
        "moments": moments,
        "trained": sum(getattr(p, "ds_numel", p.numel()) for p in trained),
        "requires": sorted(n for n, p in trainer.engine.module.named_parameters() if p.requires_grad),
    }
    logits = trained_logits(trainer)
    if trainer.mesh.rank == 0:
        torch.save(logits, folder / "logits.pt")
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        result["metrics"] = [{k: v for k, v in line.items() if isinstance(v, float)} for line in lines]
        newest = folder / (folder / "latest").read_text().strip()
        result["bytes"] = sum(file.stat().st_size for file in newest.rglob("*") if file.is_file())
        tiny.write_result(out, name, result)
    stop_processes()


def start_model(plan):
    """What exports of adapters start from, under a plan."""
    model = tiny.make_model(plan=[list(row) for row in plan.lead])
    assert [list(row) for row in plan.lead] == model.config.lead
    return model


def error_of(logits, folder) -> float:
    expected = torch.load(folder / "logits.pt", weights_only=True)
    return float((logits - expected).abs().max() / expected.abs().max())


def exported(name, out, folder) -> None:
    """Merged export, reloaded with Auto classes."""
    from transformers import AutoModelForCausalLM

    from pod.training.checkpoint.export import checkpoint_to_export, export

    export(checkpoint_to_export(folder, None), out / f"{name}_export", None, start_model=start_model)
    model = AutoModelForCausalLM.from_pretrained(out / f"{name}_export", trust_remote_code=True, dtype="auto")
    with torch.no_grad():
        logits = model.float().eval()(input_ids=PROMPT).logits
    weights = sorted(model.state_dict())
    result = {"error": error_of(logits, folder), "teacher": [key for key in weights if "teacher" in key]}
    tiny.write_result(out, f"export_{name}", result)


def adapter(out, folder) -> None:
    """The adapters alone, loaded by peft onto the start model, and by our own loader onto a dense one."""
    from peft import PeftModel

    import pod
    from pod.training.checkpoint.export import checkpoint_to_export, export_adapter
    from pod.training.run.lora import load_adapter

    export_adapter(checkpoint_to_export(folder, None), out / "adapter", "tiny")
    with torch.no_grad():
        plain = tiny.make_model(plan=tiny.SHARING)
        without = plain.eval()(input_ids=PROMPT).logits
        wrapped = PeftModel.from_pretrained(plain, str(out / "adapter")).eval()
        by_peft = wrapped(input_ids=PROMPT).logits
        dense = pod.PodForCausalLM(pod.PodConfig(**{**plain.config.to_dict(), "lead": None}))
        dense.load_state_dict(tiny.make_model().state_dict())
        dense.save_pretrained(out / "base")
        loaded = load_adapter(out / "adapter", str(out / "base"))
        merged = loaded.merge_and_unload()
        by_us = merged(input_ids=PROMPT).logits
        tokens = [
            model.generate(input_ids=PROMPT, max_new_tokens=4, do_sample=False).tolist()
            for model in (wrapped, merged)
        ]
    files = {file.name: file.stat().st_size for file in (out / "adapter").iterdir()}
    result = {"peft": error_of(by_peft, folder), "ours": error_of(by_us, folder), "files": files}
    result |= {"without": error_of(without, folder), "lead": merged.config.lead}
    result |= {"generated": tokens[0], "expected": tokens[1]}
    tiny.write_result(out, "adapter", result)


def main(out: Path, first: int = 0) -> None:
    import deepspeed  # noqa: F401  imported once, before the ranks are forked
    import peft  # noqa: F401
    import transformers  # noqa: F401

    import pod  # noqa: F401

    data, masked = tiny.make_data(out / "data"), tiny.make_data(out / "masked", empty_tail=True)
    lora, full, sp2 = {**LORA, **DISTILL}, {**DISTILL, "carry": "recompute"}, {"sequence_parallel_size": 2}
    both = {**RUN, **lora, **sp2, "lora_dropout": 0.2}
    stages = [
        (1, gradients, "lora_serial", out, data, {**lora, **CONTEXT}),
        (2, gradients, "lora_sp2", out, data, {**lora, **CONTEXT, **sp2}),
        (1, compare, "lora_sp2", "lora_serial", out),
        (1, gradients, "full_serial", out, data, {**full, **CONTEXT, "micro_batch_size": 2}),
        (2, gradients, "full_sp2", out, data, {**full, **CONTEXT, **sp2, "gradient_accumulation_steps": 2}),
        (1, compare, "full_sp2", "full_serial", out),
        (2, gradients, "full_dp2_zero1", out, data, {**full, **CONTEXT, "zero_stage": 1}),
        (1, compare, "full_dp2_zero1", "full_serial", out),
        (1, gradients, "masked_serial", out, masked, lora),
        (2, gradients, "masked_sp2", out, masked, {**lora, **sp2}),
        (1, compare, "masked_sp2", "masked_serial", out),
        (2, run, "whole", out, out / "whole", data, both, True),
        (2, run, "stopped", out, out / "stopped", data, both, True, 3),
        (2, run, "resumed", out, out / "stopped", data, both, True),
        (1, run, "grown_serial", out, out / "grown_serial", data, {**RUN, **sp2, "sequence_parallel_size": 1}, True),
        (2, run, "grown", out, out / "grown", data, {**RUN, **sp2}, True),
        (2, run, "taught", out, out / "taught", data, {**RUN, **sp2, **full, "max_steps": 2}),
        (2, run, "taught_half", out, out / "taught_half", data,
         {**RUN, **sp2, **DISTILL, "max_steps": 2, "dtype": "bfloat16", "zero_stage": 1}),
        (1, exported, "taught", out, out / "taught"),
        (1, exported, "taught_half", out, out / "taught_half"),
        (1, exported, "whole", out, out / "whole"),
        (1, adapter, out, out / "whole"),
    ]  # fmt: skip
    for stage in stages[first:]:
        tiny.run_ranks(*stage)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))  # a stage number continues a failed run
