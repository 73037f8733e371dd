"""Writes the YAML files of InfiniteBench: a folder per length, eleven tasks and two groups in each. Run it after a change:

python -m pod.eval.tasks.infinitebench.make_yaml
"""

from pathlib import Path

from pod.eval.tasks.infinitebench.prompts import PAPER_TASKS, TASKS
from pod.eval.tasks.lengths import NAMES

FOLDER = Path(__file__).parent
LENGTHS = ("2k", "8k", "32k", "64k", "128k")


def files() -> dict[Path, str]:
    """Every file and what stands in it."""
    found = {}
    for name in LENGTHS:
        prefix = f"pod_infinitebench_{name}"
        for task in TASKS:
            found[FOLDER / name / f"{task}.yaml"] = _task(f"{prefix}_{task}", task, NAMES[name])
        found[FOLDER / name / "_group.yaml"] = _group(prefix, prefix, PAPER_TASKS)
        found[FOLDER / name / "_all.yaml"] = _group(f"{prefix}_all", prefix, list(TASKS))
    return found


def _task(name: str, task: str, length: int) -> str:
    rules = TASKS[task]
    built = rules.count is not None
    return f"""\
include: ../_defaults.yaml
task: {name}
process_results: !function pod.eval.tasks.infinitebench.utils.score_{task}
generation_kwargs:
  until: []
  max_gen_toks: {rules.new_tokens}
  do_sample: false
metric_list:
  - metric: {rules.metric}
    aggregation: mean
    higher_is_better: true
  - metric: score
    aggregation: mean
    higher_is_better: true
metadata:
  version: 1.0
  infinitebench:
    task: {task}
    length: {length}
    seed: 42
  pod:
    chat_template: false
    truncation: {"none" if built else "middle"}
    max_prompt_tokens: {"null" if built else length - rules.new_tokens}
    metric: {rules.metric}
    kind: {"binary" if rules.binary else "score"}
    source: https://github.com/OpenBMB/InfiniteBench
    license: MIT
"""


def _group(group: str, prefix: str, tasks: list[str]) -> str:
    members = "\n".join(f"  - {prefix}_{task}" for task in tasks)
    return f"""\
group: {group}
task:
{members}
aggregate_metric_list:
  - metric: score
    aggregation: mean
    weight_by_size: false
metadata:
  version: 1.0
"""


def main() -> None:
    """Write every file."""
    for path, text in files().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
