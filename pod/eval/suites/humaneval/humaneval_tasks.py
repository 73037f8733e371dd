"""HumanEval's tasks.

Importing this file runs no code of a model and loads nothing from the network. (Importing lm-eval's own task
does both.)
"""

from typing import Any

from pod.eval.suites import task_data
from pod.eval.suites.configs import Config, task_config
from pod.eval.suites.humaneval.execution import PASSED, check_permission, run_solution

FILE = "HumanEval.jsonl"
HUB, HUB_FILE = "openai/openai_humaneval", "openai_humaneval/test-00000-of-00001.parquet"
FIELDS = ("task_id", "prompt", "entry_point", "test")


def rows(**metadata: Any) -> dict[str, Any]:
    """The 164 problems, from HumanEval.jsonl or the official HumanEval.jsonl.gz.

    Raises:
        ValueError: in one line, when the file is missing or is not in the official format, or when solutions
            may not be run here.
    """
    check_permission()
    return task_data.dataset(task_data.load_rows("humaneval", FILE, HUB, HUB_FILE, FIELDS, filled=True))


def pass_at_1(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """1 if the completed function passes its tests, else 0."""
    found = run_solution(doc["prompt"], results[0], doc["test"], doc["entry_point"])
    return {"pass@1": float(found == PASSED)}


def pass_at_1_instruct(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """`pass_at_1` of an answer in a chat, of which only the code up to the closing fence counts."""
    return pass_at_1(doc, [results[0].partition("```")[0]])


def target(doc: dict[str, Any]) -> str:
    """The tests that the completion must pass, as code."""
    return f"{doc['test']}\ncheck({doc['entry_point']})"


def configs() -> list[Config]:
    """Both tasks: the plain prompt, and lm-eval's for chat models."""
    from_official = "github.com/openai/human-eval@6d43fb9 (data, tests"
    asked = "Write a solution to the following problem and make sure that it passes the tests:\n"
    fenced = "```python\n{{ prompt }}\n"
    return [
        _task(
            "pod_humaneval",
            pass_at_1,
            "prompt",
            False,
            f"{from_official}, stop strings), lm-eval 0.4.13 (length)",
        ),
        _task(
            "pod_humaneval_instruct",
            pass_at_1_instruct,
            f"{asked}{fenced}```\n",
            True,
            f"{from_official}), lm-eval 0.4.13 humaneval_instruct (prompt)",
            gen_prefix=f"Here is the completed function:\n{fenced}",
        ),
    ]


def _task(name: str, score: Any, prompt: str, chat: bool, source: str, **more: Any) -> Config:
    return task_config(
        name,
        rows,
        score,
        prompt=prompt,
        target=target,
        new_tokens=1024,
        generation={"until": ["\nclass", "\ndef", "\n#", "\nif", "\nprint"]},
        metrics=("pass@1",),
        # no truncation: a problem without its middle is another problem
        rules={
            "chat_template": chat,
            "truncation": "none",
            "kind": "binary",
            "source": source,
            "license": "MIT",
        },
        **more,
    )
