"""Adapters of `peft`: what `pod.load_model` and `pod.load_adapter` need to know of an adapter's folder.

The folder may be one that `pod export` wrote with export.adapter=true, or anybody's.
"""

import os
from pathlib import Path
from typing import Any

from pod.files import read_json
from pod.modeling.checkpoints import ADAPTER_CONFIG
from pod.models import resolve_model

CONFIG_NAME = "pod_config.json"
"""The model's configuration in an adapter's folder.

It is not called config.json, because transformers would then take the folder for a model.
"""
BASE = "base_model_name_or_path"
"""The field of both configurations that names the model that was adapted."""


def is_of_a_plan(folder: str) -> bool:
    """Whether `pod export` wrote the adapter. Such an adapter brings its plan."""
    return (Path(folder) / CONFIG_NAME).is_file()


def merged(adapted: Any, folder: str | os.PathLike) -> Any:
    """The model inside a `PeftModel`, with the adapter merged into its weights.

    ValueError for an adapter that adds tokens (prompt learning): it cannot be merged.
    """
    if adapted.active_peft_config.is_prompt_learning:
        kind = adapted.active_peft_config.peft_type.value
        raise ValueError(
            f"the adapter in {folder} ({kind}) adds tokens and cannot be merged: use pod.load_adapter"
        )
    return adapted.merge_and_unload()


def adapter_weights(folder: Path) -> dict[str, Any]:
    """The weights in an adapter's folder, by the names that peft gives them.

    ValueError when they cannot be read, or when peft is missing.
    """
    try:
        from peft.utils import load_peft_weights
    except ImportError:
        raise ValueError(f"{folder} is an adapter, which needs the package peft: pip install peft") from None
    try:
        return load_peft_weights(str(folder), device="cpu")
    except (OSError, RuntimeError, ValueError) as error:
        raise ValueError(
            f"the adapter in {folder} cannot be read: {' '.join(str(error).split())[:300]}"
        ) from error


def put_on(model: Any, folder: Path) -> Any:
    """Put an adapter with all of its weights on a model, and return the `PeftModel`.

    ValueError when the weights do not fit, or when peft is missing.
    """
    try:
        from peft import PeftModel, get_peft_model_state_dict
        from peft.utils import load_peft_weights
    except ImportError:
        raise ValueError(f"{folder} is an adapter, which needs the package peft: pip install peft") from None
    try:
        adapted: Any = PeftModel.from_pretrained(model, str(folder))
        stored = load_peft_weights(str(folder), device="cpu").keys()
    except (OSError, RuntimeError, ValueError) as error:
        raise ValueError(
            f"the adapter in {folder} does not fit its base: {' '.join(str(error).split())[:300]}"
        ) from error
    expected = get_peft_model_state_dict(adapted, save_embedding_layers=False).keys()
    missing = sorted(expected - stored)
    # peft also saves an embedding that was resized, by its name in the model
    surplus = sorted(stored - expected - adapted.state_dict().keys())
    if missing or surplus:
        raise ValueError(
            f"the adapter in {folder} does not fit its base: missing {missing[:3] or 'none'}, "
            f"unexpected {surplus[:3] or 'none'}"
        )
    return adapted


def base_of(folder: Path) -> str:
    """The checkpoint that an adapter names as its base, as ``resolve_model`` gives it.

    ValueError when the adapter names none, or one that cannot be found.
    """
    name = CONFIG_NAME if is_of_a_plan(str(folder)) else ADAPTER_CONFIG
    base = read_json(folder / name).get(BASE)
    if not base:
        raise ValueError(f"{folder / name} names no {BASE}: give it as pod.load_adapter(folder, base)")
    try:
        return resolve_model(base)
    except ValueError as error:
        raise ValueError(
            f"the base of the adapter in {folder}: {error}; give another as pod.load_adapter(folder, base)"
        ) from None
