"""From a training checkpoint to a Hugging Face folder that loads with plain transformers, or to an adapter for `peft`.

The folder of a model holds safetensors, configuration, generation configuration, tokenizer, the sharing plan and the
decoder's own source files as remote code. That of an adapter holds what `peft` reads, the plan and the configuration.
"""

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import GenerationConfig

from pod.files import atomic_dir, write_json
from pod.modeling.shipped.config import PodConfig
from pod.modeling.shipped.llama import PodForCausalLM
from pod.modeling.shipped.sharing import SharingPlan
from pod.training.checkpoint import identity
from pod.training.checkpoint.identity import TrainState, latest_checkpoint, read_state
from pod.training.checkpoint.shards import whole_weights
from pod.training.run.lora import CONFIG_NAME, add_lora, lora_config

WRAPPER = "model."  # LanguageModelLoss holds the model under this name


def checkpoint_to_export(train_folder: Path, checkpoint: str | None) -> Path:
    """The named checkpoint folder, else the newest one; ValueError when there is none."""
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


def trained_weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """fp32 master weights by the model's names, LoRA's frozen base left out; ValueError for missing or damaged files."""
    try:
        weights = whole_weights(checkpoint)
    except ValueError as error:
        raise ValueError(f"checkpoint {checkpoint} cannot be read ({error}): export an older one") from error
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
        dtype: "auto" is the trained one.
        start_model: see `restore_model`.

    Raises:
        ValueError: a checkpoint that is unreadable or does not fit.
        OSError: disk full; nothing half-written is kept.
    """
    state = read_state(checkpoint)
    model = restore_model(checkpoint, state, start_model)
    model.to(dtype=_dtype(state, dtype))  # type: ignore[call-arg]
    model.config.attention_backend = "auto"
    PodConfig.register_for_auto_class()
    PodForCausalLM.register_for_auto_class("AutoModelForCausalLM")
    with atomic_dir(path) as folder:
        model.save_pretrained(folder, max_shard_size=max_shard_size)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        shutil.copyfile(checkpoint / "plan.json", folder / "plan.json")


def export_adapter(checkpoint: Path, path: Path, base: str, dtype: str = "auto") -> None:
    """Write the LoRA adapters of `checkpoint` as a folder that `peft` loads onto the start model; errors as in `export`.

    adapter_config.json names no base model: transformers would load that one without its plan and put the adapter on it.

    Args:
        base: the start model as the recipe names it, for the README.
    """
    state = read_state(checkpoint)
    if state.lora is None:
        raise ValueError(
            f"checkpoint {checkpoint} was trained with train.method=full and has no adapters: set export.adapter=false"
        )
    weights = {
        name.replace(".default.", "."): weight.to(_dtype(state, dtype)).contiguous()
        for name, weight in trained_weights(checkpoint).items()
    }
    config = PodConfig.from_pretrained(checkpoint)
    with atomic_dir(path) as folder:
        lora_config({**state.lora, "lora_dropout": 0.0}).save_pretrained(str(folder))
        save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        write_json(folder / CONFIG_NAME, config.to_dict())
        shutil.copyfile(checkpoint / "plan.json", folder / "plan.json")
        (folder / "README.md").write_text(_ADAPTER_README.format(base=base), encoding="utf-8")


def _dtype(state: TrainState, asked: str) -> torch.dtype:
    return getattr(torch, state.identity["dtype"] if asked == "auto" else asked)


_ADAPTER_README = """# LoRA adapter for {base} under a sharing plan

```python
from pod.training.run.lora import load_adapter

model = load_adapter("this folder", "{base}")  # base model, plan, windows, RoPE and adapter
model = model.merge_and_unload()  # optional: a plain model
```
It was trained with the plan of `plan.json` and the windows and RoPE of `pod_config.json` and fits no other model: with
`peft` alone, `PeftModel.from_pretrained(model, "this folder")` needs a model that was loaded with them.
"""
