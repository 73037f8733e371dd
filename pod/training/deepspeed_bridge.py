"""Everything that we touch of DeepSpeed, its private parts above all: nothing else in `pod` imports it.

`check_parts` compares what is installed with what these functions use, so that another version fails at the start of a run in
one line and not after the first checkpoint. Imports of DeepSpeed are inside functions: they take seconds, and a dry run needs
none.
"""

import contextlib
import inspect
import logging
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

TESTED = "0.19.8"
"""The DeepSpeed that all tests of this project ran with."""

_PARTS: dict[str, tuple[str, ...]] = {
    "deepspeed:initialize": ("model", "optimizer", "config", "mpu"),
    "deepspeed:init_distributed": ("verbose", "timeout"),
    "deepspeed.ops:__compatible_ops__": (),
    "deepspeed.ops.op_builder.cpu.comm:ShareMemCommBuilder.NAME": (),
    "deepspeed.utils:logger.setLevel": (),
    "deepspeed.utils.zero_to_fp32:get_fp32_state_dict_from_zero_checkpoint": (
        "checkpoint_dir",
        "tag",
        "exclude_frozen_parameters",
    ),
    "deepspeed.runtime.sequence_parallel.parallel_state_sp:initialize_sequence_parallel": (
        "sequence_parallel_size",
    ),
    "deepspeed.runtime.sequence_parallel.parallel_state_sp:get_sequence_parallel_group": (),
    "deepspeed.runtime.engine:ZERO_OPTIMIZATION": (),
    "deepspeed.runtime.engine:DeepSpeedEngine._do_optimizer_sanity_check": ("basic_optimizer",),
    "deepspeed.runtime.engine:DeepSpeedEngine._copy_recovery_script": ("save_path",),
    "deepspeed.runtime.engine:DeepSpeedEngine.save_checkpoint": (
        "tag",
        "save_latest",
        "exclude_frozen_parameters",
    ),
    "deepspeed.runtime.engine:DeepSpeedEngine.load_checkpoint": ("tag", "load_module_strict"),
    "deepspeed.runtime.engine:DeepSpeedEngine.backward": ("scale_wrt_gas",),
    "deepspeed.runtime.engine:DeepSpeedEngine.get_global_grad_norm": (),
    "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.load_state_dict": ("checkpoint_folder",),
    "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.update_lp_params": (),
    "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.get_param_id": ("param",),
    "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3.load_state_dict": ("checkpoint_folder",),
    "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3.get_param_id": ("param",),
    "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3.checkpoint_event_prologue": (),
    "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3.checkpoint_event_epilogue": (),
    "deepspeed.runtime.zero:Init": ("module", "config_dict_or_path", "dtype"),
    "deepspeed.runtime.zero.partition_parameters:Init._convert_to_deepspeed_param": ("param",),
    "deepspeed.runtime.fp16.loss_scaler:LossScaler": (),
    "deepspeed.runtime.zero.config:ZeroStageEnum": (),
    "deepspeed.sequence.linear_cross_entropy:_VocabParallelLinearCrossEntropy.forward": (
        "hidden",
        "bias",
        "target",
        "tp_group",
        "vocab_start_index",
        "compute_dtype",
    ),
    "deepspeed.checkpoint.ds_to_universal:main": ("args",),
    "deepspeed.checkpoint.ds_to_universal:ProcessPoolExecutor": (),
    "deepspeed.checkpoint.ds_to_universal:merge_zero3_slices": ("dp_degree", "dir", "slice_dir", "name"),
    "deepspeed.checkpoint.ds_to_universal:_merge_zero_shards": ("param_base_path", "state", "tp_degree"),
    "deepspeed.checkpoint.ds_to_universal:_save_checkpoint": ("file_path", "chkpt_sd"),
}
"""`module:attribute` of what is used, and the names of parameters that are passed or stood in for."""


def check_parts(parts: dict[str, tuple[str, ...]] | None = None) -> None:
    """Whether the installed DeepSpeed has every part that is used here, with its parameters.

    Raises:
        ValueError: one line with the versions and the first part that is not as it was.
    """
    for part, names in (_PARTS if parts is None else parts).items():
        problem = _problem(part, names)
        if problem is not None:
            raise _other_version(problem)


def _problem(part: str, names: tuple[str, ...]) -> str | None:
    module, _, path = part.partition(":")
    try:
        found: Any = import_module(module)
        for attribute in path.split("."):
            found = getattr(found, attribute)
    except (ImportError, AttributeError):
        return f"{module}.{path} is missing"
    taken = inspect.signature(found).parameters if names else {}
    absent = sorted(set(names) - taken.keys())
    # a decorated function shows no names
    if absent and not any(one.kind is one.VAR_KEYWORD for one in taken.values()):
        return f"{module}.{path} does not take {', '.join(absent)}"
    return None


def _other_version(problem: str) -> ValueError:
    import deepspeed

    return ValueError(
        f"deepspeed {deepspeed.__version__} is installed, and {problem}; this project was tested with {TESTED}: "
        f"pip install deepspeed=={TESTED}"
    )


# Ranks


def join_ranks(timeout_s: float | None) -> None:
    """Make the process group of the ranks that a launcher started.

    Args:
        timeout_s: seconds after which an operation that waits for other ranks fails; None = PyTorch's own.

    Raises:
        ValueError: see `check_parts`.
    """
    import deepspeed
    from deepspeed.ops.op_builder.cpu.comm import ShareMemCommBuilder
    from deepspeed.utils import logger

    check_parts()
    logger.setLevel(logging.WARNING)  # its information would break the progress bar
    # DeepSpeed's own calls
    warnings.filterwarnings("ignore", message="`torch.distributed", category=FutureWarning)
    # The shared-memory op serves DeepSpeed's inference all-reduce only, and compiling it takes 75 s and a compiler.
    deepspeed.ops.__compatible_ops__[ShareMemCommBuilder.NAME] = False
    limit: dict[str, Any] = {} if timeout_s is None else {"timeout": timedelta(seconds=timeout_s)}
    deepspeed.init_distributed(verbose=False, **limit)


def sequence_groups(size: int) -> tuple[Any, Any]:
    """What `start_engine` takes as `mpu`, and this rank's group, when each `size` contiguous ranks share a row."""
    from deepspeed.runtime.sequence_parallel import parallel_state_sp

    parallel_state_sp.initialize_sequence_parallel(size)
    return parallel_state_sp, parallel_state_sp.get_sequence_parallel_group()


# Engine and steps


def start_engine(
    module: nn.Module, optimizer: torch.optim.Optimizer, settings: dict[str, Any], mpu: Any
) -> Any:
    """The engine that trains `module` on all ranks.

    Raises:
        ValueError: an engine or optimizer without the parts that are used here.
    """
    import deepspeed

    with _zero_optimizer_in_every_stage():
        engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=settings, mpu=mpu)
    parts = {"checkpoint_engine": Any, "mpu": Any, "global_steps": int, "optimizer.overflow": bool}
    parts |= {"optimizer.optimizer": torch.optim.Optimizer, "optimizer.param_groups": list}
    for path, kind in parts.items():
        found: Any = engine
        for name in path.split("."):
            if not hasattr(found, name):
                raise _other_version(f"its engine has no {path}")
            found = getattr(found, name)
        if kind is not Any and not isinstance(found, kind):
            raise _other_version(f"its engine's {path} is a {type(found).__name__} and no {kind.__name__}")
    return engine


def place_weights(
    module: nn.Module,
    values: Callable[[nn.Parameter], Tensor],
    settings: dict[str, Any],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Put the weights of a module where the engine wants them, one at a time: divided among all ranks in stage 3, else whole.

    Rank 0 says what they are; in stage 3 the others hold them when this returns, else when `start_engine` does. A rank holds
    its share and one weight.

    Args:
        values: of a weight, which may be on another device and of another type; called on rank 0 only, in the module's order.
        settings: of the engine.
        dtype, device: of all weights.
    """
    from deepspeed.runtime.zero import Init

    divide = None
    for parameter in module.parameters():
        weight = torch.empty(parameter.shape, dtype=dtype, device=device)
        if dist.get_rank() == 0:
            weight.copy_(values(parameter))
        parameter.data = weight
        del weight
        if settings["zero_optimization"]["stage"] < 3:
            continue
        if divide is None:
            Init(nn.ParameterList([parameter]), config_dict_or_path=settings, dtype=dtype)
            divide = parameter.convert_to_zero_parameters  # type: ignore[attr-defined]
        else:
            divide(param_list=[parameter])
    for buffer in module.buffers():
        buffer.data = buffer.to(device)


def shape_of(parameter: nn.Parameter) -> torch.Size:
    """Of the whole weight, also where it is divided."""
    return getattr(parameter, "ds_shape", parameter.shape)


@contextlib.contextmanager
def _zero_optimizer_in_every_stage() -> Iterator[None]:
    """Around the start of an engine: no `BF16_Optimizer`.

    DeepSpeed takes it for bfloat16 with float32 accumulation in stage 1. It keeps the float32 gradients of all weights on
    every rank and needs a model-parallel group, which there is none of with sequence parallelism.
    """
    from deepspeed.runtime.engine import ZERO_OPTIMIZATION, DeepSpeedEngine

    original = DeepSpeedEngine._do_optimizer_sanity_check
    DeepSpeedEngine._do_optimizer_sanity_check = lambda self, basic_optimizer: ZERO_OPTIMIZATION
    try:
        yield
    finally:
        DeepSpeedEngine._do_optimizer_sanity_check = original


def drop_hooks(module: nn.Module) -> None:
    """Take ZeRO-3's hooks off a module that owns no weights; those of its children stay."""
    assert not list(module.parameters(recurse=False)), "this module's weights need ZeRO-3's hooks"
    module._forward_pre_hooks.clear()
    module._forward_hooks.clear()


def set_learning_rate(engine: Any, rate: float) -> None:
    """Of the coming update, for all groups of weights."""
    for group in engine.optimizer.param_groups:
        group["lr"] = rate


def was_skipped(engine: Any) -> bool:
    """Whether the last update was left out because a gradient was NaN or infinite."""
    return bool(engine.optimizer.overflow)


def linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, ignored: int, rows: int) -> Tensor:
    """Sum of the cross entropies of `hidden @ weight.T` in fp32, exact gradients, logits of `rows` tokens at a time.

    Args:
        hidden: [B, n, hidden]; weight: [V, hidden]; labels: [B, n], `ignored` = no label.
    """
    from deepspeed.sequence.linear_cross_entropy import _VocabParallelLinearCrossEntropy

    # What is around it waits for the device to compare labels with the vocabulary; the data did so when it was opened.
    tokens, kind = hidden.reshape(-1, hidden.shape[-1]), torch.promote_types(hidden.dtype, weight.dtype)
    vocabulary = (None, 0, weight.shape[0])  # no tensor parallelism
    return _VocabParallelLinearCrossEntropy.apply(
        tokens.contiguous(), weight.contiguous(), None, labels.reshape(-1), *vocabulary, ignored, rows, kind
    ).sum()


# Checkpoints


def hyperparameters(engine: Any) -> list[dict[str, Any]]:
    """Learning rate, decay and so on of each group of weights; a copy."""
    return [
        {name: value for name, value in group.items() if name != "params"}
        for group in engine.optimizer.optimizer.param_groups
    ]


def set_hyperparameters(engine: Any, groups: list[dict[str, Any]]) -> None:
    """Put back what `hyperparameters` gave; a loaded checkpoint brings its own."""
    for group, values in zip(engine.optimizer.optimizer.param_groups, groups, strict=True):
        group.update(values)


def write_through(engine: Any, wrap: Callable[[Any], Any]) -> Any:
    """Let `wrap(DeepSpeed's writer of files)` write the engine's checkpoints; returns it.

    No recovery script is put beside them: launch/export_hf.py is the way out.
    """
    engine._copy_recovery_script = lambda path: None
    engine.checkpoint_engine = wrap(engine.checkpoint_engine)
    return engine.checkpoint_engine


def save_engine(engine: Any, folder: Path) -> None:
    """DeepSpeed's files into `folder`. Frozen weights are the start model's and left out: LoRA's base."""
    mpu, engine.mpu = engine.mpu, None  # else the file takes sequence for tensor parallelism
    try:
        engine.save_checkpoint(
            str(folder.parent), tag=folder.name, save_latest=False, exclude_frozen_parameters=True
        )
    finally:
        engine.mpu = mpu


def load_engine(engine: Any, folder: Path) -> None:
    """Weights and optimizer from what the same layout of ranks saved; hyperparameters too.

    Raises:
        OSError, RuntimeError, EOFError: missing or damaged files.
    """
    path, _ = engine.load_checkpoint(str(folder.parent), tag=folder.name, load_module_strict=False)
    if path is None:
        raise OSError("files are missing")


def set_step(engine: Any, step: int) -> None:
    """The engine's own count of optimizer steps."""
    engine.global_steps = step


def trained_weights(folder: Path) -> dict[str, Tensor]:
    """fp32 master weights of all ranks of a saved engine, by the module's names; frozen ones are left out.

    Raises:
        OSError, RuntimeError, KeyError, EOFError: missing or damaged files.
    """
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    weights: Any = get_fp32_state_dict_from_zero_checkpoint(
        str(folder.parent), tag=folder.name, exclude_frozen_parameters=True
    )
    return weights


# Universal checkpoints
#
# What DeepSpeed leaves out, and is put right here: from stage 3 it writes plain tensors and no step per weight, where
# stage 1 wants dictionaries, a step and a version; stage 3 loads one step tensor for all sub-groups, which then counts
# once per sub-group; it leaves steps in host memory, where no fused optimizer on a GPU takes them; and it would give all
# parameter groups the weight decay of the first.


def convert_to_universal(source: Path, folder: Path, workers: int) -> None:
    """Write `zero/<weight>/{fp32,exp_avg,exp_avg_sq,step}.pt` of a saved engine into `folder`.

    It changes the working directory and parts of DeepSpeed: for a process of its own.
    """
    from deepspeed.checkpoint import ds_to_universal

    # Processes of a pool would outlive a killed parent; reading, copying and writing tensors leaves Python's lock alone.
    ds_to_universal.ProcessPoolExecutor = ThreadPoolExecutor
    ds_to_universal.merge_zero3_slices = _merge_zero3_slices
    os.chdir(folder)  # short names: DeepSpeed takes paths for patterns, and [ ] + mean something there
    settings: Any = SimpleNamespace(
        input_folder=os.path.relpath(source),
        output_folder="converted",
        num_extract_workers=workers,
        num_merge_workers=workers,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    ds_to_universal.main(settings)
    os.rename("converted/zero", "zero")
    shutil.rmtree("converted")
    Path("latest_universal").unlink(missing_ok=True)
    _complete(Path("zero"))
    os.chdir(source)


def _merge_zero3_slices(dp_degree: int, dir: str, slice_dir: str, name: str) -> None:
    """DeepSpeed's, but with the dictionaries that stages 1 and 2 read; stage 3 reads either."""
    from deepspeed.checkpoint import ds_to_universal

    for state in ("fp32", "exp_avg", "exp_avg_sq"):
        (whole,) = ds_to_universal._merge_zero_shards(os.path.join(slice_dir, name), state, 1)
        ds_to_universal._save_checkpoint(os.path.join(dir, name, f"{state}.pt"), {"param": whole})


def _complete(zero: Path) -> None:
    """Add what either stage misses in the other's files; drop rank 0's shard and all hyperparameters from the common part."""
    from deepspeed import __version__
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum

    with torch.serialization.safe_globals([LossScaler, ZeroStageEnum]):
        common = torch.load(zero / "optimizer_state.pt", weights_only=True)
    moments = sorted(zero.glob("*/exp_avg.pt"))
    if "optimizer_state_dict" in common:  # stage 3
        step = common["optimizer_state_dict"]["state"][0]["step"]
        for file in moments:
            torch.save(step, file.with_name("step.pt"))
    else:
        step = torch.load(moments[0].with_name("step.pt"), weights_only=True)
    # their number counts, the recipe says what is in them
    groups: list[dict] = [{} for _ in common["param_groups"]]
    slim = {"overflow": False, "ds_version": __version__, "param_groups": groups}
    slim["optimizer_state_dict"] = {"state": {0: {"step": step}}, "param_groups": groups}
    torch.save(slim, zero / "optimizer_state.pt")


class _NoTensorParallel:
    """What DeepSpeed asks a model-parallel unit for."""

    def get_tensor_model_parallel_rank(self) -> int:
        return 0

    def get_tensor_model_parallel_world_size(self) -> int:
        return 1


def load_universal(engine: Any, folder: Path) -> None:
    """Weights and moments of a universal copy into the engine's own shards; called by all ranks.

    Hyperparameters stay as they are.
    """
    optimizer = engine.optimizer
    whole_weights = engine.zero_optimization_stage() < 3
    mpu = getattr(optimizer, "mpu", None)
    optimizer.mpu = _NoTensorParallel()  # else sequence parallelism is taken for it
    if not whole_weights:
        optimizer.checkpoint_event_prologue()
    try:
        optimizer.load_state_dict(
            state_dict_list=None, load_optimizer_states=True, checkpoint_folder=str(folder)
        )
    finally:
        optimizer.mpu = mpu
    place_steps(optimizer.optimizer)
    if whole_weights:
        optimizer.update_lp_params()
    else:
        optimizer.checkpoint_event_epilogue()


def place_steps(optimizer: torch.optim.Optimizer) -> None:
    """Give every weight of a plain optimizer a step of its own, on the weight's device.

    Fused updates take steps of no other device, and one tensor for several weights would count once for each.
    """
    for parameter, state in optimizer.state.items():
        if isinstance(state.get("step"), Tensor):
            state["step"] = state["step"].to(parameter.device, copy=True)
