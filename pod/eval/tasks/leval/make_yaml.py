"""Writes this folder's YAML files from one table: `python -m pod.eval.tasks.leval.make_yaml`.

Names, metrics and the 512 new tokens are those of Baselines/LEval_config.py (github.com/OpenLMLab/LEval, commit cd34b05).
"""

from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
NEW_TOKENS = 512
SOURCE = "github.com/OpenLMLab/LEval@cd34b05"
LICENSE = "GPL-3.0 (data set; the texts keep the terms of their own sources)"
HEADER = "# Written by make_yaml.py; change its table instead\n"


@dataclass(frozen=True)
class LEvalTask:
    """One of the 20 tasks. folder, scorer: of data and in utils; metrics: the first is the primary one; chat: the official rule;
    keep: the end of the document that stays when it is too long."""

    folder: str
    scorer: str
    metrics: tuple[str, ...]
    kind: str = "score"
    chat: bool = True
    keep: str = "start"


def _closed(scorer: str, kind: str = "binary", more: tuple[str, ...] = (), **rules) -> LEvalTask:
    return LEvalTask("Exam", scorer, ("exact_match", *more), kind, **rules)


_F1 = LEvalTask("Generation", "f1", ("qa_f1",))
_ROUGE = LEvalTask("Generation", "rouge", ("rougeL", "rouge1", "rouge2"))
CLOSED = {
    "coursera": _closed("several_letters", "score"),
    "quality": _closed("one_letter", "score"),
    "tpo": _closed("one_letter", "score"),
    "topic_retrieval_longchat": _closed("text"),
    "gsm100": _closed("number", chat=False),
    "codeU": _closed("code", chat=False, keep="end"),
    "sci_fi": _closed("judgement", more=("loyalty", "fact")),
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


def task_yaml(name: str) -> str:
    """The YAML text of a task."""
    task = TASKS[name]
    metrics = "".join(
        f"  - metric: {metric}\n    aggregation: mean\n    higher_is_better: true\n"
        for metric in (*task.metrics, "score")
    )
    return f"""{HEADER}task: pod_leval_{name}
custom_dataset: !function pod.eval.tasks.leval.utils.rows
dataset_kwargs:
  file: {task.folder}/{name}.jsonl
output_type: generate_until
test_split: test
description: system
doc_to_text: prompt
gen_prefix: prefix
doc_to_target: target
process_results: !function pod.eval.tasks.leval.utils.{task.scorer}
generation_kwargs:
  max_gen_toks: {NEW_TOKENS}
  do_sample: false
  until: []
metric_list:
{metrics}metadata:
  version: 1.0
  pod:
    chat_template: {str(task.chat).lower()}
    truncation: document
    keep: {task.keep}
    max_prompt_tokens: null
    metric: {task.metrics[0]}
    kind: {task.kind}
    source: {SOURCE}
    license: {LICENSE}
"""


def group_yaml(name: str) -> str:
    """The YAML text of a group; each task counts alike, as in the official averages."""
    members = "".join(f"  - pod_leval_{task}\n" for task in GROUPS[name])
    return f"""{HEADER}group: {name}
task:
{members}aggregate_metric_list:
  - metric: score
    aggregation: mean
    weight_by_size: false
metadata:
  version: 1.0
"""


def files() -> dict[str, str]:
    """Every YAML file of the folder by name."""
    tasks = {f"{name}.yaml": task_yaml(name) for name in TASKS}
    return tasks | {f"_{name.removeprefix('pod_')}.yaml": group_yaml(name) for name in GROUPS}


if __name__ == "__main__":
    for name, text in files().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
