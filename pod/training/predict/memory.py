"""What one rank holds at the peak of a training step, by part; computed from shapes, nothing is allocated.

The peak is the largest of several moments, each of which is added up from what lives then: the loss (all kept activations,
blocks of logits), the backward of every decoder layer (its activations, recomputed under checkpointing, its gradients, the
carry of open blocks, gathered weights) and the optimizer step. `benchmarks/estimate_memory.py` compares the sums with live
bytes of real steps. Left out: libraries, the allocator's slack, workspaces inside a kernel.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pod.training.args import TrainArgs
from pod.training.predict.job import Job
from pod.training.predict.shapes import (
    carried_heads,
    carried_until,
    continued_heads,
    fetched_heads,
    followers,
    heads_by_role,
)
from pod.training.run import engine
from pod.training.run.loss import MEBIBYTE

BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
PERSISTENT_ELEMENTS = 100_000  # DeepSpeed's stage3_param_persistence_threshold
REUSE_ELEMENTS = 1_000_000_000  # its stage3_max_reuse_distance: what is used again sooner stays gathered

Parts = dict[str, int]


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


def _widths(job: Job) -> _Widths:
    shapes, tokens, size = job.shapes, job.tokens, BYTES[job.args.dtype]
    groups = shapes.query_heads // (shapes.kv_heads * job.shares.repeats)
    key = tokens * job.args.sequence_parallel_size * shapes.head_dim * job.heads_per_rank
    query = key * groups
    carried = key * (2 if shapes.layout == "cla" else groups + 1)
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


def _layer(job: Job, index: int, width: _Widths) -> _Layer:
    shapes, lead, args = job.shapes, job.lead, job.args
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


def training_bytes(job: Job) -> Parts:
    """Bytes that one rank holds at its peak, by part.

    Raises:
        ValueError: a sequence-parallel size that cannot work.
    """
    return max(moments(job), key=lambda parts: sum(parts.values()))


def moments(job: Job) -> Iterator[Parts]:
    """The parts at every moment that can be the peak: the loss, the reduction of the output projection's gradient, the backward of
    each layer, the update."""
    rest, step = resting_bytes(job), _Step(job)
    yield _merge(rest, step.at_loss())
    yield _merge(rest, step.at_reduction())
    for index in range(job.shapes.layers):
        weights = _weights_of_layer(job, index)
        for active in step.in_backward(index):
            yield _merge(rest, active, weights)
    yield _merge(rest, _at_update(job))


def resting_bytes(job: Job) -> Parts:
    """What lives between steps: weights, optimizer, summed gradients, buckets."""
    shapes, args, ranks = job.shapes, job.args, job.world.size
    size, reduce = BYTES[args.dtype], BYTES[args.reduce_dtype]
    trained = shapes.trained_parameters(args)
    held = shapes.parameters + (trained if args.method == "lora" else 0)
    share = trained // ranks
    on_device = args.offload_optimizer == "none"
    if args.zero_stage == 3:
        weights = 0 if args.offload_parameters != "none" else held // ranks * size
        if ranks > 1:
            weights += shapes.persistent_parameters(PERSISTENT_ELEMENTS) * size
        gradients = share * reduce
    else:
        weights = held * size
        gradients = (
            trained * reduce
        )  # both stages hold the sum of every trained weight's gradients on every rank
    return {
        "parameters": weights,
        "master weights": share * 4 if on_device else 0,
        "optimizer": share * 8 if on_device else 0,
        "gradients": gradients if on_device or args.zero_stage < 3 else 0,
        "buffers": engine.REDUCE_BUCKET_ELEMENTS * reduce,
    }


def start_bytes(job: Job) -> int:
    """Most that a rank holds before its first step: while weights arrive, one at a time, and when the optimizer is made.

    Below stage 3 DeepSpeed makes one flat copy of all weights beside them.
    """
    rest, weight = resting_bytes(job), job.shapes.embedding_parameters * BYTES[job.args.dtype]
    arriving = rest["parameters"] * (1 if job.args.zero_stage == 3 else 2) + weight
    return max(arriving, sum(_merge(rest, _at_update(job)).values()))


class _Step:
    """What one step of a job keeps and makes, in bytes."""

    def __init__(self, job: Job):
        self.job, self.width = job, _widths(job)
        self.layers = [_layer(job, index, self.width) for index in range(job.shapes.layers)]
        self.recomputes = job.args.gradient_checkpointing == "full"

    def kept(self, last: int) -> int:
        """Activations that wait for the backward of the layers up to `last`, without the carry."""
        if self.recomputes:
            return self.width.hidden * (1 if self.job.args.offload_checkpoints else last + 1)
        layers = self.layers[: last + 1]
        saved = sum(one.first_norm + one.attention + one.second_norm for one in layers)
        mlp = sum(one.mlp for one in layers) if self.job.tiles == 1 else 0
        return saved + mlp + len(layers) * self.width.hidden

    def carry(self, last: int) -> int:
        """Carried tensors on the device in the backward of layer `last`; without checkpointing only their copies in the layers."""
        lead = self.job.lead
        if not self.recomputes:
            return carried_until(lead, last) * self.width.carried if self.job.shapes.layout == "cla" else 0
        heads = carried_until if self.job.args.carry == "keep" else fetched_heads
        return heads(lead, last) * self.width.carried

    def resting_carry(self, last: int) -> int:
        """Carried tensors on the device where nothing has been fetched or made again yet."""
        return self.carry(last) if self.job.args.carry == "keep" else 0

    def at_reduction(self) -> Parts:
        """The gradient of the output projection and its copy in `reduce_dtype`: behind the loss, or last of all where the embedding
        is tied to it."""
        shapes, args = self.job.shapes, self.job.args
        last, weight = 0 if shapes.tied else shapes.layers - 1, shapes.embedding_parameters
        tables = (
            2 if 2 * shapes.parameters <= REUSE_ELEMENTS and not shapes.tied else 1
        )  # a small model's embedding stays
        whole = args.method == "full" and weight > engine.REDUCE_BUCKET_ELEMENTS
        return {
            "activations": self.kept(last) + self.width.hidden + self.width.fp32,
            "carry": self.resting_carry(last),
            "gradients": weight * (BYTES[args.dtype] + _copied_bytes(args)) if whole else 0,
            "gathered": _gathered(self.job, tables * weight, last, False),
        }

    def at_loss(self) -> Parts:
        """All kept activations and blocks of logits."""
        shapes, args, width = self.job.shapes, self.job.args, self.width
        last, full, weight = shapes.layers - 1, args.method == "full", shapes.embedding_parameters
        block = min(args.loss_chunk_mib * MEBIBYTE, 4 * shapes.vocab * self.job.tokens)
        final = width.hidden + (0 if width.is_wide else width.fp32) + width.hidden * (1 + full)
        return {
            "activations": self.kept(last) + final + width.fp32,
            "carry": self.resting_carry(last),
            "logits": 2 * block,
            "gradients": weight * BYTES[args.dtype] if full else 0,
            "gathered": _gathered(self.job, weight, last, False),
        }

    def in_backward(self, index: int) -> Iterator[Parts]:
        """The two widest moments of a layer's backward: in its feed-forward part, and in attention."""
        layer, kept, width, tiles = self.layers[index], self.kept(index), self.width, self.job.tiles
        arriving = continued_heads(self.job.lead, index) * width.carried
        common = {"carry": self.carry(index), "carry gradients": arriving}
        recomputed = layer.first_norm + layer.attention + layer.second_norm if self.recomputes else 0
        inner = (6 * width.inner) // tiles
        if not self.recomputes and tiles == 1:
            inner -= layer.mlp
        extra = width.hidden * (1 if tiles == 1 else 3)
        yield {**common, "activations": kept + recomputed + inner + extra}
        follow = 0 if self.job.shapes.layout == "cla" else len(followers(self.job.lead, index))
        sums = width.wide_query + 2 * width.wide_key + follow * width.wide_carried
        part = width.query + 2 * width.key
        recomputed = layer.first_norm + layer.attention - width.query if self.recomputes else 0
        if not self.recomputes:
            kept -= layer.second_norm + layer.mlp + width.query if tiles == 1 else layer.second_norm
        yield {**common, "activations": kept + recomputed + 2 * width.hidden + width.query + sums + part}


def _weights_of_layer(job: Job, index: int) -> Parts:
    """Gathered weights and the gradient of the largest one in a layer's backward."""
    shapes, args = job.shapes, job.args
    size = BYTES[args.dtype]
    waiting = max(rows * columns for rows, columns in shapes.linear_sizes.values())
    copied = _copied_bytes(args) * max(waiting, engine.REDUCE_BUCKET_ELEMENTS)
    if args.zero_stage < 3:  # gradients of the layers above wait for the end of the backward
        waiting += shapes.embedding_parameters + (shapes.layers - 1 - index) * shapes.layer_parameters
    return {
        "gradients": waiting * size + copied if args.method == "full" else 0,
        "gathered": _gathered(job, shapes.layer_parameters, index, True),
    }


def _copied_bytes(args: TrainArgs) -> int:
    """Bytes per weight of the copy in `reduce_dtype` that stage 3 makes of a gradient before ranks add it up."""
    return BYTES[args.reduce_dtype] if args.zero_stage == 3 and args.reduce_dtype != args.dtype else 0


def _gathered(job: Job, now: int, layer: int, in_layer: bool) -> int:
    """Bytes of weights that stage 3 has brought together: those in use, those used again soon, and the next ones.

    DeepSpeed keeps what will be used again within `REUSE_ELEMENTS`: after the forward of the last layers their backward follows.
    """
    shapes, args = job.shapes, job.args
    if args.zero_stage != 3 or (job.world.size == 1 and args.offload_parameters == "none"):
        return 0
    each, head, last = shapes.layer_parameters, shapes.embedding_parameters, shapes.layers - 1
    passes = 3 if args.gradient_checkpointing == "full" else 2
    room = REUSE_ELEMENTS - 2 * head
    kept = 0 if room <= 0 else min(shapes.layers, 1 + room // (passes * each))
    waiting = max(0, kept - (last - layer))
    elements = now + (max(0, waiting - 1) if in_layer else waiting) * each
    elements += min(engine.PREFETCH_ELEMENTS, max(0, layer - waiting) * each)
    return min(elements, shapes.parameters) * BYTES[args.dtype]


def _at_update(job: Job) -> Parts:
    """Gradients of the share that is updated, once more in float32."""
    if job.args.offload_optimizer != "none":
        return {}
    return {"gradients": job.shapes.trained_parameters(job.args) // job.world.size * 4}


def _merge(*several: Parts) -> Parts:
    merged: Parts = {}
    for parts in several:
        for name, value in parts.items():
            merged[name] = merged.get(name, 0) + value
    return merged


def host_bytes(job: Job) -> Parts:
    """Bytes of host memory that one rank's offloading holds, by part; pinned allocations round up on their own."""
    shapes, args, ranks, width = job.shapes, job.args, job.world.size, _widths(job)
    trained, size = shapes.trained_parameters(args), BYTES[args.dtype]
    parts: Parts = {}
    if args.carry == "offload":
        parts["carry"] = carried_heads(job.lead) * width.carried
    if args.offload_checkpoints:
        parts["checkpoints of activations"] = shapes.layers * width.hidden
    if args.offload_optimizer == "cpu":
        parts["optimizer"] = trained * 16 // ranks
    if args.offload_parameters == "cpu":
        parts["parameters"] = shapes.parameters * size // ranks
    if args.save_mode == "async":
        parts["checkpoint"] = checkpoint_disk_bytes(trained) // ranks
    return parts


def checkpoint_disk_bytes(trained: int) -> int:
    """Disk bytes of one checkpoint of all ranks: master weights and two moments in fp32, plus 1 MiB.

    Args:
        trained: weights that are trained.
    """
    return 12 * trained + MEBIBYTE
