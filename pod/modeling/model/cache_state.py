"""The state of a cache as named tensors and JSON facts, to save, send and read it again without pickle.

Every object that belongs to a cache is written attribute by attribute. Attributes that only configure it (the
model's config, functions) are not written: a newly made cache of the same spec has them already. When facts
are read, only classes of ``PACKAGES`` are made, and nothing is imported.
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

from .kv_buffer import KVBuffer
from .step import CacheLayer

SCHEMA = 4
"""Version of the facts. ``PodCache.from_state`` reads no other one."""
PACKAGES = {__name__.rpartition(".")[0]}
"""Packages whose classes facts may name. Packages with other cache classes add themselves."""

_PLAIN = (type(None), bool, int, float, str)
_MADE: dict[str, Any] = {made.__name__: made for made in (list, tuple, set, Fraction)}
_DTYPES = {str(x).removeprefix("torch."): x for x in vars(torch).values() if isinstance(x, torch.dtype)}
_FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType, partial)


@dataclass
class CacheState:
    """The state of a cache, which ``PodCache.state`` returns and ``PodCache.from_state`` takes.

    Attributes:
        tensors: the cache's tensors, by the path of attributes that leads to them, such as
            ``layers.0.lead_keys.data``. They are not copied: do not write to them.
        facts: everything else, ready for JSON.
    """

    tensors: dict[str, Tensor]
    facts: dict[str, Any]


def known_classes() -> dict[str, type]:
    """The classes of the loaded modules of ``PACKAGES``, by name: those that facts may name."""
    modules = [x for name, x in list(sys.modules.items()) if PACKAGES & {name, name.rpartition(".")[0]}]
    items = [(module.__name__, item) for module in modules for item in vars(module).values()]
    own = [item for name, item in items if isinstance(item, type) and item.__module__ == name]
    return {item.__name__: item for item in own if not issubclass(item, Cache | nn.Module | PreTrainedConfig)}


def fields_of(item: Any) -> dict[str, Any]:
    """The attributes of an object that belong to its state: all but functions and ``version``."""
    held = {name: value for name, value in vars(item).items() if name != "version"}
    return {name: value for name, value in held.items() if not isinstance(value, _FUNCTIONS)}


class Writer:
    """Turns values of ``cache`` into facts and tensors. An object that occurs twice is written once.

    Attributes:
        tensors: the tensors written so far, by path.
        met: every object and container written so far. The list keeps them alive, because Python may give the
            ``id`` of a dead object to a new one.
    """

    def __init__(self, cache: Any):
        self.tensors: dict[str, Tensor] = {}
        self.met: list[Any] = []
        common = {"cache": cache, "config": cache.config}
        self._known: dict[int, dict[str, Any]] = {id(x): {"common": name} for name, x in common.items()}
        self._classes = known_classes()

    def write(self, value: Any, path: str) -> Any:
        """The facts of a value. Tensors in it go to ``tensors``.

        Args:
            value: any value of the cache.
            path: where the value is, from the cache on: the name of its tensor.

        Raises:
            TypeError: the value has a class that is not in ``PACKAGES``.
        """
        if type(value) in _PLAIN:
            return value
        if id(value) not in self._known:
            self._known[id(value)] = {"same": len(self.met)}
            self.met.append(value)
            return self._write_new(value, path)
        return self._known[id(value)]

    def _write_new(self, value: Any, path: str) -> dict[str, Any]:
        name = type(value).__name__
        if isinstance(value, Tensor):
            assert path not in self.tensors, path
            self.tensors[path] = value.detach()
            return {"tensor": path}
        if isinstance(value, torch.device):
            return {"device": None}  # the reader takes the device of its own model
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        if isinstance(value, dict):
            pairs = value.items()
            return {"dict": [[self.write(k, path), self.write(v, f"{path}.{k}")] for k, v in pairs]}
        if (_MADE | self._classes).get(name) is not type(value):
            raise TypeError(f"{path}: a {name} does not belong to the state of a cache")
        if name in _MADE or isinstance(value, tuple):
            items = value.as_integer_ratio() if isinstance(value, Fraction) else value
            return {"made": name, "of": [self.write(item, f"{path}.{i}") for i, item in enumerate(items)]}
        return {"object": name, "fields": self.fields(fields_of(value), f"{path}.")}

    def fields(self, values: dict[str, Any], path: str = "") -> dict[str, Any]:
        """The facts of named values. The names of their tensors begin with ``path``."""
        return {name: self.write(value, f"{path}{name}") for name, value in values.items()}


class Reader:
    """The opposite of ``Writer``: turns facts and tensors into values for an empty ``cache``.

    Layers are made by ``cache.new_layer``, so that they have their functions.
    """

    def __init__(self, cache: Any, tensors: dict[str, Tensor]):
        self.cache, self.tensors = cache, tensors
        self._met: list[Any] = []
        self._classes = known_classes()

    def read(self, facts: Any, place: int = 0) -> Any:
        """The value of these facts.

        Args:
            facts: from ``Writer.write``.
            place: index of the facts in the list that they belong to: in a list of layers, the layer's index.
        """
        if type(facts) in _PLAIN:
            return facts
        if "common" in facts:
            return self.cache if facts["common"] == "cache" else self.cache.config
        if "same" in facts:
            return self._met[facts["same"]]
        number = len(self._met)
        self._met.append(self._new_object(facts["object"], place) if "object" in facts else None)
        if "object" in facts:  # it is in the list already, as its fields may lead back to it
            vars(self._met[number]).update(self.fields(facts["fields"]))
        else:
            self._met[number] = self._value(facts)
        return self._met[number]

    def fields(self, facts: dict[str, Any]) -> dict[str, Any]:
        """The opposite of ``Writer.fields``."""
        return {name: self.read(value) for name, value in facts.items()}

    def _value(self, facts: dict[str, Any]) -> Any:
        if "tensor" in facts:
            return self.tensors[facts["tensor"]]
        if "device" in facts:
            return next((tensor.device for tensor in self.tensors.values()), None)
        if "dtype" in facts:
            return _DTYPES[facts["dtype"]]
        if "dict" in facts:
            return {self.read(k): self.read(v) for k, v in facts["dict"]}
        name = facts["made"]
        items = [self.read(item, place) for place, item in enumerate(facts["of"])]
        if name in _MADE:
            return _MADE[name](*items) if name == "Fraction" else _MADE[name](items)
        return self._classes[name]._make(items)  # type: ignore[attr-defined]

    def _new_object(self, name: str, place: int) -> Any:
        made = self._classes[name]
        new = self.cache.new_layer(place) if issubclass(made, CacheLayer) else object.__new__(made)
        if type(new) is not made:
            raise ValueError(f"holds a {name} where this cache has a {type(new).__name__}")
        return new


def check_objects(met: Sequence[object], tensors: dict[str, Tensor]) -> None:
    """Check the objects of a cache: every buffer, positions, and all floating-point tensors.

    Every buffer checks itself. Positions must ascend. No number may be NaN, except in a buffer, which may
    have slots without a token.

    Raises:
        AssertionError: something is wrong; the message says what.
    """
    reserved = set()
    for item in met:
        if isinstance(item, KVBuffer):
            item.check_integrity()
            reserved.update(tensor.data_ptr() for tensor in item.tensors())
        positions = getattr(item, "positions", None)
        if isinstance(positions, Tensor):
            assert bool((positions.diff() > 0).all()), f"positions of a {type(item).__name__} do not ascend"
    for path, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.data_ptr() not in reserved:
            assert not bool(tensor.isnan().any()), f"{path} holds NaN"
