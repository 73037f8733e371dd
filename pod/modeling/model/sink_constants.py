"""The constants of a plan with constant sinks: logits of query heads, values and keys of KV heads."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class SinkConstants:
    """Logits, values and keys of constant sinks, for each layer.

    A layer in which no head keeps its window has None. Heads are in the order that the plan's ``head_order``
    gives. Heads that lead or follow also have numbers, which nothing reads.

    Attributes:
        logits: ``[L][Hq]``, the scaled logit of each query head.
        values: ``[L][H][d]``, the value of each KV head.
        keys: ``[L][H][d]``, the key of each KV head, see ``pod.modeling.model.sinks``. None = there are none.
        trained: True = they come from trained weights. False = they come from a plan file.
    """

    logits: tuple[tuple[float, ...] | None, ...]
    values: tuple[tuple[tuple[float, ...], ...] | None, ...]
    keys: tuple[tuple[tuple[float, ...], ...] | None, ...] | None = None
    trained: bool = field(default=False, compare=False)

    def __post_init__(self):
        logits = (None if row is None else tuple(map(float, row)) for row in self.logits)
        object.__setattr__(self, "logits", tuple(logits))
        object.__setattr__(self, "values", _numbers(self.values))
        if self.keys is not None:
            object.__setattr__(self, "keys", _numbers(self.keys))

    def tables(self) -> dict[str, Any]:
        """The tables of a plan.json."""
        found = {"sink_logits": self.logits, "sink_values": self.values, "sink_keys": self.keys}
        return {name: table for name, table in found.items() if table is not None}

    def refusal(self, lead: Sequence[Sequence[int | None]], head_dim: int | None) -> str | None:
        """Why these constants do not fit a plan ``[L][H]``, as text for a message. None = they fit."""
        if (len(self.logits), len(self.values)) != (len(lead), len(lead)):
            return f"of {len(self.logits)} and {len(self.values)} layers, the plan has {len(lead)}"
        heads = len(lead[0])
        for layer, (logits, values) in enumerate(zip(self.logits, self.values, strict=True)):
            if logits is None and values is None:
                continue
            if logits is None or values is None:
                return f"logits or values only in layer {layer}: give both, or null for both"
            if None not in lead[layer]:
                return f"of layer {layer}, in which no head keeps its window: give null there"
            widths = {len(head) for head in values}
            if not logits or len(logits) % heads or len(values) != heads or len(widths) != 1:
                return f"of layer {layer} are no [query heads] and [{heads} KV heads][head_dim] numbers"
            if head_dim is not None and widths != {head_dim}:
                return f"of layer {layer} have values of {widths.pop()} channels, head_dim is {head_dim}"
            if not all(map(math.isfinite, (*logits, *(x for head in values for x in head)))):
                return f"of layer {layer} are not all finite"
        return self._refusal_of_keys()

    def _refusal_of_keys(self) -> str | None:
        """What `refusal` says of the keys, where logits and values fit."""
        if self.keys is None:
            return None
        if len(self.keys) != len(self.values):
            return f"have {len(self.values)} layers, sink_keys {len(self.keys)}"
        for layer, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            if [*map(len, keys or ())] != [*map(len, values or ())]:
                return f"of layer {layer} have other shapes than sink_keys"
            if not all(math.isfinite(x) for head in keys or () for x in head):
                return f"of layer {layer} have sink_keys that are not all finite"
        return None

    def check_shapes(self, layer: int, config: Any) -> None:
        """Raise ``ValueError`` when a layer's constants have other shapes than the heads of a model.

        Args:
            layer: one that has constants.
            config: the configuration of the model.
        """
        logits, values = self.logits[layer] or (), self.values[layer] or ((),)
        found = len(logits), len(values), len(values[0])
        wanted = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        if found != wanted:
            own, theirs = (
                f"{queries} query heads and {heads} KV heads of {size} numbers"
                for queries, heads, size in (found, wanted)
            )
            raise ValueError(
                f"the plan's constants in layer {layer} are for {own}, the model has {theirs}: make a plan "
                "for this model with `pod explore`"
            )


def _numbers(rows: Sequence[Any]) -> tuple[Any, ...]:
    """``[L][H][d]`` numbers as tuples. ``TypeError`` or ``ValueError`` if they are no such table."""
    return tuple(None if row is None else tuple(tuple(map(float, head)) for head in row) for row in rows)


def read_constants(content: dict[str, Any]) -> SinkConstants | None:
    """The constants in a plan.json, if it has any. ``ValueError`` if they are no tables of numbers."""
    tables = [content.get(name) for name in ("sink_logits", "sink_values", "sink_keys")]
    if tables == [None, None, None]:
        return None
    try:
        return SinkConstants(*tables)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise ValueError(
            "sharing plan: sink_logits must be [layers][query heads] numbers, sink_values and sink_keys "
            "[layers][KV heads][head_dim] numbers, null for layers without windows"
        ) from None
