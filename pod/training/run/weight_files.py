"""The weights of a checkpoint one by one, from its safetensors files: no more is in memory than what is asked for."""

import os
from collections.abc import Iterator, Mapping
from typing import Any

from safetensors import safe_open
from torch import Tensor
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_IGNORED = "rotary_emb.inv_freq"
"""Old checkpoints hold tables that are computed today."""


class WeightFiles(Mapping[str, Tensor]):
    """Weights by their names in the files. Only the file that was read last is open, so that of no more than one pages stay mapped.

    Args:
        files: paths of safetensors files.
    """

    def __init__(self, files: list[str]):
        self._place: dict[str, str] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._open: tuple[str, Any] = ("", None)
        for file in files:
            with safe_open(file, framework="pt") as content:
                for name in content.keys():  # noqa: SIM118  not a dictionary
                    if not name.endswith(_IGNORED):
                        self._place[name] = file
                        self.shapes[name] = tuple(content.get_slice(name).get_shape())

    def __getitem__(self, name: str) -> Tensor:
        """A weight, which may lie in mapped pages of its file: copy it, never write to it."""
        file = self._place[name]
        if self._open[0] != file:
            self._open = ("", None)  # the old one goes before the new one comes
            self._open = (file, safe_open(file, framework="pt"))
        return self._open[1].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._place)

    def __len__(self) -> int:
        return len(self._place)


def weight_files(source: str | os.PathLike) -> WeightFiles | None:
    """Of a folder or hub id; None when it has no safetensors files."""
    for name in (_INDEX, _SINGLE):
        try:
            found = cached_file(source, name)
        except OSError:  # no such file, or no such model
            continue
        if found is not None:
            files = get_checkpoint_shard_files(str(source), found)[0] if name == _INDEX else [found]
            return WeightFiles(files)
    return None
