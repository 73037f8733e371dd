"""A Llama with a window and a sink per layer, in vLLM's own layers. Exports of Qwen3 need it, others do not.

The configuration says whether each layer keeps a window (`layer_types`, `sliding_window`), and which layers
have a sink (`sink_layers`). A sink is one logit per query head, `self_attn.sinks`, that is added to the
softmax at every position.
"""

from typing import Any

import torch
from torch import nn
from vllm.config import CacheConfig, VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.quantization import QuantizationConfig
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.model_loader.weight_utils import sharded_weight_loader
from vllm.model_executor.models.llama import LlamaDecoderLayer, LlamaForCausalLM
from vllm.model_executor.models.utils import extract_layer_index
from vllm.model_executor.utils import set_weight_attrs


class WindowAttention(nn.Module):
    """The attention of one layer. `LlamaDecoderLayer` makes it, and decides its arguments.

    Attributes:
        sinks: the logits of the sink, `[query heads of this rank]`; None in a layer without a sink.
        q_norm, k_norm: the norms of the queries and keys of each head (Qwen3), or None.
    """

    def __init__(
        self,
        config: Any,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        max_position_embeddings: int,
        quant_config: QuantizationConfig | None,
        bias: bool,
        bias_o_proj: bool,
        cache_config: CacheConfig | None,
        prefix: str,
        attn_type: str,
    ) -> None:
        super().__init__()
        layer = extract_layer_index(prefix)
        ranks = get_tensor_model_parallel_world_size()
        self.head_dim = getattr(config, "head_dim", None) or hidden_size // num_heads
        self.qkv_proj = QKVParallelLinear(
            hidden_size,
            self.head_dim,
            num_heads,
            num_kv_heads,
            bias=bias,
            quant_config=quant_config,
            prefix=f"{prefix}.qkv_proj",
        )
        self.o_proj = RowParallelLinear(
            num_heads * self.head_dim,
            hidden_size,
            bias=bias_o_proj,
            quant_config=quant_config,
            prefix=f"{prefix}.o_proj",
        )
        self.q_norm = self.k_norm = None
        if getattr(config, "qk_norm", False):
            self.q_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps)
            self.k_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.rotary_emb = get_rope(
            self.head_dim,
            max_position=max_position_embeddings,
            rope_parameters=config.rope_parameters,
        )
        # The linear layers above have checked that the ranks divide the heads. When there are fewer KV heads
        # than ranks, each KV head is repeated on several ranks.
        query_heads = num_heads // ranks
        key_value_heads = max(1, num_kv_heads // ranks)
        self.sizes = [heads * self.head_dim for heads in (query_heads, key_value_heads, key_value_heads)]
        self.sinks = None
        more = {}
        if layer in (getattr(config, "sink_layers", None) or ()):
            self.sinks = nn.Parameter(torch.empty(query_heads), requires_grad=False)
            set_weight_attrs(self.sinks, {"weight_loader": sharded_weight_loader(0)})
            more["sinks"] = self.sinks
        slides = config.layer_types[layer] == "sliding_attention"
        self.attn = Attention(
            query_heads,
            self.head_dim,
            self.head_dim**-0.5,
            num_kv_heads=key_value_heads,
            cache_config=cache_config,
            quant_config=quant_config,
            per_layer_sliding_window=config.sliding_window if slides else None,
            attn_type=attn_type,
            prefix=f"{prefix}.attn",
            **more,
        )

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """From positions `[tokens]` and states `[tokens, hidden]` to the output `[tokens, hidden]`."""
        qkv, _ = self.qkv_proj(hidden_states)
        q, k, v = qkv.split(self.sizes, dim=-1)
        if self.q_norm is not None and self.k_norm is not None:
            q = self.q_norm(q.unflatten(-1, (-1, self.head_dim))).flatten(-2)
            k = self.k_norm(k.unflatten(-1, (-1, self.head_dim))).flatten(-2)
        q, k = self.rotary_emb(positions, q, k)
        out, _ = self.o_proj(self.attn(q, k, v))
        return out


class WindowDecoderLayer(LlamaDecoderLayer):
    """Llama's layer with `WindowAttention`."""

    def __init__(self, vllm_config: VllmConfig, prefix: str = "", config: Any = None) -> None:
        super().__init__(vllm_config, prefix, config, attn_layer_type=WindowAttention)


class PodServedForCausalLM(LlamaForCausalLM):
    """Llama's model with `WindowDecoderLayer`. Weights have Llama's names, norms of heads Qwen3's names."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, layer_type=WindowDecoderLayer)
