"""What a method declares about itself, and what it is asked for.

A cache is made along three independent axes: the *layout* says which layers hold keys and values, the *selection*
which tokens stay, the *codec* in which form they are held. A spec names at most one method of each, joined by ``+``.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from pod.modeling.shipped.cache import PodCache
from pod.modeling.shipped.config import PodConfig
from pod.modeling.shipped.stores import NATIVE, Codec


@dataclass(frozen=True, kw_only=True)
class Request:
    """What ``make_cache`` asks a method to build.

    Attributes:
        spec: as the user wrote it; for reports and errors.
        params: every parameter of the methods in the spec, defaults filled in.
        budget: tokens per KV head and layer; None for methods that take none.
        layout: name of the layout.
        codec: makes the stores.
        inner: what stands in brackets behind the selection, as ``snapkv`` in ``imdc(snapkv)``.
    """

    spec: str
    params: dict[str, Any]
    budget: int | None = None
    layout: str = "full"
    codec: Codec = NATIVE
    inner: str | None = None

    @property
    def tokens(self) -> int:
        """The budget of a method that takes one."""
        assert self.budget is not None
        return self.budget


@dataclass(frozen=True, kw_only=True)
class Method:
    """A named rule for what a cache holds.

    Attributes:
        name: as in ``make_cache(model, name)``.
        paper: source.
        frees: what is not held any more.
        axis: what the method decides.
        build: ``(config, request) -> PodCache``, for layouts and selections.
        codec: ``(config, params) -> Codec``, for codecs.
        parameters: name to (default, meaning with unit).
        takes_budget: whether ``budget`` means something; then it is required.
        inner: methods that may stand in brackets behind the name; the first one is the default.
        trained: whether the model's weights were trained with this layout, so that no selection fits it.
        refuses: layouts and codecs that the method cannot be combined with, each with the reason.
    """

    name: str
    paper: str
    frees: str
    axis: Literal["layout", "selection", "codec"]
    build: Callable[[PodConfig, Request], PodCache] | None = None
    codec: Callable[[PodConfig, dict[str, Any]], Codec] | None = None
    parameters: dict[str, tuple[Any, str]] = field(default_factory=dict)
    takes_budget: bool = False
    inner: tuple[str, ...] = ()
    trained: bool = False
    refuses: dict[str, str] = field(default_factory=dict)

    def defaults(self) -> dict[str, Any]:
        """Parameters at their defaults."""
        return {name: default for name, (default, _) in self.parameters.items()}
