"""Writing the files of a checkpoint: at once, or from a copy in host memory while training goes on."""

import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from pod.files import explain_disk_full

WriteError = (OSError, RuntimeError, MemoryError)


def to_host(content: Any) -> Any:
    """A copy of nested dictionaries, lists and tuples in which every tensor is a tensor of its own in host memory.

    Tensors that share memory share it in the copy too (tied weights). Everything else is handed on as it is. Copies from
    a GPU go to page-locked memory, all of them under way at a time; the call returns when they have arrived.
    """
    copies: dict[tuple, torch.Tensor] = {}
    result = _copied(content, copies)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return result


def _copied(content: Any, copies: dict[tuple, torch.Tensor]) -> Any:
    if isinstance(content, torch.Tensor):
        source = content.detach()
        place = (source.device, source.data_ptr(), source.dtype, tuple(source.shape), source.stride())
        if source.numel() == 0:
            return source.cpu().clone()
        if place not in copies:
            copies[place] = _host_tensor(source)
        return copies[place]
    if type(content) is OrderedDict or type(content) is dict:
        return type(content)((key, _copied(value, copies)) for key, value in content.items())
    if type(content) is list or type(content) is tuple:
        return type(content)(_copied(value, copies) for value in content)
    return content


def _host_tensor(source: torch.Tensor) -> torch.Tensor:
    copy = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
    return copy.copy_(source, non_blocking=True)


class FileWriter:
    """Stands in the place of DeepSpeed's checkpoint engine and notes a failed write instead of raising.

    A rank that raised inside `save_checkpoint` would leave its peers waiting in a barrier.

    Args:
        engine: DeepSpeed's own checkpoint engine, which serialises.
        on_file: called after every written file, in whichever thread wrote it.
    """

    def __init__(self, engine: Any, on_file: Callable[[], None]):
        self._engine, self._on_file = engine, on_file
        self.error: Exception | None = None
        self.deferred = False
        self._waiting: list[tuple[Any, str]] = []
        self._thread: threading.Thread | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def begin(self, deferred: bool) -> None:
        """A new checkpoint: with `deferred`, `save` copies to host memory and `start` writes."""
        self.error, self.deferred, self._waiting = None, deferred, []

    def save(self, state_dict: Any, path: str) -> None:
        """Called by DeepSpeed, once per file."""
        if not self.deferred:
            self._write(state_dict, path)
            return
        try:
            self._waiting.append((to_host(state_dict), path))
        except WriteError as error:
            self.error = error

    def start(self) -> None:
        """Write in a thread what `save` copied. A daemon: a rank that fails does not wait for it."""
        self._thread = threading.Thread(target=self._write_all, name="checkpoint writer", daemon=True)
        self._thread.start()

    @property
    def finished(self) -> bool:
        """Whether the thread has written everything, or failed."""
        return self._thread is None or not self._thread.is_alive()

    def join(self) -> None:
        """Wait for the thread."""
        if self._thread is not None:
            self._thread.join()

    def _write_all(self) -> None:
        while self._waiting and self.error is None:
            self._write(
                *self._waiting.pop(0)
            )  # popped: the host copy of a file goes as soon as it is written
        self._waiting = []

    def _write(self, state_dict: Any, path: str) -> None:
        try:
            with explain_disk_full(path):
                self._engine.save(state_dict, path)
                sync_to_disk(path)
        except WriteError as error:
            self.error = error
        self._on_file()


def sync_to_disk(path: str | os.PathLike[str]) -> None:
    """Return when a file, or the entries of a folder, would survive the loss of the machine's power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
