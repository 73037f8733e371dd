"""Forward passes between training steps that leave no trace: same weights and ranks, no gradients, nothing random.

All ranks take part with the same number of passes over rows of the same length, as ZeRO-3 and Ulysses need it.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pod.training.run.loss import IGNORED_LABEL

Reader = Callable[[Tensor, Tensor, Tensor], Tensor]
"""hidden states of this rank [B, n_local, hidden], output projection [V, hidden], labels [B, n_local] -> any tensor."""


@contextlib.contextmanager
def reading(trainer: Any, row_length: int) -> Iterator[slice]:
    """Make a trainer's model ready for rows of `row_length` tokens, which the sequence-parallel group must divide; yields this rank's
    slice of a row. Afterwards modes and row length are what they were."""
    module, ulysses = trainer.engine.module, trainer.ulysses
    modes = [(part, part.training) for part in module.modules()]
    trained_length = trainer.dataset.context_length
    module.eval()
    try:
        if ulysses is not None:
            ulysses.set_row_length(row_length)
        with torch.no_grad():
            yield slice(0, row_length) if ulysses is None else ulysses.slice
    finally:
        if ulysses is not None:
            ulysses.set_row_length(trained_length)
        for part, mode in modes:
            part.training = mode


def row_length_for(tokens: int, trainer: Any) -> int:
    """The shortest row of at least `tokens` tokens that falls into equal slices."""
    size = trainer.mesh.sp_size
    return -(-tokens // size) * size


def read(trainer: Any, input_ids: Tensor, doc_ids: Tensor, labels: Tensor, reader: Reader) -> Tensor:
    """One forward pass over rows [B, n] that every rank of a group holds whole; call it inside `reading`.

    `reader` stands in for the loss at its place, where ZeRO-3 has gathered the output projection.
    """
    trainer.control.alive("evaluate")
    module, device = trainer.engine.module, trainer.mesh.device
    mine = slice(None) if trainer.ulysses is None else trainer.ulysses.slice
    head = module.loss_head
    head.forward = lambda hidden, labels: reader(hidden, head.weight, labels)
    try:
        return module(
            input_ids=input_ids[:, mine].to(device),
            labels=labels[:, mine].to(device),
            doc_ids=doc_ids.to(device),
        )
    finally:
        del head.forward


def token_scores(hidden: Tensor, weight: Tensor, labels: Tensor, chunk_bytes: int) -> tuple[Tensor, Tensor]:
    """Cross entropy in nats (fp32, 0 without a label) and the most likely next token, each [B, n]; at most `chunk_bytes` of logits."""
    rows, targets = hidden.flatten(0, 1), labels.flatten()
    size = max(1, chunk_bytes // (4 * weight.shape[0]))
    losses, best = [], []
    for chunk, target in zip(rows.split(size), targets.split(size), strict=True):
        logits = wide_logits(chunk, weight)
        losses.append(F.cross_entropy(logits, target, reduction="none", ignore_index=IGNORED_LABEL))
        best.append(logits.argmax(-1))
    return torch.cat(losses).view(labels.shape), torch.cat(best).view(labels.shape)


def wide_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """[m, hidden] and [V, hidden] to [m, V] in at least fp32, not rounded on the way where the device can do without."""
    if hidden.is_cuda and hidden.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    logits = F.linear(hidden, weight)
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
