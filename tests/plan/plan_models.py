"""Small models whose roles are measured, and orders of their heads."""

import numpy as np
import torch

import pod
from pod.plan.layer_constants import LayerConstants

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


def gradients_of_attention(model, input_ids):
    """Gradients ``[n, hidden]`` of the summed loss of drawn tokens for the output of each layer's attention.

    One graph of the whole model. Token i is drawn by the i-th number of the seeded generator.
    """
    outs = []
    hooks = [
        layer.self_attn.o_proj.register_forward_hook(lambda _, inputs, out: outs.append(out))
        for layer in model.model.layers
    ]
    with torch.enable_grad():
        logits = model(input_ids, use_cache=False).logits[0]
        for hook in hooks:
            hook.remove()
        chances = torch.rand(len(logits), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        sums = np.cumsum(logits.detach().softmax(-1).numpy(), axis=1)
        drawn = [
            int(np.searchsorted(row, chance, side="right")) for row, chance in zip(sums, chances, strict=True)
        ]
        loss = torch.nn.functional.cross_entropy(logits, torch.tensor(drawn), reduction="sum")
        return [gradient[0] for gradient in torch.autograd.grad(loss, outs)]


def log_probabilities(model, input_ids, shares, sinks=None):
    """Log-probabilities ``[n, V]``; head h of layer l puts out ``o + shares[l, h] · (o' - o)``."""
    config = model.config
    n, d, groups = input_ids.shape[1], config.head_dim, config.num_key_value_groups
    i, j = torch.arange(n)[:, None], torch.arange(n)
    causal = j <= i
    near = causal & ((j < config.num_sink_tokens) | (i - j < config.num_recent_tokens))
    ropes = model.model.context(torch.zeros(1, n, 1).double(), torch.arange(n)[None]).ropes
    given, hooks = {}, []
    for number, layer in enumerate(model.model.layers):

        def remember(module, inputs, number=number):
            given[number] = inputs[0]

        def mix(module, inputs, number=number, layer=layer):
            q, k, v = layer.self_attn._project(given[number])
            relative = k if sinks is None else k - sinks[number].keys[:, None]
            q, k, relative = (ropes[number](one)[0] for one in (q, k, relative))
            outs = []
            for head in range(config.num_attention_heads):
                own = head // groups
                logits = q[head] @ k[own].T / d**0.5
                full = logits.masked_fill(~causal, float("-inf")).softmax(-1) @ v[0, own]
                seen = (q[head] @ relative[own].T / d**0.5).masked_fill(~near, float("-inf"))
                values = v[0, own]
                if sinks is not None:
                    seen = torch.cat([seen, sinks[number].logits[head].expand(n, 1)], dim=1)
                    values = torch.cat([values, sinks[number].values[own][None]])
                outs.append(full + shares[number, own] * (seen.softmax(-1) @ values - full))
            return (torch.cat(outs, -1)[None],)

        hooks += [
            layer.self_attn.register_forward_pre_hook(remember),
            layer.self_attn.o_proj.register_forward_pre_hook(mix),
        ]
    try:
        return model(input_ids, use_cache=False).logits[0].log_softmax(-1)
    finally:
        for hook in hooks:
            hook.remove()


def sinks_at_random(query_heads, kv_heads, generator):
    """Constants of four layers."""
    shapes = (query_heads,), (kv_heads, 8), (kv_heads, 8)
    rows = [[torch.randn(shape, generator=generator).double() for shape in shapes] for _ in range(4)]
    return [LayerConstants(*row) for row in rows]
