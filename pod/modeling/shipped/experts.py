"""The experts of a layer in two parameters, as stock Mixtral and Qwen3-MoE have them."""

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from .config import PodConfig


class PodExperts(nn.Module):
    """All experts of a layer in two parameters. Under ZeRO-3 they are gathered at once, whatever experts a rank needs."""

    def __init__(self, config: PodConfig):
        super().__init__()
        experts, hidden, inner = config.num_experts, config.hidden_size, config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(
            torch.empty(experts, 2 * inner, hidden).normal_(std=config.initializer_range)
        )
        self.down_proj = nn.Parameter(
            torch.empty(experts, hidden, inner).normal_(std=config.initializer_range)
        )
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """``[n, hidden]``, and of each token its experts ``[n, k]`` and their weights in at least fp32, to ``[n, hidden]``."""
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=len(self.down_proj)).tolist()
        rows = x[order // chosen.shape[1]].split(counts)
        # the first one also without tokens, so that every pass has gradients for the parameters
        out = torch.cat([self._one(i, part) for i, part in enumerate(rows) if len(part) or not i])
        return (out[order.argsort()].unflatten(0, chosen.shape) * weights[..., None]).sum(1).to(x.dtype)

    def _one(self, expert: int, x: Tensor) -> Tensor:
        gate, up = nn.functional.linear(x, self.gate_up_proj[expert]).chunk(2, dim=-1)
        return nn.functional.linear(self.act_fn(gate) * up, self.down_proj[expert])
