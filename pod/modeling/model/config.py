"""Configuration of the PoD decoder.

It has one explicit field for everything in which the families of ``pod.families`` differ.
"""

from functools import lru_cache
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from .packed_bytes import RESIDUAL, check_bits
from .sharing import Lead, SharingPlan, dense_lead, kind_of_sinks

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
LAYOUTS = ("pod", "cla", "window")
NORMS = {
    "before": ("input", None, "post_attention", None),
    "behind": (None, "post_attention", None, "post_feedforward"),
    "both": ("input", "post_attention", "pre_feedforward", "post_feedforward"),
}
"""For each ``norm_placement``, the norms at four places of a layer.

The places are before and after attention, and before and after the feed-forward part. Norms have the names of
stock models, without ``_layernorm``. None = there is no norm at this place.
"""


class PodConfig(PreTrainedConfig):
    """Configuration of a PoD decoder. Sizes are in elements, windows in tokens.

    Fields that are not listed here mean the same as in transformers.

    Args:
        num_key_value_heads: KV heads of a layer. None = ``num_attention_heads``.
        head_dim: size of one head. None = ``hidden_size // num_attention_heads``.
        rope_parameters: ``{"rope_type": "default" | "linear" | "llama3" | "yarn", "rope_theta": …, …}`` as in
            transformers 5.
        attention_qkv_bias, attention_out_bias, mlp_bias: which projections carry a bias (Qwen2: q, k, v).
        qk_norm: RMSNorm on each head's queries and keys (Qwen3). With ``qk_norm_across_heads``, one norm goes
            over those of all heads (OLMo 2).
        norm_placement: where a layer has norms, see ``NORMS``.
        norm_offset: added to the weights of norms (Gemma: 1).
        embedding_multiplier: Granite's factor on embeddings.
        residual_multiplier: Granite's factor on the outputs of attention and feed-forward, before they are
            added to the residual stream.
        attention_multiplier: Granite's factor on attention's logits. None = ``1/sqrt(head_dim)``.
        logits_scaling: Granite's divisor of the output's logits.
        no_rope_layers: ``[num_hidden_layers]``, 0 = the layer does not rotate (the name is SmolLM3's). None =
            all layers rotate.
        num_experts: number of experts of a layer with a mixture of experts. 0 = no layer has one.
        num_experts_per_tok: how many of the experts each token goes to.
        moe_intermediate_size: intermediate size of an expert.
        norm_topk_prob: whether the weights of a token's experts sum to 1.
        mlp_only_layers: layers that have no experts, when ``num_experts`` is above 0.
        layout: which layers and heads store keys and values. ``pod``: the paper's layout, which is dense
            without a plan. ``cla``: layers of a block share the keys *and* values of its lead, and the later
            ones have no projections for them (Brandon et al., 2024). ``window``: every layer sees and keeps
            ``num_recent_tokens`` tokens only (Beltagy et al., 2020).
        lead: ``[num_hidden_layers][num_key_value_heads]`` of layers and None, see ``SharingPlan``. None = for
            ``pod`` every head leads, for ``cla`` layers form pairs, for ``window`` every head keeps its
            window.
        kv_bits: bits per layer, see ``SharingPlan``. The model's own cache holds keys and values in them.
        kv_residual: how many of the newest tokens stay native at least in layers of 8 or 4 bits, see
            ``SharingPlan``.
        head_order: ``[num_hidden_layers][num_attention_heads]``, the order of the heads in these weights, see
            ``SharingPlan``. None = the original order. ``load_model`` permutes the weights and sets this
            field; setting it permutes nothing.
        num_sink_tokens, num_recent_tokens: ``n_s`` and ``n_r`` of the paper. The window includes the current
            token. None = 16 and 4080, or 0 and 4096 where no first tokens are stored. ``cla`` has no
            window.
        sinks: the kind of sinks in heads that keep the plan's windows, see ``SharingPlan``: ``tokens``,
            ``constant`` (then layers with such heads have parameters for them) or ``none``. None = ``tokens``
            if ``num_sink_tokens`` is above 0, else ``none``.
        sink_keys: whether constant sinks have keys too, see ``sinks.py``.
        layer_windows: ``[num_hidden_layers]``, how many tokens each layer was trained to see, the current one
            included (Mistral's and Gemma 3's sliding windows). An entry of None = all tokens. ``lead`` must
            be None for all heads of a layer that has a window. None instead of the list = no layer has one.
        window_rope_parameters: RoPE parameters of type ``default`` for layers with such a window (Gemma 3).
            None = ``rope_parameters``.
        attention_backend: ``auto`` or the name of a registered backend.

    Raises:
        ValueError: head counts do not divide each other, the RoPE type or layout is unknown, the plan has
            another size or the layout does not allow it, or windows are empty.
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
    qk_norm_across_heads: bool = False
    norm_placement: str = "before"
    norm_offset: float = 0.0
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    attention_multiplier: float | None = None
    logits_scaling: float = 1.0
    num_experts: int = 0
    num_experts_per_tok: int = 1
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    mlp_only_layers: list[int] | None = None
    no_rope_layers: list[int] | None = None
    layer_windows: list[int | None] | None = None
    window_rope_parameters: dict | None = None
    lead: list[list[int | None]] | None = None
    kv_bits: list[int] | None = None
    kv_residual: int = RESIDUAL
    head_order: list[list[int]] | None = None
    layout: str = "pod"
    num_sink_tokens: int = None  # type: ignore[assignment]  # 16, or 0 for a window
    num_recent_tokens: int = None  # type: ignore[assignment]  # 4080, or 4096 for a window
    sinks: str = None  # type: ignore[assignment]  # tokens, or none without first tokens
    sink_keys: bool = False
    attention_backend: str = "auto"
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any):
        """See transformers.

        Raises:
            ValueError: the configuration has another ``model_type``, and so needs conversion by
                ``load_model``.
        """
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
        stores_none = self.layout == "window" or self.sinks in ("constant", "none")
        windows = (0, 4096) if stores_none else (16, 4080)
        if self.num_sink_tokens is None:
            self.num_sink_tokens = windows[0]
        if self.num_recent_tokens is None:
            self.num_recent_tokens = windows[1]
        if self.lead is None and self.layout == "cla":
            pairs = SharingPlan.cla(self.num_hidden_layers, self.num_key_value_heads).lead
            self.lead = pairs  # type: ignore[assignment]
        if self.lead is not None:
            self.lead = [list(row) for row in self.lead]
        super().__post_init__(**kwargs)
        self.sinks = kind_of_sinks(self.sinks, self.num_sink_tokens)  # type: ignore[assignment]
        self.sink_keys = self.sink_keys and self.sinks == "constant"
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
        if self.norm_placement not in NORMS:
            raise ValueError(f"norm_placement = {self.norm_placement!r} must be one of {', '.join(NORMS)}")
        n_s, n_r = self.num_sink_tokens, self.num_recent_tokens
        if n_s < 0 or n_r < 1:
            raise ValueError(f"need num_sink_tokens >= 0 and num_recent_tokens >= 1, got {n_s} and {n_r}")
        self.sharing_plan.check_fits(self.num_hidden_layers, self.num_key_value_heads)
        packed_bits = set(self.kv_bits or ()) - {16}
        for bits in packed_bits:
            check_bits(bits, self.head_dim, f"the plan's layers of {bits} bits")
        if self.head_order is not None and len(self.head_order[0]) != self.num_attention_heads:
            raise ValueError(
                f"head_order is of {len(self.head_order[0])} query heads a layer, the model has "
                f"{self.num_attention_heads}: make a plan for this model"
            )
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout = {self.layout!r} is not supported; choose one of {', '.join(LAYOUTS)}")
        self._check_windows()
        if self.layout == "cla" and any(len(set(row)) > 1 for row in self.sharing_plan.lead):
            raise ValueError(
                "layout = 'cla' shares whole layers, and this plan gives the heads of a layer different "
                "leads: use SharingPlan.cla(num_layers, num_key_value_heads, factor)"
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
        if self.sink_keys and self.qk_norm:
            raise ValueError("sink_keys are for models without norms of keys: make a plan for this model")
        if self.layout != "pod" and self.sinks == "constant":
            raise ValueError(
                f"layout = {self.layout!r} has no constant sinks: "
                "use layout = 'pod' with a plan whose heads keep windows"
            )

    def _check_windows(self) -> None:
        """Check the fields of layers that were trained with windows, or without RoPE (``ValueError``)."""
        for name in ("layer_windows", "no_rope_layers"):
            each = getattr(self, name)
            if each is not None and len(each) != self.num_hidden_layers:
                raise ValueError(f"{name} has {len(each)} entries for {self.num_hidden_layers} layers")
        if self.layer_windows is not None and self.layout != "pod":
            raise ValueError(
                f"layout = {self.layout!r} is not possible here: "
                "layers of this model have windows of their own (layer_windows)"
            )
        for layer, row in enumerate(self.sharing_plan.lead):
            window = self.window_of(layer)
            if window is not None and set(row) != {None}:
                raise ValueError(
                    f"layer {layer} was trained to see its last {window} tokens only, "
                    "so that a plan must say null for "
                    f"all of its heads, and says {list(row)}"
                )
        rope = (self.window_rope_parameters or {}).get("rope_type", "default")
        if rope != "default":
            raise ValueError(
                f"rope_type = {rope!r} of layers with windows is not supported: it must be 'default'"
            )

    def rope_of(self, layer_idx: int) -> dict[str, Any] | None:
        """The RoPE parameters of a layer. None = the layer does not rotate."""
        if self.no_rope_layers is not None and not self.no_rope_layers[layer_idx]:
            return None
        own = self.window_rope_parameters if self.window_of(layer_idx) is not None else None
        return own or self.rope_parameters

    def has_experts(self, layer_idx: int) -> bool:
        """Whether a layer's feed-forward part is a mixture of experts."""
        return self.num_experts > 0 and layer_idx not in (self.mlp_only_layers or ())

    def window_of(self, layer_idx: int) -> int | None:
        """The window that the layer was trained with, in tokens. None without one."""
        return None if self.layer_windows is None else self.layer_windows[layer_idx]

    @property
    def trained_windows(self) -> tuple[bool, ...]:
        """For each layer, whether it was trained with a window."""
        windows = self.layer_windows or [None] * self.num_hidden_layers
        return tuple(window is not None for window in windows)

    def windows_of(self, layer_idx: int) -> tuple[int, int]:
        """How many first and last tokens those heads of the layer see that keep their windows.

        A layer that was trained with a window has no first tokens and that window. Other layers have
        ``num_sink_tokens`` and ``num_recent_tokens``.
        """
        own = self.window_of(layer_idx)
        return (self.num_sink_tokens, self.num_recent_tokens) if own is None else (0, own)

    def has_constant_sinks(self, layer_idx: int) -> bool:
        """Whether a layer has parameters for constant sinks.

        It has them if sinks are constant and one of its heads keeps the plan's window.
        """
        if self.sinks != "constant" or self.window_of(layer_idx) is not None:
            return False
        return None in self.sharing_plan.lead[layer_idx]

    def has_sink_keys(self, layer_idx: int) -> bool:
        """Whether the constant sinks of a layer have keys."""
        return self.sink_keys and self.has_constant_sinks(layer_idx)

    @property
    def sink_layers(self) -> list[int]:
        """The layers that have parameters for constant sinks."""
        return [layer for layer in range(self.num_hidden_layers) if self.has_constant_sinks(layer)]

    @property
    def sharing_plan(self) -> SharingPlan:
        """The plan of this model. If ``lead`` is None, every head leads, or keeps the window of its layer."""
        lead = None if self.lead is None else tuple(map(tuple, self.lead))
        bits = None if self.kv_bits is None else tuple(self.kv_bits)
        order = None if self.head_order is None else tuple(map(tuple, self.head_order))
        heads = self.num_key_value_heads
        are_windows = tuple(self.layout == "window" or window for window in self.trained_windows)
        near, sinks = (self.num_sink_tokens, self.num_recent_tokens), self.sinks
        if self.layout == "cla":
            near, sinks = (None, None), None
        return _plan(lead, bits, self.kv_residual, order, are_windows, heads, near, self.head_dim, sinks)

    @property
    def own_method(self) -> str:
        """The cache method that holds exactly the tokens that this model attends to.

        It is ``full``, ``pod``, ``cla`` or ``window``.
        """
        return "full" if self.layout == "pod" and self.sharing_plan.is_dense else self.layout

    @property
    def num_key_value_groups(self) -> int:
        """``G``: query heads per KV head."""
        return self.num_attention_heads // self.num_key_value_heads


@lru_cache(maxsize=64)
def _plan(
    lead: Lead | None,
    bits: tuple[int, ...] | None,
    residual: int,
    order: tuple[tuple[int, ...], ...] | None,
    are_windows: tuple[bool, ...],
    heads: int,
    near: tuple[int | None, int | None],
    head_dim: int,
    sinks: str | None,
) -> SharingPlan:
    """The plan, made and checked once for equal arguments. See ``PodConfig.sharing_plan``."""
    if lead is None:
        lead = dense_lead([heads] * len(are_windows), are_windows)
    return SharingPlan(
        lead=lead,
        bits=bits,
        residual=residual,
        head_order=order,
        num_sink_tokens=near[0],
        num_recent_tokens=near[1],
        head_dim=head_dim,
        sinks=sinks,
    )
