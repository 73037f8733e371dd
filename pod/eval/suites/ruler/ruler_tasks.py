"""RULER's tasks at every length: thirteen tasks and their groups per length, their rows and scores.

The prompts of the rows fill the length with any tokenizer. Equal seeds give equal prompts on every machine.

Source of the scorers' rules: github.com/NVIDIA/RULER (Apache-2.0),
scripts/eval/{evaluate.py,synthetic/constants.py}.
"""

import random
import re
from typing import Any

from pod.eval.suites import task_data
from pod.eval.suites.configs import Config, DocRow, group_config, scorer, task_config
from pod.eval.suites.lengths import BUILT, NAMES, LazyRows, chat_tokens, count_tokens, largest_fit
from pod.eval.suites.ruler.generators import Documents, make_generator
from pod.eval.suites.ruler.ruler_prompts import PROMPTS, TASKS, TYPES

ANY_LENGTH = 4096  # length of the tasks without a length in their name, unless `ruler_length` sets it
FIELDS = ("index", "input", "asked", "prefix", "answers", "length")
_NEAR = 0.97  # a prompt that fills this share of its length is not made again
_CONTROL = re.compile(r"[\x00-\x1f]")


def rows(**metadata: Any) -> dict[str, Any]:
    """The data set of a task.

    Args:
        metadata: its `ruler` {task, length, samples, seed} is from the configuration. `ruler_length`,
            `ruler_samples` and `ruler_seed` (lm-eval's `--metadata`) override it.
    Raises:
        ValueError: for one of these three that is no whole number, is negative, or is 0 (a seed may be 0).
    """
    settings = metadata["ruler"]
    chosen = {key: metadata.get(f"ruler_{key}", settings[key]) for key in ("length", "samples", "seed")}
    for key, value in chosen.items():
        smallest = 0 if key == "seed" else 1
        if isinstance(value, bool) or not isinstance(value, int) or value < smallest:
            raise ValueError(f"ruler_{key} must be a whole number of at least {smallest}, not {value!r}")
    tokenizer = task_data.load_tokenizer(metadata)
    return {
        "test": make_rows(settings["task"], chosen["length"], tokenizer, chosen["seed"], chosen["samples"])
    }


def make_rows(task: str, length: int, tokenizer: Any, seed: int = 42, count: int = 500) -> LazyRows:
    """The samples of a task, built when they are read.

    Args:
        task: key of TASKS.
        length: tokens of prompt, answer and, if the tokenizer has one, chat template together. The template
            counts even if it is not used, so that prompts are the same with and without it.
        count: number of samples (500 officially; question answering has at most one per question).

    Returns:
        Rows {index, input, asked (the question in input), prefix, answers, length (tokens of input and
        prefix)}.

    Raises:
        ValueError: when data are missing or no prompt fits the length.
    """
    room = length - PROMPTS[TASKS[task].prompt].new_tokens - chat_tokens(tokenizer)
    # the size of row 0, where the search for every other one begins: no row depends on those read before
    usual: int | None = None

    def row(index: int) -> dict[str, Any]:
        nonlocal usual
        made: dict[int, tuple[Any, int]] = {}

        def tokens_of(size: int) -> int:
            sample = generator.sample(random.Random(f"{seed}/{task}/{index}"), index, size)
            made[size] = sample, count_tokens(tokenizer, sample.prompt + sample.prefix)
            return made[size][1]

        size = largest_fit(tokens_of, room, smallest=generator.smallest, guess=usual, near=_NEAR)
        usual = size if usual is None else usual
        sample, tokens = made[size]
        return {
            "index": index,
            "input": sample.prompt,
            "asked": sample.prompt[sample.prompt.rindex("\n") :],  # every task's question is its last line
            "prefix": sample.prefix,
            "answers": sample.answers,
            "length": tokens,
        }

    try:
        generator = make_generator(TASKS[task], tokenizer, length, room)
        row(0)
    except ValueError as error:
        raise ValueError(f"ruler {task} at {length} tokens: {error}") from None
    if isinstance(generator, Documents):
        count = min(count, len(generator.questions))
    return LazyRows(count, row, FIELDS)


def found(prediction: str, row: DocRow) -> float:
    """The share of the answers that the prediction contains, letter case aside.

    Control characters in the prediction count as line ends.
    """
    text = _CONTROL.sub("\n", prediction.strip()).strip().lower()
    return sum(answer.lower() in text for answer in row["answers"]) / len(row["answers"])


score_all = scorer("string_match_all", found)
score_part = scorer("string_match_part", lambda prediction, row: float(found(prediction, row) > 0))


def configs() -> list[Config]:
    """The tasks and the group of all tasks, for every length of `NAMES` and once for a length that is set.

    For every length of `NAMES` there are also groups by kind.
    """
    found = []
    for prefix, length in [
        ("pod_ruler", ANY_LENGTH),
        *((f"pod_ruler_{name}", n) for name, n in NAMES.items()),
    ]:
        found += [_task(f"{prefix}_{task}", task, length) for task in TASKS]
        found.append(group_config(prefix, "", TASKS))
        found += _by_type(prefix) if prefix != "pod_ruler" else []
    return found


def _task(name: str, task: str, length: int) -> Config:
    asked = TASKS[task]
    return task_config(
        name,
        rows,
        score_part if asked.metric == "string_match_part" else score_all,
        prompt="input",
        target="answers",
        new_tokens=PROMPTS[asked.prompt].new_tokens,
        metrics=(asked.metric, "score"),
        rules={
            "chat_template": True,
            "truncation": "none",
            "kind": "binary" if asked.binary else "score",
            "source": "https://github.com/NVIDIA/RULER",
            "license": "Apache-2.0",
        },
        metadata={"ruler": {"task": task, "length": length, "samples": 500, "seed": 42}},
        gen_prefix="prefix",
        **BUILT,
    )


def _by_type(prefix: str) -> list[Config]:
    """Groups of the kinds that have several tasks, and one group of all kinds.

    The value of the latter is the mean of eight kinds instead of thirteen tasks, as in SimLayerKV's Table 3.
    """
    several = {kind: tasks for kind, tasks in TYPES.items() if len(tasks) > 1}
    kinds = [kind if kind in several else tasks[0] for kind, tasks in TYPES.items()]
    groups = [group_config(prefix, f"_{kind}", tasks) for kind, tasks in several.items()]
    return [*groups, group_config(prefix, "_by_type", kinds, "members")]
