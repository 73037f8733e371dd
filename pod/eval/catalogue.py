"""The catalogue of methods as text.

For each method it says what it keeps, its parameters, what it combines with, what it refuses and why.
"""

import textwrap

from pod.registry import METHODS
from pod.registry.combine import refusal
from pod.registry.method import AXES, Method

_WRITTEN = (
    "How to write a method, for example pod+snapkv[window=16,kernel=7]+int4@25%:",
    "  +         joins methods, at most one of each kind (layout, selection, channels, codec)",
    "  [...]     sets parameters of the method before it; above, brackets show their defaults",
    "  @BUDGET   tokens to keep per KV head and layer: @4096 is a number of tokens, @25% or @0.25 a",
    "            share of each prompt, @pod as many tokens as fill the plan's bytes. `pod eval` takes",
    "            @pod when a method needs a budget and has none.",
)


def combinations(name: str) -> dict[str, str | None]:
    """Join a method with each method of another axis, and say which pairs are refused.

    Returns: a reason by spec; None for a spec that is allowed, as in `{"pod+snapkv": None}`.
    """
    method = METHODS[name]
    found = {}
    for other in METHODS.values():
        if other.axis == method.axis or "full" in (method.name, other.name):
            continue
        chosen = {method.axis: method, other.axis: other}
        layout = chosen.get("layout") or METHODS["full"]
        spec = "+".join(chosen[axis].name for axis in AXES if axis in chosen)
        found[spec] = refusal(layout, *chosen.values())
    return found


def describe(width: int = 110) -> str:
    """The catalogue as text, at most `width` columns wide: all methods by axis, and how to write a method."""
    described = describe_each(width)
    blocks = []
    for axis, what in AXES.items():
        blocks.append(f"{axis.capitalize()}: {what}")
        blocks += [described[name] for name, method in METHODS.items() if method.axis == axis]
    blocks.append("\n".join(_WRITTEN))
    return "\n\n".join(blocks)


def describe_each(width: int = 110) -> dict[str, str]:
    """What the catalogue says of every method, as text by the method's name, at most `width` columns wide.

    It gives the source, what the method frees, its parameters with defaults and units, and what it combines
    with and what not.
    """
    return {name: _describe(method, width) for name, method in METHODS.items()}


def _describe(method: Method, width: int) -> str:
    name = f"{method.name}({'|'.join(method.inner)})" if method.inner else method.name
    together = combinations(method.name)
    allowed = [spec for spec, reason in together.items() if reason is None]
    lines = [f"source: {method.paper}", f"frees: {method.frees}"]
    lines += [f"{key} [{default}] {meaning}" for key, (default, meaning, *_) in method.parameters.items()]
    lines += [f"combines with: {', '.join(allowed)}"] if allowed else []
    reasons: dict[str, list[str]] = {}
    for spec, reason in together.items():
        # a refusal by a trained layout is said once, in the text of that layout
        of_layout = METHODS[spec.split("+")[0]].trained and method.axis != "layout"
        if reason is not None and not of_layout:
            reasons.setdefault(reason, []).append(spec)
    lines += [f"cannot combine: {', '.join(specs)}: {reason}" for reason, specs in reasons.items()]
    wrapper = textwrap.TextWrapper(width, initial_indent=" " * 6, subsequent_indent=" " * 8)
    wrapped = [part for line in lines for part in wrapper.wrap(line)]
    heading = f"  {name}{'@BUDGET' if method.takes_budget else ''}"
    return "\n".join([heading, *wrapped])
