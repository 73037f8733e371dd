"""``Program``: a prepared decode step, which knows whether its model is still as it was."""

import operator
from collections.abc import Callable
from typing import Any

from torch import Tensor


class Program:
    """A prepared step of one model. It records the model's modules and the addresses of its weights.

    A graph reads the weights at the addresses that they had when it was recorded. So a step must be prepared
    anew when a weight or a module was replaced. ``serves`` tells this, and is called before every token.
    Therefore it runs in C, without a loop of Python over the weights.

    Attributes:
        run: makes the step, and returns its result.
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
        """The addresses of all weights that the modules have now."""
        return list(map(Tensor.data_ptr, map(operator.getitem, self._owners, self._names)))
