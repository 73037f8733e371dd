"""One model on several devices: which layer goes where, and the hooks of accelerate between devices.

Layers stay in order: a device has consecutive layers, and hidden states cross each border between two devices
once. A border inside a block of a sharing plan costs more: the tensors that the block's lead leaves for its
followers (queries and keys of a prompt, logits of a decoded token) cross it too. So, among layouts that fill
their devices about equally, the one with the fewest KV heads that cross a border is taken.
"""

import difflib
import gc
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import nn

from pod.modeling.model.config import PodConfig
from pod.modeling.model.llama import PodForCausalLM
from pod.modeling.model.sharing import is_followed

STYLES = ("auto", "balanced", "sequential")
"""Values of ``device_map`` that name no devices; see ``load_model``."""
ROOM_OF_AUTO = 0.3
"""Share of each device's free memory that ``auto`` leaves to cache and activations, if devices suffice."""
ROOM = 0.1
"""The least share of each device's free memory that is left to them, if ``max_memory`` is not given."""
UNEVEN = 1.25
"""How much fuller than in the most even layout the fullest device may get, to let fewer KV heads cross."""

_EMBEDDING, _NORM, _HEAD = "model.embed_tokens", "model.norm", "lm_head"
_IGNORED = frozenset({"model.rotary_emb"})
"""Modules without weights that a ``device_map`` for a stock model names, but that our model does not have."""


class ModelParts(NamedTuple):
    """The parts of a model, in the order in which a token passes them, each of which is on one device.

    They are the embedding, the layers, and the end (the norm, and the head unless it is tied).

    Attributes:
        sizes: bytes of each part's weights, and of its layer's keys and values if they are counted.
        crossing: for each part, the number of KV heads whose lead is before the part and that have followers
            in it or after it.
    """

    sizes: list[int]
    crossing: list[int]


class Unplaced(ValueError):
    """The parts of a model do not fit into the memory of the devices."""


def parts_of(config: PodConfig, bytes_per_number: int, beside: Sequence[int] | None = None) -> ModelParts:
    """The parts of a model of this configuration, computed from shapes alone.

    Args:
        config: the configuration of the model.
        bytes_per_number: bytes of one number in a weight.
        beside: bytes of each layer's keys and values; None = they are not counted.
    """
    with torch.device("meta"):
        model = PodForCausalLM(config)
    layers = [_numbers(layer) for layer in model.model.layers]
    first = _numbers(model.model.embed_tokens)
    last = _numbers(model.model.norm)
    if not config.tie_word_embeddings:
        last += _numbers(model.lm_head)
    sizes = [numbers * bytes_per_number for numbers in (first, *layers, last)]
    for layer, more in enumerate(beside or ()):
        sizes[1 + layer] += more
    return ModelParts(sizes, [0, *heads_that_cross(config), 0])


def _numbers(module: nn.Module) -> int:
    """How many numbers the weights of a module have."""
    return sum(weight.numel() for weight in module.parameters())


def heads_that_cross(config: PodConfig) -> list[int]:
    """For each layer, how many KV heads have their lead below it and followers in it or above it."""
    lead = config.sharing_plan.lead
    if config.layout == "window":
        return [0] * len(lead)
    return [
        sum(is_followed(lead, layer - 1, head) for head in range(len(lead[0]))) if layer else 0
        for layer in range(len(lead))
    ]


def lay_out(parts: ModelParts, capacities: Sequence[float], style: str = "balanced") -> list[int]:
    """Choose the device of each part, as an index into ``capacities``. Each device gets consecutive parts.

    Args:
        parts: the parts.
        capacities: bytes that each device can take; infinite = any number of bytes.
        style: ``sequential`` fills one device after the other. ``balanced`` fills all by the same share, but
            prefers a less even layout if fewer heads cross a border then (up to ``UNEVEN``).

    Raises:
        Unplaced: the parts do not fit the devices.
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


def _in_sequence(parts: ModelParts, capacities: Sequence[float]) -> list[int]:
    """``lay_out`` with the style ``sequential``."""
    found, device, held = [], 0, 0
    for size in parts.sizes:
        while device < len(capacities) and held + size > capacities[device]:
            device, held = device + 1, 0
        if device == len(capacities):
            raise Unplaced(_does_not_fit(parts, capacities))
        held += size
        found.append(device)
    return found


def _does_not_fit(parts: ModelParts, capacities: Sequence[float]) -> str:
    """The text of an error that the parts do not fit the devices."""
    room = ", ".join(f"{one / 1e9:.4g}" for one in capacities)
    return (
        f"{sum(parts.sizes) / 1e9:.4g} GB in parts of up to {max(parts.sizes) / 1e9:.4g} GB "
        f"do not fit devices that take {room} GB"
    )


class _Layout(NamedTuple):
    """A layout of the first parts of a model.

    Attributes:
        crossing: how many KV heads cross a border, summed over the borders so far.
        fullest: bytes on the fullest device, as a share of its capacity.
        devices: the index of each part's device.
    """

    crossing: int
    fullest: float
    devices: list[int]


def _best(parts: ModelParts, capacities: Sequence[float], limit: float) -> list[int] | None:
    """The layout with the fewest heads that cross a border. None = no layout is within the limit.

    Of several such layouts, it is the one whose fullest device is the least full. It is found by dynamic
    programming: ``best[n]`` is the best layout of the first ``n`` parts on the devices considered so far.

    Args:
        limit: the largest share of its capacity that a device may be filled to.
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
                crossing = known.crossing + parts.crossing[start]
                fullest = max(known.fullest, filling)
                held = following[stop]
                if held is None or (crossing, fullest) < held[:2]:
                    devices = [*known.devices, *[device] * (stop - start)]
                    following[stop] = _Layout(crossing, fullest, devices)
        best = following
    found = best[count]
    return None if found is None else found.devices


def _fillings(parts: ModelParts, capacities: Sequence[float], found: Sequence[int]) -> list[float]:
    """Bytes on each device as a share of its capacity, in the layout ``found``."""
    held = [0] * len(capacities)
    for size, device in zip(parts.sizes, found, strict=True):
        held[device] += size
    return [size / capacity if size else 0.0 for size, capacity in zip(held, capacities, strict=True)]


# -- which devices -------------------------------------------------------------------------------------------


def place(
    config: PodConfig,
    bytes_per_number: int,
    asked: str | Mapping[str, Any],
    max_memory: Mapping[Any, Any] | None,
    beside: Sequence[int] | None = None,
) -> dict[str, torch.device]:
    """Choose the device of every part of a model.

    Args:
        config: the configuration of the model.
        bytes_per_number: bytes of one number in a weight.
        asked: one of ``STYLES``, or devices by module, as ``device_map`` of transformers.
        max_memory: how much weights may take on each device: bytes, or a text such as ``"70GiB"``. None = the
            free memory of every accelerator, of which a share is left free (``ROOM_OF_AUTO``, ``ROOM``).
        beside: bytes of each layer's keys and values, which then count like weights; None = not known.

    Returns:
        Devices by the names of ``module_names``.

    Raises:
        ValueError: a module has no device or would be divided, weights would be offloaded, or the model does
            not fit.
    """
    names = module_names(config)
    if isinstance(asked, Mapping):
        return _by_map(names, asked, config.tie_word_embeddings)
    free = capacities(max_memory)
    style = "sequential" if asked == "sequential" else "balanced"
    parts, refusal = parts_of(config, bytes_per_number, beside), None
    least = 0.0 if max_memory is not None else ROOM
    room_of_auto = ROOM_OF_AUTO if max_memory is None and beside is None else least
    attempts = _attempts(asked, len(free), least, room_of_auto)
    if len(free) == 1 and max_memory is None:
        attempts = [(1, 0.0)]  # there is no other device: all of its free memory may be taken
    for count, room in attempts:
        devices = list(free)[:count]
        try:
            numbers = lay_out(parts, [free[one] * (1 - room) for one in devices], style)
        except Unplaced as error:
            refusal = error
            continue
        return named(names, [devices[number] for number in numbers], config.tie_word_embeddings)
    raise ValueError(
        f"device_map = {asked!r}: {refusal}: use more devices, raise max_memory, or load a smaller dtype; "
        "nothing is offloaded to host memory or disk"
    )


def _attempts(asked: str, count: int, least: float, room: float) -> list[tuple[int, float]]:
    """Pairs to try in turn: how many devices to use, and the share of their memory to leave free.

    ``auto`` uses as few devices as it can with the share ``room``. If that fails, and for other styles, all
    ``count`` devices are used with the share ``least``.
    """
    few = [(number, room) for number in range(1, count + 1)] if asked == "auto" else []
    return [*few, (count, least)]


def module_names(config: PodConfig) -> list[str]:
    """The names of the modules that are each on one device: embedding, layers, norm, head."""
    layers = [f"model.layers.{layer}" for layer in range(config.num_hidden_layers)]
    return [_EMBEDDING, *layers, _NORM, _HEAD]


def named(names: Sequence[str], devices: Sequence[torch.device], is_tied: bool) -> dict[str, torch.device]:
    """The device of each module by name, from the devices of the parts.

    A head that is tied to the embedding is on its device, another one on the device of the norm.

    Args:
        names: from ``module_names``.
        devices: the device of each part; see ``ModelParts``.
        is_tied: whether the head is tied.
    """
    return dict(zip(names, [*devices, devices[0] if is_tied else devices[-1]], strict=True))


def capacities(max_memory: Mapping[Any, Any] | None) -> dict[torch.device, float]:
    """How many bytes weights may take on each device, in the order of the devices.

    They are those of ``max_memory``. None = the free bytes of every accelerator, or the CPU without a limit.

    Raises:
        ValueError: ``max_memory`` names something that is no device or no size.
    """
    if max_memory is not None:
        return _given_capacities(max_memory)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return {torch.device("cpu"): math.inf}
    devices = [torch.device(accelerator.type, number) for number in range(torch.accelerator.device_count())]
    return {device: free_bytes(device) for device in devices}


def missing_device(devices: Iterable[torch.device]) -> str | None:
    """Which of these devices this machine does not have, as text for a message. None = it has all.

    Returns:
        For example ``"cuda:1, but this machine has no GPU"``.
    """
    kind = torch.accelerator.current_accelerator(check_available=True)
    count = 0 if kind is None else torch.accelerator.device_count()
    for device in devices:
        is_there = kind is not None and device.type == kind.type and (device.index or 0) < count
        if device.type not in ("cpu", "meta") and not is_there:
            there = "no GPU" if kind is None else f"{count} devices {kind.type}"
            return f"{device}, but this machine has {there}"
    return None


def free_bytes(device: torch.device) -> float:
    """Bytes that are free on a CUDA device; infinite for other devices."""
    if device.type != "cuda":
        return math.inf
    return float(torch.cuda.mem_get_info(device)[0])


def free_unused(device: torch.device) -> None:
    """Give back memory that nobody holds any more; on a GPU, also what its allocator keeps.

    Garbage is collected first, because modules, engines and caches refer to each other.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def share_of_rank(count: int) -> range:
    """The indices of this rank's GPUs among the ``count`` GPUs of its machine.

    With more GPUs than ranks, each rank has several consecutive GPUs of its own.
    """
    rank = int(os.environ.get("LOCAL_RANK", 0))
    ranks = os.environ.get("WORLD_SIZE", 1)
    each = max(1, count // int(os.environ.get("LOCAL_WORLD_SIZE", ranks)))
    first = rank * each % max(1, count)  # with more ranks than GPUs, ranks share a GPU
    return range(first, first + each)


def _given_capacities(max_memory: Mapping[Any, Any]) -> dict[torch.device, float]:
    """``max_memory`` with devices as keys and bytes as values, in the order of the devices."""
    if not isinstance(max_memory, Mapping) or not max_memory:
        raise ValueError(
            f"max_memory = {max_memory!r} must be a mapping of devices and sizes, for example "
            "{0: '70GiB', 1: '70GiB'}"
        )
    found: dict[torch.device, float] = {}
    for name, size in max_memory.items():
        device = _device(name, "max_memory")
        if device.type == "cpu" and len(max_memory) > 1:
            raise ValueError(no_offloading("max_memory names cpu beside other devices"))
        if (num_bytes := _bytes_of(size)) is None:
            raise ValueError(f"max_memory[{name!r}] = {size!r} is no size: use bytes, or a text as '70GiB'")
        found[device] = num_bytes
    return dict(sorted(found.items(), key=lambda one: (one[0].type, one[0].index or 0)))


def _bytes_of(size: Any) -> float | None:
    """The bytes of a size, which is a number or a text such as ``"70GiB"``. None = it is no size above 0."""
    from accelerate.utils import convert_file_size_to_int

    if isinstance(size, str):
        try:
            size = convert_file_size_to_int(size)
        except ValueError:
            return None
    if isinstance(size, bool) or not isinstance(size, (int, float)):
        return None
    return float(size) if size > 0 else None


def as_device(asked: Any) -> torch.device:
    """A device by its name, or by its number among the accelerators: of CUDA where the machine has none.

    Raises:
        RuntimeError, TypeError: it is no device.
    """
    if not isinstance(asked, int):
        return torch.device(asked)
    accelerator = torch.accelerator.current_accelerator()
    return torch.device("cuda" if accelerator is None else accelerator.type, asked)


def _device(asked: Any, what: str) -> torch.device:
    """The device ``asked``, a name or index. ``ValueError`` if it is no device, or ``disk``.

    Args:
        what: the argument that names the device, for messages.
    """
    if asked == "disk":
        raise ValueError(no_offloading(f"{what} names disk"))
    try:
        device = as_device(asked)
    except (RuntimeError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{what} names {asked!r}, which is no device ({reason})") from None
    return (
        torch.device(device.type, 0)
        if device.index is None and device.type not in ("cpu", "meta")
        else device
    )


def no_offloading(what: str) -> str:
    """The text of an error that ``what`` would offload weights."""
    return (
        f"{what}: nothing is offloaded to host memory or disk, where every pass would wait for weights; "
        "use more devices, or a smaller dtype"
    )


def _by_map(names: Sequence[str], asked: Mapping[str, Any], is_tied: bool) -> dict[str, torch.device]:
    """The device of each module, from a map whose keys are names of modules or of modules around them.

    Raises:
        ValueError: a module has no device or would be divided, a key is unknown, weights would be offloaded,
            or a tied head and the embedding would be on different devices.
    """
    for key in asked:
        if not isinstance(key, str):
            raise ValueError(f"device_map names {key!r}: its keys are names of modules, as '{names[1]}'")
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
            raise ValueError(no_offloading(f"device_map names {kind} beside other devices"))
    if is_tied and found[_HEAD] != found[_EMBEDDING]:
        raise ValueError(
            f"device_map puts {_HEAD} on {found[_HEAD]} and {_EMBEDDING} on {found[_EMBEDDING]}, "
            "but they are one weight (tie_word_embeddings): give them one device"
        )
    return found


# -- a model on its devices ----------------------------------------------------------------------------------


def stock_names(stock: nn.Module, config: PodConfig) -> dict[str, str]:
    """For each of our ``module_names``, its name in a stock model, whatever the text part is called there."""
    every = [name for name, _ in stock.named_modules()]
    inside = next(name for name in every if name.endswith("embed_tokens")).removesuffix("embed_tokens")
    found = {name: name.replace("model.", inside, 1) for name in module_names(config)}
    return found | {_HEAD: next(name for name in every if name.endswith(_HEAD))}


def stock_map(
    stock: nn.Module, config: PodConfig, places: Mapping[str, torch.device]
) -> dict[str, torch.device]:
    """A ``device_map`` for the stock model (on ``meta``) from which weights are read.

    Weights and buffers outside the modules in ``places`` go to the device of the embedding, the first one.
    """
    found = {theirs: places[ours] for ours, theirs in stock_names(stock, config).items()}
    for name, _ in stock.named_parameters():
        if not any(name.startswith(f"{known}.") for known in found):
            found[name] = places[_EMBEDDING]
    for name, _ in stock.named_buffers():
        if not any(name.startswith(f"{known}.") for known in found):
            found[name.rpartition(".")[0]] = places[_EMBEDDING]  # a map names modules, not buffers
    return found


def layout_of(model: nn.Module, config: PodConfig) -> dict[str, torch.device] | None:
    """The device of each of our modules, if a model in memory is on several devices. None = it is on one."""
    if len({weight.device for weight in model.parameters()}) == 1:
        return None
    names = stock_names(model, config)
    return {ours: next(model.get_submodule(theirs).parameters()).device for ours, theirs in names.items()}


def dispatch(model: PodForCausalLM, places: Mapping[str, torch.device]) -> PodForCausalLM:
    """Move each module to its device, and add accelerate's hooks that move its inputs there.

    Logits are moved back to the device of the ids. The embedding, each layer, the norm and the head have
    hooks. Accelerate also adds hooks to each of their submodules. These are removed, because inputs are on
    the right device there, and each hook would cost microseconds in every decoded token.

    Args:
        model: the model, which is changed in place and returned.
        places: the device of each of ``module_names``.
    """
    from accelerate import dispatch_model
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module

    for name, device in places.items():
        model.get_submodule(name).to(device)
    model.tie_weights()
    device_map = {name: str(device) for name, device in places.items()}
    skipped = model._skip_keys_device_placement
    first = places[_EMBEDDING]
    dispatch_model(model, device_map, main_device=first, skip_keys=skipped)  # type: ignore[arg-type]
    for name in places:
        for child in model.get_submodule(name).children():
            remove_hook_from_module(child, recurse=True)
    # model.model is also called alone, with ids and a mask that may be on any device
    add_hook_to_module(model.model, AlignDevicesHook(first, skip_keys=skipped))
    return model


def places_of(model: nn.Module) -> list[torch.device]:
    """The device of each decoder layer."""
    layers = model.model.layers  # type: ignore[union-attr]
    return [next(layer.parameters()).device for layer in layers]  # type: ignore[union-attr]


def is_spread(model: Any) -> bool:
    """Whether ``dispatch`` (or accelerate) put the model on more than one device."""
    return len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1
