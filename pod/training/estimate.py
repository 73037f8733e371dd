"""What a training run will need, before it is started: bytes per rank by part, and disk per checkpoint.

All figures are computed from shapes; nothing is allocated. They are upper estimates of what is held at the peak of a
step, without the interpreter, libraries and allocator slack.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from pod.training.args import TrainArgs
from pod.training.loss import MEBIBYTE
from pod.training.ulysses import kv_head_repeats

BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
REDUCE_BUCKET_ELEMENTS = 50_000_000
PREFETCH_ELEMENTS = 50_000_000


@dataclass(frozen=True)
class Shapes:
    """The sizes of a model that memory depends on; `from_config` reads them from a PodConfig."""

    hidden: int
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool

    @classmethod
    def from_config(cls, config: Any) -> "Shapes":
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(
            hidden=config.hidden_size,
            layers=config.num_hidden_layers,
            query_heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=head_dim,
            intermediate=config.intermediate_size,
            vocab=config.vocab_size,
            tied=bool(config.tie_word_embeddings),
        )

    @property
    def layer_parameters(self) -> int:
        """Weights of one decoder layer (biases left out)."""
        attention = self.hidden * self.head_dim * 2 * (self.query_heads + self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate + 2 * self.hidden

    @property
    def embedding_parameters(self) -> int:
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        heads = self.embedding_parameters * (1 if self.tied else 2)
        return self.layers * self.layer_parameters + heads + self.hidden

    def lora_parameters(self, args: TrainArgs) -> int:
        """Trainable weights of the adapters."""
        query, key, inner = self.query_heads * self.head_dim, self.kv_heads * self.head_dim, self.intermediate
        sizes = {
            "q_proj": (self.hidden, query),
            "k_proj": (self.hidden, key),
            "v_proj": (self.hidden, key),
            "o_proj": (query, self.hidden),
            "gate_proj": (self.hidden, inner),
            "up_proj": (self.hidden, inner),
            "down_proj": (inner, self.hidden),
        }
        each = [sum(sizes[name]) for name in args.lora_target_modules if name in sizes]
        return self.layers * args.lora_rank * sum(each)


def carried_heads(lead: Sequence[Sequence[int]]) -> int:
    """(layer, KV head) pairs that other layers follow: their Q and K stay alive for the block."""
    users = {
        (owner, head) for layer, row in enumerate(lead) for head, owner in enumerate(row) if owner != layer
    }
    return len(users)


def open_heads(lead: Sequence[Sequence[int]]) -> int:
    """Most KV heads that follow another layer at a time: the carry that the backward of one layer reads."""
    return max(sum(owner != layer for owner in row) for layer, row in enumerate(lead))


def rank_tokens(args: TrainArgs, context_length: int) -> int:
    """Tokens of one micro-batch on the rank that holds most."""
    return -(-context_length // args.sequence_parallel_size) * args.micro_batch_size


def mlp_tiles(args: TrainArgs, context_length: int) -> int:
    """Parts in which a feed-forward layer takes its tokens, the same on every rank."""
    tokens = rank_tokens(args, context_length)
    return -(-tokens // args.mlp_tile_tokens) if args.mlp_tile_tokens else 1


def training_bytes(
    shapes: Shapes, lead: Sequence[Sequence[int]], args: TrainArgs, context_length: int, world_size: int
) -> dict[str, int]:
    """Bytes that one rank holds, by part.

    Args:
        lead: the plan, lead[layer][kv_head].
        context_length: tokens of a packed row over all ranks of a sequence-parallel group.

    Raises:
        ValueError: a sequence-parallel size that cannot work.
    """
    kv_head_repeats(shapes.query_heads, shapes.kv_heads, args.sequence_parallel_size)
    size = BYTES[args.dtype]
    total = shapes.parameters
    trained = shapes.lora_parameters(args) if args.method == "lora" else total
    frozen = total if args.method == "lora" else 0
    tokens = rank_tokens(args, context_length)
    groups = shapes.query_heads // shapes.kv_heads
    qkv = (shapes.query_heads + 2 * shapes.kv_heads) * shapes.head_dim
    # One layer's forward for its backward: norms and residuals, q k v and output on both sides of the exchange, MLP.
    attention = tokens * size * (4 * shapes.hidden + 4 * qkv)
    tiles = mlp_tiles(args, context_length)
    tile = -(-tokens // tiles) * size * 4 * shapes.intermediate
    layer = attention + (tile if tiles == 1 else 0)
    kept = shapes.layers * (tokens * shapes.hidden * size if args.gradient_checkpointing else layer)
    working = (layer if args.gradient_checkpointing else 0) + (tile if tiles > 1 else 0)
    carried = (groups + 1) * shapes.head_dim * tokens * size
    gathered = min(total, shapes.embedding_parameters + 2 * shapes.layer_parameters + PREFETCH_ELEMENTS)
    logits = min(args.loss_chunk_mib * MEBIBYTE, 4 * shapes.vocab * tokens)
    return {
        "parameters": (trained + frozen) * size // world_size + gathered * size,
        "master weights": 0 if args.offload_optimizer != "none" else trained * 4 // world_size,
        "optimizer": 0 if args.offload_optimizer != "none" else trained * 8 // world_size,
        "gradients": (0 if args.offload_optimizer != "none" else trained * 4 // world_size)
        + min(trained, REDUCE_BUCKET_ELEMENTS) * 4,
        "activations": kept + working,
        "carry": (carried_heads(lead) if args.carry == "keep" else open_heads(lead)) * carried,
        "carry gradients": open_heads(lead) * carried,
        "logits": 2 * logits + (shapes.embedding_parameters * size if args.method == "full" else 0),
    }


def host_bytes(
    shapes: Shapes, lead: Sequence[Sequence[int]], args: TrainArgs, context_length: int, world_size: int
) -> dict[str, int]:
    """Bytes of host memory that one rank's offloading holds, by part; pinned allocations round up on their own."""
    groups, size = shapes.query_heads // shapes.kv_heads, BYTES[args.dtype]
    carried = carried_heads(lead) * (groups + 1) * shapes.head_dim * rank_tokens(args, context_length) * size
    trained = shapes.lora_parameters(args) if args.method == "lora" else shapes.parameters
    parts = {}
    if args.carry == "offload":
        parts["carry"] = carried
    if args.offload_optimizer != "none":
        parts["optimizer"] = trained * 16 // world_size
    return parts


def checkpoint_bytes(module: nn.Module, dtype: str) -> int:
    """Disk bytes of one checkpoint of all ranks: master weights and two moments in fp32, plus 1 MiB of the rest."""
    trained = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    return 12 * trained + MEBIBYTE


def describe(
    shapes: Shapes, lead: Sequence[Sequence[int]], args: TrainArgs, context_length: int, world_size: int
) -> str:
    """The estimate as text for `--dry-run`."""
    parts = training_bytes(shapes, lead, args, context_length, world_size)
    dp = world_size // args.sequence_parallel_size
    rows = args.micro_batch_size * args.gradient_accumulation_steps * dp
    trained = shapes.lora_parameters(args) if args.method == "lora" else shapes.parameters
    host = host_bytes(shapes, lead, args, context_length, world_size)
    lines = [
        f"{world_size} ranks = {dp} data parallel x {args.sequence_parallel_size} sequence parallel",
        f"{rows} rows of {context_length} tokens per step = {rows * context_length:,} tokens; "
        f"{args.max_steps} steps = {rows * context_length * args.max_steps:,} tokens",
        f"{shapes.parameters:,} parameters, {trained:,} trained",
        "memory per rank:",
        *(f"  {name:<15} {_gib(value)}" for name, value in parts.items()),
        f"  {'sum':<15} {_gib(sum(parts.values()))}",
        *(["host memory per rank:"] if host else []),
        *(f"  {name:<15} {_gib(value)}" for name, value in host.items()),
        f"disk per checkpoint: {_gib(12 * trained + MEBIBYTE)}, {args.keep_last} kept, one more while writing",
    ]
    return "\n".join(lines)


def _gib(value: int) -> str:
    return f"{value / 2**30:9.3f} GiB"


def checkpoint_disk_bytes(shapes: Shapes, args: TrainArgs) -> int:
    """Disk bytes of one checkpoint of all ranks: master weights and two moments in fp32, below stage 3 the weights too."""
    trained = shapes.lora_parameters(args) if args.method == "lora" else shapes.parameters
    weights = BYTES[args.dtype] if args.zero_stage < 3 else 0
    return (12 + weights) * trained + MEBIBYTE
