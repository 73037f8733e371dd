"""From a training checkpoint to a Hugging Face folder that loads with plain transformers, or to an adapter for `peft`.

The folder of a model holds safetensors, configuration, generation configuration, tokenizer, the sharing plan and the
decoder's own source files as remote code. That of an adapter holds what `peft` reads, the plan and the configuration.
"""

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from transformers import GenerationConfig

from pod.files import atomic_dir, write_json
from pod.modeling.shipped.config import PodConfig
from pod.modeling.shipped.llama import PodForCausalLM
from pod.modeling.shipped.sharing import SharingPlan
from pod.training import deepspeed_bridge as bridge
from pod.training.checkpoint.files import TrainState, check_start_model, latest_checkpoint, read_state
from pod.training.run.lora import CONFIG_NAME, add_lora, lora_config

WRAPPER = "model."  # LanguageModelLoss holds the model under this name


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
    if SharingPlan.load(plan_file) != SharingPlan.load(checkpoint / "plan.json"):
        raise ValueError(
            f"checkpoint {checkpoint} was trained with another plan than model.plan = {plan_file}: unset model.plan to "
            "export it with its own, or set another output_dir"
        )


def trained_weights(checkpoint: Path, state: TrainState) -> dict[str, torch.Tensor]:
    """fp32 master weights of all ranks by the trained module's names; what was frozen (LoRA's base) is left out.

    Reads DeepSpeed's files, which are pickles: export only checkpoints that you wrote.

    Raises:
        ValueError: files are missing or damaged.
    """
    try:
        weights = bridge.trained_weights(checkpoint)
    except (OSError, RuntimeError, KeyError, EOFError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"checkpoint {checkpoint} cannot be read ({first}): export an older one") from error
    return {
        name.removeprefix(WRAPPER): weight for name, weight in weights.items() if name.startswith(WRAPPER)
    }


def restore_model(checkpoint: Path, state: TrainState, start_model: Any = None) -> PodForCausalLM:
    """The trained model, fp32, adapters merged.

    Args:
        start_model: function of a plan that loads the model that training started from; called for LoRA only.

    Raises:
        ValueError: weights that do not fit the model; another start model, layout, windows or RoPE than the adapters'.
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
    check_start_model(state, base, checkpoint)
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


def export_adapter(checkpoint: Path, path: Path, base: str, dtype: str = "auto") -> None:
    """Write the LoRA adapters of `checkpoint` as a folder that `peft` loads onto the start model, in one atomic step.

    adapter_config.json names no base model: transformers would load that one without its plan and put the adapter on it.

    Args:
        base: the start model as the recipe names it, for the README.
        dtype: of the exported weights; "auto" is the trained one.

    Raises:
        ValueError: a checkpoint that is unreadable, or of full fine-tuning.
        OSError: disk full; nothing half-written is kept.
    """
    state = read_state(checkpoint)
    if state.lora is None:
        raise ValueError(
            f"checkpoint {checkpoint} was trained with train.method=full and has no adapters: set export.adapter=false"
        )
    name = state.identity["dtype"] if dtype == "auto" else dtype
    weights = {
        key.replace(".default.", "."): weight.to(getattr(torch, name)).contiguous()
        for key, weight in trained_weights(checkpoint, state).items()
    }
    config = PodConfig.from_pretrained(checkpoint)
    with atomic_dir(path) as folder:
        lora_config({**state.lora, "lora_dropout": 0.0}).save_pretrained(str(folder))
        (Path(folder) / "adapter_model.safetensors").write_bytes(save(weights, metadata={"format": "pt"}))
        write_json(Path(folder) / CONFIG_NAME, config.to_dict())
        shutil.copyfile(checkpoint / "plan.json", Path(folder) / "plan.json")
        (Path(folder) / "README.md").write_text(_ADAPTER_README.format(base=base), encoding="utf-8")


_ADAPTER_README = """# LoRA adapter for {base} under a sharing plan

```python
from pod.training.run.lora import load_adapter

model = load_adapter("this folder", "{base}")  # base model, plan, windows, RoPE and adapter
model = model.merge_and_unload()  # optional: a plain model
```
It was trained with the plan of `plan.json` and the windows and RoPE of `pod_config.json` and fits no other model: with
`peft` alone, `PeftModel.from_pretrained(model, "this folder")` needs a model that was loaded with them.
"""
