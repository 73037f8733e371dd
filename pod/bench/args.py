"""What `pod bench` measures: the `bench` section of the recipe."""

from dataclasses import field
from typing import Any

from pydantic import PositiveInt

from pod.eval.answer.methods import EvaluatedMethod, find_method
from pod.notation import unknown
from pod.schema import BelowOne, Share, section

_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim"),
)
_ROWS = {
    "llama3-8b": (128256, 4096, 14336, 32, 32, 8, 128),
    "llama-1b": (128256, 2048, 8192, 16, 32, 8, 64),
    # Its heads have a real size and little around them, so that attention is what costs time.
    "cpu": (512, 2048, 512, 4, 16, 4, 128),
    "tiny": (258, 64, 128, 4, 4, 2, 16),
}
SHAPES: dict[str, dict[str, Any]] = {
    name: dict(zip(_SIZES, row, strict=True)) | {"tie_word_embeddings": name == "llama-1b"}
    for name, row in _ROWS.items()
}
"""Fields of `LlamaConfig` by the name of a shape. The `llama` ones are LLaMA-3-8B and LLaMA-3.2-1B."""
FULL = find_method("full")
"""The dense cache, which every method races."""
POD = find_method("pod")
"""The cache of the plan."""
STOCK = EvaluatedMethod(name="transformers", spec=None, model="stock")
"""The model of transformers with its own cache."""


def bench_method(name: str) -> EvaluatedMethod:
    """The method that a name in `bench.methods` means.

    Args:
        name: written as in `eval.methods`. Its options may include `skip_share`, from 0 to 1: the share of
            the following heads that the gate of tau lets skip distant tokens.

    Raises:
        ValueError: the name is unknown; it sets weights or a capacity, which the benchmark sets itself; or
            `skip_share` is no number from 0 to 1.
    """
    method = find_method(name)
    if method.model not in ("dense", "adapted") or "capacity" in method.options:
        raise ValueError(
            f"methods: {name!r} sets weights or a capacity, but the benchmark sets both itself: leave them "
            "out, for example 'pod[tau=0.7]'"
        )
    share = method.options.get("skip_share", 0)
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share <= 1:
        raise ValueError(f"methods: skip_share = {share!r} in {name!r} must be a number from 0 to 1")
    return method


@section
class BenchArgs:
    """The `bench` section: decode speed of methods beside the dense cache.

    The dense cache takes the fastest attention that runs.
    """

    shapes: str | None = None
    """Random weights of a known shape in place of model.path: llama3-8b, llama-1b, cpu (four layers with
    heads of 128) or tiny. null = the model of model.path."""

    share_followers: BelowOne = 0.7
    """Share of the (layer, KV head) pairs that follow, when there is no plan and one is generated. Speed
    depends on this share, not on which pairs follow."""

    share_windows: Share = 0.0
    """Share of the pairs that keep their window only, in a generated plan. The remaining pairs lead."""

    lengths: list[PositiveInt] = field(default_factory=lambda: [8192, 32768])
    """Tokens in the cache when decoding starts."""

    batch_sizes: list[PositiveInt] = field(default_factory=lambda: [1])
    """Sequences that are decoded together."""

    methods: list[str] = field(default_factory=lambda: ["pod", "pod[tau=0.7]", "pod+int4"])
    """Cache methods to compare with the dense cache (`full`, which always runs), written as in
    eval.methods, for example `snapkv@4096` or `pod[tau=0.7]`. A share such as `@25%` is of the tokens in
    the cache. Keys and values are random, so that the gate of tau hardly ever opens:
    `pod[tau=0.7,skip_share=0.5]` makes half of the following heads pass it."""

    steps: PositiveInt = 16
    """Tokens decoded per sequence in each timed round."""

    repeats: PositiveInt = 5
    """Timed rounds per method. In each round the method and the dense cache take turns."""

    stock: bool = True
    """Also measure stock transformers with its own cache, when it fits into memory."""

    device: str = "auto"
    """Torch device, for example cuda:1; or `balanced` or `sequential`, which spread the model over all GPUs.
    auto = as few GPUs as the model and its caches need, or the CPU where there is no GPU."""

    def __post_init__(self) -> None:
        if self.shapes is not None and self.shapes not in SHAPES:
            raise unknown("shapes", self.shapes, SHAPES)
        for name in ("lengths", "batch_sizes"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise ValueError(f"{name} is {values}: give at least one number, and none twice")
        if self.share_followers + self.share_windows > 1:
            raise ValueError(
                f"share_followers {self.share_followers} and share_windows {self.share_windows} add up to "
                "more than 1: lower one of them"
            )
        self.methods = [bench_method(name).name for name in self.methods]
        if not self.raced_methods or len(set(self.methods)) < len(self.methods):
            raise ValueError(
                f"methods is {self.methods}: name at least one method besides full, and none twice"
            )

    @property
    def raced_methods(self) -> list[EvaluatedMethod]:
        """The methods that race the dense cache. The stock model is left out."""
        return [method for method in map(bench_method, self.methods) if method != FULL]

    def capacity_for(self, length: int, races: int = 1) -> int:
        """Tokens in the dense cache at the end of all its races, which is the capacity that it needs.

        Args:
            length: tokens in the cache before the first race.
            races: how often each method races the dense cache.
        """
        opponents = len(self.raced_methods) + self.stock
        return length + opponents * races * (self.repeats + 1) * self.steps
