"""Section `explore` of a recipe."""

from dataclasses import field
from typing import Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

from pod.schema import AtLeast2, BelowOne, Share, section


@section
class ExploreArgs:
    """Section `explore` of a recipe: `pod explore`."""

    algorithm: Literal["dp", "greedy"] = "dp"
    """`dp`: the plan of least cost at `target_saving`; `greedy`: the paper's Algorithm 1 at `threshold` (with cost=similarity)."""

    threshold: Share = 0.5
    """Greedy only: similarity from which two layers may share, 0 to 1 (paper: 0.5)."""

    target_saving: BelowOne = 0.35
    """Dp only: share of the KV cache bytes to save at `budget_length` tokens, 0 to below 1; followers save half of theirs at most.
    Layers that were trained with windows do not count."""

    budget_length: NonNegativeInt | None = None
    """Dp only: tokens at which `target_saving` is meant; 0 = in the limit of long sequences (paper), empty = `sequence_length`."""

    cost: Literal["projected", "similarity"] = "projected"
    """What a role costs. `projected`: squared error behind the output projection relative to the residual stream, on text and on
    repeated random tokens; needs sequences longer than the windows. `similarity`: the paper's, 1 - similarity of whole attention
    rows, which can price followers only (roles=follow)."""

    roles: list[Literal["follow", "window"]] = field(default_factory=lambda: ["follow", "window"])
    """What heads may do beside leading: `follow` a lower layer's attention to distant tokens (own values stay), or keep their
    `window` (sinks and recent tokens, nothing else)."""

    bits: list[int] = field(default_factory=lambda: [16])
    """Projected only: bits in which a layer may hold the keys and values of every token: 16 (as the model computes), or 16 and 4
    (packed as the cache method int4; the plan says which layers)."""

    align_heads: bool = True
    """Projected and follow only: re-order the KV heads of every layer, and the query heads of a KV head, so that heads that fit each
    other share (the model computes the same). The plan records the order."""

    retrieval_sequences: NonNegativeInt = 2
    """Projected only: sequences of random tokens, repeated four times, that are measured beside the text, which seldom needs heads
    that find earlier copies; 0 = text alone."""

    retrieval_weight: NonNegativeFloat = 1.0
    """Projected only: weight of the cost on repeated tokens; that on text has weight 1. Both are in the same units."""

    loss_sequences: NonNegativeInt = 4
    """Projected only: on how many of the num_sequences sequences, beside those of repeated tokens, the loss of the dense model and
    of the chosen plan is measured; 0 = it is not."""

    sources: list[str] = field(default_factory=list)
    """Where the long texts come from, as in data.sources; empty = the text that the prepared data holds out of training."""

    num_sequences: PositiveInt = 64
    """Sequences N to average over (paper: 1000)."""

    sequence_length: PositiveInt = 8192
    """Tokens n per sequence, more than the windows hold (paper: 32768)."""

    num_queries: PositiveInt = 16
    """Last query positions q per sequence whose attention rows are compared (paper: 16)."""

    heads: bool = False
    """Search for retrieval heads (RazorAttention) instead of making a plan; short: `--heads`. Needs no text."""

    head_tokens: AtLeast2 = 2500
    """Heads only: distinct random tokens K (paper: 2500), at most the model's context over `head_repeats`."""

    head_repeats: AtLeast2 = 4
    """Heads only: how often the K tokens are repeated (paper: 4)."""

    induction_share: Share = 0.14
    """Heads only: share of the query heads kept for their attention to what followed earlier copies of a token (paper: 0.14)."""

    echo_share: Share = 0.01
    """Heads only: share of the query heads kept for their attention to earlier copies of a token (paper: 0.01)."""

    def __post_init__(self) -> None:
        if not self.roles or len(set(self.roles)) < len(self.roles):
            raise ValueError(f"roles is {self.roles}, allowed are follow, window, or both")
        if sorted(self.bits) not in ([16], [4, 16]) or (4 in self.bits and self.cost == "similarity"):
            raise ValueError(
                f"bits is {self.bits}, allowed are [16], or [16, 4] with cost=projected: which layers are packed is for the plan"
            )
        if self.cost == "similarity" and self.roles != ["follow"]:
            raise ValueError(
                f"roles is {self.roles} with cost=similarity, which prices followers only: set roles=follow, or cost=projected"
            )
        if self.algorithm == "greedy" and self.cost != "similarity":
            raise ValueError(
                f"cost is {self.cost!r}, but algorithm=greedy groups by similarity only: set cost=similarity and roles=follow, or "
                "algorithm=dp"
            )
        if self.budget_length is None:
            self.budget_length = self.sequence_length

    @property
    def budget_tokens(self) -> int:
        """Tokens at which `target_saving` is meant; a number beyond every window for the limit of long sequences."""
        return self.budget_length or 10**12
