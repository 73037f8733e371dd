"""The model that a run starts from: its plan and configuration."""

import contextlib
import math
import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, GenerationConfig

from pod.modeling.checkpoints import has_own_head, is_adapter, weight_files
from pod.modeling.loading import caching, target_config
from pod.modeling.model.config import PodConfig
from pod.modeling.model.llama import PodForCausalLM
from pod.modeling.model.sharing import SharingPlan
from pod.modeling.sink_weights import sink_weights
from pod.models import KNOWN_SIZES, PACKAGE, ModelArgs, read_config, resolve_model, ways_without_network
from pod.training.run.longer_context import extend
from pod.training.run.mesh import from_rank_0
from pod.training.run.start_weights import StartWeights, hollow_model, weight_reader

PlanOrFile = SharingPlan | str | Path | None
"""A plan, the path of a plan's file, or no plan."""


def hollow_start_model(
    model_args: ModelArgs, plan: PlanOrFile, dtype: str = "float32"
) -> tuple[PodForCausalLM, StartWeights]:
    """The model that training starts from, without values for its weights, and the `StartWeights` for it.

    The `StartWeights` give the values once they are opened. With `dtype` bfloat16 they give bfloat16 values,
    and the float32 master weights of the run are made from these.

    Args:
        plan: as in `start_config`.
        dtype: type of the weights, as in `train.dtype`.

    Raises:
        ValueError: as in `start_config`.
    """
    path = resolve_model(model_args.path)
    source = source_config(model_args)[0]
    plan = SharingPlan.load(plan) if isinstance(plan, str | Path) else plan
    config = start_config(model_args, plan, source)
    if from_rank_0(lambda: has_head_of_its_own(model_args, config)):
        config.tie_word_embeddings = False
    kind = config.dtype = getattr(torch, dtype)
    model = hollow_model(config, kind)
    with contextlib.suppress(OSError):  # most checkpoints have none of their own
        model.generation_config = caching(GenerationConfig.from_pretrained(path))
    # With layout cla, a weight can be the mean of several weights: it is rounded after the mean is taken.
    read_as = torch.float32 if config.layout == "cla" else kind
    where = path, config, read_as, model_args.gguf_file, sink_weights(plan, config, checkpoint=source)
    return model, StartWeights(model, partial(weight_reader, *where))


def has_head_of_its_own(model_args: ModelArgs, config: Any, **places: Any) -> bool:
    """Whether the checkpoint's output projection differs from its embedding, although `config` ties both.

    Args:
        places: keyword arguments for `weight_files`, whose errors are raised too.
    """
    if model_args.gguf_file is not None or not config.tie_word_embeddings:
        return False  # the configuration of a GGUF file is made from its weights
    if model_args.path.startswith(PACKAGE):
        return False  # this project writes these files itself, and resolving the name may have to write them
    files = weight_files(resolve_model(model_args.path), **places)
    return files is not None and has_own_head(*files, config)


def load_start_model(model_args: ModelArgs, plan: PlanOrFile, dtype: str = "float32") -> PodForCausalLM:
    """The start model with the values of its weights, all of them in host memory.

    Arguments and errors are those of `hollow_start_model`.
    """
    model, weights = hollow_start_model(model_args, plan, dtype)
    weights.open()
    for parameter in model.parameters():
        parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype).copy_(weights(parameter))
    return model


def start_config(model_args: ModelArgs, plan: PlanOrFile, source: Any) -> PodConfig:
    """Configuration of the start model, with the layout, plan, windows and RoPE of the recipe.

    Args:
        plan: a SharingPlan or the path of one; None = the layout's own plan (`cla`), the checkpoint's, or
            none. The plan's windows are taken where the recipe sets none. Where the recipe sets others, those
            are taken, with a warning.
        source: the checkpoint's configuration.

    Raises:
        ValueError: layout=pod without a plan; or a plan, layout, windows or RoPE that do not fit the
            checkpoint.
    """
    layout = model_args.layout
    if layout == "cla" and plan is None:
        plan = SharingPlan.cla(source.num_hidden_layers, source.num_key_value_heads, model_args.cla_factor)
    if layout in ("dense", "window"):
        plan = None
    plan = SharingPlan.load(plan) if isinstance(plan, str | Path) else plan
    given, sinks = model_args.given_windows, model_args.sinks
    windows = given if plan is None else plan.choose_windows(**given, sinks=sinks)
    backend, asked = model_args.attention_backend, None if layout == "auto" else layout
    config = target_config(source, plan=plan, layout=asked, attention_backend=backend, sinks=sinks, **windows)
    extend(config, model_args.rope, model_args.max_position_embeddings)
    if layout == "pod" and config.sharing_plan.is_dense:
        raise ValueError(
            "model.layout is pod, but there is no plan (every head leads): run `pod explore`, set "
            "model.plan, or use model.layout=dense"
        )
    return config


def model_config(
    model_args: ModelArgs,
    output_dir: Path | str,
    target_saving: float | None = None,
    windows_only: bool = False,
) -> tuple[PodConfig, SharingPlan]:
    """Configuration and plan of the model as it will be trained, without its weights.

    Args:
        target_saving: when layout=pod has no plan yet, a `stand_in_plan` with this saving is taken; None =
            a missing plan is an error.
        windows_only: whether that plan has windows in whole layers, as plans for engines do.

    Raises:
        ValueError: the model is unknown, it does not fit plan, layout or RoPE, or there is no plan.
    """
    source, _ = source_config(model_args)
    file = model_args.plan_file(output_dir)
    plan = SharingPlan.load(file) if file else None
    own = source.model_type == "pod" and not source.sharing_plan.is_dense
    if model_args.layout == "pod" and plan is None and not own and target_saving is not None:
        sizes = source.num_hidden_layers, source.num_key_value_heads
        plan = stand_in_plan(*sizes, target_saving, windows_only)
    config = start_config(model_args, plan, source)
    # Nothing is downloaded for an estimate.
    if has_head_of_its_own(model_args, config, local_files_only=True):
        config.tie_word_embeddings = False
    return config, plan or config.sharing_plan


def stand_in_plan(
    num_layers: int, num_key_value_heads: int, saving: float, windows_only: bool = False
) -> SharingPlan:
    """A plan for estimates: blocks of nearly equal size, the same for all heads.

    Example: 4 layers and a saving of 0.25 give two blocks of two layers each. With ``windows_only``, one of
    the four keeps its window.

    Args:
        saving: roughly the share of the bytes of distant tokens' keys and values that the plan saves. One
            block of all layers saves most, a little less than half; larger values give this block too.
    """
    provenance = {"stand_in": True, "target_saving": saving}
    if windows_only:
        count = min(num_layers, math.ceil(saving * num_layers - 1e-6))
        rows = [(layer if layer < num_layers - count else None,) for layer in range(num_layers)]
        return SharingPlan(tuple(row * num_key_value_heads for row in rows), provenance=provenance)
    blocks = max(1, num_layers - round(2 * saving * num_layers))
    starts = [number * num_layers // blocks for number in range(blocks)]
    leads = [max(start for start in starts if start <= layer) for layer in range(num_layers)]
    return SharingPlan(tuple((lead,) * num_key_value_heads for lead in leads), provenance)


def source_config(model_args: ModelArgs) -> tuple[Any, str | None]:
    """The checkpoint's configuration, and a note for the user about where it came from.

    The note is None when the configuration came from the checkpoint itself. A model that is not on this
    machine is looked up among the models that recipes name, so that estimates need no network.

    Raises:
        ValueError: the model is an adapter; or it is neither on this machine nor known, and the hub cannot be
            asked.
    """
    name = model_args.path
    if is_adapter(os.path.expanduser(name)):
        raise ValueError(
            f"model.path = {name} is an adapter: merge it first with "
            "pod.load_model(adapter).save_pretrained(folder), then set model.path to that folder"
        )
    if name.startswith(PACKAGE) and name in KNOWN_SIZES:
        # A model in a package has one version only. Reading its configuration would convert its weights
        # first.
        return _known_config(name), None
    try:
        return _read_config(model_args, local_files_only=True), None
    except (OSError, ValueError) as absent:
        if name in KNOWN_SIZES:
            note = f"{name} is not on this machine: its sizes come from a built-in table"
            return _known_config(name), note
        if isinstance(absent, ValueError):
            raise
    try:
        return _read_config(model_args, local_files_only=False), None
    except OSError as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"the configuration of model.path = {name} cannot be read here ({reason}): give a folder, or a "
            f"hub id that this machine can reach{ways_without_network(name, str(error))}"
        ) from None


def _known_config(name: str) -> Any:
    """The configuration of a model that recipes name, from its sizes in `KNOWN_SIZES`."""
    sizes = dict(KNOWN_SIZES[name])
    return AutoConfig.for_model(sizes.pop("model_type"), **sizes)


def _read_config(model_args: ModelArgs, local_files_only: bool) -> Any:
    path = resolve_model(model_args.path)
    return read_config(path, model_args.gguf_file, local_files_only=local_files_only)
