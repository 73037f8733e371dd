"""What looks at a model between the steps of its training."""

from typing import Any, Protocol


class Observer(Protocol):
    """Called by all ranks after every step; returns numbers for the metrics of that step.

    It changes nothing that training depends on: no weight, no random state, no position in the data.
    """

    def observe(self, trainer: Any, step: int) -> dict[str, float]: ...
