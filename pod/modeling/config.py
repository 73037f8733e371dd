"""Configuration of the PoD decoder: one explicit field for everything in which Llama, Mistral, Qwen2 and Qwen3 differ."""

from typing import Any, ClassVar

from transformers import PreTrainedConfig

from .sharing import SharingPlan

ROPE_TYPES = ("default", "linear", "llama3", "yarn")


class PodConfig(PreTrainedConfig):
    """What a PoD decoder is. Sizes are in elements, windows in tokens.

    Args:
        head_dim: size of one head; ``hidden_size // num_attention_heads`` when None.
        rope_parameters: ``{"rope_type": "default" | "linear" | "llama3" | "yarn", "rope_theta": …, …}`` as in
            transformers 5.
        attention_qkv_bias, attention_out_bias, mlp_bias: which projections carry a bias (Qwen2: q, k, v).
        qk_norm: RMSNorm on each head's queries and keys (Qwen3).
        lead: ``[num_hidden_layers][num_key_value_heads]``, see ``SharingPlan``; None = dense.
        num_sink_tokens, num_recent_tokens: ``n_s`` and ``n_r`` of the paper; the window counts the current token.
        attention_backend: ``auto`` or the name of a registered backend.
        source_model_type: the family that the weights come from.

    Raises:
        ValueError: head counts that do not divide, an unknown RoPE type, a plan of another size, empty windows.
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
    lead: list[list[int]] | None = None
    num_sink_tokens: int = 16
    num_recent_tokens: int = 4080
    attention_backend: str = "auto"
    source_model_type: str = "llama"
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any):
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.rope_parameters is None:
            self.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
        if self.lead is not None:
            self.lead = [list(row) for row in self.lead]
        super().__post_init__(**kwargs)
        self._check()

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
        if self.num_sink_tokens < 0 or self.num_recent_tokens < 1:
            raise ValueError(
                f"windows need num_sink_tokens >= 0 and num_recent_tokens >= 1, got {self.num_sink_tokens} "
                f"and {self.num_recent_tokens}"
            )
        self.sharing_plan.check_fits(self.num_hidden_layers, self.num_key_value_heads)

    @property
    def sharing_plan(self) -> SharingPlan:
        """The plan of this model; the dense plan when ``lead`` is None."""
        if self.lead is None:
            return SharingPlan.dense(self.num_hidden_layers, self.num_key_value_heads)
        return SharingPlan(lead=tuple(tuple(row) for row in self.lead))

    @property
    def num_key_value_groups(self) -> int:
        """``G``: query heads per KV head."""
        return self.num_attention_heads // self.num_key_value_heads
