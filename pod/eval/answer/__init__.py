"""Answers of methods to prompts: the folder that keeps them, and everything that runs a model to get one.

Tasks write `answer.reading`, `answer.score` and so on. Such a file is imported when its name is first used,
so that making a list of tasks needs no torch.
"""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pod.eval.answer import gates, generate, reading, score

__all__ = ["gates", "generate", "reading", "score"]


def __getattr__(name: str) -> ModuleType:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")
