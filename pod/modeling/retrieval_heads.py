"""Retrieval heads, which look far back: scores of a head search, the heads chosen by them, and their file."""

import math
import os
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from operator import index
from typing import Any

import numpy as np

from pod.files import read_json, write_json
from pod.modeling.model.config import PodConfig
from pod.modeling.model.sharing import SharingPlan

SCHEMA = "retrieval heads 1"

Heads = tuple[tuple[int, ...], ...]
"""Per layer, the heads of that layer in ascending order."""


@dataclass(frozen=True, kw_only=True)
class RetrievalHeads:
    """Scores of every query head, and the heads that keep all tokens because of them (RazorAttention §3.3).

    A head is *protected*, that is it keeps all tokens, if its score is among the best of the model.

    Attributes:
        echo: ``[L][Hq]``, the mean attention to earlier copies of the current token.
        induction: ``[L][Hq]``, the mean attention to the tokens that followed earlier copies of the current
            token.
        num_key_value_heads: KV heads of a layer. Each has Hq / H consecutive query heads.
        induction_share: share of all query heads that is protected for the induction score (paper: 0.14).
        echo_share: share of all query heads that is protected for the echo score (paper: 0.01).
        provenance: model, fingerprint of its weights, tokens K, repeats and seed of the search.

    Raises:
        ValueError: the scores have different shapes or do not fit ``num_key_value_heads``, or a score or
            share is not in [0, 1].
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
        """How many query heads a KV head has."""
        return len(self.echo[0]) // self.num_key_value_heads

    @property
    def query_heads(self) -> Heads:
        """Per layer, the query heads whose induction or echo score is among the best of the model."""
        chosen = _best(self.induction, self.induction_share), _best(self.echo, self.echo_share)
        return tuple(tuple(sorted({*a, *b})) for a, b in zip(*chosen, strict=True))

    @property
    def key_value_heads(self) -> Heads:
        """Per layer, the KV heads that keep all tokens: those with a query head in ``query_heads`` (§4.1)."""
        return tuple(tuple(sorted({head // self.groups for head in row})) for row in self.query_heads)

    def plan(self, share: float | None = None) -> SharingPlan:
        """The plan in which the protected KV heads lead and the others keep their windows.

        A model that is loaded with this plan also sees only the windows while a prompt is fed, which makes it
        DuoAttention's model.

        Args:
            share: the share of all KV heads that lead, to match a given number of bytes. Those with the best
                query heads lead. None = ``key_value_heads`` lead.
        """
        leads = self.key_value_heads
        if share is not None:
            of_query_heads = np.maximum(self.echo, self.induction)
            of_groups = of_query_heads.reshape(len(self.echo), self.num_key_value_heads, self.groups)
            leads = _best(of_groups.max(axis=-1).tolist(), share)
        found = SharingPlan.of_leads(leads, self.num_key_value_heads)
        return replace(found, provenance={"algorithm": "retrieval heads", "share": share, **self.provenance})

    def check_fits(self, config: PodConfig) -> None:
        """Raise ``ValueError`` unless the scores come from a model of this shape and order of heads."""
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
        """Write the scores and the heads as JSON. The file appears only when it is complete."""
        heads = {"query_heads": self.query_heads, "key_value_heads": self.key_value_heads}
        write_json(path, {"schema": SCHEMA} | heads | asdict(self))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "RetrievalHeads":
        """Read a file that ``save`` wrote.

        Raises:
            ValueError: the file is another one, damaged, or edited by hand. The message has one line and
                names the file.
        """
        content = read_json(path)
        try:
            if not isinstance(content, dict) or content.get("schema") != SCHEMA:
                raise ValueError(f"its schema is not {SCHEMA!r}")
            made: dict[str, Any] = {one.name: content[one.name] for one in fields(cls)}
            for name in ("echo", "induction"):
                made[name] = _rows(made[name], float)
            made["provenance"] = dict(made["provenance"])
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
    """The plan in which the given KV heads lead and all others keep their windows.

    Args:
        heads: the heads that lead: a plan, scores (``RetrievalHeads``), the path of their JSON file, the path
            of a ``.tsv`` file with DuoAttention's gates, a list of KV heads for each layer, or ``random``
            (Table 1).
        config: the configuration of the model.
        share: the share of all KV heads that lead, those with the best scores or gates; see
            ``RetrievalHeads.plan``. It must be None for a plan or a list, and be given for gates. None with
            ``random`` = 0.15.
        seed: seed for drawing ``random`` heads.

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
    """Read gates ``[L][H]`` from a file in the format of DuoAttention's ``full_attention_heads.tsv``.

    A gate of 1 means a retrieval head (Xiao et al., 2024).

    Raises:
        ValueError: the file cannot be read or has other sizes or values, ``share`` is None, or the model does
            not have its heads in the original order.
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
    """Per layer, the heads whose scores are among the best ``share`` of all scores ``[L][heads]``.

    The number of heads is rounded, and at least one when the share is not 0. In a tie the lower layer, then
    the lower head wins.
    """
    places = [(layer, head) for layer, row in enumerate(scores) for head in range(len(row))]
    ranked = sorted(places, key=lambda place: -scores[place[0]][place[1]])
    count = max(1, math.floor(share * len(ranked) + 0.5)) if share else 0
    chosen = sorted(ranked[:count])
    return tuple(tuple(head for at, head in chosen if at == layer) for layer in range(len(scores)))


def _rows(values: Any, kind: type) -> tuple[tuple, ...]:
    """Rows of numbers as tuples, with each number converted by ``kind``."""
    return tuple(tuple(kind(value) for value in row) for row in values)
