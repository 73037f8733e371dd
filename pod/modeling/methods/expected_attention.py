"""Expected Attention (Devoto et al., 2025): at a prompt's end, keep tokens that future queries should read.

Future queries before RoPE are assumed to be normally distributed, with the mean and the covariance of the
prompt's queries (without its sinks). RoPE is replaced by its mean over the next ``num_future_positions``
positions. A key's expected weight is then ``exp(k·µ / √d + kᵀ Σ k / 2d)``, divided by the sum over the keys
that are not sinks. The score is that weight's mean over the query heads of a group, plus ``epsilon``, times
the norm of the value (kvpress's ``ExpectedAttentionPress``). The first ``num_sink_tokens`` always stay.
Everything else is as in SnapKV.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from pod.modeling.methods.base import Builder, Request, cache_of
from pod.modeling.methods.ranking import Ranking
from pod.modeling.methods.shared_selection import SharedSelectionLayer, free_own_keys
from pod.modeling.model.attend import compute_dtype
from pod.modeling.model.config import PodConfig
from pod.modeling.model.rope import rotate
from pod.modeling.model.step import Step


class ExpectedAttention(Ranking):
    """The ranking by mean and covariance of a prompt's queries, which are computed in at least fp32.

    Attributes:
        count: number of queries observed.
        mean: their mean, ``[B, Hq, d]``.
        spread: sums of products of their deviations from the mean, ``[B, Hq, d, d]``.
    """

    before_rope = True

    def __init__(self, config: PodConfig, layer_idx: int, request: Request):
        self.layer_idx = layer_idx
        self.num_sink_tokens = request.below_budget("num_sink_tokens")
        self.num_future_positions = request.params["num_future_positions"]
        self.epsilon = request.params["epsilon"]
        self.scale, self.count = config.head_dim**-0.5, 0
        self.mean: Tensor | None = None

    def observe(self, q: Tensor, step: Step) -> None:
        assert step.uniform_past is not None
        q = q[:, :, max(0, self.num_sink_tokens - step.uniform_past) :].to(compute_dtype(q.dtype))
        new = q.shape[2]
        if not new:
            return
        mean = q.mean(2)
        deviation = q - mean[:, :, None]
        spread = deviation.transpose(2, 3) @ deviation
        if self.mean is not None:  # combine the moments of two sets of queries (Chan et al., 1979)
            shift = mean - self.mean
            share = new / (self.count + new)
            spread += self.spread + self.count * share * shift[..., None] * shift[:, :, None]
            mean = torch.lerp(self.mean, mean, share)
        self.mean, self.spread, self.count = mean, spread, self.count + new

    def scores(self, keys: Tensor, values: Tensor, step: Step) -> Tensor:
        assert self.mean is not None, "more tokens than sinks"
        groups = self.mean.shape[1] // keys.shape[1]
        first = self.num_sink_tokens
        mean = (self.mean * self.scale).unflatten(1, (-1, groups))
        half = (self.spread * (self.scale**2 / 2 / self.count)).unflatten(1, (-1, groups))
        positions = step.max_length + torch.arange(self.num_future_positions, device=keys.device)[None]
        cos, sin = step.ropes[self.layer_idx].tables(positions)
        cos = cos.mean(2, keepdim=True)
        sin = sin.mean(2, keepdim=True)
        # rotating keys by the transpose is the same as rotating queries
        keys = rotate(keys[:, :, first:].to(mean.dtype), (cos, -sin))
        weights = torch.zeros_like(keys[..., 0])
        for g in range(groups):
            logits = ((keys @ half[:, :, g] + mean[:, :, g, None]) * keys).sum(-1)
            weights += logits.softmax(-1) / groups
        scores = (weights + self.epsilon) * values[:, :, first:].norm(dim=-1, dtype=mean.dtype)
        return F.pad(scores, (first, 0), value=math.inf)


class ExpectedLayer(SharedSelectionLayer):
    ranks = ExpectedAttention


BUILDERS = {"expected_attention": Builder(build=cache_of(ExpectedLayer, after_layers=free_own_keys))}
