"""What an export refuses; what it writes is tested in test_runs.py."""

import pytest

import pod
from pod.training.checkpoint.export import check_plan


def test_export_under_a_plan_that_was_not_trained_is_refused(tmp_path):
    pod.SharingPlan(lead=[[0, 0], [0, 1]]).save(tmp_path / "plan.json")
    pod.SharingPlan(lead=[[0, 0], [0, 0]]).save(tmp_path / "other.json")
    check_plan(tmp_path, tmp_path / "plan.json")
    with pytest.raises(
        ValueError, match="was trained with another plan than model.plan = .*other.json: unset model.plan"
    ):
        check_plan(tmp_path, tmp_path / "other.json")
