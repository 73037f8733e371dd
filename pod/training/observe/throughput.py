"""Arithmetic that a model needs per token, and the rate at which the devices could do it (MFU).

Counted is what the *model* needs (Chowdhery et al., PaLM, appendix B), not what a kernel does: no recomputation of
checkpointed layers, no masked-out half of a causal product, no product of queries and keys for the distant tokens of a
follower, whose logits are the lead's, and of a window's distant tokens nothing. A multiplication and an addition are two operations.
"""

from collections.abc import Sequence
from typing import Any

import torch

from pod.modeling.shipped.sharing import Lead
from pod.training.args import TrainArgs
from pod.training.predict.devices import known_device
from pod.training.predict.shapes import Shapes, causal_pairs, proximal_pairs
from pod.training.predict.step_time import model_flops

_SAMPLED_ROWS = 256


def attention_flops(config: Any, lead: Lead, lengths: Sequence[int]) -> float:
    """Forward operations of all attention products over documents of these lengths."""
    every = sum(map(causal_pairs, lengths))
    near = sum(proximal_pairs(n, config.num_sink_tokens, config.num_recent_tokens) for n in lengths)
    pairs = 0  # once for the logits, once for the values
    for layer, row in enumerate(lead):
        for owner in row:
            follows = config.layout == "pod" and owner not in (layer, None)
            pairs += near if owner is None or follows else every
            pairs += near if owner is None else every
    groups = config.num_attention_heads // config.num_key_value_heads
    return 2.0 * config.head_dim * groups * pairs


def training_flops(config: Any, lead: Lead, args: TrainArgs, lengths: Sequence[int]) -> float:
    """Operations of one forward and backward over documents of these lengths (tokens), by the model's needs."""
    attention = attention_flops(config, lead, lengths)
    return model_flops(Shapes.from_config(config), lead, args, sum(lengths), attention)


def peak_tokens_per_second(config: Any, args: TrainArgs, dataset: Any, mesh: Any) -> float | None:
    """Tokens and padding that all devices could train at their peak, a mean over at most 256 rows of the data set; None when the peak
    is not known: the recipe's `peak_tflops`, else the data sheet's."""
    peak = args.peak_tflops
    if not peak and mesh.device.type == "cuda":
        known = known_device(torch.cuda.get_device_name(mesh.device))
        peak = 0.0 if known is None else known.tflops(args.dtype)
    if not peak:
        return None
    rows = range(0, len(dataset), -(-len(dataset) // _SAMPLED_ROWS))
    lengths = [len(document) for row in rows for document in dataset.documents(row)]
    flops = training_flops(config, config.sharing_plan.lead, args, lengths)
    return peak * 1e12 * mesh.world_size * len(rows) * dataset.context_length / flops
