"""What a run's engine works with: settings, loss, optimizer, and what a model keeps and fuses.

The parts are DeepSpeed's settings, the module with its loss, AdamW and its learning rate, what a model keeps
for its backward, and which of its layers are one kernel.

The loss never needs the logits of the whole row. DeepSpeed's fused projection and cross entropy works
through the tokens in chunks and keeps one fp32 log-sum-exp per token. During backward it computes the logits
again, in blocks of the vocabulary. The loss is computed in fp32, and the gradients are exact.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from pod.modeling.shipped.decoder_layer import PodMLP, RMSNorm, rms_norm
from pod.modeling.shipped.rope import rotate_whole
from pod.modeling.shipped.sinks import is_constant
from pod.training import deepspeed_bridge as bridge
from pod.training.args import TrainArgs
from pod.training.run.carry import set_carry

REDUCE_BUCKET_ELEMENTS = 50_000_000
PREFETCH_ELEMENTS = 50_000_000


def gradient_scale(args: TrainArgs, mesh: Any) -> float:
    """The factor of a rank's loss that turns the gradients that DeepSpeed averages into sums.

    With `reduce_scatter`, stage 3 divides by the number of ranks (`stage3.py`, `__avg_scatter_grads`).
    Stages 1 and 2 divide by the number of ranks over the sequence-parallel size (`stage_1_and_2.py`,
    `average_tensor`). Micro-batches are summed.
    """
    return float(mesh.world_size if args.zero_stage == 3 else mesh.dp_size)


def deepspeed_config(args: TrainArgs) -> dict[str, Any]:
    """Settings of DeepSpeed's engine. `reduce_scatter` fixes the scale of gradients: see `gradient_scale`."""
    reduce_dtype = "fp32" if args.reduce_dtype == "float32" else "bf16"
    cuda = torch.cuda.is_available()
    offloads = {"offload_optimizer": args.offload_optimizer, "offload_param": args.offload_parameters}
    zero = {
        "stage": args.zero_stage,
        "reduce_scatter": True,
        "overlap_comm": cuda,
        "reduce_bucket_size": REDUCE_BUCKET_ELEMENTS,
        "stage3_prefetch_bucket_size": PREFETCH_ELEMENTS,
    } | {name: {"device": "cpu", "pin_memory": cuda} for name, place in offloads.items() if place == "cpu"}
    return {
        "train_micro_batch_size_per_gpu": args.micro_batch_size,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "gradient_clipping": args.max_grad_norm,
        # Without the check, stages 1 and 2 would update with NaN in bfloat16.
        "bf16": {"enabled": args.dtype == "bfloat16", "check_grad_overflow": args.zero_stage < 3},
        "communication_data_type": reduce_dtype,
        "seq_parallel_communication_data_type": reduce_dtype,
        "data_types": {"grad_accum_dtype": reduce_dtype},
        "zero_optimization": zero,
        # PyTorch's AdamW updates on the CPU too: DeepSpeed's needs a compiler on every machine.
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 2**31,
        "wall_clock_breakdown": False,
    }


def save_activations(model: Any, args: TrainArgs, row_length: int) -> None:
    """Decide what a PodForCausalLM keeps for its backward: checkpoints, the carry, feed-forward tiles.

    Args:
        row_length: tokens of the longest row, over all ranks of a sequence-parallel group.
    """
    if args.gradient_checkpointing == "full":
        # The first name is the newer one in transformers. Both checkpoint without re-entering autograd.
        newer = getattr(model, "activation_checkpointing_enable", None)
        (newer or model.gradient_checkpointing_enable)()
    set_carry(model, args.carry, args.offload_checkpoints)
    for layer in model.model.layers:
        layer.mlp.train_tiles = args.mlp_tiles(row_length)


def fuse_layers(model: Any) -> None:
    """Let a PodForCausalLM compute norms, rotary embedding and gated activations in one kernel each.

    This holds for forward and backward. `torch.compile` compiles these functions when they are first used.
    Run one by one, their operations would read and write activations many times and keep float32 copies for
    backward. Values differ by rounding only.
    """
    activation = ACT2FN[model.config.hidden_act]

    def gated(gate: Tensor, up: Tensor) -> Tensor:
        return activation(gate) * up

    functions: list[Any] = [rms_norm, rotate_whole, gated]
    norm, rotation, gate = (torch.compile(one, dynamic=True) for one in functions)
    model.model.rotate = lambda x, tables: rotation(x, *tables)
    for module in model.modules():
        if isinstance(module, RMSNorm):
            module.norm = norm
        elif isinstance(module, PodMLP):
            module.gate = gate


def learning_rate(step: int, args: TrainArgs) -> float:
    """Learning rate of optimizer step `step` (counted from 0).

    It warms up linearly, then falls along a cosine to `min_lr_ratio` of the peak. A resumed run needs no
    state of a scheduler.
    """
    if step < args.warmup_steps:
        return args.learning_rate * (step + 1) / args.warmup_steps
    last = max(1, args.max_steps - args.warmup_steps - 1)
    progress = min(1.0, (step - args.warmup_steps) / last)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return args.learning_rate * (args.min_lr_ratio + (1 - args.min_lr_ratio) * cosine)


def make_optimizer(module: nn.Module, args: TrainArgs) -> torch.optim.Optimizer:
    """AdamW over the trainable parameters.

    Matrices decay; vectors (norms, biases) and constant sinks do not.

    Raises:
        ValueError: nothing is trainable.
    """
    groups: dict[float, list[nn.Parameter]] = {args.weight_decay: [], 0.0: []}
    for name, one in module.named_parameters():
        if one.requires_grad:
            decays = len(bridge.shape_of(one)) >= 2 and not is_constant(name)
            groups[args.weight_decay if decays else 0.0].append(one)
    if not any(groups.values()):
        raise ValueError("no parameter is trainable: check train.method and train.lora_target_modules")
    return torch.optim.AdamW(
        [{"params": ones, "weight_decay": decay} for decay, ones in groups.items() if ones],
        lr=args.learning_rate,
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_epsilon,
        fused=True,
    )


MEBIBYTE = 2**20
IGNORED_LABEL = -100
"""Label of a token that counts in no loss."""


class LossHead(nn.Module):
    """Sum of the next-token losses of a row, or of a slice of one.

    The output projection [V, hidden], tied or not, is a parameter of this module. ZeRO-3 then gathers it
    around this module's forward and backward, as it does for every other module.

    Args:
        chunk_mib: most MiB of fp32 logits that are held at a time.
    """

    def __init__(self, weight: nn.Parameter, chunk_mib: int = 256):
        super().__init__()
        self.weight = weight
        self.chunk_bytes = chunk_mib * MEBIBYTE
        self.vocab_size = weight.shape[0]

    def forward(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The sum of the losses, an fp32 scalar.

        Args:
            hidden: [B, n, hidden].
            labels: [B, n], already shifted; -100 = no label.
        """
        rows = max(1, min(labels.numel(), self.chunk_bytes // (4 * self.vocab_size)))
        return bridge.linear_cross_entropy(hidden, self.weight, labels, IGNORED_LABEL, rows)


class LanguageModelLoss(nn.Module):
    """The decoder with its chunked loss: the module that the DeepSpeed engine wraps.

    Its parameters have the names of `model`'s parameters, with the prefix "model.". The loss head's weight
    is the model's own.

    Args:
        model: a PodForCausalLM, or its `peft` wrapper.
    """

    def __init__(self, model: Any, chunk_mib: int = 256):
        super().__init__()
        self.model = model
        self.loss_head = LossHead(self._causal_model.lm_head.weight, chunk_mib)

    @property
    def _causal_model(self) -> Any:
        return self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, doc_ids: torch.Tensor) -> torch.Tensor:
        """The sum of the losses.

        Args:
            input_ids, labels: this rank's slice, [B, n_local].
            doc_ids: the whole rows, [B, n].
        """
        hidden = self._causal_model.model(input_ids=input_ids, doc_ids=doc_ids).last_hidden_state
        return self.loss_head(hidden, labels)
