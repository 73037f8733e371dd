"""The rows of every comparison of methods: each registered one, and the combinations that are promised."""

from dataclasses import dataclass, field
from typing import Any

import pod

COMBINATIONS = (
    "pod+snapkv",
    "pod+pyramidkv",
    "pod+int4",
    "simlayerkv+int4",
    "razor+int4",
    "d2o+int4",
    "snapkv+int4",
    "pod+snapkv+int4",
    "imdc(streamingllm)",
)


@dataclass(frozen=True)
class Row:
    """One cache to measure.

    Attributes:
        spec: as in ``pod.make_cache``.
        options: parameters beside the budget.
        takes_budget: whether it is run at every budget.
        shares: whether the model carries the sharing plan.
    """

    spec: str
    options: dict[str, Any] = field(default_factory=dict)
    takes_budget: bool = False
    shares: bool = False


def rows(options: dict[str, dict[str, Any]]) -> list[Row]:
    """Every method for weights that were not trained for it, and every promised combination.

    Args:
        options: parameters by method name, for those whose defaults do not fit the model or the lengths.
    """
    registry = pod.methods()
    untrained = [name for name, method in registry.items() if not method.trained]
    specs = [*untrained, *COMBINATIONS]
    return [_row(registry, spec, options) for spec in specs]


def _row(registry, spec: str, options: dict[str, dict[str, Any]]) -> Row:
    names = [part.split("(")[0] for part in spec.split("+")]
    values: dict[str, Any] = {}
    for name in names:
        values |= options.get(name, {})
    takes_budget = any(registry[name].takes_budget for name in names)
    return Row(spec, values, takes_budget, shares="pod" in names)
