"""Bytes that one rank receives in an optimizer step, by kind of collective, inside its machine and from other machines.

Weights and gradients travel in rings over all ranks: every rank receives all but its own share inside, and of what comes from
other machines each of a machine's ranks brings in an equal part. Heads travel between the contiguous ranks of a
sequence-parallel group (Ulysses). Sharing keys and queries between layers adds nothing: they stay where they are computed.
"""

from dataclasses import dataclass

from pod.training.predict.job import Job, World
from pod.training.predict.memory import BYTES
from pod.training.predict.shapes import silent_layers
from pod.training.run.carry import leads_that_end


@dataclass(frozen=True)
class Traffic:
    """Bytes per step that one rank receives: from ranks of its machine, and from other machines."""

    kind: str
    inside: int
    between: int

    @property
    def bytes(self) -> int:
        """Both together."""
        return self.inside + self.between


def communication(job: Job) -> list[Traffic]:
    """Traffic of one optimizer step, by kind; kinds without any are left out."""
    kinds = [
        _ring("all-gather of weights", weight_bytes(job), job.world),
        _ring("reduce-scatter of gradients", gradient_bytes(job), job.world),
        _exchange(job),
    ]
    return [kind for kind in kinds if kind.bytes]


def weight_bytes(job: Job) -> int:
    """Bytes of weights that are brought together in a step, every rank's own share included.

    Stage 3 gathers all weights in the forward and in the backward of every micro-batch (recomputing uses those of the backward);
    stages 1 and 2 gather the trained weights after the update.
    """
    shapes, args = job.shapes, job.args
    size = BYTES[args.dtype]
    if args.zero_stage < 3:
        return shapes.trained_parameters(args) * size
    held = shapes.parameters + (shapes.trained_parameters(args) if args.method == "lora" else 0)
    return 2 * held * size * args.gradient_accumulation_steps


def gradient_bytes(job: Job) -> int:
    """Bytes of gradients that are summed over ranks in a step: of every micro-batch, in stage 1 of the last one only."""
    args = job.args
    times = 1 if args.zero_stage == 1 else args.gradient_accumulation_steps
    return times * job.shapes.trained_parameters(args) * BYTES[args.reduce_dtype]


def all_to_all_bytes(job: Job) -> int:
    """Bytes that a rank hands to the all-to-alls of a step, its own part included: forward, backward and what is recomputed."""
    args, lead = job.args, job.lead
    if args.sequence_parallel_size == 1:
        return 0
    passes = 1 + (args.gradient_checkpointing == "full")
    once = exchanged_bytes(job)
    total = passes * (once["to_heads"] + once["to_sequence"])
    total += once["to_heads_backward"] + once["to_sequence_backward"]
    if args.carry == "recompute":
        projected = sum(len(leads_that_end(lead, layer)) for layer in range(len(lead)))
        total += projected * once["to_heads"] // len(lead)
    return total * args.gradient_accumulation_steps


def exchanged_bytes(job: Job) -> dict[str, int]:
    """The same for one forward and one backward of a micro-batch; what `Ulysses.sent_bytes` counts on the first rank."""
    shapes, args, size = job.shapes, job.args, BYTES[job.args.dtype]
    heads = shapes.kv_heads * job.shares.repeats
    groups = shapes.query_heads // heads
    silent = silent_layers(job.lead) if shapes.layout == "cla" else 0
    slice_of_all = job.tokens * shapes.head_dim * size * heads
    row_of_own = args.micro_batch_size * job.context_length * shapes.head_dim * size * job.heads_per_rank
    per_head = shapes.layers * groups + 2 * (shapes.layers - silent)
    return {
        "to_heads": slice_of_all * per_head,
        "to_sequence": row_of_own * shapes.layers * groups,
        "to_heads_backward": row_of_own * per_head,
        "to_sequence_backward": slice_of_all * shapes.layers * groups,
    }


def _ring(kind: str, total: int, world: World) -> Traffic:
    between = total * (world.nodes - 1) // world.nodes // min(world.size, world.local_size)
    return Traffic(kind, total * (world.size - 1) // world.size - between, between)


def _exchange(job: Job) -> Traffic:
    total, size = all_to_all_bytes(job), job.args.sequence_parallel_size
    near = min(size, job.world.local_size)
    return Traffic("all-to-all of heads", total * (near - 1) // size, total * (size - near) // size)
