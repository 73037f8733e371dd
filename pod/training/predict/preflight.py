"""Checks before a run takes its GPUs: whether sizes, data, disk and GPUs allow it.

No process group and no weights are needed. Every rank makes the checks, because each machine has disks,
memory and GPUs of its own.
"""

import os
import shutil
from pathlib import Path
from typing import Any

import torch

from pod import toolchain
from pod.files import check_can_write
from pod.modeling.model.sharing import dense_lead
from pod.training.args import TrainArgs, TrainRecipe
from pod.training.predict import layout_search
from pod.training.predict.attention_backend import attention_backend, refusals
from pod.training.predict.layout_search import Machine, ParallelLayout
from pod.training.predict.memory_estimate import TrainingJob, checkpoint_disk_bytes
from pod.training.predict.shapes import Shapes
from pod.training.run.mesh import local_world_size
from pod.units import GIB


def check(
    config: Any, recipe: TrainRecipe, manifest: dict[str, Any], folder: Path | str, machine: Machine
) -> ParallelLayout:
    """Refuse a run that would fail, else return its parallel layout. This takes about a second.

    Args:
        config: the PodConfig that will be trained.
        manifest: the prepared data's manifest (`read_manifest`).
        folder: <output_dir>/train; need not exist yet.

    Raises:
        ValueError: in one line, the first thing that is wrong.
    """
    context = int(manifest["context_length"])
    check_positions(config, context)
    check_teacher(config, recipe.distill)
    check_gpus(recipe)
    shapes = Shapes.from_config(config)
    check_attention(shapes, recipe, machine)
    layout = layout_search.choose_layout(recipe, shapes, config.sharing_plan.lead, context, machine)
    layout_search.check_fits(layout)
    check_epochs(layout.job, int(manifest["num_rows"]))
    check_can_write(folder, "output_dir")
    check_disk(layout.job, Path(folder))
    return layout


def check_attention(shapes: Shapes, args: TrainRecipe, machine: Machine) -> None:
    """Raise ValueError when the configured backend of attention cannot train, or `auto` finds no fast one.

    The reference keeps every logit, so it runs only where it is asked for by name.
    """
    backend = attention_backend(shapes, args.dtype, machine.has_gpu)
    if backend == "reference" and shapes.attention_backend == "auto":
        reasons = refusals(shapes, args.dtype, machine.has_gpu)
        told = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        others = refusals(shapes, "bfloat16", machine.has_gpu).values()
        helps = "train.dtype=bfloat16, or " if None in others else ""
        raise ValueError(
            f"no fused attention runs here ({told}); without it, all n x n logits stay in memory for the "
            f"backward pass: set {helps}model.attention_backend=reference to accept this"
        )


def check_positions(config: Any, context_length: int) -> None:
    """Raise ValueError when rows have more tokens than the model's `max_position_embeddings`."""
    longest = int(config.max_position_embeddings)
    if context_length > longest:
        raise ValueError(
            f"the data has rows of {context_length} tokens, but the model reads at most {longest}: prepare "
            f"data with data.context_length <= {longest}, or extend the model (model.rope_theta or "
            "model.rope_type with model.max_position_embeddings)"
        )


def check_teacher(config: Any, distill: float) -> None:
    """Raise ValueError when a run distils, but the model has no dense teacher that differs from it."""
    if not distill:
        return
    if config.layout != "pod":
        raise ValueError(
            f"train.distill is {distill:g} with model.layout={config.layout}, but only a model of layout=pod "
            "has a dense teacher: set distill=0"
        )
    lead = config.sharing_plan.lead
    if lead == dense_lead(map(len, lead), config.trained_windows):
        raise ValueError(
            f"train.distill is {distill:g}, but every head leads, so the model would be its own teacher: "
            "make a plan with `pod explore`, or set distill=0"
        )


def check_length(asked: int, length: int, folder: Path) -> None:
    """Raise ValueError when prepared rows have `length` tokens, but the recipe asks for another number.

    Args:
        asked: `data.context_length`.
        length: tokens of the prepared rows.
        folder: of the prepared rows, for the message.
    """
    if asked != length:
        raise ValueError(
            f"data.context_length is {asked}, but the rows in {folder} have {length} tokens: "
            f"run `pod data` again, or set data.context_length={length}"
        )


def check_epochs(job: TrainingJob, rows: int) -> None:
    """Raise ValueError when the data has fewer rows than a step takes.

    Without `allow_repeats`, the data must have as many rows as the whole run reads.
    """
    args, each = job.args, job.rows_per_step
    if each > rows:
        raise ValueError(
            f"a step takes {each} rows of {job.context_length} tokens, but the data has {rows}: lower "
            "train.tokens_per_step, or prepare more data"
        )
    if each * args.max_steps > rows and not args.allow_repeats:
        raise ValueError(
            f"{args.max_steps} steps of {each} rows read the data's {rows} rows "
            f"{each * args.max_steps / rows:.2f} times: prepare more data, lower train.total_tokens or "
            f"max_steps (to {rows // each}), or set train.allow_repeats=true"
        )


def check_gpus(args: TrainRecipe) -> None:
    """Raise ValueError when this machine's GPUs cannot run the training.

    It refuses more ranks than GPUs, bfloat16 on a GPU without it, and fused layers that cannot be compiled
    here. Without any GPU it refuses nothing.
    """
    if not torch.cuda.is_available():
        return
    ranks = local_world_size()
    gpus = torch.cuda.device_count()
    if ranks > gpus:
        raise ValueError(
            f"{ranks} ranks on this machine, but {gpus} GPUs are visible: start one rank per GPU "
            "(--num_gpus, --gpus-per-node, CUDA_VISIBLE_DEVICES)"
        )
    obstacle = toolchain.obstacle()
    if args.fused_layers != "none" and obstacle is not None:
        raise ValueError(
            f"train.fused_layers={args.fused_layers} compiles kernels by Triton: {obstacle}; or set "
            f"train.fused_layers=none"
        )
    if args.dtype == "bfloat16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise ValueError(
            "this GPU has no bfloat16 (it needs compute capability 8.0 or newer): set train.dtype=float32"
        )


def check_disk(job: TrainingJob, folder: Path) -> None:
    """Raise ValueError when the disk of `folder` cannot hold the checkpoints that a run keeps at a time.

    The bytes of checkpoints that are in `folder` already count as free, because old checkpoints are removed.
    """
    args = job.args
    each = checkpoint_disk_bytes(job.shapes.trained_parameters(args))
    saves = kept_checkpoints(args)
    held = sum(file.stat().st_size for file in folder.glob("step-*/**/*") if file.is_file())
    place = Path(os.path.abspath(folder))
    free = shutil.disk_usage(next(one for one in (place, *place.parents) if one.exists())).free
    if each * saves > free + held:
        kept = (
            f", one every {args.keep_every_steps} steps by keep_every_steps" if args.keep_every_steps else ""
        )
        raise ValueError(
            f"{folder} has {_gib(free)} free, but needs room for {saves} checkpoints of {_gib(each)} each "
            f"({args.keep_last} by keep_last{kept}, one being written): free "
            f"{_gib(each * saves - free - held)}, lower train.keep_last, or set another output_dir"
        )


def kept_checkpoints(args: TrainArgs) -> int:
    """Most checkpoints that are on disk at a time.

    These are `keep_last`, those that `keep_every_steps` keeps for good, and one that is being written. A run
    that saves only at its end keeps one.
    """
    if args.save_every_steps == 0:  # it saves only at the end
        return 1
    for_good = args.max_steps // args.keep_every_steps if args.keep_every_steps else 0
    return args.keep_last + 1 + for_good


def _gib(value: float) -> str:
    return f"{value / GIB:.1f} GiB"
