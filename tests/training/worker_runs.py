"""Whole runs on two ranks. `worker_runs.py OUT`.

Resume, signals, NaN policy, LoRA, refusals, full disk, export.
"""

import hashlib
import itertools
import json
import os
import resource
import signal
import sys
from pathlib import Path

import tiny
import torch

STEPS = 5
FULL = {
    "max_steps": STEPS,
    "sequence_parallel_size": 2,
    "dtype": "float32",
    "learning_rate": 1e-2,
    "warmup_ratio": 1 / STEPS,
}
LORA = {**FULL, "method": "lora", "lora_rank": 2, "lora_dropout": 0.2, "weight_decay": 0.1}
PARTS = {**LORA, "gradient_accumulation_steps": 3}
PROMPT = torch.arange(40).reshape(1, 40) % tiny.VOCAB


def make_trainer(folder, data, settings, model=None, seed=0):
    from pod.data import PackedDataset
    from pod.training.args import TrainArgs
    from pod.training.run.mesh import Mesh
    from pod.training.run.trainer import Trainer

    args = TrainArgs(**{"save_every_steps": 0, "loss_chunk_mib": 1, **settings})
    mesh = Mesh(args.sequence_parallel_size)
    return Trainer(
        args, model or tiny.make_model(), PackedDataset(data), mesh, folder, seed, {"note": "test"}
    )


def full_weights(trainer) -> dict[str, torch.Tensor]:
    """Every weight of the model, gathered from all ranks, in the type that is trained."""
    import deepspeed

    weights = {}
    for name, parameter in trainer.engine.module.model.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            weights[name] = parameter.detach().clone()
    return weights


def optimizer_hash(trainer) -> str:
    """Fingerprint of master weights and both moments, gathered from all ranks."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    digest = hashlib.sha256()
    optimizer = trainer.engine.optimizer
    if hasattr(optimizer, "_lazy_init_hp_params_optimizer_state"):
        # ZeRO 1 and 2 link weights to moments after the first group's first update, when the second group has
        # none
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()
    for _, parameter in trainer.engine.module.model.named_parameters():
        if parameter.requires_grad:
            digest.update(safe_get_full_fp32_param(parameter).numpy().tobytes())
            for key in ("exp_avg", "exp_avg_sq"):
                digest.update(safe_get_full_optimizer_state(parameter, key).numpy().tobytes())
    return digest.hexdigest()


def run(name, out, folder, data, settings, stop_after=None, start_dtype=torch.float32) -> None:
    """Train; optionally rank 1 (alone) gets SIGTERM during step `stop_after`.

    Writes what the run ended with.
    """
    from pod.training.run.mesh import stop_processes

    before = {k: v.clone() for k, v in tiny.make_model().named_parameters()}
    trainer = make_trainer(folder, data, settings, tiny.make_model().to(start_dtype))
    if stop_after is not None and trainer.mesh.rank == 1:
        trainer.engine.module.loss_head.register_forward_pre_hook(signal_in_step(trainer, stop_after - 1))
    state = trainer.train()
    weights, fingerprint = full_weights(trainer), optimizer_hash(trainer)
    states = trainer.engine.optimizer.optimizer.state.values()
    mine = sum(value.numel() for one in states for value in one.values() if value.numel() > 1)
    (moments,) = trainer.mesh.sum([float(mine)])
    trained = [p for p in trainer.engine.module.parameters() if p.requires_grad]
    if trainer.mesh.rank == 0:
        torch.save(weights, folder / "trained.pt")
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        plain = {k.replace("base_model.model.", "").replace(".base_layer", ""): v for k, v in weights.items()}
        moved = sorted(
            {k for k, v in plain.items() if k not in before or not torch.equal(v.float(), before[k])}
        )
        result = {
            "step": state.step,
            "hash": fingerprint,
            "moved": moved,
            "steps": [line["step"] for line in lines],
        }
        result |= {
            "losses": [line["loss"] for line in lines],
            "latest": (folder / "latest").read_text().strip(),
            "waits": [line["data_wait_s"] for line in lines],
            "moments": moments,
            "trained": sum(getattr(p, "ds_numel", p.numel()) for p in trained),
        }
        result["kept"] = sorted(path.name for path in folder.iterdir() if path.is_dir())
        tiny.write_result(out, name, result)
    stop_processes()


def signal_in_step(trainer, step):
    """A module hook that sends this process SIGTERM in step `step` (from 0)."""

    def send(module, inputs):
        if trainer.state.step == step:
            os.kill(os.getpid(), signal.SIGTERM)

    return send


def nan_policy(out, data) -> None:
    """A NaN in step 2 is skipped; then every step is NaN until the run stops."""
    from pod.training.run.mesh import stop_processes

    trainer = make_trainer(out / "nan", data, {**FULL, "max_steps": 50, "max_skipped_steps": 3})
    poisoned = {1, *range(4, 50)}  # steps counted from 0
    head = trainer.engine.module.loss_head
    rank = trainer.mesh.rank  # only rank 1 sees the NaN
    head.register_forward_hook(
        lambda *a: a[-1] * float("nan") if rank and trainer.state.step in poisoned else None
    )
    result, hashes, skips = {}, [], []
    for _ in range(4):
        skips.append(trainer.step()["skipped"])
        hashes.append(optimizer_hash(trainer))
    result["skips"] = skips
    result["changed"] = [a != b for a, b in itertools.pairwise(hashes)]
    try:
        trainer.train()
    except RuntimeError as error:
        result["error"] = str(error)
    result["stopped_at"] = trainer.state.step
    if trainer.mesh.rank == 0:
        tiny.write_result(out, "nan", result)
    stop_processes()


def refusals(out, data, other_data, folder) -> None:
    """Every way in which the checkpoint in `folder` does not belong to a run."""
    from pod.modeling.model.sharing import SharingPlan
    from pod.training.run.mesh import stop_processes

    replanned = tiny.make_model()
    replanned.config.lead = [list(row) for row in SharingPlan.dense(4, 3).lead]
    turned, narrowed, longer = tiny.make_model(), tiny.make_model(), tiny.make_model()
    turned.config.rope_parameters = {**turned.config.rope_parameters, "rope_theta": 500_000.0}
    narrowed.config.num_recent_tokens = 4
    longer.config.max_position_embeddings = 512
    cases = {
        "plan": (data, {}, replanned),
        "rope": (data, {}, turned),
        "positions": (data, {}, longer),
        "windows": (data, {}, narrowed),
        "model": (data, {}, tiny.make_model(seed=1)),
        "data": (other_data, {}, None),
        "method": (data, {"method": "lora"}, None),
        "dtype": (data, {"dtype": "bfloat16"}, None),
        "rows": (data, {"gradient_accumulation_steps": 2}, None),
        "never": (data, {"resume": "never"}, None),
    }
    messages = {}
    for name, (rows, settings, model) in cases.items():
        try:
            make_trainer(folder, rows, {**FULL, "sequence_parallel_size": 1, **settings}, model)
            messages[name] = "accepted"
        except ValueError as error:
            messages[name] = str(error)
    tiny.write_result(out, "refusals", messages)
    stop_processes()


def disk_full(out, data) -> None:
    """One rank cannot write more than 20 kB; then the free space is too small from the start."""
    import shutil

    from pod.training.run.mesh import stop_processes

    folder = out / "full_disk"
    trainer = make_trainer(folder, data, FULL)
    result = {}
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if trainer.mesh.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    result["write"] = _save_error(trainer)
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    result["left"] = sorted(path.name for path in folder.iterdir())
    real, shutil.disk_usage = shutil.disk_usage, lambda path: os.statvfs_result and _Free()
    result["space"] = _save_error(trainer)
    shutil.disk_usage = real
    result["left_after"] = sorted(path.name for path in folder.iterdir())
    tiny.write_result(out, f"disk_rank{trainer.mesh.rank}", result)
    stop_processes()


class _Free:
    free = 1000


def _save_error(trainer) -> str:
    try:
        trainer.checkpointer.save(trainer.state)
    except OSError as error:
        return str(error)
    return "saved"


def exported(name, out, folder, dtype) -> None:
    """Export, reload with Auto classes and remote code.

    Compare logits with the weights at the end of training.
    """
    from safetensors.torch import save_file

    from pod.export import export
    from pod.training.checkpoint.newest import checkpoint_to_export
    from pod.training.run.lora import add_lora

    export(
        checkpoint_to_export(folder, None),
        out / f"{name}_export",
        None,
        start_model=lambda plan: tiny.make_model(),
    )
    weights = torch.load(folder / "trained.pt", weights_only=True)
    model = tiny.make_model()
    if any("lora_" in key for key in weights):
        settings = {"lora_rank": 2, "lora_alpha": 32.0, "lora_dropout": 0.2}
        model = add_lora(model, {**settings, "lora_target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]})
    model.to(dtype).load_state_dict(weights, strict=False)
    plain = model.get_base_model() if hasattr(model, "get_base_model") else model
    loaded = (
        tiny.exported_class(out / f"{name}_export")
        .from_pretrained(out / f"{name}_export", dtype="auto")
        .eval()
    )
    with torch.no_grad():
        expected, got = plain.eval()(input_ids=PROMPT).logits, loaded(input_ids=PROMPT).logits
    save_file({"logits": expected, "input_ids": PROMPT.contiguous()}, out / f"{name}_logits.safetensors")
    try:
        generated = loaded.generate(PROMPT, max_new_tokens=4, do_sample=False)[0, PROMPT.shape[1] :].tolist()
    except RuntimeError as error:
        generated = str(error)
    result = {"error": float((expected - got).abs().max() / expected.abs().max()), "dtype": str(got.dtype)}
    result |= {"generated": generated, "module": type(loaded).__module__}
    result["eos"] = loaded.generation_config.eos_token_id
    result["next_token"] = int(expected[0, -1].argmax())
    result["files"] = sorted(path.name for path in (out / f"{name}_export").iterdir())
    tiny.write_result(out, f"export_{name}", result)


def adapter(out, folder) -> None:
    """The adapters alone, loaded by peft onto the start model and by our own loader onto a dense one."""
    from peft import PeftModel
    from safetensors.torch import load_file

    import pod
    from pod import load_adapter
    from pod.export import export_adapter
    from pod.training.checkpoint.newest import checkpoint_to_export

    export_adapter(checkpoint_to_export(folder, None), out / "adapter", "tiny")
    dense = pod.PodForCausalLM(pod.PodConfig(**{**tiny.make_model().config.to_dict(), "lead": None}))
    dense.load_state_dict(tiny.make_model().state_dict())
    dense.save_pretrained(out / "base")
    expected = load_file(out / "lora_logits.safetensors")["logits"]
    with torch.no_grad():
        without = tiny.make_model().eval()(input_ids=PROMPT).logits
        by_peft = PeftModel.from_pretrained(tiny.make_model(), str(out / "adapter")).eval()
        ours = load_adapter(out / "adapter", str(out / "base")).eval()
        found = {
            "peft": by_peft(input_ids=PROMPT).logits,
            "ours": ours(input_ids=PROMPT).logits,
            "none": without,
        }
    result = {
        name: float((logits - expected).abs().max() / expected.abs().max()) for name, logits in found.items()
    }
    result["lead"] = [list(row) for row in ours.get_base_model().config.lead]
    result["files"] = {file.name: file.stat().st_size for file in (out / "adapter").iterdir()}
    tiny.write_result(out, "adapter", result)


def main(out: Path, first: int = 0) -> None:
    import peft  # noqa: F401  imported once, before the ranks are forked

    data, other = tiny.make_data(out / "data"), tiny.make_data(out / "other", seed=1)
    half = {**FULL, "max_steps": 2, "dtype": "bfloat16"}
    saving = {**FULL, "save_every_steps": 1, "keep_last": 2}
    stages = [
        (2, run, "whole", out, out / "whole", data, saving),
        (2, run, "stopped", out, out / "stopped", data, {**FULL, "prefetch_steps": 0}, 2),
        (2, run, "resumed", out, out / "stopped", data, FULL),
        (2, run, "lora", out, out / "lora", data, LORA),
        (2, run, "lora_stopped", out, out / "lora_stopped", data, LORA, 3),
        (2, run, "lora_resumed", out, out / "lora_stopped", data, LORA),
        (2, run, "parts", out, out / "parts", data, PARTS),
        (2, run, "parts_stopped", out, out / "parts_stopped", data, PARTS, 3),
        (2, run, "parts_resumed", out, out / "parts_stopped", data, PARTS),
        (2, run, "half", out, out / "half", data, half),
        (2, run, "half_loaded", out, out / "half_loaded", data, half, None, torch.bfloat16),
        (2, nan_policy, out, data),
        (1, refusals, out, data, other, out / "whole"),
        (2, disk_full, out, data),
        (1, exported, "whole", out, out / "whole", torch.float32),
        (1, exported, "lora", out, out / "lora", torch.float32),
        (1, adapter, out, out / "lora"),
        (1, exported, "half", out, out / "half", torch.bfloat16),
    ]
    for stage in stages[first:]:
        tiny.run_ranks(*stage)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))  # a stage number continues a failed run
