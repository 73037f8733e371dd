"""Weights that rank 0 reads one at a time against whole models on every rank.

Also one rank's trouble. `worker_start.py OUT`.
"""

import json
import shutil
import sys
from pathlib import Path

import tiny
import torch
from worker_runs import optimizer_hash

STEPS = 3
LORA = {"method": "lora", "lora_rank": 2, "lora_dropout": 0.3}
CASES: dict[str, tuple[dict, dict]] = {
    **{
        f"stage{stage}": ({"layout": "pod"}, {"zero_stage": stage, "dtype": "float32"}) for stage in (1, 2, 3)
    },
    **{f"half{stage}": ({"layout": "pod"}, {"zero_stage": stage}) for stage in (1, 3)},
    **{f"lora{stage}": ({"layout": "pod"}, {"zero_stage": stage, **LORA}) for stage in (1, 3)},
    "cla": ({"layout": "cla"}, {"zero_stage": 3}),
    "cla_lora": ({"layout": "cla"}, {"zero_stage": 3, **LORA}),
    "window": ({"layout": "window", "num_sink_tokens": 0}, {"zero_stage": 3, "offload_parameters": "cpu"}),
    "untied": ({"layout": "pod"}, {"zero_stage": 3, "dtype": "float32"}),
    "own_head": ({"layout": "pod"}, {"zero_stage": 3, "dtype": "float32"}),
}


def checkpoint_of(name: str, out: Path) -> Path:
    return out / (name if name in ("untied", "own_head") else "start")


def model_args(name: str, out: Path):
    from pod.models import ModelArgs

    choices = {"num_sink_tokens": 2, "num_recent_tokens": 5, **CASES[name][0]}
    return ModelArgs(path=str(checkpoint_of(name, out)), **choices)


def whole_model(args, model_args, plan):
    """As it comes from `pod.load_model`, which reads with transformers."""
    import pod

    model = pod.load_model(
        model_args.path,
        plan=plan,
        layout=model_args.layout,
        num_sink_tokens=model_args.num_sink_tokens,
        num_recent_tokens=model_args.num_recent_tokens,
        dtype="float32" if model_args.layout == "cla" else args.dtype,
    )
    return model.to(getattr(torch, args.dtype))


def left_to_the_engine(module, values, *others) -> None:
    """In the place of `place_weights`: whole weights on every rank, which the engine divides."""
    for parameter in module.parameters():
        values(parameter)


def train(name: str, out: Path) -> None:
    """Both ways, one after the other on the same ranks."""
    from pod.data import PackedDataset
    from pod.training import deepspeed_bridge as bridge
    from pod.training.args import TrainArgs
    from pod.training.run.mesh import Mesh, from_rank_0, stop_processes
    from pod.training.run.start_model import hollow_start_model
    from pod.training.run.trainer import Trainer

    chosen = model_args(name, out)
    args = TrainArgs(loss_chunk_mib=1, learning_rate=1e-2, save_every_steps=0, **CASES[name][1])
    plan = checkpoint_of(name, out) / "plan.json" if chosen.layout == "pod" else None
    mesh, results, placing = Mesh(1), {}, bridge.place_weights
    for way in ("placed", "whole"):
        if way == "placed":
            model, weights = hollow_start_model(chosen, plan, args.dtype)
            from_rank_0(weights.open)
            bridge.place_weights = placing
        else:
            model, weights = whole_model(args, chosen, plan), None
            bridge.place_weights = left_to_the_engine
        data = PackedDataset(out / "data")
        trainer = Trainer(args, model, data, mesh, out / f"{name}-{way}", weights=weights)
        results[way] = {"losses": [trainer.step()["loss"] for _ in range(STEPS)]}
        results[way] |= {"hash": optimizer_hash(trainer), "identity": trainer.state.identity}
        results[way]["names"] = [name for name, _ in model.named_parameters()]
        results[way]["generation"] = model.generation_config.to_diff_dict().get("eos_token_id")
        trainer.batches.close()
    tiny.write_result(out, f"{name}_rank{mesh.rank}", results)
    stop_processes()


def damaged(out: Path) -> None:
    """A checkpoint that rank 0 cannot use is refused by all ranks in the same words."""
    from safetensors.torch import load_file, save_file

    from pod.training.run.mesh import Mesh, from_rank_0, stop_processes
    from pod.training.run.start_model import hollow_start_model

    mesh = Mesh(1)
    if mesh.rank == 0:
        shard = sorted((out / "start").glob("*.safetensors"))[1]
        weights = load_file(shard)
        weights["model.surplus.weight"] = weights.pop(sorted(weights)[0])
        save_file(weights, shard, metadata={"format": "pt"})
    said = "accepted"
    try:
        _, opened = hollow_start_model(model_args("stage1", out), out / "start" / "plan.json")
        from_rank_0(opened.open)
    except ValueError as error:
        said = str(error)
    tiny.write_result(out, f"damaged_rank{mesh.rank}", {"said": said})
    stop_processes()


def main(out: Path) -> None:
    import peft  # noqa: F401  imported once, before the ranks are forked

    import pod

    tiny.make_data(out / "data")
    order = ((0, 1, 2, 3, 4, 5), (4, 5, 0, 1, 3, 2), (2, 3, 4, 5, 0, 1), (0, 1, 3, 2, 4, 5))
    for name, tied in (("start", True), ("untied", False)):
        stock = tiny.make_stock(tied)
        stock.save_pretrained(out / name, max_shard_size="20KB")
        pod.SharingPlan(lead=tiny.plan_rows(), head_order=order).save(out / name / "plan.json")
    assert len(list((out / "start").glob("*.safetensors"))) > 3
    shutil.copytree(out / "untied", out / "own_head")  # whose configuration says that it has none
    config = json.loads((out / "own_head" / "config.json").read_text())
    (out / "own_head" / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    for name in CASES:
        tiny.run_ranks(2, train, name, out)
    tiny.run_ranks(2, damaged, out)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
