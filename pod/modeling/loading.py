"""Load a checkpoint of one of the families, or a PoD export, into the one decoder, and reorder its heads."""

import copy
import inspect
import os
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from pod.families import FAMILIES, OTHER_PARTS, fields_of, read_weight, stored_names
from pod.files import read_json
from pod.modeling.adapters import CONFIG_NAME, adapter_weights, base_of, is_of_a_plan, merged, put_on
from pod.modeling.checkpoints import ADAPTER_CONFIG, EMBEDDING, HEAD, has_own_head, is_adapter, weight_files
from pod.modeling.load_options import LoadOptions, load_options
from pod.modeling.model.attend import compute_dtype
from pod.modeling.model.config import PodConfig
from pod.modeling.model.flash_version import use_asked
from pod.modeling.model.llama import PodForCausalLM
from pod.modeling.model.packed_bytes import RESIDUAL
from pod.modeling.model.sharing import SharingPlan
from pod.modeling.placement import dispatch, layout_of, stock_map
from pod.modeling.sink_weights import (
    SINK_NAME,
    Constants,
    constants_stay,
    sink_weights,
    with_trained_constants,
)
from pod.models import read_config, resolve_model, ways_without_network

_PROJECTION = re.compile(
    r"model\.layers\.(\d+)\.self_attn\.(?:([qkv])_(?:proj\.(?:weight|bias)|norm\.weight)|o_proj\.weight)"
)
Order = Sequence[Sequence[int]]
"""``[L][Hq]``: the number of each query head in the original weights (``SharingPlan.head_order``)."""


def convert_config(source: Any, **changes: Any) -> PodConfig:
    """Convert the configuration of a model of one of the ``FAMILIES`` to a ``PodConfig``.

    Args:
        source: the configuration of that model. Of a multimodal model, the text part is converted.
        changes: fields to set afterwards.

    Raises:
        ValueError: as in ``fields_of``.
    """
    source = source.get_text_config()
    own = vars(source)
    same = {name: own[name] for name in PodConfig.__annotations__.keys() & own.keys() - {"use_cache"}}
    return PodConfig(**(same | fields_of(source) | changes))


def plan_fields(plan: SharingPlan | None) -> dict[str, Any]:
    """The fields of ``PodConfig`` that a plan sets, including its windows if it records them.

    Without a plan, they are those of a dense model with its heads in the original order.
    """
    if plan is None:
        return {
            "lead": None,
            "kv_bits": None,
            "kv_residual": RESIDUAL,
            "head_order": None,
            "sink_keys": False,
        }
    bits = None if plan.bits is None else list(plan.bits)
    fields = {
        "lead": [list(row) for row in plan.lead],
        "kv_bits": bits,
        "kv_residual": plan.residual,
        "head_order": plan.head_order,
    }
    windows = {"num_sink_tokens": plan.num_sink_tokens, "num_recent_tokens": plan.num_recent_tokens}
    if plan.sinks is not None:
        fields["sinks"] = plan.sinks
    if plan.sink_constants is not None:
        fields["sink_keys"] = plan.sink_constants.keys is not None
    if plan.sinks in ("constant", "none"):
        windows["num_sink_tokens"] = 0
    return fields | {name: tokens for name, tokens in windows.items() if tokens is not None}


def from_dense(
    source: PreTrainedModel,
    config: PodConfig,
    owned: bool = False,
    constants: Constants = MappingProxyType({}),
) -> PodForCausalLM:
    """Make a PoD model from a stock or PoD model, with the same tensors under the same names.

    Heads are moved from the order of the source to ``config.head_order``, one weight after the other, into
    new tensors. For a ``cla`` layout, the key and value weights of a lead are the mean over its block.

    If the source has an output projection that differs from the embedding, it is kept, and
    ``config.tie_word_embeddings`` is set to False.

    Args:
        source: the model to take the weights from.
        config: the configuration of the new model.
        owned: True = nobody else uses the source, so its tensors are freed as they are replaced.
        constants: weights to use instead of those of the source with the same names.

    Raises:
        ValueError: weights are missing, unexpected or have another shape.
    """
    state = source.state_dict()
    if has_own_head(state, state.__getitem__, config):
        config.tie_word_embeddings = False
    model = empty_model(config)
    now = getattr(source.config, "head_order", None)
    check_fit({name: one.shape for name, one in {**state, **constants}.items()}, config, model)
    weights: dict[str, Tensor] = {}
    for name in model.state_dict():
        if name in constants:
            weights[name] = constants[name].to(source.device, source.dtype)
            continue
        weights[name] = made_weight(name, state.__getitem__, state, config, now)
        if owned and name in state and weights[name] is not state[name]:
            source.get_parameter(name).data = weights[name]
            state[name] = weights[name]
    if not config.tie_word_embeddings and weights[HEAD].data_ptr() == weights[EMBEDDING].data_ptr():
        weights[HEAD] = weights[HEAD].clone()  # two weights, as the configuration says
    model.load_state_dict(weights, assign=True)
    model.tie_weights()
    if source.generation_config is not None:
        model.generation_config = caching(source.generation_config)
    return model


def caching(generation_config: GenerationConfig) -> GenerationConfig:
    """A copy with ``use_cache`` set, which training with activation checkpointing may have turned off."""
    changed = copy.deepcopy(generation_config)
    changed.use_cache = True
    return changed


def empty_model(config: PodConfig) -> PodForCausalLM:
    """A model on the meta device, which has names and shapes of weights but no values."""
    with torch.device("meta"):
        return PodForCausalLM(config)


def check_fit(shapes: Mapping[str, Sequence[int]], config: PodConfig, model: PodForCausalLM) -> None:
    """Raise ``ValueError`` unless ``shapes``, by name, are those of all weights that the model needs."""
    needed: dict[str, Sequence[str]] = {}  # for each source of a weight, the names under which it is stored
    expected: dict[str, Sequence[int]] = {}
    for name, weight in model.state_dict().items():
        for source in sources_of(name, shapes, config):
            needed[source] = stored_names(source, shapes, config)
            expected[source] = weight.shape
    used = {stored for names in needed.values() for stored in names}
    missing = used - shapes.keys()
    if any(SINK_NAME.fullmatch(one) for one in missing):
        raise ValueError(
            "sinks = 'constant' needs constants, which neither the plan nor the checkpoint has: measure them "
            "with `pod explore` or pod.calibrate_sinks(model, plan, texts), or use sinks = 'tokens' or 'none'"
        )
    surplus = {one for one in shapes.keys() - used if not one.startswith(OTHER_PARTS)}
    # layers whose heads kept windows may have no sinks now
    unexpected = {one for one in surplus if not SINK_NAME.fullmatch(one)}
    empty = {one: torch.empty(shape, device="meta") for one, shape in shapes.items()}
    others = set()
    for source, names in needed.items():
        is_stored = missing.isdisjoint(names)
        if is_stored and read_weight(source, empty.__getitem__, shapes, config).shape != expected[source]:
            others.add(source)
    _refuse({"missing": missing, "unexpected": unexpected, "of another shape": others})


def _refuse(found: Mapping[str, Iterable[Any]]) -> None:
    """Raise ``ValueError`` if there are any names in ``found``, which has names of weights by their fault."""
    if said := ", ".join(f"{what} {sorted(names)[:3]}" for what, names in found.items() if names):
        raise ValueError(f"checkpoint does not fit: {said}")


def sources_of(name: str, have: Container[str], config: PodConfig) -> list[str]:
    """The names of the weights in a checkpoint from which the model's weight ``name`` is made.

    It is one name, except for keys and values of a ``cla`` layout, which are made from all layers of the
    block. If output projection and embedding are tied and only one of them is stored, it is that name.
    ``have`` are the names of the checkpoint's weights.
    """
    if config.tie_word_embeddings and name in (HEAD, EMBEDDING):
        stored = [one for one in (EMBEDDING, HEAD) if stored_names(one, have, config)[0] in have]
        if name in stored:
            return [name]
        return stored or [EMBEDDING]
    found = re.fullmatch(r"model\.layers\.(\d+)\.(self_attn\.[kv]_.*)", name)
    if config.layout != "cla" or found is None:
        return [name]
    block = next(block for block in config.sharing_plan.blocks(0) if int(found[1]) in block)
    names = [f"model.layers.{layer}.{found[2]}" for layer in block]
    return [one for one in names if stored_names(one, have, config)[0] in have] or [name]


def made_weight(
    name: str, read: Callable[[str], torch.Tensor], have: Container[str], config: PodConfig, now: Order | None
) -> torch.Tensor:
    """Make the model's weight ``name`` from a checkpoint's weights, with heads in the configuration's order.

    For keys and values of a ``cla`` layout it is the mean over a block of layers. (Brandon et al. train from
    scratch. The mean is how grouped-query attention merges heads, Ainslie et al., 2023, §2.1.)

    Args:
        name: name of a weight of the model.
        read: gives a weight of the checkpoint by its name.
        have: the names of the checkpoint's weights.
        config: the configuration of the model.
        now: the order of the checkpoint's heads; None = the original one.
    """
    sources = sources_of(name, have, config)
    weights = [reordered(one, read_weight(one, read, have, config), config, now) for one in sources]
    if len(weights) == 1:
        return weights[0]
    device = weights[0].device  # the lead's, where layers lie on several devices
    wide = torch.stack([weight.to(device) for weight in weights]).to(compute_dtype(weights[0].dtype))
    return wide.mean(0).to(weights[0].dtype)


def load_model(
    source: str | os.PathLike | PreTrainedModel,
    plan: SharingPlan | str | os.PathLike | None = None,
    num_sink_tokens: int | None = None,
    num_recent_tokens: int | None = None,
    dtype: torch.dtype | str | None = None,
    attention_backend: str = "auto",
    device: torch.device | str | None = None,
    layout: str | None = None,
    sinks: str | None = None,
    **others: Any,
) -> PodForCausalLM:
    """Load a dense checkpoint, a PoD export, or an adapter merged into its base, in evaluation mode.

    Args:
        source: a hub id or folder, as ``resolve_model`` takes it; a folder with an adapter of peft that names
            its base; or a transformers model in memory, whose weights are shared except for heads that move.
        plan: sharing plan or path of a ``plan.json``. None keeps the checkpoint's own plan (dense for stock
            checkpoints). The heads of the weights are moved to the order of the plan, which is the original
            one if it has no ``head_order``.
        num_sink_tokens, num_recent_tokens: windows in tokens. None takes those that ``plan`` was made for,
            else the checkpoint's, else the layout's (16 and 4080; 0 and 4096 for ``window``). Windows that
            differ from the plan's give a warning.
        dtype: dtype of the weights; None and ``"auto"`` keep the checkpoint's.
        attention_backend: ``auto`` or a registered name.
        device: where to put the model. None = the CPU; a model in memory stays where it is.
        layout: ``pod``, ``cla`` or ``window``, see ``PodConfig``; None keeps the checkpoint's (``pod`` for
            stock ones). Another layout than the checkpoint's needs training: the checkpoint's plan and
            windows are dropped, and a ``cla`` model starts with the mean of the key and value weights of each
            block of layers. ``dense`` is ``pod`` without sharing, whatever plan the checkpoint has.
        sinks: the kind of sinks in heads that keep the plan's windows: ``tokens``, ``constant`` or ``none``.
            None takes the plan's, else the checkpoint's. Constants come from the plan. A checkpoint that was
            trained under the same plan keeps its own; load it with ``layout="dense"`` first to start from the
            plan's.
        others: arguments with transformers' names. ``cache_dir``, ``local_files_only``, ``revision`` and
            ``token`` mean the same as there. ``gguf_file`` is a GGUF file inside ``source``, ``torch_dtype``
            is ``dtype``. ``device_map`` and ``max_memory``: see below. ``attn_implementation`` is a backend
            (``sdpa``: auto, ``eager``: reference, ``flash_attention_2``: flash). ``trust_remote_code`` is
            accepted and changes nothing: only code of this package runs, never a checkpoint's.

    ``device_map`` is a device, devices by module, ``balanced`` (all GPUs by equal shares), ``sequential``
    (one GPU after the other), or ``auto`` (as few GPUs as leave 30 % of their memory to the cache). Weights
    are read straight to these devices. ``max_memory`` limits the bytes of weights on each device.

    If the files and the configuration differ in whether the output projection is the embedding, the files
    win, whatever ``tie_word_embeddings`` says. The model uses a cache, whatever ``use_cache`` says. The
    environment variable ``POD_FLASH_ATTENTION`` (fa2, fa3, fa4) names the FlashAttention that runs on GPUs.

    Raises:
        ValueError: an argument, family, plan or layout does not fit; the devices cannot hold the model, or
            would only store it; the checkpoint is quantized; or files contradict each other or the
            configuration. The message says what would fit.
    """
    use_asked()
    options = load_options(dtype, attention_backend, device, others, _OWN_NAMES)
    plan = plan if plan is None or isinstance(plan, SharingPlan) else SharingPlan.load(plan)
    wishes: dict[str, Any] = {"plan": plan, "layout": layout, "attention_backend": options.attention_backend}
    windows: dict[str, Any] = {"num_sink_tokens": num_sink_tokens, "num_recent_tokens": num_recent_tokens}
    wishes |= windows if plan is None else plan.choose_windows(**windows, sinks=sinks)
    wishes["sinks"] = sinks
    if isinstance(source, PreTrainedModel):
        config = target_config(source.config, **wishes)
        options = options.placed(config, options.dtype or source.dtype)
        if options.device is None and options.layout is None:
            options = options._replace(layout=layout_of(source, config))
        dense = _in_memory(source, options)
    else:
        source = resolve_model(source)
        if is_adapter(source):
            return _from_adapter(source, wishes, options)
        options = _placed(source, wishes, options)  # refused before weights are read
        dense = _from_files(source, options)
    return _converted(dense, wishes, options, owned=dense is not source)


def _converted(dense: Any, wishes: dict[str, Any], options: LoadOptions, owned: bool) -> PodForCausalLM:
    """Make the PoD model from a model with all weights, and put it on its devices; see ``from_dense``."""
    config = target_config(dense.config, **wishes)
    config.dtype = dense.dtype
    config.name_or_path = dense.name_or_path  # where its tokenizer is
    constants = sink_weights(wishes["plan"], config, checkpoint=dense.config)
    model: Any = from_dense(dense, config, owned=owned, constants=constants)
    if options.layout is not None:
        return dispatch(model, options.layout).eval()
    model = model.to(device=dense.device if options.device is None else options.device).eval()
    if options.is_read_there:
        model.hf_device_map = {"": model.device}
    return model


def _placed(source: str, wishes: dict[str, Any], options: LoadOptions) -> LoadOptions:
    """Check a checkpoint's configuration, and add the device of each part of its model to the options."""
    config = _read_config(source, **options.places)
    return options.placed(target_config(config, **wishes), options.dtype or config.dtype)


_OWN_NAMES = frozenset(inspect.signature(load_model).parameters) - {"others"}


def _from_adapter(folder: str, wishes: dict[str, Any], options: LoadOptions) -> PodForCausalLM:
    """Load the base of an adapter, with the adapter merged into it.

    An adapter without a plan is merged before heads are moved. An adapter with a plan (``is_of_a_plan``) is
    merged into the model of that plan.
    """
    if not is_of_a_plan(folder):
        base = base_of(Path(folder))
        options = _placed(base, wishes, options)  # refused before weights are read
        stock = merged(put_on(_from_files(base, options), Path(folder)), folder)
        return _converted(stock, wishes, options, owned=True)
    backend = wishes["attention_backend"]
    if given := [name for name, value in wishes.items() if value is not None and name != "attention_backend"]:
        raise ValueError(
            f"the adapter in {folder} has its own plan, layout and windows: leave {', '.join(given)} out"
        )
    where = {"dtype": options.dtype, "device": options.device, **options.places}
    where |= {"device_map": options.spread, "max_memory": options.max_memory}
    return merged(load_adapter(folder, attention_backend=backend, **where), folder).eval()


def load_adapter(folder: str | os.PathLike, base: Any = None, **options: Any) -> Any:
    """Load the model that an adapter was trained on, with the adapter on it (a `PeftModel`).

    `pod.load_model(folder)` merges the two instead. An adapter that `pod export` wrote contains its plan,
    windows and RoPE. Any other adapter is put on the model that `pod.load_model(base, **options)` gives.

    Args:
        folder: holds `adapter_config.json` and the adapter's weights.
        base: the checkpoint that training started from: a folder, a hub id, or a transformers model. None =
            the one that the adapter names.
        options: arguments of `pod.load_model` (dtype, gguf_file, device, attention_backend).

    Raises:
        ValueError: the folder holds no adapter, its base is not named or does not fit, or peft is missing.
    """
    folder = Path(folder)
    if not (folder / ADAPTER_CONFIG).is_file():
        raise ValueError(
            f"{folder} has no {ADAPTER_CONFIG}: give the folder of an adapter, or use pod.load_model"
        )
    if not is_of_a_plan(str(folder)):
        model = load_model(base_of(folder) if base is None else base, **options)
        if model.config.head_order is not None:
            raise ValueError(
                f"the plan reorders heads, but the adapter in {folder} was trained with the original order: "
                "use pod.load_model(folder, plan=…), which merges the adapter first"
            )
        return put_on(model, folder)
    config = PodConfig.from_dict(read_json(folder / CONFIG_NAME))
    windows = {name: getattr(config, name) for name in ("num_sink_tokens", "num_recent_tokens")}
    source = base_of(folder) if base is None else base
    plan = config.sharing_plan
    if config.sinks == "constant":
        plan = with_trained_constants(plan, adapter_weights(folder))
    model = load_model(source, plan=plan, layout=config.layout, **windows, **options)
    # no rotation was computed yet: the tables are made from these fields at the first forward pass
    model.config.rope_parameters = config.rope_parameters
    model.config.max_position_embeddings = config.max_position_embeddings
    return put_on(model, folder)


def _in_memory(source: PreTrainedModel, options: LoadOptions) -> Any:
    """The model itself, or a copy in another dtype. ``ValueError`` for options that are for files only."""
    if options.places:
        raise ValueError(f"the model is in memory already: leave {', '.join(options.places)} out")
    if options.dtype in (None, source.dtype):
        return source
    return copy.deepcopy(source).to(dtype=options.dtype)  # type: ignore[call-arg]


def _from_files(source: str, options: LoadOptions) -> Any:
    """Load the stock model of a folder or hub id. ``ValueError`` if weights are missing or unexpected."""
    if os.path.isdir(source) and "gguf_file" not in options.places:
        weight_files(source)  # refuses files that contradict each other
    reading: dict[str, Any] = {**options.places, "dtype": options.dtype or "auto"}
    if options.is_read_there:
        reading["device_map"] = {"": options.device}
    if options.layout is not None:
        config = _read_config(source, **options.places)
        reading["device_map"] = stock_device_map(config, options.layout)
    dense, about = _read(
        AutoModelForCausalLM.from_pretrained,
        source,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
        **reading,
    )
    # transformers would fill missing weights at random, and drop the others
    _refuse({what: about[f"{what}_keys"] for what in ("missing", "unexpected", "mismatched")})
    return dense


def stock_device_map(config: Any, places: Mapping[str, torch.device]) -> dict[str, torch.device]:
    """The ``device_map`` of a stock model, so that its weights are read straight to their devices.

    Args:
        config: the stock model's configuration.
        places: the device of each of our modules (``placement.place``).
    """
    with torch.device("meta"):
        stock = AutoModelForCausalLM.from_config(config)
    return stock_map(stock, target_config(config), places)


def target_config(
    source: Any,
    plan: SharingPlan | str | os.PathLike | None = None,
    layout: str | None = None,
    attention_backend: str = "auto",
    sinks: str | None = None,
    **windows: int | None,
) -> PodConfig:
    """The configuration of the model that ``load_model`` makes from a checkpoint.

    Arguments and errors are those of ``load_model``, but windows that differ from the plan's give no warning
    (``SharingPlan.choose_windows`` gives it).

    Args:
        source: the checkpoint's configuration.
        windows: ``num_sink_tokens`` and ``num_recent_tokens``.
    """
    changes: dict[str, Any] = {"attention_backend": attention_backend}
    if layout is not None:
        changes |= {"layout": "pod", **plan_fields(None)} if layout == "dense" else {"layout": layout}
    if plan is not None:
        if layout == "dense":
            raise ValueError("layout = 'dense' shares nothing: leave the plan out, or use layout = 'pod'")
        plan = plan if isinstance(plan, SharingPlan) else SharingPlan.load(plan)
        changes |= plan_fields(plan)
        if constants_stay(plan, source):
            changes["sink_keys"] = source.sink_keys
    changes |= {name: tokens for name, tokens in windows.items() if tokens is not None}
    changes |= _sinks_of(source, changes, sinks, windows.get("num_sink_tokens"))
    if source.model_type != "pod":
        return convert_config(source, **changes)
    stays = changes.get("layout", source.layout) == source.layout
    if source.layout == "cla" and not (stays and changes.get("lead", source.lead) == source.lead):
        raise ValueError(
            "the checkpoint has layout 'cla', with key and value weights for its own blocks of layers "
            "only: leave plan and layout out, or start from the dense checkpoint"
        )
    # with another layout than the checkpoint's, its plan and windows are dropped
    fresh: dict[str, Any] = {**plan_fields(None), "num_sink_tokens": None, "num_recent_tokens": None}
    fresh["sinks"] = None
    return PodConfig(**(source.to_dict() | ({} if stays else fresh) | changes | {"use_cache": True}))


def _sinks_of(
    source: Any, changes: Mapping[str, Any], asked: str | None, tokens: int | None
) -> dict[str, Any]:
    """The fields ``sinks`` and ``num_sink_tokens`` that must be set beside ``changes``.

    If only a number of first tokens is given, it decides between ``tokens`` and ``none``. If only a kind is
    given and it is not the plan's or checkpoint's, their number of first tokens is dropped.

    Args:
        source: the checkpoint's configuration.
        changes: the fields that differ from it so far, those of the plan included.
        asked: the kind of sinks that was given, or None.
        tokens: the number of first tokens that was given, or None.
    """
    known = changes.get("sinks", getattr(source, "sinks", None))
    if asked is None:
        return {} if tokens is None or known == "constant" else {"sinks": None}
    if tokens is None and asked != known:
        return {"sinks": asked, "num_sink_tokens": None}
    return {"sinks": asked}


def _read_config(source: str, **places: Any) -> Any:
    """Read a checkpoint's configuration. ``ValueError`` if it cannot be read or is quantized."""
    try:
        config = _read(read_config, source, **places)
    except ValueError as error:  # transformers' message has several lines, as where a checkpoint has own code
        first, *more = str(error).splitlines()
        if not more and "custom code" not in first:
            raise
        reason = (
            "it needs custom code, which is never run here" if "custom code" in first else first.rstrip(". ")
        )
        raise ValueError(
            f"cannot load a model from {source}: {reason}; supported are the families {', '.join(FAMILIES)}"
        ) from error
    if quantized := getattr(config, "quantization_config", None):
        raise ValueError(f"{source} is quantized ({quantized}): load the original checkpoint")
    return config


def _read(read: Callable[..., Any], source: str, **options: Any) -> Any:
    """``read(source, **options)``; errors of files and networks become a ``ValueError`` of one line."""
    try:
        return read(source, **options)
    except (OSError, SafetensorError) as error:
        reason = str(error).splitlines()[0]
        ways = ways_without_network(source, str(error))
        reason = reason.rstrip(".") if ways else reason
        raise ValueError(f"cannot load a model from {source}: {reason}{ways}") from error


def reordered(name: str, weight: Tensor, config: PodConfig, now: Order | None) -> Tensor:
    """The weight ``name`` with its heads moved from the order ``now`` to ``config.head_order``.

    An order of None is the original one. If no head moves, ``weight`` itself is returned.

    Query heads are rows of ``q_proj`` and columns of ``o_proj``. KV heads are rows of ``k_proj`` and
    ``v_proj``. Biases of q, k and v are rows too, and so are norms across heads. A norm of single heads is
    shared by all heads and has no order. ``sinks`` are per query head, ``sink_values`` and ``sink_keys`` per
    KV head.
    """
    found = _PROJECTION.fullmatch(name) or SINK_NAME.fullmatch(name)
    if found is None or (now is None and config.head_order is None):
        return weight
    if name.endswith("norm.weight") and not config.qk_norm_across_heads:
        return weight
    layer = int(found[1])
    original = list(range(config.num_attention_heads))
    old = original if now is None else list(now[layer])
    new = original if config.head_order is None else list(config.head_order[layer])
    if old == new:
        return weight
    place = {head: at for at, head in enumerate(old)}
    dim = 1 if found[2] is None else 0  # columns of o_proj, rows of everything else
    index = torch.tensor([place[head] for head in new], device=weight.device)
    if found[2] in ("k", "v", "sink_values", "sink_keys"):
        index = index[:: config.num_key_value_groups] // config.num_key_value_groups
    if SINK_NAME.fullmatch(name):
        return weight.index_select(0, index)
    return weight.unflatten(dim, (-1, config.head_dim)).index_select(dim, index).flatten(dim, dim + 1)
