"""What LongBench's YAML files call: the rows of a task, and the functions that score one answer."""

from collections.abc import Callable
from typing import Any

from pod.eval.tasks import data
from pod.eval.tasks.longbench import metrics

HUB = "THUDM/LongBench"
FIELDS = ("input", "context", "answers", "length", "all_classes", "_id")
Scores = dict[str, float]
Scorer = Callable[[dict[str, Any], list[str]], Scores]


def rows(file: str, **metadata: Any) -> dict[str, Any]:
    """The samples of one task for lm-eval's `custom_dataset`; file: `qasper.jsonl`, `qasper_e.jsonl` … of the official data.zip.

    Raises: ValueError, in one line, when the file is missing or is not in the official format.
    """
    found = data.load_rows("longbench", file, HUB, f"data.zip/data/{file}")
    for number, row in enumerate(found, start=1):
        missing = [name for name in FIELDS if name not in row]
        if missing:
            raise ValueError(
                f"longbench/{file}, row {number}: no {', '.join(missing)}; expected LongBench's fields {', '.join(FIELDS)}"
            )
        if not row["answers"]:
            raise ValueError(f"longbench/{file}, row {number}: no answer to score against")
    return data.dataset([row | {"cluster": data.text_id(row["context"])} for row in found])


def length_group(length: int) -> str:
    """LongBench-E's group of a sample by its official length (words; characters in Chinese)."""
    return "0_4k" if length < 4000 else "4_8k" if length < 8000 else "8k"


def _scorer(name: str, metric: metrics.Metric, *, first_line: bool = False) -> Scorer:
    """lm-eval's `process_results`: the score of one answer as `name` and as `score`, which groups average.

    A row of LongBench-E also counts for its length group. first_line: see `metrics.first_line`.
    """

    def score(doc: dict[str, Any], results: list[str]) -> Scores:
        answer = metrics.first_line(results[0]) if first_line else results[0]
        value = metrics.best(metric, answer, doc["answers"])
        return {name: value, "score": value}

    return score


def _classification(doc: dict[str, Any], results: list[str]) -> Scores:
    def metric(prediction: str, reference: str) -> float:
        return metrics.classification(prediction, reference, doc["all_classes"])

    return _scorer("accuracy", metric, first_line=True)(doc, results)


def _edit_similarity(doc: dict[str, Any], results: list[str]) -> Scores:
    """Both readings of edit similarity; the official one is the score."""
    other = metrics.best(metrics.code_similarity_levenshtein, results[0], doc["answers"])
    scores = _scorer("edit_similarity", metrics.code_similarity)(doc, results)
    return {**scores, "edit_similarity_levenshtein": other}


def _by_length(scorer: Scorer) -> Scorer:
    """The same scorer for LongBench-E, where each sample also counts for its length group."""

    def score(doc: dict[str, Any], results: list[str]) -> Scores:
        scores = scorer(doc, results)
        return {**scores, f"score_{length_group(doc['length'])}": scores["score"]}

    return score


qa_f1 = _scorer("qa_f1", metrics.qa_f1)
qa_f1_zh = _scorer("qa_f1_zh", metrics.qa_f1_zh)
qa_f1_first_line = _scorer("qa_f1", metrics.qa_f1, first_line=True)
rouge_l = _scorer("rouge_l", metrics.rouge_l)
rouge_l_zh = _scorer("rouge_l_zh", metrics.rouge_l_zh)
rouge_l_first_line = _scorer("rouge_l", metrics.rouge_l, first_line=True)
accuracy_first_line = _classification
accuracy_count = _scorer("accuracy", metrics.count)
accuracy_retrieval = _scorer("accuracy", metrics.retrieval)
accuracy_retrieval_zh = _scorer("accuracy", metrics.retrieval_zh)
edit_similarity = _edit_similarity

qa_f1_e = _by_length(qa_f1)
qa_f1_first_line_e = _by_length(qa_f1_first_line)
rouge_l_e = _by_length(rouge_l)
rouge_l_first_line_e = _by_length(rouge_l_first_line)
accuracy_first_line_e = _by_length(accuracy_first_line)
accuracy_count_e = _by_length(accuracy_count)
accuracy_retrieval_e = _by_length(accuracy_retrieval)
edit_similarity_e = _by_length(edit_similarity)
