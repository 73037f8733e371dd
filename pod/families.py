"""The model families that can be loaded: how their configuration becomes ours, and how weights are named.

Each family is one row of ``FAMILIES``. ``fixed`` holds what the family's modeling file fixes without a field
of its configuration. ``reads`` holds what the family calls by another name. Fields of the same name and
meaning are taken over as they are.

The decoder knows no families, only fields of ``PodConfig``. The names and values in this file come from the
configurations and checkpoints of others; none of them is our choice.
"""

from collections.abc import Callable, Container, Mapping
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

_LAYERS = "model.layers."


class Family(NamedTuple):
    """How a configuration of transformers becomes ours.

    Attributes:
        fixed: fields of ``PodConfig`` that have the same value in all models of the family.
        reads: fields of ``PodConfig``, each with a function that computes it from the family's configuration.
        required: fields of the family's configuration, each with the one value that the decoder supports.
    """

    fixed: Mapping[str, Any] = MappingProxyType({})
    reads: Mapping[str, Callable[[Any], Any]] = MappingProxyType({})
    required: Mapping[str, Any] = MappingProxyType({})


def _windows(source: Any) -> list[int | None] | None:
    """``PodConfig.layer_windows``: the window in tokens of each sliding layer, and None for the other layers.

    Where the configuration names no layer types, all layers slide. Where no window is shorter than the
    model's context, the result is None for the whole model.
    """
    window = source.sliding_window
    types = getattr(source, "layer_types", None) or ["sliding_attention"] * source.num_hidden_layers
    if window is None or window >= source.max_position_embeddings or "sliding_attention" not in types:
        return None
    return [window if kind == "sliding_attention" else None for kind in types]


def _dense_layers(source: Any) -> list[int]:
    """``PodConfig.mlp_only_layers`` of Qwen3-MoE: the layers whose feed-forward part has no experts."""
    step, given = source.decoder_sparse_step, source.mlp_only_layers
    return [layer for layer in range(source.num_hidden_layers) if layer in given or (layer + 1) % step]


_Reads = dict[str, Callable[[Any], Any]]
_BIAS: _Reads = {name: attrgetter("attention_bias") for name in ("attention_qkv_bias", "attention_out_bias")}
_SLIDES: _Reads = {"layer_windows": _windows}
_GEMMA: _Reads = {
    "attention_multiplier": lambda source: source.query_pre_attn_scalar**-0.5,
    "embedding_multiplier": lambda source: source.hidden_size**0.5,
    "hidden_act": attrgetter("hidden_activation"),
    "rope_parameters": lambda source: source.rope_parameters["full_attention"],
    "window_rope_parameters": lambda source: source.rope_parameters["sliding_attention"],
}
_NOT_GEMMA2 = {
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "use_bidirectional_attention": False,
}

FAMILIES: dict[str, Family] = {
    "gemma3_text": Family(
        {"norm_placement": "both", "norm_offset": 1.0, "qk_norm": True}, _BIAS | _SLIDES | _GEMMA, _NOT_GEMMA2
    ),
    "granite": Family(reads=_BIAS),
    "llama": Family(reads=_BIAS),
    "mistral": Family(reads=_SLIDES),
    "mixtral": Family(
        {"norm_topk_prob": True},
        {
            "num_experts": attrgetter("num_local_experts"),
            "moe_intermediate_size": attrgetter("intermediate_size"),
            **_SLIDES,
        },
        {"router_jitter_noise": 0.0, "output_router_logits": False},
    ),
    "olmo2": Family({"norm_placement": "behind", "qk_norm": True, "qk_norm_across_heads": True}, _BIAS),
    "phi3": Family(reads=_SLIDES, required={"resid_pdrop": 0.0, "embd_pdrop": 0.0}),
    "qwen2": Family({"attention_qkv_bias": True}, _SLIDES),
    "qwen3": Family({"qk_norm": True}, _BIAS | _SLIDES),
    "qwen3_moe": Family(
        {"qk_norm": True},
        {"num_experts": attrgetter("num_experts"), "mlp_only_layers": _dense_layers, **_BIAS, **_SLIDES},
        {"output_router_logits": False},
    ),
    "smollm3": Family(reads=_BIAS | _SLIDES),
}
"""The families by their ``model_type``."""


def fields_of(source: Any) -> dict[str, Any]:
    """The fields of ``PodConfig`` that a model family fixes, or calls by another name.

    Args:
        source: a configuration of transformers for a text model.

    Raises:
        ValueError: the family is not supported, or a field has a value that the decoder does not support.
    """
    name = source.model_type
    if name not in FAMILIES:
        if getattr(source, "pod_export", None) == "vllm":  # `MARK` of pod/export/served.py
            raise ValueError(
                f"model_type = {name!r} with pod_export = 'vllm' is an export for serving engines, which "
                "pod-kv does not load: export the model with `pod export --format hf`, and load that folder"
            )
        known = f"{', '.join(FAMILIES)}; exports of this project load from their folder"
        raise ValueError(f"model_type = {name!r} is not supported; supported are {known}")
    family = FAMILIES[name]
    own = vars(source)
    rotated = source.rope_parameters.get("partial_rotary_factor", 1.0)
    others = set(own.get("layer_types") or ()) - {"full_attention", "sliding_attention"}
    given = own | {"partial_rotary_factor": rotated, "layer_types": others}
    for field, value in {"partial_rotary_factor": 1.0, "layer_types": set(), **family.required}.items():
        found = given.get(field) or value
        if found != value:
            allowed = value if field != "layer_types" else "full_attention or sliding_attention"
            raise ValueError(
                f"{field} = {found!r} of this {name} checkpoint is not supported: it must be {allowed!r}"
            )
    return {**family.fixed, **{field: read(source) for field, read in family.reads.items()}}


_QKV, _GATE_UP = "self_attn.qkv_proj.weight", "mlp.gate_up_proj.weight"
_STORED: dict[str, list[tuple[str, ...]]] = {
    "self_attn.q_proj.weight": [(_QKV,)],
    "self_attn.k_proj.weight": [(_QKV,)],
    "self_attn.v_proj.weight": [(_QKV,)],
    "mlp.gate_proj.weight": [(_GATE_UP,)],
    "mlp.up_proj.weight": [(_GATE_UP,)],
    "mlp.gate.weight": [("block_sparse_moe.gate.weight",)],
    "mlp.experts.gate_up_proj": [
        ("mlp.experts.{}.gate_proj.weight", "mlp.experts.{}.up_proj.weight"),
        ("block_sparse_moe.experts.{}.w1.weight", "block_sparse_moe.experts.{}.w3.weight"),
    ],
    "mlp.experts.down_proj": [
        ("mlp.experts.{}.down_proj.weight",),
        ("block_sparse_moe.experts.{}.w2.weight",),
    ],
}
"""Other names under which a checkpoint may store a decoder layer's weight. ``{}`` is the number of an expert.

Phi-3 has fused weights, and files of Qwen3-MoE and Mixtral have one weight per expert.
"""
OTHER_PARTS = "vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."
"""Prefixes of the weights that are left out of models with vision. Their text part is ``language_model``."""


def stored_names(name: str, have: Container[str], config: Any) -> list[str]:
    """The names of the weights in a checkpoint that make up the decoder's weight ``name``.

    It is one name, or one per expert and part (gate, up). Where the checkpoint has no such weight, the result
    is ``name`` itself.

    Args:
        have: the names of all weights in the checkpoint.
        config: a ``PodConfig``, which gives the number of experts.
    """
    if name in have:
        return [name]
    if name.startswith(_LAYERS):
        layer, _, own = name.removeprefix(_LAYERS).partition(".")
        for theirs in _STORED.get(own, ()):
            experts = range(config.num_experts if "{}" in theirs[0] else 1)
            names = [f"{_LAYERS}{layer}.{one.format(i)}" for i in experts for one in theirs]
            if names[0] in have:
                return names
    bare = name.removeprefix("model.")  # a decoder that is saved without its head has such names
    inside = f"language_model.{name}", f"model.language_model.{bare}", bare
    return [next((one for one in inside if one in have), name)]


def read_weight(name: str, read: Callable[[str], Tensor], have: Container[str], config: Any) -> Tensor:
    """The decoder's weight ``name``, read from a checkpoint.

    It is the stored weight itself, a view of some rows of a fused weight, or the weights of all experts put
    together.

    Args:
        read: returns the weight that the checkpoint stores under a name.
        have: the names of all weights in the checkpoint.
    """
    stored = stored_names(name, have, config)
    weights = [read(one) for one in stored]
    if stored[0].endswith((_QKV, _GATE_UP)):
        q = config.num_attention_heads * config.head_dim
        kv = config.num_key_value_heads * config.head_dim
        inner = config.intermediate_size
        rows = {"q": (0, q), "k": (q, q + kv), "v": (q + kv, None), "gate": (0, inner), "up": (inner, None)}
        projection = name.rsplit(".", 2)[1].removesuffix("_proj")
        first, end = rows[projection]
        return weights[0][first:end]
    if len(stored) == 1:
        return weights[0]
    each = len(stored) // config.num_experts
    return torch.stack([torch.cat(weights[i : i + each]) for i in range(0, len(weights), each)])
