"""The trained state of a run in files that any number of ranks, sequence-parallel size and ZeRO stage reads.

Rank 2 writes what it holds into `weights-00002-000.safetensors` and so on. A tensor there is a piece of a flattened weight, or of
one of Adam's moments, in fp32; its key says kind, first element and name (`exp_avg/4096/model.lm_head.weight`), the file's
metadata the shapes of whole weights. A rank that reads takes from all files what overlaps with its own pieces.
"""

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from pod.files import explain_disk_full
from pod.schema import one_line
from pod.training.deepspeed_bridge import MASTER, Piece
from pod.training.run.carry import host_copy

FILE_BYTES = 2**30
"""From this size on a file ends: pieces of a GPU wait in host memory until their file is written."""


def host_pieces(pieces: Sequence[Piece]) -> list[Piece]:
    """Copies in host memory, all of them under way at a time."""
    copies = [
        replace(one, values={kind: host_copy(held) for kind, held in one.values.items()}) for one in pieces
    ]
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return copies


def write_pieces(folder: Path, rank: int, pieces: list[Piece], written: Callable[[], None]) -> None:
    """Write and sync this rank's files; empties `pieces`, so that their memory goes with them. Calls `written` after every file.

    Raises OSError, SafetensorError: a file cannot be written.
    """
    number = 0
    while pieces:
        tensors, shapes, room = {}, {}, FILE_BYTES
        while pieces and room > 0:
            one = pieces.pop(0)
            tensors |= {f"{kind}/{one.start}/{one.name}": held.cpu() for kind, held in one.values.items()}
            shapes[one.name] = json.dumps(one.shape)
            room -= sum(held.nbytes for held in one.values.values())
        path = folder / f"weights-{rank:05d}-{number:03d}.safetensors"
        with explain_disk_full(path):
            save_file(tensors, path, metadata=shapes)
            sync_to_disk(path)
        written()
        number += 1


def read_pieces(folder: Path, pieces: Sequence[Piece]) -> None:
    """Fill the values of `pieces` from the files of all ranks that wrote; ValueError, in one line, when they do not hold all of it."""
    wanted = {one.name: one for one in pieces}
    missing = sum(held.numel() for one in pieces for held in one.values.values())
    for file in _files(folder):
        with _opened(file) as content:
            for key in content.keys():  # noqa: SIM118  not a dictionary
                kind, start, name = key.split("/", 2)
                if name in wanted and kind in wanted[name].values:
                    mine = wanted[name]
                    missing -= _fill(mine.values[kind], mine.start, content.get_slice(key), int(start))
    if missing:
        raise ValueError(f"{missing} of its numbers are missing")


def whole_weights(folder: Path) -> dict[str, Tensor]:
    """fp32 master weights by the names of the trained module; errors as in `read_pieces`."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in _files(folder):
        with _opened(file) as content:
            shapes |= {name: tuple(json.loads(shape)) for name, shape in content.metadata().items()}
    pieces = [
        Piece(name, shape, 0, {MASTER: torch.empty(math.prod(shape))}) for name, shape in shapes.items()
    ]
    read_pieces(folder, pieces)
    return {one.name: one.values[MASTER].view(one.shape) for one in pieces}


def sync_to_disk(path: str | os.PathLike[str]) -> None:
    """Return when a file, or the entries of a folder, would survive the loss of the machine's power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _files(folder: Path) -> list[Path]:
    found = sorted(folder.glob("weights-*.safetensors"))
    if not found:
        raise ValueError("it holds no weights")
    return found


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt") as content:
            yield content
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{file.name}: {one_line(error)}") from error


def _fill(values: Tensor, start: int, saved: Any, saved_start: int) -> int:
    """Copy the elements that two pieces of a flattened weight share, from a slice of a file; returns their number."""
    (size,) = saved.get_shape()
    first, stop = max(start, saved_start), min(start + values.numel(), saved_start + size)
    if first < stop:
        values[first - start : stop - start] = saved[first - saved_start : stop - saved_start]
    return max(0, stop - first)
