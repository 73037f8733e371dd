"""The sharing plan of a model: for each layer and KV head, how it attends to *distant* tokens.

Distant tokens are those that are neither sinks (the first ``n_s`` tokens) nor recent (the last ``n_r``); the
others are *proximal*. A head either *leads*: it holds all its keys. Or it *follows* a lead below: it computes
attention to distant tokens with the lead's queries and keys. Or it *keeps its window*: it does not see them.
"""

import json
import os
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

from .packed_bytes import RESIDUAL, bits_per_number, mean_size, window_size
from .sink_constants import SinkConstants, read_constants

SCHEMA_VERSION = 5
_READABLE = (1, 2, 3, 4, SCHEMA_VERSION)
"""Schemas of plan files that ``SharingPlan.load`` reads. 1 has no windows, no order of heads and no bits. 2
has no sizes of windows. 3 knows only sinks that are tokens. 4 has no residual."""
_FIRST_WITH_WINDOWS = 3
SINKS = ("tokens", "constant", "none")
"""Kinds of sinks in a head that keeps its window. ``tokens``: it stores the first tokens. ``constant``: a
few learned or measured numbers take their place. ``none``: it has neither."""
BITS = (16, 8, 4)
"""Bits per number that a plan may give a layer. 16 = as the model computes."""
# optional fields of a plan.json
_OPTIONAL = ("head_order", "bits", "residual", "num_sink_tokens", "num_recent_tokens", "head_dim", "sinks")
# all fields of a plan.json
_FIELDS = ("schema", "lead", *_OPTIONAL, "sink_logits", "sink_values", "sink_keys", "provenance")

Lead = tuple[tuple[int | None, ...], ...]
"""``[layer][KV head]``: the layer that the head follows, its own layer (it leads), or None (it keeps its
window only)."""


@dataclass(frozen=True)
class Roles:
    """The KV heads of one layer, sorted by what they hold and see. Each field is in ascending order.

    ``held`` and ``num_heads`` are fields, not properties, because every layer reads them for every token.

    Attributes:
        leads: heads that hold and see every token, with their own keys.
        followers: heads that hold own values of every token, and own keys of proximal tokens. Their logits of
            distant tokens are those of their lead.
        followed: leads of this layer that a later layer follows.
        windows: heads that hold keys and values of sinks and recent tokens, and nothing else.
        last: followers that no later layer of their block follows up: their block ends in this layer.
        held: leads and followers, which hold the values of every token.
        num_heads: number of KV heads of the layer.
    """

    leads: tuple[int, ...]
    followers: tuple[int, ...] = ()
    followed: tuple[int, ...] = ()
    windows: tuple[int, ...] = ()
    last: tuple[int, ...] = ()
    held: tuple[int, ...] = field(init=False)
    num_heads: int = field(init=False)

    def __post_init__(self):
        for name in ("leads", "followers", "followed", "windows", "last"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        object.__setattr__(self, "held", tuple(sorted(self.leads + self.followers)))
        object.__setattr__(self, "num_heads", len(self.held) + len(self.windows))


@lru_cache(maxsize=4096)
def roles_of(lead: Lead, layer: int) -> Roles:
    """The roles of the KV heads of layer ``layer``, under the plan ``lead`` ``[L][H]``."""
    row = lead[layer]
    leads = [head for head, owner in enumerate(row) if owner == layer]
    windows = [head for head, owner in enumerate(row) if owner is None]
    followers = [head for head in range(len(row)) if head not in leads and head not in windows]
    goes_on = [head for head in range(len(row)) if is_followed(lead, layer, head)]
    followed = [head for head in leads if head in goes_on]
    last = [head for head in followers if head not in goes_on]
    return Roles(*map(tuple, (leads, followers, followed, windows, last)))


def dense_lead(widths: Iterable[int], are_windows: Iterable[bool]) -> Lead:
    """The plan in which every head leads, or keeps its window where the whole layer does.

    Example: two layers of 3 heads, the second one of windows, give (0, 0, 0), (None, None, None).

    Args:
        widths: number of KV heads of each layer.
        are_windows: for each layer, whether all its heads keep windows.
    """
    layers = enumerate(zip(widths, are_windows, strict=True))
    return tuple((None if is_window else layer,) * heads for layer, (heads, is_window) in layers)


def is_followed(lead: Sequence[Sequence[int | None]], layer: int, head: int) -> bool:
    """Whether a layer above ``layer`` belongs to the latest block of KV head ``head`` up to ``layer``."""
    above = next((row[head] for row in lead[layer + 1 :] if row[head] is not None), None)
    return above is not None and above <= layer


@dataclass(frozen=True)
class SharingPlan:
    """For every layer and KV head of a model: whether it leads, follows or keeps its window.

    ``lead[layer][kv_head]`` is one of three things:

    * the head's own layer: it leads. It stores all keys and values.
    * a layer below: it follows the head of the same number there. It stores all values, and the keys of its
      window. A lead and its followers are a *block* of consecutive layers (paper §2.1, Algorithm 1).
    * None: it keeps its window. It stores and sees only sinks and recent tokens, like those heads of
      RazorAttention and DuoAttention that do not retrieve. Such layers may lie between the layers of a block,
      and belong to no block.

    For example, in ``SharingPlan(lead=[[0, 0], [0, None], [2, 0]])`` KV head 0 follows layer 0 in layer 1 and
    leads in layer 2. KV head 1 keeps its window in layer 1 and follows layer 0 in layer 2.

    Plans are equal if their ``lead``, ``head_order``, ``bits`` and ``residual`` are.

    Args:
        lead: ``[L][H]`` integers or None.
        provenance: how the plan was found (model, data, n, q, N, costs, algorithm …), as free-form JSON.
        head_order: ``[L][Hq]``: for each query head of the plan's model, its number in the original weights.
            Query heads of a KV head stay together, so the order of KV heads follows. None = the original
            order.
        bits: per layer, the bits in which ``pod.make_cache`` holds the keys and values of every token: 16 (as
            the model computes), 8 or 4. Older tokens of windows are packed too (``window_size``). None = 16
            everywhere.
        residual: how many of the newest tokens stay native at least, in layers of 8 or 4 bits.
        num_sink_tokens, num_recent_tokens: the windows that the plan was made for, in tokens.
            ``pod.load_model`` uses them unless it is given others. None = not recorded.
        head_dim: channels of a head of the model that the plan was made for. The bytes of packed values
            depend on it (``bits_per_number``). None = not recorded.
        sinks: the kind of sinks in heads that keep their windows. ``tokens``: the first ``num_sink_tokens``
            tokens are stored. ``constant``: a logit of each query head, and a value and a key of each KV
            head, which take no slot and act at every position (``sinks.py``). ``none``: no sinks. None =
            ``tokens`` or ``none`` according to ``num_sink_tokens``, or not recorded if that is not.
        sink_constants: the constants of a plan with constant sinks. None = not measured yet, or the model's
            weights have them.

    Raises:
        ValueError: rows of unequal length, a lead above its layer, a lead that does not lead itself, a block
            whose layers are not consecutive, an order that separates the query heads of a KV head, other
            bits, impossible windows, or sinks that contradict the windows.
    """

    lead: Lead
    provenance: dict[str, Any] = field(default_factory=dict, compare=False)
    head_order: tuple[tuple[int, ...], ...] | None = None
    bits: tuple[int, ...] | None = None
    residual: int = RESIDUAL
    num_sink_tokens: int | None = field(default=None, compare=False)
    num_recent_tokens: int | None = field(default=None, compare=False)
    head_dim: int | None = field(default=None, compare=False)
    sinks: str | None = field(default=None, compare=False)
    sink_constants: SinkConstants | None = field(default=None, compare=False)

    def __post_init__(self):
        object.__setattr__(self, "lead", _as_rows(self.lead))
        for head in range(self.num_key_value_heads):
            for layer in range(self.num_layers):
                if self.lead[layer][head] is not None:
                    self._check(layer, head)
        if self.head_order is not None:
            order = tuple(map(tuple, self.head_order))
            check_head_order(order, self.num_layers, self.num_key_value_heads)
            moves = any(row != tuple(range(len(row))) for row in order)
            object.__setattr__(self, "head_order", order if moves else None)
        self._check_packing()
        self._check_windows()
        self._check_sinks()

    def _check_packing(self) -> None:
        if self.head_dim is not None and (type(self.head_dim) is not int or self.head_dim < 1):
            raise ValueError(
                f"sharing plan: head_dim must be an integer >= 1, or null, got {self.head_dim!r}"
            )
        if type(self.residual) is not int or self.residual < 0:
            raise ValueError(f"sharing plan: residual must be an integer >= 0, got {self.residual!r}")
        if self.bits is None:
            return
        if isinstance(self.bits, Sequence) and len(self.bits) == self.num_layers:
            object.__setattr__(self, "bits", tuple(self.bits))
            if all(type(bits) is int and bits in BITS for bits in self.bits):
                return
        raise ValueError(
            f"sharing plan: bits must be 16, 8 or 4 for each of {self.num_layers} layers, "
            f"got {self.bits!r:.80}"
        )

    def _check_windows(self) -> None:
        sinks, recent = self.num_sink_tokens, self.num_recent_tokens
        if sinks is None and recent is None:
            return
        if type(sinks) is not int or type(recent) is not int or sinks < 0 or recent < 1:
            raise ValueError(
                "sharing plan: num_sink_tokens must be an integer >= 0 and num_recent_tokens one >= 1, or "
                f"both null, got {sinks!r} and {recent!r}"
            )

    def _check_sinks(self) -> None:
        try:
            object.__setattr__(self, "sinks", kind_of_sinks(self.sinks, self.num_sink_tokens))
        except ValueError as error:
            raise ValueError(f"sharing plan: {error}") from None
        if self.sink_constants is None:
            return
        if self.sinks != "constant":
            raise ValueError(f"sharing plan: sinks = {self.sinks!r} have no constants: leave them out")
        if (reason := self.sink_constants.refusal(self.lead, self.head_dim)) is not None:
            raise ValueError(f"sharing plan: sink_logits and sink_values {reason}")

    def _check(self, layer: int, head: int) -> None:
        lead = self.lead[layer][head]
        assert lead is not None
        where = f"sharing plan: lead[{layer}][{head}] = {lead}"
        if not 0 <= lead <= layer:
            raise ValueError(f"{where} must lie between 0 and its own layer {layer}")
        other = self.lead[lead][head]
        if other != lead:
            does = "keeps its window" if other is None else f"follows layer {other}"
            raise ValueError(f"{where}, but layer {lead} {does}: a lead must lead itself")
        before = next((row[head] for row in reversed(self.lead[:layer]) if row[head] is not None), None)
        if lead not in (layer, before):
            raise ValueError(
                f"{where}, but below it layer {before} leads: "
                "layers of a block must be consecutive, windows aside"
            )

    @classmethod
    def dense(cls, num_layers: int, num_key_value_heads: int) -> "SharingPlan":
        """The plan in which every head leads: an ordinary dense model."""
        return cls(lead=tuple((layer,) * num_key_value_heads for layer in range(num_layers)))

    @classmethod
    def windows(cls, num_layers: int, num_key_value_heads: int) -> "SharingPlan":
        """The plan in which every head keeps its window: window attention (Beltagy et al., 2020)."""
        return cls.of_leads([[]] * num_layers, num_key_value_heads)

    @classmethod
    def of_leads(cls, leads: Sequence[Sequence[int]], num_key_value_heads: int) -> "SharingPlan":
        """The plan in which the KV heads ``leads[layer]`` lead and all others keep their windows.

        RazorAttention and DuoAttention have such plans. ``ValueError`` for a KV head that does not exist.
        """
        heads = range(num_key_value_heads)
        for layer, row in enumerate(leads):
            if others := [head for head in row if head not in heads]:
                raise ValueError(
                    f"sharing plan: leads[{layer}] names KV heads {others}, allowed are 0 to "
                    f"{num_key_value_heads - 1}: number the KV heads of a layer from 0"
                )
        rows = ([layer if head in row else None for head in heads] for layer, row in enumerate(leads))
        return cls(lead=tuple(map(tuple, rows)))

    @classmethod
    def cla(cls, num_layers: int, num_key_value_heads: int, factor: int = 2) -> "SharingPlan":
        """Cross-layer attention (Brandon et al., 2024): blocks of ``factor`` whole layers.

        With a factor of 2, the blocks are layers (0, 1), (2, 3), …. If ``factor`` does not divide the number
        of layers, the last block is shorter. ``ValueError`` for a factor below 1.
        """
        if factor < 1:
            raise ValueError(f"cla shares between factor >= 1 layers, got factor = {factor}")
        provenance = {"algorithm": "cla", "factor": factor}
        rows = tuple((layer - layer % factor,) * num_key_value_heads for layer in range(num_layers))
        return cls(lead=rows, provenance=provenance)

    @property
    def num_layers(self) -> int:
        return len(self.lead)

    @property
    def num_key_value_heads(self) -> int:
        return len(self.lead[0])

    @property
    def num_pairs(self) -> int:
        """The number of (layer, KV head) pairs."""
        return self.num_layers * self.num_key_value_heads

    @cached_property
    def is_dense(self) -> bool:
        """Whether every head leads, and every layer holds 16 bits."""
        return self.num_leads == self.num_pairs and not self.packs

    @property
    def packs(self) -> bool:
        """Whether some layer holds 8 or 4 bits."""
        return self.bits is not None and set(self.bits) != {16}

    @property
    def num_leads(self) -> int:
        """The number of pairs that lead."""
        return sum(lead == layer for layer, row in enumerate(self.lead) for lead in row)

    @property
    def num_windows(self) -> int:
        """The number of pairs that keep their window only."""
        return sum(lead is None for row in self.lead for lead in row)

    @property
    def num_followers(self) -> int:
        """The number of pairs that follow another layer."""
        return self.num_pairs - self.num_leads - self.num_windows

    @property
    def share_followers(self) -> float:
        """Share of pairs that follow another layer, in [0, 1)."""
        return self.num_followers / self.num_pairs

    @property
    def share_windows(self) -> float:
        """Share of pairs that keep their window only, in [0, 1]."""
        return self.num_windows / self.num_pairs

    @property
    def asymptotic_saving(self) -> float:
        """Share of 16-bit KV bytes saved as the sequence grows without bound.

        A head that keeps its window saves all of its bytes, and a follower half: its keys. Fewer bits save a
        part of the rest. A ``cla`` layout, whose followers store nothing, saves ``share_followers`` instead.
        """
        return 1 - self._held(float("inf"))

    def saving(
        self, n: int, num_sink_tokens: int | None = None, num_recent_tokens: int | None = None
    ) -> float:
        """Share of 16-bit KV bytes saved at ``n`` tokens, the bytes of windows included.

        Args:
            n: tokens of the sequence, at least 1.
            num_sink_tokens, num_recent_tokens: windows in tokens. None = those that the plan was made for.

        Raises:
            ValueError: n < 1, or windows are neither given nor recorded in the plan.
        """
        if n < 1:
            raise ValueError(f"saving is defined for n >= 1 tokens, got n = {n}")
        sinks = self.num_sink_tokens if num_sink_tokens is None else num_sink_tokens
        recent = self.num_recent_tokens if num_recent_tokens is None else num_recent_tokens
        if sinks is None or recent is None:
            raise ValueError(
                "this plan does not record its windows: give num_sink_tokens and num_recent_tokens"
            )
        return 1 - self._held(n) - self._held_near(n, sinks, recent)

    def choose_windows(
        self,
        num_sink_tokens: int | None = None,
        num_recent_tokens: int | None = None,
        sinks: str | None = None,
    ) -> dict[str, Any]:
        """Both windows of a model under this plan, by name: those given, else the plan's, else None.

        Windows other than the plan's give a ``UserWarning``. It names both, and if the plan records the
        length that it was made for, also what both save there. If ``sinks`` is given and is not the plan's,
        the plan's ``num_sink_tokens`` is not used.
        """
        own: dict[str, Any] = {
            "num_sink_tokens": self.num_sink_tokens,
            "num_recent_tokens": self.num_recent_tokens,
        }
        given = {"num_sink_tokens": num_sink_tokens, "num_recent_tokens": num_recent_tokens}
        chosen = {name: own[name] if tokens is None else tokens for name, tokens in given.items()}
        if sinks is not None and self.sinks is not None and sinks != self.sinks:
            warnings.warn(
                f"sinks = {sinks!r}, the plan was made for {self.sinks!r}: "
                "leave sinks out to take the plan's",
                stacklevel=3,
            )
            chosen["num_sink_tokens"] = num_sink_tokens
        elif None not in own.values() and chosen != own:
            warnings.warn(self._other_windows(*chosen.values()), stacklevel=3)
        return chosen

    def _other_windows(self, sinks: int, recent: int) -> str:
        """The text of a warning that these windows, in tokens, are not the plan's."""
        said = (
            f"windows of {sinks} first and {recent} last tokens, the plan was made for "
            f"{self.num_sink_tokens} and {self.num_recent_tokens}"
        )
        n = self.provenance.get("budget_length") or self.provenance.get("sequence_length")
        if isinstance(n, int) and n > 0 and "layers" not in self.provenance:
            own = self.saving(n)
            other = self.saving(n, sinks, recent)
            said += f" (at {n:,} tokens these save {own:.1%} of the KV bytes, yours {other:.1%})"
        if "plan_cost" in self.provenance:
            said += (
                f"; its measured cost of {self.provenance['plan_cost']:.4g} holds for its own windows only"
            )
        if self.sink_constants is not None:
            said += "; its constant sinks were measured for its own windows too"
        return said + ": leave num_sink_tokens and num_recent_tokens out to take the plan's"

    def _held(self, n: float) -> float:
        """Bytes of the buffers of every token (not of windows) at ``n`` tokens, as a share of dense bytes."""
        total = 0.0
        for layer, row in enumerate(self.lead):
            bits = 16 if self.bits is None else self.bits[layer]
            key_bits, value_bits = bits_per_number(bits, self.head_dim)
            keys = mean_size(key_bits, self.residual, n)
            values = mean_size(value_bits, self.residual, n)
            total += keys * sum(lead == layer for lead in row)
            total += values * sum(lead is not None for lead in row)
        return total / (2 * self.num_pairs)

    def _held_near(self, n: int, sinks: int, recent: int) -> float:
        """Bytes of the windows at ``n`` tokens, as a share of dense bytes.

        A head with a window has one for keys and one for values, a follower has one for keys. Windows of
        packed layers are packed too (``window_size``).
        """
        held = min(n, sinks + recent)
        total = 0.0
        for layer, row in enumerate(self.lead):
            bits = 16 if self.bits is None else self.bits[layer]
            key_bits, value_bits = bits_per_number(bits, self.head_dim)
            keys = window_size(held, min(held, sinks), self.residual, key_bits)
            values = window_size(held, min(held, sinks), self.residual, value_bits)
            windows = sum(lead is None for lead in row)
            followers = sum(lead not in (None, layer) for lead in row)
            total += keys * (windows + followers) + values * windows
        return total / (2 * self.num_pairs * n)

    def blocks(self, head: int) -> list[list[int]]:
        """The blocks of one KV head, each as a list of its layers, lead first. Windows are in no block."""
        blocks: list[list[int]] = []
        for layer in range(self.num_layers):
            if self.lead[layer][head] == layer:
                blocks.append([])
            if self.lead[layer][head] is not None:
                blocks[-1].append(layer)
        return blocks

    def check_fits(self, num_layers: int, num_key_value_heads: int) -> None:
        """Raise ``ValueError`` unless the plan belongs to a model of this size."""
        if (self.num_layers, self.num_key_value_heads) != (num_layers, num_key_value_heads):
            raise ValueError(
                f"sharing plan is for {self.num_layers} layers x {self.num_key_value_heads} KV heads, "
                f"the model has {num_layers} x {num_key_value_heads}: make a plan for this model"
            )

    def save(self, path: str | os.PathLike) -> None:
        """Write JSON with a schema version. It is renamed when complete, so that no partial file appears."""
        content: dict[str, Any] = {"schema": SCHEMA_VERSION, "lead": self.lead}
        for name in _OPTIONAL:
            if getattr(self, name) is not None:
                content[name] = getattr(self, name)
        if self.sink_constants is not None:
            content |= self.sink_constants.tables()
        temporary = f"{os.fspath(path)}.tmp"
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(content | {"provenance": self.provenance}, file, indent=1)
        os.replace(temporary, path)

    @classmethod
    def load(cls, path: str | os.PathLike) -> "SharingPlan":
        """Read a plan that ``save`` wrote.

        Files of schemas 1 and 2 have their windows in the provenance only, and are read from there. A
        ``ValueError`` names the file and what is wrong with it.
        """
        try:
            with open(path, encoding="utf-8") as file:
                content = json.load(file)
        except (OSError, ValueError) as error:
            raise ValueError(f"cannot read sharing plan {path}: {error}") from error
        if (reason := _refusal_of(content)) is not None:
            raise ValueError(f"{path} {reason}")
        provenance = content.get("provenance") or {}
        if not isinstance(provenance, dict):
            raise ValueError(f"{path}: sharing plan: provenance must be a mapping, got {provenance!r:.80}")
        fields = {name: content.get(name) for name in _OPTIONAL}
        fields["residual"] = content.get("residual", RESIDUAL)
        if content["schema"] < _FIRST_WITH_WINDOWS:
            fields |= {name: provenance.get(name) for name in ("num_sink_tokens", "num_recent_tokens")}
        try:
            return cls(content["lead"], provenance, sink_constants=read_constants(content), **fields)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error


def _refusal_of(content: Any) -> str | None:
    """Why the content of a JSON file is no plan that can be read, as text for a message. None = it can."""
    if not isinstance(content, dict) or "lead" not in content:
        return "is not a sharing plan, which has a field 'lead': make one with `pod explore`"
    schema = content.get("schema")
    if type(schema) is not int or schema not in _READABLE:
        return (
            f"is a sharing plan of schema {schema!r}, allowed are {', '.join(map(str, _READABLE))}: make it "
            "again with `pod explore`"
        )
    if unknown := sorted(set(content) - set(_FIELDS)):
        return f"is a sharing plan with the unknown fields {unknown}, allowed are {', '.join(_FIELDS)}"
    return None


def kind_of_sinks(sinks: str | None, num_sink_tokens: int | None) -> str | None:
    """The kind of sinks, one of ``SINKS``, from a kind and a number of sink tokens; either may be None.

    A number above 0 means ``tokens``, and 0 means ``none`` unless the kind is ``constant``. Without a number,
    the kind is returned as given.

    Raises:
        ValueError: the kind is unknown, or it is ``constant`` or ``none`` but the number is above 0.
    """
    if sinks is not None and sinks not in SINKS:
        raise ValueError(f"sinks = {sinks!r} is unknown: choose {', '.join(SINKS)}")
    if sinks in ("constant", "none") and num_sink_tokens:
        raise ValueError(
            f"sinks = {sinks!r} stores no first tokens, got num_sink_tokens = {num_sink_tokens}: set 0, or "
            "sinks = 'tokens'"
        )
    if sinks == "constant" or num_sink_tokens is None:
        return sinks
    return "tokens" if num_sink_tokens else "none"


def check_head_order(order: Sequence[Sequence[int]], num_layers: int, num_key_value_heads: int) -> None:
    """Check that ``order`` ``[L][Hq]`` permutes each layer's query heads, those of a KV head together.

    Raises:
        ValueError: it does not.
    """
    width = len(order[0]) if order else 0
    groups = width // num_key_value_heads
    ok = len(order) == num_layers and width > 0 and width % num_key_value_heads == 0
    rows = order if ok else ()
    for row in rows:
        parts = (row[i : i + groups] for i in range(0, width, groups))
        together = all(len({head // groups for head in part}) == 1 for part in parts)
        ok = ok and together and sorted(row) == list(range(width))
    if not ok:
        raise ValueError(
            f"sharing plan: head_order must permute the query heads of each of {num_layers} layers, "
            f"those of each of {num_key_value_heads} KV heads staying together"
        )


def _as_rows(lead: Sequence[Sequence[int | None]]) -> Lead:
    """``lead`` as tuples. ``ValueError`` for rows of unequal length, and for values but integers and None."""
    try:
        rows = tuple(map(tuple, lead))
    except TypeError:
        raise ValueError(f"sharing plan: lead must be [layers][KV heads], got {lead!r:.80}") from None
    lengths = [len(row) for row in rows]
    if not rows or not lengths[0] or len(set(lengths)) > 1:
        raise ValueError(f"sharing plan: lead needs equal, non-empty rows, got lengths {lengths}")
    for value in (value for row in rows for value in row):
        if value is not None and type(value) is not int:
            raise ValueError(f"sharing plan: lead must hold integers or null, got {value!r}")
    return rows
