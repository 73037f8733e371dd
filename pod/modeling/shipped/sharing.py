"""Which layer's queries and keys each (layer, KV head) uses for distant tokens: the sharing plan of PoD."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class SharingPlan:
    """A head-wise partition of the layers into blocks of consecutive layers (paper §2.1, Algorithm 1).

    ``lead[layer][kv_head]`` is the lowest layer of the block that ``layer`` belongs to for that KV head. A head
    whose lead is its own layer stores all of its keys; any other head stores keys for proximal tokens only.

    Args:
        lead: ``[L][H]`` integers.
        provenance: how the plan was found (model, data, n, q, N, threshold, algorithm …); free-form JSON.

    Raises:
        ValueError: rows of unequal length, a lead above its layer, a lead that does not lead itself, or a block
            whose layers are not consecutive.
    """

    lead: tuple[tuple[int, ...], ...]
    provenance: dict[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self):
        object.__setattr__(self, "lead", _as_rows(self.lead))
        for head in range(self.num_key_value_heads):
            for layer in range(self.num_layers):
                self._check(layer, head)

    def _check(self, layer: int, head: int) -> None:
        lead = self.lead[layer][head]
        where = f"sharing plan: lead[{layer}][{head}] = {lead}"
        if not 0 <= lead <= layer:
            raise ValueError(f"{where} must lie between 0 and its own layer {layer}")
        other = self.lead[lead][head]
        if other != lead:
            raise ValueError(f"{where}, but layer {lead} follows layer {other}: a lead must lead itself")
        before = self.lead[layer - 1][head]
        if lead not in (layer, before):
            raise ValueError(
                f"{where}, but layer {layer - 1} is led by {before}: layers of a block must be consecutive"
            )

    @classmethod
    def dense(cls, num_layers: int, num_key_value_heads: int) -> "SharingPlan":
        """The plan in which every head leads: an ordinary dense model."""
        return cls(lead=tuple((layer,) * num_key_value_heads for layer in range(num_layers)))

    @classmethod
    def cla(cls, num_layers: int, num_key_value_heads: int, factor: int = 2) -> "SharingPlan":
        """Cross-layer attention (Brandon et al., 2024): blocks of ``factor`` whole layers, (0, 1), (2, 3), … for 2.

        A number of layers that ``factor`` does not divide leaves a shorter last block.
        """
        if factor < 1:
            raise ValueError(f"cla shares between factor >= 1 layers, got factor = {factor}")
        provenance = {"algorithm": "cla", "factor": factor}
        rows = tuple((layer - layer % factor,) * num_key_value_heads for layer in range(num_layers))
        return cls(lead=rows, provenance=provenance)

    @property
    def is_layerwise(self) -> bool:
        """Whether all heads of a layer have the same lead."""
        return all(len(set(row)) == 1 for row in self.lead)

    @property
    def num_layers(self) -> int:
        return len(self.lead)

    @property
    def num_key_value_heads(self) -> int:
        return len(self.lead[0])

    @cached_property
    def is_dense(self) -> bool:
        return self.num_non_lead == 0

    @property
    def num_non_lead(self) -> int:
        """How many (layer, KV head) pairs follow another layer."""
        return sum(lead != layer for layer, row in enumerate(self.lead) for lead in row)

    @property
    def share_non_lead(self) -> float:
        """Share of (layer, KV head) pairs that follow another layer, in [0, 1)."""
        return self.num_non_lead / (self.num_layers * self.num_key_value_heads)

    @property
    def asymptotic_saving(self) -> float:
        """Share of KV bytes saved as the sequence grows without bound: half of the non-lead share (keys only).

        This is PoD's; a ``cla`` layout, whose followers store nothing, saves ``share_non_lead``.
        """
        return self.share_non_lead / 2

    def saving(self, n: int, num_sink_tokens: int, num_recent_tokens: int) -> float:
        """Share of KV bytes saved at ``n`` tokens, when followers keep keys for sink and recent tokens only."""
        if n < 1:
            raise ValueError(f"saving is defined for n >= 1 tokens, got n = {n}")
        distant = max(0, n - num_sink_tokens - num_recent_tokens)
        return self.asymptotic_saving * distant / n

    def blocks(self, head: int) -> list[list[int]]:
        """The blocks of one KV head, each a list of consecutive layers, lead first."""
        blocks: list[list[int]] = []
        for layer in range(self.num_layers):
            if self.lead[layer][head] == layer:
                blocks.append([])
            blocks[-1].append(layer)
        return blocks

    def check_fits(self, num_layers: int, num_key_value_heads: int) -> None:
        """Raise ``ValueError`` unless the plan belongs to a model of this size."""
        if (self.num_layers, self.num_key_value_heads) != (num_layers, num_key_value_heads):
            raise ValueError(
                f"sharing plan is for {self.num_layers} layers x {self.num_key_value_heads} KV heads, the model has "
                f"{num_layers} x {num_key_value_heads}: make a plan for this model with launch/explore.py"
            )

    def save(self, path: str | os.PathLike) -> None:
        """Write JSON with a schema version, through a temporary name so that a partial file never appears."""
        content = {"schema": SCHEMA_VERSION, "lead": self.lead, "provenance": self.provenance}
        temporary = f"{os.fspath(path)}.tmp"
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
        os.replace(temporary, path)

    @classmethod
    def load(cls, path: str | os.PathLike) -> "SharingPlan":
        """Read a plan; ``ValueError`` names the file and what is wrong with it."""
        try:
            with open(path, encoding="utf-8") as file:
                content = json.load(file)
        except (OSError, ValueError) as error:
            raise ValueError(f"cannot read sharing plan {path}: {error}") from error
        if not isinstance(content, dict) or content.get("schema") != SCHEMA_VERSION or "lead" not in content:
            raise ValueError(
                f"{path} is not a sharing plan of schema {SCHEMA_VERSION}: make one with launch/explore.py"
            )
        try:
            return cls(lead=content["lead"], provenance=content.get("provenance", {}))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error


def _as_rows(lead: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    try:
        rows = tuple(map(tuple, lead))
    except TypeError:
        raise ValueError(f"sharing plan: lead must be [layers][KV heads], got {lead!r:.80}") from None
    lengths = [len(row) for row in rows]
    if not rows or not lengths[0] or len(set(lengths)) > 1:
        raise ValueError(f"sharing plan: lead needs equal, non-empty rows, got lengths {lengths}")
    for value in (value for row in rows for value in row):
        if type(value) is not int:
            raise ValueError(f"sharing plan: lead must hold integers, got {value!r}")
    return rows
