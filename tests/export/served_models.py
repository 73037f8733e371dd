"""Small models with windows in whole layers, for tests of exports that serving engines load."""

from typing import Any

import torch

import pod

WINDOW = 16
SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 48,
    "initializer_range": 0.2,
    "max_position_embeddings": 1024,
    "num_sink_tokens": 0,
    "num_recent_tokens": WINDOW,
    "lead": [[0, 0], [None, None], [2, 2], [None, None]],
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"attention_qkv_bias": True},
    "qwen3": {"qk_norm": True},
    "o_bias": {"attention_qkv_bias": True, "attention_out_bias": True},
    "mlp_bias": {"mlp_bias": True},
    "qwen3_bias": {"qk_norm": True, "attention_qkv_bias": True, "attention_out_bias": True},
    "tied": {"tie_word_embeddings": True},
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 256,
        }
    },
    "own windows": {"layer_windows": [None, WINDOW, None, WINDOW]},
    "all windows": {"layout": "window", "lead": None},
    "granite": {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.1,
        "logits_scaling": 2.0,
    },
    "smollm3": {"no_rope_layers": [1, 0, 1, 1]},
    "sinks": {"sinks": "constant"},
    "sinks with keys": {"sinks": "constant", "sink_keys": True},
    "sinks of qwen2": {"sinks": "constant", "sink_keys": True, "attention_qkv_bias": True},
    "sinks of qwen3": {"sinks": "constant", "qk_norm": True},
    "sinks, o_bias": {"sinks": "constant", "attention_qkv_bias": True, "attention_out_bias": True},
    "sinks, llama3": {
        "sinks": "constant",
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 256,
        },
    },
    "sinks, mlp_bias, yarn": {
        "sinks": "constant",
        "mlp_bias": True,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 256,
        },
    },
    "sinks, own window": {"sinks": "constant", "layer_windows": [None, WINDOW, None, None]},
}
"""Changes of `SIZES` by name; weights are random, those of biases, norms and sinks too."""
DENSE = {"lead": None, "num_sink_tokens": None, "num_recent_tokens": None}


def make_model(**changes: Any) -> pod.PodForCausalLM:
    """A model with random weights, no two parameters alike."""
    torch.manual_seed(0)
    model = pod.PodForCausalLM(pod.PodConfig(**(SIZES | changes))).eval()
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "sink_values", "sink_keys")):
            torch.nn.init.normal_(parameter, std=0.5)
        elif name.endswith("sinks"):
            torch.nn.init.normal_(parameter, mean=2.0, std=1.0)
        elif name.endswith("norm.weight"):
            torch.nn.init.normal_(parameter, mean=1.0, std=0.2)
    return model
