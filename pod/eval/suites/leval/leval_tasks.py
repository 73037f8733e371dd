"""L-Eval's tasks: the table, the rows, and the functions that score one answer.

A task has one row per document and question.

Names, metrics and the 512 new tokens are those of Baselines/LEval_config.py (github.com/OpenLMLab/LEval,
commit cd34b05).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pod.eval.suites import task_data
from pod.eval.suites.configs import Config, DocRow, Scorer, group_config, scorer, task_config
from pod.eval.suites.leval import leval_metrics, leval_prompts
from pod.eval.suites.words import qa_f1

HUB = "L4NLP/LEval"
NEW_TOKENS = 512
TERMS = {
    "source": "github.com/OpenLMLab/LEval@cd34b05",
    "license": "GPL-3.0 (data set; the texts keep the terms of their own sources)",
}
FIELDS = ("input", "instructions", "outputs", "evaluation")
BY_METRIC = ("exam", "f1", "rouge")  # the other rows are for human or model judges
EXAMPLES = ("gsm100",)  # the document is the same worked examples in every row, not a text with questions


def rows(file: str, **metadata: Any) -> dict[str, Any]:
    """The samples of one task for lm-eval's `custom_dataset`.

    A document with k questions is k samples. Rows for human or model judges are left out, as the official
    scorer does it. A question of `sci_fi` is two samples: whether it is so in the document (`loyalty`), and,
    without the document, whether it is so in the real world (`fact`).

    Args:
        file: `Exam/coursera.jsonl` or `Generation/news_summ.jsonl` …

    Raises:
        ValueError: in one line, when the file is missing or is not in the official format.
    """
    task = file.rpartition("/")[2].removesuffix(".jsonl")
    found = []
    for number, row in enumerate(task_data.load_rows("leval", file, HUB, f"LEval/{file}", FIELDS), start=1):
        counts = len(row["instructions"]), len(row["outputs"])
        if counts[0] != counts[1]:
            raise ValueError(
                f"leval/{file}, row {number}: {counts[0]} instructions and {counts[1]} outputs; "
                "each question needs one reference"
            )
        if row["evaluation"] not in BY_METRIC:
            continue
        for instruction, target in zip(row["instructions"], row["outputs"], strict=True):
            found += _samples(task, row["input"], instruction, target)
    return task_data.dataset(found)


def _samples(task: str, document: str, instruction: str, target: str) -> list[dict[str, Any]]:
    prompt = leval_prompts.user_prompt(task, document, instruction, len(target.split()))
    sample = {
        "document": document,
        "asked": prompt.rpartition(document)[2] if document else "",
        "cluster": None if task in EXAMPLES else task_data.text_id(document),
        "system": leval_prompts.system_prompt(task),
        "prompt": prompt,
        "prefix": leval_prompts.answer_prefix(task),
        "target": target,
        "part": "",
    }
    if task != "sci_fi":
        return [sample]
    world = {
        "document": "",
        "asked": "",
        "system": "",
        "prompt": leval_prompts.fact_prompt(instruction),
        "part": "fact",
    }
    return [
        sample | {"target": leval_metrics.judgement_target(target, "loyalty"), "part": "loyalty"},
        sample | {"target": leval_metrics.judgement_target(target, "fact"), **world},
    ]


def _closed(answer_of: Callable[[str, str], str], target_of: Callable[[str], str]) -> Scorer:
    """A scorer that compares what an answer says with what the reference says, by `exact_match`.

    Args:
        answer_of: what an answer says, from the answer and the reference.
        target_of: what the reference says.
    """

    def value(answer: str, row: DocRow) -> float:
        return leval_metrics.exact_match(answer_of(answer, row["target"]), target_of(row["target"]))

    return scorer("exact_match", value)


one_letter = _closed(lambda answer, _: leval_metrics.one_letter(answer), leval_metrics.target_letters)
several_letters = _closed(
    lambda answer, _: leval_metrics.several_letters(answer), leval_metrics.target_letters
)
number = _closed(lambda answer, _: leval_metrics.number(answer), leval_metrics.number)
code = _closed(leval_metrics.code_output, leval_metrics.code_text)
text = _closed(lambda answer, _: answer, str)
f1 = scorer("qa_f1", lambda answer, row: qa_f1(answer, row["target"]))


def judgement(doc: DocRow, results: list[str]) -> dict[str, float]:
    """The score of a true-or-false answer (sci_fi), also under the name of its part (`loyalty` or `fact`).

    The task's score is the mean over samples of both parts, as officially.
    """
    value = leval_metrics.exact_match(leval_metrics.judgement(results[0]), doc["target"])
    return {"exact_match": value, "score": value, doc["part"]: value}


def rouge(doc: DocRow, results: list[str]) -> dict[str, float]:
    """rouge1, rouge2 and rougeL of an open-ended summary; the score is rougeL."""
    values = leval_metrics.rouge(results[0], doc["target"])
    return {**values, "score": values["rougeL"]}


@dataclass(frozen=True)
class LEvalTask:
    """One of the 20 tasks.

    Attributes:
        folder: folder of its data.
        metrics: its metrics; the first is the primary one.
        kind: of its payload: `binary` or `score`.
        chat: whether the prompt is put into a chat template, by the official rule.
        keep: which end of a document that is too long stays: `start` or `end`.
    """

    folder: str
    scorer: Scorer
    metrics: tuple[str, ...]
    kind: str = "score"
    chat: bool = True
    keep: str = "start"


def _exam(scorer: Scorer, kind: str = "binary", more: tuple[str, ...] = (), **rules) -> LEvalTask:
    return LEvalTask("Exam", scorer, ("exact_match", *more), kind, **rules)


_F1 = LEvalTask("Generation", f1, ("qa_f1",))
_ROUGE = LEvalTask("Generation", rouge, ("rougeL", "rouge1", "rouge2"))
CLOSED = {
    "coursera": _exam(several_letters, "score"),
    "quality": _exam(one_letter, "score"),
    "tpo": _exam(one_letter, "score"),
    "topic_retrieval_longchat": _exam(text),
    "gsm100": _exam(number, chat=False),
    "codeU": _exam(code, chat=False, keep="end"),
    "sci_fi": _exam(judgement, more=("loyalty", "fact")),
}
QUESTIONS = (
    *("financial_qa", "legal_contract_qa", "multidoc_qa"),
    *("narrative_qa", "natural_question", "scientific_qa"),
)
SUMMARIES = (
    *("gov_report_summ", "meeting_summ", "news_summ", "paper_assistant"),
    *("patent_summ", "review_summ", "tv_show_summ"),
)
TASKS = CLOSED | dict.fromkeys(QUESTIONS, _F1) | dict.fromkeys(SUMMARIES, _ROUGE)
GROUPS = {
    "pod_leval_closed": tuple(CLOSED),
    "pod_leval_f1": QUESTIONS,
    "pod_leval_rouge": SUMMARIES,
    "pod_leval_open": (*QUESTIONS, *SUMMARIES),
    "pod_leval": tuple(TASKS),
}


def configs() -> list[Config]:
    """Tasks and groups. In a group each task counts alike, as in the official averages."""
    prefix = "pod_leval"
    groups = [group_config(prefix, name.removeprefix(prefix), members) for name, members in GROUPS.items()]
    return [*(_task(name, task) for name, task in TASKS.items()), *groups]


def _task(name: str, task: LEvalTask) -> Config:
    return task_config(
        f"pod_leval_{name}",
        rows,
        task.scorer,
        prompt="prompt",
        target="target",
        new_tokens=NEW_TOKENS,
        metrics=(*task.metrics, "score"),
        rules={
            "chat_template": task.chat,
            "truncation": "document",
            "keep": task.keep,
            "kind": task.kind,
            **TERMS,
        },
        dataset_kwargs={"file": f"{task.folder}/{name}.jsonl"},
        description="system",
        gen_prefix="prefix",
    )
