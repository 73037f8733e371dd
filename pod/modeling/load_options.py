"""Read the arguments of ``load_model``, also those with transformers' names, or refuse them with a reason."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from pod.modeling.model.config import PodConfig
from pod.modeling.placement import STYLES, as_device, missing_device, no_offloading, place

PLACES = frozenset({"cache_dir", "gguf_file", "local_files_only", "revision", "token"})
"""Arguments that say where a checkpoint is, as ``from_pretrained`` of transformers takes them."""
ATTENTION = {"eager": "reference", "flash_attention_2": "flash", "sdpa": "auto"}
"""Our attention backend for each ``attn_implementation`` of transformers."""
_WITHOUT_EFFECT = frozenset({"low_cpu_mem_usage", "trust_remote_code", "use_safetensors"})
"""Arguments that are accepted and ignored, because weights are always mapped and only this package's code
runs."""
_TRANSLATED = frozenset({"attn_implementation", "device_map", "max_memory", "torch_dtype"})
_REASONS = {
    "load_in_4bit": "weights are not quantized here; method 'pod+int4' packs the cache",
    "load_in_8bit": "weights are not quantized here; method 'pod+int4' packs the cache",
    "quantization_config": "weights are not quantized here; method 'pod+int4' packs the cache",
    "offload_folder": "nothing is offloaded to disk: device_map='auto' spreads the layers over all GPUs",
    "offload_state_dict": "nothing is offloaded to disk: device_map='auto' spreads the layers over all GPUs",
    "tp_plan": "layers are not cut between devices: device_map='auto' spreads whole layers over all GPUs",
    "subfolder": "give the path of that folder as the source",
    "use_cache": "pass use_cache to forward() or generate() instead",
    "config": "the configuration comes from the checkpoint; set plan, layout and windows as arguments",
}


class LoadOptions(NamedTuple):
    """The arguments of ``load_model`` that say how weights are read and where they go.

    Attributes:
        dtype: dtype of the weights; None = the checkpoint's.
        attention_backend: ``auto`` or the name of a backend.
        device: the device for the model; None = the CPU, or where a model in memory is.
        is_read_there: whether weights are read straight to ``device``, because a ``device_map`` names it.
        places: the arguments of ``PLACES`` that were given.
        spread: a ``device_map`` that may name several devices, until ``placed`` turns it into ``layout``;
            else None.
        max_memory: bytes of weights for each device; None = the free memory decides.
        layout: the device of each module, if there are several devices; else None.
    """

    dtype: torch.dtype | None
    attention_backend: str
    device: Any
    is_read_there: bool
    places: dict[str, Any]
    spread: Any = None
    max_memory: Any = None
    layout: dict[str, torch.device] | None = None

    def placed(self, config: PodConfig, dtype: torch.dtype | None) -> "LoadOptions":
        """The same options, with ``spread`` turned into a device for each part of a model.

        Args:
            config: the configuration of the model.
            dtype: dtype of its weights; None = fp32.

        Raises:
            ValueError: as in ``placement.place``, or this machine does not have a device.
        """
        if self.spread is None:
            return self
        size = (dtype or torch.float32).itemsize
        layout = place(config, size, self.spread, self.max_memory)
        devices = set(layout.values())
        _check_there("device_map", layout.values())
        if len(devices) == 1:
            return self._replace(device=devices.pop(), is_read_there=True, spread=None)
        return self._replace(layout=layout)


def load_options(
    dtype: Any, attention_backend: str, device: Any, others: Mapping[str, Any], own: Iterable[str]
) -> LoadOptions:
    """Read the arguments of ``load_model``.

    Args:
        dtype, attention_backend, device: see ``load_model``.
        others: its ``others``.
        own: the names of its own arguments, for the message about an unknown one.

    Raises:
        ValueError: an unknown name, a value that is not allowed, or two names of one setting with different
            values. The message says what to do.
    """
    given = {name: value for name, value in others.items() if value is not None}
    _check_names(given, own)
    dtype = _one(
        "dtype", _dtype("dtype", dtype), "torch_dtype", _dtype("torch_dtype", given.get("torch_dtype"))
    )
    asked = None if attention_backend == "auto" else attention_backend
    backend = _one(
        "attention_backend", asked, "attn_implementation", _backend(given.get("attn_implementation"))
    )
    device_map = given.get("device_map")
    max_memory = given.get("max_memory")
    if max_memory is not None and not (isinstance(device_map, str) and device_map in STYLES):
        raise ValueError(
            "max_memory is for device_map = 'auto', 'balanced' or 'sequential': give one of them"
        )
    places = {name: value for name, value in given.items() if name in PLACES}
    if _is_spread(device_map):
        if device is not None:
            _one("device", device, "device_map", device_map)
        return LoadOptions(dtype, backend or "auto", None, False, places, device_map, max_memory)
    mapped = _device_of(device_map)
    wanted = _device("device", _one("device", device, "device_map", mapped))
    if wanted is not None:
        _check_there("device" if mapped is None else "device_map", [wanted])
    return LoadOptions(dtype, backend or "auto", wanted, mapped is not None and device is None, places)


def _check_names(given: Mapping[str, Any], own: Iterable[str]) -> None:
    """Refuse unknown names (``ValueError``), with the reason or the nearest name that is known."""
    known = {*own, *PLACES, *_TRANSLATED, *_WITHOUT_EFFECT}
    unknown = sorted(given.keys() - known)
    if not unknown:
        return
    told = [f"load_model does not take {', '.join(unknown)}"]
    for name in unknown:
        near = difflib.get_close_matches(name, known, n=1)
        if name in _REASONS:
            told.append(f"{name}: {_REASONS[name]}")
        elif near:
            told.append(f"{name}: did you mean {near[0]}?")
    if len(told) == 1:
        told.append(f"it takes {', '.join(sorted(known))}")
    raise ValueError("; ".join(told))


def _dtype(name: str, asked: Any) -> torch.dtype | None:
    """The dtype of an argument; None for None and ``auto``. ``ValueError`` unless it is floating-point."""
    if asked is None or asked == "auto":
        return None
    found = getattr(torch, str(asked).removeprefix("torch."), asked)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name} = {asked!r} is not a torch dtype: use for example 'bfloat16', or 'auto'")
    if not found.is_floating_point:
        raise ValueError(
            f"{name} = {asked!r} is not a floating-point dtype: use for example 'bfloat16', or 'auto'"
        )
    return found


def _backend(asked: Any) -> str | None:
    """Our backend for an ``attn_implementation``; None for None. ``ValueError`` for an unknown one."""
    if asked is not None and asked not in ATTENTION:
        raise ValueError(
            f"attn_implementation = {asked!r} is not supported, allowed are {', '.join(ATTENTION)}: use one "
            "of these, leave it out, or set attention_backend"
        )
    return None if asked is None else ATTENTION[asked]


def _one(ours: str, own: Any, theirs: str, other: Any) -> Any:
    """The value of a setting that has two names. ``ValueError`` if both are given and differ.

    Args:
        ours, own: our name, and its value or None.
        theirs, other: transformers' name, and its value or None.
    """
    if own is not None and other is not None and str(own) != str(other):
        raise ValueError(
            f"{ours} = {own!r} and {theirs} = {str(other)!r} are the same setting: give only one of them"
        )
    return other if own is None else own


def _is_spread(device_map: Any) -> bool:
    """Whether a ``device_map`` names devices by module, or asks for several devices."""
    if isinstance(device_map, Mapping):
        return bool(device_map.keys() - {""})
    return isinstance(device_map, str) and device_map in STYLES


def _check_there(name: str, devices: Iterable[torch.device]) -> None:
    """Refuse devices that this machine does not have (``ValueError``); ``name`` is the argument."""
    if (missing := missing_device(devices)) is not None:
        raise ValueError(f"{name} names {missing}: use 'cpu', or a device that is there")


def _device_of(device_map: Any) -> torch.device | None:
    """The one device that a ``device_map`` names. ``ValueError`` if it is no device."""
    if device_map is None:
        return None
    asked: Any = next(iter(device_map.values()), None) if isinstance(device_map, Mapping) else device_map
    if asked is None:
        raise ValueError(f"device_map = {device_map!r} names no device: leave it out, or name one")
    if asked == "disk":
        raise ValueError(no_offloading("device_map names disk"))
    return _device("device_map", asked, f", one of {', '.join(STYLES)}, or devices by module")


def _device(name: str, asked: Any, more: str = "") -> torch.device | None:
    """The device of an argument; None for None. ``ValueError`` if it is no device.

    Args:
        name: the argument.
        asked: its value.
        more: what else the argument may be, for the message.
    """
    if asked is None:
        return None
    try:
        return as_device(asked)
    except (RuntimeError, TypeError) as error:
        reason = str(error).splitlines()[0].split(" device type at start")[0]
        raise ValueError(
            f"{name} = {asked!r} is no device: use a device, for example 'cuda:0'{more} ({reason})"
        ) from None
