"""Result files: fingerprints, reuse, what a failure leaves."""

import json
import os

import pytest

from pod.eval import results as results_module
from pod.eval.results import (
    RunResults,
    environment,
    fingerprint,
    identity,
    load_results,
    one_line,
    with_files,
)


def test_part_is_finished_for_its_fingerprint_only(tmp_path):
    run = RunResults(tmp_path / "pod.json", "pod", {"seed": 1})
    run.store("perplexity", "abc", 1.23456, {"total": 5})
    again = RunResults(tmp_path / "pod.json", "pod", {"seed": 1})
    assert again.finished("perplexity", "abc") and not again.finished("perplexity", "abd")
    assert not again.finished("passkey", "abc")
    assert again.content["parts"]["perplexity"]["seconds"] == 1.235


def test_file_of_another_method_schema_or_broken_is_not_used(tmp_path):
    path = tmp_path / "pod.json"
    RunResults(path, "pod", {}).store("perplexity", "abc", 0, {})
    assert not RunResults(path, "full", {}).finished("perplexity", "abc")
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"schema": 0}))
    assert not RunResults(path, "pod", {}).finished("perplexity", "abc")
    path.write_text('{"schema": 1, "meth')
    assert not RunResults(path, "pod", {}).finished("perplexity", "abc")


def test_failure_keeps_what_finished(tmp_path):
    run = RunResults(tmp_path / "pod.json", "pod", {})
    run.store("perplexity", "abc", 0, {})
    run.fail("passkey", KeyError("x"))
    run.fail("niah", ValueError("too\nlong"))
    content = load_results(tmp_path)["pod"]
    assert content["status"] == "failed"
    assert content["failed"] == {"passkey": "KeyError: 'x'", "niah": "too long"}
    assert content["error"] == "passkey: KeyError: 'x'; niah: too long"
    assert list(content["parts"]) == ["perplexity"]
    run.finish()
    content = load_results(tmp_path)["pod"]
    assert (content["status"], content["failed"], content["error"]) == ("finished", {}, None)


def test_keep_drops_outdated_parts(tmp_path):
    run = RunResults(tmp_path / "pod.json", "pod", {})
    run.store("perplexity", "old", 0, {})
    run.store("passkey", "same", 0, {})
    run.keep({"perplexity": "new", "passkey": "same"})
    assert list(run.content["parts"]) == ["passkey"]


def test_identity_sees_content_and_time(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    large = tmp_path / "model.safetensors"
    large.write_bytes(bytes(2 << 20))
    before = identity(tmp_path)
    os.utime(tmp_path / "config.json", ns=(1, 1))
    assert identity(tmp_path) == before, "small files count by content"
    os.utime(large, ns=(1, 1))
    touched = identity(tmp_path)
    assert touched != before
    (tmp_path / "config.json").write_text("{ }")
    assert identity(tmp_path) != touched
    assert identity("owner/name") == "owner/name"


def test_code_is_part_of_what_a_result_depends_on(tmp_path, monkeypatch):
    """An edit of a method, of scoring, of the common code of tasks, another torch; not a new file of the report or a new task."""
    package = tmp_path / "pod"
    for name in (
        "modeling/methods/a.py",
        "eval/perplexity.py",
        "eval/suites/data.py",
        "eval/report/page.py",
        "eval/suites/x/u.py",
    ):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text("1\n")
    monkeypatch.setattr(results_module, "_PACKAGE", package)

    def now():
        results_module.code_identity.cache_clear()
        return results_module.code_identity()

    seen = [now()]
    assert seen == [now()]
    for name in ("modeling/methods/a.py", "eval/perplexity.py", "eval/suites/data.py"):
        (package / name).write_text("2\n")
        seen.append(now())
    (package / "modeling/methods/a.py").rename(package / "modeling/methods/b.py")
    seen.append(now())
    for name in ("eval/report/page.py", "eval/suites/x/u.py"):
        (package / name).write_text("2\n")
        assert now() == seen[-1]
    assert results_module.code_identity("eval/report/*.py") != now()
    monkeypatch.setattr(results_module, "_version", lambda name: "9" if name == "torch" else None)
    seen.append(now())
    assert len(set(seen)) == 6
    results_module.code_identity.cache_clear()


def test_fingerprint_ignores_the_order_of_keys():
    assert fingerprint({"a": 1, "b": [2]}) == fingerprint({"b": [2], "a": 1})
    assert fingerprint({"a": 1}) != fingerprint({"a": 2})


def test_environment_is_json_without_paths():
    text = json.dumps(environment())
    assert os.getcwd() not in text and os.path.dirname(__file__) not in text
    assert {"date", "versions", "hardware", "commit"} <= set(environment())


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("a\n b"), "a b"),
        (RuntimeError("x"), "RuntimeError: x"),
        (ValueError(), "ValueError"),
        (OSError("full"), "full"),
    ],
)
def test_one_line(error, line):
    assert one_line(error) == line


def test_a_file_that_an_option_names_is_known_by_its_content(tmp_path):
    """`razor: {heads: file}` after another launch/explore.py --heads under the same name."""
    file = tmp_path / "heads.json"
    file.write_text("[[0], []]")
    options = {"heads": str(file), "num_recent_tokens": 4, "detector": "prefill"}
    before = with_files(options)
    assert before == with_files(options) and before["num_recent_tokens"] == 4
    assert before["detector"] == "prefill"
    file.write_text("[[], [0]]")
    assert with_files(options) != before


def test_parts_that_a_run_forgets_stay_in_a_file(tmp_path):
    """Another list of tasks in the same folder must not throw hours away."""
    run = RunResults(tmp_path / "pod.json", "pod", {})
    run.store("mmlu", "abc", 1.0, {"value": 5})
    run.keep({"mmlu": "abc"})
    assert not (tmp_path / "replaced").exists()
    helper = RunResults(tmp_path / "pod.json", "pod", {}, writes=False)
    helper.keep({"niah": "abd"})
    assert not (tmp_path / "replaced").exists()
    again = RunResults(tmp_path / "pod.json", "pod", {})
    again.keep({"niah": "abd"})
    again.store("niah", "abd", 1.0, {"value": 6})
    (file,) = (tmp_path / "replaced").iterdir()
    assert json.loads(file.read_text())["parts"]["mmlu"]["value"] == 5
    assert list(load_results(tmp_path)["pod"]["parts"]) == ["niah"]
