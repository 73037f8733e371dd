"""Low-rank adapters by `peft`: wrap a model for training. `pod.load_adapter` loads what was trained."""

import warnings
from dataclasses import asdict
from typing import Any

from torch import nn

from pod.modeling.model.sinks import is_constant
from pod.training.args import TrainArgs

SETTINGS = ("lora_rank", "lora_alpha", "lora_dropout", "lora_target_modules")
"""Fields of section `train` that define the adapters."""


def lora_settings(args: TrainArgs) -> dict[str, Any]:
    """The settings of the recipe that define the adapters, as a checkpoint stores them."""
    return {name: value for name, value in asdict(args).items() if name in SETTINGS}


def add_lora(model: nn.Module, settings: dict[str, Any]) -> nn.Module:
    """The model with trainable adapters and constant sinks; everything else is frozen.

    Args:
        model: changed in place.
        settings: from `lora_settings`.

    Raises:
        ValueError: peft is missing, or the model has no linear layer of a given name that can be adapted.
    """
    config = lora_config(settings)
    from peft import get_peft_model

    linear = (name.rpartition(".")[2] for name, one in model.named_modules() if isinstance(one, nn.Linear))
    # The loss takes the weight of lm_head, not its output: an adapter there would have no effect.
    present = set(linear) - {"lm_head"}
    unknown = [name for name in settings["lora_target_modules"] if name not in present]
    if unknown:
        raise ValueError(
            f"train.lora_target_modules names {', '.join(unknown)}; allowed for this model are "
            f"{', '.join(sorted(present))}"
        )
    with warnings.catch_warnings():  # peft uses an old name of transformers, which warns in version 5
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing`", category=FutureWarning)
        adapted: Any = get_peft_model(model, config)  # type: ignore[arg-type]
    for name, parameter in adapted.named_parameters():
        # These are a few numbers. They are saved with the adapters, by their own names.
        if is_constant(name):
            parameter.requires_grad_(True)
    return adapted


def lora_config(settings: dict[str, Any]) -> Any:
    """The `peft.LoraConfig` of `lora_settings`.

    Raises:
        ValueError: peft is missing.
    """
    try:
        from peft import LoraConfig
    except ImportError:
        needs = "train.method=lora needs the package peft: pip install peft, or set train.method=full"
        raise ValueError(needs) from None
    names = {"lora_rank": "r", "lora_target_modules": "target_modules"}
    named = {names.get(name, name): value for name, value in settings.items()}
    return LoraConfig(task_type="CAUSAL_LM", **named)
