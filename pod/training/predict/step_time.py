"""Time of an optimizer step from shapes and a device's figures: arithmetic, traffic, update, copies to the host.

An estimate to choose a layout by, not a promise: attention is counted as if every row were one document, matrix products and
attention reach `efficiency` of the peak, links `link_efficiency` of theirs. The step is given twice: with weights and
gradients travelling entirely behind the arithmetic, and one after the other. All-to-alls always wait.
"""

from dataclasses import dataclass

from pod.training.args import TrainArgs
from pod.training.predict.communication import Traffic, communication
from pod.training.predict.devices import Device
from pod.training.predict.job import Job
from pod.training.predict.memory import BYTES, host_bytes
from pod.training.predict.shapes import Lead, Shapes, carried_heads

LINK_EFFICIENCY = 0.7
HOST_UPDATE_BYTES_PER_S = 20e9  # of a CPU that updates AdamW, per rank


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step by part, and its two sums.

    Attributes:
        parts: seconds by name.
        overlapped, sequential: seconds of the step with and without traffic behind arithmetic.
    """

    parts: dict[str, float]
    overlapped: float
    sequential: float

    @property
    def expected(self) -> float:
        """Seconds with half of the traffic behind arithmetic: what layouts are compared by."""
        return (self.overlapped + self.sequential) / 2


def step_time(job: Job, device: Device) -> StepTime:
    """Seconds of an optimizer step."""
    args = job.args
    flops = rank_flops(job) * args.gradient_accumulation_steps
    parts = {"arithmetic": flops / (device.tflops(args.dtype) * 1e12 * device.efficiency)}
    parts |= {kind.kind: _seconds(kind, device) for kind in communication(job)}
    parts["update"] = _update_seconds(job, device)
    copies = _copied_bytes(job)
    if copies:
        parts["copies to and from the host"] = copies / (device.host_gbps * 1e9 * LINK_EFFICIENCY)
    waiting = parts.get("all-to-all of heads", 0.0) + parts["update"]
    sequential = sum(parts.values())
    behind = sequential - waiting - parts["arithmetic"]
    return StepTime(parts, waiting + max(parts["arithmetic"], behind), sequential)


def model_flops(shapes: Shapes, lead: Lead, args: TrainArgs, tokens: int, attention: float) -> float:
    """Floating-point operations that one forward and backward of so many tokens need; nothing is counted twice.

    Backward takes two operations for each of forward: one for the gradient of the input, one for that of the weight,
    which the frozen weights of LoRA do not need.

    Args:
        attention: operations of a forward pass's attention.
    """
    weights = 2.0 * tokens * shapes.multiplied_weights(lead)
    if args.method == "lora":
        return 2 * weights + 6.0 * tokens * shapes.lora_parameters(args) + 3 * attention
    return 3 * (weights + attention)


def rank_flops(job: Job) -> float:
    """Those of one rank for one micro-batch, with all that is computed again: layers under checkpoints, tiles, logits, the carry,
    and the logits of attention's backward. Attention is that of the rank which a layer waits for."""
    shapes, lead, args, tokens = job.shapes, job.lead, job.args, job.tokens
    attention = attention_flops(job)
    head = 2.0 * tokens * shapes.embedding_parameters
    layers = 2.0 * tokens * shapes.multiplied_weights(lead) - head
    again = 0.5 * attention + head
    if args.gradient_checkpointing == "full":
        again += layers + attention
    if job.tiles > 1:
        again += 6.0 * tokens * shapes.layers * shapes.hidden * shapes.intermediate
    if args.carry == "recompute":
        again += 2.0 * tokens * shapes.hidden * shapes.carried_width * carried_heads(lead)
    return again + model_flops(shapes, lead, args, tokens, attention)


def attention_flops(job: Job) -> float:
    """Of all layers' forward: 4·d per visible pair and query head, of the rank of a sequence-parallel group that has most in a layer.

    A follower multiplies as many pairs as a lead, a window only those of sinks and recent tokens.
    """
    return 4.0 * job.shapes.head_dim * job.shares.waited * job.args.micro_batch_size


def _seconds(traffic: Traffic, device: Device) -> float:
    inside = traffic.inside / (device.node_gbps * 1e9 * LINK_EFFICIENCY)
    between = traffic.between / (device.network_gbps * 1e9 * LINK_EFFICIENCY)
    return max(inside, between) if traffic.kind != "all-to-all of heads" else inside + between


def _copied_bytes(job: Job) -> int:
    """What a rank copies to and from the host in a step, the update left out: all that waits there, both ways in every micro-batch; sums
    of gradients once out, then back and out again for each further micro-batch."""
    args, moved = job.args, host_bytes(job)
    copies = 2 * sum(moved.get(name, 0) for name in ("carry", "checkpoints of activations", "parameters"))
    copies *= args.gradient_accumulation_steps
    if args.offload_optimizer != "none":
        share = job.shapes.trained_parameters(args) // job.world.size * BYTES[args.reduce_dtype]
        copies += (2 * args.gradient_accumulation_steps - 1) * share
    return copies


def _update_seconds(job: Job, device: Device) -> float:
    """AdamW reads and writes master weight and moments, reads a gradient and writes a weight."""
    args = job.args
    share = job.shapes.trained_parameters(args) / job.world.size
    touched = share * (28 + BYTES[args.dtype])
    if args.offload_optimizer == "none":
        return touched / (device.memory_gbps * 1e9 * LINK_EFFICIENCY)
    moved = share * (4 + BYTES[args.dtype])
    return touched / HOST_UPDATE_BYTES_PER_S + moved / (device.host_gbps * 1e9 * LINK_EFFICIENCY)
