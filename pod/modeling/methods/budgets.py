"""Turn a budget as a caller writes it into tokens per KV head and layer.

A share of the prompt becomes tokens only when a row's first prompt begins.
"""

import math
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any

from pod.modeling.model.cache import PodCache
from pod.modeling.model.config import PodConfig
from pod.modeling.model.rows import GroupedCache
from pod.notation import NO_LIMIT, Budget, Spec, parse_budget

Build = Callable[[int | None], PodCache]
"""Makes an empty cache with a budget in tokens (None = no budget)."""


def one_budget(spec: Spec, budget: Any, compression_ratio: float | None) -> Budget | list[int] | None:
    """The one budget that the arguments of ``make_cache`` give; see there. None = they give none.

    Raises:
        ValueError: more than one of them gives a budget, or the value is not allowed.
    """
    said = {f"@{spec.budget}": spec.budget, f"budget={budget}": budget}
    said[f"compression_ratio={compression_ratio}"] = compression_ratio
    given = [text for text, value in said.items() if value is not None]
    if len(given) > 1:
        raise ValueError(f"{spec.plain} has {' and '.join(given)}: name one of them")
    if compression_ratio is not None:
        is_number = isinstance(compression_ratio, int | float) and not isinstance(compression_ratio, bool)
        if not is_number or not 0 <= compression_ratio < 1:
            raise ValueError(
                f"compression_ratio = {compression_ratio!r} must be a number of at least 0 and less than 1: "
                "0.75 leaves a quarter"
            )
        return Budget(share=1 - Fraction(str(compression_ratio)))
    if budget is None or isinstance(budget, list):
        return spec.budget if budget is None else budget
    return parse_budget(budget)


def cache_of_budget(
    build: Build, budget: Budget | list[int] | None, spec: Spec, config: PodConfig
) -> PodCache:
    """An empty cache with one budget for all rows, or with a budget for each row.

    Args:
        build: makes a cache with a budget in tokens.
        budget: from ``one_budget``. A list gives each row its tokens.
        spec: the methods, for messages.
        config: the model's configuration.

    Raises:
        ValueError: the method refuses the budget, or the budget is ``pod`` and the model has no plan.
    """
    if isinstance(budget, list):
        sizes = list(dict.fromkeys(budget)) or [0]  # an empty list becomes 0, which is refused
        return GroupedCache.of_budgets(
            [build(size) for size in sizes], [sizes.index(size) for size in budget]
        )
    if budget is None or budget.tokens is not None:
        return build(None if budget is None else budget.tokens)
    stand_in = build(NO_LIMIT)  # refuses now whatever is wrong apart from the budget
    of_prompt = _tokens_of_plan(spec, config) if budget.is_pod else budget.of_prompt
    return GroupedCache.by_prompt(stand_in, of_prompt, partial(_build_at_least, build))


def _tokens_of_plan(spec: Spec, config: PodConfig) -> Callable[[int], int]:
    """A function from the length of a prompt to the budget ``pod``, both in tokens.

    The budget is the number of tokens whose full keys and values take as many bytes as the model's plan holds
    of the prompt, rounded down, but at least 1.
    """
    plan = config.sharing_plan
    if config.own_method != "pod" or plan.is_dense:
        raise ValueError(
            f"{spec}: the budget pod is as much as a sharing plan holds, and this model has none: name "
            "tokens as 4096 or a share as 25%; `pod eval` gives methods on the dense model the bytes of "
            "a plan"
        )
    windows = config.num_sink_tokens, config.num_recent_tokens
    return lambda length: max(1, math.floor(length * (1 - plan.saving(length, *windows)) + 1e-9))


def _build_at_least(build: Build, tokens: int) -> PodCache:
    """A cache with a budget of ``tokens``, or with the least budget that the method takes if this is more."""
    try:
        return build(tokens)
    except ValueError:
        return build(least_budget(build, tokens))


def least_budget(build: Build, refused: int) -> int:
    """The least budget in tokens that a method takes. It must refuse ``refused`` and take ``NO_LIMIT``."""
    taken = NO_LIMIT
    while taken - refused > 1:
        middle = (refused + taken) // 2
        try:
            build(middle)
            taken = middle
        except ValueError:
            refused = middle
    return taken
