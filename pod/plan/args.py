"""Section `explore` of a recipe."""

from dataclasses import field
from typing import Any, Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

from pod.schema import AtLeast2, BelowOne, Share, section


@section
class ExploreArgs:
    """Section `explore` of a recipe: `pod explore`."""

    algorithm: Literal["dp", "greedy"] = "dp"
    """`dp` finds the plan of least total cost at target_saving. `greedy` is the paper's Algorithm 1 at
    threshold; it needs cost=similarity."""

    threshold: Share = 0.5
    """For greedy: similarity from which two layers may share, 0 to 1 (paper: 0.5)."""

    target_saving: BelowOne = 0.35
    """For dp: share of the cache's bytes to save at budget_length tokens, from 0 to below 1, for example
    0.5. Pairs that follow save at most half of their bytes; windows and 4 bits save more."""

    budget_length: NonNegativeInt | None = None
    """For dp: length in tokens at which target_saving is measured. 0 = infinitely long sequences (paper);
    null = sequence_length, and 0 with target=vllm, where the saving is the share of layers with windows. At
    another length, windows for vLLM count with the tokens that it reads at a time."""

    cost: Literal["nats", "similarity"] = "nats"
    """How costs are measured. `nats`: by how many nats per token the model's predictions change, on text and
    where numbers far back are asked for; sequences must be longer than the windows. `similarity`: the paper's
    measure, 1 - similarity of attention rows, for roles=follow only."""

    target: Literal["pod", "vllm"] = "pod"
    """Where the plan will run. `pod`: in this package. `vllm`: in vLLM. All heads of a layer then lead, or
    all keep their window, and the number of layers with windows is one with which vLLM wastes next to no
    memory. The report says what vLLM will hold."""

    roles: list[Literal["follow", "window"]] | None = None
    """What a head may do besides leading. `follow`: use a lower layer's attention to distant tokens, with
    its own values. `window`: keep only the first and the recent tokens. null = both; window with
    target=vllm."""

    granularity: Literal["head", "layer"] | None = None
    """For dp: what gets a role of its own. `head`: every KV head of every layer. `layer`: all heads of a
    layer have one role. Serving engines need this, since they keep one table of cache blocks per layer.
    null = head; layer with target=vllm."""

    engine_batch_tokens: PositiveInt = 2048
    """With target=vllm: tokens of prompts that vLLM reads at a time, its `--max-num-batched-tokens`. vLLM's
    own default is 2,048 to 16,384, by the size of the GPU, so start it with this number. While a prompt is
    read, layers with windows hold twice as many tokens more: vLLM prepares a batch while another one runs."""

    bits: list[int] = field(default_factory=lambda: [16])
    """With nats: bits in which layers may store keys and values. [16] = as computed; [16, 4] = the
    plan may also pack layers into 4 bits, like the method int4."""

    residual: NonNegativeInt | None = None
    """With bits=[16, 4]: how many of the newest tokens stay in 16 bits at least, in layers of 4 bits. Older
    tokens are packed, in windows of 85 tokens or more too. null = a quarter of model.num_recent_tokens, in
    steps of 32, from 32 to 128; with shorter windows, as many as keep them in 16 bits."""

    align_heads: bool = True
    """With nats, follow, granularity=head and bits=[16]: reorder the KV heads of each layer so that
    similar heads share. The model computes the same; the plan records the order."""

    retrieval_sequences: NonNegativeInt = 6
    """With nats: prompts that ask for ten numbers far back, to find heads that retrieve. Text seldom shows
    what they are for. A prompt is as long as a text. For followers and 4 bits, two sequences of random
    tokens, repeated four times, are measured too. 0 = text only."""

    retrieval_weight: NonNegativeFloat = 4.0
    """With nats: how many tokens of text a token of a retrieved answer weighs in the cost of a plan.
    Higher = more heads that retrieve, fewer that serve text. 0 = text only."""

    rounds: NonNegativeInt = 1
    """With nats and windows: how often windows are measured again where the plan has them, and exchanged for
    leads if that lowers what is measured. First the best of three choices of windows is taken. A round
    reads up to 8 of the texts, and all prompts, for every target_saving anew. 0 = take the plan of the
    costs."""

    loss_sequences: NonNegativeInt = 4
    """With nats: number of sequences on which the loss of the model is measured, with and without the
    plan. 0 = do not measure it."""

    sources: list[str] = field(default_factory=list)
    """Texts to measure on, written as in data.sources. Empty = the text that `pod data` held out of
    training."""

    num_sequences: PositiveInt = 64
    """Number of texts to measure on (paper: 1000)."""

    sequence_length: PositiveInt = 8192
    """Tokens of each text (paper: 32768). With nats it must be longer than the windows."""

    num_queries: PositiveInt = 16
    """Positions of each text whose attention is measured (paper: 16). With nats they are evenly spaced
    over the positions that have tokens outside the windows, with similarity they are the last ones."""

    heads: bool = False
    """Search for retrieval heads (RazorAttention) and make no plan; same as `--heads`. Needs no text."""

    head_tokens: AtLeast2 = 2500
    """For heads: distinct random tokens (paper: 2500), at most the model's context / head_repeats."""

    head_repeats: AtLeast2 = 4
    """For heads: how often the tokens are repeated (paper: 4)."""

    induction_share: Share = 0.14
    """For heads: share of the query heads to protect because they attend to what followed an earlier copy
    of a token (paper: 0.14)."""

    echo_share: Share = 0.01
    """For heads: share of the query heads to protect because they attend to earlier copies of a token
    (paper: 0.01)."""

    def __post_init__(self) -> None:
        if self.target == "vllm":
            self._check_vllm()
        if self.roles is None:
            self.roles = ["window"] if self.target == "vllm" else ["follow", "window"]
        if self.granularity is None:
            self.granularity = "layer" if self.target == "vllm" else "head"
        if not self.roles or len(set(self.roles)) < len(self.roles):
            raise ValueError(f"roles is {self.roles}, allowed are follow, window, or both")
        if sorted(self.bits) not in ([16], [4, 16]) or (4 in self.bits and self.cost == "similarity"):
            raise ValueError(
                f"bits is {self.bits}, allowed are [16], or [16, 4] with cost=nats: the plan chooses "
                "the layers that are packed"
            )
        if self.cost == "similarity" and self.roles != ["follow"]:
            raise ValueError(
                f"roles is {self.roles} with cost=similarity, which prices followers only: set roles=follow, "
                "or cost=nats"
            )
        if self.algorithm == "greedy" and self.cost != "similarity":
            raise ValueError(
                f"cost is {self.cost!r}, but algorithm=greedy groups by similarity only: set "
                "cost=similarity and roles=follow, or algorithm=dp"
            )
        if self.algorithm == "greedy" and self.granularity == "layer":
            raise ValueError(
                "granularity is 'layer', but algorithm=greedy groups head by head: set algorithm=dp, or "
                "granularity=head"
            )
        if self.budget_length is None:
            self.budget_length = 0 if self.target == "vllm" else self.sequence_length

    def _check_vllm(self) -> None:
        """Refuse what vLLM cannot run: its layers hold every token or a window, the same for all heads."""
        allowed: dict[str, tuple[Any, ...]] = {
            "granularity": (None, "layer"),
            "roles": (None, ["window"]),
            "bits": ([16],),
            "cost": ("nats",),
            "algorithm": ("dp",),
        }
        reasons = {
            "granularity": "vLLM has one table of cache blocks for all heads of a layer",
            "roles": "in vLLM a layer holds every token or keeps its window, and cannot follow another one",
            "bits": "vLLM does not read our packed layers",
            "cost": "it prices followers, which vLLM does not have",
            "algorithm": "it makes blocks of followers, which vLLM does not have",
        }
        for name, values in allowed.items():
            value = getattr(self, name)
            if value not in values:
                wanted = values[-1] if isinstance(values[-1], str) else ",".join(map(str, values[-1]))
                wanted = f"[{wanted}]" if name == "bits" else wanted
                raise ValueError(
                    f"{name} is {value!r} with target=vllm, but {reasons[name]}: set {name}={wanted}, or "
                    "target=pod"
                )

    @property
    def least_saving(self) -> float:
        """The saving that a plan must reach: `target_saving`, and half a percentage point less for vLLM.

        Rounded targets then mean what they say: with target=vllm, windows in 20 of 30 layers (66.7 %) are
        enough for a `target_saving` of 0.67.
        """
        return max(0.0, self.target_saving - (0.005 if self.target == "vllm" else 0.0))

    @property
    def budget_tokens(self) -> int:
        """Tokens at which `target_saving` is measured.

        For infinitely long sequences it is a number that is larger than every window.
        """
        return self.budget_length or 10**12
