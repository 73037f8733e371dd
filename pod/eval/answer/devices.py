"""On which devices the models of an evaluation lie: those of this rank, or GPUs that `--dry-run` assumes."""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from pod.units import GIB

if TYPE_CHECKING:
    import torch

    from pod.modeling.model.config import PodConfig

SPREADS = ("balanced", "sequential")
"""Values of `eval.device` beside `auto` and a device.

They say how to spread a model's layers over all devices of this rank.
"""


def rank_devices(asked: str, setting: str = "eval.device") -> "list[torch.device]":
    """The devices of this rank. The first one is where tokens come in.

    Ranks of a machine share its GPUs. With more GPUs than ranks, each rank has neighbouring ones of its own.

    Args:
        asked: the value of the setting.
        setting: its name, for the message of an error.

    Raises:
        ValueError: when it is neither `auto`, nor one of `SPREADS`, nor a device.
    """
    import torch

    from pod.modeling.placement import share_of_rank

    if asked in SPREADS:
        kind = torch.accelerator.current_accelerator(check_available=True)
        count = 0 if kind is None else torch.accelerator.device_count()
    elif asked == "auto":
        kind = torch.device("cuda")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    else:
        try:
            return [torch.device(asked)]
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise ValueError(
                f"{setting} is {asked!r}: use auto, {', '.join(SPREADS)} or a device, as cuda:1 ({reason})"
            ) from None
    if kind is None or not count:
        return [torch.device("cpu")]
    return [torch.device(kind.type, number) for number in share_of_rank(count)]


def spread_of(asked: str) -> str:
    """How to spread layers over several devices: the value of a setting, or auto where it names a device."""
    return asked if asked in SPREADS else "auto"


def check_available(devices: "Sequence[torch.device]", setting: str = "eval.device") -> None:
    """Refuse devices that this machine does not have.

    Args:
        setting: the name of the setting that asks for them.

    Raises:
        ValueError: it names the first such device, and what there is.
    """
    from pod.modeling.placement import missing_device

    if (missing := missing_device(devices)) is not None:
        raise ValueError(f"{setting} is {missing}: use auto or cpu")


class Gpus(NamedTuple):
    """GPUs that `--dry-run` assumes: their number, and the GiB of each."""

    count: int
    gib: float

    @classmethod
    def of(cls, text: str) -> "Gpus":
        """The GPUs that a text such as `8x24` names.

        Raises:
            ValueError: for any other text.
        """
        parts = re.fullmatch(r"([1-9]\d*)x(\d+(?:\.\d+)?)", text)
        if parts is None or not float(parts[2]):
            raise ValueError(f"{text!r} is not allowed: give number x GiB, as 8x24 for 8 GPUs of 24 GiB")
        return cls(int(parts[1]), float(parts[2]))


def room_on(devices: "Sequence[torch.device]") -> "dict[torch.device, float]":
    """Bytes of each device that weights and caches may take."""
    from pod.modeling.placement import ROOM, free_bytes

    return {device: free_bytes(device) * (1 - ROOM) for device in devices}


class Load(NamedTuple):
    """What a model's own cache will hold: rows of a batch, and tokens of the longest sequence."""

    rows: int
    tokens: int


def places_for(
    config: "PodConfig",
    bytes_per_number: int,
    asked: str,
    max_memory: "Mapping[torch.device, float]",
    load: Load | None,
) -> "dict[str, torch.device]":
    """The device of each part of a model.

    Weights and cache are placed together where both fit, else by the weights alone.

    Args:
        asked, max_memory: as `pod.modeling.placement.place` takes them.
        load: None = not known.
    Raises:
        ValueError: for weights that do not fit.
    """
    from pod.modeling.placement import place

    if load is not None:
        beside = _bytes_beside(config, bytes_per_number, load)
        try:
            return place(config, bytes_per_number, asked, max_memory, beside)
        except ValueError:
            asked = "balanced" if asked == "auto" else asked  # leaves caches as much room as there is
    return place(config, bytes_per_number, asked, max_memory)


def fits_whole(
    config: "PodConfig",
    bytes_per_number: int,
    max_memory: "Mapping[torch.device, float]",
    load: Load | None,
) -> bool:
    """Whether the weights of a model fit these devices, together with its cache.

    Args:
        max_memory: bytes of each device that both may take.
        load: what the cache will hold. None = not known: the weights alone must fit.
    """
    from pod.modeling.placement import place

    beside = None if load is None else _bytes_beside(config, bytes_per_number, load)
    try:
        place(config, bytes_per_number, "auto", max_memory, beside)
    except ValueError:
        return False
    return True


def _bytes_beside(config: "PodConfig", bytes_per_number: int, load: Load) -> list[int]:
    """Bytes of each layer's keys and values, for all rows."""
    return [load.rows * size for size in cache_bytes(config, load.tokens, bytes_per_number)]


def layout_lines(
    title: str, config: "PodConfig", bytes_per_number: int, gpus: Gpus, load: Load, asked: str
) -> list[str]:
    """How a model lies on GPUs, from its configuration alone.

    The lines give the layers on each GPU, and the bytes of weights and of the model's own cache there.

    Args:
        asked: `auto`, `balanced` or `sequential`.
    """
    import torch

    from pod.modeling.placement import ROOM, heads_that_cross, parts_of

    weights = parts_of(config, bytes_per_number).sizes
    limits = {torch.device("cuda", number): gpus.gib * GIB * (1 - ROOM) for number in range(gpus.count)}
    head = f"{title}: {sum(weights) / GIB:.1f} GiB of weights"
    try:
        places = places_for(config, bytes_per_number, asked, limits, load)
    except ValueError:
        room = f"{gpus.count} x {gpus.gib:g} GiB with {ROOM:.0%} of each left free"
        return [f"{head} do not fit {room}: use more GPUs"]
    numbers = [device.index for device in list(places.values())[:-1]]
    row = [0, *cache_bytes(config, load.tokens, bytes_per_number), 0]
    crossing = heads_that_cross(config)
    lines, most = [], []
    for number in dict.fromkeys(numbers):
        own = [part for part, device in enumerate(numbers) if device == number]
        layers = [part - 1 for part in own if 0 < part < len(numbers) - 1]
        held = sum(weights[part] for part in own) / GIB
        each = sum(row[part] for part in own) / GIB
        most.append(int((gpus.gib * (1 - ROOM) - held) / each) if each else load.rows)
        name = f"layers {layers[0]}-{layers[-1]}" if layers else "no layer"
        line = f"  cuda:{number}  {name:<14} {held:6.1f} GiB of weights {load.rows * each:7.1f} GiB of cache"
        if layers and crossing[layers[0]]:
            line += f", {crossing[layers[0]]} KV heads follow leads before it"
        lines.append(line)
    rows, fit, do_not = ("row", "fits", "does not") if load.rows == 1 else ("rows", "fit", "do not")
    said = f"{load.rows} {rows} of {load.tokens:,} tokens"
    if min(most) >= load.rows:
        said += f" {fit} beside them"
    else:
        said += f" {do_not} fit beside them, {min(most)} would: lower eval.batch_size, or use more GPUs"
    return [f"{head} on {len(set(numbers))} of {gpus.count} GPUs; {said}", *lines]


def cache_bytes(config: "PodConfig", tokens: int, bytes_per_number: int) -> list[int]:
    """Bytes of each layer's keys and values, as the model's own cache holds them for one row of `tokens`."""
    from pod.modeling.model.packed_bytes import bits_per_number, mean_size, window_size
    from pod.modeling.model.sharing import roles_of

    plan = config.sharing_plan
    found = []
    number = config.head_dim * bytes_per_number
    for layer in range(config.num_hidden_layers):
        roles = roles_of(plan.lead, layer)
        sinks, recent = (size or 0 for size in config.windows_of(layer))
        bits = plan.bits[layer] if plan.bits else 16
        key_bits, value_bits = bits_per_number(bits, config.head_dim)
        key = number * mean_size(key_bits, plan.residual, tokens)
        value = number * mean_size(value_bits, plan.residual, tokens)
        followers = 0 if config.layout == "cla" else len(roles.followers)
        whole = len(roles.leads) * (key + value) + followers * value
        held = min(tokens, sinks + recent)
        near_keys = window_size(held, min(held, sinks), plan.residual, key_bits)
        near_values = window_size(held, min(held, sinks), plan.residual, value_bits)
        near = (followers + len(roles.windows)) * near_keys + len(roles.windows) * near_values
        found.append(round(whole * tokens + near * number))
    return found


def longest_of(config: "PodConfig", args: Any, known: "Mapping[str, int]") -> int:
    """Tokens of the longest sequence, from the recipe's settings alone.

    They tell it for perplexity and passkey. For every task that is neither of them nor in `known` it is
    `eval.max_length`, else the most that the model reads.

    Args:
        args: the recipe's section `eval`.
        known: by name, the tokens of tasks that have been made.
    """
    known = {
        "perplexity": args.text_length,
        "passkey": max(args.passkey_lengths) + args.passkey_new_tokens,
        **known,
    }
    limit = args.max_length or config.max_position_embeddings
    return max(known.get(task, limit) for task in args.tasks) if args.tasks else limit
