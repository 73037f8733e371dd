"""Which methods of the registry go together, and which parameters a combination has."""

from collections.abc import Iterable, Mapping
from typing import Any

from pod.notation import Part, Spec, unknown, unknown_parameter
from pod.registry import METHODS
from pod.registry.method import AXES, Method


def in_order(spec: Spec) -> Spec:
    """The spec with its parts in the order in which they are built: layout, selection, channels, codec.

    Example: ``int4+snapkv`` becomes ``snapkv+int4``.

    Raises:
        ValueError: a name is not in the registry; the message gives the nearest one.
    """
    for name in spec.names:
        if name not in METHODS:
            raise unknown("method", name, METHODS)
    axes = list(AXES)
    return spec.in_order(lambda name: axes.index(METHODS[name].axis))


def chosen_methods(spec: Spec) -> tuple[dict[str, Method], str | None]:
    """The methods of a spec by axis, and the name of the method inside the selection's brackets.

    That name is the default one where the spec has no brackets, and None where the selection takes none.
    Example: ``imdc(streamingllm)+int4`` gives imdc as ``selection``, int4 as ``codec``, and the name
    ``streamingllm``.

    Raises:
        ValueError: two methods decide the same axis, a method does not fit inside the brackets, or a part is
            given a parameter that it does not have.
    """
    chosen: dict[str, Method] = {}
    inner = None
    for part in spec.parts:
        method = METHODS[part.name]
        if method.axis in chosen:
            raise ValueError(
                f"{spec.plain!r}: {chosen[method.axis].name} and {method.name} both decide "
                f"{AXES[method.axis]}: use one of them"
            )
        if part.inner is not None and part.inner not in method.inner:
            allowed = ", ".join(f"{method.name}({name})" for name in method.inner) or f"{method.name} alone"
            raise ValueError(f"{part.plain!r} is not possible; choose {allowed}")
        if method.inner:
            inner = part.inner or method.inner[0]
        for name in part.params:
            if name not in method.parameters:
                _refuse_parameter(spec, part, name)
        chosen[method.axis] = method
    return chosen, inner


def has_decode_engine(spec: Spec) -> bool:
    """Whether a spec has the parameter `capacity`, with which a decode engine serves its caches.

    Layouts have it, alone or with 4 bits. For what its plan or parameters say, a cache may still be refused.
    """
    methods = [METHODS[name] for name in spec.names]
    return all("capacity" in method.parameters or method.bits == 4 for method in methods)


def _refuse_parameter(spec: Spec, part: Part, name: str) -> None:
    """Raise the ValueError for a parameter that a part does not have; it names the part that has it."""
    for other in spec.parts:
        if name in METHODS[other.name].parameters:
            raise ValueError(
                f"{part.plain} has no parameter {name!r}, {other.plain} has: "
                f"write {other.name}[{name}={part.params[name]}]"
            )
    raise unknown_parameter(part.plain, name, METHODS[part.name].parameters)


def refusal(layout: Method, *others: Method) -> str | None:
    """Why methods of different axes cannot be combined; None when they can."""
    if layout.trained and any(method.axis in ("selection", "channels") for method in others):
        return f"a model with layout {layout.name} was trained with a fixed cache: only a codec can change it"
    selections = [method.name for method in others if method.axis == "selection"]
    for method in others:
        if method.axis == "channels" and not {*selections} <= {*method.behind}:
            return (
                f"{method.name} works only after a method that ranks the prompt: {', '.join(method.behind)}"
            )
        if layout.name == "pod" and method.refuses_pod is not None:
            return method.refuses_pod
    return None


def all_parameters(spec: str, chosen: Iterable[Method], params: Mapping[str, Any]) -> dict[str, Any]:
    """The values of all parameters of the methods in a spec: those that are given, else the defaults.

    Args:
        spec: the spec as text, for messages.
        chosen: its methods.
        params: the values that the user gives, by name.

    Raises:
        ValueError: none of the methods has a parameter of this name, or a value is not allowed.
    """
    known = {name: parameter for method in chosen for name, parameter in method.parameters.items()}
    for name, value in params.items():
        if name not in known:
            raise unknown_parameter(spec, name, known)
        if (reason := known[name].refusal(value)) is not None:
            raise ValueError(f"{spec}: {name} = {value!r} {reason}")
    return {name: parameter.default for name, parameter in known.items()} | dict(params)
