"""Section `explore` of a recipe. Standard library only, so that `--help` needs no torch."""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(kw_only=True)
class ExploreArgs:
    """Section `explore` of a recipe: `launch/explore.py`."""

    algorithm: Literal["dp", "greedy"] = "dp"
    """How layers are grouped: `dp` finds the plan of least dissimilarity at `target_saving`, `greedy` is the
    paper's Algorithm 1 at `threshold`."""

    threshold: float = 0.5
    """Greedy only: similarity from which two layers may share, 0 to 1 (paper: 0.5)."""

    target_saving: float = 0.35
    """Dp only: share of KV cache bytes to save in the limit of long sequences, 0 to below 0.5 (paper: about 0.35)."""

    cost: Literal["similarity", "distant", "output", "projected", "loss"] = "similarity"
    """Dp only: what a layer that uses another one's distant attention costs. `similarity`: 1 - similarity of whole attention
    rows; `distant`: divergence among distant tokens, weighted by the attention they get; `output`: relative error of the
    head's output; `projected`: that error after the output projection, relative to the residual stream; `loss`: expected
    growth of the loss (one backward pass per sequence). All but `similarity` need sequences longer than the windows."""

    retrieval_sequences: int = 0
    """Measured costs only: sequences of random tokens, repeated four times, that are measured beside the text (RazorAttention's search
    for retrieval heads uses such). Both costs then weigh the same, so that heads that find earlier copies stay leads though
    ordinary text seldom needs them; 2 are enough, 0 = text alone."""

    refine_evaluations: int = 0
    """Plans whose loss is measured in a local search that starts from the plan of least cost and keeps its saving; 0 = none.
    One measurement reads refine_sequences sequences; 50 to 150 are usual."""

    refine_sequences: int = 4
    """Refinement only: how many of the num_sequences sequences the loss is measured on."""

    refine_proposals: int = 12
    """Refinement only: splits, merges and shifted boundaries whose loss is measured in each round, of each kind."""

    sources: list[str] = field(default_factory=list)
    """Where the long texts come from, as in data.sources; empty = the recipe's data.sources. Texts are taken from
    the part of the sources that is held out of training where that is possible."""

    num_sequences: int = 64
    """Sequences N to average over (paper: 1000)."""

    sequence_length: int = 4096
    """Tokens n per sequence (paper: 32768)."""

    num_queries: int = 16
    """Last query positions q per sequence whose attention rows are compared (paper: 16)."""

    save_every: int = 8
    """Sequences per process between two saves of the partial sums, from which an interrupted run continues."""

    heads: bool = False
    """Search for retrieval heads (RazorAttention) instead of making a plan; short: `--heads`. Needs no text."""

    head_tokens: int = 2500
    """Heads only: distinct random tokens K (paper: 2500), at most the model's context over `head_repeats`."""

    head_repeats: int = 4
    """Heads only: how often the K tokens are repeated (paper: 4)."""

    induction_share: float = 0.14
    """Heads only: share of the query heads protected for their attention to what followed earlier copies of a token
    (paper: 0.14)."""

    echo_share: float = 0.01
    """Heads only: share of the query heads protected for their attention to earlier copies of a token (paper: 0.01)."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.threshold <= 1.0:
            raise ValueError(f"threshold is {self.threshold}, allowed are 0 to 1")
        if not 0.0 <= self.target_saving < 0.5:
            raise ValueError(
                f"target_saving is {self.target_saving}, allowed are 0 to below 0.5: sharing keys cannot save values"
            )
        for name in (
            "num_sequences",
            "sequence_length",
            "num_queries",
            "save_every",
            "refine_sequences",
            "refine_proposals",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, allowed are 1 and more")
        if self.refine_evaluations < 0:
            raise ValueError(
                f"refine_evaluations is {self.refine_evaluations}, allowed are 0 (no refinement) and more"
            )
        if self.retrieval_sequences < 0:
            raise ValueError(
                f"retrieval_sequences is {self.retrieval_sequences}, allowed are 0 (text alone) and more"
            )
        if self.retrieval_sequences and self.cost == "similarity":
            raise ValueError(
                f"retrieval_sequences is {self.retrieval_sequences} with cost=similarity, which is measured on text alone: set "
                "cost=projected, or retrieval_sequences=0"
            )
        if self.algorithm == "greedy" and self.cost != "similarity":
            raise ValueError(
                f"cost is {self.cost!r}, but algorithm=greedy groups by similarity only: set algorithm=dp"
            )
        for name in ("head_tokens", "head_repeats"):
            if getattr(self, name) < 2:
                raise ValueError(f"{name} is {getattr(self, name)}, allowed are 2 and more")
        for name in ("induction_share", "echo_share"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name} is {getattr(self, name)}, allowed are 0 to 1")
        if self.num_queries > self.sequence_length:
            raise ValueError(
                f"num_queries is {self.num_queries}, more than sequence_length ({self.sequence_length}): "
                "ask for at most as many query positions as a sequence has"
            )
