"""The sizes of a model and of its plan that memory, communication and time depend on."""

import functools
from dataclasses import dataclass
from typing import Any

from pod.modeling.shipped.sharing import Lead
from pod.models import head_dim_of
from pod.training.args import TrainArgs

_MLP = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Shapes:
    """The sizes of a model; `from_config` reads them from a PodConfig.

    Attributes:
        layout: pod (dense without a plan), cla or window.
        windows: sink and recent tokens.
        silent_layers: layers without projections for keys and values (cla).
        intermediate: width that a token passes behind attention; of a mixture of experts that of those that see it.
        idle: width of the experts that do not.
        attention_backend: `auto` or the backend that the configuration names.
        sink_layers: layers with constants in the place of first tokens.
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

    @classmethod
    def from_config(cls, config: Any) -> "Shapes":
        layout = getattr(config, "layout", "pod")
        names = "num_experts", "num_experts_per_tok", "moe_intermediate_size"
        experts, used, inner = (getattr(config, name, 0) for name in names)
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
            sink_layers=len(getattr(config, "sink_layers", ())),  # of ours; stock models have none
        )

    @property
    def linear_sizes(self) -> dict[str, tuple[int, int]]:
        """(inputs, outputs) of the linear layers of a decoder layer, by name."""
        query, key = self.query_heads * self.head_dim, self.kv_heads * self.head_dim
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
        """Weights of the linear layers of a decoder layer that has keys and values of its own."""
        return sum(rows * columns for rows, columns in self.linear_sizes.values())

    @property
    def layer_parameters(self) -> int:
        """With its norms, and experts that a token does not see; biases and routers left out."""
        return self.linear_parameters + 3 * self.hidden * self.idle + 2 * self.hidden

    @property
    def key_value_parameters(self) -> int:
        """Of the projections for keys and values of a layer."""
        return 2 * self.hidden * self.kv_heads * self.head_dim

    @property
    def embedding_parameters(self) -> int:
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """All weights."""
        tables = self.embedding_parameters * (1 if self.tied else 2)
        layers = self.layers * self.layer_parameters - self.silent_layers * self.key_value_parameters
        return layers + tables + self.hidden + self.sink_parameters

    @property
    def sink_parameters(self) -> int:
        """Constant sinks: a logit of each query head and a value of each KV head."""
        return self.sink_layers * (self.query_heads + self.kv_heads * self.head_dim)

    def multiplied_weights(self, lead: Lead) -> int:
        """Weights that multiply every token under a plan: all linear layers and the output projection, not the embedding's rows."""
        silent = silent_layers(lead) if self.layout == "cla" else 0
        layers = self.layers * self.linear_parameters - silent * self.key_value_parameters
        return layers + self.embedding_parameters

    def lora_parameters(self, args: TrainArgs) -> int:
        """Trainable weights of the adapters."""
        sizes = {name: size for name, size in self.linear_sizes.items() if not (self.idle and name in _MLP)}
        layers = dict.fromkeys(sizes, self.layers)
        layers |= dict.fromkeys(("k_proj", "v_proj"), self.layers - self.silent_layers)
        each = [layers[name] * sum(sizes[name]) for name in args.lora_target_modules if name in sizes]
        return args.lora_rank * sum(each)

    def trained_parameters(self, args: TrainArgs) -> int:
        """Weights that get gradients and optimizer states."""
        return self.lora_parameters(args) + self.sink_parameters if args.method == "lora" else self.parameters

    def persistent_parameters(self, threshold: int) -> int:
        """Weights in tensors below `threshold` elements, which ZeRO-3 leaves whole on every rank."""
        sizes = [rows * columns for rows, columns in self.linear_sizes.values()]
        in_layer = sum(size for size in [*sizes, self.hidden, self.hidden] if size < threshold)
        sinks = [self.query_heads, self.kv_heads * self.head_dim]
        constants = self.sink_layers * sum(size for size in sinks if size < threshold)
        return self.layers * in_layer + (self.hidden if self.hidden < threshold else 0) + constants

    @property
    def carried_width(self) -> int:
        """Elements per token that a lead hands on for one KV head: its queries and key, or (cla) key and value."""
        return (2 if self.layout == "cla" else self.query_heads // self.kv_heads + 1) * self.head_dim


def silent_layers(lead: Lead) -> int:
    """Layers that use keys and values of another one (cla)."""
    return sum(row[0] != layer for layer, row in enumerate(lead))


def causal_pairs(length: int) -> int:
    """(query, key) pairs that a document of `length` tokens has under a causal mask."""
    return length * (length + 1) // 2


def proximal_pairs(length: int, num_sink_tokens: int, num_recent_tokens: int) -> int:
    """Those of them whose key is a sink (`j < n_s`) or recent (`i - j < n_r`)."""
    distant = max(0, length - num_sink_tokens - num_recent_tokens)
    return causal_pairs(length) - causal_pairs(distant)


def visible_pairs(owner: int | None, length: int, windows: tuple[int, int]) -> int:
    """Those that a KV head sees: all of them, or in a window (None in the plan) the proximal ones."""
    return causal_pairs(length) if owner is not None else proximal_pairs(length, *windows)


@functools.lru_cache(maxsize=64)
def carried_spans(lead: Lead) -> dict[tuple[int, int], tuple[int, int]]:
    """Leads (layer, KV head) that are followed: the first and the last layer that follow. Windows may stand before and between."""
    spans: dict[tuple[int, int], tuple[int, int]] = {}
    for layer, row in enumerate(lead):
        for head, owner in enumerate(row):
            if owner not in (layer, None):
                first, _ = spans.get((owner, head), (layer, layer))
                spans[owner, head] = first, layer
    return spans


def carried_heads(lead: Lead) -> int:
    """(layer, KV head) pairs that other layers follow: their Q and K stay alive for the block."""
    return len(carried_spans(lead))


def carried_until(lead: Lead, layer: int) -> int:
    """Those below `layer`: what the checkpoints of the layers up to it hold."""
    return sum(owner < layer for owner, _ in carried_spans(lead))


def fetched_heads(lead: Lead, layer: int) -> int:
    """Those that are followed both up to `layer` and from it on: where the carry is fetched or made again, they are on the device."""
    return sum(first <= layer <= last for first, last in carried_spans(lead).values())


def continued_heads(lead: Lead, layer: int) -> int:
    """KV heads whose block goes on above: gradients of the carry that arrive in this layer's backward."""
    return sum(owner <= layer < last for (owner, _), (_, last) in carried_spans(lead).items())
