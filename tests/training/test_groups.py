"""A hang is reported, with stacks and exit code 75, before an operation of ranks meets its time limit."""

import pytest
from worker_groups import LIMIT_S

from pod.training.args import TrainArgs
from pod.training.run.start import group_timeout_s
from pod.training.run.watchdog import seconds_to_abort

NCCL_S = 600.0
"""PyTorch's limit for a group of NCCL that is made without one."""


@pytest.mark.parametrize("hang_timeout_s", [0.5, 60.0, 900.0, 1200.0, 3600.0, 86400.0])
def test_the_watchdog_comes_before_the_time_limit(hang_timeout_s, monkeypatch):
    monkeypatch.delenv("POD_GROUP_TIMEOUT_S", raising=False)
    limit = group_timeout_s(TrainArgs(hang_timeout_s=hang_timeout_s))
    reports_after = seconds_to_abort(hang_timeout_s)
    assert reports_after >= hang_timeout_s
    assert limit >= reports_after + 240, "ranks run some time ahead of what their GPU does"


def test_the_usual_watchdog_waits_longer_than_a_group_without_a_limit():
    """Why every group needs a limit of ours."""
    assert seconds_to_abort(TrainArgs().hang_timeout_s) > NCCL_S


@pytest.mark.multiprocess
@pytest.mark.parametrize("rank", [0, 1])
def test_every_group_has_the_limit(groups_results, rank):
    """Those of Ulysses, and the copy of the group of all ranks that DeepSpeed makes for itself."""
    asked, held = (groups_results[f"rank{rank}"][name] for name in ("asked", "held"))
    assert len(asked) >= 3 and set(asked) == {LIMIT_S}
    assert len(held) == 1 + len(asked) and set(held) == {LIMIT_S}
