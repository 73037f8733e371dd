"""What would make a run fail after it has taken its GPUs, found before: sizes, disk, host memory, tools, ranks that disagree.

`check` needs no process group and no weights; every rank calls it, since disks, memory and compilers are a machine's own.
`agree` is the first thing that ranks do together.
"""

import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import uuid
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pod.files import check_can_write
from pod.training.args import TrainArgs, TrainRecipe
from pod.training.predict import planner
from pod.training.predict.job import Job
from pod.training.predict.memory import checkpoint_disk_bytes
from pod.training.predict.planner import GIB, Fit, Machine
from pod.training.predict.shapes import Shapes
from pod.training.run.mesh import SameOnAllRanks, local_world_size

VERSIONED = ("torch", "deepspeed", "transformers", "peft", "pod-kv")
_SHARED = "output_dir"


def check(
    model_config: Any,
    recipe: TrainRecipe,
    manifest: dict[str, Any],
    folder: Path | str,
    machine: Machine,
    *,
    plan: Any = None,
    tokenizer_sha256: str | None = None,
) -> Fit:
    """Refuse a run that cannot end well, and say how it will be trained; about a second.

    Args:
        model_config: the PodConfig that will be trained.
        manifest: the prepared data's manifest (`read_manifest`).
        folder: <output_dir>/train; need not exist yet.
        plan: the SharingPlan, the configuration's own when None.
        tokenizer_sha256: of the model's tokenizer; None = not compared.

    Raises:
        ValueError: in one line, the first thing that is wrong.
    """
    plan = model_config.sharing_plan if plan is None else plan
    check_model(model_config, plan)
    check_data(model_config, manifest, tokenizer_sha256)
    check_tools(recipe, machine.world.size)
    check_attention(model_config, recipe, machine)
    context = int(manifest["context_length"])
    fit = planner.plan(recipe, Shapes.from_config(model_config), plan.lead, context, machine)
    planner.check_fits(fit)
    check_epochs(fit.job, int(manifest["num_rows"]))
    check_can_write(folder, "output_dir")
    check_disk(fit.job, Path(folder))
    return fit


def check_attention(config: Any, args: TrainRecipe, machine: Machine) -> None:
    """Refuse what would silently keep every logit: no fused attention of a GPU takes float32.

    Raises:
        ValueError: float32 on a GPU, unless the reference is asked for by name.
    """
    if machine.has_gpu and args.dtype == "float32" and config.attention_backend == "auto":
        raise ValueError(
            "train.dtype is float32, which fused attention on a GPU does not take: all n x n logits would be kept for backward; "
            "set dtype=bfloat16, or model.attention_backend=reference to have it so"
        )


def check_model(config: Any, plan: Any) -> None:
    """Plan and layout against the configuration.

    Raises:
        ValueError: a plan of other sizes.
    """
    try:
        plan.check_fits(config.num_hidden_layers, config.num_key_value_heads)
    except ValueError as error:
        raise ValueError(
            f"the plan does not belong to this model: {error}; run launch/explore.py on it"
        ) from None


def check_data(config: Any, manifest: dict[str, Any], tokenizer_sha256: str | None) -> None:
    """Prepared rows against the model: tokenizer, vocabulary, positions that RoPE was made for.

    Raises:
        ValueError: data of another tokenizer, ids above the vocabulary, rows longer than the model's positions.
    """
    if tokenizer_sha256 is not None and manifest.get("tokenizer_sha256") != tokenizer_sha256:
        raise ValueError(
            "the data was prepared with another tokenizer than this model's: prepare it again with "
            "launch/prepare_data.py, or name the model that it was prepared for"
        )
    if int(manifest["vocab_size"]) > config.vocab_size:
        raise ValueError(
            f"the data has token ids up to {int(manifest['vocab_size']) - 1}, the model's vocabulary ends at "
            f"{config.vocab_size - 1}: prepare the data with this model's tokenizer"
        )
    context, longest = int(manifest["context_length"]), int(config.max_position_embeddings)
    if context > longest:
        raise ValueError(
            f"the data has rows of {context} tokens, the model's positions end at {longest}: prepare data with "
            f"data.context_length <= {longest}, or extend the model (model.rope_theta or model.rope_type with "
            "model.max_position_embeddings)"
        )
    reach = rope_reach(config.rope_parameters or {})
    if reach is not None and context > reach:
        raise ValueError(
            f"the data has rows of {context} tokens, but RoPE scaling {config.rope_parameters['rope_type']} of factor "
            f"{config.rope_parameters['factor']:g} reaches {reach}: raise model.rope_factor or prepare shorter rows"
        )


def rope_reach(rope: dict[str, Any]) -> int | None:
    """Tokens up to which a scaled RoPE stays within what it was trained on; None = the type sets no bound."""
    original = rope.get("original_max_position_embeddings")
    if rope.get("rope_type") not in ("yarn", "linear") or not original or not rope.get("factor"):
        return None
    return int(original * rope["factor"])


def check_epochs(job: Job, rows: int) -> None:
    """Rows of the data against those of a step and of the run.

    Raises:
        ValueError: more rows in a step than the data has; a run that reads rows again without `allow_repeats`.
    """
    args, each = job.args, job.rows_per_step
    if each > rows:
        raise ValueError(
            f"a step takes {each} rows of {job.context_length} tokens (train.tokens_per_step), the data has {rows}: lower "
            "it, or prepare more data"
        )
    if each * args.max_steps > rows and not args.allow_repeats:
        raise ValueError(
            f"{args.max_steps} steps of {each} rows read the data's {rows} rows {each * args.max_steps / rows:.2f} times: prepare "
            f"more data, lower train.total_tokens or max_steps (to {rows // each}), or set train.allow_repeats=true"
        )


def check_tools(args: TrainRecipe, world_size: int) -> None:
    """Libraries and compilers that the settings need on this machine.

    Raises:
        ValueError: NCCL without CUDA's build, peft missing.
    """
    if torch.cuda.is_available():
        local = local_world_size()
        if local > torch.cuda.device_count():
            raise ValueError(
                f"{local} ranks on this machine, but {torch.cuda.device_count()} GPUs are visible: start one rank per GPU "
                "(--num_gpus, --gpus-per-node, CUDA_VISIBLE_DEVICES)"
            )
        if world_size > 1 and not dist.is_nccl_available():
            raise ValueError(
                "this PyTorch has no NCCL, which several GPUs need: install a CUDA build of torch"
            )
        if args.dtype == "bfloat16" and not torch.cuda.is_bf16_supported(including_emulation=False):
            raise ValueError(
                "this GPU has no bfloat16 (compute capability 8.0 and newer have): set train.dtype=float32"
            )
    elif world_size > 1 and not dist.is_gloo_available():
        raise ValueError(
            "this PyTorch has no gloo, which several ranks without GPUs need: install another build of torch"
        )
    if args.method == "lora" and not _installed("peft"):
        raise ValueError(
            "train.method=lora needs the package peft: pip install peft, or set train.method=full"
        )


def check_disk(job: Job, folder: Path) -> None:
    """Free bytes at `folder` against the checkpoints that will lie there at the same time.

    What checkpoints of this run already hold there counts as available: they rotate.

    Raises:
        ValueError: how much is needed, and what for.
    """
    args = job.args
    each = checkpoint_disk_bytes(job.shapes.trained_parameters(args))
    saves = kept_checkpoints(args)
    held = _bytes_below(folder) if folder.is_dir() else 0
    free = shutil.disk_usage(_nearest(folder)).free
    if each * saves > free + held:
        raise ValueError(
            f"{folder} has {_gib(free)} free, but {saves} checkpoints of {_gib(each)} will lie there ({args.keep_last} kept "
            f"by keep_last{_kept_forever(args)}, one being written): free {_gib(each * saves - free - held)}, lower "
            "train.keep_last, or set another output_dir"
        )


def kept_checkpoints(args: TrainArgs) -> int:
    """Most checkpoints that lie on disk at a time: the rotating ones, those kept for good, and one being written."""
    every = args.save_every_steps
    if every is None:  # by the clock
        return args.keep_last + 1 + args.max_steps // (args.keep_every_steps or args.max_steps + 1)
    made = args.max_steps // every + bool(args.max_steps % every) if every else 1
    forever = 0
    if args.keep_every_steps and every:
        forever = sum(step % args.keep_every_steps == 0 for step in range(every, args.max_steps + 1, every))
    return min(made, args.keep_last + 1 + forever)


def agree(mesh: Any, config: dict[str, Any], folder: Path | str, facts: dict[str, str] | None = None) -> None:
    """Refuse ranks that would not train the same thing. The first common act of all ranks; the same error on each.

    Args:
        mesh: the ranks (`rank`, `world_size`, `device`).
        config: the resolved recipe, compared section by section.
        folder: <output_dir>/train: a file of rank 0 there must be visible to all.
        facts: further values that must be equal on all ranks, by name.

    Raises:
        ValueError: in one line, the ranks that differ from rank 0 and in what.
    """
    seen = "seen" if _sees_rank_zero(mesh, Path(folder)) else "not seen"
    mine = {**versions(), **_digests(config), **(facts or {}), _SHARED: seen}
    everyone = _gather(mesh, mine)
    for name in mine:
        values = [one.get(name, "nothing") for one in everyone]
        if name == _SHARED and set(values) != {"seen"}:
            blind = _ranks([rank for rank, value in enumerate(values) if value != "seen"])
            raise SameOnAllRanks(
                f"{blind} cannot see what rank 0 writes into {folder}: put output_dir on a file system that all machines share"
            )
        others = [rank for rank, value in enumerate(values) if value != values[0]]
        if others:
            theirs = values[others[0]]
            detail = f" ({values[0]} on rank 0, {theirs} on rank {others[0]})" if len(theirs) < 40 else ""
            raise SameOnAllRanks(
                f"{_ranks(others)} and rank 0 disagree on {name}{detail}: use the same recipe, packages and files on all machines"
            )


def versions() -> dict[str, str]:
    """Versions that all ranks must share, by package."""
    found = {"the version of Python": platform.python_version()}
    for package in VERSIONED:
        found[f"the version of {package}"] = (
            importlib.metadata.version(package) if _installed(package) else "missing"
        )
    return found


def _digests(config: dict[str, Any]) -> dict[str, str]:
    def digest(value: Any) -> str:
        return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()

    return {f"the recipe's {name}": digest(value) for name, value in config.items()}


def _sees_rank_zero(mesh: Any, folder: Path) -> bool:
    """Whether this rank sees a file that rank 0 has just written into `folder`."""
    token = torch.frombuffer(bytearray(uuid.uuid4().bytes), dtype=torch.uint8).to(mesh.device)
    dist.broadcast(token, src=0)
    marker = folder / f".seen-{bytes(token.tolist()).hex()}"
    if mesh.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        marker.touch()
    dist.barrier()
    seen = marker.is_file() or marker.name in os.listdir(folder) if folder.is_dir() else False
    dist.barrier()
    if mesh.rank == 0:
        marker.unlink(missing_ok=True)
    return seen


def _gather(mesh: Any, facts: dict[str, str]) -> list[dict[str, str]]:
    """The facts of every rank, as JSON in padded byte tensors: nothing of another rank is unpickled."""
    text = json.dumps(facts).encode()
    length = torch.tensor([len(text)], device=mesh.device)
    dist.all_reduce(length, op=dist.ReduceOp.MAX)
    padded = torch.frombuffer(bytearray(text.ljust(int(length.item()))), dtype=torch.uint8).to(mesh.device)
    everyone = [torch.empty_like(padded) for _ in range(mesh.world_size)]
    dist.all_gather(everyone, padded)
    return [json.loads(bytes(one.tolist())) for one in everyone]


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def _installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _kept_forever(args: TrainArgs) -> str:
    return f", those of every {args.keep_every_steps} steps for good" if args.keep_every_steps else ""


def _nearest(folder: Path) -> Path:
    """The folder itself, or the nearest one above it that exists."""
    place = Path(os.path.abspath(folder))
    while not place.exists():
        place = place.parent
    return place


def _bytes_below(folder: Path) -> int:
    """Bytes of the checkpoints in `folder`."""
    return sum(file.stat().st_size for file in folder.glob("step-*/**/*") if file.is_file())


def _gib(value: float) -> str:
    return f"{value / GIB:.1f} GiB"
