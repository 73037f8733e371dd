"""The tasks of InfiniteBench, their prompts word for word, and how a row becomes one.

Source: github.com/OpenBMB/InfiniteBench (MIT), commit 88b3daa, src/{prompt,eval_utils}.py. The prompts are `yarn_mistral_templates`, those
of every open model in the official table; they were given without a chat template and cut in the middle.
"""

import re
from dataclasses import dataclass
from typing import Any

HUB_ID = "xinrongzhang2022/InfiniteBench"


@dataclass(frozen=True)
class BenchTask:
    """template: the prompt; new_tokens: generated, official; metric: the score's name; binary: 0 or 1; count: rows of a task that is
    built at a length, None for one that is read from `<name>.jsonl`."""

    template: str
    new_tokens: int
    metric: str = "accuracy"
    binary: bool = True
    count: int | None = None


_OPTIONS = "A. {OPTION_A}\nB. {OPTION_B}\nC. {OPTION_C}\nD. {OPTION_D}"
_HIDDEN = "There is an important info hidden inside a lot of irrelevant text."
_QUIZ = "I will quiz you about the important information"

TASKS = {
    "passkey": BenchTask(
        f"{_HIDDEN} Find it and memorize it. {_QUIZ}.\n\n{{context}}\n\n{{input}}\n\nThe pass key is",
        6,
        count=590,
    ),
    "number_string": BenchTask(
        f"{_HIDDEN} Find it. {_QUIZ} there.\n\n{{context}}\n\n{{input}}\n\nThe sequence of digits is",
        12,
        count=590,
    ),
    "kv_retrieval": BenchTask(
        "Extract the value corresponding to the specified key in the JSON object below.\n\n{context}\n\n{input}",
        50,
        count=500,
    ),
    "longbook_sum_eng": BenchTask(
        "Summarize the book below.\n\n{context}\n\nSummary:", 1200, "rougeLsum", binary=False
    ),
    "longbook_choice_eng": BenchTask(
        f"Read the book and answer the question.\n\n{{context}}\n\nQuestion: {{question}}\n{_OPTIONS}\n\n"
        "The letter of the correct answer is",
        40,
    ),
    "longbook_qa_eng": BenchTask(
        "Read the book and answer the question. Be very concise in your answer.\n\n{context}\n\nQuestion: {question}\nAnswer:",
        40,
        "qa_f1",
        binary=False,
    ),
    "longbook_qa_chn": BenchTask(
        "阅读以下书籍然后回答问题。\n\n{context}\n\n问题：{question}\n答案：", 40, "qa_f1_zh", binary=False
    ),
    "math_find": BenchTask("{prefix}\n\n{context}\n\n{input}", 3, count=350),
    "code_run": BenchTask(
        "There is a function called {func} in the following Python code.\n\n{context}\n\nPlease compute the exact value of "
        "{func_call}. The value of {func_call} is",
        5,
        count=400,
    ),
    "code_debug": BenchTask(
        "Following is a Python code where exactly one of the functions/methods has a deliberate error that makes it crash.\n\n"
        f"{{context}}\n\nOptions:\n{_OPTIONS}\n\nThe correct option is:",
        5,
    ),
    "longdialogue_qa_eng": BenchTask(
        'Below is a dialogue script where one random occurrence of a character name is replaced with "$$MASK$$", and you should try '
        "to guess who that character is.\n\n{context}\n\nThe name that has been replaced with $$MASK$$ is likely",
        40,
    ),
}
"""All but Math.Calc, whose answer is as long as its prompt (30,000 new tokens) and which no model of the official table solves."""

PAPER_TASKS = ["longbook_sum_eng", "longbook_qa_eng", "longbook_choice_eng", "passkey", "number_string"]
"""The five of PoD's Table 4."""


def prompt(task: str, row: dict[str, Any]) -> str:
    """The prompt of a row in the official format {context or content, input, answer, options}. Raises: ValueError for another format."""
    try:
        return TASKS[task].template.format(**_fields(task, row))
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(_wrong_row(task, row, f"lacks {error}")) from None


def asked(task: str, row: dict[str, Any]) -> str:
    """What stands behind the text in the prompt of a row."""
    return TASKS[task].template.partition("{context}")[2].format(**_fields(task, row))


def answer(task: str, row: dict[str, Any]) -> Any:
    """What a prediction is compared with: for a choice [text, letter], else the row's answer as it is."""
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
    return f"data of infinitebench: {task}.jsonl, row {row.get('id', '?')} {what}: it is not in the official format"
