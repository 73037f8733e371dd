"""CoQA's tasks: their rows (one per question that is asked) and their scores.

The scores follow the rules of the official evaluate-v1.0.py (stanfordnlp.github.io/coqa; rules of SQuAD 2.0).

lm-eval 0.4.13 takes exact match and F1 from `transformers.data.metrics`, which transformers 5 no longer has.
So its task `coqa` cannot be imported. The code here is our own.
"""

from collections.abc import Callable, Iterator
from typing import Any

from pod.eval.suites import task_data
from pod.eval.suites.configs import Config, DocRow, task_config
from pod.eval.suites.words import Metric, bag_f1, words

FILE = "coqa-dev-v1.0.json"
HUB, HUB_FILE = "EleutherAI/coqa", "coqa_validation.parquet"
FIELDS = ("story", "questions", "answers")


def last_turns(**metadata: Any) -> dict[str, Any]:
    """The last question of each story after the whole conversation: the 500 samples of lm-eval's `coqa`."""
    return task_data.dataset([turns[-1] for turns in _conversations()])


def all_turns(**metadata: Any) -> dict[str, Any]:
    """Every question of each story after the conversation before it.

    These are the 7,983 samples of the official evaluation.
    """
    return task_data.dataset([sample for turns in _conversations() for sample in turns])


def _conversations() -> Iterator[list[DocRow]]:
    """The samples of each story, one per question.

    Raises:
        ValueError: in one line, when the file is missing or is not in CoQA's format.
    """
    rows = task_data.load_rows("coqa", FILE, HUB, HUB_FILE, FIELDS, filled=True, name="story")
    for number, row in enumerate(rows, start=1):
        additional = (row.get("additional_answers") or {}).values()
        answers = [_texts(turns) for turns in (row["answers"], *filter(None, additional))]
        questions = _texts(row["questions"])
        if any(len(texts) != len(questions) for texts in answers):
            raise ValueError(f"coqa/{FILE}, story {number}: not every question has one answer per reference")
        yield list(_samples(row["story"], questions, answers))


def _texts(turns: Any) -> list[str]:
    """The texts of turns: a list of objects in the official JSON, an object of lists in the hub's parquet."""
    return list(turns["input_text"]) if isinstance(turns, dict) else [turn["input_text"] for turn in turns]


def _samples(story: str, questions: list[str], answers: list[list[str]]) -> Iterator[DocRow]:
    before = f"{story}\n\n"
    for question, *references in zip(questions, *answers, strict=True):
        asked = f"Q: {question}\n\nA:"
        yield {
            "prompt": before + asked,
            "asked": asked,
            "references": references,
            "cluster": task_data.text_id(story),
        }
        before += f"{asked} {references[0]}\n\n"


def exact(reference: str, answer: str) -> float:
    """1 when both have the same words in the same order."""
    return float(words(reference.lower()) == words(answer.lower()))


def f1(reference: str, answer: str) -> float:
    """F1 of the words. If one of the texts has no words: 1 if neither has any, else 0."""
    wanted = words(reference.lower())
    given = words(answer.lower())
    if not wanted or not given:
        return float(wanted == given)
    return bag_f1(given, wanted)


def over_references(metric: Metric, references: list[str], answer: str) -> float:
    """The score of an answer against several references.

    Each reference is left out in turn, and the best scores against the others are averaged. So an answer is
    measured as each human answer is: against the other humans. A single reference is not left out.
    """
    if len(references) == 1:
        return metric(references[0], answer)
    scores = [metric(reference, answer) for reference in references]
    return sum(max(scores[:out] + scores[out + 1 :]) for out in range(len(scores))) / len(scores)


def target(doc: DocRow) -> list[str]:
    """The references without repetitions (letter case aside), as lm-eval uses them; officially all count."""
    found: dict[str, str] = {}
    for reference in doc["references"]:
        found.setdefault(reference.lower(), reference)
    return list(found.values())


def scores(doc: DocRow, results: list[str]) -> dict[str, float]:
    """Exact match and F1, each by lm-eval's and by the official rule.

    `em` and `f1` are those of lm-eval's `coqa`, which takes each different reference once. `em_official` and
    `f1_official` are those of the official script, which takes all references.
    """
    answer = results[0].strip().split("\n")[0]
    found = {}
    for name, references in (("", target(doc)), ("_official", doc["references"])):
        found[f"em{name}"] = over_references(exact, references, answer)
        found[f"f1{name}"] = over_references(f1, references, answer)
    return found


def configs() -> list[Config]:
    """Both tasks; the first by lm-eval's rule, the second by the official one."""
    of_lm_eval = "lm-eval 0.4.13, task coqa (prompt, rules); stanfordnlp.github.io/coqa (data)"
    official = "stanfordnlp.github.io/coqa (data, evaluate-v1.0.py); prompt of lm-eval's coqa"
    turns_metrics = ("f1_official", "em", "f1", "em_official")
    return [
        _task("pod_coqa", last_turns, ("em", "f1", "em_official", "f1_official"), of_lm_eval),
        _task("pod_coqa_turns", all_turns, turns_metrics, official),
    ]


def _task(name: str, rows: Callable[..., dict[str, Any]], metrics: tuple[str, ...], source: str) -> Config:
    return task_config(
        name,
        rows,
        scores,
        prompt="prompt",
        target=target,
        new_tokens=256,  # lm-eval's default
        generation={"until": ["\nQ:"]},
        metrics=metrics,
        rules={
            "chat_template": False,
            "truncation": "start",
            "kind": "score",
            "source": source,
            "license": "by domain: CC BY-SA 4.0, MSR-LA, Apache-2.0, RACE's own terms (data); MIT (lm-eval)",
        },
    )
