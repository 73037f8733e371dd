"""What a cache holds as named tensors and plain facts: saved, sent and read again without pickle.

Every object that belongs to a cache is written attribute by attribute. What only configures it (the model's config, functions)
is not: it comes with a newly made cache of the same spec. When facts are read, only classes of ``PACKAGES`` are made, and
nothing is imported.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache

from .step import CacheLayer

SCHEMA = 2
PACKAGES = {__name__.rpartition(".")[0]}
"""Packages whose classes a cache consists of."""

_PLAIN = (type(None), bool, int, float, str)
_DTYPES = {str(x).removeprefix("torch."): x for x in vars(torch).values() if isinstance(x, torch.dtype)}
_FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType, partial)


@dataclass
class CacheState:
    """What ``PodCache.state`` gives and ``PodCache.from_state`` takes.

    Attributes:
        tensors: by the path of attributes that leads to them; the cache's own, to be read only.
        facts: everything else, ready for JSON.
    """

    tensors: dict[str, Tensor]
    facts: dict[str, Any]


def known_classes() -> dict[str, type]:
    """Classes that facts may name."""
    found = {}
    for name, module in list(sys.modules.items()):
        if name in PACKAGES or name.rpartition(".")[0] in PACKAGES:
            for item in vars(module).values():
                if isinstance(item, type) and item.__module__ == name:
                    found[item.__name__] = item
    foreign = Cache | nn.Module | PreTrainedConfig
    return {name: item for name, item in found.items() if not issubclass(item, foreign)}


def fields_of(item: Any) -> dict[str, Any]:
    """The attributes of an object that are not functions."""
    return {name: value for name, value in vars(item).items() if not isinstance(value, _FUNCTIONS)}


class Writer:
    """Turns values into facts and tensors; what is met twice is written once.

    Args:
        common: objects that every cache of the spec has, by name.
    """

    def __init__(self, common: dict[str, Any]):
        self.tensors: dict[str, Tensor] = {}
        self._names = {id(item): name for name, item in common.items()}
        self._met: dict[
            int, tuple[int, Any]
        ] = {}  # keeps what was met alive: numbers of objects are used again
        self._classes = known_classes()

    def write(self, value: Any, path: str) -> Any:
        """The facts of a value.

        Raises:
            TypeError: a value of a class that is not in ``PACKAGES``.
        """
        if type(value) in _PLAIN:
            return value
        if id(value) in self._names:
            return {"common": self._names[id(value)]}
        if id(value) in self._met:
            return {"same": self._met[id(value)][0]}
        self._met[id(value)] = len(self._met), value
        return self._write_new(value, path)

    def _write_new(self, value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            assert path not in self.tensors, path
            self.tensors[path] = value.detach()
            return {"tensor": path}
        if isinstance(value, list):
            return self._items(value, path)
        if isinstance(value, dict):
            pairs = enumerate(value.items())
            return {
                "dict": [[self.write(k, f"{path}.{i}"), self.write(v, f"{path}.{k}")] for i, (k, v) in pairs]
            }
        if isinstance(value, set):
            return {"set": self._items(list(value), path)}
        if isinstance(value, Fraction):
            return {"fraction": [value.numerator, value.denominator]}
        if isinstance(value, torch.device):
            return {"device": None}  # that of the model which reads
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        name = type(value).__name__
        if self._classes.get(name) is type(value):
            if isinstance(value, tuple):
                return {"object": name, "items": self._items(value, path)}
            return {"object": name, "fields": self.fields(value, path)}
        if isinstance(value, tuple):
            return {"tuple": self._items(value, path)}
        raise TypeError(f"{path}: a {name} does not belong to the state of a cache")

    def _items(self, values: Sequence, path: str) -> list:
        return [self.write(value, f"{path}.{i}") for i, value in enumerate(values)]

    def fields(self, item: Any, path: str) -> dict[str, Any]:
        return {name: self.write(value, f"{path}.{name}") for name, value in fields_of(item).items()}

    @property
    def met(self) -> list[Any]:
        """Every object and container that was written."""
        return [value for _, value in self._met.values()]


class Reader:
    """The opposite of ``Writer``.

    Args:
        common: as for ``Writer``, of the cache that reads.
        make_layer: ``layer_idx -> CacheLayer``: a new layer of that cache, with its functions.
        device: on which objects note that they live.
    """

    def __init__(self, tensors: dict[str, Tensor], common: dict[str, Any], make_layer, device: torch.device):
        self.tensors, self.common, self.make_layer, self.device = tensors, common, make_layer, device
        self._met: list[Any] = []
        self._classes = known_classes()

    def read(self, facts: Any, place: int = 0) -> Any:
        """The value of these facts, which stand at this place of a list."""
        if type(facts) in _PLAIN:
            return facts
        if isinstance(facts, list):
            return self._items(facts, self._meet([]))
        if "common" in facts:
            return self.common[facts["common"]]
        if "same" in facts:
            return self._met[facts["same"]]
        if "dict" in facts:
            met = self._meet({})
            met.update((self.read(k), self.read(v)) for k, v in facts["dict"])
            return met
        if "fields" in facts:
            return self._object(facts, place)
        number = len(self._met)
        self._met.append(None)
        self._met[number] = self._value(facts)
        return self._met[number]

    def _meet(self, value: Any) -> Any:
        self._met.append(value)
        return value

    def _items(self, facts: list, into: list) -> list:
        for place, item in enumerate(facts):
            into.append(self.read(item, place))
        return into

    def _value(self, facts: dict) -> Any:
        if "tensor" in facts:
            return self.tensors[facts["tensor"]]
        if "set" in facts:
            return set(self._items(facts["set"], []))
        if "fraction" in facts:
            return Fraction(*facts["fraction"])
        if "device" in facts:
            return self.device
        if "dtype" in facts:
            return _DTYPES[facts["dtype"]]
        if "object" in facts:
            return self._classes[facts["object"]]._make(self._items(facts["items"], []))  # type: ignore[attr-defined]
        return tuple(self._items(facts["tuple"], []))

    def _object(self, facts: dict, place: int) -> Any:
        made = self._classes[facts["object"]]
        new = self.make_layer(place) if issubclass(made, CacheLayer) else object.__new__(made)
        if type(new) is not made:
            raise ValueError(f"holds a {made.__name__} where this cache has a {type(new).__name__}")
        self._meet(new)
        vars(new).update({name: self.read(value) for name, value in facts["fields"].items()})
        return new
