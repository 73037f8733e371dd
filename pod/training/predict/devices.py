"""Figures of devices and networks from their data sheets: what times and utilisation are stated against. All can be overridden."""

import dataclasses
import re
from dataclasses import dataclass

_GB = 1e9 / 2**30


@dataclass(frozen=True)
class Device:
    """One accelerator and its links.

    Attributes:
        name: what users write.
        cuda_name: a pattern of `torch.cuda.get_device_name()`.
        bf16_tflops, fp32_tflops: dense peak of matrix products; fp32 without TF32, which PyTorch does not use unasked.
        memory_gib: of one device.
        memory_gbps: GB/s of its memory.
        node_gbps: GB/s in one direction between devices of a machine.
        network_gbps: GB/s in one direction per device between machines (one 400 Gb/s port each unless said otherwise).
        host_gbps: GB/s to host memory.
        host_gib: memory of a machine per device, as such machines are sold.
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
        """Peak in `train.dtype`."""
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
"""Known devices by name, from NVIDIA's data sheets (SXM where nothing is said)."""

CPU_CORE = Device("cpu", "", 0.3, 0.1, 0, 10, 5, 1, 10, 0)
"""One core, by steps of SmolLM2-135M on two cores of an AMD EPYC; `memory_gib` and `host_gib` are the machine's affair."""


def get_device(text: str) -> Device:
    """The device of a name, with figures of its own: `h100`, or `h100,memory_gib=64,network_gbps=12.5`.

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
                f"--device: {figure}={value} is no figure above 0 of a device; figures are {', '.join(numbers)}"
            )
    return dataclasses.replace(DEVICES[name], **{figure: float(value) for figure, value in changes.items()})


def known_device(cuda_name: str) -> Device | None:
    """The device behind `torch.cuda.get_device_name()`, None when its figures are not known."""
    return next((one for one in DEVICES.values() if re.search(one.cuda_name, cuda_name)), None)
