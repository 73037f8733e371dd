"""Read names, shapes and single weights from a checkpoint's files, without regard to its configuration."""

import contextlib
import json
import os
import zipfile
from collections.abc import Callable, Container, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from pod.families import stored_names

ReadTensor = Callable[[str], Tensor]
"""Returns a weight by its name. Its memory may be a mapped file: never write to it, but to a copy."""

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""Files in which weights are looked for, in the order of transformers. The first that exists is used."""
ADAPTER_CONFIG = "adapter_config.json"
_IGNORED = "rotary_emb.inv_freq"
"""The end of the names of RoPE tables, which old checkpoints store and which are computed today."""
_ROWS_AT_A_TIME = 16_384  # rows of two matrices that are compared at a time
_FLOATING = ("F", "BF")
"""How the names of floating-point types begin in safetensors files."""


class SafetensorsFile:
    """Names, shapes and weights of a ``.safetensors`` file. The file is mapped into memory."""

    def __init__(self, file: str):
        self._opened = safe_open(file, framework="pt")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every weight, by name."""
        names = self._opened.keys()
        return {name: tuple(self._opened.get_slice(name).get_shape()) for name in names}

    def is_floating(self, name: str) -> bool:
        """Whether a weight has floating-point numbers."""
        return self._opened.get_slice(name).get_dtype().startswith(_FLOATING)

    def read(self, name: str) -> Tensor:
        """The weight of this name."""
        return self._opened.get_tensor(name)


class TorchFile:
    """The same as ``SafetensorsFile`` for a ``.bin`` file of ``torch.save``. No code in it is run."""

    def __init__(self, file: str):
        mapped = zipfile.is_zipfile(file)  # files of torch before 1.6 are read whole
        self._weights = torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(weight.shape) for name, weight in self._weights.items()}

    def is_floating(self, name: str) -> bool:
        return self._weights[name].is_floating_point()

    def read(self, name: str) -> Tensor:
        return self._weights[name]


def weight_files(
    source: str | os.PathLike, **places: Any
) -> tuple[dict[str, tuple[int, ...]], ReadTensor] | None:
    """The shape of every weight in the files of a folder or hub id, and a function that reads a weight.

    Args:
        source: the folder or hub id.
        places: arguments of ``cached_file`` of transformers: ``revision``, ``token``, ``cache_dir``,
            ``local_files_only``.

    Returns:
        Shapes by name and the reader. None if there are no such files (a GGUF file, or a model that is not on
        this machine).

    Raises:
        ValueError: a file is missing or cannot be read, weights are not floating-point numbers, or two files
            hold different weights under one name.
    """
    opened = lru_cache(maxsize=1)(_open)  # the pages of one file at a time stay mapped
    place: dict[str, str] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for file in _files(source, places):
        for name, shape in opened(file).shapes().items():
            if name.endswith(_IGNORED):
                continue
            if not opened(file).is_floating(name):
                raise ValueError(
                    f"{name} in {file} is no floating-point weight: the checkpoint is quantized, load the "
                    "one that it was made from"
                )
            if name in place:
                _check_same(name, opened(place[name]).read(name), opened(file).read(name), place[name], file)
            place[name], shapes[name] = file, shape
    return (shapes, lambda name: opened(place[name]).read(name)) if place else None


def _check_same(name: str, first: Tensor, second: Tensor, *files: str) -> None:
    if not same_values(first, second):
        names = " and ".join(Path(file).name for file in files)
        raise ValueError(
            f"{name} stands in {names} with different values: remove the file that is left from another save"
        )


def _open(file: str) -> SafetensorsFile | TorchFile:
    if not Path(file).is_file():
        raise ValueError(
            f"{file} is named by the checkpoint's index and is not there: copy or download it again"
        )
    try:
        return SafetensorsFile(file) if file.endswith(".safetensors") else TorchFile(file)
    except (SafetensorError, RuntimeError, EOFError, OSError) as error:
        raise ValueError(
            f"{file} cannot be read ({str(error).splitlines()[0]}): copy or download it again"
        ) from error


def _files(source: str | os.PathLike, places: Mapping[str, Any]) -> list[str]:
    for name in _FILES:
        found = None
        with contextlib.suppress(OSError):  # no such file, or no such model
            found = cached_file(source, name, **places)
        if found is not None and name.endswith(".json"):
            return _shards(source, found, places)
        if found is not None:
            return [found]
    return []


def is_adapter(source: str) -> bool:
    """Whether a folder holds an adapter of peft.

    Raises:
        ValueError: it holds a whole model too. Transformers would load the adapter's base and ignore that
            model.
    """
    folder = Path(source)
    if not (folder / ADAPTER_CONFIG).is_file():
        return False
    if whole := [name for name in _FILES if (folder / name).is_file()]:
        raise ValueError(
            f"{source} holds an adapter ({ADAPTER_CONFIG}) and a whole model ({whole[0]}): keep one of both "
            "in a folder"
        )
    return True


def _shards(source: str | os.PathLike, index: str, places: Mapping[str, Any]) -> list[str]:
    try:
        return sorted(get_checkpoint_shard_files(str(source), index, **places)[0] or ())
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{index} is no index of weights (it needs metadata and weight_map): copy or download it again"
        ) from error


def same_values(first: Tensor, second: Tensor) -> bool:
    """Whether two weights are equal. They are compared in parts, so that mapped ones need little memory."""
    if first.shape != second.shape:
        return False
    if first.data_ptr() == second.data_ptr() and first.stride() == second.stride():
        return True
    parts = zip(first.split(_ROWS_AT_A_TIME), second.split(_ROWS_AT_A_TIME), strict=True)
    return all(torch.equal(one, other.to(one)) for one, other in parts)


def has_own_head(have: Container[str], read: ReadTensor, config: Any) -> bool:
    """Whether a checkpoint's head differs from the embedding, although its configuration ties the two.

    The head is the output projection. The stored weights win over ``tie_word_embeddings``, as in
    transformers. Such heads come from adapters with ``modules_to_save=["lm_head"]``, or from training that
    kept the two apart.

    Args:
        have: names of the weights in the checkpoint.
        read: returns a weight by its name.
        config: the checkpoint's configuration.
    """
    if not config.tie_word_embeddings:
        return False
    head = stored_names(HEAD, have, config)[0]
    embedding = stored_names(EMBEDDING, have, config)[0]
    if head not in have or embedding not in have:
        return False
    first = read(head)
    second = read(embedding)
    return "meta" not in (first.device.type, second.device.type) and not same_values(first, second)
