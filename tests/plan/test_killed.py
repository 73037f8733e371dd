"""A killed `pod explore`: the plan stands before its loss is measured, and what was measured is kept."""

import os
import signal
import subprocess
import sys

import pytest

from pod.commands import explore
from pod.modeling.model.sharing import SharingPlan
from pod.plan import choose
from pod.plan import measured_costs as measure_module
from pod.recipe import load_recipe

KILLED = """
import os, signal, sys
from pod.commands import explore
from pod.recipe import load_recipe
from pod.plan import choose
measure, calls = choose._losses_of, []
def killed(*args):
    calls.append(1)
    if len(calls) == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)
    return measure(*args)
choose._losses_of = killed
explore.main(load_recipe(None, sys.argv[2:]))
"""


@pytest.fixture
def overrides(explore_overrides):
    windows = ["model.num_sink_tokens=2", "model.num_recent_tokens=5"]
    return [*explore_overrides, *windows, "explore.target_saving=0.4", "explore.loss_sequences=2"]


def refuse(*args, **kwargs):
    raise AssertionError("measured again")


@pytest.mark.nightly
@pytest.mark.slow
def test_the_plan_stands_before_its_loss_and_a_killed_run_continues(overrides, tmp_path, monkeypatch, capfd):
    folder = tmp_path / "run" / "plan"
    done = subprocess.run([sys.executable, "-c", KILLED, "4", *overrides], env=os.environ, check=False)
    assert done.returncode == -signal.SIGKILL
    cut = SharingPlan.load(folder / "plan.json")
    assert "losses" not in cut.provenance and (folder / "pareto.png").is_file()
    assert (cut.num_sink_tokens, cut.num_recent_tokens, cut.head_dim) == (2, 5, 16)
    for name in ("measure_costs", "measure_query_head_errors"):
        monkeypatch.setattr(measure_module, name, refuse)
    measure, calls = choose._losses_of, []

    def counted(*args):
        calls.append(1)
        return measure(*args)

    monkeypatch.setattr(choose, "_losses_of", counted)
    explore.main(load_recipe(None, overrides))
    assert len(calls) == 12 - 3, "two models, two sequences of text and four prompts"
    plan = SharingPlan.load(folder / "plan.json")
    assert plan == cut and plan.provenance["losses"]["sequences"] == 2
    assert not list(folder.glob("*.partial-*"))
    printed = capfd.readouterr()
    assert "loss, plan, text" in printed.err, "a bar while losses are measured"
    assert "target: save 40.0% at 48 tokens; the plan saves" in printed.out
    explore.main(load_recipe(None, overrides))
    again = SharingPlan.load(folder / "plan.json").provenance["losses"]
    assert again == plan.provenance["losses"], "the same as without an interruption"


def test_solving_shows_its_progress(overrides, monkeypatch, capfd):
    """Bars appear after a second: here at once."""
    monkeypatch.setattr("pod.plan.plan_progress._DELAY", 0)
    changes = ["explore.bits=[16,4]", "explore.budget_length=100000", "explore.loss_sequences=0"]
    explore.main(load_recipe(None, [*overrides, *changes]))
    printed = capfd.readouterr().err
    assert "explore, choices of bits" in printed and "explore, curve" in printed
    explore.main(load_recipe(None, [*overrides, "explore.loss_sequences=0"]))
    assert "explore, order of heads" in capfd.readouterr().err


@pytest.mark.slow
def test_a_plan_saves_at_least_what_was_asked_for(overrides, tmp_path):
    for asked in (0.1, 0.35, 0.5, 0.7):
        explore.main(
            load_recipe(None, [*overrides, "explore.loss_sequences=0", f"explore.target_saving={asked}"])
        )
        plan = SharingPlan.load(tmp_path / "run" / "plan" / "plan.json")
        assert asked - 1e-9 <= plan.saving(48) <= asked + 0.12
