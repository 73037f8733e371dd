"""Peak memory of a model's passes, on CPU and GPU alike.

The peak is split into weights, keys and values by part, and activations. On CUDA the allocator counts the
bytes. Elsewhere every storage that an operation makes is counted once while it lives, which is what an
allocator without slack would hold. Memory that a library's kernel takes and gives back inside one operation
is seen on CUDA only.
"""

import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ALLOCATOR, STORAGES = "CUDA allocator", "live storages"


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all living tensors that operations have made, and the peak of this sum.

    Each storage counts once.

    Args:
        limit: in bytes; None = no limit. The operation that brings the peak above it raises MemoryError.
    """

    def __init__(self, limit: int | None = None) -> None:
        super().__init__()
        self.live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.now = self.peak = 0
        self.limit = limit

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf.untyped_storage())
        if self.now > self.peak:  # some of the counted storages may be gone
            self._forget_dead()
            self.peak = max(self.peak, self.now)
            if self.limit is not None and self.peak > self.limit:
                raise MemoryError(f"{self.peak:,} bytes where {self.limit:,} are allowed")
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        """Count a storage unless it is counted already."""
        known = self.live.get(storage._cdata)
        if known is not None and not known[0].expired():
            return
        size = storage.nbytes()
        self.now += size - (known[1] if known else 0)
        self.live[storage._cdata] = StorageWeakRef(storage), size

    def _forget_dead(self) -> None:
        """Subtract the storages that have been freed."""
        for key in [key for key, (reference, _) in self.live.items() if reference.expired()]:
            self.now -= self.live.pop(key)[1]

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Do not count these tensors, nor views of them that operations return."""
        for storage in (tensor.untyped_storage() for tensor in tensors):
            self.live[storage._cdata] = StorageWeakRef(storage), 0

    def restart(self) -> None:
        """Begin a new peak, at the bytes that live now."""
        self._forget_dead()
        self.peak = self.now


class Meter:
    """A context that measures the peak of the bytes that are held in addition to those at its beginning.

    For a model on several GPUs the peaks of all are added, though they need not come at the same time.

    Args:
        model: its weights are not counted.
        limit: in bytes; None = no limit. A peak above it raises MemoryError (on CUDA at the next `restart`).
    """

    def __init__(self, model: Any, limit: int | None = None):
        self.devices, self.limit = {weight.device for weight in model.parameters()}, limit
        self._before, self._live = 0, None
        if any(device.type != "cuda" for device in self.devices):
            self._live = LiveBytes(limit)
            self._live.ignore([*model.parameters(), *model.buffers()])

    def __enter__(self) -> "Meter":
        if self._live is not None:
            self._live.__enter__()
        else:
            for device in self.devices:
                torch.cuda.synchronize(device)
                torch.cuda.reset_peak_memory_stats(device)
            self._before = sum(map(torch.cuda.memory_allocated, self.devices))
        return self

    def __exit__(self, *error: Any) -> None:
        if self._live is not None:
            self._live.__exit__(*error)

    @property
    def peak(self) -> int:
        """The peak in bytes since the beginning or the last `restart`."""
        if self._live is not None:
            return self._live.peak
        return sum(map(torch.cuda.max_memory_allocated, self.devices)) - self._before

    def restart(self) -> int:
        """End the current stretch of the measurement and begin a new one.

        Returns:
            The peak in bytes of the stretch that ends.

        Raises:
            MemoryError: on CUDA, that peak is above the limit.
        """
        peak = self.peak
        if self._live is not None:
            self._live.restart()
        else:
            for device in self.devices:
                torch.cuda.reset_peak_memory_stats(device)
            if self.limit is not None and peak > self.limit:
                raise MemoryError(f"{peak:,} bytes where {self.limit:,} are allowed")
        return peak


def weight_bytes(model: Any) -> int:
    """Bytes of a model's parameters and buffers. Tied weights count once."""
    tensors = [*model.parameters(), *model.buffers()]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on a device; for a CPU, in the machine's memory.

    On a GPU it is what the device has free, and what PyTorch's allocator holds unused.
    """
    if device.type != "cuda":
        return psutil.virtual_memory().available
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


@torch.no_grad()
def measure(model: Any, make_cache: Callable[[], Any], prompt: Tensor, steps: int) -> dict[str, Any]:
    """Peak bytes while a prompt is read into a new cache, and while tokens are decoded behind it.

    Args:
        make_cache: a function that makes a new cache.
        prompt: [B, n].
        steps: tokens to decode per row.

    Returns:
        A dictionary for JSON:

        - `counted_by`: `ALLOCATOR` or `STORAGES`;
        - `weights`: bytes of the weights;
        - `prefill`, `decode`: for each phase the bytes `peak` = weights + `kv` + `activations`, and
          `kv_by_part`.

        `kv` is what the cache holds at the end of the decoder layer in which the peak lies. Keys and values
        that a method drops before that, such as those of a prompt that it compresses, count as activations.
    """
    weights = weight_bytes(model)
    stretches = list[tuple[int, dict[str, int]]]()
    result: dict[str, Any] = {"counted_by": ALLOCATOR if prompt.is_cuda else STORAGES, "weights": weights}

    def end_stretch(*_: Any) -> None:
        stretches.append((meter.restart(), cache.nbytes_by_part()))

    def phase() -> dict[str, Any]:
        peak, held = max(stretches, key=lambda one: one[0])
        stretches.clear()
        kv = sum(held.values())
        parts = {part: int(size) for part, size in held.items()}
        return {"peak": weights + peak, "kv": kv, "activations": max(0, peak - kv), "kv_by_part": parts}

    with Meter(model) as meter, ExitStack() as hooks:
        cache = make_cache()
        for layer in model.model.layers:
            hooks.callback(layer.register_forward_hook(end_stretch).remove)
        token = next_token(model, cache, prompt)
        end_stretch()
        result["prefill"] = phase()
        for _ in range(steps):
            token = next_token(model, cache, token)
            end_stretch()
        result["decode"] = phase()
    return result


def next_token(model: Any, cache: Any, fed: Tensor) -> Tensor:
    """The most likely next token [B, 1] of every row, after `fed` [B, n] is read into the cache."""
    output = model(input_ids=fed, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return output.logits[:, -1].argmax(-1, keepdim=True)


def now(device: torch.device) -> float:
    """The time in seconds, after the device has finished all work that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
