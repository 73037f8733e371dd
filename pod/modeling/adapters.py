"""Read adapters of `peft` from folders, for `pod.load_model` and `pod.load_adapter`.

A folder may come from `pod export` with export.adapter=true, or from any other program.
"""

import os
from pathlib import Path
from typing import Any

from pod.files import read_json
from pod.modeling.checkpoints import ADAPTER_CONFIG
from pod.models import resolve_model

CONFIG_NAME = "pod_config.json"
"""The file with the model's configuration in the folder of an adapter that `pod export` wrote.

It is not called config.json, because transformers would then regard the folder as a model.
"""
BASE = "base_model_name_or_path"
"""The field that names the adapter's base, in this file and in peft's adapter_config.json."""


def is_of_a_plan(folder: str) -> bool:
    """Whether `pod export` wrote the adapter. Then the folder has the plan that it was trained under."""
    return (Path(folder) / CONFIG_NAME).is_file()


def merged(adapted: Any, folder: str | os.PathLike) -> Any:
    """The model inside a `PeftModel`, with the adapter merged into its weights.

    Raises:
        ValueError: the adapter adds tokens (prompt learning), and so cannot be merged. The message names
            ``folder``.
    """
    if adapted.active_peft_config.is_prompt_learning:
        kind = adapted.active_peft_config.peft_type.value
        raise ValueError(
            f"the adapter in {folder} ({kind}) adds tokens and cannot be merged: use pod.load_adapter"
        )
    return adapted.merge_and_unload()


def adapter_weights(folder: Path) -> dict[str, Any]:
    """The weights in an adapter's folder, on the CPU, by the names that peft gives them.

    Raises:
        ValueError: they cannot be read, or peft is not installed.
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
    """Put an adapter on a model, and return the `PeftModel`.

    Raises:
        ValueError: weights of the adapter are missing, unexpected or do not fit, or peft is not installed.
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
    """The checkpoint that an adapter names as its base: what ``resolve_model`` makes of the name.

    Raises:
        ValueError: the adapter names no base, or one that cannot be found.
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
