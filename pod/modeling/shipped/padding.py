"""Squeezing padding out of a batch: layers see left-aligned rows of real tokens, whatever side the padding was on."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Compaction:
    """Maps padded columns to left-aligned real tokens and back.

    Attributes:
        mask: ``[B, n]`` bool, True = token.
        counts: ``[B]`` real tokens per row.
        index: ``[B, m]`` column of the t-th real token of each row, ``m = max(counts, 1)``; the tail of shorter
            rows holds arbitrary columns and must be ignored.
    """

    mask: Tensor
    counts: Tensor
    index: Tensor

    @property
    def doc_ids(self) -> Tensor:
        """``[B, m]``: 0 for real tokens, -1 behind them."""
        behind = torch.arange(self.index.shape[1], device=self.index.device) >= self.counts[:, None]
        return -behind.long()

    def gather(self, x: Tensor) -> Tensor:
        """``[B, n, c]`` to ``[B, m, c]``."""
        return x.gather(1, self.index[..., None].expand(-1, -1, x.shape[-1]))

    def scatter(self, x: Tensor) -> Tensor:
        """``[B, m, c]`` back to ``[B, n, c]`` with zeros on padding."""
        rank = (self.mask.long().cumsum(1) - 1).clamp(min=0)
        restored = x.gather(1, rank[..., None].expand(-1, -1, x.shape[-1]))
        return restored.masked_fill(~self.mask[..., None], 0.0)

    def padded_positions(self, past: Tensor | int) -> Tensor:
        """``[B, n]`` position of each column's token in its row, after ``past`` tokens per row."""
        start = past[:, None] if isinstance(past, Tensor) else past
        return self.mask.long().cumsum(1) - 1 + start


def document_positions(doc_ids: Tensor) -> Tensor:
    """Position of every token inside its document: ``[B, n]`` ids, equal ids contiguous, to ``[B, n]`` int64."""
    index = torch.arange(doc_ids.shape[1], device=doc_ids.device).expand_as(doc_ids)
    starts = torch.ones_like(doc_ids, dtype=torch.bool)
    starts[:, 1:] = doc_ids[:, 1:] != doc_ids[:, :-1]
    return index - torch.where(starts, index, 0).cummax(dim=1).values


def compaction_of(attention_mask: Tensor | None, n: int) -> Compaction | None:
    """The compaction of the last ``n`` columns of a padding mask (nonzero = token); None when there is no padding."""
    if attention_mask is None:
        return None
    mask = attention_mask[:, -n:].bool()
    if mask.all():
        return None
    counts = mask.sum(1)
    order = torch.argsort((~mask).long(), dim=1, stable=True)
    return Compaction(mask=mask, counts=counts, index=order[:, : max(1, int(counts.max()))])


def piece_columns(starts: Tensor, width: int) -> Tensor:
    """``[B, width]`` columns of a piece that begins at column ``starts[b]`` of each row."""
    return starts[:, None] + torch.arange(width, device=starts.device)


def take_columns(x: Tensor, columns: Tensor) -> Tensor:
    """``[B, n, c]`` to ``[B, width, c]``; columns beyond the last one repeat it."""
    return x.gather(1, columns.clamp(max=x.shape[1] - 1)[..., None].expand(-1, -1, x.shape[2]))


def put_columns(target: Tensor, columns: Tensor, counts: Tensor, x: Tensor) -> None:
    """Write the first ``counts[b]`` of ``[B, width, c]`` to their columns of ``[B, n, c]``."""
    real = torch.arange(columns.shape[1], device=columns.device) < counts[:, None]
    rows, places = real.nonzero(as_tuple=True)
    target[rows, columns[rows, places]] = x[rows, places]


def check_positions(position_ids: Tensor | None, expected: Tensor, attention_mask: Tensor | None) -> None:
    """Positions that a caller passes must be those that mask and cache imply, wherever there is a token."""
    if position_ids is None:
        return
    wrong = position_ids.to(expected.device) != expected
    if attention_mask is not None:
        wrong = wrong & attention_mask[:, -expected.shape[1] :].bool()
    if wrong.any():
        row, column = (int(i) for i in wrong.nonzero()[0])
        given = int(position_ids.expand_as(wrong)[row, column])
        raise ValueError(
            f"position_ids[{row}, {column}] = {given}, but mask and cache make it "
            f"{int(expected.expand_as(wrong)[row, column])}: leave position_ids out, or feed the tokens that continue"
        )
