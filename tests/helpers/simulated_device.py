"""A second device made of Python, for tests on a machine without a GPU.

It finds two kinds of fault that a CPU hides. A tensor that was made on the wrong device: an operation over two devices
raises `MixedDevices`, as CUDA does. A step that waits for the device: each read of a value by the host is counted with
the line that caused it.

    device = simulated_device.register()          # once per process; the devices are "sim:0" and "sim:1"
    model.to("sim:0")
    with simulated_device.watch() as reads:
        model(ids.to("sim:0"))
    reads.total()                                 # host reads
    simulated_device.to_host(logits)              # not counted

A tensor of the device is a wrapper around a CPU tensor, so the numbers are those of the CPU. What it cannot show:
streams, kernels, graphs, memory of the device, communication, and anything that asks for "cuda" by name. Activation
checkpoints end the process: autograd asks for a stream, which PyTorch 2.13 has no way to give from Python.

Start it in a process of its own: PyTorch knows one such device per process, and other libraries see it too.
"""

import contextlib
import copy
import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import host_reads
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

NAME = "sim"
NUM_DEVICES = 2
PRODUCT = f"{Path(__file__).resolve().parents[2] / 'pod'}/"
"""Host reads are blamed on the innermost line below this folder."""

aten = torch.ops.aten

MOVES = {aten._to_copy.default, aten.copy_.default, aten._copy_from.default}
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


MADE_ON_THE_HOST = {
    torch.tensor,
    torch.as_tensor,
    torch.arange,
    torch.linspace,
    torch.eye,
    torch.randperm,
    torch.tril_indices,
    torch.triu_indices,
}
"""Functions that fill a tensor of Python numbers, or give an empty one its size: a wrapper cannot change its size."""


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


class _BackendModule(_DummyBackendModule):
    """`torch.sim`, which libraries ask for the state of the device."""

    def device_count(self) -> int:
        return NUM_DEVICES

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.zeros(8, dtype=torch.uint8)

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        """Random numbers come from the CPU's generator."""

    def device(self, device: Any) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()


class _HostSide(TorchFunctionMode):
    """Calls that reach no operation of the device: making tensors of Python numbers, and looking into memory."""

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in MADE_ON_THE_HOST and kwargs.get("device") is not None:
            device = kwargs.pop("device")
            return func(*args, **kwargs).to(device)
        if not args or not isinstance(args[0], SimulatedTensor):
            return func(*args, **kwargs)
        if func is torch.Tensor.tolist:
            _count("tolist")
            return args[0].raw.tolist()
        if func is torch.Tensor.new_tensor:
            made = torch.tensor(*args[1:], **{"dtype": args[0].dtype, **kwargs})
            return made.to(args[0].device)
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            return func(args[0], _index_tensors(args[1], args[0].device), *args[2:])
        if func in (torch.Tensor.data_ptr, torch.Tensor.untyped_storage):
            return func(args[0].raw)
        if func in (torch.Tensor.numpy, torch.Tensor.__array__):
            raise TypeError(f"a tensor of {args[0].device} is no numpy array, at {_blamed_line()}")
        return func(*args, **kwargs)


_library: torch.library.Library | None = None


def register() -> None:
    """Make the devices known to PyTorch; later calls do nothing."""
    global _library
    if _library is not None:
        return
    _setup_privateuseone_for_python_backend(NAME, _BackendModule())
    _library = torch.library.Library("_", "IMPL")
    # operations that make tensors get no wrapper among their arguments
    _library.fallback(lambda op, *args, **kwargs: _run(op, args, kwargs), "PrivateUse1")
    _HostSide().__enter__()


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
    """`change` of everything in nested lists, tuples and dictionaries; PyTorch's own `tree_map` takes five times as long."""
    if isinstance(tree, (list, tuple)):
        changed = [_map(change, one) for one in tree]
        return type(tree)(*changed) if hasattr(tree, "_fields") else type(tree)(changed)
    if isinstance(tree, dict):
        return {name: _map(change, one) for name, one in tree.items()}
    return change(tree)


def _tensors(tree: Any) -> list[Tensor]:
    """The tensors in nested lists, tuples and dictionaries."""
    found: list[Tensor] = []
    _map(lambda x: found.append(x) if isinstance(x, Tensor) else None, tree)
    return found


def _run(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Do on CPU tensors what `func` does, after the checks of a GPU."""
    tensors = _tensors([args, kwargs])
    simulated = [x for x in tensors if isinstance(x, SimulatedTensor)]
    _check_one_device(func, args, tensors, simulated)
    if simulated:
        _count_reads(func, args, kwargs)
    device = kwargs.get("device")
    if device is None:
        device = simulated[0].device if simulated else torch.device("cpu")
    else:
        device = torch.device(device)
        if device.type == NAME:
            kwargs = {**kwargs, "device": torch.device("cpu")}
    kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory"}
    result = func(*to_host(args), **to_host(kwargs))
    written = [args[place] if place < len(args) else kwargs.get(name) for place, name in _writes(func)]
    written = [x for x in written if isinstance(x, Tensor)]
    for tensor in written:
        if isinstance(tensor, SimulatedTensor) and tensor.raw.shape != tensor.shape:
            raise NotImplementedError(f"{func} gives a tensor another shape, at {_blamed_line()}")
    if written:
        return written[0] if len(written) == 1 else tuple(written)
    if device.type != NAME:
        return result
    return _map(lambda x: SimulatedTensor(x, device) if isinstance(x, Tensor) else x, result)


def _index_tensors(index: Any, device: torch.device) -> Any:
    """The index with tensors of the device in place of Python lists, as PyTorch makes them on the way."""
    if isinstance(index, list):
        return torch.tensor(index).to(device)
    if isinstance(index, tuple):
        return tuple(_index_tensors(one, device) for one in index)
    return index


@functools.cache
def _writes(func: Any) -> list[tuple[int, str]]:
    """(place, name) of the arguments that an operation writes and returns."""
    return [
        (place, argument.name)
        for place, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def _check_one_device(
    func: Any, args: tuple, tensors: list[Tensor], simulated: list[SimulatedTensor]
) -> None:
    if not simulated or func in MOVES:
        return
    if func in INDEXING:
        indexed, indices = args[:2]
        allowed = [x for x in indices if isinstance(x, Tensor) and x.device.type == "cpu"]
        if not isinstance(indexed, SimulatedTensor):
            allowed = []
        tensors = [x for x in tensors if not any(x is one for one in allowed)]
    name = func._schema.name.removeprefix("aten::")
    takes_numbers = name not in NEEDS_ONE_DEVICE
    counted = [x for x in tensors if not (takes_numbers and x.device.type == "cpu" and x.dim() == 0)]
    if len({x.device for x in counted}) > 1:
        shapes = ", ".join(f"{tuple(x.shape)} on {x.device}" for x in counted)
        raise MixedDevices(f"{name} of {shapes}, at {_blamed_line()}")


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
