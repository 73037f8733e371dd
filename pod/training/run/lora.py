"""Low-rank adapters through `peft`: wrap a model for training. `pod.load_adapter` loads what was trained."""

import warnings
from dataclasses import asdict
from typing import Any

from torch import nn

from pod.modeling.shipped.sinks import is_constant
from pod.training.args import TrainArgs

SETTINGS = ("lora_rank", "lora_alpha", "lora_dropout", "lora_target_modules")


def lora_settings(args: TrainArgs) -> dict[str, Any]:
    """The part of the recipe that shapes the adapters, as a checkpoint stores it."""
    return {name: value for name, value in asdict(args).items() if name in SETTINGS}


def add_lora(model: nn.Module, settings: dict[str, Any]) -> nn.Module:
    """The model with trainable adapters and constant sinks, and everything else frozen. ValueError when peft is
    missing, or the model has no linear layer of a given name that can be adapted."""
    config = lora_config(settings)
    from peft import get_peft_model

    linear = (name.rpartition(".")[2] for name, one in model.named_modules() if isinstance(one, nn.Linear))
    # the loss takes the weight of lm_head, not its output: an adapter there would be without effect
    present = set(linear) - {"lm_head"}
    unknown = [name for name in settings["lora_target_modules"] if name not in present]
    if unknown:
        raise ValueError(
            f"train.lora_target_modules names {', '.join(unknown)}; allowed for this model are "
            f"{', '.join(sorted(present))}"
        )
    with warnings.catch_warnings():  # peft asks transformers 5 by an old name
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing`", category=FutureWarning)
        adapted: Any = get_peft_model(model, config)  # type: ignore[arg-type]
    for name, parameter in adapted.named_parameters():
        if is_constant(name):  # a few numbers: saved with the adapters, by their own names
            parameter.requires_grad_(True)
    return adapted


def lora_config(settings: dict[str, Any]) -> Any:
    """The `peft.LoraConfig` of `lora_settings`; ValueError when peft is missing."""
    try:
        from peft import LoraConfig
    except ImportError:
        needs = "train.method=lora needs the package peft: pip install peft, or set train.method=full"
        raise ValueError(needs) from None
    names = {"lora_rank": "r", "lora_target_modules": "target_modules"}
    named = {names.get(name, name): value for name, value in settings.items()}
    return LoraConfig(task_type="CAUSAL_LM", **named)
