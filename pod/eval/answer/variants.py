"""A PoD model with other windows or another plan, on the same weights."""

from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

import pod
from pod.modeling.loading import from_dense


def variant(model: Any, **changes: Any) -> Any:
    """The model with other fields of its configuration (a plan's, num_sink_tokens, num_recent_tokens); its weights are shared, and
    copied only where heads change their order."""
    config = pod.PodConfig(**(model.config.to_dict() | changes))
    return from_dense(model, config).eval()


def check_plan(path: str, model_path: str, gguf_file: str | None = None) -> pod.SharingPlan:
    """The plan of a file for the model of a folder. Raises: ValueError for no plan, and for one of another size."""
    if not Path(path).is_file():
        raise ValueError(f"{path} does not exist: make a plan with launch/explore.py")
    plan = pod.SharingPlan.load(path)
    if gguf_file:
        return plan  # its sizes are in the file itself; the model's constructor checks
    config, _ = PreTrainedConfig.get_config_dict(model_path)
    layers, heads = config.get("num_hidden_layers"), config.get("num_key_value_heads")
    heads = heads or config.get("num_attention_heads")
    if layers and heads and (plan.num_layers, plan.num_key_value_heads) != (layers, heads):
        raise ValueError(
            f"{path} is for {plan.num_layers} layers x {plan.num_key_value_heads} KV heads, the model has {layers} x "
            f"{heads}: make a plan for this model with launch/explore.py"
        )
    return plan


def windows_of(run: Any, kind: str) -> tuple[int, int]:
    """(sink, recent) tokens of the kind of model that a method runs on, before it is loaded."""
    args = run.recipe.model
    if kind in ("dense", "unadapted"):
        return args.num_sink_tokens, args.num_recent_tokens
    config, _ = PreTrainedConfig.get_config_dict(run.models.export)
    return config.get("num_sink_tokens", 16), config.get("num_recent_tokens", 4080)
