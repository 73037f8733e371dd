"""The methods that an evaluation can compare, and what it must know about each. Standard library only."""

import contextlib
import difflib
import hashlib
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Method:
    """One way to hold the KV cache, under evaluation.

    spec: what `pod.make_cache` calls it; None: the layout of the model itself.
    model: `dense` (recipe.model.path), `unadapted` (the same weights under the plan, no training), `adapted` (the PoD export) or a name in
        eval.models.
    takes_budget: it drops or skips tokens, so it is given the budget that fills the bytes that `pod` holds.
    grows: how many slots a token fed after the prompt adds (0 = as many leave).
    one_shot: one forward pass without a cache equals its decode path (tests/eval/test_perplexity.py proves it), so that
        perplexity may be scored by that pass. A method that compresses must never say so.
    unbounded: no distance grows with the prompt, so that it may be longer than what the model was trained on.
    """

    name: str
    spec: str | None
    model: str
    takes_budget: bool = False
    grows: bool = True
    one_shot: bool = False
    unbounded: bool = False
    title: str = ""
    budget: int | float | None = None
    """fixed instead of PoD's bytes: tokens per KV head and layer, or (float) the share of the tokens seen"""
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    """parameters that stand in its name, as `simlayerkv[threshold=0.8]`"""

    @property
    def file_name(self) -> str:
        """Its result file."""
        return f"{safe_name(self.name)}.json"

    def fixed_budget(self, length: int) -> int | None:
        """The budget at a length when it does not follow PoD's bytes. Raises: ValueError when a share leaves no token."""
        if not isinstance(self.budget, float):
            return self.budget
        tokens = int(self.budget * length)
        if tokens < 1:
            raise ValueError(f"{self.name}: {self.budget:.1%} of {length} tokens is no token")
        return tokens


def _dense(name: str, title: str, takes_budget: bool = True, **more: Any) -> Method:
    """On the dense model, unless told."""
    known = {"name": name, "spec": name, "model": "dense", "takes_budget": takes_budget, "title": title}
    return Method(**known | more)


_REPEAT = "\n\nRepeat the previous context exactly."
_REPEAT_FROM = "\n\nRepeat the part of the previous context exactly, starting with "
"""KVzip's requests: for the first chunk of a text, and for a later one."""
BASE = "full"
"""What every method is held against."""
TRAINED = "model:dense_trained"
"""The dense model trained on the tokens of PoD's adaptation: where it is a row, PoD's adapted weights are held against it."""
METHODS = {
    method.name: method
    for method in (
        _dense("full", "dense model, every key and value", False, one_shot=True),
        _dense("pod", "PoD, adapted weights", False, one_shot=True, model="adapted"),
        _dense(
            "pod-unadapted", "PoD, dense weights + plan", False, one_shot=True, model="unadapted", spec="pod"
        ),
        _dense("streamingllm", "sinks + recent", grows=False, unbounded=True),
        _dense("lm_infinite", "sinks + recent, distances capped", grows=False, unbounded=True),
        _dense("wa", "recent tokens only, prompt masked too", grows=False),
        _dense("local_window", "recent tokens only, full prompt", grows=False),
        _dense("snapkv", "tokens picked by the prompt's end"),
        _dense("pyramidkv", "tokens picked by the prompt's end, fewer in higher layers"),
        _dense("adakv", "tokens picked by the prompt's end, more of them in heads that need them"),
        _dense("expected_attention", "tokens that queries to come should attend to"),
        _dense("kvzip", "what the model reads when it repeats the text"),
        _dense("h2o", "heavy hitters + recent", grows=False),
        _dense("roco", "robust heavy hitters", grows=False),
        _dense("d2o", "dropped tokens merged into kept ones", grows=False),
        _dense("imdc", "growing memory, shrinking chunks", unbounded=True),
        _dense("im", "growing memory", unbounded=True),
        _dense("fm", "fixed memory", unbounded=True),
        _dense("quest", "reads the best pages, holds all"),
        _dense("simlayerkv", "lazy layers keep a window", takes_budget=False),
        _dense("razor", "retrieval heads whole, others a window", takes_budget=False),
        _dense("minicache", "pairs of layers share directions", takes_budget=False),
        _dense("think", "prompt's keys without their least channels", takes_budget=False),
        _dense("kivi", "2 bits per number", takes_budget=False),
        _dense("int4", "4 bits per number", takes_budget=False),
        _dense("int8", "8 bits per number", takes_budget=False),
    )
}


def find_method(name: str) -> Method:
    """The method of a name, of a combination such as `pod+snapkv+int4` or `imdc(streamingllm)`, or of a model of its own, `model:cla`.

    `snapkv@1024` has a budget of 1,024 tokens, `snapkv@25%` one of a quarter of the tokens, at every length. Parameters may stand behind
    each part: `d2o[merge=average,alpha=2]@25%`, `imdc(snapkv)[function=sqrt]@1024`; their values are those of JSON, a text without
    quotes, or `0-15` for the list of these whole numbers.

    Raises: ValueError naming the nearest method there is. Whether the parts go together, and which parameters they have, is for
    `pod.make_cache` to say.
    """
    if name in METHODS:
        return METHODS[name]
    if "[" in str(name) or "]" in str(name):
        return _with_options(str(name))
    if "@" in str(name):
        return _with_budget(str(name))
    if str(name).startswith("model:"):
        kind = name.removeprefix("model:")
        if not kind.isidentifier() or kind in ("dense", "unadapted", "adapted"):
            raise ValueError(
                f"method {name!r}: after `model:` stands a name in eval.models, a word of its own"
            )
        return Method(name=name, spec=None, model=kind, title=f"the model {kind} with its own layout")
    parts = [METHODS.get(part.split("(")[0].strip()) for part in str(name).split("+")]
    found = [part for part in parts if part is not None]
    if len(found) < len(parts) or not ("+" in name or "(" in name):
        raise unknown("method", name, METHODS)
    return Method(
        name=name,
        spec="+".join(part.strip() for part in name.split("+")).replace("pod-unadapted", "pod"),
        model=next((part.model for part in found if part.model != "dense"), "dense"),
        takes_budget=any(part.takes_budget for part in found),
        grows=all(part.grows for part in found),
        unbounded=found[0].unbounded,
        title="; ".join(part.title for part in found),
    )


_OPTIONS = re.compile(r"(?<=[\w)])\[((?:[^\[\]]|\[[^\[\]]*\])*)\]")


def _with_options(name: str) -> Method:
    plain, options = _OPTIONS.sub("", name), dict[str, Any]()
    texts = [text for body in _OPTIONS.findall(name) for text in re.split(r",(?![^\[]*\])", body)]
    for text in texts if "@" not in name.partition("[")[0] else ():
        key, _, value = (part.strip() for part in text.partition("="))
        if key.isidentifier() and value and key not in options:
            options[key] = _value(value)
    if "[" in plain or "]" in plain or len(options) < max(1, len(texts)):
        raise ValueError(
            f"method {name!r}: in brackets behind a part, and before any @, stands each parameter once with its value, as "
            "d2o[merge=average,alpha=2]@25%"
        )
    found = find_method(plain)
    said = ", ".join(f"{key} = {value}" for key, value in options.items())
    return replace(found, name=name, one_shot=False, title=f"{found.title}; {said}", options=options)


def _value(text: str) -> Any:
    ends = re.fullmatch(r"(\d+)-(\d+)", text)
    if ends:
        return list(range(int(ends[1]), int(ends[2]) + 1))
    with contextlib.suppress(ValueError):
        return json.loads(text)
    return text


def _with_budget(name: str) -> Method:
    base, _, text = name.rpartition("@")
    found = find_method(base)
    share = text.endswith("%")
    number = text.removesuffix("%")
    if not re.fullmatch(r"[0-9]+" + (r"(\.[0-9]+)?" if share else ""), number) or not float(number):
        raise ValueError(
            f"method {name!r}: after @ stands a budget, tokens as snapkv@1024 or a share of them as snapkv@25%"
        )
    if share and not 0 < float(number) <= 100:
        raise ValueError(f"method {name!r}: a share is from 0 to 100 %")
    if not found.takes_budget:
        raise ValueError(f"method {name!r}: {base} takes no budget; leave out @{text}")
    return replace(found, name=name, budget=float(number) / 100 if share else int(number))


def safe_name(name: str) -> str:
    """A method's name as a file name: `imdc(snapkv)[function=sqrt]@25%` → `imdc_snapkv__function=sqrt_@25p`. Long names, and those with
    other characters than these, end in digits of their own."""
    text = name.replace("%", "p")
    safe = re.sub(r"[^\w.,=+@-]", "_", text)
    if len(safe) <= 120 and re.fullmatch(r"[\w.,=+@()\[\]:-]*", text):
        return safe
    return f"{safe[:120]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def unknown(kind: str, name: object, known: Iterable[str]) -> ValueError:
    """The error for a name that does not exist."""
    near = difflib.get_close_matches(str(name).lower(), list(known), n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return ValueError(f"unknown {kind} {name!r}; {hint}known: {', '.join(known)}")


def check_names(kind: str, names: object, find: Callable[[str], object]) -> None:
    """Raise ValueError for what `find` does not know, an empty list, and repetitions or names whose files would be one."""
    if not isinstance(names, list) or not names:
        raise ValueError(f"eval.{kind}s must be a list of at least one {kind}, got {names!r}")
    for name in names:
        find(name)
    if len({safe_name(str(name)).lower() for name in names}) < len(names):
        raise ValueError(f"eval.{kind}s names one {kind} twice: {', '.join(names)}")


def repeat_ids(tokenizer: Any) -> list[list[int]]:
    """KVzip's requests in a tokenizer's ids, in the words of its authors: to repeat a text's first chunk; a later one, before the tokens
    that it names; and what stands behind a request: the end of a question in the chat template, a line break without one."""
    end = "\n"
    if getattr(tokenizer, "chat_template", None):
        asked = [{"role": "user", "content": _REPEAT.strip()}]
        text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        end = text.rpartition(_REPEAT.strip())[2]
    return [list(tokenizer.encode(x, add_special_tokens=False)) for x in (_REPEAT, _REPEAT_FROM, end)]


def with_requests(method: str | None, options: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """The options of a method's name or spec, with KVzip's requests unless they have them."""
    is_needed = re.search(r"\bkvzip\b", method or "") and "repeat_ids" not in options
    return options | {"repeat_ids": repeat_ids(tokenizer)} if is_needed else options
