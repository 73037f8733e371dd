"""A prepared step, and whether it still serves the model that it was made of."""

import operator
from collections.abc import Callable
from typing import Any

from torch import Tensor


class Program:
    """A prepared step of one model, with its modules, and its weights at their addresses.

    A graph would go on reading the weights where they were when it was captured. ``serves`` is asked before
    every token, so it runs in C: no loop of Python over the weights.

    Attributes:
        run: makes the step.
    """

    def __init__(self, model: Any, run: Callable[[], Tensor]):
        self.model, self.run = model, run
        self._children = [module._modules for module in model.modules() if module._modules]
        self._children_then = [dict(children) for children in self._children]
        owned = [
            (module._parameters, name)
            for module in model.modules()
            for name, _ in module.named_parameters(recurse=False)
        ]
        self._owners = [parameters for parameters, _ in owned]
        self._names = [name for _, name in owned]
        self._addresses_then = self._addresses()

    def serves(self, model: Any) -> bool:
        """Whether this is the model of the step, with the same modules and every weight at its address."""
        if self.model is not model or self._children != self._children_then:
            return False
        return self._addresses() == self._addresses_then

    def _addresses(self) -> list[int]:
        """Addresses of the weights that the modules have now."""
        return list(map(Tensor.data_ptr, map(operator.getitem, self._owners, self._names)))
