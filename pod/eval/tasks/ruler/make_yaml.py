"""Writes the YAML files of RULER: a folder per length, thirteen tasks and their groups in each. Run it after a change:

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
        found[FOLDER / name / "_group.yaml"] = _group(prefix, [f"{prefix}_{task}" for task in TASKS])
        if name != ANY:
            for group, text in _by_type(prefix).items():
                found[FOLDER / name / f"_{group}.yaml"] = text
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


def _group(name: str, members: list[str], average: str = "") -> str:
    listed = "".join(f"  - {member}\n" for member in members)
    rules = f"  pod:\n    average: {average}\n" if average else ""
    return f"group: {name}\ntask:\n{listed}{_GROUP_METRIC}metadata:\n  version: 1.0\n{rules}"


def _by_type(prefix: str) -> dict[str, str]:
    """Groups of the kinds that have several tasks, and one of all kinds: the mean over eight kinds instead of thirteen tasks, as in
    SimLayerKV's Table 3."""
    several = {kind: tasks for kind, tasks in TYPES.items() if len(tasks) > 1}
    found = {
        kind: _group(f"{prefix}_{kind}", [f"{prefix}_{task}" for task in tasks])
        for kind, tasks in several.items()
    }
    kinds = [f"{prefix}_{kind if kind in several else tasks[0]}" for kind, tasks in TYPES.items()]
    return found | {"by_type": _group(f"{prefix}_by_type", kinds, "members")}


def main() -> None:
    """Write every file."""
    for path, text in files().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
