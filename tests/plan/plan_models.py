"""Small models whose roles are measured, and orders of their heads."""

import torch

import pod

SINKS, RECENT = 2, 5


def make_model(query_heads, kv_heads, sinks=SINKS, recent=RECENT, **changes):
    torch.manual_seed(1)
    config = pod.PodConfig(
        vocab_size=61, hidden_size=40, num_hidden_layers=4, num_attention_heads=query_heads,
        num_key_value_heads=kv_heads, head_dim=8, intermediate_size=48, max_position_embeddings=256,
        initializer_range=0.3, num_sink_tokens=sinks, num_recent_tokens=recent, attention_backend="reference",
        **changes,
    )  # fmt: skip
    return pod.PodForCausalLM(config).double().eval()


def any_order(config, seed=0):
    """Random orders of the query heads of every pair, ``[L, L, H, H, G]``."""
    layers, heads, groups = config.num_hidden_layers, config.num_key_value_heads, config.num_key_value_groups
    generator = torch.Generator().manual_seed(seed)
    count = layers * layers * heads * heads
    rows = [torch.randperm(groups, generator=generator) for _ in range(count)]
    return torch.stack(rows).view(layers, layers, heads, heads, groups)
