"""Every layout and RoPE from one trainer: one rank and two that share rows, then export. `worker_variants.py OUT`."""

import sys
from pathlib import Path

import tiny
import torch

STEPS = 3
CONTEXT = 41
START_CONTEXT = 32  # of the start model: every variant extends it
LONG = {"max_position_embeddings": 64}
THETA = {**LONG, "rope_theta": 16e6}
VARIANTS = {
    "dense_theta": {"layout": "dense", **THETA},
    "dense_llama3": {"layout": "dense", "rope_type": "llama3", "rope_factor": 2.0},
    "dense_yarn": {"layout": "dense", "rope_type": "yarn", **LONG},
    "pod": {"layout": "pod", "num_sink_tokens": 2, "num_recent_tokens": 5, **THETA},
    "cla": {"layout": "cla", **THETA},
    "window": {"layout": "window", "num_sink_tokens": 0, "num_recent_tokens": 6, **THETA},
}
LORA = {"method": "lora", "lora_rank": 2}
PROMPT = torch.arange(40).reshape(1, 40) % tiny.VOCAB


def write_start_model(folder: Path) -> None:
    """A stock Llama of random weights, and the plan of tiny.py beside it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from pod.modeling.shipped.sharing import SharingPlan

    torch.manual_seed(0)
    config = LlamaConfig(
        **tiny.STOCK_SIZES,
        max_position_embeddings=START_CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=tiny.VOCAB - 1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    SharingPlan(lead=tiny.plan_rows()).save(folder / "plan.json")  # type: ignore[arg-type]


def model_args(out: Path, name: str):
    from pod.models import ModelArgs

    return ModelArgs(path=str(out / "start"), **VARIANTS[name])


def start_model(out: Path, name: str):
    from pod.training.run.start_model import load_start_model

    plan = out / "start" / "plan.json" if name == "pod" else None
    return load_start_model(model_args(out, name), plan)


def train(out: Path, sp_size: int) -> None:
    """All variants one after the other on the ranks that there are; full fine-tuning, and LoRA on two ranks."""
    import deepspeed

    from pod.data import PackedDataset
    from pod.training.args import TrainArgs
    from pod.training.run.mesh import start_processes, stop_processes
    from pod.training.run.trainer import Trainer

    mesh, results = start_processes(sp_size), {}
    runs = [(name, {}) for name in VARIANTS]
    if sp_size == 2:
        runs += [("cla", LORA), ("window", LORA)]
    for name, settings in runs:
        args = TrainArgs(
            max_steps=STEPS, sequence_parallel_size=sp_size, dtype="float32", learning_rate=1e-2, adam_epsilon=1e-3,
            save_every_steps=0, loss_chunk_mib=1, **settings,  # a large epsilon: Adam would enlarge rounding
        )  # fmt: skip
        label = f"{name}_lora" if settings else name
        folder = out / f"{label}-{sp_size}"
        trainer = Trainer(args, start_model(out, name), PackedDataset(out / "data"), mesh, folder)
        losses = []
        while trainer.state.step < STEPS:
            losses.append(trainer.step()["loss"])
        trainer.checkpointer.save(trainer.state)
        trainer.checkpointer.close()
        weights = {}
        for key, parameter in trainer.engine.module.model.named_parameters():
            with deepspeed.zero.GatheredParameters([parameter]):
                weights[key] = parameter.detach().clone()
        results[label] = losses
        if mesh.rank == 0:
            torch.save(weights, folder / "trained.pt")
    if mesh.rank == 0:
        tiny.write_result(out, f"losses_{sp_size}", results)
    stop_processes()


def compare(out: Path) -> None:
    """Largest difference of any trained weight between one rank and two, relative to the largest change of that weight."""
    differences = {}
    for name in VARIANTS:
        one, two = (torch.load(out / f"{name}-{size}" / "trained.pt", weights_only=True) for size in (1, 2))
        start = dict(start_model(out, name).named_parameters())
        assert one.keys() == two.keys() == start.keys()
        moved = max((one[key] - start[key]).abs().max() for key in one)
        differences[name] = float(max((one[key] - two[key]).abs().max() for key in one) / moved)
    tiny.write_result(out, "weights", differences)


def exports(out: Path) -> None:
    """Export the runs on two ranks and load them as a user does who has transformers only."""
    from functools import partial

    from pod.export import export
    from pod.training.checkpoint.restore import checkpoint_to_export
    from pod.training.run.lora import add_lora, lora_settings

    results = {}
    for label in [*VARIANTS, "cla_lora", "window_lora"]:
        name, folder, path = label.removesuffix("_lora"), out / f"{label}-2", out / f"{label}-export"

        def from_plan(plan, name):
            from pod.training.run.start_model import load_start_model

            return load_start_model(model_args(out, name), plan)

        export(checkpoint_to_export(folder, None), path, None, start_model=partial(from_plan, name=name))
        trained = start_model(out, name)
        if label != name:
            from pod.training.args import TrainArgs

            trained = add_lora(trained, lora_settings(TrainArgs(**LORA)))
        _, unexpected = trained.load_state_dict(
            torch.load(folder / "trained.pt", weights_only=True), strict=False
        )
        loaded = tiny.exported_class(path).from_pretrained(path).eval()
        with torch.no_grad():
            expected, got = trained.eval()(input_ids=PROMPT).logits, loaded(input_ids=PROMPT).logits
        generated = loaded.generate(PROMPT, max_new_tokens=4, do_sample=False, eos_token_id=-1)
        results[label] = {
            "error": float((expected - got).abs().max() / expected.abs().max()),
            "unexpected": unexpected,
            "module": type(loaded).__module__,
            "layout": loaded.config.layout,
            "rope": loaded.config.rope_parameters,
            "positions": loaded.config.max_position_embeddings,
            "windows": [loaded.config.num_sink_tokens, loaded.config.num_recent_tokens],
            "method": loaded.config.own_method,
            "first_token": [int(generated[0, 40]), int(expected[0, -1].argmax())],
            "num_generated": generated.shape[1] - 40,
        }
    tiny.write_result(out, "exports", results)


def main(out: Path, first: int = 0) -> None:
    import deepspeed  # noqa: F401  imported once, before the ranks are forked
    import peft  # noqa: F401

    import pod  # noqa: F401

    tiny.make_data(out / "data", context=CONTEXT)
    stages = [
        (1, write_start_model, out / "start"),
        (1, train, out, 1),
        (2, train, out, 2),
        (1, compare, out),
        (1, exports, out),
    ]
    for stage in stages[first:]:
        tiny.run_ranks(*stage)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
