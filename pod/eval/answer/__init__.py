"""What a method says to a prompt: the folder of answers, and everything that runs a model to get one.

Tasks name its files as `answer.reading`. That loads them when they are first used: making a list of tasks
needs no torch.
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
