"""The methods that an evaluation can compare, and what it must know about each.

This file needs the standard library only.
"""

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from pod.notation import Budget, parse, unknown


@dataclass(frozen=True, kw_only=True)
class EvaluatedMethod:
    """One way to hold the KV cache, under evaluation.

    Attributes:
        spec: its parts as `pod.make_cache` takes them, without parameters and budget; None: the layout of the
            model itself.
        axis: what it decides, as in `pod.methods()`. Parts of a name stand in the order of AXES.
        model: `dense` (recipe.model.path), `unadapted` (the same weights under the plan, no training),
            `adapted` (the PoD export) or a name in eval.models.
        takes_budget: it drops or skips tokens, so it is given the budget that fills the bytes that `pod`
            holds.
        grows: whether a token fed after the prompt adds a slot; False: as many leave as come.
        one_shot: one forward pass without a cache equals its decode path (tests/eval/test_perplexity.py
            proves it), so that perplexity may be scored by that pass. A method that compresses must never say
            so.
        unbounded: no distance grows with the prompt, so that it may be longer than what the model was trained
            on.
    """

    name: str
    spec: str | None
    model: str
    takes_budget: bool = False
    grows: bool = True
    one_shot: bool = False
    unbounded: bool = False
    title: str = ""
    axis: str = "selection"
    budget: Budget | None = None
    """Tokens, or a share of each prompt.

    None for a method that takes a budget: as many as fill PoD's bytes.
    """
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    """Parameters that stand in its name, as `simlayerkv[threshold=0.8]`."""

    @property
    def fills_pod_bytes(self) -> bool:
        """Whether its budget follows what PoD holds."""
        return self.takes_budget and self.budget is None

    @property
    def file_name(self) -> str:
        """The name of its result file."""
        return f"{safe_name(self.name)}.json"


def _dense(name: str, title: str, takes_budget: bool = True, **more: Any) -> EvaluatedMethod:
    """A method on the dense model, unless told otherwise."""
    known = {"name": name, "spec": name, "model": "dense", "takes_budget": takes_budget, "title": title}
    return EvaluatedMethod(**known | more)


BASE = "full"
"""What every method is held against."""
TRAINED = "model:dense_trained"
"""The dense model trained on the tokens of PoD's adaptation.

Where it is a row, PoD's adapted weights are held against it.
"""
METHODS = {
    method.name: method
    for method in (
        _dense("full", "the dense model with its whole cache", False, one_shot=True, axis="layout"),
        _dense("pod", "PoD, trained with the plan", False, one_shot=True, model="adapted", axis="layout"),
        _dense(
            "pod-unadapted",
            "PoD without training: the dense weights with a plan",
            False,
            one_shot=True,
            model="unadapted",
            spec="pod",
            axis="layout",
        ),
        _dense("streamingllm", "keeps the first and the recent tokens", grows=False, unbounded=True),
        _dense(
            "lm_infinite",
            "keeps the first and the recent tokens, with capped distances",
            grows=False,
            unbounded=True,
        ),
        _dense("wa", "keeps the recent tokens only, while it reads the prompt too", grows=False),
        _dense("local_window", "reads the whole prompt, then keeps the recent tokens only", grows=False),
        _dense("snapkv", "keeps tokens to which the end of the prompt attends"),
        _dense("pyramidkv", "like snapkv, with fewer tokens in higher layers"),
        _dense("adakv", "like snapkv, with more tokens in heads that need them"),
        _dense("expected_attention", "keeps tokens to which future queries are expected to attend"),
        _dense("kvzip", "keeps tokens that the model reads when it repeats the text"),
        _dense("h2o", "keeps the recent tokens and those with the most attention so far", grows=False),
        _dense("roco", "keeps tokens with high mean attention, or attention that varies a lot", grows=False),
        _dense("d2o", "merges dropped tokens into similar ones that it keeps", grows=False),
        _dense("imdc", "reads the prompt in shrinking chunks into a growing memory", unbounded=True),
        _dense("im", "reads the prompt in chunks into a growing memory", unbounded=True),
        _dense("fm", "reads the prompt in chunks into a fixed memory", unbounded=True),
        _dense("quest", "keeps all tokens and reads only the best pages"),
        _dense("simlayerkv", "lazy layers keep only a window", takes_budget=False),
        _dense("razor", "retrieval heads keep all tokens, the others a window", takes_budget=False),
        _dense(
            "minicache", "pairs of layers share the directions of their keys and values", takes_budget=False
        ),
        _dense(
            "think",
            "drops the least important channels of the prompt's keys",
            takes_budget=False,
            axis="channels",
        ),
        _dense("kivi", "stores keys and values in 2 bits", takes_budget=False, axis="codec"),
        _dense("int4", "stores keys and values in 4 bits", takes_budget=False, axis="codec"),
        _dense("int8", "stores keys and values in 8 bits", takes_budget=False, axis="codec"),
    )
}


AXES = "layout", "selection", "channels", "codec"
"""Parts of a name stand in this order."""


def find_method(name: str) -> EvaluatedMethod:
    """The method that a text writes (`pod.notation`).

    Its `name` is in canonical spelling: `pod+snapkv[window=16]+int4@25%`.

    Where a method drops tokens and has no budget, or the budget `pod`, it gets as many as fill the bytes that
    PoD holds. So `snapkv@pod` is `snapkv`. `model:cla` is a model of its own, of `eval.models`.
    `pod-unadapted` is the plan on the dense weights.

    Raises:
        ValueError: naming the nearest method there is. Whether the parts go together, and which parameters
            they have, is for `pod.make_cache` to say.
    """
    written = parse(name)
    if written.names[0].startswith("model:"):
        found = _own_model(written.plain)
    else:
        for part in written.names:
            if part not in METHODS:
                raise unknown("method", part, METHODS)
        written = written.in_order(lambda part: AXES.index(METHODS[part].axis))
        found = _joined([METHODS[part] for part in written.names], written.plain)
    if written.budget is not None and not found.takes_budget:
        raise ValueError(f"method {name!r}: {written.plain} takes no budget: leave out @{written.budget}")
    budget = None if written.budget is None or written.budget.is_pod else written.budget
    said = str(replace(written, budget=budget))
    if not written.params:
        return replace(found, name=said, budget=budget)
    options = ", ".join(f"{key} = {value}" for key, value in sorted(written.params.items()))
    title = f"{found.title}; {options}"
    return replace(found, name=said, budget=budget, options=written.params, one_shot=False, title=title)


def _own_model(name: str) -> EvaluatedMethod:
    kind = name.removeprefix("model:")
    if not kind.isidentifier() or kind in ("dense", "unadapted", "adapted"):
        raise ValueError(
            f"method {name!r}: write a name of eval.models after `model:`, "
            "other than dense, unadapted and adapted"
        )
    return EvaluatedMethod(name=name, spec=None, model=kind, title=f"the model {kind} with its own layout")


def _joined(parts: list[EvaluatedMethod], plain: str) -> EvaluatedMethod:
    """One method of several parts.

    Args:
        plain: their names, with the methods inside them.
    """
    first = parts[0]
    if plain == first.name:
        return first
    return EvaluatedMethod(
        name=plain,
        spec=plain.replace("pod-unadapted", "pod"),
        model=next((part.model for part in parts if part.model != "dense"), "dense"),
        axis=first.axis,
        takes_budget=any(part.takes_budget for part in parts),
        grows=all(part.grows for part in parts),
        unbounded=first.unbounded,
        title="; ".join(part.title for part in parts),
    )


def safe_name(name: str) -> str:
    """A method's name as a file name.

    `imdc(snapkv)[function=sqrt]@25%` → `imdc_snapkv__function=sqrt_@25p`. Long names, and those with other
    characters than these, end in digits of their own.
    """
    text = name.replace("%", "p")
    safe = re.sub(r"[^\w.,=+@-]", "_", text)
    if len(safe) <= 120 and re.fullmatch(r"[\w.,=+@()\[\]:-]*", text):
        return safe
    return f"{safe[:120]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def check_names(kind: str, names: object, find: Callable[[str], object]) -> None:
    """Check the names of a list in the `eval` section.

    Raises:
        ValueError: for what `find` does not know, an empty list, repetitions, and names whose files would be
            one.
    """
    if not isinstance(names, list) or not names:
        raise ValueError(f"eval.{kind}s must be a list of at least one {kind}, got {names!r}")
    for name in names:
        find(name)
    if len({safe_name(str(name)).lower() for name in names}) < len(names):
        raise ValueError(f"eval.{kind}s names one {kind} twice: {', '.join(names)}")


def with_requests(method: EvaluatedMethod, options: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """The options of a method. KVzip gets its requests in the words of this tokenizer unless it has them."""
    if "kvzip" not in parts_of(method) or "repeat_ids" in options:
        return options
    from pod.modeling.methods.kvzip import repeat_ids  # this loads torch

    return options | {"repeat_ids": repeat_ids(tokenizer)}


def parts_of(method: EvaluatedMethod) -> tuple[str, ...]:
    """The names of its parts as `pod.make_cache` takes them. Empty for a model with its own layout."""
    return () if method.spec is None else parse(method.spec).names
