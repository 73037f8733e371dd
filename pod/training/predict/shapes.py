"""The sizes of a model and of its plan that memory, communication and time depend on."""

import functools
from dataclasses import dataclass
from typing import Any

from pod.modeling.model.sharing import Lead, dense_lead
from pod.models import head_dim_of
from pod.training.args import TrainArgs

_MLP = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Shapes:
    """The sizes of a model; `from_config` reads them from a PodConfig.

    Attributes:
        hidden: width of a hidden state.
        layers: number of decoder layers.
        query_heads, kv_heads: numbers of heads in a layer.
        head_dim: width of a head.
        intermediate: width of the feed-forward part that a token passes. In a mixture of experts, it is the
            width of the experts that see the token.
        vocab: number of tokens in the vocabulary.
        tied: whether the output projection is the embedding.
        layout: pod (dense without a plan), cla or window.
        windows: numbers of sink tokens and of recent tokens.
        silent_layers: number of layers without projections for keys and values (cla).
        idle: width of all experts of a layer that do not see a token; 0 without experts.
        attention_backend: `auto`, or the backend that the configuration names.
        sink_layers: number of layers with constant sinks, which stand for the first tokens.
        sink_keys: whether these sinks have keys.
        dense: the plan by which a teacher reads (`train.distill`): every head leads, but those of layers that
            were trained with windows.
    """

    hidden: int
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool
    layout: str = "pod"
    windows: tuple[int, int] = (16, 4080)
    silent_layers: int = 0
    idle: int = 0
    attention_backend: str = "auto"
    sink_layers: int = 0
    sink_keys: bool = False
    dense: Lead = ()

    @classmethod
    def from_config(cls, config: Any) -> "Shapes":
        """The sizes in a PodConfig, or in the configuration of a Llama, which has no plan."""
        layout = getattr(config, "layout", "pod")
        experts = getattr(config, "num_experts", 0)
        used = getattr(config, "num_experts_per_tok", 0)
        inner = getattr(config, "moe_intermediate_size", 0)
        return cls(
            hidden=config.hidden_size,
            layers=config.num_hidden_layers,
            query_heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=head_dim_of(config),
            intermediate=used * inner if experts else config.intermediate_size,
            idle=(experts - used) * inner if experts else 0,
            vocab=config.vocab_size,
            tied=bool(config.tie_word_embeddings),
            layout=layout,
            windows=(getattr(config, "num_sink_tokens", 16), getattr(config, "num_recent_tokens", 4080)),
            attention_backend=getattr(config, "attention_backend", "auto"),
            silent_layers=silent_layers(config.sharing_plan.lead) if layout == "cla" else 0,
            sink_layers=len(getattr(config, "sink_layers", ())),  # other models than ours have none
            sink_keys=getattr(config, "sink_keys", False),
            dense=dense_lead(
                [config.num_key_value_heads] * config.num_hidden_layers,
                getattr(config, "trained_windows", [False] * config.num_hidden_layers),
            ),
        )

    @property
    def linear_sizes(self) -> dict[str, tuple[int, int]]:
        """Numbers of (inputs, outputs) of the linear layers of a decoder layer, by name."""
        query = self.query_heads * self.head_dim
        key = self.kv_heads * self.head_dim
        return {
            "q_proj": (self.hidden, query),
            "k_proj": (self.hidden, key),
            "v_proj": (self.hidden, key),
            "o_proj": (query, self.hidden),
            "gate_proj": (self.hidden, self.intermediate),
            "up_proj": (self.hidden, self.intermediate),
            "down_proj": (self.intermediate, self.hidden),
        }

    @property
    def linear_parameters(self) -> int:
        """Number of weights in the linear layers of a decoder layer that has keys and values of its own."""
        return sum(rows * columns for rows, columns in self.linear_sizes.values())

    @property
    def layer_parameters(self) -> int:
        """Number of weights of a decoder layer.

        Its norms, and experts that a token does not see, are included. Biases and routers are left out.
        """
        return self.linear_parameters + 3 * self.hidden * self.idle + 2 * self.hidden

    @property
    def key_value_parameters(self) -> int:
        """Number of weights in a layer's projections for keys and values."""
        return 2 * self.hidden * self.kv_heads * self.head_dim

    @property
    def embedding_parameters(self) -> int:
        """Number of weights in the embedding; an output projection of its own has as many."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """Number of all weights."""
        tables = self.embedding_parameters * (1 if self.tied else 2)
        layers = self.layers * self.layer_parameters - self.silent_layers * self.key_value_parameters
        return layers + tables + self.hidden + self.sink_parameters

    @property
    def sink_parameters(self) -> int:
        """Number of weights in constant sinks."""
        return self.sink_layers * sum(self._sink_sizes)

    @property
    def _sink_sizes(self) -> list[int]:
        """Numbers of weights in the tensors of a layer's constant sinks: logits, values, perhaps keys."""
        values = self.kv_heads * self.head_dim
        return [self.query_heads, values, *([values] if self.sink_keys else [])]

    def multiplied_weights(self, lead: Lead) -> int:
        """Number of weights that multiply every token under a plan.

        These are all linear layers and the output projection, but not the rows of the embedding.
        """
        silent = silent_layers(lead) if self.layout == "cla" else 0
        layers = self.layers * self.linear_parameters - silent * self.key_value_parameters
        return layers + self.embedding_parameters

    def lora_parameters(self, args: TrainArgs) -> int:
        """Number of trainable weights in the adapters."""
        sizes = {name: size for name, size in self.linear_sizes.items() if not (self.idle and name in _MLP)}
        layers = dict.fromkeys(sizes, self.layers)
        layers |= dict.fromkeys(("k_proj", "v_proj"), self.layers - self.silent_layers)
        each = [layers[name] * sum(sizes[name]) for name in args.lora_target_modules if name in sizes]
        return args.lora_rank * sum(each)

    def trained_parameters(self, args: TrainArgs) -> int:
        """Number of weights that get gradients and optimizer states."""
        if args.method == "lora":
            return self.lora_parameters(args) + self.sink_parameters
        return self.parameters

    def persistent_parameters(self, threshold: int) -> int:
        """Number of weights in tensors of fewer than `threshold` elements.

        ZeRO-3 leaves these tensors whole on every rank.
        """
        sizes = [rows * columns for rows, columns in self.linear_sizes.values()]
        in_layer = sum(size for size in [*sizes, self.hidden, self.hidden] if size < threshold)
        constants = self.sink_layers * sum(size for size in self._sink_sizes if size < threshold)
        final_norm = self.hidden if self.hidden < threshold else 0
        return self.layers * in_layer + final_norm + constants

    @property
    def shared_qk_width(self) -> int:
        """Elements per token that a lead hands on for one KV head: queries and key; key and value for cla."""
        if self.layout == "cla":
            return 2 * self.head_dim
        return (self.query_heads // self.kv_heads + 1) * self.head_dim


def silent_layers(lead: Lead) -> int:
    """Number of layers that use the keys and values of another layer (cla)."""
    return sum(row[0] != layer for layer, row in enumerate(lead))


def causal_pairs(length: int) -> int:
    """Number of (query, key) pairs that a document of `length` tokens has under a causal mask."""
    return length * (length + 1) // 2


def proximal_pairs(length: int, num_sink_tokens: int, num_recent_tokens: int) -> int:
    """Number of the causal pairs whose key is a sink (`j < n_s`) or recent (`i - j < n_r`)."""
    distant = max(0, length - num_sink_tokens - num_recent_tokens)
    return causal_pairs(length) - causal_pairs(distant)


def visible_pairs(owner: int | None, length: int, windows: tuple[int, int]) -> int:
    """Number of the causal pairs that a KV head sees.

    It sees all of them, or only the proximal ones when it keeps its window.

    Args:
        owner: the head's entry in the plan; None = it keeps its window.
    """
    return causal_pairs(length) if owner is not None else proximal_pairs(length, *windows)


@functools.lru_cache(maxsize=64)
def shared_qk_spans(lead: Lead) -> dict[tuple[int, int], tuple[int, int]]:
    """For every lead (layer, KV head) that is followed, the first and the last layer that follow it.

    Layers in which this head keeps its window may lie before these layers and between them.
    """
    spans: dict[tuple[int, int], tuple[int, int]] = {}
    for layer, row in enumerate(lead):
        for head, owner in enumerate(row):
            if owner not in (layer, None):
                first, _ = spans.get((owner, head), (layer, layer))
                spans[owner, head] = first, layer
    return spans


def shared_qk_heads(lead: Lead) -> int:
    """Number of (layer, KV head) pairs that other layers follow: `shared_qk` holds their queries and keys."""
    return len(shared_qk_spans(lead))


def shared_qk_heads_below(lead: Lead, layer: int) -> int:
    """Number of heads of `shared_qk` whose lead is below `layer`.

    Where `shared_qk` stays on the device, the checkpoints of the layers up to `layer` hold them.
    """
    return sum(owner < layer for owner, _ in shared_qk_spans(lead))


def fetched_heads(lead: Lead, layer: int) -> int:
    """Number of heads of `shared_qk` on the device in the backward of `layer`, when they are brought there.

    They are fetched from host memory or recomputed. A head is on the device from the backward of the last
    layer that follows it, down to that of the first one.
    """
    return sum(first <= layer <= last for first, last in shared_qk_spans(lead).values())


def continued_heads(lead: Lead, layer: int) -> int:
    """Number of leads in `layer` or below it that a higher layer follows.

    The gradients of their queries and keys arrive in the backward of `layer`.
    """
    return sum(owner <= layer < last for (owner, _), (_, last) in shared_qk_spans(lead).items())
