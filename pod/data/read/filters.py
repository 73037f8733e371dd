"""The user's own filter: which documents are left out before they are tokenised."""

import importlib
from collections.abc import Callable
from typing import Any, cast

import numpy as np

from pod.data.read.documents import Document
from pod.data.read.records import short_reason


def imported_filter(name: str) -> Callable[[Document], bool]:
    """The function that `module:function` names.

    Raises:
        ValueError: the name is not `module:function`, the module cannot be imported, or has no such function.
    """
    module, colon, function = name.partition(":")
    if not (module and colon and function):
        raise ValueError(f"document_filter must be module:function, got {name!r}")
    try:
        found: Any = importlib.import_module(module)
    except Exception as error:  # a module may raise anything while it is imported
        raise ValueError(
            f"document_filter {name!r}: cannot import {module} "
            f"({type(error).__name__}: {short_reason(error)}); is its folder on PYTHONPATH?"
        ) from error
    found = getattr(found, function, None)
    if not callable(found):
        raise ValueError(f"document_filter {name!r}: {module} has no function {function}")
    return cast(Callable[[Document], bool], found)


def passes(document_filter: Callable[[Document], bool], name: str, document: Document) -> bool:
    """Whether the user's filter keeps a document.

    Args:
        name: the filter as `module:function`, for messages.

    Raises:
        ValueError: the filter raises an error, or returns something other than True or False.
    """
    try:
        verdict = document_filter(document)
    except Exception as error:  # the user's code may raise anything; it stays as the cause
        raise ValueError(
            f"document_filter {name} failed on {document.name}: {type(error).__name__}: {short_reason(error)}"
        ) from error
    # A forgotten `return` must not empty the corpus.
    if not isinstance(verdict, bool | np.bool_):
        raise ValueError(
            f"document_filter {name} returned {verdict!r:.80} for {document.name}: "
            "it must return True (keep) or False"
        )
    return bool(verdict)
