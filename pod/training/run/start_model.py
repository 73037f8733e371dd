"""The model that a run starts from: its plan, its configuration without its weights, and the model itself."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from pod.modeling.loading import convert_config, plan_fields, rope_changes
from pod.modeling.shipped.config import PodConfig
from pod.modeling.shipped.sharing import SharingPlan
from pod.models import KNOWN_SIZES, PACKAGE, ModelArgs, resolve_model


def plan_path(model_args: ModelArgs, output_dir: Path) -> Path | None:
    """The plan to train: the recipe's, else <output_dir>/plan/plan.json when it exists and the layout asks for one.

    None: the layout needs none, or there is none.
    """
    if model_args.plan is not None:
        return Path(model_args.plan)
    default = Path(output_dir) / "plan" / "plan.json"
    return default if model_args.layout in ("auto", "pod") and default.is_file() else None


def load_start_model(model_args: ModelArgs, plan: Any, dtype: str = "float32") -> Any:
    """The PodForCausalLM that training starts from, with the layout, plan, windows and RoPE of the recipe.

    Args:
        plan: a SharingPlan or the path of one; None = the layout's own (`cla`), the checkpoint's, or none.
        dtype: of the weights. DeepSpeed makes bfloat16 of them before it takes its master weights, so that a run in bfloat16
            loads half the bytes on every rank and trains the same bits.

    Raises:
        ValueError: layout=pod without a plan; whatever does not fit the checkpoint.
    """
    import pod

    layout = None if model_args.layout == "auto" else model_args.layout
    path = resolve_model(model_args.path)
    if layout == "cla" and plan is None and model_args.cla_factor != 2:
        plan = _cla_plan(model_args, source_config(model_args)[0])
    if layout in ("dense", "window"):
        plan = None
    model = pod.load_model(
        path,
        plan=plan,
        num_sink_tokens=model_args.num_sink_tokens,
        num_recent_tokens=model_args.num_recent_tokens,
        dtype="float32" if layout == "cla" else dtype,  # means of weights are taken before they are rounded
        gguf_file=model_args.gguf_file,
        attention_backend=model_args.attention_backend,
        layout=layout,
        rope=model_args.rope,
        max_position_embeddings=model_args.max_position_embeddings,
    )
    if layout == "pod" and model.config.sharing_plan.is_dense:
        raise ValueError(_NO_PLAN)
    return model.to(getattr(torch, dtype))


def load_teacher(model_args: ModelArgs, dtype: str = "float32") -> Any:
    """The same start model in which every head leads: dense, with the same RoPE."""
    return load_start_model(replace(model_args, layout="dense", plan=None), None, dtype)


_NO_PLAN = (
    "model.layout is pod, and there is no plan but that in which every head leads: run launch/explore.py, set "
    "model.plan, or use layout=dense"
)


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
    layout = model_args.layout
    changes = rope_changes(source, model_args.rope, model_args.max_position_embeddings)
    changes |= {
        "num_sink_tokens": model_args.num_sink_tokens,
        "num_recent_tokens": model_args.num_recent_tokens,
    }
    plan = None
    if layout == "cla":
        plan = SharingPlan.load(model_args.plan) if model_args.plan else _cla_plan(model_args, source)
    elif layout in ("auto", "pod"):
        file = plan_path(model_args, Path(output_dir))
        plan = SharingPlan.load(file) if file else _own_plan(source)
        if layout == "pod" and (plan is None or plan.is_dense):
            if target_saving is None:
                raise ValueError(_NO_PLAN)
            plan = stand_in_plan(source.num_hidden_layers, source.num_key_value_heads, target_saving)
    if layout != "auto":
        changes["layout"] = "pod" if layout == "dense" else layout
    elif source.model_type == "pod":
        changes["layout"] = source.layout
    changes |= plan_fields(plan)
    if source.model_type == "pod":
        config = PodConfig(**(source.to_dict() | changes))
    else:
        config = convert_config(source, **changes)
    return config, plan or config.sharing_plan


def _own_plan(source: Any) -> SharingPlan | None:
    """The plan of an export that is trained further."""
    if source.model_type != "pod" or source.lead is None:
        return None
    return source.sharing_plan


def _cla_plan(model_args: ModelArgs, source: Any) -> SharingPlan:
    return SharingPlan.cla(source.num_hidden_layers, source.num_key_value_heads, model_args.cla_factor)


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
