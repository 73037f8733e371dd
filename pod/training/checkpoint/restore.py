"""From a training checkpoint to the trained model, in memory."""

from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from pod.modeling.shipped.config import PodConfig
from pod.modeling.shipped.llama import PodForCausalLM
from pod.modeling.shipped.sharing import SharingPlan
from pod.training.checkpoint import identity
from pod.training.checkpoint.files import whole_weights
from pod.training.checkpoint.identity import TrainState, latest_checkpoint
from pod.training.run.lora import add_lora

WRAPPER = "model."  # LanguageModelLoss holds the model under this name


def checkpoint_to_export(train_folder: Path, checkpoint: str | None) -> Path:
    """The named checkpoint folder, else the newest one; ValueError when there is none."""
    found = Path(checkpoint) if checkpoint is not None else latest_checkpoint(train_folder)
    if found is None:
        raise ValueError(
            f"{train_folder} holds no checkpoint: run `pod train` first or set export.checkpoint"
        )
    return found


def check_plan(checkpoint: Path, plan_file: Path) -> None:
    """Raise ValueError when `plan_file`, which a recipe names, is not the plan that the checkpoint was trained with."""
    if SharingPlan.load(plan_file) != SharingPlan.load(checkpoint / "plan.json"):
        raise ValueError(
            f"checkpoint {checkpoint} was trained with another plan than model.plan = {plan_file}: unset model.plan to "
            "export it with its own, or set another output_dir"
        )


def trained_weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """fp32 master weights by the model's names, LoRA's frozen base left out; ValueError for missing or damaged files."""
    try:
        weights = whole_weights(checkpoint)
    except ValueError as error:
        raise ValueError(
            f"checkpoint {checkpoint} cannot be read ({error}): {identity.way_back(checkpoint)}"
        ) from error
    return {name.removeprefix(WRAPPER): weight for name, weight in weights.items()}


def restore_model(checkpoint: Path, state: TrainState, start_model: Any = None) -> PodForCausalLM:
    """The trained model, fp32, adapters merged onto what `start_model` loads for a plan.

    Raises:
        ValueError: weights that do not fit the model; another start model, layout, windows or RoPE than the adapters'.
    """
    weights = trained_weights(checkpoint)
    if state.lora is None:
        model: Any = PodForCausalLM(PodConfig.from_pretrained(checkpoint)).float()
        if state.tied_embeddings:
            weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])
        if (checkpoint / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(checkpoint)
        expected = set(model.state_dict())
    else:
        base = start_model(SharingPlan.load(checkpoint / "plan.json")).float()
        refusal = f"the adapters of checkpoint {checkpoint} were trained with {{what}}: use {{needed}}"
        own = identity.start_identity_of(base.config, identity.samples_of(base))
        identity.check_identity(state, own, refusal)
        model = add_lora(base, state.lora)
        expected = {name for name in model.state_dict() if "lora_" in name}
    missing, unexpected = sorted(expected - weights.keys()), sorted(weights.keys() - expected)
    if missing or unexpected:
        raise ValueError(
            f"checkpoint {checkpoint} does not fit its model: missing {missing[:3] or 'none'}, "
            f"unexpected {unexpected[:3] or 'none'}"
        )
    model.load_state_dict(weights, strict=False)
    return (model if state.lora is None else model.merge_and_unload()).eval()
