"""Bytes that one rank holds at the peak of a training step, by part, computed from shapes.

The peak is the largest of several moments. Each moment is the sum of what is in memory then:

- the loss: all kept activations, and blocks of logits;
- the backward of every decoder layer: its activations (recomputed under checkpointing), its gradients, the
  `shared_qk` of open blocks, and gathered weights;
- the optimizer step.

`benchmarks/estimate_memory.py` compares the sums with live bytes of real steps. Libraries, the allocator's
slack and workspaces inside a kernel are left out.

All estimates are made for a `TrainingJob`: a model under a plan, settings with nothing left to derive, the
length of rows, and the number of ranks on each machine. Nothing is allocated.
"""

import functools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from pod.modeling.model.sharing import Lead, Roles, roles_of
from pod.training.args import TrainArgs
from pod.training.predict.shapes import (
    Shapes,
    continued_heads,
    fetched_heads,
    shared_qk_heads,
    shared_qk_heads_below,
)
from pod.training.run import optimization
from pod.training.run.loss import MEBIBYTE
from pod.training.run.ulysses import Shares, share_heads


@dataclass(frozen=True)
class World:
    """How many ranks there are, and how many of them each machine has.

    Attributes:
        size: number of all ranks.
        local_size: number of ranks of one machine.
    """

    size: int
    local_size: int

    def __post_init__(self) -> None:
        if self.local_size < 1 or self.size < 1 or self.size % min(self.size, self.local_size):
            raise ValueError(
                f"{self.size} ranks do not fill machines of {self.local_size} ranks each: use a multiple of "
                f"{self.local_size}, or fewer than {self.local_size}"
            )

    @property
    def nodes(self) -> int:
        """Number of machines."""
        return max(1, self.size // self.local_size)

    @property
    def per_machine(self) -> int:
        """Ranks that share a machine's memory."""
        return min(self.size, self.local_size)


@dataclass(frozen=True)
class TrainingJob:
    """One training run as all estimates see it.

    Attributes:
        shapes: sizes of the model.
        lead: the plan, lead[layer][kv_head].
        args: section `train`, with nothing left to derive.
        context_length: tokens of a packed row over all ranks of a sequence-parallel group.
        world: number of ranks and machines.
        attention: the backend that runs attention: `flash`, `flex`, `triton` or `reference`.
    """

    shapes: Shapes
    lead: Lead
    args: TrainArgs
    context_length: int
    world: World
    attention: str = "flash"

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch on the rank that holds most."""
        return self.args.rank_tokens(self.context_length)

    @property
    def tiles(self) -> int:
        """Number of tiles into which a feed-forward layer cuts the tokens of a micro-batch; 1 = not cut."""
        return self.args.mlp_tiles(self.context_length)

    @property
    def rows_per_step(self) -> int:
        """Rows in one optimizer step, over all ranks."""
        groups = self.world.size // self.args.sequence_parallel_size
        return self.args.micro_batch_size * self.args.gradient_accumulation_steps * groups

    @property
    def shares(self) -> Shares:
        """Which heads the ranks of a sequence-parallel group compute.

        Raises:
            ValueError: a sequence-parallel size that cannot work.
        """
        return _shares(self.lead, self.shapes, self.args.sequence_parallel_size, self.context_length)

    @property
    def heads_per_rank(self) -> int:
        """KV heads of the rank that has most, replicas included."""
        return -(-self.shapes.kv_heads * self.shares.repeats // self.args.sequence_parallel_size)


@functools.lru_cache(maxsize=256)
def _shares(lead: Lead, shapes: Shapes, size: int, context_length: int) -> Shares:
    return share_heads(lead, shapes.query_heads, shapes.kv_heads, size, context_length, shapes.windows)


BYTES = {"bfloat16": 2, "float32": 4}
"""Bytes of a number, by dtype."""
PERSISTENT_ELEMENTS = 100_000  # DeepSpeed's stage3_param_persistence_threshold
GROUP_ELEMENTS = 1_000_000_000  # DeepSpeed's sub_group_size: weights that it updates together
# DeepSpeed's stage3_max_reuse_distance: weights that are used again within so many elements stay gathered
REUSE_ELEMENTS = 1_000_000_000

Parts = dict[str, int]
"""Bytes by part, for example {"parameters": 1_000, "activations": 500}."""


def training_bytes(job: TrainingJob) -> Parts:
    """Bytes that one rank holds at its peak, by part.

    Raises:
        ValueError: a sequence-parallel size that cannot work.
    """
    return max(moments(job), key=lambda parts: sum(parts.values()))


def moments(job: TrainingJob) -> Iterator[Parts]:
    """The parts at every moment that can be the peak.

    These are the loss, the reduction of the output projection's gradient, the backward of each layer (in its
    feed-forward part and in attention), and the update.
    """
    rest = resting_bytes(job)
    step = _Step(job)
    yield _merge(rest, step.at_loss())
    yield _merge(rest, step.at_reduction())
    for index in range(job.shapes.layers):
        weights = step.weights_of_layer(index)
        yield _merge(rest, weights, step.in_feed_forward(index))
        yield _merge(rest, weights, step.in_attention(index))
    yield _merge(rest, _at_update(job))


def resting_bytes(job: TrainingJob) -> Parts:
    """Bytes that are held between steps too: weights, optimizer, summed gradients, buckets."""
    shapes, args, ranks = job.shapes, job.args, job.world.size
    size = BYTES[args.dtype]
    reduce = BYTES[args.reduce_dtype]
    trained = shapes.trained_parameters(args)
    held = shapes.parameters + (trained if args.method == "lora" else 0)
    share = trained // ranks if args.offload_optimizer == "none" else 0
    if args.zero_stage == 3:
        weights = held // ranks * size if args.offload_parameters == "none" else 0
        weights += shapes.persistent_parameters(PERSISTENT_ELEMENTS) * size if ranks > 1 else 0
    else:
        weights = held * size
    return {
        "parameters": weights,
        "master weights": share * 4,
        "optimizer": share * 8,
        # Below stage 3, every rank holds the summed gradients of all trained weights.
        "gradients": (share if args.zero_stage == 3 else trained) * reduce,
        "buffers": optimization.REDUCE_BUCKET_ELEMENTS * reduce,
    }


def start_bytes(job: TrainingJob) -> int:
    """Most bytes that a rank holds before its first step.

    It is the larger of two moments: while weights arrive, and when the optimizer is made. Weights arrive in
    the model's order (`StartWeights`). In stage 3, a rank then holds one whole weight and its shares of the
    weights before it. Below stage 3, DeepSpeed makes one flat copy of all weights beside them.
    """
    shapes, args, rest = job.shapes, job.args, resting_bytes(job)
    weights = rest["parameters"]
    size = BYTES[args.dtype]
    head = shapes.embedding_parameters
    largest = max(inputs * outputs for inputs, outputs in shapes.linear_sizes.values())
    # The embedding comes first. An output projection of its own comes last.
    last = largest if shapes.tied else head
    streamed = max(head * size, weights + last * size)
    arriving = streamed if args.zero_stage == 3 else 2 * weights
    return max(arriving, sum(_merge(rest, _at_update(job)).values()))


class _Step:
    """What one step of a job keeps and makes, in bytes of one micro-batch on a rank.

    Attributes:
        hidden: bytes of a hidden state.
        query: bytes of all queries.
        key: bytes of all keys.
        inner: bytes of a feed-forward activation.
        shared_head: bytes of `shared_qk` of one KV head: its queries and its key.
        group: bytes of the queries of one KV head.
        splits: whether attention keeps both parts of a merged softmax; flash keeps their sum.
        wide: factor by which a tensor grows in float32. Norms compute in float32, and attention sums
            gradients in it.
    """

    def __init__(self, job: TrainingJob):
        shapes, args, size = job.shapes, job.args, BYTES[job.args.dtype]
        self.job, self.wide, self.size = job, 4 // size, size
        self.recomputes = args.gradient_checkpointing == "full"
        self.full = args.method == "full"
        groups = shapes.query_heads // (shapes.kv_heads * job.shares.repeats)
        self.hidden = job.tokens * shapes.hidden * size
        self.inner = job.tokens * shapes.intermediate * size
        self.key = job.tokens * args.sequence_parallel_size * shapes.head_dim * job.heads_per_rank * size
        self.query = self.key * groups
        self.shared_head = self.key * (2 if shapes.layout == "cla" else groups + 1) // shapes.kv_heads
        self.group = self.key * groups // shapes.kv_heads
        self.splits = job.attention == "flex" and shapes.layout != "cla"
        self.first_norm = self.norm(self.saves_input("q_proj", "k_proj", "v_proj"), input_kept=True)
        self.second_norm = self.norm(self.saves_input("gate_proj", "up_proj"), input_kept=False)
        self.mlp = 3 * self.inner
        if self.saves_input("down_proj"):
            self.mlp += self.inner

    def norm(self, is_read: bool, input_kept: bool) -> int:
        """Bytes that a norm keeps.

        It keeps its input in float32. Where the norm's weight is trained, it keeps the normalised input too.
        Where its output must be kept for a trained linear layer, it keeps the output.

        Args:
            is_read: whether a linear layer keeps the output (`saves_input`).
            input_kept: whether the input itself is kept anyway; with `train.dtype` float32 it then needs no
                copy.
        """
        kept = 0
        if self.wide > 1 or not input_kept:
            kept += self.hidden * self.wide
        if self.full:
            kept += self.hidden
        if is_read:
            kept += self.hidden
        return kept

    def saves_input(self, *names: str) -> bool:
        """Whether any of these linear layers keeps its input for backward.

        A layer does when its weight or its adapter is trained. In stage 3 every layer does, because DeepSpeed
        replaces the linear function by its own (`zero3_linear_wrap`), which saves the input of frozen weights
        too.
        """
        args = self.job.args
        return self.full or args.zero_stage == 3 or any(name in args.lora_target_modules for name in names)

    @cached_property
    def attention(self) -> list[int]:
        """Bytes that the attention of each layer leaves for its backward."""
        layers = range(len(self.job.lead))
        # `o_proj` keeps the output once more, with heads side by side.
        again = self.query if self.saves_input("o_proj") else 0
        if self.job.shapes.layout == "cla":
            return [self._cla_attention(layer) + again for layer in layers]
        return [self._attention_by_role(layer) + again for layer in layers]

    def _cla_attention(self, layer: int) -> int:
        """Bytes of `attention` in a layer with the layout cla, without what `o_proj` keeps."""
        has_own_key = self.job.lead[layer][0] == layer
        if has_own_key:
            return 2 * self.query + 2 * self.key
        return 2 * self.query

    def _attention_by_role(self, layer: int) -> int:
        """Bytes of `attention` in a layer of leads, followers and windows, without what `o_proj` keeps."""
        roles = roles_of(self.job.lead, layer)
        own = self.query + 2 * self.key
        copied = int(_copied_share(roles) * own)
        follower = self.shared_head
        if self.splits:
            follower += self.group
        return self.query + own + copied + len(roles.followers) * follower

    def kept(self, last: int) -> int:
        """Bytes of activations that wait for the backward of the layers up to `last`, without `shared_qk`."""
        layers = last + 1
        if self.recomputes:
            return self.hidden * (1 if self.job.args.offload_checkpoints else layers)
        each = self.first_norm + self.second_norm + self.hidden + (self.mlp if self.job.tiles == 1 else 0)
        return sum(self.attention[:layers]) + layers * each

    def matched_attention(self, last: int, in_layer: bool) -> int:
        """Bytes of attention matching that wait for the backward of the layers up to `last`.

        These are the outputs of the teacher's attention and those of the model. With checkpointing, only the
        layer that is computed again has an output of its own.

        Args:
            in_layer: whether the backward of layer `last` has begun.
        """
        if not self.job.args.distill_attention:
            return 0
        own = int(in_layer) if self.recomputes else last + 1
        return (last + 1 + own) * self.hidden

    def shared_qk(self, last: int) -> int:
        """Bytes of `shared_qk` on the device in the backward of layer `last`.

        Without checkpointing there are only their copies in the layers, which `attention` counts. With the
        layout cla `shared_qk` itself is counted here.
        """
        lead = self.job.lead
        if not self.recomputes and self.job.shapes.layout != "cla":
            return 0
        keeps = not self.recomputes or self.job.args.shared_qk == "keep"
        heads = shared_qk_heads_below if keeps else fetched_heads
        return heads(lead, last) * self.shared_head

    def resting_shared_qk(self, last: int) -> int:
        """Bytes of `shared_qk` on the device while nothing has been fetched or recomputed yet."""
        return self.shared_qk(last) if self.job.args.shared_qk == "keep" else 0

    def at_loss(self) -> Parts:
        """The parts at the loss: all kept activations, and blocks of logits.

        A block and its gradient are held in float32, beside copies of both in `dtype`. Distillation holds the
        teacher's hidden states, the gradient of the student's in float32, what attention matching keeps, and
        six times half a block: logits and probabilities of both models.
        """
        shapes, last = self.job.shapes, self.job.shapes.layers - 1
        block = min(self.job.args.loss_chunk_mib * MEBIBYTE, 4 * shapes.vocab * self.job.tokens)
        final = self.hidden * (1 + self.wide) + self.norm(True, input_kept=True)
        distills = self.job.args.distill > 0
        teacher = self.hidden * (1 + self.wide) if distills else 0
        weight = shapes.embedding_parameters
        # In a small model, the embedding stays gathered from the teacher's forward on.
        both = distills and not shapes.tied and 2 * shapes.parameters <= REUSE_ELEMENTS
        return {
            "activations": self.kept(last) + final,
            "teacher": teacher + self.matched_attention(last, False),
            "shared_qk": self.resting_shared_qk(last),
            "logits": (2 if self.size == 4 and not distills else 3) * block,
            "gradients": weight * self.size if self.full else 0,
            "gathered": self.gathered(weight * (2 if both else 1), last, False),
        }

    def at_reduction(self) -> Parts:
        """The parts when the gradient of the output projection is reduced.

        The gradient and its copy in `reduce_dtype` are held then. This is right after the loss, or at the end
        of the backward where the embedding is tied to the output projection.
        """
        shapes, weight = self.job.shapes, self.job.shapes.embedding_parameters
        last = 0 if shapes.tied else shapes.layers - 1
        # In a small model, the embedding stays gathered.
        both = 2 * shapes.parameters <= REUSE_ELEMENTS and not shapes.tied
        whole = self.full and weight > optimization.REDUCE_BUCKET_ELEMENTS
        return {
            "activations": self.kept(last) + self.hidden * (1 + self.wide),
            "teacher": self.matched_attention(last, False),
            "shared_qk": self.resting_shared_qk(last),
            "gradients": weight * (self.size + _gradient_copy_bytes(self.job.args)) if whole else 0,
            "gathered": self.gathered(weight * (2 if both else 1), last, False),
        }

    def in_feed_forward(self, index: int) -> Parts:
        """The parts at the largest moment of a layer's backward in its feed-forward part."""
        tiles, again = self.job.tiles, self.first_norm + self.attention[index] + self.second_norm
        inner = 6 * self.inner // tiles
        if self.recomputes:
            inner += again
        elif tiles == 1:
            inner -= self.mlp
        return self.in_backward(index, inner + self.hidden * (1 if tiles == 1 else 3))

    def in_attention(self, index: int) -> Parts:
        """The parts at the largest moment of a layer's backward in attention."""
        follow = 0 if self.job.shapes.layout == "cla" else len(roles_of(self.job.lead, index).followers)
        parts = self.query + 2 * self.key
        parts += self.wide * (parts + follow * self.shared_head) + 2 * self.hidden
        if self.splits:  # the gradients of both parts, and of the values once more
            parts += follow * (2 * self.group + self.key // self.job.shapes.kv_heads)
        if self.recomputes:
            return self.in_backward(index, parts + self.first_norm + self.attention[index])
        done = self.second_norm + (self.mlp + self.query if self.job.tiles == 1 else 0)
        return self.in_backward(index, parts + self.query - done)

    def in_backward(self, index: int, active: int) -> Parts:
        """Bytes in a layer's backward: `active`, kept activations, `shared_qk` and its gradients."""
        arriving = continued_heads(self.job.lead, index) * self.shared_head
        activations = self.kept(index) + active
        return {
            "shared_qk": self.shared_qk(index),
            "shared_qk gradients": arriving,
            "activations": activations,
            "teacher": self.matched_attention(index, True),
        }

    def weights_of_layer(self, index: int) -> Parts:
        """The parts in a layer's backward that weights cause: gathered weights, and gradients."""
        shapes, args = self.job.shapes, self.job.args
        waiting = max(rows * columns for rows, columns in shapes.linear_sizes.values())
        copied = _gradient_copy_bytes(args) * max(waiting, optimization.REDUCE_BUCKET_ELEMENTS)
        # Below stage 3, gradients of the layers above wait for the end of the backward.
        if args.zero_stage < 3:
            waiting += shapes.embedding_parameters + (shapes.layers - 1 - index) * shapes.layer_parameters
        return {
            "gradients": waiting * self.size + copied if self.full else 0,
            "gathered": self.gathered(shapes.layer_parameters, index, True),
        }

    def gathered(self, now: int, layer: int, in_layer: bool) -> int:
        """Bytes of weights that stage 3 has gathered: those in use, those used again soon, and the next ones.

        DeepSpeed keeps weights gathered that will be used again within `REUSE_ELEMENTS`. These are weights of
        the last layers, whose backward follows soon after their forward.

        Args:
            now: elements of the weights in use.
            layer: the layer that is in its backward, or about to be.
            in_layer: whether the weights in use are those of the layer itself.
        """
        shapes, args = self.job.shapes, self.job.args
        if args.zero_stage != 3 or (self.job.world.size == 1 and args.offload_parameters == "none"):
            return 0
        each, room = shapes.layer_parameters, REUSE_ELEMENTS - 2 * shapes.embedding_parameters
        uses = 3 if self.recomputes else 2
        kept = min(shapes.layers, 1 + room // (uses * each)) if room > 0 else 0
        waiting = max(0, kept - (shapes.layers - 1 - layer))
        elements = now + (max(0, waiting - 1) if in_layer else waiting) * each
        elements += min(optimization.PREFETCH_ELEMENTS, max(0, layer - waiting) * each)
        return min(elements, shapes.parameters) * self.size


def _copied_share(roles: Roles) -> float:
    """Share of a layer's KV heads that attention copies, since it computes role by role.

    Heads of one role that are neighbours are a view. Heads of a role that lie apart are copied. Where the
    heads of every role lie apart, the share counts as 0.
    """
    parts = [heads for heads in (roles.leads, roles.followers, roles.windows) if heads]
    apart = [heads for heads in parts if heads[-1] - heads[0] != len(heads) - 1]
    return sum(map(len, apart)) / sum(map(len, parts)) if len(apart) < len(parts) else 0.0


def _gradient_copy_bytes(args: TrainArgs) -> int:
    """Bytes per weight of a gradient's copy in `reduce_dtype`.

    Stage 3 makes this copy before ranks add the gradient up.
    """
    return BYTES[args.reduce_dtype] if args.zero_stage == 3 and args.reduce_dtype != args.dtype else 0


def _at_update(job: TrainingJob) -> Parts:
    """The parts at the update: a float32 copy of the gradients of this rank's share."""
    share = job.shapes.trained_parameters(job.args) // job.world.size
    return {"gradients": share * 4 if job.args.offload_optimizer == "none" else 0}


def _merge(*several: Parts) -> Parts:
    """The sum of parts, by name."""
    merged = Counter()
    for parts in several:
        merged.update(parts)
    return merged


def pinned_bytes(size: int) -> int:
    """Bytes of host memory that a pinned tensor of `size` bytes takes: PyTorch rounds up to powers of two."""
    return 1 << (size - 1).bit_length() if size else 0


def pinned_tensors(job: TrainingJob) -> dict[str, Counter[int]]:
    """Tensors that one rank's offloading pins in host memory: part → size in bytes → how many of that size.

    Example: eight followed KV heads at 1,500 tokens, with four query heads each, give
    {"shared_qk": {1_536_000: 8, 384_000: 8}}.
    """
    shapes, args, step = job.shapes, job.args, _Step(job)
    parts: dict[str, Counter[int]] = {}
    if args.shared_qk == "offload":
        heads = shared_qk_heads(job.lead)
        first = step.shared_head // 2 if shapes.layout == "cla" else step.group
        parts["shared_qk"] = Counter({first: heads}) + Counter({step.shared_head - first: heads})
    if args.offload_checkpoints:
        parts["checkpoints of activations"] = Counter({step.hidden: shapes.layers})
    if args.offload_optimizer == "cpu":
        parts["optimizer"] = _pinned_by_optimizer(job)
    if args.offload_parameters == "cpu":
        parts["parameters"] = _pinned_weights(job)
    return parts


def _pinned_by_optimizer(job: TrainingJob) -> Counter[int]:
    """Tensors that the offloaded optimizer pins: size in bytes → how many of that size.

    The summed gradients lie in one tensor. The update reads the float32 gradients by groups of weights, one
    tensor for each group (DeepSpeed 0.19.8, `stage3.py`; offloading needs stage 3).
    """
    weights = job.shapes.trained_parameters(job.args) // job.world.size
    whole_groups, rest = divmod(weights, GROUP_ELEMENTS)
    gradients = Counter({4 * GROUP_ELEMENTS: whole_groups}) + Counter({4 * rest: 1})
    return gradients + Counter({BYTES[job.args.reduce_dtype] * weights: 1})


def _pinned_weights(job: TrainingJob) -> Counter[int]:
    """Tensors of one rank's share of the weights: size in bytes → how many of that size.

    Trained weights lie in one tensor. Each frozen weight has a tensor of its own.
    """
    shapes, size, ranks = job.shapes, BYTES[job.args.dtype], job.world.size
    if job.args.method == "full":
        return Counter({shapes.parameters * size // ranks: 1})
    weights = [rows * columns for rows, columns in shapes.linear_sizes.values()] * shapes.layers
    weights += [shapes.embedding_parameters] * (1 if shapes.tied else 2)
    others = shapes.parameters - sum(weights)  # norms, and the experts that a token does not use
    return Counter(weight * size // ranks for weight in [*weights, others])


def host_bytes(job: TrainingJob) -> Parts:
    """Bytes of host memory that one rank's offloading holds, by part.

    Pinned tensors count with the size to which PyTorch rounds them up. An asynchronous checkpoint is a part
    too.

    Example: the optimizer of 8.03e9 weights on one rank takes 153.9 GiB: 20 bytes per weight, and 4.3 GiB of
    rounding.
    """
    args, ranks = job.args, job.world.size
    trained = job.shapes.trained_parameters(args)
    parts = {
        name: sum(count * pinned_bytes(size) for size, count in tensors.items())
        for name, tensors in pinned_tensors(job).items()
    }
    if args.offload_optimizer == "cpu":
        parts["optimizer"] += 12 * (trained // ranks)  # float32 weights and two moments are not pinned
    if args.save_mode == "async":
        parts["checkpoint"] = checkpoint_disk_bytes(trained) // ranks
    return parts


def checkpoint_disk_bytes(trained: int) -> int:
    """Disk bytes of one checkpoint of all ranks: master weights and two moments in fp32, plus 1 MiB.

    Args:
        trained: number of weights that are trained.
    """
    return 12 * trained + MEBIBYTE
