"""Caches for the model class where no evaluation hands them over: a method and its budget from lm-eval's model arguments."""

from collections.abc import Iterable
from typing import Any

import pod
from pod.eval.answer.budget import ByteBudgets, without_limit
from pod.eval.answer.methods import Method, find_method

POD_BYTES = "pod"


class MethodCaches:
    """Makes the caches of one method: `caches(length, fed) -> (cache, budget)`.

    Args:
        model: a loaded model.
        method: a spec of `pod.make_cache`, or with its budget as `snapkv@1024`; None: the layout of the model itself.
        budget: tokens per KV head and layer, a share of the tokens as "25%", or "pod": as many as fill the bytes that PoD holds.
        reference: for the budget "pod": a model with the sharing plan.
        options: the method's own parameters.
    Raises: ValueError for whatever does not go together, by making one cache at once.
    """

    def __init__(
        self,
        model: Any,
        method: str | None = None,
        budget: int | str | None = None,
        reference: Any = None,
        options: dict[str, Any] | None = None,
    ):
        self.model, self.options = model, options or {}
        self.method = _method(method, model, budget)
        self.of_pod_bytes = self.method.takes_budget and self.method.budget is None
        if self.of_pod_bytes and reference is None:
            raise ValueError(
                f"method {self.method.name!r} needs a budget: budget=1024 (tokens), budget=25% (of the tokens seen), or budget=pod "
                "with plan=PLAN.json (as many as fill PoD's bytes)"
            )
        self._reference = reference
        self._budgets: ByteBudgets | None = None
        self._cache(1 << 20 if self.of_pod_bytes else self.method.fixed_budget(1 << 20))

    @property
    def one_shot(self) -> bool:
        """Whether one forward equals the decode path: no method that compresses, no plan that packs, no gate skip (tau)."""
        return self.method.one_shot and not self.options and not self.model.config.sharing_plan.packs

    def prepare(self, lengths: Iterable[int]) -> None:
        """Measure PoD's bytes at all lengths that will be asked for (one pass over the longest)."""
        if self.of_pod_bytes and set(lengths):
            self._budgets = ByteBudgets.of(self._reference, lengths)

    def budget(self, length: int, fed: int) -> int | None:
        """The budget at `length` tokens, `fed` of them after the prompt."""
        if not self.of_pod_bytes:
            return self.method.fixed_budget(length) if self.method.takes_budget else None
        if self._budgets is None or length not in self._budgets.bytes_by_part:
            self.prepare([length])
        assert self._budgets is not None
        return self._budgets.tokens(self.method, length, fed)

    def __call__(self, length: int, fed: int) -> tuple[Any, int | None]:
        budget = self.budget(length, fed)
        return self._cache(without_limit(budget, length) if self.of_pod_bytes else budget), budget

    def _cache(self, budget: int | None) -> Any:
        return pod.make_cache(self.model, self.method.spec, budget=budget, **self.options)


def _method(name: str | None, model: Any, budget: int | str | None) -> Method:
    own = model.config.own_method
    if name is None or name == own:
        if budget is not None:
            raise ValueError(f"method {own!r} takes no budget; leave out budget={budget}")
        return Method(name=own, spec=None, model="dense", one_shot=True)
    found = find_method(name)
    if budget is None or (budget == POD_BYTES and found.takes_budget):
        return found
    if found.budget is not None:
        raise ValueError(f"method {name!r} has its budget behind the @; leave out budget={budget}")
    return find_method(f"{name}@{budget}")
