"""Arithmetic that a model needs per token, and what share of the devices' peak a run gets out of it (MFU).

Counted is what the *model* needs (Chowdhery et al., PaLM, appendix B), not what a kernel does: no recomputation of
checkpointed layers, no masked-out half of a causal product, no product of queries and keys for the distant tokens of a
follower, whose logits are the lead's, and of a window's distant tokens nothing. A multiplication and an addition are two operations.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pod.training.args import TrainArgs
from pod.training.predict.devices import peak_tflops
from pod.training.predict.shapes import Lead, Shapes, causal_pairs, proximal_pairs
from pod.training.predict.step_time import model_flops

_SAMPLED_ROWS = 256


def attention_flops(config: Any, lead: Lead, lengths: Iterable[int]) -> float:
    """Forward operations of all attention products over documents of these lengths."""
    sinks, recent = config.num_sink_tokens, config.num_recent_tokens
    every = near = 0
    for length in lengths:
        every += causal_pairs(length)
        near += proximal_pairs(length, sinks, recent)
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
    shapes = Shapes.from_config(config)
    return model_flops(shapes, lead, args, sum(lengths), attention_flops(config, lead, lengths))


@dataclass(frozen=True)
class Throughput:
    """What `mfu` is made of.

    Attributes:
        flops_per_token: mean over tokens and padding, `training_flops` of some rows divided by their places.
        peak_flops: operations per second of all devices together; None = not known.
    """

    flops_per_token: float
    peak_flops: float | None

    @classmethod
    def of(cls, config: Any, args: TrainArgs, dataset: Any, mesh: Any) -> "Throughput":
        """From at most 256 rows spread over the data set."""
        step = -(-len(dataset) // _SAMPLED_ROWS)
        rows = range(0, len(dataset), step)
        lengths = [len(document) for row in rows for document in dataset.documents(row)]
        flops = training_flops(config, config.sharing_plan.lead, args, lengths)
        peak = device_peak(args, mesh.device)
        return cls(
            flops / (len(rows) * dataset.context_length), None if peak is None else peak * mesh.world_size
        )

    def mfu(self, tokens_per_second: float) -> float | None:
        """Share of the peak, 0 to 1; None when the peak is not known."""
        if self.peak_flops is None:
            return None
        return tokens_per_second * self.flops_per_token / self.peak_flops


def device_peak(args: TrainArgs, device: torch.device) -> float | None:
    """Operations per second of one device in `args.dtype`: the recipe's `peak_tflops`, else the data sheet's."""
    if args.peak_tflops:
        return args.peak_tflops * 1e12
    if device.type != "cuda":
        return None
    known = peak_tflops(torch.cuda.get_device_name(device), args.dtype)
    return None if known is None else known * 1e12
