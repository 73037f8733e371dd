"""What the YAML files of InfiniteBench call."""

from typing import Any

from pod.eval.tasks import data
from pod.eval.tasks.infinitebench import metrics, samples
from pod.eval.tasks.infinitebench.prompts import TASKS


def rows(**metadata: Any) -> dict[str, Any]:
    """The data set of a task; metadata: `infinitebench` of the YAML file {task, length, seed}."""
    settings = metadata["infinitebench"]
    task = settings["task"]
    if TASKS[task].count is None:
        return {"test": samples.read_rows(task)}
    tokenizer = data.load_tokenizer(metadata)
    return {"test": samples.build_rows(task, settings["length"], tokenizer, settings["seed"])}


def _scored(task: str) -> Any:
    """lm-eval's `process_results` of a task."""

    def process_results(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
        value = metrics.SCORERS[task](results[0], doc["answer"])
        return {"score": value, TASKS[task].metric: value}

    return process_results


score_passkey = _scored("passkey")
score_number_string = _scored("number_string")
score_kv_retrieval = _scored("kv_retrieval")
score_longbook_sum_eng = _scored("longbook_sum_eng")
score_longbook_choice_eng = _scored("longbook_choice_eng")
score_longbook_qa_eng = _scored("longbook_qa_eng")
score_longbook_qa_chn = _scored("longbook_qa_chn")
score_math_find = _scored("math_find")
score_code_run = _scored("code_run")
score_code_debug = _scored("code_debug")
score_longdialogue_qa_eng = _scored("longdialogue_qa_eng")
