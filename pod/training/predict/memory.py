"""What one rank holds at the peak of a training step, by part; computed from shapes, nothing is allocated.

The peak is the largest of several moments, each of which is added up from what lives then: the loss (all kept activations,
blocks of logits), the backward of every decoder layer (its activations, recomputed under checkpointing, its gradients, the
carry of open blocks, gathered weights) and the optimizer step. `benchmarks/estimate_memory.py` compares the sums with live
bytes of real steps. Left out: libraries, the allocator's slack, workspaces inside a kernel.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pod.training.args import TrainArgs
from pod.training.predict.shapes import (
    Lead,
    Shapes,
    carried_heads,
    carried_until,
    continued_heads,
    fetched_heads,
    followers,
    heads_by_role,
)
from pod.training.run.distill import needs_teacher
from pod.training.run.loss import MEBIBYTE
from pod.training.run.ulysses import Shares, share_heads

BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
REDUCE_BUCKET_ELEMENTS = 50_000_000
PREFETCH_ELEMENTS = 50_000_000
PERSISTENT_ELEMENTS = 100_000  # DeepSpeed's stage3_param_persistence_threshold
REUSE_ELEMENTS = 1_000_000_000  # its stage3_max_reuse_distance: what is used again sooner stays gathered

Parts = dict[str, int]


def rank_tokens(args: TrainArgs, context_length: int) -> int:
    """Tokens of one micro-batch on the rank that holds most."""
    return -(-context_length // args.sequence_parallel_size) * args.micro_batch_size


def mlp_tiles(args: TrainArgs, context_length: int) -> int:
    """Parts in which a feed-forward layer takes its tokens, the same on every rank."""
    tokens = rank_tokens(args, context_length)
    return -(-tokens // args.mlp_tile_tokens) if args.mlp_tile_tokens else 1


def head_shares(shapes: Shapes, lead: Lead, args: TrainArgs, context_length: int) -> Shares:
    """Which heads the ranks of a sequence-parallel group compute."""
    heads = shapes.query_heads, shapes.kv_heads
    return share_heads(lead, *heads, args.sequence_parallel_size, context_length, shapes.windows)


@dataclass(frozen=True)
class _Widths:
    """Bytes of one micro-batch on a rank: a hidden state, all queries, keys, a feed-forward activation, one carried head.

    `fp32` is a hidden state in float32; `wide_*` are gradients that attention sums in float32.
    """

    hidden: int
    query: int
    key: int
    inner: int
    carried: int
    fp32: int
    wide_query: int
    wide_key: int
    wide_carried: int
    is_wide: bool


def _widths(shapes: Shapes, lead: Lead, args: TrainArgs, context_length: int) -> _Widths:
    tokens, size = rank_tokens(args, context_length), BYTES[args.dtype]
    heads = shapes.kv_heads * head_shares(shapes, lead, args, context_length).repeats
    most = -(-heads // args.sequence_parallel_size)  # KV heads, replicas included, of the rank that has most
    row = tokens * args.sequence_parallel_size * shapes.head_dim
    key = row * most
    query = key * (shapes.query_heads // heads)
    carried = row * most * (2 if shapes.layout == "cla" else shapes.query_heads // heads + 1)
    return _Widths(
        hidden=tokens * shapes.hidden * size,
        query=query * size,
        key=key * size,
        inner=tokens * shapes.intermediate * size,
        carried=carried // shapes.kv_heads * size,
        fp32=tokens * shapes.hidden * 4,
        wide_query=4 * query,
        wide_key=4 * key,
        wide_carried=4 * carried // shapes.kv_heads,
        is_wide=size >= 4,
    )


@dataclass(frozen=True)
class _Layer:
    """What the forward of one decoder layer leaves for its backward, in bytes, its input left out."""

    first_norm: int
    attention: int
    second_norm: int
    mlp: int


def _norm(width: _Widths, args: TrainArgs, users: tuple[str, ...], input_kept: bool) -> int:
    """A norm keeps its input in float32, the normalised input where its weight is trained, its output where a weight reads it."""
    full = args.method == "full"
    reads = any(_saves_input(name, args) for name in users)
    copy = (0 if input_kept else width.hidden) if width.is_wide else width.fp32
    return copy + width.hidden * (full + reads)


def _saves_input(name: str, args: TrainArgs) -> bool:
    """Whether a linear layer keeps its input for backward: where its weight or adapter is trained, and under stage 3 always.

    Stage 3 puts its own linear function in place (`zero3_linear_wrap`), which saves the input of frozen weights too.
    """
    return args.method == "full" or args.zero_stage == 3 or name in args.lora_target_modules


def _layer(shapes: Shapes, lead: Lead, index: int, args: TrainArgs, width: _Widths) -> _Layer:
    own_key = shapes.layout != "cla" or lead[index][0] == index
    key = 2 * width.key if own_key else 0
    attention = 2 * width.query + key
    if shapes.layout != "cla":
        attention += len(followers(lead, index)) * width.carried
        attention += int(_copied_share(heads_by_role(lead, index)) * (width.query + key))
    if _saves_input("o_proj", args):
        attention += width.query  # the output again, heads side by side
    mlp = 3 * width.inner + (width.inner if _saves_input("down_proj", args) else 0)
    return _Layer(
        first_norm=_norm(width, args, ("q_proj", "k_proj", "v_proj"), input_kept=True),
        attention=attention,
        second_norm=_norm(width, args, ("gate_proj", "up_proj"), input_kept=False),
        mlp=mlp,
    )


def _copied_share(roles: Sequence[Sequence[int]]) -> float:
    """Share of the KV heads that a layer copies to attend role by role: those of roles whose heads are no neighbours, while
    views keep the rest."""
    parts = [heads for heads in roles if heads]
    apart = [heads for heads in parts if heads[-1] - heads[0] != len(heads) - 1]
    return sum(map(len, apart)) / sum(map(len, parts)) if len(apart) < len(parts) else 0.0


def training_bytes(
    shapes: Shapes, lead: Lead, args: TrainArgs, context_length: int, world_size: int
) -> Parts:
    """Bytes that one rank holds at its peak, by part.

    Args:
        lead: the plan, lead[layer][kv_head].
        context_length: tokens of a packed row over all ranks of a sequence-parallel group.

    Raises:
        ValueError: a sequence-parallel size that cannot work.
    """
    return max(moments(shapes, lead, args, context_length, world_size), key=lambda parts: sum(parts.values()))


def moments(
    shapes: Shapes, lead: Lead, args: TrainArgs, context_length: int, world_size: int
) -> Iterator[Parts]:
    """The parts at every moment that can be the peak: the loss, the backward of each layer, the update."""
    width = _widths(shapes, lead, args, context_length)
    rest = resting_bytes(shapes, args, world_size)
    layers = [_layer(shapes, lead, index, args, width) for index in range(shapes.layers)]
    yield _merge(rest, _at_loss(shapes, lead, args, context_length, world_size, width, layers))
    for index in range(shapes.layers):
        for active in _in_backward(shapes, lead, args, context_length, index, width, layers):
            yield _merge(rest, active, _weights_of_layer(shapes, args, world_size, index))
    yield _merge(rest, _at_update(shapes, args, world_size))


def resting_bytes(shapes: Shapes, args: TrainArgs, world_size: int) -> Parts:
    """What lives between steps: weights, optimizer, summed gradients, buckets."""
    size, reduce = BYTES[args.dtype], BYTES[args.reduce_dtype]
    trained = shapes.trained_parameters(args)
    held = shapes.parameters + (trained if args.method == "lora" else 0)
    share = trained // world_size
    on_device = args.offload_optimizer == "none"
    if args.zero_stage == 3:
        weights = 0 if args.offload_parameters != "none" else held // world_size * size
        if world_size > 1:
            weights += shapes.persistent_parameters(PERSISTENT_ELEMENTS) * size
        gradients, buckets = share * reduce, REDUCE_BUCKET_ELEMENTS * reduce
    else:
        weights = held * size
        # both stages hold the sum of every trained weight's gradients on every rank
        gradients, buckets = trained * reduce, REDUCE_BUCKET_ELEMENTS * reduce
    teacher = 0
    if needs_teacher(args, shapes.layout):
        teacher = shapes.dense_parameters * size // (world_size if args.zero_stage == 3 else 1)
    return {
        "parameters": weights,
        "teacher": teacher,
        "master weights": share * 4 if on_device else 0,
        "optimizer": share * 8 if on_device else 0,
        "gradients": gradients if on_device else 0,
        "buffers": buckets,
    }


def _kept(shapes: Shapes, args: TrainArgs, layers: list[_Layer], width: _Widths, last: int) -> int:
    """Activations that wait for the backward of the layers up to `last`, without the carry."""
    if not args.gradient_checkpointing:
        saved = [one.first_norm + one.attention + one.second_norm for one in layers[: last + 1]]
        tiled = [0 if args.mlp_tile_tokens and _tiled(width, args, shapes) else one.mlp for one in layers]
        return sum(saved) + sum(tiled[: last + 1]) + (last + 1) * width.hidden
    return width.hidden * (1 if args.offload_checkpoints else last + 1)


def _tiled(width: _Widths, args: TrainArgs, shapes: Shapes) -> bool:
    return width.inner > args.mlp_tile_tokens * shapes.intermediate * BYTES[args.dtype]


def _carry(shapes: Shapes, lead: Lead, args: TrainArgs, width: _Widths, last: int) -> int:
    """Carried tensors on the device in the backward of layer `last`; without checkpointing only their copies in the layers."""
    if not args.gradient_checkpointing:
        return carried_until(lead, last) * width.carried if shapes.layout == "cla" else 0
    if args.carry == "keep":
        return carried_until(lead, last) * width.carried
    return fetched_heads(lead, last) * width.carried


def _at_loss(
    shapes: Shapes,
    lead: Lead,
    args: TrainArgs,
    context_length: int,
    world_size: int,
    width: _Widths,
    layers: list[_Layer],
) -> Parts:
    tokens, size, last = rank_tokens(args, context_length), BYTES[args.dtype], shapes.layers - 1
    full = args.method == "full"
    block = min(args.loss_chunk_mib * MEBIBYTE, 4 * shapes.vocab * tokens)
    final = width.hidden + (0 if width.is_wide else width.fp32) + width.hidden * (1 + full)
    weight = shapes.embedding_parameters
    distilled = 0
    if args.distill_logits:
        block = block * (2 if args.distill_temperature != 1 else 3) // 2
        distilled = width.hidden * args.teacher_passes + (4 * weight if full else 0)
    if args.distill_attention:
        distilled += shapes.layers * width.hidden
    carry = _carry(shapes, lead, args, width, last)
    if args.carry != "keep":
        carry = 0
    return {
        "activations": _kept(shapes, args, layers, width, last) + final + width.fp32,
        "carry": carry,
        "logits": 2 * block,
        "distillation": distilled,
        "gradients": (weight * size if full else 0),
        "gathered": _gathered(shapes, args, world_size, shapes.embedding_parameters, last, False),
    }


def _in_backward(
    shapes: Shapes,
    lead: Lead,
    args: TrainArgs,
    context_length: int,
    index: int,
    width: _Widths,
    layers: list[_Layer],
) -> Iterator[Parts]:
    """The two widest moments of a layer's backward: in its feed-forward part, and in attention."""
    layer, kept = layers[index], _kept(shapes, args, layers, width, index)
    tiles = mlp_tiles(args, context_length)
    carry = _carry(shapes, lead, args, width, index)
    arriving = continued_heads(lead, index) * width.carried
    again = args.gradient_checkpointing
    common = {"carry": carry, "carry gradients": arriving}
    recomputed = layer.first_norm + layer.attention + layer.second_norm if again else 0
    inner = (6 * width.inner) // tiles
    if not again and tiles == 1:
        inner -= layer.mlp
    extra = width.hidden * (1 if tiles == 1 else 3)
    yield {**common, "activations": kept + recomputed + inner + extra}
    follow = 0 if shapes.layout == "cla" else len(followers(lead, index))
    sums = width.wide_query + 2 * width.wide_key + follow * width.wide_carried
    part = width.query + 2 * width.key
    recomputed = layer.first_norm + layer.attention - width.query if again else 0
    if not again:
        kept -= layer.second_norm + layer.mlp + width.query if tiles == 1 else layer.second_norm
    yield {**common, "activations": kept + recomputed + 2 * width.hidden + width.query + sums + part}


def _weights_of_layer(shapes: Shapes, args: TrainArgs, world_size: int, index: int) -> Parts:
    """Gathered weights and the gradient of the largest one in a layer's backward."""
    size = BYTES[args.dtype]
    waiting = max(rows * columns for rows, columns in shapes.linear_sizes.values())
    if args.zero_stage < 3:  # gradients of the layers above wait for the end of the backward
        waiting += shapes.embedding_parameters + (shapes.layers - 1 - index) * shapes.layer_parameters
    return {
        "gradients": waiting * size if args.method == "full" else 0,
        "gathered": _gathered(shapes, args, world_size, shapes.layer_parameters, index, True),
    }


def _gathered(shapes: Shapes, args: TrainArgs, world_size: int, now: int, layer: int, in_layer: bool) -> int:
    """Bytes of weights that stage 3 has brought together: those in use, those used again soon, and the next ones.

    DeepSpeed keeps what will be used again within `REUSE_ELEMENTS`: after the forward of the last layers their backward follows.
    """
    if args.zero_stage != 3 or (world_size == 1 and args.offload_parameters == "none"):
        return 0
    each, head, last = shapes.layer_parameters, shapes.embedding_parameters, shapes.layers - 1
    passes = 3 if args.gradient_checkpointing else 2
    room = REUSE_ELEMENTS - 2 * head
    kept = 0 if room <= 0 else min(shapes.layers, 1 + room // (passes * each))
    waiting = max(0, kept - (last - layer))
    elements = now + (max(0, waiting - 1) if in_layer else waiting) * each
    elements += min(PREFETCH_ELEMENTS, max(0, layer - waiting) * each)
    return min(elements, shapes.parameters) * BYTES[args.dtype]


def _at_update(shapes: Shapes, args: TrainArgs, world_size: int) -> Parts:
    """Gradients of the share that is updated, once more in float32."""
    if args.offload_optimizer != "none":
        return {}
    return {"gradients": shapes.trained_parameters(args) // world_size * 4}


def _merge(*several: Parts) -> Parts:
    merged: Parts = {}
    for parts in several:
        for name, value in parts.items():
            merged[name] = merged.get(name, 0) + value
    return merged


def host_bytes(shapes: Shapes, lead: Lead, args: TrainArgs, context_length: int, world_size: int) -> Parts:
    """Bytes of host memory that one rank's offloading holds, by part; pinned allocations round up on their own."""
    width = _widths(shapes, lead, args, context_length)
    trained, size = shapes.trained_parameters(args), BYTES[args.dtype]
    parts: Parts = {}
    if args.carry == "offload":
        parts["carry"] = carried_heads(lead) * width.carried
    if args.offload_checkpoints:
        parts["checkpoints of activations"] = shapes.layers * width.hidden
    if args.offload_optimizer == "cpu":
        parts["optimizer"] = trained * 16 // world_size
    if args.offload_parameters == "cpu":
        parts["parameters"] = shapes.parameters * size // world_size
    if args.save_mode == "async":
        parts["checkpoint"] = checkpoint_disk_bytes(shapes, args) // world_size
    return parts


def nvme_bytes(shapes: Shapes, args: TrainArgs, world_size: int) -> Parts:
    """Bytes of one rank's files below `offload_folder`, by part."""
    parts: Parts = {}
    if args.offload_optimizer == "nvme":
        parts["optimizer"] = shapes.trained_parameters(args) * 12 // world_size
    if args.offload_parameters == "nvme":
        parts["parameters"] = shapes.parameters * BYTES[args.dtype] // world_size
    return parts


def checkpoint_disk_bytes(shapes: Shapes, args: TrainArgs) -> int:
    """Disk bytes of one checkpoint of all ranks: master weights and two moments in fp32, below stage 3 the weights too."""
    weights = BYTES[args.dtype] if args.zero_stage < 3 else 0
    return (12 + weights) * shapes.trained_parameters(args) + MEBIBYTE
