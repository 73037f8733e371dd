"""Writes the YAML files of RULER: a folder per length, thirteen tasks and two groups in each. Run it after a change:

python -m pod.eval.tasks.ruler.make_yaml
"""

from pathlib import Path

from pod.eval.tasks.lengths import NAMES
from pod.eval.tasks.ruler.prompts import PROMPTS, TASKS, TYPES

FOLDER = Path(__file__).parent
ANY = "any"  # the folder of the tasks whose length is chosen by --metadata
_ANY_LENGTH = 4096
_GROUP_METRIC = """\
aggregate_metric_list:
  - metric: score
    aggregation: mean
    weight_by_size: false
"""


def files() -> dict[Path, str]:
    """Every file and what stands in it."""
    found = {}
    for name, length in [(ANY, _ANY_LENGTH), *NAMES.items()]:
        prefix = "pod_ruler" if name == ANY else f"pod_ruler_{name}"
        for task in TASKS:
            found[FOLDER / name / f"{task}.yaml"] = _task(f"{prefix}_{task}", task, length)
        found[FOLDER / name / "_group.yaml"] = _group(prefix)
        if name != ANY:
            found[FOLDER / name / "_by_type.yaml"] = _by_type(prefix)
    return found


def _task(name: str, task: str, length: int) -> str:
    rules = TASKS[task]
    function = "score_part" if rules.metric == "string_match_part" else "score_all"
    return f"""\
include: ../_defaults.yaml
task: {name}
process_results: !function pod.eval.tasks.ruler.utils.{function}
generation_kwargs:
  until: []
  max_gen_toks: {PROMPTS[rules.prompt].new_tokens}
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
  ruler:
    task: {task}
    length: {length}
    samples: 500
    seed: 42
  pod:
    chat_template: true
    truncation: none
    max_prompt_tokens: null
    metric: {rules.metric}
    kind: {"binary" if rules.binary else "score"}
    source: https://github.com/NVIDIA/RULER
    license: Apache-2.0
"""


def _group(prefix: str) -> str:
    members = "\n".join(f"  - {prefix}_{task}" for task in TASKS)
    return f"group: {prefix}\ntask:\n{members}\n{_GROUP_METRIC}metadata:\n  version: 1.0\n"


def _by_type(prefix: str) -> str:
    """The mean over the eight kinds of tasks instead of the thirteen tasks, as SimLayerKV's Table 3 has it."""
    lines = [f"group: {prefix}_by_type", "task:"]
    metric = "".join(f"    {line}\n" for line in _GROUP_METRIC.splitlines())
    for kind, tasks in TYPES.items():
        if len(tasks) == 1:
            lines.append(f"  - {prefix}_{tasks[0]}")
            continue
        lines += [f"  - group: {kind}", "    task:", *(f"      - {prefix}_{task}" for task in tasks)]
        lines.append(metric.rstrip("\n"))
    tail = f"{_GROUP_METRIC}metadata:\n  version: 1.0\n  pod:\n    average: members\n"
    return "\n".join(lines) + "\n" + tail


def main() -> None:
    """Write every file."""
    for path, text in files().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
