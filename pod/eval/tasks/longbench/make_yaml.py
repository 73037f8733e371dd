"""Writes this folder's YAML files from one table: `python -m pod.eval.tasks.longbench.make_yaml`.

A task's numbers are those of LongBench's config/dataset2maxlen.json, eval.py and pred.py (github.com/THUDM/LongBench, commit 2e00731).
"""

import json
from dataclasses import dataclass
from pathlib import Path

from pod.eval.tasks.longbench.prompts import PROMPTS

FOLDER = Path(__file__).parent
SOURCE = "github.com/THUDM/LongBench@2e00731"
LICENSE = "MIT (questions, prompts and scorer; the texts keep the terms of their own sources)"
LENGTH_GROUPS = ("score_0_4k", "score_4_8k", "score_8k")
HEADER = "# Written by make_yaml.py; change its table instead\n"


@dataclass(frozen=True)
class LongBenchTask:
    """One of the 21 tasks. scorer: function in utils; metric: its name; chat: put the prompt into a chat template (the official rule)."""

    new_tokens: int
    scorer: str
    metric: str
    chat: bool = True
    stop_at_line_end: bool = False
    in_e: bool = False


TASKS = {
    "narrativeqa": LongBenchTask(128, "qa_f1", "qa_f1"),
    "qasper": LongBenchTask(128, "qa_f1", "qa_f1", in_e=True),
    "multifieldqa_en": LongBenchTask(64, "qa_f1", "qa_f1", in_e=True),
    "multifieldqa_zh": LongBenchTask(64, "qa_f1_zh", "qa_f1_zh"),
    "hotpotqa": LongBenchTask(32, "qa_f1", "qa_f1", in_e=True),
    "2wikimqa": LongBenchTask(32, "qa_f1", "qa_f1", in_e=True),
    "musique": LongBenchTask(32, "qa_f1", "qa_f1"),
    "dureader": LongBenchTask(128, "rouge_l_zh", "rouge_l_zh"),
    "gov_report": LongBenchTask(512, "rouge_l", "rouge_l", in_e=True),
    "qmsum": LongBenchTask(512, "rouge_l", "rouge_l"),
    "multi_news": LongBenchTask(512, "rouge_l", "rouge_l", in_e=True),
    "vcsum": LongBenchTask(512, "rouge_l_zh", "rouge_l_zh"),
    "trec": LongBenchTask(64, "accuracy_first_line", "accuracy", chat=False, in_e=True),
    "triviaqa": LongBenchTask(32, "qa_f1_first_line", "qa_f1", chat=False, in_e=True),
    "samsum": LongBenchTask(
        128, "rouge_l_first_line", "rouge_l", chat=False, stop_at_line_end=True, in_e=True
    ),
    "lsht": LongBenchTask(64, "accuracy_first_line", "accuracy", chat=False),
    "passage_count": LongBenchTask(32, "accuracy_count", "accuracy", in_e=True),
    "passage_retrieval_en": LongBenchTask(32, "accuracy_retrieval", "accuracy", in_e=True),
    "passage_retrieval_zh": LongBenchTask(32, "accuracy_retrieval_zh", "accuracy"),
    "lcc": LongBenchTask(64, "edit_similarity", "edit_similarity", chat=False, in_e=True),
    "repobench-p": LongBenchTask(64, "edit_similarity", "edit_similarity", chat=False, in_e=True),
}

# Categories as in LongBench's Table 1; `_en` are the members in English or code, `_e` those of LongBench-E
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
    name
    for name in TASKS
    if name not in ("dureader", "samsum", "passage_count", "passage_retrieval_en", "passage_retrieval_zh")
    and name != "repobench-p"
]
SIMLAYERKV_16 = [name for name in ENGLISH if name != "2wikimqa"] + ["dureader"]


def files() -> dict[str, str]:
    """Every YAML file of this folder: text by file name."""
    written = {}
    for name, task in TASKS.items():
        written[f"{name}.yaml"] = _task(name, task)
        if task.in_e:
            written[f"{name}_e.yaml"] = _task_e(name, task)
    for name, (members, by_category, about) in _groups().items():
        written[f"_{name}.yaml"] = _group(name, members, by_category, about)
    return written


def _task(name: str, task: LongBenchTask) -> str:
    prompt = PROMPTS[name].replace("{context}", "{{context}}").replace("{input}", "{{input}}")
    lines = [
        f"task: {_task_name(name)}",
        "custom_dataset: !function pod.eval.tasks.longbench.utils.rows",
        "dataset_kwargs:",
        f"  file: {name}.jsonl",
        "output_type: generate_until",
        "test_split: test",
        f"doc_to_text: {json.dumps(prompt, ensure_ascii=False)}",
        "doc_to_target: answers",
        f"process_results: !function pod.eval.tasks.longbench.utils.{task.scorer}",
        "generation_kwargs:",
        f"  max_gen_toks: {task.new_tokens}",
        "  do_sample: false",
    ]
    if task.stop_at_line_end:
        lines += ["  min_new_tokens: 1  # the first token is no line end", '  until: ["\\n"]']
    else:
        lines.append("  until: []")
    return HEADER + "\n".join([*lines, *_metrics(task, ()), *_metadata(task)]) + "\n"


def _task_e(name: str, task: LongBenchTask) -> str:
    """LongBench-E differs by its rows and its length groups."""
    lines = [
        f"include: {name}.yaml",
        f"task: {_task_name(name)}_e",
        "dataset_kwargs:",
        f"  file: {name}_e.jsonl",
        f"process_results: !function pod.eval.tasks.longbench.utils.{task.scorer}_e",
    ]
    return HEADER + "\n".join([*lines, *_metrics(task, LENGTH_GROUPS), *_metadata(task)]) + "\n"


def _metrics(task: LongBenchTask, more: tuple[str, ...]) -> list[str]:
    lines = ["metric_list:"]
    if task.metric == "edit_similarity":
        more = ("edit_similarity_levenshtein", *more)
    for metric in (task.metric, "score", *more):
        lines += [f"  - metric: {metric}", "    aggregation: mean", "    higher_is_better: true"]
    return lines


def _metadata(task: LongBenchTask) -> list[str]:
    return [
        "metadata:",
        "  version: 1.0",
        "  pod:",
        f"    chat_template: {str(task.chat).lower()}",
        "    truncation: middle",
        "    max_prompt_tokens: null",
        f"    metric: {task.metric}",
        "    kind: score",
        f"    source: {SOURCE}",
        f"    license: {LICENSE}",
    ]


def _groups() -> dict[str, tuple[list[str], bool, str]]:
    """Groups by name: members (names of tasks or groups), whether the mean is over the members' means, and what the group is."""
    groups = {}
    for category, names in CATEGORIES.items():
        english = [name for name in names if name in ENGLISH]
        groups[f"longbench_{category}"] = _tasks(names), False, "a category of LongBench"
        if english != names:
            groups[f"longbench_{category}_en"] = _tasks(english), False, "the English tasks of a category"
        in_e = [f"{name}_e" for name in names if TASKS[name].in_e]
        groups[f"longbench_{category}_e"] = _tasks(in_e), False, "a category of LongBench-E"
    english_names = [f"{name}_en" if f"longbench_{name}_en" in groups else name for name in CATEGORIES]
    groups |= {
        "longbench": (_members(CATEGORIES), True, "all 21 tasks; mean of the six category means"),
        "longbench_e": (
            _members(f"{name}_e" for name in CATEGORIES),
            True,
            "the 13 tasks of LongBench-E; mean of the six category means",
        ),
        "longbench_14": (
            _members(name for name in english_names if name != "synthetic_en"),
            True,
            "the 14 tasks of PoD (Table 1); mean of the five category means",
        ),
        "longbench_15": (_tasks(RAZOR_15), False, "the 15 tasks of RazorAttention (Table 3)"),
        "longbench_16": (_tasks(ENGLISH), False, "the 16 tasks of D2O (Table 1): all in English or code"),
        "longbench_16_simlayerkv": (
            _tasks(SIMLAYERKV_16),
            False,
            "the 16 tasks of SimLayerKV (Table 1): DuReader instead of 2WikiMultihopQA",
        ),
    }
    return groups


def _group(name: str, members: list[str], by_category: bool, about: str) -> str:
    lines = [f"group: pod_{name}", "task:", *(f"  - {member}" for member in members)]
    lines += [
        "aggregate_metric_list:",
        "  - metric: score",
        "    aggregation: mean",
        "    weight_by_size: false",
    ]
    lines += ["metadata:", "  version: 1.0"]
    if by_category:
        lines += ["  pod:", "    average: members  # a category counts once, whatever its number of tasks"]
    return HEADER + f"# {about}\n" + "\n".join(lines) + "\n"


def _task_name(name: str) -> str:
    return f"pod_longbench_{name}"


def _tasks(names: list[str]) -> list[str]:
    return [_task_name(name) for name in names]


def _members(names) -> list[str]:
    return [f"pod_longbench_{name}" for name in names]


def main() -> None:
    for old in FOLDER.glob("*.yaml"):
        old.unlink()
    for name, text in files().items():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
