"""What a method declares about itself."""

import difflib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pod.modeling.cache import PodCache
from pod.modeling.config import PodConfig


@dataclass(frozen=True, kw_only=True)
class Method:
    """A named rule for what a cache keeps.

    Attributes:
        name: as in ``make_cache(model, name)``.
        paper: source.
        frees: what is not held any more.
        build: ``(config, budget, **parameters) -> PodCache``.
        parameters: name to (default, meaning with unit).
        takes_budget: whether ``budget`` means something; then it is required.
        needs_dense: whether the model must not carry a sharing plan.
    """

    name: str
    paper: str
    frees: str
    build: Callable[..., PodCache]
    parameters: dict[str, tuple[Any, str]] = field(default_factory=dict)
    takes_budget: bool = False
    needs_dense: bool = True

    def make(self, config: PodConfig, budget: int | None, params: dict[str, Any]) -> PodCache:
        """Check the request and build the cache."""
        for name in params:
            if name not in self.parameters:
                near = difflib.get_close_matches(name, self.parameters, n=1)
                known = (
                    f"did you mean {near[0]!r}?" if near else f"it has {', '.join(self.parameters) or 'none'}"
                )
                raise ValueError(f"{self.name} has no parameter {name!r}; {known}")
        if self.needs_dense and not config.sharing_plan.is_dense:
            raise ValueError(
                f"{self.name} needs a model without a sharing plan: load the dense checkpoint, or use 'pod'"
            )
        if self.takes_budget and budget is None:
            raise ValueError(f"{self.name} needs budget=…, the tokens to keep per KV head and layer")
        if not self.takes_budget and budget is not None:
            raise ValueError(f"{self.name} keeps every token and takes no budget; leave budget out")
        values = {name: default for name, (default, _) in self.parameters.items()} | params
        return self.build(config, budget, **values) if self.takes_budget else self.build(config, **values)
