"""The registry of methods: everything that is known about a method, said once, without torch.

Each method has one entry, in ``selections`` or in ``layouts_and_codecs``. ``method`` says what an entry
consists of, and ``combine`` which methods go together. ``pod.methods()``, ``pod.make_cache``, ``pod eval``
and the README's table read them. What computes a method is in its file in ``pod/modeling/methods``.
"""

from pod.registry.layouts_and_codecs import CODECS, LAYOUTS
from pod.registry.method import Method
from pod.registry.selections import CHANNELS, SELECTIONS

METHODS: dict[str, Method] = {method.name: method for method in (*LAYOUTS, *SELECTIONS, *CHANNELS, *CODECS)}
"""All methods by name, in the order in which lists and reports show them."""


def methods() -> dict[str, Method]:
    """All methods by name, with axis, paper, parameters (defaults and units), what they free and refuse."""
    return dict(METHODS)
