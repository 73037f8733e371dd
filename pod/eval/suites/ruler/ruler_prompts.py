"""The thirteen tasks of RULER and their prompts, word for word.

Source: github.com/NVIDIA/RULER (Apache-2.0), commit c3f5e3b, scripts/synthetic.yaml and
scripts/data/synthetic/constants.py. The answer prefix stands behind the prompt, or begins the assistant's
turn of a chat.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pod.files import read_json

NEEDLE = "One of the special magic {kind} for {key} is: {value}."
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


@dataclass(frozen=True)
class RulerPrompt:
    """The prompt of a task.

    Attributes:
        text: the template of the prompt, with {context} and other fields.
        prefix: the template of the beginning of the answer.
        new_tokens: number of tokens that are generated.
    """

    text: str
    prefix: str
    new_tokens: int


@dataclass(frozen=True)
class RulerTask:
    """One of the thirteen tasks.

    Attributes:
        prompt: key of PROMPTS, and of the generators in `generators.make_generator`.
        options: options of its generator.
        metric: string_match_all (share of the answers that are found) or string_match_part (1 if any is).
        binary: whether a sample's score is 0 or 1.
    """

    prompt: str
    options: dict[str, Any] = field(default_factory=dict)
    metric: str = "string_match_all"
    binary: bool = False


PROMPTS = {
    name: RulerPrompt(**row) for name, row in read_json(Path(__file__).with_name("prompts.json")).items()
}


def _niah(haystack: str, keys: str = "words", values: str = "numbers", **counts: int) -> RulerTask:
    options = {"haystack": haystack, "key_kind": keys, "value_kind": values, **counts}
    return RulerTask("niah", options, binary=not {"num_values", "num_queries"} & counts.keys())


TASKS = {
    "niah_single_1": _niah("noise"),
    "niah_single_2": _niah("essay"),
    "niah_single_3": _niah("essay", values="uuids"),
    "niah_multikey_1": _niah("essay", num_keys=4),
    "niah_multikey_2": _niah("needle"),
    "niah_multikey_3": _niah("needle", keys="uuids", values="uuids"),
    "niah_multivalue": _niah("essay", num_values=4),
    "niah_multiquery": _niah("essay", num_keys=4, num_queries=4),
    "vt": RulerTask("vt", {"num_hops": 4}),
    "cwe": RulerTask("cwe"),
    "fwe": RulerTask("fwe"),
    "qa_1": RulerTask("qa", {"source": "squad"}, "string_match_part", binary=True),
    "qa_2": RulerTask("qa", {"source": "hotpotqa"}, "string_match_part", binary=True),
}
_KINDS = ("niah_single", "niah_multikey", "niah_multivalue", "niah_multiquery", "cwe", "fwe", "qa", "vt")
TYPES = {kind: [task for task in TASKS if task.startswith(kind)] for kind in _KINDS}
"""Tasks by kind: the eight columns of SimLayerKV's Table 3, whose average is the mean of the columns."""
