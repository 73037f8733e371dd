"""The experts of a layer in two parameters, as in stock Mixtral and Qwen3-MoE.

Which expert a token goes to is known on the device only. The host never reads it, because all shapes follow
from the numbers of tokens and experts. So the host does not wait, and a CUDA graph can record a decoded
token.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import ACT2FN

from .config import PodConfig

_GATHERED = 1 << 28
"""How many numbers of the weights ``_multiply_each`` copies at a time."""
_MOST_ROWS = 256
"""The largest number of rows of a block. More would make no product faster, and waste more rows of zeros."""


class ExpertGroups(NamedTuple):
    """The experts of rows that are sorted by their experts.

    Attributes:
        experts: int64 ``[rows]``, the expert of each row, ascending.
        ends: int32 ``[E]``, for each expert the index after its last row.
    """

    experts: Tensor
    ends: Tensor


class PodExperts(nn.Module):
    """All experts of a layer in two parameters.

    Under ZeRO-3, all of them are gathered at once, even if a rank needs only some.
    """

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

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor, is_step: bool = False) -> Tensor:
        """The weighted sum of the outputs of each token's experts.

        Args:
            x: ``[n, hidden]``.
            chosen: int64 ``[n, k]``, the experts of each token.
            weights: ``[n, k]``, the weights of these experts, in at least fp32.
            is_step: whether this pass is one new token of each row, which may be recorded as a CUDA graph.

        Returns:
            ``[n, hidden]``.
        """
        experts, order = chosen.flatten().sort(stable=True)
        numbers = torch.arange(len(self.down_proj), device=x.device)
        groups = ExpertGroups(experts, torch.searchsorted(experts, numbers, right=True, out_int32=True))
        rows = x[order // chosen.shape[1]]
        gate, up = self._multiply(rows, self.gate_up_proj, groups, is_step).chunk(2, dim=-1)
        out = self._multiply(self.act_fn(gate) * up, self.down_proj, groups, is_step)
        return (out[order.argsort()].unflatten(0, chosen.shape) * weights[..., None]).sum(1).to(x.dtype)

    def _multiply(self, rows: Tensor, weight: Tensor, groups: ExpertGroups, is_step: bool) -> Tensor:
        """Multiply ``rows`` ``[n, in]`` by their experts in ``weight`` ``[E, out, in]``: ``[n, out]``."""
        dtype = autocast_dtype(rows)
        if dtype is not None:
            rows = rows.to(dtype)
            weight = weight.to(dtype)
        if takes_grouped_mm(rows, weight, is_step):
            return F.grouped_mm(rows, weight.transpose(1, 2), offs=groups.ends)
        if len(rows) <= len(weight):
            return _multiply_each(rows[:, None], groups.experts, weight).squeeze(1)
        return _multiply_blocks(rows, weight, groups)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype to which autocast would cast the factors of a product. None = no autocast, or fp64.

    We cast ourselves, because autocast does not know the grouped product.
    """
    device = x.device.type
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return None
    return None if x.dtype == torch.float64 else torch.get_autocast_dtype(device)


def takes_grouped_mm(rows: Tensor, weight: Tensor, is_step: bool) -> bool:
    """Whether to use PyTorch's grouped product for ``rows`` ``[n, in]`` and ``weight`` ``[E, out, in]``.

    On CUDA it has a kernel for bfloat16 on GPUs of compute capability 9 and 10. Otherwise PyTorch reads the
    groups' ends on the host. On a CPU this costs nothing. On CUDA the host waits once per product, which is
    cheap in a long pass, but impossible in a step that is recorded.
    """
    dtype, sizes = rows.dtype, weight.shape[1:]
    if not len(rows) or dtype not in (torch.bfloat16, torch.float16, torch.float32) or dtype != weight.dtype:
        return False
    if not hasattr(F, "grouped_mm") or any(size * dtype.itemsize % 16 for size in sizes):
        return False
    # the compiler knows the grouped product for bfloat16 only
    if torch.compiler.is_compiling() and dtype != torch.bfloat16:
        return False
    if rows.device.type == "cpu":
        return True
    if rows.device.type != "cuda" or weight.storage_offset() * dtype.itemsize % 16:
        return False
    is_new = torch.version.hip is None and torch.cuda.get_device_capability(rows.device)[0] in (9, 10)
    return (is_new and dtype == torch.bfloat16) or not is_step


def _multiply_blocks(rows: Tensor, weight: Tensor, groups: ExpertGroups) -> Tensor:
    """Multiply ``rows`` ``[n, in]`` by their experts in ``weight`` ``[E, out, in]``: ``[n, out]``.

    It runs in any dtype and on any device. Each expert's rows are put into blocks of ``size`` rows, with rows
    of zeros at the beginning of its first block. The number of blocks depends only on the numbers of rows and
    experts. Blocks that are not needed have only zeros.
    """
    count = len(rows)
    experts = len(weight)
    size = min(_MOST_ROWS, 1 << ((count // experts).bit_length() - 1))
    blocks = (count + experts * (size - 1)) // size
    sizes = groups.ends.diff(prepend=groups.ends.new_zeros(1))
    last_blocks = ((sizes + size - 1) // size).cumsum(0)
    numbers = torch.arange(max(count, blocks), device=rows.device)
    expert_of_block = torch.searchsorted(last_blocks, numbers[:blocks], right=True).clamp(max=experts - 1)
    # an expert's rows end where its blocks end
    moved = last_blocks * size - groups.ends
    places = numbers[:count] + moved[groups.experts]
    filled = rows.new_zeros(blocks * size, rows.shape[1]).index_copy(0, places, rows).unflatten(0, (-1, size))
    return _multiply_each(filled, expert_of_block, weight).flatten(0, 1).index_select(0, places)


def _multiply_each(blocks: Tensor, experts: Tensor, weight: Tensor) -> Tensor:
    """Multiply blocks ``[N, r, in]``, each by its expert ``[N]`` in ``[E, out, in]``: ``[N, r, out]``.

    It copies the weights of some blocks at a time (``_GATHERED``).
    """
    size = max(1, _GATHERED // weight[0].numel())
    parts = zip(blocks.split(size), experts.split(size), strict=True)
    return torch.cat([torch.bmm(block, weight[own].transpose(1, 2)) for block, own in parts])
