"""Tasks of lm-eval in an evaluation.

Stock tasks on local fixtures, rules, groups, skipped samples, and what is refused before any computation.
"""

import json
from pathlib import Path

import pytest

import pod
from pod.eval import runner
from pod.eval.answer.methods import find_method
from pod.eval.lm import index as lm_index
from pod.eval.lm.model import PodLM
from pod.eval.lm.payload import group_payload
from pod.eval.suites import task_data
from pod.eval.suites.task_base import scored_payload
from pod.recipe import load_recipe

DATA = Path(__file__).parent / "data"
STOCK = [
    "hellaswag",
    "arc_easy",
    "arc_challenge",
    "gsm8k",
    "truthfulqa_mc1",
    "truthfulqa_mc2",
    "truthfulqa_gen",
]


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POD_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def no_report(monkeypatch):
    monkeypatch.setattr("pod.eval.report.write.write_report", lambda recipe: "none")


def recipe_of(folder, tasks, methods=("full",), **changes):
    settings = {
        "output_dir": str(folder),
        "model.path": "package:tiny",
        "model.num_sink_tokens": 4,
        "model.num_recent_tokens": 60,
        "eval.methods": list(methods),
        "eval.tasks": list(tasks),
        "eval.data_dir": str(DATA),
        "eval.batch_size": 2,
    }
    lines = [f"{key.replace('__', '.')}={json.dumps(value)}" for key, value in (settings | changes).items()]
    return load_recipe(None, lines)


def measure(folder, tasks, methods=("full",), **changes):
    return runner.evaluate(recipe_of(folder, tasks, methods, **changes), log=lambda line: None)


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    """Every stock task with its fixture rows, without and with compression."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pod.eval.report.write.write_report", lambda recipe: "none")
        return measure(tmp_path_factory.mktemp("stock"), STOCK, ["full", "snapkv@40"])


@pytest.mark.slow
def test_stock_tasks_run_offline_with_their_metrics(stock):
    expected = {
        "hellaswag": ("acc_norm", "binary"),
        "arc_easy": ("acc_norm", "binary"),
        "arc_challenge": ("acc_norm", "binary"),
        "gsm8k": ("exact_match", "binary"),
        "truthfulqa_mc1": ("acc", "binary"),
        "truthfulqa_mc2": ("acc", "score"),
        "truthfulqa_gen": ("bleu_acc", "score"),
    }
    for method in ("full", "snapkv@40"):
        parts = stock[method]["parts"]
        assert {name: (part["metric"], part["kind"]) for name, part in parts.items()} == expected
        for part in parts.values():
            assert part["settings"]["question"] == "seen when the text is compressed", "it is not told apart"
            assert [sample["id"] for sample in part["samples"]] == ["0", "1", "2"] and not part["skipped"]
            scores = [sample["score"] for sample in part["samples"]]
            assert part["value"] == pytest.approx(sum(scores) / 3) and 0 <= min(scores) <= max(scores) <= 1
    assert stock["full"]["parts"]["gsm8k"]["settings"]["num_fewshot"] == 5
    assert "exact_match (flexible-extract)" in stock["full"]["parts"]["gsm8k"]["metrics"]


def test_answers_to_a_task_hold_no_prompts(tmp_path):
    """A group keeps the answers to all its tasks until they are scored; prompts may have 100,000 tokens."""
    inputs = runner.prepare(recipe_of(tmp_path, ["arc_easy"], eval__limit=2), log=lambda line: None)
    task, full = inputs.tasks["arc_easy"], inputs.method_runners["full"]
    with runner.answers_of(inputs, full).asked_by("arc_easy") as answer_cache:
        answers = task.answer(full, answer_cache)
    assert "sunflower" in (DATA / "allenai/ai2_arc/ARC-Easy/test.jsonl").read_text()
    assert "sunflower" not in json.dumps(answers)
    samples = task.score(full, answers)["samples"]
    assert len(samples) == 2
    assert samples[1]["answer"] in (" a lamp shade", " water and light", " a drum", " salt only")


@pytest.mark.slow
def test_methods_get_the_same_prompts_and_compression_changes_scores(stock):
    for name in STOCK:
        full, small = stock["full"]["parts"][name], stock["snapkv@40"]["parts"][name]
        assert [s["prompt_hash"] for s in full["samples"]] == [s["prompt_hash"] for s in small["samples"]]
        assert {s["budget_tokens"] for s in small["samples"]} == {40}
    for name in ("arc_easy", "truthfulqa_mc1"):
        for full, small in zip(*(stock[m]["parts"][name]["samples"] for m in stock), strict=True):
            gaps = [abs(a - b) for a, b in zip(full["logprobs"], small["logprobs"], strict=True)]
            assert max(gaps) > 0.1, "a budget of 40 tokens changes nothing: compression is bypassed"


@pytest.mark.slow
def test_bytes_are_those_of_the_compressed_cache(stock):
    part = stock["snapkv@40"]["parts"]["truthfulqa_mc1"]
    row = part["bytes"][0]
    held = [sample["held_tokens"] for sample in part["samples"] if sample["length"] == row["length"]]
    assert row["held_tokens"] == max(held) < row["length"], "as many as were there, not a full length class"
    assert row["saving"] == 1 - row["bytes"] / (row["dense_bytes"] / row["length"] * max(held))
    assert row["length"] == 704 and row["samples"] == 3 and row["budget_tokens"] == 40
    assert row["bytes"] < 0.2 * row["dense_bytes"]
    assert stock["full"]["parts"]["truthfulqa_mc1"]["bytes"][0]["bytes"] is None, (
        "scored in one pass: no cache"
    )


@pytest.mark.slow
def test_choices_are_scored_against_the_right_targets(stock):
    part = stock["full"]["parts"]["arc_easy"]
    rows = [
        json.loads(line) for line in (DATA / "allenai/ai2_arc/ARC-Easy/test.jsonl").read_text().splitlines()
    ]
    for sample, row in zip(part["samples"], rows, strict=True):
        right = row["choices"]["label"].index(row["answerKey"])
        lengths = [len(text) for text in row["choices"]["text"]]
        normed = [value / length for value, length in zip(sample["logprobs"], lengths, strict=True)]
        assert sample["score"] == float(normed.index(max(normed)) == right) and sample["target"] == right


@pytest.mark.slow
def test_mmlu_is_one_task_of_57_subjects_weighted_by_samples(tmp_path):
    part = measure(tmp_path, ["mmlu"], eval__limit=1)["full"]["parts"]["mmlu"]
    assert len(part["subtasks"]) == 57 == len(part["samples"]) and part["kind"] == "binary"
    assert part["value"] == pytest.approx(sum(s["score"] for s in part["samples"]) / 57)
    assert sum(row["weight"] for row in part["subtasks"].values()) == pytest.approx(1)
    assert {s["id"] for s in part["samples"]} == {f"{name}/0" for name in part["subtasks"]}
    hashes = [s["prompt_hash"] for s in part["samples"]]
    assert len(set(hashes)) == 57, "every subject has its own rows of the one file"


def leaf(scores):
    samples = [{"id": str(number), "score": score} for number, score in enumerate(scores)]
    made = scored_payload("score", "f1", samples, settings={"truncated_samples": 1, "x": len(scores)})
    return made | {"metrics": {}}


def test_group_values_by_hand():
    payloads = {"a": leaf([1.0, 0.0]), "b": leaf([1.0] * 6), "c": leaf([0.0, 0.0, 0.6])}

    def value(share):
        return group_payload(lm_index.Loaded("g", {}, share, True), payloads)

    assert value(None)["value"] == pytest.approx((1 + 6 + 0.6) / 11)
    macro = value({"a": 1 / 3, "b": 1 / 3, "c": 1 / 3})
    assert macro["value"] == pytest.approx((0.5 + 1 + 0.2) / 3)
    assert macro["ci95"][0] < macro["value"] < macro["ci95"][1] <= (1 + 1 + 0.6) / 3
    members = value({"a": 0.5, "b": 0.25, "c": 0.25})
    assert members["value"] == pytest.approx(0.25 + 0.25 + 0.05)
    assert members["subtasks"]["a"] == {
        "metric": "f1",
        "value": 0.5,
        "ci95": payloads["a"]["ci95"],
        "count": 2,
        "weight": 0.5,
        "metrics": {},
    }
    assert members["settings"] == {"truncated_samples": 3, "x": "by task"}


def test_a_subtask_without_samples_has_no_weight():
    payloads = {"a": leaf([1.0, 0.0]), "b": leaf([])}
    made = group_payload(lm_index.Loaded("g", {}, {"a": 0.5, "b": 0.5}, True), payloads)
    assert (
        made["value"] == 0.5
        and made["subtasks"]["b"]["weight"] == 0.0
        and made["subtasks"]["b"]["value"] is None
    )


def test_shares_follow_the_groups_rules():
    by_name = {}
    for name in ("pod_longbench_14", "pod_longbench_few_shot_en"):
        with fixtures():
            loaded = lm_index.load(name, {})
        by_name[name] = loaded.share
    assert sum(by_name["pod_longbench_14"].values()) == pytest.approx(1)
    assert by_name["pod_longbench_14"]["pod_longbench_lcc"] == pytest.approx(1 / 10), (
        "one of two tasks in one of five categories"
    )
    assert by_name["pod_longbench_few_shot_en"]["pod_longbench_trec"] == pytest.approx(1 / 3)


def fixtures():
    return task_data.use(DATA)


@pytest.mark.slow
def test_samples_know_which_text_they_ask_about(tmp_path):
    names = [
        "pod_leval_coursera",
        "pod_coqa_turns",
        "pod_longbench_qasper",
        "pod_infinitebench_2k_longbook_qa_eng",
    ]
    parts = measure(tmp_path, [*names, "arc_easy"])["full"]["parts"]
    shared = {name: [sample.get("cluster") for sample in parts[name]["samples"]] for name in parts}
    for name in names:
        assert all(cluster.startswith(f"{name}/") for cluster in shared[name]), shared[name]
    assert len(shared["pod_coqa_turns"]) > len(set(shared["pod_coqa_turns"])) > 1  # turns of several stories
    assert set(shared["arc_easy"]) == {None}


@pytest.mark.slow
def test_skipped_samples_are_counted_explained_and_not_scored(tmp_path, monkeypatch):
    monkeypatch.setattr("pod.eval.answer.model_set.Models.max_length", lambda self: 650)
    part = measure(tmp_path, ["truthfulqa_mc1"], eval__too_long="skip")["full"]["parts"]["truthfulqa_mc1"]
    lengths = {"0": 620, "1": 617, "2": 634}
    assert len(part["samples"]) + len(part["skipped"]) == 3 and part["skipped"]
    for row in part["skipped"]:
        assert lengths[row["id"]] > 600 and "too long" in row["reason"]
    assert part["value"] == pytest.approx(
        sum(s["score"] for s in part["samples"]) / max(1, len(part["samples"]))
    )


def test_too_long_is_an_error_before_any_computation(tmp_path, monkeypatch):
    monkeypatch.setattr("pod.eval.answer.model_set.Models.max_length", lambda self: 400)
    monkeypatch.setattr(pod, "load_model", lambda *a, **k: pytest.fail("computation began"))
    with pytest.raises(
        ValueError, match=r"truthfulqa_mc1, document 0: a prompt of 620 tokens exceeds the 3\d\d"
    ) as caught:
        measure(tmp_path, ["truthfulqa_mc1"], eval__too_long="error")
    assert "\n" not in str(caught.value)


def test_truncated_prompts_are_counted_and_fit(tmp_path, monkeypatch):
    monkeypatch.setattr("pod.eval.answer.model_set.Models.max_length", lambda self: 400)
    recipe = recipe_of(tmp_path, ["truthfulqa_mc1"])
    run = runner.prepare(recipe, log=lambda line: None)
    assert max(task.longest() for task in run.tasks.values()) <= 400
    part = measure(tmp_path, ["truthfulqa_mc1"])["full"]["parts"]["truthfulqa_mc1"]
    assert part["settings"]["truncated_samples"] == 3 and all(
        s["dropped_tokens"] > 200 for s in part["samples"]
    )


def test_options_change_prompts_and_metric(tmp_path):
    def task(**options):
        recipe = recipe_of(tmp_path, ["gsm8k"], eval__task_options={"gsm8k": options})
        return runner.prepare(recipe, log=lambda line: None).tasks["gsm8k"]

    plain, short, one = task(), task(num_fewshot=1), task(limit=1)
    other = task(metric="exact_match,flexible-extract")
    assert short.longest() < plain.longest() - 100
    assert len(one.leaves["gsm8k"].lengths) == 1 and len(plain.leaves["gsm8k"].lengths) == 3
    assert other.leaves["gsm8k"].metric == ("exact_match", "flexible-extract")


def test_counts_for_the_estimate_by_hand(tmp_path):
    run = runner.prepare(recipe_of(tmp_path, ["arc_easy", "gsm8k"], eval__limit=1), log=lambda line: None)
    arc, gsm = run.tasks["arc_easy"], run.tasks["gsm8k"]
    context = len(run.tokenizer("Question: Which of these melts first in a warm hand?\nAnswer:")["input_ids"])
    answers = [" an ice cube", " a copper coin", " a pebble", " a glass bead"]
    fed = [
        len(run.tokenizer("Answer:" + text)["input_ids"]) - len(run.tokenizer("Answer:")["input_ids"])
        for text in answers
    ]
    prompt, steps = arc.token_counts(find_method("snapkv@64"))
    assert prompt == context and steps == sum(sorted(fed)[::-2])
    assert arc.token_counts(find_method("full")) == (4 * context + sum(fed), 0)
    assert gsm.token_counts(find_method("full"))[1] == 256


REFUSED = [
    ({"tasks": ["arc_esay"]}, r"unknown task 'arc_esay'; did you mean 'arc_easy'\?.*--list-tasks"),
    ({"tasks": ["pod_longbench_quasper"]}, r"unknown task.*did you mean 'pod_longbench_qasper'\?"),
    ({"tasks": ["winogrande"]}, r"data of winogrande: no file in .*allenai/winogrande.*eval\.data_dir"),
    ({"tasks": ["arc_easy"], "eval__data_dir": "/nowhere"}, "eval.data_dir = /nowhere is not a folder"),
    ({"tasks": ["arc_easy"], "eval__task_options": {"arc_easy": {"num_fewshoot": 1}}}, "num_fewshot"),
    (
        {"tasks": ["arc_easy"], "eval__task_options": {"arc_easy": {"metric": "f2"}}},
        "has no metric 'f2': it has acc, acc_norm",
    ),
    (
        {"tasks": ["arc_easy"], "eval__task_options": {"arc_easy": {"limit": 0}}},
        "limit is 0: it should be greater than 0",
    ),
    ({"tasks": ["humaneval"]}, "task humaneval executes code that the model writes: set eval.unsafe_code"),
    (
        {"tasks": ["arc_easy"], "methods": ["snapkv@20"]},
        r"snapkv@20 cannot do arc_easy at 64 tokens.*budget = 20 must exceed window",
    ),
    ({"tasks": ["arc_easy"], "methods": ["razor"]}, "razor cannot do arc_easy"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_bad_input_is_one_line_before_any_computation(tmp_path, monkeypatch, changes, message):
    monkeypatch.setattr("pod.eval.lm.model.PodLM.__init__", lambda *a, **k: pytest.fail("computation began"))
    changes = dict(changes)
    with pytest.raises(ValueError, match=message) as caught:
        measure(tmp_path, changes.pop("tasks"), changes.pop("methods", ["full"]), **changes)
    assert "\n" not in str(caught.value) and not (tmp_path / "eval").exists()


def test_names_that_stand_in_lm_evals_files_are_known_without_its_index(monkeypatch):
    """Names that stand in lm-eval's files are known without its index.

    The index takes seconds, and `--dry-run` of a recipe with its tasks needs none. Names within a group's
    file are none of a task.
    """
    calls = []
    monkeypatch.setattr(
        lm_index, "task_manager", lambda with_lm_eval: calls.append(1) or pytest.fail("indexed")
    )
    lm_index.check_known(["pod_coqa", "gsm8k", "mmlu", "arc_easy", "truthfulqa_gen", "ai2_arc", "passkey"])
    for name in ("gsm8", "gsm8k|mmlu", "anli_r1_flan"):
        with pytest.raises(pytest.fail.Exception, match="indexed"):
            lm_index.check_known(["gsm8k", name])
    assert len(calls) == 3


def test_without_a_sandbox_humaneval_needs_permission_which_holds_until_it_is_scored(tmp_path, monkeypatch):
    monkeypatch.setattr("pod.eval.suites.humaneval.sandbox.available", lambda: False)
    with pytest.raises(ValueError, match=r"bubblewrap .* is missing .* eval.unsafe_code"):
        measure(tmp_path, ["pod_humaneval"])
    assert not (tmp_path / "eval").exists()
    changes = {"eval__unsafe_code": True, "eval__too_long": "skip", "eval__chat_template": "off"}
    measure(tmp_path, ["pod_humaneval"], **changes)
    part = json.loads((tmp_path / "eval/full.json").read_text())["parts"]["pod_humaneval"]
    assert part["value"] == 0.0 and [sample["score"] for sample in part["samples"]] == [0.0, 0.0]


def test_code_below_inline_groups_and_tags_is_found_before_its_module_is_imported(tmp_path, monkeypatch):
    from lm_eval.tasks import TaskManager

    (tmp_path / "harm.py").write_text(
        "import pathlib\npathlib.Path(__file__).with_name('done').touch()\nto = str\n"
    )
    stop = "doc_to_text: !function harm.to\n"
    for name, text in {
        "top": "group: top\ntask:\n  - group: inline\n    task:\n      - task: tagged\n",
        "coded": f"task: coded\ntag: tagged\nunsafe_code: true\n{stop}",
        "free": f"task: free\n{stop}",
    }.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    manager = TaskManager(include_path=tmp_path, include_defaults=False)
    monkeypatch.setattr(lm_index, "task_manager", lambda with_lm_eval: manager)
    for name in ("top", "tagged", "coded"):
        with pytest.raises(ValueError, match="task coded executes code"):
            lm_index.load(name, {})
    assert not (tmp_path / "done").exists()
    with (
        pytest.raises(ValueError),
        task_data.use(None, unsafe_code=True),
    ):  # it has no data set, which is found out later
        lm_index.load("top", {})
    assert (tmp_path / "done").exists()
    (tmp_path / "done").unlink()
    with pytest.raises(ValueError) as caught:
        lm_index.load("free", {})
    assert "executes code" not in str(caught.value)


def test_chat_rule_and_a_tokenizer_without_template(tmp_path, monkeypatch):
    def format_of(template, setting):
        from pod.eval.answer.model_set import Models

        tokenizer = Models(recipe_of(tmp_path, ["arc_easy"])).tokenizer()
        tokenizer.chat_template = template
        monkeypatch.setattr("pod.eval.answer.model_set.Models.tokenizer", lambda self: tokenizer)
        recipe = recipe_of(
            tmp_path, ["pod_longbench_qasper", "pod_longbench_trec"], eval__chat_template=setting
        )
        run = runner.prepare(recipe, log=lambda line: None)
        return {
            name.rpartition("_")[2]: task.leaves[name].rule.chat_template for name, task in run.tasks.items()
        }

    template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|bot|>{% endif %}"
    )
    assert format_of(template, "auto") == {"qasper": True, "trec": False}
    assert format_of(template, "on") == {"qasper": True, "trec": True}
    assert format_of(template, "off") == {"qasper": False, "trec": False}
    assert format_of(None, "auto") == {"qasper": False, "trec": False}
    with pytest.raises(
        ValueError, match=r"eval.chat_template is on and the tokenizer of .* has no chat template"
    ):
        format_of(None, "on")


def test_corrected_right_answers_change_the_score_and_feed_nothing(tmp_path, monkeypatch):
    """A data file that was corrected under its old name: the prompts are the same, the scores are not."""
    file = tmp_path / "data" / "longbench" / "qasper.jsonl"
    file.parent.mkdir(parents=True)
    rows = [json.loads(line) for line in (DATA / "longbench/qasper.jsonl").read_text().splitlines()]

    def value():
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        recipe = recipe_of(tmp_path, ["pod_longbench_qasper"], eval__data_dir=str(tmp_path / "data"))
        return runner.evaluate(recipe, log=lambda line: None)["full"]["parts"]["pod_longbench_qasper"]

    before = value()
    assert before["settings"]["question"] == "put after the text is compressed"
    monkeypatch.setattr(pod, "load_model", lambda *a, **k: pytest.fail("loaded again"))
    assert value() == before
    for row, sample in zip(rows, before["samples"], strict=False):
        row["answers"] = [sample["answer"] or "."]
    assert value()["value"] > before["value"]


def test_a_task_that_two_groups_share_is_answered_once(tmp_path, monkeypatch):
    fed = []
    original = PodLM._generate

    def counted(self, items):
        fed.extend(item.key for item in items)
        return original(self, items)

    monkeypatch.setattr(PodLM, "_generate", counted)
    names = ["pod_longbench_qasper", "pod_longbench_trec"]
    groups = {"a": names[:1], "b": names}
    for tasks in groups.values():
        recipe = recipe_of(tmp_path, tasks, eval__data_dir=str(DATA))
        runner.evaluate(recipe, log=lambda line: None)
    assert len(fed) == len(set(fed))


def test_whole_texts_in_other_windows_are_another_input(tmp_path, monkeypatch):
    """Whole texts in other windows are another input.

    A model of a shorter limit joins: texts are scored in shorter windows, so the old numbers of the others do
    not hold.
    """
    folder = tmp_path / "data/EleutherAI/wikitext_document_level/wikitext-2-raw-v1"
    folder.mkdir(parents=True)
    for split in ("train", "validation", "test"):
        (folder / f"{split}.jsonl").write_text(json.dumps({"page": " ".join(["a word"] * 40)}) + "\n")

    def found(limit):
        monkeypatch.setattr("pod.eval.answer.model_set.Models.max_length", lambda self: limit)
        recipe = recipe_of(tmp_path, ["wikitext"], eval__data_dir=str(tmp_path / "data"))
        run = runner.prepare(recipe, log=lambda line: None)
        return runner.measure(run, run.method_runners["full"], run.tasks["wikitext"])["samples"][0]

    whole, cut = found(512), found(32)
    assert whole["score"] != cut["score"] and whole["prompt_hash"] != cut["prompt_hash"]
