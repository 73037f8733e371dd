"""What CoQA's YAML files call: the rows, one per question asked, and their scores."""

from typing import Any

from pod.eval.tasks import data
from pod.eval.tasks.coqa import metrics

FILE = "coqa-dev-v1.0.json"
HUB, HUB_FILE = "EleutherAI/coqa", "coqa_validation.parquet"
FIELDS = ("story", "questions", "answers")


def last_turns(**metadata: Any) -> dict[str, Any]:
    """The last question of each story after the whole conversation: the 500 samples of lm-eval's `coqa`."""
    return data.dataset([_sample(row, len(_texts(row["questions"])) - 1) for row in _stories()])


def all_turns(**metadata: Any) -> dict[str, Any]:
    """Every question of each story after the conversation before it: the 7,983 samples of the official evaluation."""
    return data.dataset(
        [_sample(row, turn) for row in _stories() for turn in range(len(_texts(row["questions"])))]
    )


def _stories() -> list[dict[str, Any]]:
    """Raises: ValueError, in one line, when the file is missing or is not in CoQA's format."""
    rows = data.load_rows("coqa", FILE, HUB, HUB_FILE)
    for number, row in enumerate(rows, start=1):
        missing = [name for name in FIELDS if not row.get(name)]
        if missing:
            raise ValueError(
                f"coqa/{FILE}, story {number}: no {', '.join(missing)}; expected {', '.join(FIELDS)}"
            )
        counts = {len(_texts(turns)) for turns in (row["questions"], row["answers"], *_additional(row))}
        if len(counts) > 1:
            raise ValueError(f"coqa/{FILE}, story {number}: not every question has one answer per reference")
    return rows


def _texts(turns: Any) -> list[str]:
    """The texts of turns: a list of objects in the official JSON, an object of lists in the hub's parquet."""
    return list(turns["input_text"]) if isinstance(turns, dict) else [turn["input_text"] for turn in turns]


def _additional(row: dict[str, Any]) -> list[Any]:
    return [turns for turns in (row.get("additional_answers") or {}).values() if turns]


def _sample(row: dict[str, Any], turn: int) -> dict[str, Any]:
    questions, answers = _texts(row["questions"]), _texts(row["answers"])
    references = [answers[turn], *(_texts(turns)[turn] for turns in _additional(row))]
    prompt = f"{row['story']}\n\n"
    for question, answer in zip(questions[:turn], answers[:turn], strict=True):
        prompt += f"Q: {question}\n\nA: {answer}\n\n"
    return {
        "prompt": f"{prompt}Q: {questions[turn]}\n\nA:",
        "references": references,
        "cluster": data.text_id(row["story"]),
    }


def target(doc: dict[str, Any]) -> list[str]:
    """The different references."""
    return metrics.different(doc["references"])


def scores(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """em and f1 as lm-eval's `coqa` (different references), em_official and f1_official as the official script (all references)."""
    answer = results[0].strip().split("\n")[0]
    found = {}
    for name, references in (("", target(doc)), ("_official", doc["references"])):
        found[f"em{name}"] = metrics.over_references(metrics.exact, references, answer)
        found[f"f1{name}"] = metrics.over_references(metrics.f1, references, answer)
    return found
