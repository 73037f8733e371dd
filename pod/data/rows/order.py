"""The order in which training reads rows, and the one number that says how far it is."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np


@lru_cache(maxsize=4)
def epoch_order(num_rows: int, seed: int, epoch: int) -> np.ndarray:
    """The order of the rows in one epoch: a permutation of `range(num_rows)`, int64, read-only.

    It depends on (num_rows, seed, epoch) only. It sorts raw PCG64 output, which NumPy keeps stable across
    releases (`Generator.permutation` is not). So a run can be resumed after an upgrade.

    Raises:
        ValueError: `seed` or `epoch` is below 0.
    """
    if seed < 0 or epoch < 0:
        raise ValueError(f"seed and epoch must be >= 0, got seed={seed}, epoch={epoch}")
    keys = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(num_rows)
    order = np.argsort(keys, kind="stable").astype(np.int64)
    order.flags.writeable = False
    return order


@dataclass
class RowCursor:
    """The position in the endless stream of rows: epoch after epoch, each in its own order, no row left out.

    The whole state is `position`, the number of rows that all data-parallel ranks together have consumed
    since the start. Saving that integer and starting a new cursor from it continues at the very next row, on
    any rank count.
    """

    num_rows: int
    """Rows of the data set."""
    seed: int = 0
    """Seed of the epoch orders."""
    position: int = 0
    """Rows consumed so far, over all epochs and ranks."""

    def __post_init__(self) -> None:
        if self.num_rows < 1:
            raise ValueError(f"a data set with {self.num_rows} rows cannot be iterated: prepare data first")
        if self.position < 0:
            raise ValueError(f"the row cursor must be >= 0, got {self.position}")

    def peek(self, count: int, data_parallel_rank: int = 0, data_parallel_size: int = 1) -> np.ndarray:
        """The rows that this data-parallel rank reads among the next `count` rows, without moving the cursor.

        Rank r reads the r-th contiguous block of count / data_parallel_size rows. All ranks of one
        sequence-parallel group pass the same `data_parallel_rank` and read the same rows.

        Returns:
            Indices of the rows, int64 [count / data_parallel_size].

        Raises:
            ValueError: the rank does not exist, or `count` is no multiple of data_parallel_size.
        """
        if not 0 <= data_parallel_rank < data_parallel_size:
            raise ValueError(f"data-parallel rank {data_parallel_rank} is not in 0..{data_parallel_size - 1}")
        if count < 1 or count % data_parallel_size:
            raise ValueError(
                f"{count} rows per step cannot be split over {data_parallel_size} data-parallel ranks: "
                f"use a multiple of {data_parallel_size}"
            )
        share = count // data_parallel_size
        start = self.position + data_parallel_rank * share
        stream = range(start, start + share)
        return np.array(
            [epoch_order(self.num_rows, self.seed, at // self.num_rows)[at % self.num_rows] for at in stream],
            dtype=np.int64,
        )

    def take(self, count: int, data_parallel_rank: int = 0, data_parallel_size: int = 1) -> np.ndarray:
        """Like `peek`, but then the cursor moves by `count` rows: those of all ranks, not of this one."""
        rows = self.peek(count, data_parallel_rank, data_parallel_size)
        self.position += count
        return rows

    def state_dict(self) -> dict[str, int]:
        """The state as a checkpoint stores it."""
        return {"position": self.position, "seed": self.seed, "num_rows": self.num_rows}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue where `state` was saved.

        Raises:
            ValueError: when `state` belongs to other data (another number of rows).
        """
        if state["num_rows"] != self.num_rows:
            raise ValueError(
                f"the checkpoint was trained on data with {state['num_rows']} rows, this data has "
                f"{self.num_rows}: resume with the same prepared data"
            )
        self.position = int(state["position"])
        self.seed = int(state["seed"])
