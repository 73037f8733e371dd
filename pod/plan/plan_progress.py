"""Progress bars for steps that take minutes: constants, solving for a plan, and its curve."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist
from tqdm import tqdm

_Item = TypeVar("_Item")
_DELAY = 1.0  # seconds before a bar appears: small models are solved at once


def _options(what: str) -> dict[str, Any]:
    """Arguments of `tqdm` for a bar that is shown on rank 0 only."""
    hidden = dist.is_initialized() and dist.get_rank() > 0
    return {"desc": f"explore, {what}", "disable": hidden, "delay": _DELAY}


def steps(items: Iterable[_Item], what: str) -> Iterable[_Item]:
    """The items, with a bar on rank 0 that counts them."""
    return tqdm(items, **_options(what))


@contextmanager
def counter(what: str, total: int | None = None) -> Iterator[Any]:
    """A bar on rank 0 of ``total`` steps (None = unknown): call its ``update()`` once per step."""
    with tqdm(unit="step", total=total, **_options(what)) as bar:
        yield bar
