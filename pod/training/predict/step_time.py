"""Time of an optimizer step from shapes and a device's figures: arithmetic, traffic, update, copies to the host.

An estimate to choose a layout by, not a promise: attention is counted as if every row were one document, matrix products and
attention reach `efficiency` of the peak, links `link_efficiency` of theirs. The step is given twice: with weights and
gradients travelling entirely behind the arithmetic, and one after the other. All-to-alls always wait.
"""

from dataclasses import dataclass

from pod.training.args import TrainArgs
from pod.training.predict.communication import Traffic, World, communication
from pod.training.predict.devices import Device
from pod.training.predict.memory import BYTES, head_shares, host_bytes, mlp_tiles, rank_tokens
from pod.training.predict.shapes import Lead, Shapes, teacher_plans

EFFICIENCY = 0.5
LINK_EFFICIENCY = 0.7
HOST_UPDATE_BYTES_PER_S = 20e9  # of a CPU that updates AdamW, per rank


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step by part, and its two sums.

    Attributes:
        parts: seconds by name.
        overlapped, sequential: seconds of the step with and without traffic behind arithmetic.
        flops: floating-point operations of one rank, recomputation included.
    """

    parts: dict[str, float]
    overlapped: float
    sequential: float
    flops: float


def step_time(
    shapes: Shapes,
    lead: Lead,
    args: TrainArgs,
    context_length: int,
    world: World,
    device: Device,
    efficiency: float = EFFICIENCY,
    link_efficiency: float = LINK_EFFICIENCY,
) -> StepTime:
    """Seconds of an optimizer step on `world`."""
    flops = rank_flops(shapes, lead, args, context_length) * args.gradient_accumulation_steps
    traffic = {kind.kind: kind for kind in communication(shapes, lead, args, context_length, world)}
    parts = {"arithmetic": flops / (device.tflops(args.dtype) * 1e12 * efficiency)}
    for name, kind in traffic.items():
        parts[name] = _seconds(kind, device, link_efficiency)
    parts["update"] = _update_seconds(shapes, args, world, device)
    moved = host_bytes(shapes, lead, args, context_length, world.size)
    copies = 2 * sum(moved.get(name, 0) for name in ("carry", "checkpoints of activations"))
    copies += moved.get("parameters", 0) * 2
    if copies:
        copied = copies * args.gradient_accumulation_steps
        parts["copies to and from the host"] = copied / (device.host_gbps * 1e9 * link_efficiency)
    waiting = parts.get("all-to-all of heads", 0.0) + parts["update"]
    sequential = sum(parts.values())
    behind = sequential - waiting - parts["arithmetic"]
    return StepTime(parts, waiting + max(parts["arithmetic"], behind), sequential, flops)


def rank_flops(shapes: Shapes, lead: Lead, args: TrainArgs, context_length: int) -> float:
    """Floating-point operations of one rank for one micro-batch: forward, recomputation and backward.

    Attention is that of the rank which a layer waits for.
    """
    tokens = rank_tokens(args, context_length)
    feed_forward = 2.0 * tokens * 3 * shapes.hidden * shapes.intermediate
    linear = sum(rows * columns for rows, columns in shapes.linear_sizes.values())
    projections = 2.0 * tokens * linear - feed_forward
    attention = attention_flops(shapes, lead, args, context_length)
    again = 1 if args.gradient_checkpointing else 0
    backward = 1 if args.method == "lora" else 2
    tiled = 1 if mlp_tiles(args, context_length) > 1 else 0
    layer = (projections + feed_forward) * (1 + again + backward + args.teacher_passes) + feed_forward * tiled
    head = 2.0 * tokens * shapes.vocab * shapes.hidden * (2 + backward + (args.distill_context > 0))
    taught = sum(attention_flops(shapes, plan, args, context_length) for plan in teacher_plans(lead, args))
    return shapes.layers * layer + head + attention * (1 + again + 2.5) + taught


def attention_flops(shapes: Shapes, lead: Lead, args: TrainArgs, context_length: int) -> float:
    """Of all layers' forward: 4·d per visible pair and query head, of the rank of a sequence-parallel group that has most in a layer.

    A follower multiplies as many pairs as a lead, a window only those of sinks and recent tokens.
    """
    shares = head_shares(shapes, lead, args, context_length)
    return 4.0 * shapes.head_dim * shares.waited * args.micro_batch_size


def _seconds(traffic: Traffic, device: Device, link_efficiency: float) -> float:
    inside = traffic.inside / (device.node_gbps * 1e9 * link_efficiency)
    between = traffic.between / (device.network_gbps * 1e9 * link_efficiency)
    return max(inside, between) if traffic.kind != "all-to-all of heads" else inside + between


def _update_seconds(shapes: Shapes, args: TrainArgs, world: World, device: Device) -> float:
    """AdamW reads and writes master weight and moments, reads a gradient and writes a weight."""
    touched = shapes.trained_parameters(args) / world.size * (28 + BYTES[args.dtype])
    if args.offload_optimizer == "none":
        return touched / (device.memory_gbps * 1e9 * LINK_EFFICIENCY)
    moved = shapes.trained_parameters(args) / world.size * (4 + BYTES[args.dtype])
    return touched / HOST_UPDATE_BYTES_PER_S + moved / (device.host_gbps * 1e9 * LINK_EFFICIENCY)
