"""A task that measures all methods in turns, in one process."""

import json
import re
import sys
import types

from own_runs import SETTINGS, write_place

from pod.eval import runner
from pod.eval.estimate import estimate
from pod.eval.method_and_task_lists import list_tasks
from pod.eval.suites import task_base
from pod.eval.suites.task_base import SideBySideTask
from pod.measure.machine import environment
from pod.recipe import load_recipe


class Counted(SideBySideTask):
    """Measures of every method how many methods take turns."""

    name = "counted"
    title = "count"
    about = "how many methods take turns in one process."
    length_setting = "eval.text_length"

    def spans(self):
        return []

    def token_counts(self, method):
        return 7, 3

    def asked(self, layout):
        return "counted"

    def measure(self, layout, method_runners, log):
        part = {"asked": self.asked(layout), "environment": environment(), "count": len(method_runners)}
        return dict.fromkeys(method_runners, part), {}

    def headline(self, parts):
        return f"{len(parts)} methods"


def test_any_task_may_measure_all_methods_side_by_side(tmp_path, monkeypatch):
    """A file in the folder of tasks is enough: nothing else knows which tasks take turns."""
    place = write_place(tmp_path)
    module = types.ModuleType("pod.eval.tasks.counted")
    module.Counted = Counted
    monkeypatch.setitem(sys.modules, module.__name__, module)
    names = [*task_base.names(), "counted"]
    monkeypatch.setattr(task_base, "names", lambda: names)
    settings = SETTINGS | {
        "output_dir": str(tmp_path / "out"),
        "eval.text": [str(place / "text.txt")],
        "eval.methods": ["full", "streamingllm@64"],
        "eval.tasks": ["counted"],
        "eval.steps": ["answer", "score"],
    }
    recipe = load_recipe(None, [f"{key}={json.dumps(value)}" for key, value in settings.items()])
    lines: list[str] = []
    results = runner.evaluate(recipe, log=lines.append)
    assert [result["parts"]["counted"]["count"] for result in results.values()] == [2, 2]
    assert lines[0] == "count: all methods in turns …" and lines[1].startswith("count: 2 methods (")
    (date,) = {result["parts"]["counted"]["environment"]["date"] for result in results.values()}
    runner.evaluate(recipe, log=lines.append)
    assert lines[2:] == [f"count: kept from {date}"]
    assert len(re.findall(r" 7 prompt tokens +3 decode steps", estimate(recipe))) == 2
    assert "\ncounted: how many methods take turns" in list_tasks()
