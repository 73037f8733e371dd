"""Figures of devices and networks from their data sheets: what times and utilisation are stated against. All can be overridden."""

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """One accelerator and its links.

    Attributes:
        name: what users write.
        bf16_tflops, fp32_tflops: dense peak of matrix products (fp32 on tensor cores where TF32 is what PyTorch would need to be
            told to use is left out: plain fp32).
        memory_gib: of one device.
        memory_gbps: GB/s of its memory.
        node_gbps: GB/s in one direction between devices of a machine.
        network_gbps: GB/s in one direction per device between machines (one 400 Gb/s port each unless said otherwise).
        host_gbps: GB/s to host memory.
        host_gib: memory of a machine per device, as such machines are sold.
        source: where the figures are from.
        efficiency: share of the peak that matrix products and attention reach.
    """

    name: str
    bf16_tflops: float
    fp32_tflops: float
    memory_gib: float
    memory_gbps: float
    node_gbps: float
    network_gbps: float
    host_gbps: float
    host_gib: float
    source: str
    efficiency: float = 0.5

    def tflops(self, dtype: str) -> float:
        """Peak in `train.dtype`."""
        return self.fp32_tflops if dtype == "float32" else self.bf16_tflops


DEVICES = {
    device.name: device
    for device in (
        Device("h200", 989.0, 67.0, 141e9 / 2**30, 4800, 450, 50, 55, 256, "NVIDIA H200 SXM data sheet"),
        Device("h100", 989.0, 67.0, 80e9 / 2**30, 3350, 450, 50, 55, 256, "NVIDIA H100 SXM data sheet"),
        Device("h100-pcie", 756.0, 51.0, 80e9 / 2**30, 2000, 55, 25, 55, 128, "NVIDIA H100 PCIe data sheet"),
        Device("a100", 312.0, 19.5, 80e9 / 2**30, 2039, 300, 25, 25, 128, "NVIDIA A100 80GB SXM data sheet"),
        Device(
            "a100-40gb", 312.0, 19.5, 40e9 / 2**30, 1555, 300, 25, 25, 128, "NVIDIA A100 40GB SXM data sheet"
        ),
        Device("b200", 2250.0, 75.0, 180e9 / 2**30, 8000, 900, 50, 55, 256, "NVIDIA HGX B200 data sheet"),
        Device("l40s", 362.0, 91.6, 48e9 / 2**30, 864, 25, 25, 25, 128, "NVIDIA L40S data sheet"),
        Device("rtx4090", 165.2, 82.6, 24e9 / 2**30, 1008, 25, 12.5, 25, 64, "NVIDIA Ada architecture paper"),
    )
}
"""Known devices by name."""

_BY_CUDA_NAME = (  # parts of torch.cuda.get_device_name(), the more particular ones first
    ("H100 PCIe", "h100-pcie"),
    ("H200", "h200"),
    ("H100", "h100"),
    ("A100-SXM4-40GB", "a100-40gb"),
    ("A100-PCIE-40GB", "a100-40gb"),
    ("A100", "a100"),
    ("B200", "b200"),
    ("L40S", "l40s"),
    ("RTX 4090", "rtx4090"),
)


CPU_CORE = Device(
    "cpu", 0.3, 0.1, 0, 10, 5, 1, 10, 0, "steps of SmolLM2-135M measured on two cores of an AMD EPYC"
)
"""One core; `memory_gib` and `host_gib` are the machine's affair."""


def get_device(text: str) -> Device:
    """The device of a name, with figures of its own: `h100`, or `h100,memory_gib=64,network_gbps=12.5`.

    Raises:
        ValueError: an unknown name or figure; the message lists the known ones.
    """
    name, *figures = text.lower().split(",")
    if name not in DEVICES:
        raise ValueError(f"device {name!r} is unknown, known are {', '.join(DEVICES)}")
    numbers = {field.name for field in dataclasses.fields(Device)} - {"name", "source"}
    changes = {key: value for key, _, value in (figure.partition("=") for figure in figures)}
    for figure, value in changes.items():
        if figure not in numbers or not value.replace(".", "", 1).isdigit() or float(value) <= 0:
            raise ValueError(
                f"--device: {figure}={value} is no figure above 0 of a device; figures are {', '.join(sorted(numbers))}"
            )
    return dataclasses.replace(DEVICES[name], **{figure: float(value) for figure, value in changes.items()})


def known_device(cuda_name: str) -> Device | None:
    """The device behind `torch.cuda.get_device_name()`, None when its figures are not known."""
    found = [name for part, name in _BY_CUDA_NAME if part.lower() in cuda_name.lower()]
    return DEVICES[found[0]] if found else None


def peak_tflops(device_name: str, dtype: str) -> float | None:
    """Dense peak in TFLOP/s of a device by `torch.cuda.get_device_name()` or by our name; None when it is not known."""
    device = DEVICES.get(device_name.lower()) or known_device(device_name)
    return None if device is None else device.tflops(dtype)
