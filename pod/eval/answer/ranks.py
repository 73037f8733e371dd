"""Data-parallel evaluation: every rank answers its share of the samples.

Afterwards all ranks know all answers. Ranks come from the launcher's environment (`torchrun`,
`accelerate launch`, `deepspeed`, `srun` with RANK and WORLD_SIZE set); without it there is one.
"""

import contextlib
import datetime
import os
from collections.abc import Iterator
from typing import Any

_TIMEOUT = datetime.timedelta(days=2)  # a rank with long prompts keeps the others waiting


class Ranks:
    """This process among its peers: `rank` (global), `local_rank`, `world_size`.

    It starts torch.distributed (gloo) if the environment asks for more than one rank and torch.distributed
    does not run yet.

    Raises:
        ValueError: when WORLD_SIZE, RANK or LOCAL_RANK is no whole number, when WORLD_SIZE is 0, or when RANK
            is missing or not below WORLD_SIZE.
    """

    def __init__(self) -> None:
        self.world_size = _number("WORLD_SIZE", 1)
        self.rank = _number("RANK", 0)
        self.local_rank, self._started = _number("LOCAL_RANK", 0), False
        if self.world_size < 1:
            raise ValueError("the environment variable WORLD_SIZE is 0: unset it or start with torchrun")
        if self.world_size > 1 and "RANK" not in os.environ:
            raise ValueError(
                f"the environment variable WORLD_SIZE is {self.world_size} and RANK is not set: "
                "start with torchrun"
            )
        if self.rank >= self.world_size:
            raise ValueError(
                f"the environment variable RANK is {self.rank}, allowed are 0 to {self.world_size - 1}"
            )
        if self.world_size > 1:
            self._join()

    def _join(self) -> None:
        import torch
        import torch.distributed as dist

        if not dist.is_initialized():
            if torch.cuda.is_available():
                from pod.modeling.placement import share_of_rank

                torch.cuda.set_device(share_of_rank(torch.cuda.device_count())[0])
            # gloo carries objects and small tensors; a model lies on the GPUs of one rank
            dist.init_process_group("gloo", timeout=_TIMEOUT)
            self._started = True

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes files and prints."""
        return self.rank == 0

    def share(self, items: list[Any]) -> list[Any]:
        """The items of this rank: every `world_size`-th, which spreads neighbours of like length."""
        return items[self.rank :: self.world_size]

    def gather(self, value: Any) -> list[Any]:
        """The `value` of every rank, in the order of ranks, on every rank.

        It must be plain data (JSON types, numbers, tuples).
        """
        if self.world_size == 1:
            return [value]
        import torch.distributed as dist  # one rank alone needs no torch

        found: list[Any] = [None] * self.world_size
        dist.all_gather_object(found, value)
        return found

    def from_first(self, value: Any) -> Any:
        """Rank 0's `value`, on every rank."""
        return self.gather(value)[0]

    @contextlib.contextmanager
    def first_alone(self) -> Iterator[None]:
        """Inside the block rank 0 works alone, as if it were the only rank. The others wait in `close`."""
        assert self.is_first, "the other ranks have nothing to do here"
        size, self.world_size = self.world_size, 1
        try:
            yield
        finally:
            self.world_size = size

    def close(self) -> None:
        """Leave together: wait for the other ranks and end the process group."""
        if self._started:
            import torch.distributed as dist

            dist.barrier()
            dist.destroy_process_group()
            self._started = False


def _number(name: str, default: int) -> int:
    text = os.environ.get(name)
    if text is None:
        return default
    if not text.isdecimal():
        raise ValueError(
            f"the environment variable {name} is {text!r}; it should be a whole number (torchrun sets it)"
        )
    return int(text)
