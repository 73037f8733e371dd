"""The tasks of InfiniteBench, their prompts word for word, and how a row becomes a prompt.

Source: github.com/OpenBMB/InfiniteBench (MIT), commit 88b3daa, src/{prompt,eval_utils}.py. The prompts are
`yarn_mistral_templates`, which every open model in the official table was given. They were given without a
chat template and cut in the middle.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pod.files import read_json

TEMPLATES: dict[str, str] = read_json(Path(__file__).with_name("prompts.json"))
HUB_ID = "xinrongzhang2022/InfiniteBench"


@dataclass(frozen=True)
class BenchTask:
    """A task of the suite.

    Attributes:
        new_tokens: tokens that are generated, the official number.
        metric: the score's name.
        binary: whether every score is 0 or 1.
        count: number of rows, for a task that is built at a length; None for one that is read from
            `<name>.jsonl`.
    """

    new_tokens: int
    metric: str = "accuracy"
    binary: bool = True
    count: int | None = None


TASKS = {
    "passkey": BenchTask(6, count=590),
    "number_string": BenchTask(12, count=590),
    "kv_retrieval": BenchTask(50, count=500),
    "longbook_sum_eng": BenchTask(1200, "rougeLsum", binary=False),
    "longbook_choice_eng": BenchTask(40),
    "longbook_qa_eng": BenchTask(40, "qa_f1", binary=False),
    "longbook_qa_chn": BenchTask(40, "qa_f1_zh", binary=False),
    "math_find": BenchTask(3, count=350),
    "code_run": BenchTask(5, count=400),
    "code_debug": BenchTask(5),
    "longdialogue_qa_eng": BenchTask(40),
}
"""All tasks but Math.Calc.

An answer to Math.Calc is as long as its prompt (30,000 new tokens), and no model of the official table solves
it.
"""

PAPER_TASKS = ["longbook_sum_eng", "longbook_qa_eng", "longbook_choice_eng", "passkey", "number_string"]
"""The five of PoD's Table 4."""


def prompt(task: str, row: dict[str, Any]) -> str:
    """The prompt of a row in the official format {context or content, input, answer, options}.

    Raises:
        ValueError: for a row in another format.
    """
    try:
        return TEMPLATES[task].format(**_fields(task, row))
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(_wrong_row(task, row, f"lacks {error}")) from None


def asked(task: str, row: dict[str, Any]) -> str:
    """The part of a row's prompt behind its text, with the question."""
    return TEMPLATES[task].partition("{context}")[2].format(**_fields(task, row))


def answer(task: str, row: dict[str, Any]) -> Any:
    """What a prediction is compared with: for a choice [text, letter], else the row's answer as it is.

    Raises:
        ValueError: for a row without an answer, or with an answer that is none of its options.
    """
    given = row.get("answer")
    if given is None:
        raise ValueError(_wrong_row(task, row, "lacks 'answer'"))
    if task not in ("longbook_choice_eng", "code_debug"):
        return given
    texts = [given] if isinstance(given, str) else list(given)
    if len(texts) == 2 and texts[1] in ("A", "B", "C", "D"):
        return texts
    if len(texts) != 1 or texts[0] not in (row.get("options") or [])[:4]:
        raise ValueError(_wrong_row(task, row, f"has the answer {given!r}, which is none of its options"))
    return [texts[0], "ABCD"[row["options"].index(texts[0])]]


def _fields(task: str, row: dict[str, Any]) -> dict[str, Any]:
    context = row["content"] if row.get("content") is not None else row["context"]
    fields = {"context": context, "question": row.get("input"), "input": row.get("input")}
    if row.get("options"):
        fields |= {f"OPTION_{letter}": row["options"][place] for place, letter in enumerate("ABCD")}
    if task == "code_run":
        call = re.findall(r"func_[0-9]+\(\-?[0-9]+\)", row["input"])[0]
        fields |= {"func": call.partition("(")[0], "func_call": call}
    if task == "math_find":
        target = re.findall(r"The .+ of", row["input"])[0].lower()[:-3]
        fields["prefix"] = f"What is {target} in the following list?"
    return fields


def _wrong_row(task: str, row: dict[str, Any], what: str) -> str:
    reason = "it is not in the official format"
    return f"data of infinitebench: {task}.jsonl, row {row.get('id', '?')} {what}: {reason}"
