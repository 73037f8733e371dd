"""Low-rank adapters through `peft`: wrap a model for training, and merge trained adapters for export."""

from dataclasses import asdict
from typing import Any

from torch import nn

from pod.training.args import TrainArgs

SETTINGS = ("lora_rank", "lora_alpha", "lora_dropout", "lora_target_modules")


def lora_settings(args: TrainArgs) -> dict[str, Any]:
    """The part of the recipe that shapes the adapters, as a checkpoint stores it."""
    return {name: value for name, value in asdict(args).items() if name in SETTINGS}


def add_lora(model: nn.Module, settings: dict[str, Any]) -> nn.Module:
    """The model with trainable adapters and everything else frozen.

    Raises:
        ValueError: peft is missing, or the model has no module of a given name.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise ValueError(
            "train.method=lora needs the package peft: pip install peft, or set train.method=full"
        ) from None
    present = {
        name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)
    }
    unknown = [name for name in settings["lora_target_modules"] if name not in present]
    if unknown:
        raise ValueError(
            f"train.lora_target_modules names {', '.join(unknown)}; this model's linear layers are "
            f"{', '.join(sorted(present))}"
        )
    config = LoraConfig(
        r=settings["lora_rank"],
        lora_alpha=settings["lora_alpha"],
        lora_dropout=settings["lora_dropout"],
        target_modules=list(settings["lora_target_modules"]),
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, config)  # type: ignore[arg-type]
