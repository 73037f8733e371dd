"""Shared by all parts of the command line: a parser that suggests the nearest option, and `-q` and `-v`."""

import argparse
import sys
import typing
from collections.abc import Sequence

from pod.schema import nearest


class Parser(argparse.ArgumentParser):
    """argparse's parser without abbreviations, which answers an unknown option with a suggestion.

    Paragraphs of a description stay as they are written.
    """

    def __init__(self, **settings: typing.Any):
        layout = argparse.RawDescriptionHelpFormatter
        super().__init__(**{"formatter_class": layout, "allow_abbrev": False} | settings)

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Like argparse's, but an unknown option ends the process with code 2 and names the nearest one."""
        found, unknown = self.parse_known_args(args, namespace or argparse.Namespace())
        if unknown:
            self.error(f"unknown argument {unknown[0]}{self._suggestion(unknown[0])}")
        return found

    def _suggestion(self, argument: str) -> str:
        """The option that was perhaps meant, in parentheses. Empty when no option is near."""
        options = [name for name in self._option_string_actions if name.startswith("--")]
        word = argument.partition("=")[0]
        if not word.startswith("-"):
            return ""
        if "." in word and "--set" in options:
            return f" (settings of the recipe are changed with --set {word.lstrip('-')}=VALUE)"
        return nearest(word, options)

    def error(self, message: str) -> typing.NoReturn:
        """Print one line that says where to read more, and exit with code 2."""
        print(f"error: {self.prog}: {message}; `{self.prog} --help` explains the options", file=sys.stderr)
        sys.exit(2)


def add_verbosity(parser: argparse.ArgumentParser) -> None:
    """Add `-q` and `-v`, which set `verbosity` to "quiet" or "verbose" (None when neither is given)."""
    either = parser.add_mutually_exclusive_group()
    quiet = "print warnings and errors only; results are still written to their files"
    verbose = "also print the messages of libraries, and a traceback with each error"
    for short, long, value, text in (
        ("-q", "--quiet", "quiet", quiet),
        ("-v", "--verbose", "verbose", verbose),
    ):
        either.add_argument(short, long, dest="verbosity", action="store_const", const=value, help=text)
