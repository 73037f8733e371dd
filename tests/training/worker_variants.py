"""Every layout, RoPE and kind of decoder from one trainer. `worker_variants.py OUT`.

One rank and two that share rows, then export.
"""

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
    "gemma3": {"layout": "pod", "num_sink_tokens": 2, "num_recent_tokens": 5, **THETA},
    "granite": {"layout": "dense", **THETA},
    "olmo2": {"layout": "pod", "num_sink_tokens": 2, "num_recent_tokens": 5, **THETA},
    "phi3": {"layout": "dense", **THETA},
    "qwen3_moe": {"layout": "dense", **THETA},
}
SLIDES = (False, False, True, False)
FAMILIES = {
    "gemma3_text": {
        "sliding_window": 4,
        "layer_types": ["sliding_attention" if slides else "full_attention" for slides in SLIDES],
        "query_pre_attn_scalar": 12,
    },
    "granite": {"residual_multiplier": 0.5, "attention_multiplier": 0.5, "logits_scaling": 0.5},
    "llama": {},
    "olmo2": {},
    "phi3": {},
    "qwen3_moe": {
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
    },
}
LORA = {"method": "lora", "lora_rank": 2}
PROMPT = torch.arange(40).reshape(1, 40) % tiny.VOCAB


def write_start_model(folder: Path) -> None:
    """Stock models of random weights, and beside each the plan of tiny.py, but for layers that slide."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from pod.modeling.model.sharing import SharingPlan

    for family, changes in FAMILIES.items():
        torch.manual_seed(0)
        sizes = tiny.STOCK_SIZES | {"head_dim": 8, "hidden_size": 48} | changes
        config = AutoConfig.for_model(
            family,
            **sizes,
            max_position_embeddings=START_CONTEXT,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=tiny.VOCAB - 1,
            pad_token_id=tiny.VOCAB - 1,  # not 0, which the prompt has
        )
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / family)
        windows = SLIDES if family == "gemma3_text" else (False,) * len(SLIDES)
        rows = [[None] * 3 if slides else row for slides, row in zip(windows, tiny.plan_rows(), strict=True)]
        SharingPlan(lead=rows).save(folder / family / "plan.json")  # type: ignore[arg-type]


def start_folder(out: Path, name: str) -> Path:
    """Of the family that a variant is of."""
    return out / "start" / next((family for family in FAMILIES if family.startswith(name)), "llama")


def model_args(out: Path, name: str):
    from pod.models import ModelArgs

    return ModelArgs(path=str(start_folder(out, name)), **VARIANTS[name])


def start_model(out: Path, name: str):
    from pod.training.run.start_model import load_start_model

    plan = start_folder(out, name) / "plan.json" if VARIANTS[name]["layout"] == "pod" else None
    return load_start_model(model_args(out, name), plan)


def train(out: Path, sp_size: int) -> None:
    """All variants one after the other on the ranks that there are.

    Full fine-tuning, and LoRA on two ranks.
    """
    import deepspeed

    from pod.data import PackedDataset
    from pod.training.args import TrainArgs
    from pod.training.run.mesh import Mesh, stop_processes
    from pod.training.run.trainer import Trainer

    mesh, results = Mesh(sp_size), {}
    runs = [(name, {}) for name in VARIANTS]
    if sp_size == 2:
        runs += [("cla", LORA), ("window", LORA)]
    for name, settings in runs:
        args = TrainArgs(
            max_steps=STEPS, sequence_parallel_size=sp_size, dtype="float32", learning_rate=1e-2,
            adam_epsilon=1e-3,  # a large epsilon: Adam would enlarge rounding
            save_every_steps=0, loss_chunk_mib=1, **settings,
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
    """Largest difference of any trained weight between one rank and two.

    It is relative to the largest change of that weight.
    """
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
    from pod.training.checkpoint.newest import checkpoint_to_export
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
    import peft  # noqa: F401  imported once, before the ranks are forked

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
