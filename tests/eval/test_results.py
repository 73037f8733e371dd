"""Result files: fingerprints, reuse, what a failure leaves."""

import ast
import json
import os
from dataclasses import replace

import pytest

from pod.errors import one_line
from pod.eval import results as results_module
from pod.eval.results import RunResults, fingerprint, with_files
from pod.files import read_mapping
from pod.measure.machine import environment
from pod.registry import METHODS


def test_parts_of_the_same_row_stay_whatever_a_later_run_names(tmp_path):
    RunResults(tmp_path / "pod.json", "pod", {"row": "a"}).store("perplexity", {"total": 5})
    again = RunResults(tmp_path / "pod.json", "pod", {"row": "a"})
    again.store("passkey", {"total": 6})
    assert again.content["parts"] == {"perplexity": {"total": 5}, "passkey": {"total": 6}}
    assert again.left_out == []


def test_parts_of_another_row_method_or_schema_are_not_taken(tmp_path):
    path = tmp_path / "pod.json"
    RunResults(path, "pod", {"row": "a"}).store("perplexity", {})
    other = RunResults(path, "pod", {"row": "b"})
    assert not other.content["parts"] and other.left_out == ["perplexity"]
    assert not RunResults(path, "full", {"row": "a"}).content["parts"]
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"schema": 0}))
    assert not RunResults(path, "pod", {"row": "a"}).content["parts"]
    path.write_text('{"schema": 2, "meth')
    assert not RunResults(path, "pod", {"row": "a"}).content["parts"]


def test_failure_keeps_what_finished(tmp_path):
    run = RunResults(tmp_path / "pod.json", "pod", {})
    run.store("perplexity", {})
    run.fail("passkey", KeyError("x"))
    run.fail("niah", ValueError("too\nlong"))
    content = read_mapping(tmp_path / "pod.json")
    assert content["status"] == "failed"
    assert content["failed"] == {"passkey": "KeyError: 'x'", "niah": "too long"}
    assert list(content["parts"]) == ["perplexity"]
    run.finish()
    content = read_mapping(tmp_path / "pod.json")
    assert (content["status"], content["failed"]) == ("finished", {})


def test_ranks_that_only_help_write_nothing(tmp_path):
    RunResults(tmp_path / "pod.json", "pod", {}, writes=False).store("niah", {})
    assert not list(tmp_path.iterdir())


def test_what_answers_is_part_of_an_answer(tmp_path, monkeypatch):
    """Another method, default, way to ask or torch; not a comment, a title, a prompt or a scorer."""
    package = tmp_path / "pod"
    answering = (
        "modeling/methods/a.py",
        "registry/combine.py",
        "eval/answer/score.py",
        "eval/answer/answer_cache.py",
        "eval/lm/batches.py",
    )
    others = (
        "eval/report/page.py",
        "eval/answer/budget.py",
        "eval/tasks/passkey.py",
        "eval/lm/payload.py",
    )
    for name in (*answering, *others):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text("x = 1\n")
    monkeypatch.setattr(results_module, "_PACKAGE", package)

    def now():
        results_module.code_identity.cache_clear()
        return results_module.code_identity()

    seen = [now()]
    assert seen == [now()]
    for name in answering:
        (package / name).write_text("x = 2\n")
        seen.append(now())
        (package / name).write_text('"""Says what x is."""\n\nx = (\n    2  # two\n)\n')
        assert now() == seen[-1]
    (package / "modeling/methods/a.py").rename(package / "modeling/methods/b.py")
    seen.append(now())
    for name in others:
        (package / name).write_text("x = 2\n")
        assert now() == seen[-1]
    assert results_module.code_identity("eval/report/*.py") != now()
    snapkv = METHODS["snapkv"]
    monkeypatch.setitem(METHODS, "snapkv", replace(snapkv, title="keeps what it wants", paper="none"))
    assert now() == seen[-1]
    wider = {**snapkv.parameters, "window": snapkv.parameters["window"]._replace(default=64)}
    for changed in (replace(snapkv, parameters=wider), replace(snapkv, takes_chunks=True)):
        monkeypatch.setitem(METHODS, "snapkv", changed)
        seen.append(now())
    monkeypatch.setattr(results_module, "version", lambda name: "9" if name == "torch" else None)
    seen.append(now())
    assert len(set(seen)) == 10
    results_module.code_identity.cache_clear()


@pytest.mark.parametrize(
    ("folder", "others"),
    [
        # what these decide stands in an answer's key or in the name of its cache
        # (and where a model lies does not change what it answers)
        ("answer", {"__init__", "budget", "devices", "methods", "model_set", "ranks"}),
        (
            "lm",
            {"__init__", "cli", "command", "index", "payload", "lm_prompts", "lm_tasks", "requests"},
        ),
    ],
)
def test_every_file_that_answers_is_part_of_an_answer(folder, others):
    """A new file in these folders is one that answers, or is named here; a file that moves stays one."""
    patterns, package = results_module._CODE, results_module._PACKAGE
    assert all(any(package.glob(pattern)) for pattern in patterns)
    hashed = {file for pattern in patterns for file in package.glob(pattern)}
    files = set((package / "eval" / folder).glob("*.py"))
    assert {file.stem for file in files - hashed} == others


def test_whatever_answering_code_imports_is_part_of_an_answer_or_does_not_decide_it():
    """A file that moves out of the folders that are hashed stays part of an answer, or is named here."""
    package = results_module._PACKAGE
    hashed = {file for pattern in results_module._CODE for file in package.glob(pattern)}
    imported = {
        found
        for file in hashed
        for name in modules_of(file.read_text(encoding="utf-8"))
        if (found := package.parent / (name.replace(".", "/") + ".py")).is_file()
    }
    assert {file.relative_to(package).as_posix() for file in imported - hashed} == {
        # what these decide stands in an answer's key or in the name of its cache
        *(f"eval/answer/{name}.py" for name in ("budget", "methods", "ranks")),
        *(f"eval/lm/{name}.py" for name in ("index", "payload", "requests")),
        *("eval/results.py", "eval/suites/buckets.py", "tokenizer.py"),
        # a method's facts are a part without this file, which says what facts there are
        "registry/method.py",
        # these keep, check, compile or report, and decide no number
        *("errors.py", "files.py", "measure/machine.py", "schema.py", "toolchain.py", "verbosity.py"),
    }


def modules_of(source):
    """Names of modules of pod that may be imported by a source, among others."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.startswith("pod"):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("pod."))


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
    assert one_line(error, with_class=True) == line


def test_a_file_that_an_option_names_is_known_by_its_content(tmp_path):
    """`razor: {heads: file}` after another `pod explore --heads` under the same name."""
    file = tmp_path / "heads.json"
    file.write_text("[[0], []]")
    options = {"heads": str(file), "num_recent_tokens": 4, "detector": "prefill"}
    before = with_files(options)
    assert before == with_files(options) and before["num_recent_tokens"] == 4
    assert before["detector"] == "prefill"
    moved = file.rename(tmp_path / "elsewhere.json")
    assert with_files({**options, "heads": str(moved)}) == before
    file.write_text("[[], [0]]")
    assert with_files(options) != before
