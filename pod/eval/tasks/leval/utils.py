"""What L-Eval's YAML files call: the rows of a task, one per document and question, and the functions that score one answer."""

from typing import Any

from pod.eval.tasks import data
from pod.eval.tasks.leval import metrics, prompts

HUB = "L4NLP/LEval"
FIELDS = ("input", "instructions", "outputs", "evaluation")
BY_METRIC = ("exam", "f1", "rouge")  # the other rows are for human or model judges
EXAMPLES = ("gsm100",)  # its document is always the same worked examples, no text that is asked about
Scores = dict[str, float]


def rows(file: str, **metadata: Any) -> dict[str, Any]:
    """The samples of one task for lm-eval's `custom_dataset`; file: `Exam/coursera.jsonl` or `Generation/news_summ.jsonl` …

    A document with k questions is k samples. Rows for human or model judges are left out, as the official scorer does it. A sample of
    `sci_fi` is two: is it so in the document (`loyalty`), and is it so in the world (`fact`), asked without the document.

    Raises: ValueError, in one line, when the file is missing or is not in the official format.
    """
    task = file.rpartition("/")[2].removesuffix(".jsonl")
    found = []
    for number, row in enumerate(data.load_rows("leval", file, HUB, f"LEval/{file}"), start=1):
        _check(row, f"leval/{file}, row {number}")
        if row["evaluation"] not in BY_METRIC:
            continue
        for instruction, target in zip(row["instructions"], row["outputs"], strict=True):
            found += _samples(task, row["input"], instruction, target)
    return data.dataset(found)


def _check(row: dict[str, Any], where: str) -> None:
    missing = [name for name in FIELDS if name not in row]
    if missing:
        raise ValueError(f"{where}: no {', '.join(missing)}; expected L-Eval's fields {', '.join(FIELDS)}")
    if len(row["instructions"]) != len(row["outputs"]):
        counts = f"{len(row['instructions'])} instructions and {len(row['outputs'])} outputs"
        raise ValueError(f"{where}: {counts}; each question needs one reference")


def _samples(task: str, document: str, instruction: str, target: str) -> list[dict[str, Any]]:
    sample = {
        "document": document,
        "cluster": None if task in EXAMPLES else data.text_id(document),
        "system": prompts.system_prompt(task),
        "prompt": prompts.user_prompt(task, document, instruction, len(target.split())),
        "prefix": prompts.answer_prefix(task),
        "target": target,
        "part": "",
    }
    if task != "sci_fi":
        return [sample]
    world = {"document": "", "system": "", "prompt": prompts.fact_prompt(instruction), "part": "fact"}
    return [
        sample | {"target": metrics.judgement_target(target, "loyalty"), "part": "loyalty"},
        sample | {"target": metrics.judgement_target(target, "fact"), **world},
    ]


def _closed(value: float) -> Scores:
    return {"exact_match": value, "score": value}


def one_letter(doc: dict[str, Any], results: list[str]) -> Scores:
    """Multiple choice with one right option (quality, tpo)."""
    return _closed(metrics.exact_match(metrics.one_letter(results[0]), metrics.target_letters(doc["target"])))


def several_letters(doc: dict[str, Any], results: list[str]) -> Scores:
    """Multiple choice with one or more right options (coursera)."""
    return _closed(
        metrics.exact_match(metrics.several_letters(results[0]), metrics.target_letters(doc["target"]))
    )


def number(doc: dict[str, Any], results: list[str]) -> Scores:
    """Word problems (gsm100)."""
    return _closed(metrics.exact_match(metrics.number(results[0]), metrics.number(doc["target"])))


def code(doc: dict[str, Any], results: list[str]) -> Scores:
    """Program output (codeU)."""
    target = doc["target"]
    return _closed(metrics.exact_match(metrics.code_output(results[0], target), metrics.code_text(target)))


def text(doc: dict[str, Any], results: list[str]) -> Scores:
    """Topic names (topic_retrieval_longchat): the reference within the answer."""
    return _closed(metrics.exact_match(results[0], doc["target"]))


def judgement(doc: dict[str, Any], results: list[str]) -> Scores:
    """True or false (sci_fi); the parts also by themselves. The score is the mean of both parts, as officially."""
    value = metrics.exact_match(metrics.judgement(results[0]), doc["target"])
    return {**_closed(value), doc["part"]: value}


def f1(doc: dict[str, Any], results: list[str]) -> Scores:
    """Open-ended questions."""
    value = metrics.f1(results[0], doc["target"])
    return {"qa_f1": value, "score": value}


def rouge(doc: dict[str, Any], results: list[str]) -> Scores:
    """Open-ended summaries; the score is rougeL."""
    values = metrics.rouge(results[0], doc["target"])
    return {**values, "score": values["rougeL"]}
