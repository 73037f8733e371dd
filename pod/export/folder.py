"""From a model or a training checkpoint to a Hugging Face folder, or to an adapter for `peft`.

A model's folder is made for transformers or for serving engines. It holds safetensors, configuration,
generation configuration, tokenizer, the sharing plan, a model card and licences. A folder for transformers
(`hf`) also holds the decoder's own source files as remote code. What engines load (`vllm`) is in `served.py`.
The folder of an adapter holds what `peft` reads, the plan and the configuration.
"""

import filecmp
import re
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from pod.export.card import Origin, card
from pod.export.licences import add_licences
from pod.export.served import MARK, write_served
from pod.files import atomic_dir, read_json, read_mapping, write_json
from pod.modeling import model as modeling
from pod.modeling.adapters import BASE, CONFIG_NAME
from pod.modeling.loading import load_model
from pod.modeling.model.config import PodConfig
from pod.modeling.model.sharing import SharingPlan
from pod.training.checkpoint.checkpoint_files import restore_model, trained_weights
from pod.training.checkpoint.run_identity import STATE_NAME, TrainState, read_state
from pod.training.run.lora import lora_config
from pod.training.run.mesh import name_accelerator


def export(
    source: Path | nn.Module,
    path: Path,
    tokenizer: Any = None,
    dtype: str = "auto",
    max_shard_size: str = "5GB",
    start_model: Any = None,
    origin: Origin | None = None,
    results: Path | None = None,
    format: str = "hf",
) -> None:
    """Write a trained model as a Hugging Face folder at `path`, in one atomic step.

    Args:
        source: a training checkpoint, or a model in memory, which stays as it is. The model is ours, or a
            dense one that `load_model` takes.
        tokenizer: saved beside the weights; None leaves it out.
        dtype: the type of the written weights. "auto" is the model's own type; for a checkpoint, it is the
            type in which the run trained.
        max_shard_size: the largest size of one file of weights.
        start_model: see `restore_model`.
        origin: where the weights come from, for the model card; None = what a checkpoint knows of it.
        results: folder of an evaluation's result files. The card shows the results of the dense model, and
            those of the export that stood at `path` if it had the same weights.
        format: "hf" loads with transformers and computes any plan. "vllm" loads with vLLM, and with
            transformers where a stock model computes the same. It needs a plan of whole layers (see
            `pod.export.served`) and takes no results.

    Raises:
        ValueError: the checkpoint cannot be read or does not fit the start model; `load_model` refuses the
            model, or engines cannot compute it; or `check_replaceable` refuses `path`.
        OSError: the disk is full; nothing half-written is kept.
    """
    path = Path(path)
    check_format(format)
    check_replaceable(path, format)
    if isinstance(source, nn.Module):
        model = load_model(source, dtype=dtype)  # type: ignore[arg-type]
        plan = model.config.sharing_plan
    else:
        state = read_state(source)
        plan = SharingPlan.load(Path(source) / "plan.json")
        restored = restore_model(source, state, start_model)
        model = restored.to(dtype=_dtype(state, dtype))  # type: ignore[call-arg]
        origin = origin or origin_of(state)
    model.config.attention_backend = "auto"
    origin = origin or Origin()
    name_accelerator()  # accelerate imports DeepSpeed when transformers saves a model
    with atomic_dir(path) as folder:
        if format == "vllm":
            write_served(model, folder, max_shard_size)
        else:
            model.save_pretrained(folder, max_shard_size=max_shard_size)
        if tokenizer is not None:
            # This says how the tokenizer was loaded here, which others do not need.
            tokenizer.init_kwargs.pop("local_files_only", None)
            tokenizer.save_pretrained(folder)
        plan.save(folder / "plan.json")
        licence = add_licences(folder, origin.base)
        measured = []
        if results is not None and format == "hf":
            measured = results_of(results, path, folder, model.config.own_method)
        text = card(path.resolve().name, model.config, origin, licence, measured, format)
        (folder / "README.md").write_text(text, encoding="utf-8")
        _let_others_read(folder)


FORMATS = ("hf", "vllm")
"""Formats of exports, see `ExportArgs.format`."""


def check_format(format: str) -> None:
    """Refuse an unknown `export.format` (ValueError); the message names the `FORMATS`."""
    if format not in FORMATS:
        raise ValueError(f"export.format = {format!r} is not known: choose {' or '.join(FORMATS)}")


def check_replaceable(path: Path, format: str = "hf") -> None:
    """Refuse an export to `path` that would remove anything but an earlier export of `format` (ValueError).

    An export replaces the folder as a whole. The folder may be missing or empty. A file, a folder of other
    files, an export of the other format, and an export beside which there are other files are refused.
    """
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    way_out = "set another export.path, or move it away"
    if not path.is_dir():
        raise ValueError(f"{path} is a file, but an export needs a folder there: {way_out}")
    model = read_mapping(path / "config.json") or {}
    adapter = read_mapping(path / CONFIG_NAME) or {}
    was = model.get(MARK)
    if PodConfig.model_type in (model.get("model_type"), adapter.get("model_type")):
        was = "hf"
    if was not in FORMATS or (path / STATE_NAME).exists():
        raise ValueError(f"{path} has files but is not an earlier export, so it is not replaced: {way_out}")
    if was != format:
        raise ValueError(
            f"{path} is an export of format {was}, so one of format {format} does not replace it: {way_out}"
        )
    strangers = sorted(file.name for file in path.iterdir() if not _is_of_export(file.name))
    if strangers:
        raise ValueError(
            f"{path} is an earlier export, but has files that `pod export` did not write and would remove, "
            f"for example {strangers[0]!r} ({len(strangers)} in total): move them, or set another "
            "export.path"
        )


def origin_of(state: TrainState) -> Origin:
    """The origin of a checkpoint's weights, as far as its recipe and its position in the data say it."""
    data = state.config.get("data") or {}
    model = state.config.get("model") or {}
    length = data.get("context_length")
    position = state.cursor.get("position", 0)  # in sequences
    return Origin(
        base=model.get("path"),
        sources=tuple(data.get("sources") or ()),
        context_length=length,
        num_tokens=None if length is None else position * length,
    )


def results_of(results: Path, before: Path, now: Path, method: str) -> list[dict[str, Any]]:
    """The results of an evaluation for the model card: of the dense model, and of an earlier export.

    The list is empty where the earlier export has no results, or other weights than the new one. Results that
    are older than that export are not taken.

    Args:
        results: the folder of the result files.
        before: the folder of the earlier export.
        now: the folder of the new export, whose weights are compared with those in `before`.
        method: the method after which the result file of the export is named.
    """
    own = results / f"{method}.json"
    dense = results / "full.json"
    weights = sorted(file.name for file in now.glob("*.safetensors"))
    if not own.is_file() or not before.is_dir():
        return []
    if filecmp.cmpfiles(before, now, weights, shallow=False)[0] != weights:
        return []
    content = read_json(own)
    exported = datetime.fromtimestamp(int((before / "config.json").stat().st_mtime), UTC)
    is_of_it = Path((content["model"] or {}).get("path", "")).resolve() == before.resolve()
    if not is_of_it or datetime.fromisoformat(content["environment"]["date"]) < exported:
        return []
    return [read_json(dense), content] if dense != own and dense.is_file() else [content]


def export_adapter(checkpoint: Path, path: Path, base: str, dtype: str = "auto") -> None:
    """Write the LoRA adapters of `checkpoint` as a folder that `peft` loads onto the start model.

    adapter_config.json names no base model: transformers would load that model without its plan, and put the
    adapter on it. Errors are those of `export`.

    Args:
        base: the start model as the recipe names it, for the README and for `pod.load_adapter`.
    """
    check_replaceable(path)
    state = read_state(checkpoint)
    if state.lora is None:
        raise ValueError(
            f"checkpoint {checkpoint} was trained with train.method=full and has no adapters: "
            "set export.adapter=false"
        )
    weights = {
        name.replace(".default.", "."): weight.to(_dtype(state, dtype)).contiguous()
        for name, weight in trained_weights(checkpoint).items()
    }
    config = PodConfig.from_pretrained(checkpoint)
    with atomic_dir(path) as folder:
        lora_config({**state.lora, "lora_dropout": 0.0}).save_pretrained(str(folder))
        save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        write_json(folder / CONFIG_NAME, {**config.to_dict(), BASE: base})
        shutil.copyfile(checkpoint / "plan.json", folder / "plan.json")
        (folder / "README.md").write_text(_ADAPTER_README.format(base=base), encoding="utf-8")
        _let_others_read(folder)


def _let_others_read(folder: Path) -> None:
    """Give the weights the mode of the other files: safetensors makes files that only their owner reads."""
    for weights in folder.glob("*.safetensors"):
        shutil.copymode(folder / "README.md", weights)


def _dtype(state: TrainState, asked: str) -> torch.dtype:
    """The type that was asked for; for "auto", the type in which the run trained."""
    return getattr(torch, state.identity["dtype"] if asked == "auto" else asked)


_OF_EXPORT = re.compile(
    r"(adapter_)?model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json"
    r"|((generation_|pod_|adapter_|preprocessor_)?config|plan|tokenizer\w*|tekken|special_tokens_map"
    r"|added_tokens|vocab|chat_template)\.json"
    r"|(merges|vocab)\.txt|additional_chat_templates|.+\.(jinja|model)|README\.md|LICENSE|base_model-.*"
    r"|__pycache__|\.cache|\.gitattributes|\.DS_Store|\.ipynb_checkpoints",
    re.IGNORECASE,
)
"""Names of files that an export writes, or that tools leave in its folder. Code is in `_OF_CODE`."""
_OF_CODE = frozenset(file.name for file in Path(modeling.__path__[0]).glob("[!_]*.py"))
"""Names of the files of code that an export has beside its weights."""


def _is_of_export(name: str) -> bool:
    """Whether a file or folder of this name belongs to an export. A `.git` does not, for example."""
    return name in _OF_CODE or _OF_EXPORT.fullmatch(name) is not None


_ADAPTER_README = """# LoRA adapter for {base} under a sharing plan

```python
import pod

model = pod.load_model("this folder")  # {base} with plan, windows, RoPE and the adapter merged into it
adapted = pod.load_adapter("this folder", "{base}")  # not merged: a `PeftModel` on the base model
```
The adapter needs the plan in `plan.json`, and windows and RoPE in `pod_config.json`; it fits no other model.
With `peft` alone, first load the base model with these settings, then call
`PeftModel.from_pretrained(model, "this folder")`.
"""
