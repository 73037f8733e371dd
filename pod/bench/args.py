"""What `pod bench` measures: the `bench` section of the recipe."""

from dataclasses import dataclass, field
from typing import Any

import yaml
from pydantic import PositiveInt

from pod.eval.answer.methods import find_method, unknown
from pod.schema import BelowOne, Share, section

_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim"),
)
_ROWS = {
    "llama3-8b": (128256, 4096, 14336, 32, 32, 8, 128),
    "llama-1b": (128256, 2048, 8192, 16, 32, 8, 64),
    "cpu": (
        512,
        2048,
        512,
        4,
        16,
        4,
        128,
    ),  # heads of real size and little around them: attention is what costs time
    "tiny": (258, 64, 128, 4, 4, 2, 16),
}
SHAPES: dict[str, dict[str, Any]] = {name: dict(zip(_SIZES, row, strict=True)) for name, row in _ROWS.items()}
SHAPES["llama-1b"]["tie_word_embeddings"] = True
"""Fields of `PodConfig` by name. The `llama` ones are LLaMA-3-8B and LLaMA-3.2-1B."""


@dataclass(frozen=True, kw_only=True)
class BenchMethod:
    """One contestant.

    Attributes:
        name: as written, such as `pod tau=0.7`.
        spec, options: for `pod.make_cache`.
        skip_share: share of the following (layer, KV head) pairs whose random window keys are so loud that the gate
            passes every tau below 1, see `pod.bench.decode_speed.fill`.
    """

    name: str
    spec: str
    options: dict[str, Any] = field(default_factory=dict)
    skip_share: float = 0.0

    @property
    def parts(self) -> list[str]:
        """The joined methods of the spec."""
        return [part.strip() for part in self.spec.split("+")]

    @property
    def uses_plan(self) -> bool:
        """Whether it runs on the model with the sharing plan."""
        return "pod" in self.parts


FULL = BenchMethod(name="full", spec="full")


def parse_method(text: str) -> BenchMethod:
    """`pod+int4 group_size=64` to a method: a spec of `pod.make_cache`, then its parameters as `name=value`.

    Raises: ValueError for an unknown spec, or a word that is no `name=value`.
    """
    words = text.split()
    if not words:
        raise ValueError("methods holds an empty name: write full, pod, 'pod tau=0.7', pod+int4 …")
    options = {}
    for word in words[1:]:
        name, sign, value = word.partition("=")
        if not sign or not name.isidentifier() or not value:
            raise ValueError(f"methods: {word!r} in {text!r} is not name=value, such as tau=0.7")
        try:
            options[name] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise ValueError(f"methods: the value in {word!r} is not valid YAML") from None
    find_method(words[0])
    if "pod-unadapted" in words[0] or "capacity" in options:
        raise ValueError(
            f"methods: {text!r} is not possible: weights and room are the benchmark's own; write 'pod' and leave "
            "capacity out"
        )
    share = options.pop("skip_share", 0.0)
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share <= 1:
        raise ValueError(f"methods: skip_share = {share!r} in {text!r} must be a number from 0 to 1")
    return BenchMethod(name=" ".join(words), spec=words[0], options=options, skip_share=float(share))


@section
class BenchArgs:
    """The `bench` section: decode speed of methods beside the dense cache. Lengths are in tokens, sizes in bytes."""

    shapes: str | None = None
    """random weights of this shape in place of model.path: llama3-8b, llama-1b, cpu (four layers with heads of 128) or
    tiny; null = the model of model.path"""

    shape_changes: dict[str, PositiveInt] = field(default_factory=dict)
    """sizes of `shapes` to change, as `{num_hidden_layers: 8}`"""

    share_followers: BelowOne = 0.7
    """share of the (layer, KV head) pairs that follow in the plan that is made up when there is neither model.plan nor a
    plan in <output_dir>/plan; the speed of PoD depends on this share, not on which pairs follow"""

    share_windows: Share = 0.0
    """share of the pairs that keep their window only in that plan; the others lead"""

    lengths: list[PositiveInt] = field(default_factory=lambda: [8192, 32768])
    """tokens in the cache when decoding starts"""

    batch_sizes: list[PositiveInt] = field(default_factory=lambda: [1])
    """rows decoded together"""

    methods: list[str] = field(default_factory=lambda: ["pod", "pod tau=0.7", "pod+int4"])
    """what races the dense cache (`full`, which always runs): a method of `run_eval.py --list-methods` or a combination,
    then its parameters, as `pod tau=0.7` or `snapkv budget=4096`. Keys and values are random; `skip_share=0.5` behind a
    method with tau makes half of the following heads pass the gate, which random keys alone hardly ever do."""

    steps: PositiveInt = 16
    """tokens decoded per row and timed round"""

    repeats: PositiveInt = 5
    """timed rounds per method; in each round the method and the dense cache take turns"""

    backend: str = "auto"
    """decode backend of the methods: auto, grouped or triton; a named one that cannot run is an error"""

    full_backend: str = "fastest"
    """decode backend of the dense cache: fastest tries all that run and takes the fastest; or a backend by name, also sdpa
    (PyTorch's flash attention) and flash_attn (that package), which serve dense caches only"""

    stock: bool = True
    """also run the stock transformers model with its own cache, where it fits into memory"""

    device: str = "auto"
    """torch device; auto = cuda when there is one, else cpu"""

    def __post_init__(self) -> None:
        if self.shapes is not None and self.shapes not in SHAPES:
            raise unknown("shapes", self.shapes, SHAPES)
        self._check_changes()
        for name in ("lengths", "batch_sizes"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise ValueError(f"{name} is {values}, allowed are different numbers, at least one")
        if self.share_followers + self.share_windows > 1:
            raise ValueError(
                f"share_followers is {self.share_followers} and share_windows {self.share_windows}, together more than 1"
            )
        names = [parse_method(text).name for text in self.methods]
        if not self.contestants() or len(set(names)) < len(names):
            raise ValueError(
                f"methods is {self.methods}, expected different methods, at least one besides full"
            )

    def _check_changes(self) -> None:
        if self.shape_changes and self.shapes is None:
            raise ValueError("shape_changes needs shapes: the sizes of model.path are its own")
        for name in self.shape_changes:
            if name not in _SIZES:
                raise unknown("size in shape_changes", name, _SIZES)

    def contestants(self) -> list[BenchMethod]:
        """What races the dense cache."""
        found = [parse_method(text) for text in self.methods]
        return [method for method in found if method != FULL]

    def shape(self) -> dict[str, Any]:
        """Fields of `PodConfig` of the random model."""
        assert self.shapes is not None, "a model of its own"
        return SHAPES[self.shapes] | self.shape_changes
