"""The model that a run starts from: its plan, its configuration without its weights, and the model itself."""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from pod.modeling.loading import target_config
from pod.modeling.shipped.config import PodConfig
from pod.modeling.shipped.llama import PodForCausalLM
from pod.modeling.shipped.sharing import SharingPlan
from pod.models import KNOWN_SIZES, PACKAGE, ModelArgs, resolve_model
from pod.training.run.start_weights import Reader, hollow_model, weight_reader

Plan = SharingPlan | str | Path | None


def hollow_start_model(
    model_args: ModelArgs, plan: Plan, dtype: str = "float32"
) -> tuple[PodForCausalLM, Callable[[], Reader]]:
    """The model that training starts from without its values, and what opens its checkpoint to read them.

    Args:
        plan: see `start_config`.
        dtype: of the weights. The master weights of a run in bfloat16 are made from bfloat16.

    Raises:
        ValueError: see `start_config`.
    """
    path, source = resolve_model(model_args.path), source_config(model_args)[0]
    config = start_config(model_args, plan, source)
    kind = config.dtype = getattr(torch, dtype)
    model = hollow_model(config, kind)
    with contextlib.suppress(OSError):  # most checkpoints have none of their own
        model.generation_config = GenerationConfig.from_pretrained(path)
    # means of weights are taken before they are rounded
    read_as = torch.float32 if config.layout == "cla" else kind
    return model, partial(weight_reader, path, config, read_as, model_args.gguf_file)


def load_start_model(model_args: ModelArgs, plan: Plan, dtype: str = "float32") -> PodForCausalLM:
    """The start model with its values, whole in host memory; arguments and errors as in `hollow_start_model`."""
    model, open_checkpoint = hollow_start_model(model_args, plan, dtype)
    read = open_checkpoint()
    for name, parameter in model.named_parameters():
        parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype).copy_(read(name))
    return model


_NO_PLAN = (
    "model.layout is pod, and there is no plan but that in which every head leads: run launch/explore.py, set "
    "model.plan, or use layout=dense"
)


def start_config(model_args: ModelArgs, plan: Plan, source: Any) -> PodConfig:
    """Configuration of the start model, with the layout, plan, windows and RoPE of the recipe.

    Args:
        plan: a SharingPlan or the path of one; None = the layout's own (`cla`), the checkpoint's, or none.
        source: the checkpoint's configuration.

    Raises:
        ValueError: layout=pod without a plan; whatever does not fit the checkpoint.
    """
    layout = model_args.layout
    if layout == "cla" and plan is None:
        plan = SharingPlan.cla(source.num_hidden_layers, source.num_key_value_heads, model_args.cla_factor)
    config = target_config(
        source,
        plan=None if layout in ("dense", "window") else plan,
        layout=None if layout == "auto" else layout,
        num_sink_tokens=model_args.num_sink_tokens,
        num_recent_tokens=model_args.num_recent_tokens,
        attention_backend=model_args.attention_backend,
        rope=model_args.rope,
        max_position_embeddings=model_args.max_position_embeddings,
    )
    if layout == "pod" and config.sharing_plan.is_dense:
        raise ValueError(_NO_PLAN)
    return config


def model_config(
    model_args: ModelArgs, output_dir: Path | str, target_saving: float | None = None
) -> tuple[PodConfig, SharingPlan]:
    """Configuration and plan of the model as it will be trained, without its weights.

    Args:
        target_saving: what a stand-in for a missing plan saves under layout=pod, see `stand_in_plan`; its provenance says
            `stand_in`. None = a missing plan is an error.

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
    """A plan for estimates that saves about this share of the bytes of distant tokens' keys and values.

    Blocks of nearly equal size, the same for all heads; above what they reach, windows spread evenly among leads.

    Args:
        saving: from 0 to 1.
    """
    provenance = {"stand_in": True, "target_saving": saving}
    blocks = num_layers - round(2 * saving * num_layers)
    if blocks < 1:
        layers, heads = range(num_layers), range(num_key_value_heads)
        pairs = num_layers * num_key_value_heads
        windows = round(saving * pairs)
        leads = [
            [
                head
                for head in heads
                if (layer * num_key_value_heads + head) * windows % pairs < pairs - windows
            ]
            for layer in layers
        ]
        return replace(SharingPlan.of_leads(leads, num_key_value_heads), provenance=provenance)
    starts = [number * num_layers // blocks for number in range(blocks)]
    leads = [max(start for start in starts if start <= layer) for layer in range(num_layers)]
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
    except (OSError, ValueError) as error:
        absent = error
    if name in KNOWN_SIZES:
        return _known_config(
            name
        ), f"{name} is not on this machine: its sizes are those that pod/models.py knows"
    if isinstance(absent, ValueError):
        raise absent
    try:
        return _read_config(model_args, local_files_only=False), None
    except OSError as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"the configuration of model.path = {name} cannot be read here ({reason}): give a folder, or a hub id that "
            "this machine can reach"
        ) from None


def _known_config(name: str) -> Any:
    from transformers import AutoConfig

    sizes = dict(KNOWN_SIZES[name])
    return AutoConfig.for_model(sizes.pop("model_type"), **sizes)


def _read_config(model_args: ModelArgs, local_files_only: bool) -> Any:
    from transformers import AutoConfig, PreTrainedConfig

    path = resolve_model(model_args.path)
    options: dict[str, Any] = {"local_files_only": local_files_only}
    if model_args.gguf_file is not None:
        return AutoConfig.from_pretrained(path, gguf_file=model_args.gguf_file, **options)
    if PreTrainedConfig.get_config_dict(path, **options)[0].get("model_type") == PodConfig.model_type:
        return PodConfig.from_pretrained(path, **options)
    return AutoConfig.from_pretrained(path, **options)
