"""Sections `train` and `export` of a recipe. Standard library only."""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(kw_only=True)
class TrainArgs:
    """Section `train` of a recipe: `deepspeed launch/train_pod.py --config …`."""

    max_steps: int = 100
    """Optimizer steps of the whole run."""

    micro_batch_size: int = 1
    """Packed rows that a sequence-parallel group takes through one forward and backward."""

    gradient_accumulation_steps: int = 1
    """Micro-batches per optimizer step. Rows per step = this x micro_batch_size x (ranks / sequence_parallel_size)."""

    sequence_parallel_size: int = 1
    """Ranks that share one row (Ulysses); contiguous ranks form a group. Allowed: 1 to the number of query heads."""

    prefetch_steps: int = 2
    """Steps whose rows are read ahead, in a thread, while the present step computes; 0 = read when they are needed. Metrics
    tell what is left to wait for as `data_wait_s`."""

    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of weights, activations and gradients. Master weights and Adam's moments are float32 either way."""

    learning_rate: float = 1e-5
    """Peak learning rate (paper: 1e-5)."""

    min_lr_ratio: float = 0.1
    """Learning rate at the last step as a share of the peak; the cosine ends there."""

    warmup_steps: int = 0
    """Steps in which the learning rate rises linearly from 0 to the peak."""

    weight_decay: float = 0.0
    """Decoupled weight decay of AdamW on matrices; norms and biases have none."""

    adam_beta1: float = 0.9
    """Decay of Adam's first moment."""

    adam_beta2: float = 0.95
    """Decay of Adam's second moment."""

    adam_epsilon: float = 1e-8
    """Term that keeps Adam's denominator from 0."""

    max_grad_norm: float = 1.0
    """Gradients are scaled down to this global 2-norm; 0 = no clipping."""

    gradient_checkpointing: bool = True
    """Keep one hidden state (and the carry) per layer and recompute the rest in backward."""

    carry: Literal["keep", "offload", "recompute"] = "keep"
    """Where the queries and keys that lead layers hand to their followers wait for backward under gradient_checkpointing:
    `keep` on the device, `offload` in host memory (one copy each way per step and tensor), `recompute` nowhere: they are
    projected again from the lead's hidden state (1 to 3 % more arithmetic). Loss and gradients are the same."""

    mlp_tile_tokens: int = 16_384
    """Tokens per rank that a feed-forward layer works on at a time. Longer inputs go through in equal tiles, each of which is
    computed once more in backward, so that no [tokens, intermediate_size] is ever held whole; 0 = no tiles."""

    offload_optimizer: bool = False
    """Hold master weights, Adam's moments and reduced gradients in host memory (16 bytes per trained weight over all ranks)
    and update there. Slower steps; for models whose optimizer does not fit."""

    loss_chunk_mib: int = 256
    """MiB of float32 logits that the loss holds at a time."""

    max_skipped_steps: int = 3
    """Steps in a row with a NaN or infinite loss or gradient (each is skipped) after which the run stops."""

    method: Literal["full", "lora"] = "full"
    """`full` trains every weight, `lora` low-rank adapters only (peft)."""

    lora_rank: int = 16
    """Rank of the LoRA adapters."""

    lora_alpha: float = 32.0
    """LoRA scale: the adapters' output is multiplied by lora_alpha / lora_rank."""

    lora_dropout: float = 0.0
    """Dropout before the adapters, in [0, 1)."""

    lora_target_modules: list[str] = field(default_factory=lambda: ["q_proj", "k_proj", "v_proj", "o_proj"])
    """Names of the linear layers that get an adapter."""

    save_every_steps: int = 100
    """Steps between checkpoints; one more is written at the end. 0 = only at the end."""

    keep_last: int = 2
    """Checkpoints that are kept; older ones are removed after a newer one is complete."""

    resume: Literal["auto", "never"] = "auto"
    """`auto` continues from <output_dir>/train/latest when there is one; `never` refuses to start there."""

    log_every_steps: int = 1
    """Steps between two lines of metrics.jsonl (and of the tracker)."""

    tracker: Literal["none", "wandb", "tensorboard"] = "none"
    """Where metrics go besides <output_dir>/train/metrics.jsonl."""

    wandb_mode: Literal["offline", "online"] = "offline"
    """`offline` writes a wandb run folder and contacts no server."""

    def __post_init__(self) -> None:
        for name in ("max_steps", "micro_batch_size", "gradient_accumulation_steps", "sequence_parallel_size",
                     "loss_chunk_mib", "max_skipped_steps", "lora_rank", "keep_last", "log_every_steps"):  # fmt: skip
            _at_least(name, getattr(self, name), 1)
        for name in ("warmup_steps", "weight_decay", "max_grad_norm", "save_every_steps", "mlp_tile_tokens",
                     "prefetch_steps"):  # fmt: skip
            _at_least(name, getattr(self, name), 0)
        for name in ("learning_rate", "adam_epsilon", "lora_alpha"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}, allowed are numbers above 0")
        for name in ("adam_beta1", "adam_beta2", "lora_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, allowed are 0 <= {name} < 1")
        if not 0 <= self.min_lr_ratio <= 1:
            raise ValueError(f"min_lr_ratio is {self.min_lr_ratio}, allowed are 0 to 1")
        if self.warmup_steps > self.max_steps:
            raise ValueError(
                f"warmup_steps is {self.warmup_steps}, allowed are 0 to max_steps ({self.max_steps})"
            )
        if self.carry != "keep" and not self.gradient_checkpointing:
            raise ValueError(
                f"carry is {self.carry}, which moves what activation checkpoints hold: set gradient_checkpointing=true, "
                "or carry=keep"
            )
        if self.carry == "recompute" and self.method == "lora" and self.lora_dropout:
            raise ValueError(
                f"carry is recompute with lora_dropout {self.lora_dropout}: the dropout would be drawn anew; set "
                "carry=offload, or lora_dropout=0"
            )
        if not self.lora_target_modules:
            raise ValueError("lora_target_modules is empty: name linear layers, for example q_proj, k_proj")


def _at_least(name: str, value: float, least: int) -> None:
    if value < least:
        raise ValueError(f"{name} is {value}, allowed are {least} and more")


@dataclass(kw_only=True)
class ExportArgs:
    """Section `export` of a recipe: `python launch/export_hf.py --config …`."""

    path: str | None = None
    """Folder to write; null is <output_dir>/export. An existing one is replaced when the new one is complete."""

    checkpoint: str | None = None
    """Checkpoint folder to export; null is the newest one, <output_dir>/train/latest."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the exported weights; `auto` is the type that was trained in (its logits are exactly the trained ones)."""

    max_shard_size: str = "5GB"
    """Largest safetensors file."""
