"""Quality gates: what a document must be before it is tokenised."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from typing import Any, cast

import numpy as np

from pod.data.args import DataArgs
from pod.data.documents import Document
from pod.data.records import one_line

LANGUAGE_WINDOW = 1000
TEXT_GATES = ("min_characters", "keep_pattern", "drop_pattern", "languages")


class Gates:
    """The gates that `args` asks for, in the order of their cost; a document is left out by the first that it fails.

    Raises `ValueError` at once for a pattern that is no regular expression, an unknown language, a missing package, a
    `document_filter` that cannot be imported, and for gates on text where the documents come as tokens.
    """

    def __init__(self, args: DataArgs):
        self.min_characters = args.min_characters
        self.keep_pattern = _pattern("keep_pattern", args.keep_pattern)
        self.drop_pattern = _pattern("drop_pattern", args.drop_pattern)
        self.languages = frozenset(args.languages)
        self._classify = _language_classifier(args.languages) if args.languages else None
        self.document_filter = imported_filter(args.document_filter) if args.document_filter else None
        self._filter_name = args.document_filter
        self._text_gates = [name for name in TEXT_GATES if getattr(args, name)]
        if args.token_field is not None and self._text_gates:
            raise ValueError(self._needs_text(f"token_field={args.token_field!r}"))

    def reason(self, document: Document) -> str | None:
        """None keeps the document, else the name of the gate that it fails.

        Raises `ValueError` when a gate on text meets a document of tokens, or when the user's filter fails or returns
        something else than True or False.
        """
        if document.tokens is not None:
            if self._text_gates:
                raise ValueError(self._needs_text(f"document {document.name}"))
        elif reason := self._text_reason(document.text):
            return reason
        if self.document_filter is not None and not self._passes_filter(document):
            return "document_filter"
        return None

    def _text_reason(self, text: str) -> str | None:
        if len(text) < self.min_characters:
            return "min_characters"
        if self.keep_pattern is not None and self.keep_pattern.search(text) is None:
            return "keep_pattern"
        if self.drop_pattern is not None and self.drop_pattern.search(text) is not None:
            return "drop_pattern"
        if self._classify is not None and self._classify(language_sample(text))[0] not in self.languages:
            return "language"
        return None

    def _passes_filter(self, document: Document) -> bool:
        assert self.document_filter is not None
        try:
            verdict = self.document_filter(document)
        except Exception as error:  # the user's code may raise anything; it stays as the cause
            raise ValueError(
                f"document_filter {self._filter_name} failed on {document.name}: {type(error).__name__}: "
                f"{one_line(error)}"
            ) from error
        # A forgotten `return` must not empty the corpus.
        if not isinstance(verdict, bool | np.bool_):
            raise ValueError(
                f"document_filter {self._filter_name} returned {verdict!r:.80} for {document.name}: "
                "it must return True (keep) or False"
            )
        return bool(verdict)

    def _needs_text(self, what: str) -> str:
        return (
            f"{', '.join(self._text_gates)} need text, but {what} gives tokens: unset them, or use document_filter, "
            "which gets the tokens"
        )


def imported_filter(name: str) -> Callable[[Document], bool]:
    """The function that `module:function` names; `ValueError` when it cannot be imported or is none."""
    module, colon, function = name.partition(":")
    if not (module and colon and function):
        raise ValueError(f"document_filter must be module:function, got {name!r}")
    try:
        found: Any = importlib.import_module(module)
    except Exception as error:  # a module may raise anything while it is imported
        raise ValueError(
            f"document_filter {name!r}: cannot import {module} ({type(error).__name__}: {one_line(error)}); "
            "is its folder on PYTHONPATH?"
        ) from error
    found = getattr(found, function, None)
    if not callable(found):
        raise ValueError(f"document_filter {name!r}: {module} has no function {function}")
    return cast(Callable[[Document], bool], found)


def language_sample(text: str) -> str:
    """What the language is told by: 1,000 characters of the start and 1,000 around the middle; a short text as it is.

    The start alone may be a licence or a menu, and the whole of a long text costs more than tokenising it.
    """
    if len(text) <= 2 * LANGUAGE_WINDOW:
        return text
    middle = (len(text) - LANGUAGE_WINDOW) // 2
    return f"{text[:LANGUAGE_WINDOW]}\n{text[max(middle, LANGUAGE_WINDOW) :][:LANGUAGE_WINDOW]}"


def _pattern(name: str, pattern: str | None) -> re.Pattern[str] | None:
    if pattern is None:
        return None
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{name} {pattern!r} is no regular expression: {error}") from error


def _language_classifier(languages: list[str]) -> Callable[[str], tuple[str, float]]:
    """py3langid's `classify`: text → (code, score); knows about 140 languages, and `zxx` for what is no language."""
    try:
        import py3langid
    except ImportError as error:
        raise ValueError(
            "data.languages needs the package py3langid: pip install 'pod-kv[language]', or set it to []"
        ) from error
    known = {code for code, _ in py3langid.rank("")}
    unknown = [code for code in languages if code not in known]
    if unknown:
        raise ValueError(
            f"languages: unknown {', '.join(map(repr, unknown))}; known are {' '.join(sorted(known))}"
        )
    return py3langid.classify
