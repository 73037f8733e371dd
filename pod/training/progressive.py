"""Sharing that grows during training: the plan of every step."""

from pod.modeling.sharing import SharingPlan


class PlanSchedule:
    """Which plan holds at which step.

    Args:
        stages: (first step, plan), steps rising from 0.
    """

    def __init__(self, stages: list[tuple[int, SharingPlan]]):
        self.stages = stages

    def plan_at(self, step: int) -> SharingPlan:
        """The plan of step `step`, counted from 0."""
        return [plan for first, plan in self.stages if first <= step][-1]
