"""What an evaluation measures: the `eval` section of the recipe, and the methods that it can compare. Standard library only."""

import difflib
from dataclasses import dataclass, field

TASKS = ("perplexity", "passkey", "efficiency")
_COUNTS = (
    "text_length",
    "text_sequences",
    "min_context",
    "scored_tokens",
    "passkey_samples",
    "passkey_new_tokens",
    "batch_size",
    "efficiency_tokens",
    "efficiency_repeats",
    "bootstrap_samples",
)


@dataclass(frozen=True, kw_only=True)
class Method:
    """One way to hold the KV cache, under evaluation.

    spec: what `pod.make_cache` calls it.
    model: `dense` (recipe.model.path), `unadapted` (the same weights under the plan, no training) or `adapted` (the PoD export).
    takes_budget: it drops tokens, so it is given the bytes that `pod` holds.
    grows: how many slots a token fed after the prompt adds (0 = a ring that stays as large as it is).
    one_shot: one forward pass without a cache equals its decode path (tests/eval/test_perplexity.py proves it), so that
        perplexity may be scored by that pass. A method that compresses must never say so.
    """

    name: str
    spec: str
    model: str
    takes_budget: bool = False
    grows: bool = True
    one_shot: bool = False
    title: str = ""


METHODS = {
    method.name: method
    for method in (
        Method(
            name="full", spec="full", model="dense", one_shot=True, title="dense model, every key and value"
        ),
        Method(name="pod", spec="pod", model="adapted", one_shot=True, title="PoD, adapted weights"),
        Method(
            name="pod-unadapted",
            spec="pod",
            model="unadapted",
            one_shot=True,
            title="PoD, dense weights + plan",
        ),
        Method(
            name="streamingllm",
            spec="streamingllm",
            model="dense",
            takes_budget=True,
            grows=False,
            title="sinks + recent",
        ),
        Method(
            name="snapkv",
            spec="snapkv",
            model="dense",
            takes_budget=True,
            title="tokens picked by the prompt's end",
        ),
    )
}


@dataclass(kw_only=True)
class EvalArgs:
    """The `eval` section: which methods, on which tasks, at which lengths. Lengths are in tokens."""

    methods: list[str] = field(
        default_factory=lambda: ["full", "pod", "pod-unadapted", "streamingllm", "snapkv"]
    )
    """methods to compare; `pod` runs on the adapted export, `pod-unadapted` on the dense weights under the plan, the rest on
    the dense model. The methods that drop tokens get the bytes that PoD holds at the same length."""

    tasks: list[str] = field(default_factory=lambda: list(TASKS))
    """what to measure: perplexity, passkey, efficiency"""

    pod_model: str | None = None
    """folder of the adapted PoD export; default is where export_hf.py writes, <output_dir>/export"""

    text: list[str] | None = None
    """files or folders to measure perplexity on; default: the held-out part of data.sources"""

    text_length: int = 2048
    """length of each perplexity sequence (tokens)"""

    text_sequences: int = 8
    """number of perplexity sequences; the confidence intervals are over these"""

    min_context: int = 256
    """shortest context before the first scored token (tokens): position buckets start here and double up to text_length"""

    scored_tokens: int = 128
    """tokens scored at the end of every position bucket, at most; the rest of the bucket is context"""

    passkey_lengths: list[int] = field(default_factory=lambda: [1024, 2048])
    """lengths of the passkey prompts (tokens, a chat template included)"""

    passkey_depths: list[float] = field(default_factory=lambda: [0.0, 0.25, 0.5, 0.75, 1.0])
    """where the key stands in the prompt: 0 = start, 1 = end"""

    passkey_samples: int = 2
    """prompts per length and depth"""

    passkey_new_tokens: int = 12
    """tokens generated per passkey prompt"""

    passkey_chat_template: bool = False
    """put the passkey question into the tokenizer's chat template instead of asking it as plain text (the paper's format)"""

    batch_size: int = 4
    """sequences or prompts run together"""

    efficiency_lengths: list[int] = field(default_factory=lambda: [2048])
    """prompt lengths at which decode speed, time to first token and bytes are measured (tokens)"""

    efficiency_tokens: int = 16
    """tokens decoded per repeat"""

    efficiency_repeats: int = 5
    """timed repeats per method, interleaved between the methods"""

    bootstrap_samples: int = 2000
    """resamples behind every 95 % interval"""

    reuse: bool = True
    """keep finished results whose inputs did not change"""

    device: str = "auto"
    """torch device; auto = cuda when there is one, else cpu"""

    def __post_init__(self) -> None:
        check_names("method", self.methods, METHODS)
        check_names("task", self.tasks, TASKS)
        for name in _COUNTS:
            _check_positive(name, getattr(self, name))
        for name in ("passkey_lengths", "efficiency_lengths"):
            _check_lengths(name, getattr(self, name))
        if any(not 0 <= depth <= 1 for depth in self.passkey_depths) or not self.passkey_depths:
            raise ValueError(
                f"eval.passkey_depths must be numbers from 0 (start) to 1 (end), got {self.passkey_depths}"
            )
        if self.min_context < 2 or self.text_length <= self.min_context:
            raise ValueError(
                f"eval.min_context = {self.min_context} must be at least 2 and less than eval.text_length = {self.text_length}"
            )

    def longest(self) -> int:
        """The longest sequence that the chosen tasks feed to a model (tokens), generated tokens included."""
        lengths = [0]
        if "perplexity" in self.tasks:
            lengths.append(self.text_length)
        if "passkey" in self.tasks:
            lengths.append(max(self.passkey_lengths) + self.passkey_new_tokens)
        if "efficiency" in self.tasks:
            lengths.append(
                max(self.efficiency_lengths) + self.efficiency_tokens * (self.efficiency_repeats + 1)
            )
        return max(lengths)


def check_names(kind: str, names: list[str], known) -> None:
    """Raise ValueError naming the nearest known name; refuse an empty list and repetitions."""
    if not isinstance(names, list) or not names:
        raise ValueError(
            f"eval.{kind}s must be a list of at least one {kind}, got {names!r}; known: {', '.join(known)}"
        )
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(str(name).lower(), list(known), n=1, cutoff=0.4)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(f"unknown {kind} {name!r}; {hint}known: {', '.join(known)}")
    if len(set(names)) < len(names):
        raise ValueError(f"eval.{kind}s names one {kind} twice: {', '.join(names)}")


def _check_positive(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"eval.{name} must be a whole number of at least 1, got {value!r}")


def _check_lengths(name: str, value: object) -> None:
    if (
        not isinstance(value, list)
        or not value
        or any(not isinstance(item, int) or item < 2 for item in value)
    ):
        raise ValueError(f"eval.{name} must be a list of token counts of at least 2, got {value!r}")
