"""Low-rank adapters through `peft`: wrap a model for training, and load exported adapters onto their start model."""

import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import nn

from pod.modeling.loading import load_model
from pod.modeling.shipped.config import PodConfig
from pod.training.args import TrainArgs

SETTINGS = ("lora_rank", "lora_alpha", "lora_dropout", "lora_target_modules")
CONFIG_NAME = "pod_config.json"
"""The model's configuration in an adapter's folder. Not config.json: transformers would take the folder for a model."""


def lora_settings(args: TrainArgs) -> dict[str, Any]:
    """The part of the recipe that shapes the adapters, as a checkpoint stores it."""
    return {name: value for name, value in asdict(args).items() if name in SETTINGS}


def add_lora(model: nn.Module, settings: dict[str, Any]) -> nn.Module:
    """The model with trainable adapters and everything else frozen; ValueError when peft is missing, or the model has no linear layer of a
    given name that can be adapted."""
    config = lora_config(settings)
    from peft import get_peft_model

    linear = (name.rpartition(".")[2] for name, one in model.named_modules() if isinstance(one, nn.Linear))
    # the loss takes the weight of lm_head, not its output: an adapter there would be without effect
    present = set(linear) - {"lm_head"}
    unknown = [name for name in settings["lora_target_modules"] if name not in present]
    if unknown:
        raise ValueError(
            f"train.lora_target_modules names {', '.join(unknown)}; the linear layers of this model that can have "
            f"adapters are {', '.join(sorted(present))}"
        )
    with warnings.catch_warnings():  # peft asks transformers 5 by an old name
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing`", category=FutureWarning)
        return get_peft_model(model, config)  # type: ignore[arg-type]


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


def load_adapter(folder: Path | str, base: Any, **options: Any) -> Any:
    """The start model of an exported adapter with its plan, windows and RoPE, and the adapter on it (a `PeftModel`).

    Args:
        folder: written by `pod export` with export.adapter=true.
        base: the checkpoint that training started from: a recipe's model.path, or a transformers model.
        options: of `pod.load_model` (dtype, gguf_file, device, attention_backend).

    Raises: ValueError for a folder that holds no adapter of ours, or a base that does not fit.
    """
    from peft import PeftModel

    file = Path(folder) / CONFIG_NAME
    if not file.is_file():
        raise ValueError(
            f"{folder} has no {CONFIG_NAME}: name a folder that was written with export.adapter=true"
        )
    config = PodConfig.from_json_file(str(file))
    windows = {name: getattr(config, name) for name in ("num_sink_tokens", "num_recent_tokens")}
    model = load_model(base, plan=config.sharing_plan, layout=config.layout, **windows, **options)
    # nothing has asked for a rotation yet: the tables are made from these at the first forward pass
    model.config.rope_parameters = config.rope_parameters
    model.config.max_position_embeddings = config.max_position_embeddings
    return PeftModel.from_pretrained(model, str(folder))
