"""A whole evaluation on a tiny random model: equal bytes, reuse, failures, bad input."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from own_runs import SMALL_TASKS

import pod
from pod.eval import runner
from pod.eval.answer import generate
from pod.eval.estimate import estimate
from pod.eval.method_and_task_lists import list_tasks
from pod.eval.report.merge import merge
from pod.eval.report.report_tables import common_length, overview, percent
from pod.eval.suites import task_base
from pod.eval.tasks import efficiency
from pod.eval.tasks.passkey import Passkey
from pod.modeling.methods.windowed import StreamingLayer
from pod.models import resolve_model
from pod.recipe import load_recipe

METHODS = ["full", "pod", "pod-unadapted", "streamingllm", "snapkv"]
ROOT = Path(__file__).parents[2]
SETTINGS = {
    "model.path": "package:tiny",
    "model.num_sink_tokens": 4,
    "model.num_recent_tokens": 60,
    "eval.batch_size": 2,
    **SMALL_TASKS,
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with text, a plan and an adapted export; the tiny model in a cache of its own."""
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POD_CACHE", str(tmp_path_factory.mktemp("cache")))
        (folder / "text.txt").write_text(
            "".join(f"Sentence number {i}, said {i * 7919 % 97} times. " for i in range(80))
        )
        plan = pod.SharingPlan(lead=[[0, 0], [0, 0], [0, 2], [3, 2]])
        (folder / "out" / "plan").mkdir(parents=True)
        plan.save(folder / "out" / "plan" / "plan.json")
        model = pod.load_model(
            resolve_model("package:tiny"), plan=plan, num_sink_tokens=4, num_recent_tokens=60
        )
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.98)
        model.save_pretrained(folder / "out" / "export")
        yield folder  # POD_CACHE stays set for the tests of this file


def recipe_of(place, **changes):
    settings = SETTINGS | {"output_dir": str(place / "out"), "eval.text": [str(place / "text.txt")]} | changes
    return load_recipe(None, [f"{key}={json.dumps(value)}" for key, value in settings.items()])


@pytest.fixture(scope="module")
def finished(place):
    """(recipe, results) of a complete run, whose files other tests read."""
    recipe = recipe_of(place)
    return recipe, runner.evaluate(recipe, log=lambda line: None)


def read(recipe, name):
    return json.loads((recipe.eval_dir / f"{name}.json").read_text())


def test_every_method_has_a_finished_file(finished):
    recipe, results = finished
    assert list(results) == METHODS
    for name in METHODS:
        content = read(recipe, name)
        assert (content["schema"], content["method"], content["status"]) == (2, name, "finished")
        assert set(content["parts"]) == {"perplexity", "passkey", "efficiency"}
        assert content["environment"]["versions"]["torch"] == torch.__version__
        assert len(content["parts"]["perplexity"]["samples"]) == 3 * 1
        for part in ("perplexity", "passkey"):
            asked = [(s["id"], s["prompt_hash"]) for s in content["parts"][part]["samples"]]
            assert asked == [(s["id"], s["prompt_hash"]) for s in results["full"]["parts"][part]["samples"]]
        assert content["config"]["text_sequences"] == 3
    assert not list(recipe.eval_dir.glob(".*")), "temporary files left behind"


def test_dropping_methods_hold_what_pod_holds(finished):
    recipe, results = finished
    for name in ("streamingllm", "snapkv"):
        stated = results[name]["parts"]["perplexity"]["buckets"][-1]["bytes"]
        assert stated["length"] == 255
        assert stated["bytes_over_pod"] == pytest.approx(1, abs=0.02)
        assert stated["bytes"] < 0.83 * stated["dense_bytes"]
        assert results[name]["parts"]["passkey"]["bytes"][0]["bytes_over_pod"] == pytest.approx(1, abs=0.03)
    speed = {name: read(recipe, name)["parts"]["efficiency"]["lengths"][0] for name in METHODS}
    assert speed["pod"]["bytes"]["bytes_over_pod"] == pytest.approx(1, abs=0.01)
    assert speed["snapkv"]["bytes"]["bytes_over_pod"] == pytest.approx(1, abs=0.02)
    assert sum(speed["pod"]["bytes_by_part"].values()) == speed["pod"]["bytes"]["bytes"]


def test_scores_differ_between_methods_and_add_up(finished):
    _, results = finished
    totals = {name: results[name]["parts"]["perplexity"]["total"]["mean_nll"] for name in METHODS}
    assert len({round(total, 6) for total in totals.values()}) == len(METHODS)
    for result in results.values():
        part = result["parts"]["perplexity"]
        total = sum(s["score"] for s in part["samples"]) / sum(s["tokens"] for s in part["samples"])
        assert part["total"]["mean_nll"] == pytest.approx(total)


def test_lower_perplexity_is_better(finished):
    _, results = finished
    for result in results.values():
        part = result["parts"]["perplexity"]
        assert (part["kind"], part["metric"], part["higher_is_better"]) == ("nll", "perplexity", False)
        assert part["value"] == part["total"]["perplexity"]


def test_one_pass_methods_state_their_check(finished):
    _, results = finished
    for name in ("full", "pod", "pod-unadapted"):
        part = results[name]["parts"]["perplexity"]
        assert part["scored_by"] == "one forward pass"
        assert part["decode_path_check"]["max_abs_difference_nats"] < 2e-4
    assert results["snapkv"]["parts"]["perplexity"]["scored_by"] == "decode path, token by token"


def no_model(monkeypatch):
    monkeypatch.setattr(pod, "make_cache", lambda *a, **k: pytest.fail("measured again"))
    monkeypatch.setattr(pod, "load_model", lambda *a, **k: pytest.fail("loaded again"))


def test_scores_are_made_again_of_what_was_answered(finished, monkeypatch):
    """No model is loaded, and the files are the same."""
    recipe, _ = finished
    before = {name: read(recipe, name)["parts"] for name in METHODS}
    no_model(monkeypatch)
    lines: list[str] = []
    results = runner.evaluate(recipe, log=lines.append)
    assert (
        sum("answered before" in line for line in lines) == 10 and sum("kept from" in x for x in lines) == 1
    )
    assert {name: read(recipe, name)["parts"] for name in METHODS} == before
    assert results["full"]["model"]["parameters"] > 0


def test_a_narrower_run_loses_nothing(place, finished, tmp_path, monkeypatch):
    """A narrower run loses nothing.

    Fewer tasks, one method, another number of resamples or a comment: files and report keep what they had.
    """
    shutil.copytree(place / "out", tmp_path / "out")
    no_model(monkeypatch)
    recipe = recipe_of(place, output_dir=str(tmp_path / "out"))
    before = {name: read(recipe, name)["parts"] for name in METHODS}
    for changes in ({"eval.tasks": ["passkey"]}, {"eval.methods": ["streamingllm"]}):
        runner.evaluate(recipe_of(place, output_dir=str(tmp_path / "out"), **changes), log=lambda line: None)
        assert {name: read(recipe, name)["parts"] for name in METHODS} == before
        rows = (recipe.eval_dir / "report.csv").read_text()
        assert all(f"\n{name},{name}," in rows for name in METHODS) and ",perplexity," in rows


def test_more_samples_are_answered_and_the_old_ones_are_not(place, finished, tmp_path, monkeypatch):
    shutil.copytree(place / "out", tmp_path / "out")
    fed: list[int] = []
    original = generate.generate

    def counted(model, tokenizer, cache, prompts, new_tokens):
        fed.append(len(prompts))
        return original(model, tokenizer, cache, prompts, new_tokens)

    monkeypatch.setattr(generate, "generate", counted)
    changes = {"eval.tasks": ["passkey"], "eval.passkey_depths": [0.0, 0.5, 1.0]}
    recipe = recipe_of(place, output_dir=str(tmp_path / "out"), **changes)
    results = runner.evaluate(recipe, log=lambda line: None)
    assert fed == [1] * len(METHODS), "one new prompt for every method"
    assert len(results["pod"]["parts"]["passkey"]["samples"]) == 3
    assert set(results["pod"]["parts"]) == {"perplexity", "passkey", "efficiency"}


def test_steps_can_run_one_by_one(place, tmp_path, monkeypatch):
    base = {"eval.methods": ["full", "snapkv@60"], "eval.tasks": ["passkey"], "output_dir": str(tmp_path)}

    def go(*steps):
        lines: list[str] = []
        recipe = recipe_of(place, **base, **{"eval.steps": list(steps)})
        return runner.evaluate(recipe, log=lines.append), lines

    _, lines = go("score")
    assert "no saved answers yet; the step `answer` computes them: full: passkey; snapkv@60: passkey" in lines
    go("answer")
    assert not (tmp_path / "eval" / "report.html").exists()
    assert not (tmp_path / "eval" / "full.json").exists()
    no_model(monkeypatch)
    results, _ = go("score", "report")
    assert len(results["snapkv@60"]["parts"]["passkey"]["samples"]) == 2
    assert (tmp_path / "eval" / "report.html").exists()
    with pytest.raises(ValueError, match="eval.steps are some of answer, score, report, got judge"):
        go("judge")


def test_an_error_in_scoring_loses_no_other_method(place, tmp_path, monkeypatch):
    changes = {"eval.methods": ["full", "snapkv@60"], "eval.tasks": ["passkey"], "output_dir": str(tmp_path)}
    runner.evaluate(recipe_of(place, **changes), log=lambda line: None)
    original = Passkey.score

    def broken(self, method_runner, answers):
        if method_runner.method.name == "full":
            raise KeyError("no such score")
        return original(self, method_runner, answers)

    monkeypatch.setattr(Passkey, "score", broken)
    with pytest.raises(
        RuntimeError, match=r"1 of 2 methods failed .full: passkey: KeyError: 'no such score'"
    ):
        runner.evaluate(recipe_of(place, **changes), log=lambda line: None)
    with pytest.raises(KeyError):
        runner.evaluate(recipe_of(place, **changes, **{"eval.steps": ["score"]}), log=lambda line: None)


def test_other_code_measures_again(finished, monkeypatch):
    recipe, _ = finished
    run = runner.prepare(recipe)

    def identities():
        folder = runner.answers_of(run, run.method_runners["snapkv"]).folder
        return folder, run.side_by_side["efficiency"].asked(run.models.reference_layout())

    before = identities()
    assert before == identities()
    for place in (runner, efficiency):
        monkeypatch.setattr(place, "code_identity", lambda *more: f"edited {more}")
    after = identities()
    assert after[0] != before[0] and after[1] != before[1]


def test_changed_model_is_measured_again(place, tmp_path):
    recipe = recipe_of(
        place, output_dir=str(tmp_path), **{"eval.methods": ["full"], "eval.tasks": ["perplexity"]}
    )
    runner.evaluate(recipe, log=lambda line: None)
    lines: list[str] = []
    recipe.model.num_recent_tokens = 61
    runner.evaluate(recipe, log=lines.append)
    assert not any("answered before" in line for line in lines)
    assert any("full: perplexity left out: they are of another model" in line for line in lines)
    assert len(list((tmp_path / "eval" / "answers").glob("full.*"))) == 2, "the old answers stay"


def test_retraining_does_not_touch_results_of_other_models(place, tmp_path):
    changes = {"model.plan": str(place / "out/plan/plan.json"), "eval.pod_model": str(tmp_path / "export")}
    changes |= {"eval.methods": ["pod", "snapkv"], "eval.tasks": ["perplexity"]}
    recipe = recipe_of(place, output_dir=str(tmp_path), **changes)
    shutil.copytree(place / "out" / "export", tmp_path / "export")
    runner.evaluate(recipe, log=lambda line: None)
    weights = tmp_path / "export" / "model.safetensors"
    weights.write_bytes(bytes([*weights.read_bytes()[:-1], 1]))
    lines: list[str] = []
    runner.evaluate(recipe, log=lines.append)
    known = [line.partition(":")[0] for line in lines if "answered before" in line]
    assert known == ["snapkv"]


def test_bytes_follow_the_bits_of_a_plan(place, tmp_path):
    """A plan that packs a layer holds fewer bytes: methods at PoD's bytes are not the same row any more."""
    held = {}
    for bits in (None, (16, 16, 4, 4)):
        plan = pod.SharingPlan(lead=[[0, 0], [0, 0], [0, 2], [3, 2]], bits=bits)
        plan.save(tmp_path / "plan.json")
        changes = {
            "model.plan": str(tmp_path / "plan.json"),
            "eval.methods": ["snapkv"],
            "eval.tasks": ["passkey"],
        }
        recipe = recipe_of(place, output_dir=str(tmp_path / "out"), **changes)
        content = runner.evaluate(recipe, log=lambda line: None)["snapkv"]
        held[bits] = content["row"], content["parts"]["passkey"]["bytes"][0]["pod_bytes"]
    (plain, more), (packed, less) = held.values()
    assert less < more and plain != packed


def out_of_sinks(*_):
    raise RuntimeError("out of\nsinks")


def test_failed_method_is_recorded_and_the_others_go_on(place, tmp_path, monkeypatch):
    recipe = recipe_of(place, output_dir=str(tmp_path), **{"model.plan": str(place / "out/plan/plan.json")})
    recipe.eval.methods = ["streamingllm", "full"]
    monkeypatch.setattr(StreamingLayer, "attend", out_of_sinks)
    with pytest.raises(RuntimeError, match=r"1 of 2 methods failed .*streamingllm.*out of sinks"):
        runner.evaluate(recipe, log=lambda line: None)
    failed, fine = read(recipe, "streamingllm"), read(recipe, "full")
    assert failed["status"] == "failed" and list(failed["failed"]) == ["perplexity", "passkey", "efficiency"]
    assert set(failed["failed"].values()) == {"RuntimeError: out of sinks"}
    assert fine["status"] == "finished" and {"passkey", "efficiency"} <= fine["parts"].keys()
    report = (recipe.eval_dir / "report.html").read_text()
    assert "out of sinks" in report and "failed" in report
    monkeypatch.undo()
    results = runner.evaluate(recipe, log=lambda line: None)
    assert all(result["status"] == "finished" and len(result["parts"]) == 3 for result in results.values())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"eval.pod_model": "/nowhere"},
            "'pod' needs the trained model, and there is none in /nowhere: run `pod export`",
        ),
        (
            {"eval.pod_model": "/nowhere", "export.format": "vllm"},
            "'pod' needs the trained model, and there is none in /nowhere: run `pod export --format hf`",
        ),
        (
            {"eval.text_sequences": 3000},
            "text for perplexity .eval.text.: asked for 3000 sequences of 256 tokens, but only ",
        ),
        ({"eval.passkey_lengths": [100]}, "passkey prompt of 100 tokens is too short"),
        ({"model.plan": "/nowhere.json"}, "model.plan: /nowhere.json does not exist"),
        ({"eval.text": ["/nowhere.txt"]}, "nowhere.txt"),
        (
            {"eval.efficiency_lengths": [9000]},
            "efficiency: the dense model reads 8192 tokens, and up to 9006 would be fed; lower "
            r"eval\.efficiency_lengths",
        ),
    ],
)
def test_bad_input_is_refused_before_any_computation(place, changes, message, monkeypatch):
    monkeypatch.setattr(pod, "make_cache", lambda *a, **k: pytest.fail("computation began"))
    with pytest.raises(ValueError, match=message) as caught:
        runner.evaluate(recipe_of(place, **changes), log=lambda line: None)
    assert "\n" not in str(caught.value)


def model_of_256_tokens(folder):
    """The path of a copy of the tiny model that reads 256 tokens."""
    short = folder / "short"
    shutil.copytree(resolve_model("package:tiny"), short)
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 256}))
    return short


@pytest.mark.parametrize(
    ("task", "changes", "setting"),
    [
        ("perplexity", {"eval.text_length": 400}, "eval.text_length"),
        ("passkey", {}, "eval.passkey_lengths"),
        ("niah", {"eval.task_options.niah.lengths": [400]}, "eval.task_options.niah.lengths"),
        (
            "multi_query",
            {"eval.task_options.multi_query.lengths": [600]},
            "eval.task_options.multi_query.lengths",
        ),
    ],
)
def test_the_length_to_lower_is_that_of_the_task(place, tmp_path, task, changes, setting):
    changes = changes | {"model.path": str(model_of_256_tokens(tmp_path)), "eval.methods": ["full"]}
    if task in ("niah", "multi_query"):
        changes[f"eval.task_options.{task}.haystack"] = [str(place / "text.txt")]
    expected = rf"^{task}: the dense model reads 256 .* lower {re.escape(setting)}$"
    with pytest.raises(ValueError, match=expected):
        runner.prepare(recipe_of(place, **{"eval.tasks": [task]}, **changes), log=lambda line: None)


def test_each_methods_own_limit_decides(place, tmp_path):
    """Each method's own limit decides.

    Beyond what the model was trained on, methods run whose distances do not grow. The others are skipped with
    the reason.
    """
    short = model_of_256_tokens(tmp_path)
    methods = ["full", "snapkv@60", "streamingllm@60", "lm_infinite@60", "fm@80", "im@80"]
    changes = {"model.path": str(short), "eval.methods": methods, "eval.tasks": ["passkey"]}
    changes["eval.method_options"] = {name: {"chunk_size": 100, "window": 8} for name in ("fm@80", "im@80")}
    recipe = recipe_of(place, output_dir=str(tmp_path / "out"), **changes)
    results = runner.evaluate(recipe, log=lambda line: None)
    for name in methods:
        refused = results[name]["refused"].get("passkey", "")
        reads = name not in ("full", "snapkv@60")
        assert bool(results[name]["parts"]) is reads
        too_long = "the dense model reads 256 tokens, and up to 424 would be fed"
        assert refused == ("" if reads else too_long)
    with pytest.raises(ValueError, match=f"passkey: {too_long}; lower eval.passkey_lengths"):
        alone = recipe_of(
            place,
            output_dir=str(tmp_path / "out"),
            **changes | {"eval.methods": ["full"], "eval.method_options": {}},
        )
        runner.evaluate(alone, log=lambda line: None)


def test_plan_of_another_size_is_refused_before_any_computation(place, tmp_path, monkeypatch):
    monkeypatch.setattr(pod, "make_cache", lambda *a, **k: pytest.fail("computation began"))
    pod.SharingPlan(lead=[[0] * 5 for _ in range(6)]).save(tmp_path / "plan.json")
    changes = {"model.plan": str(tmp_path / "plan.json"), "eval.methods": ["pod-unadapted"]}
    with pytest.raises(
        ValueError, match=r"plan.json is for 6 layers x 5 KV heads, the model has 4 x 2: make a plan"
    ):
        runner.evaluate(recipe_of(place, output_dir=str(tmp_path), **changes), log=lambda line: None)
    assert not (tmp_path / "eval").exists()


def test_export_under_another_plan_is_refused_before_any_computation(place, tmp_path, monkeypatch):
    monkeypatch.setattr(pod, "make_cache", lambda *a, **k: pytest.fail("computation began"))
    pod.SharingPlan(lead=[[0, 0], [0, 0], [2, 2], [2, 2]]).save(tmp_path / "plan.json")
    changes = {"model.plan": str(tmp_path / "plan.json"), "eval.pod_model": str(place / "out" / "export")}
    with pytest.raises(
        ValueError, match="has another plan than .*plan.json: 'pod' and 'pod-unadapted' would not"
    ):
        runner.evaluate(recipe_of(place, output_dir=str(tmp_path), **changes), log=lambda line: None)
    assert not (tmp_path / "eval").exists()


def test_methods_with_budget_need_a_plan(place, tmp_path):
    recipe = recipe_of(place, output_dir=str(tmp_path), **{"eval.methods": ["full", "snapkv"]})
    with pytest.raises(
        ValueError, match="snapkv: its budget is the size of PoD's cache, and there is neither"
    ):
        runner.evaluate(recipe, log=lambda line: None)


def test_budget_below_a_methods_minimum_is_refused_before_any_computation(place, tmp_path, monkeypatch):
    monkeypatch.setattr("pod.eval.answer.score.score", lambda *a, **k: pytest.fail("computation began"))
    changes = {"eval.tasks": ["perplexity"], "eval.methods": ["full", "snapkv@20"]}
    recipe = recipe_of(place, output_dir=str(tmp_path), **changes)
    with pytest.raises(
        ValueError, match=r"snapkv@20 cannot do perplexity at 255 tokens.*budget = 20 must exceed window = 32"
    ):
        runner.evaluate(recipe, log=lambda line: None)
    assert not (tmp_path / "eval").exists()


def test_nothing_is_dropped_where_pod_drops_nothing(place, tmp_path):
    """Below n_s + n_r tokens PoD holds everything.

    So does a method whose window is longer than the prompt.
    """
    changes = {
        "eval.text_length": 36,
        "eval.min_context": 20,
        "eval.tasks": ["perplexity"],
        "eval.methods": ["full", "snapkv", "pyramidkv"],
        "model.plan": str(place / "out/plan/plan.json"),
    }
    recipe = recipe_of(place, output_dir=str(tmp_path), **changes)
    results = runner.evaluate(recipe, log=lambda line: None)
    totals = {name: results[name]["parts"]["perplexity"]["total"]["mean_nll"] for name in results}
    assert totals["snapkv"] == pytest.approx(totals["full"], rel=1e-6)
    assert totals["pyramidkv"] == pytest.approx(totals["full"], rel=1e-6)
    assert results["snapkv"]["parts"]["perplexity"]["bytes"][-1]["budget_tokens"] == 35


def test_a_method_that_cannot_run_the_model_is_refused_before_any_computation(place, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "pod.eval.answer.score.score_by_forward", lambda *a, **k: pytest.fail("computation began")
    )
    changes = {"eval.tasks": ["perplexity"], "eval.methods": ["full", "razor"]}
    recipe = recipe_of(place, output_dir=str(tmp_path), **changes)
    with pytest.raises(ValueError, match=r"razor cannot do perplexity: .*heads") as caught:
        runner.evaluate(recipe, log=lambda line: None)
    assert "\n" not in str(caught.value)


def test_chunks_that_do_not_fit_a_prompt_are_refused_before_any_computation(place, tmp_path, monkeypatch):
    """IMDC knows only with the prompt's length whether its chunks shrink to nothing."""
    monkeypatch.setattr(
        "pod.eval.answer.score.score_by_forward", lambda *a, **k: pytest.fail("computation began")
    )
    changes = {"eval.tasks": ["perplexity"], "eval.methods": ["full", "imdc"]}
    changes["eval.method_options"] = {"imdc": {"chunk_size": 20, "window": 4}}
    recipe = recipe_of(
        place, output_dir=str(tmp_path), **changes, **{"model.plan": str(place / "out/plan/plan.json")}
    )
    with pytest.raises(ValueError, match=r"imdc cannot do perplexity at .*raise chunk_size"):
        runner.evaluate(recipe, log=lambda line: None)


def test_a_method_with_options_is_scored_through_its_cache(place, tmp_path):
    """PoD's gate skip exists in decoding only: one forward pass would not see it."""
    changes = {
        "eval.tasks": ["perplexity"],
        "eval.methods": ["pod"],
        "eval.pod_model": str(place / "out/export"),
    }
    exact = runner.evaluate(recipe_of(place, output_dir=str(tmp_path), **changes), log=lambda line: None)
    changes["eval.method_options"] = {"pod": {"tau": 0.5}}
    skips = runner.evaluate(recipe_of(place, output_dir=str(tmp_path), **changes), log=lambda line: None)
    exact, skips = (found["pod"]["parts"]["perplexity"] for found in (exact, skips))
    assert exact["scored_by"] == "one forward pass" and skips["scored_by"] == "decode path, token by token"
    assert abs(exact["total"]["mean_nll"] - skips["total"]["mean_nll"]) > 1e-4


def test_the_overview_of_a_whole_run(finished):
    recipe, results = finished
    comparison = merge([recipe.eval_dir])
    rows = {row["method"]: row for row in overview(comparison).texts()}
    assert list(rows) == METHODS
    value = {name: results[name]["parts"]["perplexity"]["value"] for name in METHODS}
    change = percent(value["pod"] / value["full"] - 1, "+")
    assert rows["pod"]["perplexity"].startswith(f"{value['pod']:.2f} {change}")
    assert (rows["full"]["saved"], rows["full"]["× full"]) == ("0%", "1.00")
    held = results["pod"]["parts"]["passkey"]["bytes"]
    assert common_length(comparison.entries) == max(row["length"] for row in held)


@pytest.mark.slow
def test_command_line(place, tmp_path):
    """The launcher works from another folder.

    Unknown names are one line and exit code 2. --dry-run estimates, also tasks of lm-eval.
    """

    def launch(*arguments):
        command = [sys.executable, str(ROOT / "launch" / "run_eval.py"), *arguments]
        return subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=3600, check=False
        )

    wrong = launch("--methods", "full,snapk")
    assert wrong.returncode == 2
    assert wrong.stderr.strip().count("\n") == 0 and "did you mean 'snapkv'" in wrong.stderr
    dry = launch("--methods", "full,snapkv", "--dry-run")
    assert dry.returncode == 0 and "decode steps" in dry.stdout, dry.stderr
    dry = launch("--methods", "full", "--tasks", "pod_longbench_trec", "--limit", "1", "--dry-run", *TINY)
    assert dry.returncode == 0 and "64 decode steps" in dry.stdout, dry.stdout + dry.stderr
    wrong = launch("--tasks", "pod_longbench_tric", "--dry-run")
    assert wrong.returncode == 2 and "did you mean 'pod_longbench_trec'" in wrong.stderr
    assert not list(tmp_path.iterdir())


TINY = ["--set", "model.path=package:tiny", "--data-dir", str(Path(__file__).parent / "data")]


@pytest.mark.slow
def test_an_estimate_says_what_stands_in_the_way(place, tmp_path):
    recipe = recipe_of(place, **{"eval.tasks": ["perplexity", "arc_easy"], "eval.data_dir": str(tmp_path)})
    text = estimate(recipe)
    assert "Not counted: perplexity, arc_easy. As things are, the evaluation would end with: " in text
    assert "data of arc_easy: no file in" in text


def test_list_of_tasks_names_options_suites_and_defaults():
    text = list_tasks()
    assert "\nniah: needle in a haystack" in text
    for name in task_base.names():
        (sentence,) = re.findall(rf"^{name}: (.*)$", text, re.MULTILINE)
        assert len(sentence.split()) > 5 and sentence.endswith("."), "a sentence that says what is measured"
    assert "  samples  (int, default 1)\n      Number of prompts per length and depth" in text
    assert "pod_longbench_14" in text and "  num_fewshot  (int | null, default null)" in text
    assert "\nefficiency: " in text and "max_batch  (list[" in text
