"""Time of an optimizer step from shapes and a device's figures: arithmetic, traffic, update, host copies.

It is an estimate for choosing a layout, not a promise. Attention is counted as if every row were one
document. Matrix products and attention reach `efficiency` of the peak, and links reach `LINK_EFFICIENCY` of
theirs. A step has two times: in one, traffic of weights and gradients is hidden behind the arithmetic as far
as possible; in the other, nothing overlaps. Arithmetic always waits for all-to-alls.

Weights and gradients travel in rings over all ranks, and every rank receives all but its own share. Each
rank of a machine receives an equal part of what comes from other machines, and the rest from ranks of its own
machine. Heads travel between the ranks of a sequence-parallel group (Ulysses), whose numbers are consecutive.
Sharing keys and queries between layers adds no traffic, because they stay where they are computed.

Figures of devices and networks are those of their data sheets. All can be overridden.
"""

import dataclasses
import re
import time
from collections import Counter
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from pod.modeling.model.sharing import Lead
from pod.training.args import TrainArgs
from pod.training.predict.memory_estimate import BYTES, TrainingJob, World, pinned_tensors
from pod.training.predict.shapes import Shapes, shared_qk_heads, silent_layers
from pod.training.run.shared_qk import leads_that_end

_GB = 1e9 / 2**30


@dataclass(frozen=True)
class Device:
    """One accelerator and its links.

    Attributes:
        name: the name that users write.
        cuda_name: a pattern of `torch.cuda.get_device_name()`.
        bf16_tflops, fp32_tflops: dense peak of matrix products, in TFLOP/s; fp32 is without TF32, which
            PyTorch does not use unless it is asked to.
        memory_gib: memory of one device, in GiB.
        memory_gbps: GB/s of its memory.
        node_gbps: GB/s in one direction between devices of a machine.
        network_gbps: GB/s in one direction per device between machines. In `DEVICES` each device has one
            port: 400 Gb/s for h100, h200 and b200, 100 Gb/s for rtx4090, and 200 Gb/s for the others.
        host_gbps: GB/s to host memory.
        host_gib: memory of a machine per device, in GiB, as such machines are sold.
        efficiency: share of the peak that matrix products and attention reach.
    """

    name: str
    cuda_name: str
    bf16_tflops: float
    fp32_tflops: float
    memory_gib: float
    memory_gbps: float
    node_gbps: float
    network_gbps: float
    host_gbps: float
    host_gib: float
    efficiency: float = 0.5

    def tflops(self, dtype: str) -> float:
        """Peak TFLOP/s in `train.dtype`."""
        return self.fp32_tflops if dtype == "float32" else self.bf16_tflops


DEVICES = {
    device.name: device
    for device in (
        Device("h200", "H200", 989, 67, 141 * _GB, 4800, 450, 50, 55, 256),
        Device("h100-pcie", "H100 PCIe", 756, 51, 80 * _GB, 2000, 55, 25, 55, 128),
        Device("h100", "H100", 989, 67, 80 * _GB, 3350, 450, 50, 55, 256),
        Device("a100-40gb", "A100.*40GB", 312, 19.5, 40 * _GB, 1555, 300, 25, 25, 128),
        Device("a100", "A100", 312, 19.5, 80 * _GB, 2039, 300, 25, 25, 128),
        Device("b200", "B200", 2250, 75, 180 * _GB, 8000, 900, 50, 55, 256),
        Device("l40s", "L40S", 362, 91.6, 48 * _GB, 864, 25, 25, 25, 128),
        Device("rtx4090", "RTX 4090", 165.2, 82.6, 24 * _GB, 1008, 25, 12.5, 25, 64),
    )
}
"""Known devices by name, from NVIDIA's data sheets (the SXM version unless said otherwise)."""

CPU_CORE = Device("cpu", "", 0.3, 0.1, 0, 10, 5, 1, 10, 0)
"""One CPU core, measured on steps of SmolLM2-135M on two cores of an AMD EPYC.

`memory_gib` and `host_gib` depend on the machine.
"""


@cache
def bfloat16_speed() -> float:
    """How many times as fast this CPU multiplies in bfloat16 as in float32.

    Measuring takes some milliseconds. The number is about 0.1 without instructions for bfloat16
    (AVX512-BF16, AMX), and 2 to 4 with them. One thread multiplies, and only its own time counts. Products
    on all cores would wait for cores that other processes use.
    """
    import torch

    def seconds(dtype: torch.dtype) -> float:
        x, taken = torch.ones(256, 256, dtype=dtype), []
        for _ in range(4):
            began = time.thread_time()
            _ = x @ x.T
            taken.append(time.thread_time() - began)
        return min(taken)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return seconds(torch.float32) / seconds(torch.bfloat16)
    finally:
        torch.set_num_threads(threads)


def get_device(text: str) -> Device:
    """The device that a text describes.

    Args:
        text: a name, and figures that replace those of the device: `h100`, or
            `h100,memory_gib=64,network_gbps=12.5`.

    Raises:
        ValueError: an unknown name or figure; the message lists the known ones.
    """
    name, *figures = text.lower().split(",")
    if name not in DEVICES:
        raise ValueError(f"device {name!r} is unknown, known are {', '.join(DEVICES)}")
    numbers = [field.name for field in dataclasses.fields(Device) if field.type is float]
    changes = {key: value for key, _, value in (figure.partition("=") for figure in figures)}
    for figure, value in changes.items():
        if figure not in numbers or not re.fullmatch(r"\d+\.?\d*", value) or float(value) <= 0:
            raise ValueError(
                f"--device: {figure}={value} is not allowed: give a number above 0 for one of "
                f"{', '.join(numbers)}"
            )
    return dataclasses.replace(DEVICES[name], **{figure: float(value) for figure, value in changes.items()})


def known_device(cuda_name: str) -> Device | None:
    """The device that `torch.cuda.get_device_name()` names; None when its figures are not known."""
    return next((one for one in DEVICES.values() if re.search(one.cuda_name, cuda_name)), None)


LINK_EFFICIENCY = 0.7  # share of their data sheets' speed that links and memory reach
HOST_UPDATE_BYTES_PER_S = 20e9  # speed of a CPU that updates AdamW, per rank


class Traffic(NamedTuple):
    """Bytes of one kind that one rank receives per step.

    Attributes:
        kind: what travels, for example "all-gather of weights".
        inside: bytes from ranks of the same machine.
        between: bytes from other machines.
    """

    kind: str
    inside: int
    between: int


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step: its parts, and two estimates of the whole.

    Attributes:
        parts: seconds of every part, by name.
        overlapped: seconds of the step when all traffic but all-to-alls is hidden behind the arithmetic as
            far as possible.
        sequential: seconds of the step when nothing overlaps: the sum of the parts.
    """

    parts: dict[str, float]
    overlapped: float
    sequential: float

    @property
    def expected(self) -> float:
        """The mean of `overlapped` and `sequential`, in seconds. Layouts are compared by it."""
        return (self.overlapped + self.sequential) / 2


def step_time(job: TrainingJob, device: Device) -> StepTime:
    """Seconds of an optimizer step."""
    args = job.args
    flops = rank_flops(job) * args.gradient_accumulation_steps
    parts = {"arithmetic": flops / (device.tflops(args.dtype) * 1e12 * device.efficiency)}
    parts |= {kind.kind: _seconds(kind, device) for kind in communication(job)}
    parts["update"] = _update_seconds(job, device)
    copies = _host_copy_bytes(job)
    if copies:
        parts["copies to and from the host"] = copies / (device.host_gbps * 1e9 * LINK_EFFICIENCY)
    waiting = parts.get("all-to-all of heads", 0.0) + parts["update"]
    sequential = sum(parts.values())
    behind = sequential - waiting - parts["arithmetic"]
    return StepTime(parts, waiting + max(parts["arithmetic"], behind), sequential)


def model_flops(shapes: Shapes, lead: Lead, args: TrainArgs, tokens: int, attention: float) -> float:
    """Floating-point operations that one forward and backward of `tokens` tokens need.

    Nothing is counted twice. Backward takes two operations for each operation of forward: one for the
    gradient of the input, and one for the gradient of the weight. Frozen weights of LoRA need no gradient of
    the weight.

    Args:
        attention: operations of attention in a forward pass.
    """
    weights = 2.0 * tokens * shapes.multiplied_weights(lead)
    if args.method == "lora":
        return 2 * weights + 6.0 * tokens * shapes.lora_parameters(args) + 3 * attention
    return 3 * (weights + attention)


def teacher_flops(shapes: Shapes, lead: Lead, tokens: int, attention: float) -> float:
    """Floating-point operations of a teacher that reads `tokens` tokens (`train.distill`).

    Args:
        attention: operations of its attention, in which every head leads.
    """
    return 2.0 * tokens * shapes.multiplied_weights(lead) + attention


def rank_flops(job: TrainingJob) -> float:
    """Floating-point operations of one rank for one micro-batch, with all that is computed again.

    Computed again are layers under checkpoints, tiles, logits, `shared_qk`, and the logits in attention's
    backward. With distillation, logits are computed once, and a teacher reads the tokens. In each layer,
    attention counts as on the busiest rank, for which the others wait.
    """
    shapes, lead, args, tokens = job.shapes, job.lead, job.args, job.tokens
    attention = rank_attention_flops(job)
    head = 2.0 * tokens * shapes.embedding_parameters
    layers = 2.0 * tokens * shapes.multiplied_weights(lead) - head
    again = 0.5 * attention
    if args.distill:
        dense = dataclasses.replace(job, lead=shapes.dense)
        again += teacher_flops(shapes, lead, tokens, rank_attention_flops(dense))
    else:
        again += head
    if args.gradient_checkpointing == "full":
        again += layers + attention
    if job.tiles > 1:
        again += 6.0 * tokens * shapes.layers * shapes.hidden * shapes.intermediate
    if args.shared_qk == "recompute":
        again += 2.0 * tokens * shapes.hidden * shapes.shared_qk_width * shared_qk_heads(lead)
    return again + model_flops(shapes, lead, args, tokens, attention)


def rank_attention_flops(job: TrainingJob) -> float:
    """Operations of attention in the forward of all layers: 4·d per visible pair and query head.

    In each layer, the busiest rank of a sequence-parallel group counts. A follower multiplies as many pairs
    as a lead. A window multiplies only the pairs of sinks and recent tokens.
    """
    return 4.0 * job.shapes.head_dim * job.shares.waited * job.args.micro_batch_size


def _seconds(traffic: Traffic, device: Device) -> float:
    """Seconds that the traffic of a rank takes.

    In a ring, links inside a machine and between machines work at the same time. All-to-alls use one after
    the other.
    """
    inside = traffic.inside / (device.node_gbps * 1e9 * LINK_EFFICIENCY)
    between = traffic.between / (device.network_gbps * 1e9 * LINK_EFFICIENCY)
    if traffic.kind == "all-to-all of heads":
        return inside + between
    return max(inside, between)


def _host_copy_bytes(job: TrainingJob) -> int:
    """Bytes that a rank copies to and from host memory in a step, without those of the update.

    Activations, `shared_qk` and weights that wait in host memory are copied both ways in every micro-batch.
    The summed gradients are copied out once, then back and out again for each further micro-batch.
    """
    args = job.args
    copies = 0
    for name, tensors in pinned_tensors(job).items():
        if name != "optimizer":
            copies += 2 * sum(count * size for size, count in tensors.items())
    copies *= args.gradient_accumulation_steps
    if args.offload_optimizer != "none":
        share = job.shapes.trained_parameters(args) // job.world.size * BYTES[args.reduce_dtype]
        copies += (2 * args.gradient_accumulation_steps - 1) * share
    return copies


def _update_seconds(job: TrainingJob, device: Device) -> float:
    """Seconds of AdamW's update.

    It reads and writes master weight and moments, reads a gradient, and writes a weight.
    """
    args = job.args
    share = job.shapes.trained_parameters(args) / job.world.size
    touched = share * (28 + BYTES[args.dtype])
    if args.offload_optimizer == "none":
        return touched / (device.memory_gbps * 1e9 * LINK_EFFICIENCY)
    moved = share * (4 + BYTES[args.dtype])
    return touched / HOST_UPDATE_BYTES_PER_S + moved / (device.host_gbps * 1e9 * LINK_EFFICIENCY)


def communication(job: TrainingJob) -> list[Traffic]:
    """Traffic of one optimizer step, by kind. Kinds without traffic are left out."""
    kinds = [
        _ring("all-gather of weights", weight_bytes(job), job.world),
        _ring("reduce-scatter of gradients", gradient_bytes(job), job.world),
        _exchange(job),
    ]
    return [kind for kind in kinds if kind.inside + kind.between]


def weight_bytes(job: TrainingJob) -> int:
    """Bytes of weights that are gathered in a step; the share that a rank has anyway is included.

    Stage 3 gathers all weights in the forward and in the backward of every micro-batch, and in the forward of
    a teacher. Recomputed layers use the weights that were gathered for the backward. Stages 1 and 2 gather
    the trained weights after the update.
    """
    shapes, args = job.shapes, job.args
    size = BYTES[args.dtype]
    if args.zero_stage < 3:
        return shapes.trained_parameters(args) * size
    held = shapes.parameters + (shapes.trained_parameters(args) if args.method == "lora" else 0)
    passes = 3 if args.distill else 2
    return passes * held * size * args.gradient_accumulation_steps


def gradient_bytes(job: TrainingJob) -> int:
    """Bytes of gradients that are summed over ranks in a step.

    Stages 2 and 3 sum them after every micro-batch, stage 1 only after the last one of a step.
    """
    args = job.args
    times = 1 if args.zero_stage == 1 else args.gradient_accumulation_steps
    return times * job.shapes.trained_parameters(args) * BYTES[args.reduce_dtype]


def all_to_all_bytes(job: TrainingJob) -> int:
    """Bytes that a rank hands to the all-to-alls of a step; the part for the rank itself is included.

    All-to-alls of forward, backward, recomputation and of a teacher's forward are counted.
    """
    args, lead = job.args, job.lead
    if args.sequence_parallel_size == 1:
        return 0
    passes = 2 if args.gradient_checkpointing == "full" else 1
    passes += 1 if args.distill else 0
    once = exchanged_bytes(job)
    total = passes * (once["to_heads"] + once["to_sequence"])
    total += once["to_heads_backward"] + once["to_sequence_backward"]
    if args.shared_qk == "recompute":
        projected = sum(len(leads_that_end(lead, layer)) for layer in range(len(lead)))
        total += projected * once["to_heads"] // len(lead)
    return total * args.gradient_accumulation_steps


def exchanged_bytes(job: TrainingJob) -> dict[str, int]:
    """Bytes that a rank hands to the all-to-alls of a micro-batch's forward and backward, by direction.

    `Ulysses.sent_bytes` counts the same on the first rank.
    """
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
    """What one rank receives when all ranks gather or reduce `total` bytes in a ring."""
    between = total * (world.nodes - 1) // world.nodes // min(world.size, world.local_size)
    return Traffic(kind, total * (world.size - 1) // world.size - between, between)


def _exchange(job: TrainingJob) -> Traffic:
    """What one rank receives in the all-to-alls of a step, where it waits most for the network."""
    total, size = all_to_all_bytes(job), job.args.sequence_parallel_size
    near = _ranks_together(size, job.world)
    return Traffic("all-to-all of heads", total * (near - 1) // size, total * (size - near) // size)


@cache
def _ranks_together(size: int, world: World) -> int:
    """The smallest number of ranks of a sequence-parallel group of `size` ranks that one machine holds.

    Example: in groups of 4 consecutive ranks, on machines with 6 ranks each, it is 2. Ranks with so few
    members of their group nearby wait most for the network.
    """
    together = Counter((rank // size, rank // world.local_size) for rank in range(world.size))
    return min(together.values())
