"""How much the commands print: `-q`, `-v`, or POD_VERBOSITY, which the processes of a command inherit."""

import contextlib
import logging
import os
from collections.abc import Iterator

VARIABLE = "POD_VERBOSITY"
LEVELS = ("quiet", "normal", "verbose")
_QUIET_LIBRARIES = {
    "TQDM_DISABLE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}
_VERBOSE_LIBRARIES = {"TRANSFORMERS_VERBOSITY": "info", "POD_TRACEBACK": "1"}


def level() -> str:
    """`quiet`, `normal` or `verbose`.

    Raises:
        ValueError: POD_VERBOSITY has another value.
    """
    found = os.environ.get(VARIABLE) or "normal"
    if found not in LEVELS:
        raise ValueError(f"{VARIABLE} is {found!r}: it should be {', '.join(LEVELS[:-1])} or {LEVELS[-1]}")
    return found


def is_quiet() -> bool:
    """Whether progress bars and results on the screen are off."""
    return level() == "quiet"


def is_verbose() -> bool:
    """Whether libraries show their information messages, and errors their traceback."""
    return level() == "verbose"


@contextlib.contextmanager
def printing(wanted: str | None = None) -> Iterator[None]:
    """Wrap the work of a command, so that it prints as much as the level allows.

    When the level is quiet, standard output goes nowhere and there are no progress bars. Warnings and errors,
    which go to stderr, stay.

    Args:
        wanted: the level that the command line asks for; None keeps the environment's.
    """
    if wanted is not None:
        os.environ[VARIABLE] = wanted
    if is_verbose():
        os.environ.update(_VERBOSE_LIBRARIES)
        logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    if not is_quiet():
        yield
        return
    os.environ.update(_QUIET_LIBRARIES)
    with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stdout(nowhere):
        yield
