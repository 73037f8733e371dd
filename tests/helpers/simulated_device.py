"""A second device made of Python, for tests on a machine without a GPU.

It finds two kinds of fault that a CPU hides. A tensor that was made on the wrong device: an operation over
two devices raises `MixedDevices`, as CUDA does. A step that waits for the device: each read of a value by
the host is counted with the line that caused it.

    simulated_device.register()                   # once per process; the devices are "sim:0" and "sim:1"
    model.to("sim:0")
    with simulated_device.watch() as reads:
        model(ids.to("sim:0"))
    reads.total()                                 # host reads
    simulated_device.to_host(logits)              # not counted

A tensor of the device is a wrapper around a CPU tensor, so the numbers are those of the CPU. Autograd sees
two devices, each with a thread of its own, as it does on a machine with two GPUs. What it cannot show:
streams, kernels, graphs, memory of the device, communication, and anything that asks for "cuda" by name.

Start it in a process of its own: PyTorch knows one such kind of device per process, and other libraries see
it too. The first start compiles `simulated_device_guard.cpp`, which takes seconds.
"""

import contextlib
import copy
import ctypes
import functools
import hashlib
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import host_reads
import torch
from torch import Tensor
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

NAME = "sim"
NUM_DEVICES = 2
GUARD = Path(__file__).with_name("simulated_device_guard.cpp")
"""What autograd asks of the devices, in C++."""

PRODUCT = f"{Path(__file__).resolve().parents[2] / 'pod'}/"
"""Host reads are blamed on the innermost line below this folder."""

aten = torch.ops.aten
_HOST = torch.device("cpu")

MOVES = {aten._to_copy.default, aten.copy_.default}
"""Operations that may read one device and write another."""

INDEXING = {
    aten.index.Tensor,
    aten._unsafe_index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
}
"""CUDA takes indices from the host here."""

NEEDS_ONE_DEVICE = {"cat", "stack", "mm", "bmm", "addmm", "index_select", "gather", "scatter_", "index_copy_"}
"""Operations that refuse even a host tensor without dimensions, which others take as a number."""

KERNELS = ("arange", "arange.start", "arange.start_step", "eye", "eye.m", "copy_")
"""Operations that PyTorch makes of others which a wrapper lacks: one gives an empty tensor a size, one copies
where Python is not asked."""


class MixedDevices(RuntimeError):
    """An operation got tensors of two devices."""


class HostReads(Counter):
    """How often the host waited, by "operation at file:line"."""

    def add(self, what: str) -> None:
        self[f"{what} at {_blamed_line()}"] += 1


_watches: list[HostReads] = []


class SimulatedTensor(torch.Tensor):
    """A tensor of a simulated device; `raw` is the CPU tensor that has its numbers."""

    raw: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, raw: Tensor, device: torch.device) -> "SimulatedTensor":
        wrapper = torch.Tensor._make_wrapper_subclass(
            cls,
            raw.size(),
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=device,
        )
        wrapper.raw = raw
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return _run(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict) -> "SimulatedTensor":
        return SimulatedTensor(copy.deepcopy(self.raw, memo), self.device)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"{self.raw}, device={self.device}"

    def __format__(self, specification: str) -> str:
        return self.item().__format__(specification) if self.dim() == 0 else repr(self)

    def tolist(self) -> Any:
        _count("tolist")
        return self.raw.tolist()

    def data_ptr(self) -> int:
        return self.raw.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.raw.untyped_storage()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError(f"a tensor of {self.device} is no numpy array, at {_blamed_line()}")

    def __array__(self, dtype: Any = None) -> Any:
        return self.numpy()


class _BackendModule(_DummyBackendModule):
    """`torch.sim`, which libraries ask for the state of the device."""

    def device_count(self) -> int:
        return NUM_DEVICES

    def current_device(self) -> int:
        return torch.accelerator.current_device_index()

    def device(self, device: Any) -> contextlib.AbstractContextManager:
        index = device if isinstance(device, int) else torch.device(device).index
        return contextlib.nullcontext() if index is None else torch.accelerator.device_index(index)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.zeros(8, dtype=torch.uint8)

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        """Random numbers come from the CPU's generator."""


_libraries: list[torch.library.Library] = []
"""Kept, as their kernels go with them."""


def register() -> None:
    """Make the devices known to PyTorch; later calls do nothing."""
    if _libraries:
        return
    ctypes.CDLL(str(compiled_guard()))
    _setup_privateuseone_for_python_backend(NAME, _BackendModule())
    # operations that make tensors get no wrapper among their arguments
    others = torch.library.Library("_", "IMPL")
    others.fallback(lambda op, *args, **kwargs: _run(op, args, kwargs), "PrivateUse1")
    named = torch.library.Library("aten", "IMPL")
    for name in KERNELS:
        base, _, overload = name.partition(".")
        operation = getattr(getattr(aten, base), overload or "default")
        named.impl(name, _kernel(operation), "PrivateUse1")
    _libraries.extend((others, named))


def _kernel(operation: Any) -> Callable:
    return lambda *args, **kwargs: _run(operation, args, kwargs)


def compiled_guard() -> Path:
    """The library made of `GUARD`, for this version of PyTorch; compiled if it is not there yet."""
    folder = GUARD.with_name("__pycache__")
    made_of = GUARD.read_bytes() + f"{torch.__version__} {NUM_DEVICES}".encode()
    version = hashlib.sha256(made_of).hexdigest()[:16]
    library = folder / f"{GUARD.stem}.{version}.so"
    if library.exists():
        return library
    torch_folder = Path(torch.__file__).parent
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as place:
        made = Path(place, library.name)
        subprocess.run(
            [
                os.environ.get("CXX", "c++"),
                *("-shared", "-fPIC", "-std=c++20", f"-DNUM_DEVICES={NUM_DEVICES}"),
                *(f"-I{torch_folder / 'include'}", str(GUARD)),
                *(f"-L{torch_folder / 'lib'}", "-lc10", "-o", str(made)),
            ],
            check=True,
        )
        made.replace(library)  # at once: other processes may compile it too
    return library


@contextlib.contextmanager
def watch() -> Iterator[HostReads]:
    """Count the host's reads inside."""
    reads = HostReads()
    _watches.append(reads)
    try:
        yield reads
    finally:
        _watches.remove(reads)


def to_host(tree: Any) -> Any:
    """CPU tensors in place of simulated ones, uncounted."""
    return _map(lambda x: x.raw if isinstance(x, SimulatedTensor) else x, tree)


def _map(change: Callable[[Any], Any], tree: Any) -> Any:
    """`change` of everything in nested lists, tuples and dictionaries, five times as fast as `tree_map`."""
    if isinstance(tree, (list, tuple)):
        changed = [_map(change, one) for one in tree]
        return type(tree)(*changed) if hasattr(tree, "_fields") else type(tree)(changed)
    if isinstance(tree, dict):
        return {name: _map(change, one) for name, one in tree.items()}
    return change(tree)


@dataclass(frozen=True)
class Operation:
    """What is the same in every call of an operation.

    Attributes:
        name: without its overload.
        writes: (place, name) of the arguments that it writes and returns.
        moves, indexes: whether it is one of `MOVES` or `INDEXING`.
        takes_numbers: whether a host tensor without dimensions counts as a number.
        may_wait: whether some calls of it wait for the device.
    """

    name: str
    writes: tuple[tuple[int, str], ...]
    moves: bool
    indexes: bool
    takes_numbers: bool
    may_wait: bool


@functools.cache
def _operation(func: Any) -> Operation:
    schema = func._schema
    name = schema.name.removeprefix("aten::")
    writes = [
        (place, argument.name)
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return Operation(
        name=name,
        writes=tuple(writes),
        moves=func in MOVES,
        indexes=func in INDEXING,
        takes_numbers=name not in NEEDS_ONE_DEVICE,
        may_wait=func in MOVES or host_reads.may_wait(name),
    )


def _run(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Do on CPU tensors what `func` does, after the checks of a GPU."""
    operation = _operation(func)
    tensors: list[Tensor] = []
    raw_args = _unwrapped(args, tensors)
    raw_kwargs = {name: _unwrapped(one, tensors) for name, one in kwargs.items()} if kwargs else {}
    device = None
    for tensor in tensors:
        if type(tensor) is SimulatedTensor:
            device = tensor.device
            break
    if device is not None:
        if len(tensors) > 1 and not operation.moves:
            _check_one_device(operation, args, tensors)
        if _watches and operation.may_wait:
            _count_reads(func, args, kwargs)
    if "device" in raw_kwargs:
        device = _asked_for(raw_kwargs, device)
    result = func(*raw_args, **raw_kwargs)
    if operation.writes:
        return _written(func, operation, args, kwargs)
    if device is None:
        return result
    if type(result) is Tensor:
        return SimulatedTensor(result, device)
    return _map(lambda x: SimulatedTensor(x, device) if isinstance(x, Tensor) else x, result)


def _unwrapped(tree: Any, tensors: list[Tensor]) -> Any:
    """Arguments with CPU tensors in place of simulated ones; adds the tensors among them to the list."""
    kind = type(tree)
    if kind is SimulatedTensor:
        tensors.append(tree)
        return tree.raw
    if kind is list or kind is tuple:
        return [_unwrapped(one, tensors) for one in tree]
    if isinstance(tree, Tensor):
        tensors.append(tree)
    return tree


def _asked_for(raw_kwargs: dict[str, Any], device: torch.device | None) -> torch.device | None:
    """The simulated device of the result, None for the host; the operation itself runs on the CPU."""
    raw_kwargs.pop("pin_memory", None)
    if raw_kwargs["device"] is None:
        return device
    device = torch.device(raw_kwargs["device"])
    if device.type != NAME:
        return None
    raw_kwargs["device"] = _HOST
    if device.index is None:  # the current one, as with CUDA
        return torch.device(NAME, torch.accelerator.current_device_index())
    if device.index >= NUM_DEVICES:
        raise RuntimeError(f"there is no {device}, only {NUM_DEVICES} devices, at {_blamed_line()}")
    return device


def _written(func: Any, operation: Operation, args: tuple, kwargs: dict[str, Any]) -> Any:
    """The arguments that an operation wrote, which it returns."""
    written = [args[place] if place < len(args) else kwargs.get(name) for place, name in operation.writes]
    written = [x for x in written if isinstance(x, Tensor)]
    for tensor in written:
        if isinstance(tensor, SimulatedTensor) and tensor.raw.shape != tensor.shape:
            raise NotImplementedError(f"{func} gives a tensor another shape, at {_blamed_line()}")
    return written[0] if len(written) == 1 else tuple(written)


def _check_one_device(operation: Operation, args: tuple, tensors: list[Tensor]) -> None:
    if operation.indexes and isinstance(args[0], SimulatedTensor):
        allowed = [id(x) for x in args[1] if isinstance(x, Tensor) and x.device.type == "cpu"]
        tensors = [x for x in tensors if id(x) not in allowed]
    if operation.takes_numbers:
        tensors = [x for x in tensors if isinstance(x, SimulatedTensor) or x.dim() > 0]
    if len({x.device for x in tensors}) > 1:
        shapes = ", ".join(f"{tuple(x.shape)} on {x.device}" for x in tensors)
        raise MixedDevices(f"{operation.name} of {shapes}, at {_blamed_line()}")


def _count_reads(func: Any, args: tuple, kwargs: dict[str, Any]) -> None:
    name = host_reads.waits(func, args, kwargs)
    if func is aten.copy_.default and not isinstance(args[0], SimulatedTensor):
        name = host_reads.COPY
    if name is not None:
        _count(name)


def _count(what: str) -> None:
    for reads in _watches:
        reads.add(what)


def _blamed_line() -> str:
    frame = sys._getframe()
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(PRODUCT):
            return f"{file.removeprefix(PRODUCT)}:{frame.f_lineno}"
        frame = frame.f_back
    return "outside the product"
