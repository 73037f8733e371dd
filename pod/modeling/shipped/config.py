"""Configuration of the PoD decoder: one explicit field for everything in which Llama, Mistral, Qwen2 and Qwen3 differ."""

from functools import lru_cache
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from .sharing import Lead, SharingPlan

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
LAYOUTS = ("pod", "cla", "window")


class PodConfig(PreTrainedConfig):
    """What a PoD decoder is. Sizes are in elements, windows in tokens.

    Args:
        head_dim: size of one head; ``hidden_size // num_attention_heads`` when None.
        rope_parameters: ``{"rope_type": "default" | "linear" | "llama3" | "yarn", "rope_theta": …, …}`` as in
            transformers 5.
        attention_qkv_bias, attention_out_bias, mlp_bias: which projections carry a bias (Qwen2: q, k, v).
        qk_norm: RMSNorm on each head's queries and keys (Qwen3).
        layout: who stores keys and values. ``pod``: the paper's, dense without a plan. ``cla``: layers of a block share
            the keys *and* values of its lead and have no projections for them (Brandon et al., 2024). ``window``:
            every layer sees and keeps ``num_recent_tokens`` tokens only (Beltagy et al., 2020).
        lead: ``[num_hidden_layers][num_key_value_heads]`` of layers and None, see ``SharingPlan``; None = dense, pairs for
            ``cla``, and for ``window`` the plan of windows, which it needs not to say.
        kv_bits: the plan's bits per layer, see ``SharingPlan``; the model's own cache follows them.
        head_order: ``[num_hidden_layers][num_attention_heads]``: the order that the heads of these weights stand in, see
            ``SharingPlan``; None = the original one. Set by ``load_model`` when a plan asks for it; nothing is permuted here.
        num_sink_tokens, num_recent_tokens: ``n_s`` and ``n_r`` of the paper; the window counts the current token.
            None = 16 and 4080; 0 and 4096 for ``window``, which has no sinks. ``cla`` has no window.
        attention_backend: ``auto`` or the name of a registered backend.

    Raises:
        ValueError: head counts that do not divide, an unknown RoPE type or layout, a plan of another size or one that
            the layout does not have, empty windows.
    """

    model_type = "pod"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = None  # type: ignore[assignment]  # num_attention_heads
    head_dim: int = None  # type: ignore[assignment]  # hidden_size // num_attention_heads
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    use_cache: bool = True
    tie_word_embeddings: bool = False
    rope_parameters: dict = None  # type: ignore[assignment]  # plain RoPE, theta 10000
    attention_qkv_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    lead: list[list[int | None]] | None = None
    kv_bits: list[int] | None = None
    head_order: list[list[int]] | None = None
    layout: str = "pod"
    num_sink_tokens: int = None  # type: ignore[assignment]  # 16, or 0 for a window
    num_recent_tokens: int = None  # type: ignore[assignment]  # 4080, or 4096 for a window
    attention_backend: str = "auto"
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any):
        """See transformers; ValueError for a checkpoint of another family, which has fields and weights of other meanings."""
        family = config_dict.get("model_type", cls.model_type)
        if family != cls.model_type:
            raise ValueError(f"a {family!r} checkpoint has to be converted, by load_model of pod-kv")
        return super().from_dict(config_dict, **kwargs)

    def __post_init__(self, **kwargs: Any):
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.rope_parameters is None:
            self.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
        windows = (0, 4096) if self.layout == "window" else (16, 4080)
        if self.num_sink_tokens is None:
            self.num_sink_tokens = windows[0]
        if self.num_recent_tokens is None:
            self.num_recent_tokens = windows[1]
        if self.lead is None and self.layout == "cla":
            self.lead = SharingPlan.cla(self.num_hidden_layers, self.num_key_value_heads).lead  # type: ignore[assignment]
        if self.lead is not None:
            self.lead = [list(row) for row in self.lead]
        super().__post_init__(**kwargs)
        self._check()
        order = self.sharing_plan.head_order  # None for the original one
        self.head_order = None if order is None else [list(row) for row in order]

    def _check(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads = {self.num_attention_heads} must be a multiple of "
                f"num_key_value_heads = {self.num_key_value_heads}"
            )
        rope_type = self.rope_parameters.get("rope_type", "default")
        if rope_type not in ROPE_TYPES:
            raise ValueError(
                f"rope_type = {rope_type!r} is not supported; choose one of {', '.join(ROPE_TYPES)}"
            )
        n_s, n_r = self.num_sink_tokens, self.num_recent_tokens
        if n_s < 0 or n_r < 1:
            raise ValueError(f"need num_sink_tokens >= 0 and num_recent_tokens >= 1, got {n_s} and {n_r}")
        self.sharing_plan.check_fits(self.num_hidden_layers, self.num_key_value_heads)
        if self.head_order is not None and len(self.head_order[0]) != self.num_attention_heads:
            raise ValueError(
                f"head_order is of {len(self.head_order[0])} query heads a layer, the model has "
                f"{self.num_attention_heads}: make a plan for this model"
            )
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout = {self.layout!r} is not supported; choose one of {', '.join(LAYOUTS)}")
        if self.layout == "cla" and not self.sharing_plan.is_layerwise:
            raise ValueError(
                "layout = 'cla' shares whole layers, and this plan gives the heads of a layer different leads: use "
                "SharingPlan.cla(num_layers, num_key_value_heads, factor)"
            )
        if self.layout == "window" and self.lead is not None:
            raise ValueError("layout = 'window' is a plan of its own: leave the plan out")
        if self.layout == "cla" and (self.sharing_plan.num_windows or self.sharing_plan.head_order):
            raise ValueError(
                "layout = 'cla' shares whole layers in their own order: no windows, no head_order"
            )
        if self.layout != "pod" and self.sharing_plan.packs:
            raise ValueError(f"layout = {self.layout!r} has no bits of its own: name a codec, no kv_bits")
        if self.layout == "window" and n_s:
            raise ValueError(f"layout = 'window' has no sinks, got num_sink_tokens = {n_s}: set 0")

    @property
    def sharing_plan(self) -> SharingPlan:
        """The plan of this model; when ``lead`` is None, that in which every head leads, or keeps its window."""
        lead = None if self.lead is None else tuple(map(tuple, self.lead))
        bits = None if self.kv_bits is None else tuple(self.kv_bits)
        order = None if self.head_order is None else tuple(map(tuple, self.head_order))
        return _plan(lead, bits, order, self.layout, self.num_hidden_layers, self.num_key_value_heads)

    @property
    def own_method(self) -> str:
        """The cache method that holds exactly what this model attends to: ``full``, ``pod``, ``cla`` or ``window``."""
        return "full" if self.layout == "pod" and self.sharing_plan.is_dense else self.layout

    @property
    def num_key_value_groups(self) -> int:
        """``G``: query heads per KV head."""
        return self.num_attention_heads // self.num_key_value_heads


@lru_cache(maxsize=64)
def _plan(
    lead: Lead | None,
    bits: tuple[int, ...] | None,
    order: tuple[tuple[int, ...], ...] | None,
    layout: str,
    layers: int,
    heads: int,
) -> SharingPlan:
    """The plan, checked once."""
    if lead is None:
        lead = (SharingPlan.windows if layout == "window" else SharingPlan.dense)(layers, heads).lead
    return SharingPlan(lead=lead, bits=bits, head_order=order)
