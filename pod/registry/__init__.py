"""The registry of methods: everything that is known about a method, in one place and without torch.

Each method has one entry, in ``selections`` or in ``layouts_and_codecs``. ``method`` says what an entry
consists of, and ``combine`` which methods go together. ``pod.methods()``, ``pod.make_cache``, ``pod eval``
and the README's table read the entries. The code that computes a method is in ``pod/modeling/methods``.
"""

from pod.registry.layouts_and_codecs import CODECS, LAYOUTS
from pod.registry.method import Method
from pod.registry.selections import CHANNELS, SELECTIONS

METHODS: dict[str, Method] = {method.name: method for method in (*LAYOUTS, *SELECTIONS, *CHANNELS, *CODECS)}
"""All methods by name, in the order in which lists and reports show them."""


def methods() -> dict[str, Method]:
    """A new dictionary of all methods by name.

    Each entry says the method's axis, its paper, its parameters (with defaults and units), what it frees and
    what it cannot be combined with.
    """
    return dict(METHODS)
