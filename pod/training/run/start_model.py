"""The model that a run starts from: its plan and configuration, its rotary embedding for longer contexts, and its values, one weight at
a time, read by rank 0 and handed to all ranks by the engine's bridge.

A model is built without values (`hollow_model`): every weight has its shape and type and shares one number. Adapters and
loss are put around it as around any other; `bridge.place_weights` then fills and divides it weight by weight.
"""

import contextlib
import os
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from pod.modeling.loading import check_fit, empty_model, load_model, made_weight, target_config
from pod.modeling.shipped.config import PodConfig
from pod.modeling.shipped.llama import PodForCausalLM
from pod.modeling.shipped.sharing import SharingPlan
from pod.models import KNOWN_SIZES, PACKAGE, ModelArgs, resolve_model
from pod.training.checkpoint.files import Samples, sample_of

Reader = Callable[[str], Tensor]
"""A weight by its name; it may lie in mapped pages of a file: copy it, never write to it."""

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_IGNORED = "rotary_emb.inv_freq"
"""Old checkpoints hold tables that are computed today."""


def hollow_model(config: PodConfig, dtype: torch.dtype) -> PodForCausalLM:
    """A model whose weights take no memory, in evaluation mode; their values are to be placed before it is used."""
    model = empty_model(config)
    state = {name: torch.zeros((), dtype=dtype).expand(one.shape) for name, one in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    return model.eval()


def weight_reader(path: str, config: PodConfig, dtype: torch.dtype, gguf_file: str | None = None) -> Reader:
    """Reads the weights of a model with `config` from a checkpoint, in `dtype`: one at a time from safetensors files, or all.

    Raises ValueError or OSError for one that cannot be read, or does not fit.
    """
    files = None if gguf_file else weight_files(path)
    if files is None:
        print(f"note: {path} has no safetensors files: one rank loads it whole", flush=True)
        whole = load_model(path, dtype=dtype, gguf_file=gguf_file)
        state, order = whole.state_dict(), whole.config.head_order
        shapes, read = {name: tuple(weight.shape) for name, weight in state.items()}, state.__getitem__
    else:
        shapes, read = files
        order = PreTrainedConfig.get_config_dict(path)[0].get("head_order")
    check_fit(shapes, config, empty_model(config))
    return lambda name: made_weight(name, lambda one: read(one).to(dtype), shapes, config, order)


def weight_files(source: str | os.PathLike) -> tuple[dict[str, tuple[int, ...]], Reader] | None:
    """Shapes by the names in the safetensors files of a folder or hub id, and what reads a weight of them; None without such files."""
    opened = lru_cache(maxsize=1)(partial(safe_open, framework="pt"))  # pages of one file stay mapped
    place: dict[str, str] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for file in _files(source):
        for name in opened(file).keys():  # noqa: SIM118  not a dictionary
            if not name.endswith(_IGNORED):
                place[name], shapes[name] = file, tuple(opened(file).get_slice(name).get_shape())
    return (shapes, lambda name: opened(place[name]).get_tensor(name)) if place else None


def _files(source: str | os.PathLike) -> list[str]:
    for name in (_INDEX, _SINGLE):
        found = None
        with contextlib.suppress(OSError):  # no such file, or no such model
            found = cached_file(source, name)
        if found is not None:
            return (
                list(get_checkpoint_shard_files(str(source), found)[0] or ()) if name == _INDEX else [found]
            )
    return []


class StartWeights:
    """What rank 0 gives `bridge.place_weights`, with samples of every weight that was given, in the model's order.

    Args:
        model: before adapters are put on it.
        opener: opens the checkpoint that has the values, None = the model has them.
    """

    def __init__(self, model: nn.Module, opener: Callable[[], Reader] | None = None):
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        self._opener = opener
        self._reader: Reader | None = None
        self.samples: Samples = {}

    def open(self) -> None:
        """Open the checkpoint; ValueError and OSError as in `weight_reader`."""
        self._reader = self._opener() if self._opener else None

    def close(self) -> None:
        """Let go of the checkpoint."""
        self._reader = None

    def __call__(self, parameter: nn.Parameter) -> Tensor:
        """The values of a weight; those of others (adapters) are their own."""
        name = self._names.get(parameter)
        values = parameter.detach() if name is None or self._reader is None else self._reader(name)
        if name is not None:
            self.samples[name] = sample_of(values)
        return values


_KEYS = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"},
    "yarn": {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor"},
}
_DEFAULTS = {"llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0}}  # Llama 3.1's


def extend(config: PodConfig, rope: dict[str, Any] | None, max_position_embeddings: int | None) -> None:
    """Set what a recipe changes in the configuration of a model that has rotated nothing yet; see ``change_rope``."""
    if rope or max_position_embeddings is not None:
        own = dict(config.rope_parameters), config.max_position_embeddings
        changed = change_rope(*own, rope or {}, max_position_embeddings)
        config.rope_parameters, config.max_position_embeddings = changed


def change_rope(
    rope: dict[str, Any], max_positions: int, changes: dict[str, Any], new_max: int | None = None
) -> tuple[dict[str, Any], int]:
    """RoPE parameters and longest context of a model after `changes`, a higher base or scaled positions.

    Args:
        rope: parameters of the checkpoint, as in transformers (`rope_type`, `rope_theta`, `factor`, …).
        max_positions: the checkpoint's longest context in tokens.
        changes: some of `rope_type`, `rope_theta`, and the keys of that type: `factor`, `low_freq_factor`,
            `high_freq_factor`, `original_max_position_embeddings` (llama3, Llama 3.1's), `beta_fast`, `beta_slow`,
            `attention_factor` (yarn, Peng et al., 2023). A type of the checkpoint's own keeps its other parameters.
        new_max: longest context afterwards; None = original length x factor where positions are scaled anew (the checkpoint's
            length, in proportion, where only the factor of its own scaling changes), else as it was.

    Raises:
        ValueError: keys of another type, a missing factor, a longer context with nothing changed.
    """
    own_type = rope.get("rope_type", "default")
    rope_type = changes.get("rope_type", own_type)
    if rope_type not in _KEYS:
        raise ValueError(f"rope_type = {rope_type!r} is not supported; choose one of {', '.join(_KEYS)}")
    for key in changes.keys() - _KEYS[rope_type] - {"rope_type", "rope_theta"}:
        owners = ", ".join(name for name, keys in _KEYS.items() if key in keys) or "no rope_type"
        raise ValueError(f"rope_{key} belongs to {owners}, and rope_type is {rope_type}: leave it out")
    if new_max is not None and new_max > max_positions and not changes:
        raise ValueError(
            f"max_position_embeddings = {new_max} with the checkpoint's own RoPE, which was trained on {max_positions} "
            "positions: set rope_theta, or rope_type with rope_factor, too"
        )
    kept = rope if rope_type == own_type else {"rope_theta": rope["rope_theta"]}
    changed = {**_DEFAULTS.get(rope_type, {}), **kept, **changes, "rope_type": rope_type}
    if rope_type == "default":
        return changed, new_max or max_positions
    # linear scaling keeps no record of the length before it
    trained = rope.get("original_max_position_embeddings") or round(max_positions / rope.get("factor", 1.0))
    original = changed.get("original_max_position_embeddings") or trained
    if rope_type != "linear":
        changed["original_max_position_embeddings"] = original
    if "factor" not in changed:
        if new_max is None:
            needs = f"rope_factor, or the max_position_embeddings to reach from {original}"
            raise ValueError(f"rope_type = {rope_type} needs {needs}")
        changed["factor"] = new_max / original
    if changed["factor"] < 1:
        raise ValueError(f"rope_factor is {changed['factor']:g}, allowed are 1 and more")
    scaled = changes.keys() & {"rope_type", "factor", "original_max_position_embeddings"}
    if new_max is not None or not scaled:
        return changed, new_max or max_positions
    if rope_type == own_type and "original_max_position_embeddings" not in changes:
        return changed, round(max_positions * changed["factor"] / rope["factor"])
    return changed, round(original * changed["factor"])


Plan = SharingPlan | str | Path | None


def hollow_start_model(
    model_args: ModelArgs, plan: Plan, dtype: str = "float32"
) -> tuple[PodForCausalLM, StartWeights]:
    """The model that training starts from without its values, and what has them once it is opened.

    The master weights of a run in bfloat16 are made from bfloat16. Plan and errors as in `start_config`.
    """
    path, source = resolve_model(model_args.path), source_config(model_args)[0]
    config = start_config(model_args, plan, source)
    kind = config.dtype = getattr(torch, dtype)
    model = hollow_model(config, kind)
    with contextlib.suppress(OSError):  # most checkpoints have none of their own
        model.generation_config = GenerationConfig.from_pretrained(path)
    # means of weights are taken before they are rounded
    read_as = torch.float32 if config.layout == "cla" else kind
    return model, StartWeights(model, partial(weight_reader, path, config, read_as, model_args.gguf_file))


def load_start_model(model_args: ModelArgs, plan: Plan, dtype: str = "float32") -> PodForCausalLM:
    """The start model with its values, whole in host memory; arguments and errors as in `hollow_start_model`."""
    model, weights = hollow_start_model(model_args, plan, dtype)
    weights.open()
    for parameter in model.parameters():
        parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype).copy_(weights(parameter))
    return model


def start_config(model_args: ModelArgs, plan: Plan, source: Any) -> PodConfig:
    """Configuration of the start model (`source`: the checkpoint's), with the layout, plan, windows and RoPE of the recipe.

    Args:
        plan: a SharingPlan or the path of one; None = the layout's own (`cla`), the checkpoint's, or none.

    Raises:
        ValueError: layout=pod without a plan; whatever does not fit the checkpoint.
    """
    layout = model_args.layout
    if layout == "cla" and plan is None:
        plan = SharingPlan.cla(source.num_hidden_layers, source.num_key_value_heads, model_args.cla_factor)
    if layout in ("dense", "window"):
        plan = None
    same = ("num_sink_tokens", "num_recent_tokens", "attention_backend")
    changes = {name: getattr(model_args, name) for name in same}
    config = target_config(source, plan=plan, layout=None if layout == "auto" else layout, **changes)
    extend(config, model_args.rope, model_args.max_position_embeddings)
    if layout == "pod" and config.sharing_plan.is_dense:
        raise ValueError(
            "model.layout is pod, and there is no plan but that in which every head leads: run `pod explore`, set "
            "model.plan, or use layout=dense"
        )
    return config


def model_config(
    model_args: ModelArgs, output_dir: Path | str, target_saving: float | None = None
) -> tuple[PodConfig, SharingPlan]:
    """Configuration and plan of the model as it will be trained, without its weights.

    Args:
        target_saving: of a `stand_in_plan` for a missing plan under layout=pod; None = a missing plan is an error.

    Raises:
        ValueError: an unknown model, one that does not fit plan, layout or RoPE; no plan.
    """
    source, _ = source_config(model_args)
    file = model_args.plan_file(output_dir)
    plan = SharingPlan.load(file) if file else None
    own = source.model_type == "pod" and not source.sharing_plan.is_dense
    if model_args.layout == "pod" and plan is None and not own and target_saving is not None:
        plan = stand_in_plan(source.num_hidden_layers, source.num_key_value_heads, target_saving)
    config = start_config(model_args, plan, source)
    return config, plan or config.sharing_plan


def stand_in_plan(num_layers: int, num_key_value_heads: int, saving: float) -> SharingPlan:
    """A plan for estimates that saves about this share of the bytes of distant tokens' keys and values, with at most one block of
    all layers: blocks of nearly equal size, the same for all heads."""
    blocks = max(1, num_layers - round(2 * saving * num_layers))
    starts = [number * num_layers // blocks for number in range(blocks)]
    leads = [max(start for start in starts if start <= layer) for layer in range(num_layers)]
    provenance = {"stand_in": True, "target_saving": saving}
    return SharingPlan(tuple((lead,) * num_key_value_heads for lead in leads), provenance)


def source_config(model_args: ModelArgs) -> tuple[Any, str | None]:
    """The checkpoint's configuration, and what to tell a user about where it came from (None = from the checkpoint itself).

    A model that is not on this machine is looked up among the models that recipes name, so that estimates need no network.

    Raises:
        ValueError: neither a model on this machine nor a known one, and the hub cannot be asked.
    """
    name = model_args.path
    if name.startswith(PACKAGE) and name in KNOWN_SIZES:
        return _known_config(name), None  # of one version only; reading it would convert the weights first
    try:
        return _read_config(model_args, local_files_only=True), None
    except (OSError, ValueError) as absent:
        if name in KNOWN_SIZES:
            note = f"{name} is not on this machine: its sizes are those that pod/models.py knows"
            return _known_config(name), note
        if isinstance(absent, ValueError):
            raise
    try:
        return _read_config(model_args, local_files_only=False), None
    except OSError as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"the configuration of model.path = {name} cannot be read here ({reason}): give a folder, or a hub id that "
            "this machine can reach"
        ) from None


def _known_config(name: str) -> Any:
    sizes = dict(KNOWN_SIZES[name])
    return AutoConfig.for_model(sizes.pop("model_type"), **sizes)


def _read_config(model_args: ModelArgs, local_files_only: bool) -> Any:
    path = resolve_model(model_args.path)
    options: dict[str, Any] = {"local_files_only": local_files_only}
    if model_args.gguf_file is not None:
        return AutoConfig.from_pretrained(path, gguf_file=model_args.gguf_file, **options)
    kind = PreTrainedConfig.get_config_dict(path, **options)[0].get("model_type")
    reader = PodConfig if kind == PodConfig.model_type else AutoConfig
    return reader.from_pretrained(path, **options)
