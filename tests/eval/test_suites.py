"""Every configuration that the suites make is the YAML that was committed, field by field.

It was committed before they were made in memory.
"""

import hashlib
import importlib
import inspect
import json
from pathlib import Path

import pytest
from lm_eval.tasks._index import TaskIndex

from pod.eval.lm import index as lm_index
from pod.eval.suites.configs import find_config, known_to_lm_eval, suite_configs

KNOWN = Path(__file__).parent / "data" / "suite_configs.txt"
"""Name and first 12 hex digits of SHA-256 of the configuration.

The configuration is JSON with sorted keys, a function as `!suite.function`. Those of HumanEval are without
their former `unsafe_code: true`: the suite refuses by itself where it has no sandbox.
"""


def function_name(suite, function):
    """By which name a suite's module knows a function; that of a made one by what it was made of."""
    module = importlib.import_module(f"pod.eval.suites.{suite}.{suite}_tasks")
    named = [name for name, value in vars(module).items() if value is function]
    if named:
        return named[0]
    made_of = inspect.getclosurevars(function).nonlocals
    if "scorer" in made_of:
        return f"{function_name(suite, made_of['scorer'])}_e"
    return function_name(suite, made_of["value"]) if "value" in made_of else f"score_{made_of['task']}"


def plain(suite, value):
    if isinstance(value, dict):
        return {key: plain(suite, item) for key, item in value.items()}
    assert not isinstance(value, tuple), "YAML knows lists only"
    if isinstance(value, list):
        return [plain(suite, item) for item in value]
    return f"!{suite}.{function_name(suite, value)}" if callable(value) else value


def test_configurations_are_those_that_were_yaml_files():
    wanted = dict(line.split() for line in KNOWN.read_text().splitlines())
    found = {}
    for suite, configs in suite_configs().items():
        for name, config in configs.items():
            text = json.dumps(plain(suite, config), sort_keys=True, ensure_ascii=False)
            found[name] = hashlib.sha256(text.encode()).hexdigest()[:12]
    assert len(wanted) == 309 and found == wanted


def test_every_task_has_known_rules():
    known = set(lm_index.Rule.__dataclass_fields__)
    configs = [config for found in suite_configs().values() for config in found.values()]
    tasks = [config for config in configs if "group" not in config]
    assert (len(tasks), len(configs)) == (230, 309)
    for config in tasks:
        name = config["task"]
        rules = config["metadata"]["pod"]
        assert not set(rules) - known, f"{name}: {rules}"
        assert rules["source"] and rules["license"] and rules["kind"] in ("score", "binary", "nll"), name
        assert rules["metric"] in [metric["metric"] for metric in config["metric_list"]], name


def test_lm_eval_knows_exactly_ours_and_a_users_task_of_that_name_goes_before():
    names = [name for found in suite_configs().values() for name in found]
    assert sorted(names) == sorted(lm_index.task_manager(False).all_tasks)
    assert len(names) == len(set(names)) and all(name.startswith("pod_") for name in names)


def test_a_users_file_goes_before_ours(tmp_path):
    (tmp_path / "mine.yaml").write_text("task: pod_coqa\noutput_type: generate_until\n")
    with known_to_lm_eval():
        index = TaskIndex.build([tmp_path])
    assert index["pod_coqa"].yaml_path == tmp_path / "mine.yaml"
    assert index["pod_coqa_turns"].cfg is find_config("pod_coqa_turns")[1]
    assert "pod_coqa_turns" not in TaskIndex.build([tmp_path])


@pytest.mark.parametrize(("name", "suite"), [("pod_ruler_4k_vt", "ruler"), ("pod_longbench", "longbench")])
def test_one_is_found_by_its_name(name, suite):
    found, config = find_config(name)
    assert found == suite and (config.get("group") or config["task"]) == name
    assert find_config("arc_easy") is None
