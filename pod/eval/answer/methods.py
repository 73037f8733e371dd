"""The methods of a recipe: what is written in `eval.methods`, and what an evaluation must know about each.

`pod.registry` has the facts. This file adds what only an evaluation has: the weights that a method runs on, a
budget that follows PoD's bytes, names of result files. It needs no torch.
"""

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from pod import registry
from pod.notation import Budget, parse, unknown
from pod.registry.method import AXES, Method


@dataclass(frozen=True, kw_only=True)
class EvaluatedMethod:
    """One row of a report: a method, or several joined, with its weights, budget and options.

    `grows`, `reads_any_length` and `one_shot` are as in `pod.registry.method`.

    Attributes:
        name: as in the recipe, in canonical spelling: `pod+snapkv[window=16]+int4@25%`.
        spec: its parts as `pod.make_cache` takes them, without parameters and budget; None: the layout of the
            model itself.
        model: `dense` (recipe.model.path), `unadapted` (the same weights under the plan, no training),
            `adapted` (the PoD export) or a name in eval.models.
        takes_budget: whether it drops or skips tokens, and so takes a budget.
        title: what it does, in a few words.
        budget: tokens, or a share of each prompt. If it is None and the method takes a budget, the method
            gets as many tokens as fill the bytes that `pod` holds.
        options: parameters that stand in its name, as `simlayerkv[threshold=0.8]`.
    """

    name: str
    spec: str | None
    model: str
    takes_budget: bool = False
    grows: bool = True
    one_shot: bool = False
    reads_any_length: bool = False
    title: str = ""
    budget: Budget | None = None
    options: dict[str, Any] = field(default_factory=dict, hash=False)

    @property
    def fills_pod_bytes(self) -> bool:
        """Whether its budget follows what PoD holds."""
        return self.takes_budget and self.budget is None

    @property
    def file_name(self) -> str:
        """The name of its result file."""
        return f"{safe_name(self.name)}.json"


UNADAPTED = "pod-unadapted"
"""The name of PoD on the dense weights."""
BASE = "full"
"""The name of the method that every other method is compared with."""
TRAINED = "model:dense_trained"
"""The name of the dense model trained on the tokens of PoD's adaptation.

Where a report has its row, PoD's adapted weights are compared with it.
"""


def _alone(method: Method, model: str = "dense") -> EvaluatedMethod:
    """A method of the registry by itself."""
    return EvaluatedMethod(
        name=method.name,
        spec=method.name,
        model=model,
        takes_budget=method.takes_budget,
        grows=method.grows,
        one_shot=method.one_shot,
        reads_any_length=method.reads_any_length,
        title=method.title,
    )


def _all_alone() -> dict[str, EvaluatedMethod]:
    """Every method by itself, by name. `pod` is there twice: with weights that were adapted, and without.

    Layouts that a model was trained with are not there: such a model is one of `eval.models`.
    """
    found = {}
    for name, method in registry.METHODS.items():
        if name == "pod":
            found["pod"] = replace(_alone(method, "adapted"), title="PoD, trained with the plan")
            title = "PoD without training: the dense weights with a plan"
            found[UNADAPTED] = replace(_alone(method, "unadapted"), name=UNADAPTED, title=title)
        elif not method.trained:
            found[name] = _alone(method)
    return found


EVALUATED_METHODS = _all_alone()
"""Every method that may be a part of a method's name, by its own name, in the order of a report's rows."""


def find_method(name: str) -> EvaluatedMethod:
    """The method that a text such as `pod+snapkv[window=16]+int4@25%` names (see `pod.notation`).

    Its `name` is in canonical spelling. A method that drops tokens and has no budget, or the budget `pod`,
    gets as many tokens as fill the bytes that PoD holds; so `snapkv@pod` is `snapkv`. `model:cla` is the
    model `cla` of `eval.models` with its own layout. `pod-unadapted` is the plan on the dense weights.

    Raises:
        ValueError: for an unknown method, naming the nearest; for a model's name that is not allowed; for a
            budget of a method that takes none. Whether the parts go together, and which parameters they
            have, is checked by `pod.make_cache`.
    """
    written = parse(name)
    if written.names[0].startswith("model:"):
        found = _own_model(written.plain)
    else:
        for part in written.names:
            if part not in EVALUATED_METHODS:
                raise unknown("method", part, EVALUATED_METHODS)
        written = written.in_order(_axis)
        found = _joined([EVALUATED_METHODS[part] for part in written.names], written.plain)
    if written.budget is not None and not found.takes_budget:
        raise ValueError(f"method {name!r}: {written.plain} takes no budget: leave out @{written.budget}")
    budget = None if written.budget is None or written.budget.is_pod else written.budget
    said = str(replace(written, budget=budget))
    if not written.params:
        return replace(found, name=said, budget=budget)
    options = ", ".join(f"{key} = {value}" for key, value in sorted(written.params.items()))
    title = f"{found.title}; {options}"
    return replace(found, name=said, budget=budget, options=written.params, one_shot=False, title=title)


def _axis(part: str) -> int:
    """The position of a part's axis in `AXES`. The parts of a name are sorted by it."""
    name = "pod" if part == UNADAPTED else part
    return list(AXES).index(registry.METHODS[name].axis)


def _own_model(name: str) -> EvaluatedMethod:
    kind = name.removeprefix("model:")
    if not kind.isidentifier() or kind in ("dense", "unadapted", "adapted"):
        raise ValueError(
            f"method {name!r}: write a name of eval.models after `model:`, "
            "other than dense, unadapted and adapted"
        )
    return EvaluatedMethod(name=name, spec=None, model=kind, title=f"the model {kind} with its own layout")


def _joined(parts: list[EvaluatedMethod], plain: str) -> EvaluatedMethod:
    """The method that several parts make together.

    Args:
        plain: its name without parameters and budget, but with inner methods, as `imdc(snapkv)+int4`.
    """
    first = parts[0]
    if plain == first.name:
        return first
    return EvaluatedMethod(
        name=plain,
        spec=plain.replace(UNADAPTED, "pod"),
        model=next((part.model for part in parts if part.model != "dense"), "dense"),
        takes_budget=any(part.takes_budget for part in parts),
        grows=all(part.grows for part in parts),
        reads_any_length=first.reads_any_length,
        title="; ".join(part.title for part in parts),
    )


def safe_name(name: str) -> str:
    """A method's name as a file name.

    `imdc(snapkv)[function=sqrt]@25%` → `imdc_snapkv__function=sqrt_@25p`. A name of more than 120 characters,
    or with characters other than letters, digits and `_.,=+@-()[]:%`, ends in a digest of the name.
    """
    text = name.replace("%", "p")
    safe = re.sub(r"[^\w.,=+@-]", "_", text)
    if len(safe) <= 120 and re.fullmatch(r"[\w.,=+@()\[\]:-]*", text):
        return safe
    return f"{safe[:120]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def check_names(kind: str, names: object, find: Callable[[str], object]) -> None:
    """Refuse a list of the `eval` section that is empty, repeats a name, or has a name that is not known.

    Two names that would give result files of one name count as a repetition.

    Args:
        kind: `method` or `task`, for messages.
        find: raises ValueError for a name that is not known.
    Raises:
        ValueError: for such a list.
    """
    if not isinstance(names, list) or not names:
        raise ValueError(f"eval.{kind}s must be a list of at least one {kind}, got {names!r}")
    for name in names:
        find(name)
    if len({safe_name(str(name)).lower() for name in names}) < len(names):
        raise ValueError(f"eval.{kind}s names one {kind} twice: {', '.join(names)}")


def with_repeat_ids(method: EvaluatedMethod, options: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """The options of a method, to which `repeat_ids` is added for kvzip unless it is among them.

    These are KVzip's requests to repeat a text, as token ids of this tokenizer.
    """
    if "kvzip" not in parts_of(method) or "repeat_ids" in options:
        return options
    from pod.modeling.methods.kvzip import repeat_ids  # this loads torch

    return options | {"repeat_ids": repeat_ids(tokenizer)}


def parts_of(method: EvaluatedMethod) -> tuple[str, ...]:
    """The names of a method's parts as `pod.make_cache` takes them. Empty for a model with its own layout."""
    return () if method.spec is None else parse(method.spec).names
