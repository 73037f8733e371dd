"""A model as serving engines load it: standard names, a window per layer, constant sinks folded into biases.

Engines keep one table of blocks per layer. A plan must therefore give all heads of a layer the same role:
they lead, or they keep their window. The folder is that of a *stock* model, which engines know, where one
computes the same: Llama, Qwen2, Qwen3 or GraniteSWA, which is a Llama with windows, a sink in every layer,
biases and factors. Only for Qwen3 with windows or sinks there is no stock model: its folder names the
architecture of the plugin in `integrations/vllm`.

A constant sink is a logit ``s`` per query head and a value ``u`` per KV head. It acts as one more token of
every window. The value needs no support of an engine, since the probabilities sum to 1:

    sum_j p_j v_j + p_s u  =  sum_j p_j (v_j - u) + u

So ``u`` is subtracted from the bias of ``v_proj``, and ``W_o u`` is added to the bias of ``o_proj``. What
remains is a softmax with one more logit, `self_attn.sinks`, as gpt-oss has it. The sink's key is subtracted
from all keys of its layer, so it goes into the bias of ``k_proj``.
"""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import save_torch_state_dict
from torch import Tensor
from transformers import CONFIG_MAPPING

from pod.files import write_json
from pod.modeling.checkpoints import HEAD
from pod.modeling.model.config import PodConfig
from pod.modeling.model.llama import PodForCausalLM

OWN_TYPE = "pod_served"
"""`model_type` of a folder that no stock model computes."""
OWN_ARCHITECTURE = "PodServedForCausalLM"
"""The architecture that the plugin in `integrations/vllm` registers.

transformers does not know its type, and refuses it.
"""
MARK = "pod_export"
"""The field of config.json that marks a folder as an export of this package for an engine."""
NO_SINK = -1e4
"""The logit of a layer without a sink, for an architecture with a sink in every layer.

Its share in the softmax is zero in every dtype.
"""
_WAY_OUT = "make one with explore.target=vllm"


class Target(NamedTuple):
    """The model that config.json names: transformers reads its `model_type`, vLLM its `architecture`."""

    model_type: str
    architecture: str

    @property
    def needs_plugin(self) -> bool:
        """Whether vLLM needs the plugin, as it also does for a stock Qwen3 with windows or biases."""
        return self.architecture == OWN_ARCHITECTURE

    @property
    def is_stock(self) -> bool:
        """Whether transformers loads the folder with its own code alone."""
        return self.model_type != OWN_TYPE


GRANITE = Target("granite_swa", "GraniteSWAForCausalLM")
"""The stock model with windows, a sink in every layer, biases and factors."""
OWN = Target(OWN_TYPE, OWN_ARCHITECTURE)
"""The plugin's model, where no stock model computes the same."""


def windows_of_layers(config: PodConfig) -> list[int | None]:
    """For each layer the number of tokens that it sees and keeps, the current one included; None = all.

    Raises:
        ValueError: heads of one layer have different roles, or a head follows.
    """
    windows = []
    for layer, row in enumerate(config.sharing_plan.lead):
        if set(row) == {layer}:
            windows.append(None)
        elif set(row) == {None}:
            windows.append(config.windows_of(layer)[1])
        elif any(lead not in (None, layer) for lead in row):
            raise ValueError(
                f"layer {layer} follows another layer, which no serving engine can: {_WAY_OUT}, or use "
                "export.format=hf"
            )
        else:
            raise ValueError(
                f"the plan gives heads of layer {layer} different roles, and serving engines keep whole "
                f"layers: {_WAY_OUT} (or explore.granularity=layer), or use export.format=hf"
            )
    return windows


def check_servable(config: PodConfig) -> None:
    """Raise ValueError when serving engines cannot compute what a model with this configuration computes.

    It refuses layout cla, packed layers, layers whose heads have different roles or follow, windows with
    stored first tokens, windows of several lengths, and decoders of other families. The message says what to
    do.
    """
    if config.layout == "cla":
        raise ValueError(
            "layout = 'cla' shares keys and values between layers, which the export for vLLM does not write: "
            "use export.format=hf"
        )
    if config.sharing_plan.packs:
        raise ValueError(
            f"the plan holds layers in fewer bits, in a format that only pod-kv reads: {_WAY_OUT}, or use "
            "export.format=hf"
        )
    windows = windows_of_layers(config)
    planned = any(
        window is not None and config.window_of(layer) is None for layer, window in enumerate(windows)
    )
    if planned and config.num_sink_tokens:
        raise ValueError(
            f"windows that keep the first {config.num_sink_tokens} tokens are not known to vLLM: {_WAY_OUT} "
            "(model.sinks=constant), or use export.format=hf"
        )
    lengths = sorted({window for window in windows if window is not None})
    if len(lengths) > 1:
        raise ValueError(
            f"windows of {' and '.join(map(str, lengths))} tokens in one model: vLLM has one length, so set "
            "model.num_recent_tokens to that of the layers which were trained with windows"
        )
    _check_family(config)


def _check_family(config: PodConfig) -> None:
    """Raise ValueError when the decoder is not that of Llama, Mistral, Qwen2, Qwen3, Granite or SmolLM3."""
    others = {
        "norm_placement": config.norm_placement != "before",
        "norm_offset": config.norm_offset != 0.0,
        "qk_norm_across_heads": config.qk_norm_across_heads,
        "num_experts": config.num_experts > 0,
        "window_rope_parameters": config.window_rope_parameters is not None,
        "hidden_act": config.hidden_act != "silu",
        "qk_norm": config.qk_norm and _is_granite(config),
    }
    found = [name for name, differs in others.items() if differs]
    if found:
        raise ValueError(
            f"{found[0]} = {getattr(config, found[0])!r}: exports for vLLM are of the families "
            "Llama, Mistral, Qwen2, Qwen3, Granite and SmolLM3 only; use export.format=hf"
        )


def _is_granite(config: PodConfig) -> bool:
    """Whether the model has factors, or layers that do not rotate. Only Granite's architecture has them."""
    scale = config.attention_multiplier
    return (
        (config.embedding_multiplier, config.residual_multiplier, config.logits_scaling) != (1.0, 1.0, 1.0)
        or (scale is not None and scale != config.head_dim**-0.5)
        or (config.no_rope_layers is not None and not all(config.no_rope_layers))
    )


def target_of(config: PodConfig) -> Target:
    """The stock model that computes the same in transformers and vLLM, else the plugin's model.

    For windows per layer, a folder can name a Qwen2 for transformers and a Llama for vLLM: transformers has
    such windows in Qwen2 and Qwen3, vLLM has them in Llama. A Llama is a Qwen2 whose biases are zero. One
    folder serves both, because they choose their code by different fields of config.json.
    """
    has_windows = any(window is not None for window in windows_of_layers(config))
    has_sinks = bool(config.sink_layers)
    inner, outer = config.attention_qkv_bias, config.attention_out_bias
    if config.qk_norm:
        if has_sinks or config.mlp_bias or inner != outer:
            return OWN
        plain = not has_windows and not inner
        return Target("qwen3", "Qwen3ForCausalLM" if plain else OWN_ARCHITECTURE)
    if not has_windows and inner == outer and not _is_granite(config):
        return Target("llama", "LlamaForCausalLM")
    if has_sinks or outer or config.mlp_bias or _is_granite(config):
        return GRANITE
    return Target("qwen2", "LlamaForCausalLM" if has_windows else "Qwen2ForCausalLM")


TOKEN_IDS = "bos_token_id", "eos_token_id", "pad_token_id"
"""Tokens of a model that may be missing."""


def served_config(config: PodConfig, dtype: torch.dtype) -> dict[str, Any]:
    """The content of config.json for weights of `dtype`."""
    target = target_of(config)
    windows = windows_of_layers(config)
    length = next((window for window in windows if window is not None), None)
    sinks = config.sink_layers
    source = CONFIG_MAPPING["llama" if target.model_type == OWN_TYPE else target.model_type]
    same = {name: getattr(config, name) for name in source.__annotations__ if hasattr(config, name)}
    fields = source(**{name: value for name, value in same.items() if value is not None}).to_dict()
    content = {name: fields[name] for name in source.__annotations__ if name in fields}
    # a model without such a token would get that of the family
    content |= {name: None for name in TOKEN_IDS if getattr(config, name) is None}
    content |= {
        "model_type": target.model_type,
        "architectures": [target.architecture],
        "dtype": str(dtype).removeprefix("torch."),
        "head_dim": config.head_dim,
        "attention_bias": "o_proj" in _projections_with_bias(config),
        "layer_types": ["full_attention" if window is None else "sliding_attention" for window in windows],
        "sliding_window": length,
        "use_sliding_window": length is not None,
        MARK: "vllm",
    }
    if target == Target("qwen2", "LlamaForCausalLM"):
        content["qkv_bias"] = True  # vLLM's Llama reads this
    if target == GRANITE:
        content |= _granite_fields(config)
        content["sliding_window"] = length or config.max_position_embeddings  # transformers wants a number
    if target.needs_plugin:
        content["qkv_bias"] = "q_proj" in _projections_with_bias(config)
        content["qk_norm"] = config.qk_norm
        content["sink_layers"] = sinks
    return content


def _granite_fields(config: PodConfig) -> dict[str, Any]:
    """The fields of `granite_swa` that have other names in a PodConfig.

    They are the factor of attention, and the base of RoPE in each layer (0 = no RoPE).
    """
    thetas = []
    for layer in range(config.num_hidden_layers):
        rope = config.rope_of(layer)
        thetas.append(0.0 if rope is None else float(rope["rope_theta"]))
    scale = config.attention_multiplier
    return {
        "attention_multiplier": config.head_dim**-0.5 if scale is None else scale,
        "layer_rope_theta": thetas,
    }


def _projections_with_bias(config: PodConfig) -> list[str]:
    """The names of the projections of attention that have a bias in the exported model."""
    target = target_of(config)
    has_sinks = bool(config.sink_layers)
    inner = config.attention_qkv_bias or has_sinks or target.model_type == "qwen2"
    outer = config.attention_out_bias or has_sinks
    if target == GRANITE:
        has_biases = inner or outer
        inner = has_biases
        outer = has_biases
    names = []
    if inner:
        names += ["q_proj", "k_proj", "v_proj"]
    if outer:
        names.append("o_proj")
    return names


def served_weights(model: PodForCausalLM) -> dict[str, Tensor]:
    """The weights by their standard names, with sinks folded into the biases.

    Where the target has a bias and the model has none, it is zeros.
    """
    config = model.config
    weights = {name: weight.detach() for name, weight in model.state_dict().items()}
    if config.tie_word_embeddings:
        weights.pop(HEAD, None)
    sinks = config.sink_layers
    for layer in range(config.num_hidden_layers):
        attention = f"model.layers.{layer}.self_attn."
        for name in _projections_with_bias(config):
            projection = weights[f"{attention}{name}.weight"]
            zeros = projection.new_zeros(projection.shape[0])
            weights.setdefault(f"{attention}{name}.bias", zeros)
        if layer in sinks:
            _fold(weights, attention, config.num_key_value_groups)
        elif target_of(config) == GRANITE:
            projection = weights[f"{attention}q_proj.weight"]
            weights[f"{attention}sinks"] = projection.new_full((config.num_attention_heads,), NO_SINK)
    return weights


def _fold(weights: dict[str, Tensor], attention: str, groups: int) -> None:
    """Move the values and keys of a layer's sink into its biases, in place.

    The bias of `v_proj` is rounded to the dtype of the weights. The bias of `o_proj` adds exactly what that
    rounded bias subtracts.

    Args:
        attention: the beginning of the names of the layer's weights in attention.
        groups: query heads per KV head.
    """
    values = weights.pop(f"{attention}sink_values")
    before = weights[f"{attention}v_proj.bias"]
    after = (before.double() - values.double().flatten()).to(before.dtype)
    subtracted = (before.double() - after.double()).unflatten(0, values.shape)
    each_query_head = subtracted.repeat_interleave(groups, dim=0).flatten()
    projection = weights[f"{attention}o_proj.weight"]
    added = projection.double() @ each_query_head
    output = weights[f"{attention}o_proj.bias"]
    weights[f"{attention}v_proj.bias"] = after
    weights[f"{attention}o_proj.bias"] = (output.double() + added).to(output.dtype)
    keys = weights.pop(f"{attention}sink_keys", None)
    if keys is not None:
        bias = weights[f"{attention}k_proj.bias"]
        weights[f"{attention}k_proj.bias"] = (bias.double() - keys.double().flatten()).to(bias.dtype)


@torch.no_grad()
def write_served(model: PodForCausalLM, folder: Path, max_shard_size: str) -> None:
    """Write configuration, generation configuration and weights into an existing folder.

    Errors are those of `check_servable`.
    """
    check_servable(model.config)
    write_json(folder / "config.json", served_config(model.config, model.dtype))
    if model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
    save_torch_state_dict(
        served_weights(model), folder, max_shard_size=max_shard_size, metadata={"format": "pt"}
    )
