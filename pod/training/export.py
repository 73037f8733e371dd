"""From a training checkpoint to a Hugging Face folder that loads with plain transformers.

The folder holds safetensors, configuration, generation configuration, tokenizer, the sharing plan and the decoder's
own source files as remote code.
"""

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from pod.files import atomic_dir
from pod.modeling.config import PodConfig
from pod.modeling.llama import PodForCausalLM
from pod.modeling.sharing import SharingPlan
from pod.training.checkpoint import TrainState, latest_checkpoint, read_state
from pod.training.lora import add_lora

WRAPPER = "model."  # LanguageModelLoss holds the model under this name
ALIAS = "loss_head."


def checkpoint_to_export(train_folder: Path, checkpoint: str | None) -> Path:
    """The named checkpoint folder, else the newest one.

    Raises:
        ValueError: there is none.
    """
    found = Path(checkpoint) if checkpoint is not None else latest_checkpoint(train_folder)
    if found is None:
        raise ValueError(
            f"{train_folder} holds no checkpoint: run launch/train_pod.py first or set export.checkpoint"
        )
    return found


def check_plan(checkpoint: Path, plan_file: Path) -> None:
    """Raise ValueError when `plan_file`, which a recipe names, is not the plan that the checkpoint was trained with."""
    if SharingPlan.load(plan_file).lead != SharingPlan.load(checkpoint / "plan.json").lead:
        raise ValueError(
            f"checkpoint {checkpoint} was trained with another plan than model.plan = {plan_file}: unset model.plan to "
            "export it with its own, or set another output_dir"
        )


def trained_weights(checkpoint: Path, state: TrainState) -> dict[str, torch.Tensor]:
    """fp32 master weights of all ranks by the trained module's names; only the adapters for LoRA.

    Reads DeepSpeed's files, which are pickles: export only checkpoints that you wrote.

    Raises:
        ValueError: files are missing or damaged.
    """
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    try:
        weights: Any = get_fp32_state_dict_from_zero_checkpoint(
            str(checkpoint.parent), tag=checkpoint.name, exclude_frozen_parameters=state.lora is not None
        )
    except (OSError, RuntimeError, KeyError, EOFError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"checkpoint {checkpoint} cannot be read ({first}): export an older one") from error
    return {
        name.removeprefix(WRAPPER): weight for name, weight in weights.items() if not name.startswith(ALIAS)
    }


def restore_model(checkpoint: Path, state: TrainState, start_model: Any = None) -> PodForCausalLM:
    """The trained model, fp32, adapters merged.

    Args:
        start_model: function of a plan that loads the model that training started from; called for LoRA only.

    Raises:
        ValueError: weights that do not fit the model.
    """
    weights = trained_weights(checkpoint, state)
    if state.lora is None:
        model = PodForCausalLM(PodConfig.from_pretrained(checkpoint)).float()
        if state.tied_embeddings:
            weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])
        _load(model, weights, set(model.state_dict()), checkpoint)
        if (checkpoint / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(checkpoint)
        return model.eval()
    base = start_model(SharingPlan.load(checkpoint / "plan.json")).float()
    adapted: Any = add_lora(base, state.lora)
    _load(adapted, weights, {name for name in adapted.state_dict() if "lora_" in name}, checkpoint)
    return adapted.merge_and_unload().eval()


def _load(model: Any, weights: dict[str, torch.Tensor], expected: set[str], checkpoint: Path) -> None:
    missing, unexpected = sorted(expected - weights.keys()), sorted(weights.keys() - expected)
    if missing or unexpected:
        raise ValueError(
            f"checkpoint {checkpoint} does not fit its model: missing {missing[:3] or 'none'}, "
            f"unexpected {unexpected[:3] or 'none'}"
        )
    model.load_state_dict(weights, strict=False)


def export(
    checkpoint: Path,
    path: Path,
    tokenizer: Any,
    dtype: str = "auto",
    max_shard_size: str = "5GB",
    start_model: Any = None,
) -> None:
    """Write the trained model of `checkpoint` as a Hugging Face folder at `path`, in one atomic step.

    Args:
        tokenizer: saved beside the weights; None leaves it out.
        dtype: of the exported weights; "auto" is the trained one.
        start_model: see `restore_model`.

    Raises:
        ValueError: a checkpoint that is unreadable or does not fit.
        OSError: disk full; nothing half-written is kept.
    """
    state = read_state(checkpoint)
    model = restore_model(checkpoint, state, start_model)
    name = state.identity["dtype"] if dtype == "auto" else dtype
    model.to(getattr(torch, name))
    model.config.attention_backend = "auto"
    PodConfig.register_for_auto_class()
    PodForCausalLM.register_for_auto_class("AutoModelForCausalLM")
    with atomic_dir(path) as folder:
        model.save_pretrained(folder, max_shard_size=max_shard_size)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        shutil.copyfile(checkpoint / "plan.json", Path(folder) / "plan.json")
