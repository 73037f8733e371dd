"""Everything that `pod` uses of DeepSpeed, mostly private parts: nothing else in `pod` imports it.

`check_parts` compares what is installed with what is used. Another version of DeepSpeed then fails at the
start of a run, in one line, and not after the first checkpoint.

DeepSpeed is imported inside functions: importing it takes seconds, and a dry run does not need it.
"""

import inspect
import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from pod.modeling.model.experts import PodExperts
from pod.modeling.model.sinks import PARAMETERS
from pod.verbosity import is_verbose

TESTED = "0.19.8"
"""The DeepSpeed that all tests of this project ran with."""

_STAGE_1_2 = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"
_STAGE_3 = "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3"
_ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"
_PARTS = {
    "deepspeed.comm.torch:build_shm_op": "",
    "deepspeed.comm.torch:TorchBackend.new_group": "ranks",
    "deepspeed.runtime.sequence_parallel.parallel_state_sp:get_sequence_parallel_group": "",
    "deepspeed.utils:set_z3_leaf_modules": "leaf_module_classes raise_if_not_found",
    "deepspeed.runtime.zero:Init": "module config_dict_or_path dtype",
    "deepspeed.runtime.zero:register_external_parameter": "module parameter",
    "deepspeed.runtime.engine:ZERO_OPTIMIZATION": "",
    f"{_ENGINE}._do_optimizer_sanity_check": "basic_optimizer",
    f"{_ENGINE}.backward": "scale_wrt_gas",
    f"{_ENGINE}.was_step_applied": "",
    f"{_STAGE_1_2}.update_lp_params": "",
    f"{_STAGE_3}.get_param_id": "param",
    f"{_STAGE_3}.checkpoint_event_prologue": "",
    f"{_STAGE_3}.checkpoint_event_epilogue": "",
    f"{_STAGE_3}._reassign_or_swap_out_partitioned_parameters": "sub_group_id",
    "deepspeed.sequence.linear_cross_entropy:_VocabParallelLinearCrossEntropy.forward": (
        "hidden bias target tp_group vocab_start_index compute_dtype"
    ),
    "deepspeed.sequence.linear_cross_entropy:_fp32_logits": "hidden weight bias row_offset",
    "deepspeed.sequence.linear_cross_entropy:_accumulate_matmul": "accumulator mat1 mat2",
}
"""Parts of DeepSpeed that are used, as `module:attribute`, and the names of their parameters.

The names are those of parameters that we pass, or that our own function in the part's place must take.
"""


def check_parts(parts: dict[str, str] | None = None) -> None:
    """Refuse an installed DeepSpeed in which a part that is used here is missing or takes other parameters.

    Args:
        parts: parts and names of their parameters, as in `_PARTS`; None = these.

    Raises:
        ValueError: one line that names the first such part, the installed version and the tested one.
    """
    for part, names in (_PARTS if parts is None else parts).items():
        module, _, path = part.partition(":")
        try:
            found: Any = import_module(module)
            for attribute in path.split("."):
                found = getattr(found, attribute)
        except (ImportError, AttributeError):
            raise _other_version(f"{module}.{path} is missing") from None
        taken = inspect.signature(found).parameters if names else {}
        absent = sorted(set(names.split()) - taken.keys())
        # A decorated function shows no names of parameters.
        if absent and not any(one.kind is one.VAR_KEYWORD for one in taken.values()):
            raise _other_version(f"{module}.{path} does not take {', '.join(absent)}")


def _other_version(problem: str) -> ValueError:
    """The error for a DeepSpeed that lacks something; it says which version to install."""
    import deepspeed

    return ValueError(
        f"deepspeed {deepspeed.__version__} does not work here: {problem}. Install the version that this "
        f"project was tested with: pip install deepspeed=={TESTED}"
    )


# Ranks


def join_ranks(timeout_s: float | None) -> None:
    """Make the process group of the ranks that a launcher started.

    Args:
        timeout_s: seconds after which an operation that waits for other ranks fails, in every group.
            None = DeepSpeed's 10 minutes for the group of all ranks, and PyTorch's limit for other groups.

    Raises:
        ValueError: as in `check_parts`.
    """
    import deepspeed
    from deepspeed.utils import logger

    check_parts()
    backend: Any = import_module("deepspeed.comm.torch")
    if not is_verbose():
        logger.setLevel(logging.WARNING)  # its information would break the progress bar
    # These warnings are about DeepSpeed's own calls.
    warnings.filterwarnings("ignore", message="`torch.distributed", category=FutureWarning)
    # Only DeepSpeed's all-reduce for inference uses the shared-memory op. Compiling it takes 75 s and a
    # compiler. Asking whether it could be compiled makes every rank ask for all of DeepSpeed's ops.
    backend.build_shm_op = lambda: None
    limit = None if timeout_s is None else timedelta(seconds=timeout_s)
    # DeepSpeed sets no limit for the groups that it makes later: with NCCL they would have 10 minutes, and
    # the watchdog waits longer.
    backend.TorchBackend.new_group = lambda self, ranks: dist.new_group(ranks, timeout=limit)
    limits: dict[str, Any] = {} if limit is None else {"timeout": limit}
    deepspeed.init_distributed(verbose=False, **limits)


def sequence_groups(size: int) -> tuple[Any, Any]:
    """Make the groups of `size` contiguous ranks that share a row.

    Returns:
        What `start_engine` takes as `mpu`, and this rank's group.
    """
    from deepspeed.runtime.sequence_parallel import parallel_state_sp

    parallel_state_sp.initialize_sequence_parallel(size)
    return parallel_state_sp, parallel_state_sp.get_sequence_parallel_group()


# Engine and steps


def start_engine(
    module: nn.Module, optimizer: torch.optim.Optimizer, settings: dict[str, Any], mpu: Any
) -> Any:
    """The engine that trains `module` on all ranks.

    Args:
        module: its weights must have been placed by `place_weights`.
        settings: DeepSpeed's configuration, from `optimization.deepspeed_config`.
        mpu: from `sequence_groups`; None without sequence parallelism.

    Raises:
        ValueError: the engine's optimizer lacks parts that are used here.
    """
    import deepspeed
    from deepspeed.runtime.engine import ZERO_OPTIMIZATION, DeepSpeedEngine
    from deepspeed.utils import set_z3_leaf_modules

    # Ranks use different experts, and different numbers of them. If weights were gathered expert by expert,
    # every rank would gather in an order of its own, and the ranks would wait for each other for ever.
    set_z3_leaf_modules(module, [PodExperts], raise_if_not_found=False)
    # In stage 1, DeepSpeed takes its BF16_Optimizer for bfloat16 with float32 accumulation. That one keeps
    # the float32 gradients of all weights on every rank. It also needs a model-parallel group, and with
    # sequence parallelism there is none.
    DeepSpeedEngine._do_optimizer_sanity_check = lambda self, basic_optimizer: ZERO_OPTIMIZATION
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=settings, mpu=mpu)
    stage_3 = settings["zero_optimization"]["stage"] == 3
    flat = "fp32_partitioned_groups_flat" if stage_3 else "single_partition_of_fp32_groups"
    kinds = {"optimizer": torch.optim.Optimizer, flat: list}
    for name, kind in kinds.items():
        if not isinstance(getattr(engine.optimizer, name, None), kind):
            raise _other_version(f"its {type(engine.optimizer).__name__} has no {kind.__name__} {name}")
    return engine


def place_weights(
    module: nn.Module,
    values: Callable[[nn.Parameter], Tensor],
    settings: dict[str, Any],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Fill the weights of a module with values, and lay them out as the engine expects them.

    In stage 3 they are divided among all ranks; in other stages every rank has them whole. Weights are
    placed one at a time, so that a rank holds its share and one whole weight.

    Args:
        values: returns the values of a weight, on any device and of any type. It is called on rank 0 only, in
            the module's order. In stage 3 the other ranks hold the values when this function returns. In
            other stages they hold them when `start_engine` returns.
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
    """Shape of the whole weight, also where it is divided among ranks."""
    return getattr(parameter, "ds_shape", parameter.shape)


def drop_shared_qk_hooks(model: Any) -> None:
    """Take ZeRO-3's hooks off decoder layers and attention, which hand on `shared_qk` and own no weight.

    The hooks fire once per tensor of `shared_qk`. The number of these tensors depends on the heads that a
    rank computes, and ZeRO-3 stops ("disagreement on list contents") when ranks do not meet the same hooks.
    The hooks of the children of these modules gather all weights but constant sinks, which belong to
    attention itself. Constant sinks are registered with the child of attention that reads them.
    """
    from deepspeed.runtime.zero import register_external_parameter

    for layer in model.model.layers:
        for module in (layer, layer.self_attn):
            for name, parameter in module.named_parameters(recurse=False):
                assert f"self_attn.{name}" in PARAMETERS, "this module's weights need ZeRO-3's hooks"
                register_external_parameter(module.read_sinks, parameter)
            module._forward_pre_hooks.clear()
            module._forward_hooks.clear()


def linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, ignored: int, rows: int) -> Tensor:
    """Sum of the cross entropies of `hidden @ weight.T`, in fp32 and with exact gradients.

    Args:
        hidden: [B, n, hidden].
        weight: [V, hidden].
        labels: [B, n].
        ignored: the label of tokens that have none.
        rows: number of tokens whose logits are computed at a time.
    """
    # DeepSpeed's public function around this one compares the labels with the vocabulary, and waits for the
    # device to do so. Ours were compared when the data was opened.
    tokens = hidden.reshape(-1, hidden.shape[-1])
    kind = torch.promote_types(hidden.dtype, weight.dtype)
    vocabulary = (None, 0, weight.shape[0])  # no tensor parallelism
    given = tokens.contiguous(), weight.contiguous(), None, labels.reshape(-1)
    return _linear_cross_entropy().apply(*given, *vocabulary, ignored, rows, kind).sum()


@cache
def _linear_cross_entropy() -> Any:
    """DeepSpeed's function, with a backward that never waits for the device.

    DeepSpeed's own backward looks up the labels by masks, in every part of the vocabulary. That waits for the
    device three times for each part.
    """
    stock = import_module("deepspeed.sequence.linear_cross_entropy")

    class LinearCrossEntropy(stock._VocabParallelLinearCrossEntropy):
        @staticmethod
        @once_differentiable
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
            hidden, weight, _, valid, _, labels, row_max, row_sum_exp = ctx.saved_tensors
            inputs = hidden.to(ctx.compute_dtype)
            label_grads = torch.where(valid, grads[0].float(), 0.0)
            scale = (label_grads / row_sum_exp).unsqueeze(-1)
            grad_hidden = torch.zeros_like(hidden, dtype=torch.float32) if ctx.needs_input_grad[0] else None
            grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
            for start in range(0, len(weight), ctx.block_cols):
                part = weight[start : start + ctx.block_cols].to(ctx.compute_dtype)
                # (softmax - one-hot) · gradient of the loss
                logits = stock._fp32_logits(inputs, part, None, -row_max.unsqueeze(-1))
                grad_logits = logits.exp_().mul_(scale)
                places = labels - start
                inside = (places >= 0) & (places < len(part))
                labels_here = places.clamp(0, len(part) - 1).unsqueeze(-1)
                taken = torch.where(inside, label_grads, 0.0).unsqueeze(-1)
                grad_logits.scatter_(1, labels_here, grad_logits.gather(1, labels_here) - taken)
                grad_logits = grad_logits.to(ctx.compute_dtype)
                if grad_weight is not None:
                    grad_weight[start : start + len(part)] = grad_logits.t() @ inputs
                if grad_hidden is not None:
                    stock._accumulate_matmul(grad_hidden, grad_logits, part)
            grad_inputs = None if grad_hidden is None else grad_hidden.to(hidden.dtype)
            return grad_inputs, grad_weight, *(None,) * 8

    return LinearCrossEntropy


# Checkpoints

MASTER, MOMENTS = "master", ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Piece:
    """What a rank holds of one trained weight, on its device or in host memory."""

    name: str
    """Name of the weight in the module that the engine trains."""
    shape: tuple[int, ...]
    """Shape of the whole weight."""
    start: int
    """First element of the flattened weight that is held here."""
    values: dict[str, Tensor]
    """Tensors [elements] in fp32, by kind: `MASTER`, and `MOMENTS` once the optimizer has made an update."""


def pieces(engine: Any) -> list[Piece]:
    """This rank's part of the state that is trained.

    The values are views: write into them, then call `renew_weights`.
    """
    found = []
    for name, parameter in engine.module.named_parameters():
        place = _place(engine.optimizer, parameter) if parameter.requires_grad else None
        if place is None:
            continue
        flat, offset, start, size = place
        state = engine.optimizer.optimizer.state.get(flat, {})
        whole = {MASTER: flat.detach()} | {kind: state[kind] for kind in MOMENTS if kind in state}
        values = {kind: held.narrow(0, offset, size) for kind, held in whole.items()}
        found.append(Piece(name, tuple(shape_of(parameter)), start, values))
    return found


def _place(optimizer: Any, parameter: Any) -> tuple[Tensor, int, int, int] | None:
    """Where a rank holds its part of a weight; None when it holds nothing of it.

    Returns:
        The flat tensor that the part lies in, its offset there, the first element of the weight that is held,
        and the number of elements.
    """
    if hasattr(parameter, "ds_id"):  # stage 3: equal shares, the last ones padded
        group, offset, share = optimizer.grad_position[optimizer.get_param_id(parameter)]
        start = share * dist.get_rank(parameter.ds_process_group)
        size = min(share, parameter.ds_numel - start)
        if size <= 0:
            return None
        return optimizer.fp32_partitioned_groups_flat[group], offset, start, size
    held = parameter._hp_mapping
    if held is None:
        return None
    flat = optimizer.single_partition_of_fp32_groups[held.param_group_index]
    own = held.hp_fragment_address
    return flat, own.start, held.lp_fragment_address.start, own.numel


def set_updates(engine: Any, updates: int) -> None:
    """Set the number of updates that the optimizer has made.

    With at least one update, `pieces` has moments, which the caller must fill. With 0 it has none.
    """
    optimizer = engine.optimizer
    whole = getattr(optimizer, "single_partition_of_fp32_groups", None)
    for flat in optimizer.fp32_partitioned_groups_flat if whole is None else whole:
        state = optimizer.optimizer.state[flat]
        if not updates:
            state.clear()
            continue
        for kind in MOMENTS:
            if kind not in state:
                state[kind] = torch.zeros_like(flat, requires_grad=False)
        # A fused update accepts the count of steps only on the weights' device. Each weight needs a tensor
        # of its own: one tensor for several weights would count once for each of them.
        state["step"] = torch.tensor(float(updates), device=flat.device)


def renew_weights(engine: Any) -> None:
    """Set the weights of all ranks to the values of the master weights. All ranks must call it."""
    optimizer = engine.optimizer
    if engine.zero_optimization_stage() < 3:
        optimizer.update_lp_params()
        return
    optimizer.checkpoint_event_prologue()
    for group in range(len(optimizer.fp32_partitioned_groups_flat)):
        optimizer._reassign_or_swap_out_partitioned_parameters(group)
    optimizer.checkpoint_event_epilogue()
