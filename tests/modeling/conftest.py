"""Tiny models of every family, and a decoder written independently of ours as the oracle."""

import functools

import pytest
import torch
import transformers

import pod

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
FAMILIES = {
    "llama": ("Llama", {}),
    "llama-tied-biased-llama3": (
        "Llama",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3},
    ),
    "llama-linear-mha": ("Llama", {"rope_parameters": LINEAR, "num_key_value_heads": 6}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 16}),
    "qwen2-yarn": ("Qwen2", {"rope_parameters": YARN}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.2,
            "logits_scaling": 8.0,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "phi3": ("Phi3", {}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0, 1, 0, 1], "rope_parameters": YARN}),
    "olmo2": ("Olmo2", {}),
    "qwen3-g3": ("Qwen3", {"head_dim": 8, "num_key_value_heads": 2, "rope_parameters": LLAMA3}),
}
SLIDING = ["full_attention", "full_attention", "sliding_attention", "full_attention", "sliding_attention"]
FAMILIES |= {
    "mistral-sliding": ("Mistral", {"sliding_window": 9}),
    "phi3-sliding": ("Phi3", {"sliding_window": 12}),
    "qwen2-sliding": ("Qwen2", {"use_sliding_window": True, "sliding_window": 9, "layer_types": SLIDING}),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen3-moe": (
        "Qwen3Moe",
        {
            "head_dim": 16,
            "moe_intermediate_size": 24,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "mlp_only_layers": [1],
            "decoder_sparse_step": 1,
            "norm_topk_prob": True,
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            "head_dim": 16,
            "sliding_window": 9,
            "layer_types": SLIDING,
            "query_pre_attn_scalar": 24,
            "rope_parameters": {
                "full_attention": LINEAR | {"rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
            },
        },
    ),
}
LEAD = [[0, None], [0, 1], [None, 1], [0, 1], [4, None]]
SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.25,
}


WITH_NORMS = ("granite", "phi3", "smollm3", "olmo2", "gemma3")
"""Families whose norms differ from one channel to the next here; in tests that are older they are ones."""


def make_stock(family="llama", dtype=torch.float64, **changes):
    """A random stock model with weights large enough that attention is far from uniform."""
    name, extra = FAMILIES[family]
    torch.manual_seed(0)
    kind = "TextConfig" if name == "Gemma3" else "Config"
    config = getattr(transformers, f"{name}{kind}")(**(SIZES | extra | changes))
    model = getattr(transformers, f"{name}ForCausalLM")(config).to(dtype).eval()
    model.set_experts_implementation("eager")  # the other ones are not for fp64
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.2)
            elif family in WITH_NORMS and "norm" in name:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


def lead_for(stock):
    heads, slides = stock.config.num_key_value_heads, getattr(stock.config, "sliding_window", None)
    kinds = getattr(stock.config, "layer_types", None) or ["sliding_attention"] * len(LEAD)
    return [
        [None if slides and kind == "sliding_attention" else row[head % 2] for head in range(heads)]
        for row, kind in zip(LEAD, kinds, strict=True)
    ]


def make_pod(
    family="llama",
    dtype=torch.float64,
    windows=(4, 11),
    plan=True,
    backend="auto",
    use_cache=False,
    **changes,
):
    """``use_cache``: of the configuration.

    It is False, so that ``model(ids)`` is the pass without a cache, as in training.
    """
    stock = make_stock(family, dtype, **changes)
    plan = pod.SharingPlan(lead_for(stock)) if plan else None
    model = pod.load_model(
        stock, plan=plan, num_sink_tokens=windows[0], num_recent_tokens=windows[1], attention_backend=backend
    )
    model.config.use_cache = use_cache
    return model


def random_ids(batch, n, seed=0):
    return torch.randint(3, 97, (batch, n), generator=torch.Generator().manual_seed(seed))


def turn(x, position_ids, frequencies):
    """RoPE as complex multiplication: pairs (i, i + d/2)."""
    half = x.shape[-1] // 2
    angle = position_ids.double()[:, None] * frequencies.double()
    z = torch.complex(x[..., :half].double(), x[..., half:].double()) * torch.polar(
        torch.ones_like(angle), angle
    )
    return torch.cat((z.real, z.imag), dim=-1)


@torch.no_grad()
def naive_logits(model, ids, attend):
    """Logits of one sequence ``[n]``.

    ``attend(layer, q, k, v, turn)`` gets un-rotated ``[heads, n, d]`` in fp64.
    """
    frequencies = (
        model.model.context(torch.zeros(1, 1, dtype=torch.float64), torch.zeros(1, 1)).ropes[0].frequencies
    )
    hidden = model.model.embed_tokens(ids)
    for index, layer in enumerate(model.model.layers):
        q, k, v = layer.self_attn._project(layer.input_layernorm(hidden)[None])
        out = attend(index, q[0], k[0], v[0], lambda x, p: turn(x, p, frequencies))
        hidden = hidden + layer.self_attn.o_proj(out.transpose(0, 1).flatten(1))
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return model.lm_head(model.model.norm(hidden))


@pytest.fixture(scope="session")
def tools():
    """The helpers of this file, for tests in other files."""
    import types

    return types.SimpleNamespace(
        make_stock=make_stock, make_pod=make_pod, random_ids=random_ids, naive_logits=naive_logits, lead=LEAD
    )


@functools.cache
def _model_of_layout(layout: str, dtype: torch.dtype):
    if layout in ("dense", "pod"):
        return make_pod("llama", dtype, plan=layout == "pod")
    windows = {"num_sink_tokens": 0, "num_recent_tokens": 20} if layout == "window" else {}
    return pod.load_model(make_stock("llama", dtype), layout=layout, **windows)


@pytest.fixture(scope="session")
def model_of():
    """``(layout, dtype) -> model`` for a row of ``method_table``; made once, so tests must not change it."""
    return lambda layout, dtype=torch.float64: _model_of_layout(layout, dtype)
