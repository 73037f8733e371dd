"""Patch a part of lm-eval for a while, where lm-eval has no argument for it."""

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Inside the block `owner.name` is `value`.

    Args:
        owner: a module or a class.
        name: an attribute that it has itself; one of a base class would stay on `owner` afterwards.
    """
    before = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
