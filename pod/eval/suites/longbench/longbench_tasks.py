"""LongBench's and LongBench-E's tasks: the table, the rows of a task and the functions that score one answer.

A task's numbers are those of LongBench's config/dataset2maxlen.json, eval.py and pred.py
(github.com/THUDM/LongBench, commit 2e00731). Its prompts are config/dataset2prompt.json itself (copyright
2023 THU-KEG & Zhipu AI, MIT), where {context} and {input} are a row's fields.
"""

import bisect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pod.eval.suites import task_data, words
from pod.eval.suites.configs import Config, DocRow, Scorer, group_config, scorer, task_config
from pod.eval.suites.longbench import longbench_metrics
from pod.files import read_json

HUB = "THUDM/LongBench"
PROMPTS: dict[str, str] = read_json(Path(__file__).with_name("dataset2prompt.json"))
TERMS = {
    "source": "github.com/THUDM/LongBench@2e00731",
    "license": "MIT (questions, prompts and scorer; the texts keep the terms of their own sources)",
}
LENGTH_GROUPS = ("score_0_4k", "score_4_8k", "score_8k")
FIELDS = ("input", "context", "answers", "length", "all_classes", "_id")


def rows(file: str, **metadata: Any) -> dict[str, Any]:
    """The samples of one task for lm-eval's `custom_dataset`.

    Args:
        file: `qasper.jsonl`, `qasper_e.jsonl` … of the official data.zip.

    Raises:
        ValueError: in one line, when the file is missing or is not in the official format.
    """
    found = task_data.load_rows("longbench", file, HUB, f"data.zip/data/{file}", FIELDS)
    for number, row in enumerate(found, start=1):
        if not row["answers"]:
            raise ValueError(f"longbench/{file}, row {number}: no answer to score against")
    task = file.removesuffix(".jsonl").removesuffix("_e")
    return task_data.dataset(
        [
            row | {"cluster": task_data.text_id(row["context"]), "asked": asked(task, row["input"])}
            for row in found
        ]
    )


def asked(task: str, question: str) -> str:
    """The part of a prompt behind its text, with the question."""
    return PROMPTS[task].partition("{context}")[2].replace("{input}", question)


def _scorer(name: str, metric: Callable[..., float], first_line: bool = False, *fields: str) -> Scorer:
    """A scorer that takes the best of `metric` over a row's answers.

    Args:
        name: of the metric.
        first_line: score only the first line of an answer (`longbench_metrics.first_line`).
        fields: fields of a row that are further arguments of the metric.
    """

    def value(answer: str, row: DocRow) -> float:
        answer = longbench_metrics.first_line(answer) if first_line else answer
        given = [row[field] for field in fields]
        return words.best(lambda *pair: metric(*pair, *given), answer, row["answers"])

    return scorer(name, value)


def by_length(scorer: Scorer) -> Scorer:
    """The same scorer for LongBench-E: it also gives the score under the name of the sample's length group.

    The group is that of the official length (words; characters in Chinese).
    """

    def score(doc: DocRow, results: list[str]) -> dict[str, float]:
        scores = scorer(doc, results)
        group = LENGTH_GROUPS[bisect.bisect_right((4000, 8000), doc["length"])]
        return {**scores, group: scores["score"]}

    return score


qa_f1 = _scorer("qa_f1", words.qa_f1)
qa_f1_zh = _scorer("qa_f1_zh", longbench_metrics.qa_f1_zh)
qa_f1_first_line = _scorer("qa_f1", words.qa_f1, True)
rouge_l = _scorer("rouge_l", longbench_metrics.rouge_l)
rouge_l_zh = _scorer("rouge_l_zh", longbench_metrics.rouge_l_zh)
rouge_l_first_line = _scorer("rouge_l", longbench_metrics.rouge_l, True)
accuracy_first_line = _scorer("accuracy", longbench_metrics.classification, True, "all_classes")
accuracy_count = _scorer("accuracy", longbench_metrics.count)
accuracy_retrieval = _scorer("accuracy", longbench_metrics.retrieval)
accuracy_retrieval_zh = _scorer("accuracy", longbench_metrics.retrieval)


def edit_similarity(doc: DocRow, results: list[str]) -> dict[str, float]:
    """Edit similarity without and with python-Levenshtein. The score is the one without, the official one."""
    said = results[0]
    answers = doc["answers"]
    value = words.best(longbench_metrics.code_similarity, said, answers)
    other = words.best(longbench_metrics.code_similarity_levenshtein, said, answers)
    return {"edit_similarity": value, "score": value, "edit_similarity_levenshtein": other}


@dataclass(frozen=True)
class LongBenchTask:
    """One of the 21 tasks.

    Attributes:
        new_tokens: tokens of an answer, at most.
        metric: the scorer's primary metric.
        chat: whether the prompt is put into a chat template, by the official rule.
        stop_at_line_end: whether an answer ends at the first line end.
        in_e: whether LongBench-E has the task, too.
    """

    new_tokens: int
    scorer: Scorer
    metric: str
    chat: bool = True
    stop_at_line_end: bool = False
    in_e: bool = False


TASKS = {
    "narrativeqa": LongBenchTask(128, qa_f1, "qa_f1"),
    "qasper": LongBenchTask(128, qa_f1, "qa_f1", in_e=True),
    "multifieldqa_en": LongBenchTask(64, qa_f1, "qa_f1", in_e=True),
    "multifieldqa_zh": LongBenchTask(64, qa_f1_zh, "qa_f1_zh"),
    "hotpotqa": LongBenchTask(32, qa_f1, "qa_f1", in_e=True),
    "2wikimqa": LongBenchTask(32, qa_f1, "qa_f1", in_e=True),
    "musique": LongBenchTask(32, qa_f1, "qa_f1"),
    "dureader": LongBenchTask(128, rouge_l_zh, "rouge_l_zh"),
    "gov_report": LongBenchTask(512, rouge_l, "rouge_l", in_e=True),
    "qmsum": LongBenchTask(512, rouge_l, "rouge_l"),
    "multi_news": LongBenchTask(512, rouge_l, "rouge_l", in_e=True),
    "vcsum": LongBenchTask(512, rouge_l_zh, "rouge_l_zh"),
    "trec": LongBenchTask(64, accuracy_first_line, "accuracy", chat=False, in_e=True),
    "triviaqa": LongBenchTask(32, qa_f1_first_line, "qa_f1", chat=False, in_e=True),
    "samsum": LongBenchTask(128, rouge_l_first_line, "rouge_l", chat=False, stop_at_line_end=True, in_e=True),
    "lsht": LongBenchTask(64, accuracy_first_line, "accuracy", chat=False),
    "passage_count": LongBenchTask(32, accuracy_count, "accuracy", in_e=True),
    "passage_retrieval_en": LongBenchTask(32, accuracy_retrieval, "accuracy", in_e=True),
    "passage_retrieval_zh": LongBenchTask(32, accuracy_retrieval_zh, "accuracy"),
    "lcc": LongBenchTask(64, edit_similarity, "edit_similarity", chat=False, in_e=True),
    "repobench-p": LongBenchTask(64, edit_similarity, "edit_similarity", chat=False, in_e=True),
}

# Categories as in LongBench's Table 1. `_en`: the members in English or code. `_e`: the members of
# LongBench-E.
CATEGORIES = {
    "single_doc_qa": ["narrativeqa", "qasper", "multifieldqa_en", "multifieldqa_zh"],
    "multi_doc_qa": ["hotpotqa", "2wikimqa", "musique", "dureader"],
    "summarization": ["gov_report", "qmsum", "multi_news", "vcsum"],
    "few_shot": ["trec", "triviaqa", "samsum", "lsht"],
    "synthetic": ["passage_count", "passage_retrieval_en", "passage_retrieval_zh"],
    "code": ["lcc", "repobench-p"],
}
CHINESE = ["multifieldqa_zh", "dureader", "vcsum", "lsht", "passage_retrieval_zh"]
ENGLISH = [name for name in TASKS if name not in CHINESE]
RAZOR_15 = [
    name for name in TASKS if name not in ("dureader", "samsum", "repobench-p", *CATEGORIES["synthetic"])
]
SIMLAYERKV_16 = [name for name in ENGLISH if name != "2wikimqa"] + ["dureader"]


def configs() -> list[Config]:
    """The tasks, the tasks of LongBench-E, and all groups."""
    tasks = [_task(name, task) for name, task in TASKS.items()]
    tasks += [_task(f"{name}_e", task, in_e=True) for name, task in TASKS.items() if task.in_e]
    return [*tasks, *_categories(), *_groups()]


def _task(name: str, task: LongBenchTask, in_e: bool = False) -> Config:
    """The configuration of a task. In LongBench-E it has other rows, and metrics by length group."""
    prompt = PROMPTS[name.removesuffix("_e") if in_e else name]
    both = ("edit_similarity_levenshtein",) if task.metric == "edit_similarity" else ()
    return task_config(
        f"pod_longbench_{name}",
        rows,
        by_length(task.scorer) if in_e else task.scorer,
        prompt=prompt.replace("{context}", "{{context}}").replace("{input}", "{{input}}"),
        target="answers",
        new_tokens=task.new_tokens,
        # an answer of one line may not begin with a line end
        generation={"min_new_tokens": 1, "until": ["\n"]} if task.stop_at_line_end else None,
        metrics=(task.metric, "score", *both, *(LENGTH_GROUPS if in_e else ())),
        rules={"chat_template": task.chat, "truncation": "middle", "kind": "score", **TERMS},
        dataset_kwargs={"file": f"{name}.jsonl"},
    )


def _categories() -> list[Config]:
    """The groups of each category of LongBench.

    They are the category (no ending), its English tasks if it also has Chinese ones (`_en`), and its tasks of
    LongBench-E (`_e`).
    """
    found = dict(CATEGORIES)
    for category, names in CATEGORIES.items():
        found[f"{category}_e"] = [f"{name}_e" for name in names if TASKS[name].in_e]
        if set(names) & set(CHINESE):
            found[f"{category}_en"] = [name for name in names if name in ENGLISH]
    return [group_config("pod_longbench", f"_{name}", part) for name, part in found.items()]


def _groups() -> list[Config]:
    """The groups of several categories.

    In LongBench, LongBench-E and the 14 tasks of PoD (Table 1) each category counts alike, whatever its
    number of tasks. In the other groups each task counts alike: the 15 of RazorAttention (Table 3), the 16 of
    D2O (Table 1) and of SimLayerKV (Table 1).
    """
    has_others = [name for name, names in CATEGORIES.items() if set(names) & set(CHINESE)]
    english = [f"{name}_en" if name in has_others else name for name in CATEGORIES if name != "synthetic"]
    groups = {
        "": (list(CATEGORIES), "members"),
        "_e": ([f"{name}_e" for name in CATEGORIES], "members"),
        "_14": (english, "members"),
        "_15": (RAZOR_15, None),
        "_16": (ENGLISH, None),
        "_16_simlayerkv": (SIMLAYERKV_16, None),
    }
    return [group_config("pod_longbench", end, *group) for end, group in groups.items()]
