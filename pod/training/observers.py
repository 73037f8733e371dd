"""What looks at a model between the steps of its training."""

from typing import Any


class Observer:
    """Called by all ranks in every step; what it does not define does nothing.

    It changes nothing that training depends on: no weight, no random state, no position in the data.
    """

    def before_update(self, trainer: Any) -> None:
        """After the last backward of a step, before its update: reduced gradients are there, not yet clipped."""

    def observe(self, trainer: Any, step: int) -> dict[str, float]:
        """After the update of step `step` (counted from 1); returns numbers for the metrics of that step."""
        return {}
