"""The constants of constant sinks: from a plan to weights of a model, and from weights to a plan."""

import re
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pod.modeling.model.config import PodConfig
from pod.modeling.model.sharing import SharingPlan
from pod.modeling.model.sink_constants import SinkConstants
from pod.modeling.model.sinks import PARAMETERS

SINK_NAME = re.compile(r"model\.layers\.(\d+)\.self_attn\.(sinks|sink_values|sink_keys)")
"""Names of such weights: groups are the layer and the name of the parameter."""
_ANYWHERE = re.compile(rf"(?:.*\.)?{SINK_NAME.pattern}")
Constants = Mapping[str, Tensor]
"""The constants of constant sinks, as weights by name, with heads in the plan's order."""


def sink_weights(plan: SharingPlan | None, config: PodConfig, checkpoint: Any = None) -> Constants:
    """The constants of a plan as weights of the model, in fp32. Empty = the plan or the model has none.

    Args:
        plan: the plan.
        config: the configuration of the model.
        checkpoint: the configuration of the weights that the model will get. If these have constants and the
            same plan, they were trained, beginning with the plan's constants. Then the result is empty, so
            that they stay, and a warning says so. The plan's constants win only if they were trained too
            (``with_trained_constants``).
    """
    found: dict[str, Tensor] = {}
    if plan is None or plan.sink_constants is None:
        return found
    constants = plan.sink_constants
    if constants_stay(plan, checkpoint):
        warnings.warn(
            "this checkpoint was trained under this plan: its own constants stay in place of the plan's; "
            'to start from the plan\'s, load it with layout="dense" first',
            stacklevel=2,
        )
        return found
    for layer in range(config.num_hidden_layers):
        if not config.has_constant_sinks(layer) or constants.logits[layer] is None:
            continue
        constants.check_shapes(layer, config)
        tables = constants.logits, constants.values, constants.keys
        for name, rows in zip(PARAMETERS, tables, strict=True):
            if rows is not None:
                found[f"model.layers.{layer}.{name}"] = torch.tensor(rows[layer], dtype=torch.float32)
    return found


def constants_stay(plan: SharingPlan, checkpoint: Any) -> bool:
    """Whether a checkpoint's own constants stay in place of those of a plan, see ``sink_weights``."""
    if not isinstance(checkpoint, PodConfig) or plan.sink_constants is None or plan.sink_constants.trained:
        return False
    return checkpoint.sinks == "constant" and checkpoint.sharing_plan == plan


def with_trained_constants(plan: SharingPlan, weights: Mapping[str, Tensor]) -> SharingPlan:
    """The plan with the constants of trained weights, if these have any.

    Such constants win over those of any checkpoint that the plan is used with.

    Args:
        plan: a plan; without constant sinks, it is returned as it is.
        weights: weights by name, with heads in the model's order. Names may have a prefix, as peft's have.
    """
    tables: dict[str, list[Any]] = {}
    for name, weight in weights.items():
        if found := _ANYWHERE.fullmatch(name):
            rows = tables.setdefault(found[2], [None] * plan.num_layers)
            rows[int(found[1])] = weight.tolist()
    if plan.sinks != "constant" or not tables:
        return plan
    missing = [None] * plan.num_layers
    logits, values = (tuple(tables.get(name, missing)) for name in ("sinks", "sink_values"))
    keys = tuple(tables["sink_keys"]) if "sink_keys" in tables else None
    return replace(plan, sink_constants=SinkConstants(logits, values, keys, trained=True))
