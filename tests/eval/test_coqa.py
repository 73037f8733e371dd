"""CoQA: prompts, both rules of scoring, the official file and the hub's.

Prompts are as lm-eval's own task has them (it cannot be imported).

Golden values: evaluate-v1.0.py's rules (all references) and lm_eval.tasks.coqa.utils of lm-eval 0.4.13 with
the two functions it lacks (different references), on tests/eval/data/coqa_predictions.jsonl.
"""

import json
from pathlib import Path

import pytest
from lm_eval import evaluator
from lm_eval.api.model import LM

from pod.eval.lm.index import task_manager
from pod.eval.suites import task_data
from pod.eval.suites.coqa import coqa_tasks

DATA = Path(__file__).parent / "data"
STORY = (
    "Once there was a goat called Pim who lived on a green hill. Pim had a red bell. "
    "One day the bell was gone, and Pim looked for it "
    "under the bridge, where a frog had put it on.\n\n"
)
HISTORY = "Q: Who lived on the hill?\n\nA: Pim\n\nQ: Which colour was the bell?\n\nA: red\n\n"


@pytest.fixture
def local():
    with task_data.use(DATA):
        yield


def test_scores_equal_both_rules_on_recorded_predictions():
    rows = [json.loads(line) for line in (DATA / "coqa_predictions.jsonl").read_text().splitlines()]
    assert len(rows) == 12
    for row in rows:
        ours = coqa_tasks.scores(row, [row["own_pred"]])
        for name in ("em", "f1"):
            assert ours[name] == pytest.approx(row["lm_eval"][name], abs=1e-12), row
            assert ours[f"{name}_official"] == pytest.approx(row["official"][name], abs=1e-12), row


def test_lm_eval_counts_equal_references_once_which_halves_the_usual_answer():
    """The reason for two rules: of yes, yes, yes, no the answer yes is fully right officially."""
    assert coqa_tasks.over_references(coqa_tasks.exact, ["yes", "yes", "yes", "no"], "yes") == 1.0
    assert (
        coqa_tasks.over_references(
            coqa_tasks.exact, coqa_tasks.target({"references": ["yes", "Yes", "yes", "no"]}), "yes"
        )
        == 0.5
    )


def test_the_answer_is_its_first_line():
    doc = {"references": ["a frog"]}
    assert coqa_tasks.scores(doc, ["\n The frog.\nQ: more"])["em"] == 1.0
    assert coqa_tasks.scores(doc, ["The frog and\nthe goat"])["f1"] == pytest.approx(2 / 3)


def test_last_turns_have_lm_evals_prompt_and_references(local):
    docs = list(coqa_tasks.last_turns()["test"])
    assert len(docs) == 3
    assert docs[0]["prompt"] == f"{STORY}{HISTORY}Q: Who had the bell?\n\nA:"
    assert docs[0]["references"] == ["a frog", "the frog", "The frog", "a frog"]
    assert coqa_tasks.target(docs[0]) == ["a frog", "the frog"]


def test_all_turns_ask_each_question_after_what_was_said(local):
    docs = list(coqa_tasks.all_turns()["test"])
    assert len(docs) == 3 + 2 + 1
    assert docs[0]["prompt"] == f"{STORY}Q: Who lived on the hill?\n\nA:"
    assert docs[1]["prompt"] == f"{STORY}{HISTORY.partition('A: red')[0]}A:"
    assert docs[2]["prompt"].startswith(STORY + HISTORY)
    assert [doc["references"][0] for doc in docs] == ["Pim", "red", "a frog", "1840", "no", "a loaf"]


def test_the_hubs_parquet_gives_the_same_samples(tmp_path, monkeypatch, local):
    import pyarrow
    import pyarrow.parquet

    def lists(turns):
        return {key: [turn[key] for turn in turns] for key in turns[0]}

    rows = json.loads((DATA / "coqa" / coqa_tasks.FILE).read_text())["data"]
    columns = [
        {
            "id": row["id"],
            "story": row["story"],
            "questions": lists(row["questions"]),
            "answers": lists(row["answers"]),
            "additional_answers": {key: lists(turns) for key, turns in row["additional_answers"].items()},
        }
        for row in rows
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(columns), tmp_path / coqa_tasks.HUB_FILE)
    asked = []

    def download(repo_id, filename, repo_type):
        asked.append((repo_id, filename, repo_type))
        return str(tmp_path / filename)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    monkeypatch.delenv(task_data.ENVIRONMENT, raising=False)
    ours = list(coqa_tasks.all_turns()["test"])
    with task_data.use(None):
        assert list(coqa_tasks.all_turns()["test"]) == ours
    assert asked == [("EleutherAI/coqa", "coqa_validation.parquet", "dataset")]


def test_a_story_without_answers_is_one_line(tmp_path):
    (tmp_path / "coqa").mkdir()
    file = tmp_path / "coqa" / coqa_tasks.FILE
    turn = {"input_text": "?", "turn_id": 1}
    file.write_text(json.dumps({"data": [{"story": "x", "questions": [turn, turn], "answers": [turn]}]}))
    with (
        task_data.use(tmp_path),
        pytest.raises(ValueError, match="story 1: not every question has one answer"),
    ):
        coqa_tasks.last_turns()
    file.write_text(json.dumps({"data": [{"story": "x", "questions": [turn]}]}))
    with (
        task_data.use(tmp_path),
        pytest.raises(ValueError, match="story 1: no answers; expected story, questions, answers"),
    ):
        coqa_tasks.last_turns()


class Frog(LM):
    """Says `The frog.` to everything."""

    def generate_until(self, requests, disable_tqdm=False):
        assert all(request.args[1]["until"] == ["\nQ:"] for request in requests)
        return [" The frog.\n\n" for _ in requests]

    def loglikelihood(self, requests, disable_tqdm=False):
        raise AssertionError("nothing is scored by likelihood")

    loglikelihood_rolling = loglikelihood


def test_both_tasks_run_offline_through_lm_eval(local):
    manager = task_manager(False)
    found = evaluator.simple_evaluate(
        Frog(), tasks=["pod_coqa", "pod_coqa_turns"], task_manager=manager, bootstrap_iters=0
    )["results"]
    assert found["pod_coqa"]["em,none"] == pytest.approx(1 / 3)
    assert found["pod_coqa_turns"]["em_official,none"] == pytest.approx(1 / 6)
    assert found["pod_coqa_turns"]["f1_official,none"] == pytest.approx(1 / 6)


def test_lm_evals_own_task_cannot_be_imported():
    """lm-eval's own task cannot be imported.

    When this fails, transformers has its SQuAD metrics back or lm-eval its own, and the README's reason is
    out of date.
    """
    with pytest.raises(ModuleNotFoundError, match="transformers.data.metrics"):
        import lm_eval.tasks.coqa.utils  # noqa: F401
