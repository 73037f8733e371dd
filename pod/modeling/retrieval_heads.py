"""Which heads look far back: the scores of a head search, the heads chosen from them, and their JSON file."""

import math
import os
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from operator import index
from typing import Any

from pod.files import read_json, write_json
from pod.modeling.model.config import PodConfig
from pod.modeling.model.sharing import SharingPlan

SCHEMA = "retrieval heads 1"

Heads = tuple[tuple[int, ...], ...]
"""Per layer, the heads of that layer in ascending order."""


@dataclass(frozen=True, kw_only=True)
class RetrievalHeads:
    """Scores of every query head, and the heads that keep their whole cache (RazorAttention §3.3).

    Attributes:
        echo: ``[L][Hq]``, the mean attention to earlier copies of the current token.
        induction: ``[L][Hq]``, the mean attention to the tokens that followed earlier copies of the current
            token.
        num_key_value_heads: KV heads of a layer; each owns Hq / H consecutive query heads.
        induction_share: share of all query heads that is protected for its induction score (paper: 0.14).
        echo_share: share of all query heads that is protected for its echo score (paper: 0.01).
        provenance: model, fingerprint of its weights, tokens K, repeats and seed of the search.
    """

    echo: tuple[tuple[float, ...], ...]
    induction: tuple[tuple[float, ...], ...]
    num_key_value_heads: int
    induction_share: float = 0.14
    echo_share: float = 0.01
    provenance: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shapes = {tuple(len(row) for row in scores) for scores in (self.echo, self.induction)}
        widths = set(next(iter(shapes)))
        if len(shapes) != 1 or len(widths) != 1 or widths.pop() % self.num_key_value_heads:
            raise ValueError(
                "echo and induction scores must both be [layers][query heads], with query heads in "
                f"{self.num_key_value_heads} equal groups: search again with `pod explore --heads`"
            )
        values = [value for scores in (self.echo, self.induction) for row in scores for value in row]
        if not all(-1e-6 <= value <= 1 + 1e-6 for value in values):
            raise ValueError("a score is not in 0 to 1: the model gives NaN; try model.dtype=float32")
        for name in ("induction_share", "echo_share"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name} is {getattr(self, name)}, allowed are 0 to 1")

    @property
    def groups(self) -> int:
        """Query heads of a KV head."""
        return len(self.echo[0]) // self.num_key_value_heads

    @property
    def query_heads(self) -> Heads:
        """Per layer, its query heads among those with the model's highest induction or echo scores."""
        chosen = _best(self.induction, self.induction_share), _best(self.echo, self.echo_share)
        return tuple(tuple(sorted({*a, *b})) for a, b in zip(*chosen, strict=True))

    @property
    def key_value_heads(self) -> Heads:
        """Per layer, the KV heads that keep everything: a query head of their group was chosen (§4.1)."""
        return tuple(tuple(sorted({head // self.groups for head in row})) for row in self.query_heads)

    def plan(self, share: float | None = None) -> SharingPlan:
        """The plan in which the protected KV heads lead and the others keep their windows.

        If the windows also hold while the prompt is read, this is DuoAttention's model.

        Args:
            share: the share of all KV heads that lead, to fill a given number of bytes. The groups with the
                best scores are taken. None = ``key_value_heads``.
        """
        leads = self.key_value_heads
        if share is not None:
            groups, rows = self.groups, zip(self.echo, self.induction, strict=True)
            best = [[max(pair) for pair in zip(*row, strict=True)] for row in rows]
            scores = [[max(row[i : i + groups]) for i in range(0, len(row), groups)] for row in best]
            leads = _best(scores, share)
        found = SharingPlan.of_leads(leads, self.num_key_value_heads)
        return replace(found, provenance={"algorithm": "retrieval heads", "share": share, **self.provenance})

    def check_fits(self, config: PodConfig) -> None:
        """Raise ValueError unless the scores come from a model of this shape with its heads in this order."""
        found = len(self.echo), len(self.echo[0]), self.num_key_value_heads
        wanted = config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads
        if found != wanted:
            raise ValueError(
                f"the retrieval heads are of a model with {found[0]} layers, {found[1]} query and "
                f"{found[2]} KV heads, this one has {wanted[0]}, {wanted[1]} and {wanted[2]}: search again "
                "with `pod explore --heads`"
            )
        if self.provenance.get("head_order") != config.head_order:
            raise ValueError(
                "the retrieval heads are of another order of heads than this model's: search again on it "
                "with `pod explore --heads`"
            )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write JSON, atomically."""
        heads = {"query_heads": self.query_heads, "key_value_heads": self.key_value_heads}
        write_json(path, {"schema": SCHEMA} | heads | asdict(self))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "RetrievalHeads":
        """Read what ``save`` wrote.

        For anything else it raises a ValueError, whose message has one line and names the file.
        """
        content = read_json(path)
        try:
            if not isinstance(content, dict) or content.get("schema") != SCHEMA:
                raise ValueError(f"its schema is not {SCHEMA!r}")
            made: dict[str, Any] = {one.name: content[one.name] for one in fields(cls)}
            echo, induction = (_rows(made[name], float) for name in ("echo", "induction"))
            made |= {"echo": echo, "induction": induction, "provenance": dict(made["provenance"])}
            found = cls(**made)
            if _rows(content["key_value_heads"], int) != found.key_value_heads:
                raise ValueError("key_value_heads do not follow from the scores: it was edited by hand")
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            raise ValueError(
                f"{path} is not a file of retrieval heads ({str(error) or type(error).__name__}): write it "
                "with `pod explore --heads`"
            ) from None
        return found


def plan_of_heads(heads: Any, config: PodConfig, share: float | None = None, seed: int = 0) -> SharingPlan:
    """The plan in which the given KV heads lead.

    Args:
        heads: which heads: a plan, scores (``RetrievalHeads``), the path of a JSON file, the path of a
            ``.tsv`` file of DuoAttention's gates, a list of KV heads for each layer, or ``random`` (Table 1).
        share: the share of all KV heads that lead, those with the best scores or gates; see
            ``RetrievalHeads.plan``. None for heads that are listed.
        seed: draws ``random`` heads.

    Raises:
        ValueError: nothing is given, the file is of another model, or the model does not have these heads.
    """
    layers, width = config.num_hidden_layers, config.num_key_value_heads
    if isinstance(heads, str | os.PathLike) and os.fspath(heads).endswith(".tsv"):
        heads, share = _best(_gates(heads, config, share), share or 0.0), None
    elif heads == "random":
        draw = random.Random(seed).random
        drawn = [[draw() for _ in range(width)] for _ in range(layers)]
        heads, share = _best(drawn, 0.15 if share is None else share), None
    elif isinstance(heads, str | os.PathLike):
        heads = RetrievalHeads.load(heads)
    if isinstance(heads, RetrievalHeads):
        heads.check_fits(config)
        return heads.plan(share)
    if share is not None:
        raise ValueError(f"share = {share} chooses by scores: give a file that `pod explore --heads` writes")
    if isinstance(heads, SharingPlan):
        heads.check_fits(layers, width)
        if heads.head_order != config.sharing_plan.head_order:
            raise ValueError(
                "heads is a plan for another order of heads than this model's: load the model with that plan"
            )
        if heads.num_followers:
            raise ValueError(f"heads is a plan with {heads.num_followers} followers: give one without")
        return heads
    try:
        listed = [sorted({index(head) for head in row}) for row in heads]
    except (TypeError, ValueError):
        listed = []
    if len(listed) != layers or not {head for row in listed for head in row} <= set(range(width)):
        raise ValueError(
            f"heads is {heads!r:.200}, expected a path or, for each of {layers} layers, a list of whole "
            f"numbers from 0 to {width - 1} such as [0], its KV heads: `pod explore --heads` writes a file"
        )
    return SharingPlan.of_leads(listed, width)


def _gates(path: str | os.PathLike[str], config: PodConfig, share: float | None) -> list[list[float]]:
    """Gates ``[L][H]`` from a file in the form of DuoAttention's ``full_attention_heads.tsv``.

    1 is a retrieval head (Xiao et al., 2024). ValueError when the file cannot be read, does not have these
    gates, or when ``share`` is missing or the model has its heads in another order.
    """
    layers, width = config.num_hidden_layers, config.num_key_value_heads
    if share is None or config.head_order is not None:
        raise ValueError(
            f"{path} has gates of heads in their original order, and chooses none: give share, as 0.5, and a "
            "model in that order"
        )
    try:
        with open(path, encoding="utf-8") as file:
            gates = [[float(gate) for gate in line.split()] for line in file]
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read gates from {path}: {error}") from None
    if [len(row) for row in gates] != [width] * layers or not all(0 <= x <= 1 for row in gates for x in row):
        raise ValueError(
            f"{path} must have {layers} lines of {width} gates from 0 to 1: a line per layer, a gate "
            "per KV head"
        )
    return gates


def _best(scores: Sequence[Sequence[float]], share: float) -> Heads:
    """Per layer, its heads among the best ``share`` of all pairs (layer, head).

    The number of pairs is rounded, and at least one when the share is not 0. In a tie the lower pair wins.
    """
    places = [(layer, head) for layer, row in enumerate(scores) for head in range(len(row))]
    ranked = sorted(places, key=lambda place: -scores[place[0]][place[1]])
    count = max(1, math.floor(share * len(ranked) + 0.5)) if share else 0
    chosen = sorted(ranked[:count])
    return tuple(tuple(head for at, head in chosen if at == layer) for layer in range(len(scores)))


def _rows(values: Any, kind: type) -> tuple[tuple, ...]:
    return tuple(tuple(kind(value) for value in row) for row in values)
