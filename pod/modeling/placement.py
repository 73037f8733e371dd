"""One model on several devices: which layer lies where, and accelerate's hooks for what passes between them.

Layers stay in order, so that a device has neighbouring ones and a token crosses each border once. A border
inside a block of a plan costs more: what the block's lead left (queries and keys of a prompt, logits of a
decoded token) crosses too. So of layouts that fill their devices about equally the one with the fewest KV
heads that cross is taken.
"""

import difflib
import math
import os
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import nn

from pod.modeling.shipped.config import PodConfig
from pod.modeling.shipped.llama import PodForCausalLM
from pod.modeling.shipped.sharing import is_followed

STYLES = ("auto", "balanced", "sequential")
"""What ``device_map`` may say in place of devices."""
ROOM_OF_AUTO = 0.3
"""Share of each device's free memory that ``auto`` leaves to cache and activations where it can."""
ROOM = 0.1
"""The least share that is left where nobody says ``max_memory``."""
UNEVEN = 1.25
"""How much fuller than need be the fullest device may get, for a border with fewer KV heads that cross."""

_EMBEDDING, _NORM, _HEAD = "model.embed_tokens", "model.norm", "lm_head"
_IGNORED = frozenset({"model.rotary_emb"})
"""Modules of stock models that have no weights, and that maps of theirs name."""


class Parts(NamedTuple):
    """What is laid out, in the order in which a token passes: embedding, layers, and the end (norm, and
    head unless tied).

    Attributes:
        sizes: bytes of each part's weights (and of what else is to lie beside them).
        crossing: KV heads whose lead is before a part and has followers from it on, for each part.
    """

    sizes: list[int]
    crossing: list[int]


class Unplaced(ValueError):
    """The parts do not fit the devices."""


def parts_of(config: PodConfig, bytes_per_number: int, beside: Sequence[int] | None = None) -> Parts:
    """The parts of a model of this configuration, from shapes alone.

    Args:
        beside: bytes of each layer's keys and values; None = they are not counted.
    """
    with torch.device("meta"):
        model = PodForCausalLM(config)
    layers = [_numbers(layer) for layer in model.model.layers]
    first, last = _numbers(model.model.embed_tokens), _numbers(model.model.norm)
    if not config.tie_word_embeddings:
        last += _numbers(model.lm_head)
    sizes = [numbers * bytes_per_number for numbers in (first, *layers, last)]
    for layer, more in enumerate(beside or ()):
        sizes[1 + layer] += more
    return Parts(sizes, [0, *heads_that_cross(config), 0])


def _numbers(module: nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())


def heads_that_cross(config: PodConfig) -> list[int]:
    """For each layer: KV heads whose lead is below it and has followers from it on."""
    lead = config.sharing_plan.lead
    if config.layout == "window":
        return [0] * len(lead)
    return [
        sum(is_followed(lead, layer - 1, head) for head in range(len(lead[0]))) if layer else 0
        for layer in range(len(lead))
    ]


def lay_out(parts: Parts, capacities: Sequence[float], style: str = "balanced") -> list[int]:
    """The number of the device of each part: rising, so that a device has neighbouring parts.

    Args:
        capacities: bytes that each device takes; infinite = any number.
        style: ``sequential`` fills one device after the other; ``balanced`` fills all by the same share,
            but for what fewer heads that cross are worth (``UNEVEN``).

    Raises:
        Unplaced: they do not fit.
    """
    if style == "sequential":
        return _in_sequence(parts, capacities)
    if all(math.isinf(one) for one in capacities):
        capacities = [sum(parts.sizes)] * len(capacities)
        limit = math.inf
    else:
        limit = 1.0
    evenest = _best(parts._replace(crossing=[0] * len(parts.sizes)), capacities, limit)
    if evenest is None:
        raise Unplaced(_does_not_fit(parts, capacities))
    fullest = max(_fillings(parts, capacities, evenest))
    found = _best(parts, capacities, min(limit, fullest * UNEVEN))
    assert found is not None, "the evenest layout is within the limit"
    return found


def _in_sequence(parts: Parts, capacities: Sequence[float]) -> list[int]:
    found, device, held = [], 0, 0
    for size in parts.sizes:
        while device < len(capacities) and held + size > capacities[device]:
            device, held = device + 1, 0
        if device == len(capacities):
            raise Unplaced(_does_not_fit(parts, capacities))
        held += size
        found.append(device)
    return found


def _does_not_fit(parts: Parts, capacities: Sequence[float]) -> str:
    room = ", ".join(f"{one / 1e9:.1f}" for one in capacities)
    return (
        f"{sum(parts.sizes) / 1e9:.1f} GB in parts of up to {max(parts.sizes) / 1e9:.1f} GB do not fit devices "
        f"that take {room} GB"
    )


class _Layout(NamedTuple):
    """Heads that cross so far, the filling of the fullest device, and the device of each part."""

    crossing: int
    fullest: float
    devices: list[int]


def _best(parts: Parts, capacities: Sequence[float], limit: float) -> list[int] | None:
    """The layout with the fewest heads that cross, of these with the least full fullest device.

    None = none is within the limit.

    By dynamic programming: ``best[n]`` is that of the first ``n`` parts on the devices so far.
    """
    count = len(parts.sizes)
    before = list(accumulate(parts.sizes, initial=0))
    best: list[_Layout | None] = [_Layout(0, 0.0, []), *[None] * count]
    for device, capacity in enumerate(capacities):
        following = list(best)  # the device may stay empty
        for start, known in enumerate(best[:count]):
            if known is None:
                continue
            for stop in range(start + 1, count + 1):
                filling = (before[stop] - before[start]) / capacity if capacity else math.inf
                if filling > limit:
                    break
                crossing, fullest = known.crossing + parts.crossing[start], max(known.fullest, filling)
                held = following[stop]
                if held is None or (crossing, fullest) < held[:2]:
                    devices = [*known.devices, *[device] * (stop - start)]
                    following[stop] = _Layout(crossing, fullest, devices)
        best = following
    found = best[count]
    return None if found is None else found.devices


def _fillings(parts: Parts, capacities: Sequence[float], found: Sequence[int]) -> list[float]:
    held = [0] * len(capacities)
    for size, device in zip(parts.sizes, found, strict=True):
        held[device] += size
    return [size / capacity if size else 0.0 for size, capacity in zip(held, capacities, strict=True)]


# -- which devices -----------------------------------------------------------------------------------------------


def place(
    config: PodConfig,
    bytes_per_number: int,
    asked: str | Mapping[str, Any],
    max_memory: Mapping[Any, Any] | None,
    beside: Sequence[int] | None = None,
) -> dict[str, torch.device]:
    """The device of every part of a model, by its module's name.

    Args:
        asked: one of ``STYLES``, or devices by module, as ``device_map`` of transformers.
        max_memory: bytes, or a text as ``"70GiB"``, by device: what weights may take there; None = of every
            accelerator what is free, less some room (``ROOM_OF_AUTO``, ``ROOM``).
        beside: bytes of each layer's keys and values, which then are laid out with the weights; None =
            not known.

    Raises:
        ValueError: modules without a device or that are cut, offloading, a model that does not fit.
    """
    names = module_names(config)
    if isinstance(asked, Mapping):
        return _by_map(names, asked, config.tie_word_embeddings)
    free = capacities(max_memory)
    style = "sequential" if asked == "sequential" else "balanced"
    if len(free) == 1 and max_memory is None:
        return named(names, list(free) * (len(names) - 1), config.tie_word_embeddings)
    parts, refusal = parts_of(config, bytes_per_number, beside), None
    least = 0.0 if max_memory is not None else ROOM
    room_of_auto = ROOM_OF_AUTO if max_memory is None and beside is None else least
    for count, room in _attempts(asked, len(free), least, room_of_auto):
        devices = list(free)[:count]
        try:
            numbers = lay_out(parts, [free[one] * (1 - room) for one in devices], style)
        except Unplaced as error:
            refusal = error
            continue
        return named(names, [devices[number] for number in numbers], config.tie_word_embeddings)
    raise ValueError(
        f"device_map = {asked!r}: {refusal}: use more devices, raise max_memory, or load a smaller dtype; nothing is "
        "offloaded to host memory or disk"
    )


def _attempts(asked: str, count: int, least: float, room: float) -> list[tuple[int, float]]:
    """How many devices to take, and the share of their memory to leave: ``auto`` takes as few as leave
    ``room``."""
    few = [(number, room) for number in range(1, count + 1)] if asked == "auto" else []
    return [*few, (count, least)]


def module_names(config: PodConfig) -> list[str]:
    """The modules that lie on one device each, in order; the head last."""
    layers = [f"model.layers.{layer}" for layer in range(config.num_hidden_layers)]
    return [_EMBEDDING, *layers, _NORM, _HEAD]


def named(names: Sequence[str], devices: Sequence[torch.device], is_tied: bool) -> dict[str, torch.device]:
    """By module name, of the devices of the parts: a head of its own lies with the norm, a tied one with the
    embedding."""
    return dict(zip(names, [*devices, devices[0] if is_tied else devices[-1]], strict=True))


def capacities(max_memory: Mapping[Any, Any] | None) -> dict[torch.device, float]:
    """Bytes that weights may take on each device, in the order of the devices."""
    if max_memory is not None:
        return _given_capacities(max_memory)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return {torch.device("cpu"): math.inf}
    devices = [torch.device(accelerator.type, number) for number in range(torch.accelerator.device_count())]
    return {device: free_bytes(device) for device in devices}


def free_bytes(device: torch.device) -> float:
    """Bytes that are free; infinite for devices that do not say."""
    if device.type != "cuda":
        return math.inf
    return float(torch.cuda.mem_get_info(device)[0])


def share_of_rank(count: int) -> range:
    """The numbers of this rank's GPUs among the ``count`` of its machine: with more GPUs than ranks each has
    neighbouring ones of its own."""
    rank, ranks = int(os.environ.get("LOCAL_RANK", 0)), os.environ.get("WORLD_SIZE", 1)
    each = max(1, count // int(os.environ.get("LOCAL_WORLD_SIZE", ranks)))
    first = rank * each % max(1, count)  # ranks without one of their own share
    return range(first, first + each)


def _given_capacities(max_memory: Mapping[Any, Any]) -> dict[torch.device, float]:
    from accelerate.utils import convert_file_size_to_int

    found: dict[torch.device, float] = {}
    for name, size in max_memory.items():
        device = _device(name, "max_memory")
        if device.type == "cpu" and len(max_memory) > 1:
            raise ValueError(_no_offloading("max_memory names cpu beside other devices"))
        try:
            found[device] = size if isinstance(size, float) else float(convert_file_size_to_int(size))
        except ValueError:
            raise ValueError(
                f"max_memory[{name!r}] = {size!r} is no size: use bytes, or a text as '70GiB'"
            ) from None
    return dict(sorted(found.items(), key=lambda one: (one[0].type, one[0].index or 0)))


def _device(asked: Any, what: str) -> torch.device:
    """A device that computes; ``ValueError`` for one that would only keep weights."""
    if asked == "disk":
        raise ValueError(_no_offloading(f"{what} names disk"))
    if isinstance(asked, int):
        accelerator = torch.accelerator.current_accelerator()
        asked = torch.device("cuda" if accelerator is None else accelerator.type, asked)
    try:
        device = torch.device(asked)
    except (RuntimeError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{what} names {asked!r}, which is no device ({reason})") from None
    return (
        torch.device(device.type, 0)
        if device.index is None and device.type not in ("cpu", "meta")
        else device
    )


def _no_offloading(what: str) -> str:
    return (
        f"{what}: nothing is offloaded to host memory or disk, where every pass would wait for weights; use more "
        "devices, or a smaller dtype"
    )


def _by_map(names: Sequence[str], asked: Mapping[str, Any], is_tied: bool) -> dict[str, torch.device]:
    """The device of each module from a map of modules and what is above them."""
    for key in asked:
        if any(key.startswith(f"{name}.") for name in names):
            raise ValueError(
                f"device_map names {key}: a layer lies on one device; name {'.'.join(key.split('.')[:3])}"
            )
        above = key == "" or any(name == key or name.startswith(f"{key}.") for name in names)
        if not above and key not in _IGNORED:
            near = difflib.get_close_matches(key, names, n=1)
            hint = (
                f": did you mean {near[0]}?"
                if near
                else f"; it has {names[0]}, {names[1]}, … and {names[-1]}"
            )
            raise ValueError(f"device_map names {key}, which the model does not have{hint}")
    found: dict[str, torch.device] = {}
    for name in names:
        keys = [key for key in asked if key in ("", name) or name.startswith(f"{key}.")]
        if not keys:
            raise ValueError(f"device_map says nothing of {name}: give it a device, or all with the key ''")
        found[name] = _device(asked[max(keys, key=len)], "device_map")
    for kind in sorted({device.type for device in found.values()} & {"cpu", "meta"}):
        if len(set(found.values())) > 1:
            raise ValueError(_no_offloading(f"device_map names {kind} beside other devices"))
    if is_tied and found[_HEAD] != found[_EMBEDDING]:
        raise ValueError(
            f"device_map puts {_HEAD} on {found[_HEAD]} and {_EMBEDDING} on {found[_EMBEDDING]}, but they are one weight "
            "(tie_word_embeddings): give them one device"
        )
    return found


# -- a model on its devices --------------------------------------------------------------------------------------


def stock_names(stock: nn.Module, config: PodConfig) -> dict[str, str]:
    """By the names of our modules those of a stock model's, whatever its text part is called."""
    every = [name for name, _ in stock.named_modules()]
    inside = next(name for name in every if name.endswith("embed_tokens")).removesuffix("embed_tokens")
    found = {name: name.replace("model.", inside, 1) for name in module_names(config)}
    return found | {_HEAD: next(name for name in every if name.endswith(_HEAD))}


def stock_map(
    stock: nn.Module, config: PodConfig, places: Mapping[str, torch.device]
) -> dict[str, torch.device]:
    """A ``device_map`` for the stock model (on ``meta``) from which weights are read; what is left out lies
    on the first device."""
    found = {theirs: places[ours] for ours, theirs in stock_names(stock, config).items()}
    for name, _ in stock.named_parameters():
        if not any(name.startswith(f"{known}.") for known in found):
            found[name] = places[_EMBEDDING]
    return found


def layout_of(model: nn.Module, config: PodConfig) -> dict[str, torch.device] | None:
    """The device of each module of ours, where a model in memory lies on several; None where it lies on one."""
    if len({weight.device for weight in model.parameters()}) == 1:
        return None
    names = stock_names(model, config)
    return {ours: next(model.get_submodule(theirs).parameters()).device for ours, theirs in names.items()}


def dispatch(model: PodForCausalLM, places: Mapping[str, torch.device]) -> PodForCausalLM:
    """Put each module onto its device, with accelerate's hooks that move there what it is given.

    Logits come back to where the ids are. Hooks stand before the embedding, each layer, the norm and the head.
    Those that accelerate has before each of their submodules would find everything in place, and cost
    microseconds each in every decoded token: they go.
    """
    from accelerate import dispatch_model
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module

    for name, device in places.items():
        model.get_submodule(name).to(device)
    model.tie_weights()
    device_map = {name: str(device) for name, device in places.items()}
    skipped = model._skip_keys_device_placement
    dispatch_model(model, device_map, main_device=places[_EMBEDDING], skip_keys=skipped)  # type: ignore[arg-type]
    for name in places:
        for child in model.get_submodule(name).children():
            remove_hook_from_module(child, recurse=True)
    # called without its head too, with ids and a mask from wherever they are
    add_hook_to_module(model.model, AlignDevicesHook(places[_EMBEDDING], skip_keys=skipped))
    return model


def places_of(model: nn.Module) -> list[torch.device]:
    """The device of each decoder layer."""
    layers = model.model.layers  # type: ignore[union-attr]
    return [next(layer.parameters()).device for layer in layers]  # type: ignore[union-attr]


def is_spread(model: Any) -> bool:
    """Whether the model lies on more than one device."""
    return len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1
