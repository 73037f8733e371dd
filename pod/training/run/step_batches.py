"""The micro-batches of an optimizer step: what each rank reads."""

from typing import Any

import torch

from pod.data.rows.loader import IGNORED_LABEL
from pod.data.rows.order import RowCursor
from pod.data.rows.prefetch import Prefetcher
from pod.training.args import TrainArgs

Batch = dict[str, torch.Tensor]
"""One micro-batch: `input_ids`, `labels` and `doc_ids`, see `StepBatches.next`."""


def rows_per_step(args: TrainArgs, mesh: Any) -> int:
    """Rows that all ranks read for an optimizer step."""
    return args.micro_batch_size * args.gradient_accumulation_steps * mesh.dp_size


class StepBatches:
    """The micro-batches of every step on this rank: its rows, and its slice of the tokens of each row.

    Ranks of one sequence-parallel group read the same rows. Data-parallel groups read different rows.

    Args:
        cursor: the position in the data from which the next step is read. `next` moves it by the rows of all
            ranks.
        tokens: slice of a row's positions that this rank holds.
    """

    def __init__(self, args: TrainArgs, dataset: Any, cursor: RowCursor, mesh: Any, tokens: slice):
        self.dataset, self.mesh, self.tokens = dataset, mesh, tokens
        self.micro_batch_size = args.micro_batch_size
        self.rows_per_step = rows_per_step(args, mesh)
        self.prefetcher = Prefetcher(self._load, cursor, self.rows_per_step, args.prefetch_steps)
        self.num_labels = 0
        """Number of tokens with a label on this rank, in the step that `next` gave last.

        They are counted in host memory, so that counting does not wait for the device.
        """

    def next(self) -> list[Batch]:
        """The micro-batches of the next step.

        Returns:
            For each micro-batch `input_ids` and `labels`, int64 [B, slice], on this rank's device; and
            `doc_ids`, int64 [B, context], on the host, where segments are made from them.
        """
        batches = self.prefetcher.next()
        self.num_labels = sum(int((batch["labels"] != IGNORED_LABEL).sum()) for batch in batches)
        for batch in batches:
            for name in ("input_ids", "labels"):
                batch[name] = batch[name].to(self.mesh.device, non_blocking=True)
        return batches

    def agree_on_labels(self) -> tuple[float, float]:
        """Number of labels of the step over all ranks, and the seconds that the slowest rank waited for rows.

        All ranks call it after `next`.
        """
        waits = [0.0] * self.mesh.world_size
        waits[self.mesh.rank] = self.prefetcher.waited_s  # the sum over ranks is then the list of all waits
        num_labels, *waits = self.mesh.sum([self.num_labels, *waits])
        return num_labels, max(waits)

    def close(self) -> None:
        """End the thread that reads ahead; `next` would start it again."""
        self.prefetcher.close()

    def _load(self, cursor: RowCursor) -> list[Batch]:
        """Read this rank's micro-batches of the step at `cursor`, into host memory."""
        indices = cursor.peek(self.rows_per_step, self.mesh.dp_rank, self.mesh.dp_size)
        batches = []
        for start in range(0, len(indices), self.micro_batch_size):
            rows = self.dataset.rows(indices[start : start + self.micro_batch_size])
            batch = {name: rows[name][:, self.tokens].contiguous() for name in ("input_ids", "labels")}
            batches.append(self._pinned({**batch, "doc_ids": rows["doc_ids"]}))
        return batches

    def _pinned(self, batch: Batch) -> Batch:
        """The batch in page-locked memory, so that a copy to the GPU runs beside the GPU's work."""
        if self.mesh.device.type != "cuda":
            return batch
        with torch.cuda.device(self.mesh.device):  # every thread has a current device of its own
            return {name: value.pin_memory() for name, value in batch.items()}
