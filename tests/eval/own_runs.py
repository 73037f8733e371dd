"""An evaluation of `package:tiny` with a plan, for tests of single tasks: no result files, no report."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch

import pod
from pod.eval import runner
from pod.eval.answer.answer_cache import AnswerFolder
from pod.eval.answer.methods import find_method
from pod.eval.answer.score import score_bucket, score_by_forward
from pod.recipe import load_recipe

PLAN = pod.SharingPlan(lead=[[0, 0], [0, 0], [0, 2], [3, 2]])
SETTINGS: dict[str, Any] = {
    "model.path": "package:tiny",
    "model.dtype": "float64",
    "model.num_sink_tokens": 4,
    "model.num_recent_tokens": 60,
    "eval.batch_size": 3,
}
SMALL_TASKS: dict[str, Any] = {
    "eval.text_length": 256,
    "eval.min_context": 128,
    "eval.text_sequences": 3,
    "eval.scored_tokens": 5,
    "eval.passkey_lengths": [420],
    "eval.passkey_depths": [0.0, 1.0],
    "eval.passkey_samples": 1,
    "eval.passkey_new_tokens": 4,
    "eval.efficiency_lengths": [300],
    "eval.efficiency_tokens": 2,
    "eval.efficiency_repeats": 2,
}
"""Few and short samples of perplexity, passkeys and speeds."""
WORDS = ("river", "stone", "lamp", "garden", "letter", "bridge", "winter", "paper", "window", "music", "road")


def write_place(folder: Path) -> Path:
    """A text of many different sentences and a plan below `folder`."""
    lines = [
        f"The {WORDS[i % 11]} by the {WORDS[i * i % 11]} was seen with a {WORDS[(3 * i + i // 11) % 11]}. "
        for i in range(700)
    ]
    (folder / "text.txt").write_text("".join(lines))
    PLAN.save(folder / "plan.json")
    return folder


def make_run(
    place: Path, task: str, methods: list[str], options: dict[str, Any], **changes: Any
) -> runner.EvalInputs:
    """The inputs of an evaluation of one task; changes: dotted recipe keys with `.` written as `__`."""
    settings = SETTINGS | {
        "output_dir": str(place / "out"),
        "model.plan": str(place / "plan.json"),
        "eval.text": [str(place / "text.txt")],
        "eval.methods": methods,
        "eval.tasks": [task],
        "eval.task_options": {task: options},
    }
    settings |= {key.replace("__", "."): value for key, value in changes.items()}
    recipe = load_recipe(None, [f"{key}={json.dumps(value)}" for key, value in settings.items()])
    return runner.prepare(recipe, log=lambda line: None)


def nll_by_decode(model: Any, cache: Any, tokens: Any, bucket: Any) -> Any:
    """NLL (nats) [B, scored] of a bucket's scored tokens of `tokens` [B, n], through a new cache."""
    return torch.stack([-one.continuations[0].logprobs for one in score_bucket(model, cache, tokens, bucket)])


def nll_by_forward(model: Any, tokens: Any, buckets: list[Any]) -> list[Any]:
    """The same of every bucket, from one forward pass without a cache."""
    return [-found.logprobs for found in score_by_forward(model, tokens, buckets)]


def measure(run: runner.EvalInputs, name: str) -> dict[str, Any]:
    """The payload of the run's one task for a method, every answer of which is asked anew."""
    anew = dataclasses.replace(run, store=AnswerFolder(run.store.folder, run.store.ranks, reuse=False))
    (task,) = run.tasks.values()
    return runner.measure(anew, run.method_runners[find_method(name).name], task)
