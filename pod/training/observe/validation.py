"""Evaluation during training, under ZeRO and sequence parallelism: held-out loss by position, and passkeys."""

import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pod.modeling.shipped.step import document_positions
from pod.training.args import TrainArgs
from pod.training.observe.held_out import Rows, lengthened, padded_row
from pod.training.observe.observers import Periodic
from pod.training.observe.probes import Passkey
from pod.training.observe.trackers import append_records
from pod.training.run.loss import IGNORED_LABEL
from pod.training.run.reading import read, reading, row_length_for, token_scores

FILE_NAME = "eval.jsonl"
_MOST_BUCKETS = 8
_LEAST_BUCKET = 64  # tokens


def position_buckets(length: int) -> list[tuple[int, int]]:
    """`[start, end)` of at most 8 ranges of positions, each from the second on twice as long as what lies before it."""
    first = _LEAST_BUCKET
    while first << (_MOST_BUCKETS - 1) < length:
        first *= 2
    bounds = [0, first]
    while bounds[-1] < length:
        bounds.append(2 * bounds[-1])
    return [(start, min(end, length)) for start, end in itertools.pairwise(bounds)]


class Evaluation(Periodic):
    """Every `eval_every_steps`, before the first step and at the last one.

    Metrics: `eval_loss` (nats per token, over all tokens with a label), `eval_perplexity`, `eval_loss_<start>_<end>` by
    position (tokens of the same document before the predicted one), `eval_passkey` (share of prompts whose number is
    the model's greedy continuation) and `eval_passkey_loss` (nats per token of the number). All of it, and the
    passkeys by depth, goes to eval.jsonl.
    """

    def __init__(self, args: TrainArgs, folder: Path, rows: Rows, passkeys: Sequence[Passkey] = ()):
        super().__init__(args.eval_every_steps)
        self.path, self.passkeys = Path(folder) / FILE_NAME, passkeys
        self.context_length = rows["input_ids"].shape[1]
        for passkey in passkeys:
            needed = len(passkey.prompt) + len(passkey.answer)
            if needed > self.context_length:
                raise ValueError(
                    f"a passkey prompt has {needed} tokens, rows have {self.context_length}: prepare data with a longer "
                    "data.context_length, or set train.eval_passkeys to 0"
                )
        self.rows = [
            {name: value[at : at + 1] for name, value in rows.items()} for at in range(len(rows["labels"]))
        ]
        self.buckets = position_buckets(self.context_length)

    def measure(self, trainer: Any, step: int) -> dict[str, float]:
        record = self._by_position(trainer)
        if self.passkeys:
            record |= self._passkeys(trainer)
        if trainer.mesh.rank == 0:
            append_records(self.path, step, [record])
        values = {name: value for name, value in record.items() if isinstance(value, float)}
        for bucket in record["eval_buckets"]:
            values[f"eval_loss_{bucket['start']}_{bucket['end']}"] = bucket["loss"]
        return values

    def _by_position(self, trainer: Any) -> dict[str, Any]:
        """Mean losses over all rows of all ranks, whole and by bucket."""
        ends = torch.tensor([end for _, end in self.buckets])
        sums = torch.zeros(2, len(self.buckets), dtype=torch.float64)

        def add(index: int, losses: Tensor, best: Tensor, mine: slice) -> None:
            row = self.rows[index]
            positions = document_positions(row["doc_ids"])[:, mine][:, : losses.shape[1]] + 1
            labelled = row["labels"][:, mine] != IGNORED_LABEL
            bucket = torch.bucketize(positions[labelled], ends, right=True)
            sums[0].index_add_(0, bucket, losses[labelled].double())
            sums[1].index_add_(0, bucket, torch.ones_like(bucket, dtype=torch.float64))

        score_rows(trainer, self.rows, add)
        count = len(self.buckets)
        totals = trainer.mesh.sum(sums.flatten().tolist())
        losses, tokens = totals[:count], totals[count:]
        buckets = [
            {"start": start, "end": end, "tokens": int(number), **_loss(loss, number)}
            for (start, end), loss, number in zip(self.buckets, losses, tokens, strict=True)
            if number
        ]
        whole = {f"eval_{name}": value for name, value in _loss(sum(losses), sum(tokens)).items()}
        return {**whole, "eval_buckets": buckets}

    def _passkeys(self, trainer: Any) -> dict[str, Any]:
        """Which numbers the model continues with, all tokens of a prompt's number at once: greedy decoding says the
        number exactly when each of its tokens is the most likely one after the true ones before it."""
        rows = [
            padded_row([*key.prompt, *key.answer], len(key.answer), self.context_length)
            for key in self.passkeys
        ]
        hits, losses = [0.0] * len(rows), [0.0] * len(rows)

        def add(index: int, loss: Tensor, best: Tensor, mine: slice) -> None:
            labels = rows[index]["labels"][:, mine]
            hits[index] += float(((best == labels) & (labels != IGNORED_LABEL)).sum())
            losses[index] += float(loss.double().sum())

        score_rows(trainer, rows, add)
        totals = trainer.mesh.sum(hits + losses)
        wanted = [len(key.answer) for key in self.passkeys]
        right = [hit == number for hit, number in zip(totals, wanted, strict=False)]
        details = [
            {"depth": key.depth, "correct": correct, "loss": loss / number}
            for key, correct, loss, number in zip(
                self.passkeys, right, totals[len(rows) :], wanted, strict=True
            )
        ]
        return {
            "eval_passkey": sum(right) / len(right),
            "eval_passkey_loss": sum(detail["loss"] for detail in details) / len(details),
            "eval_passkeys": details,
        }


def _loss(total: float, tokens: float) -> dict[str, float]:
    loss = total / max(tokens, 1.0)
    return {"loss": loss, "perplexity": math.exp(min(loss, 100.0))}  # what a JSON number can hold


def score_rows(trainer: Any, rows: Sequence[Rows], add: Callable[[int, Tensor, Tensor, slice], None]) -> None:
    """Score rows of equal length, each on one sequence-parallel group.

    Calls `add(index, losses, best, mine)` on every rank of that group: cross entropy and most likely next token
    [1, n_local] of this rank's slice `mine` of row `index`, on the host and without padding beyond the row.
    """
    mesh, tokens = trainer.mesh, rows[0]["input_ids"].shape[1]
    length = row_length_for(tokens, trainer)
    chunk = trainer.engine.module.loss_head.chunk_bytes
    with reading(trainer, length) as whole:
        mine = slice(whole.start, min(whole.stop, tokens))
        for start in range(0, len(rows), mesh.dp_size):
            index = start + mesh.dp_rank
            # All groups make equally many passes, as ZeRO needs it; one that has no row left repeats the first.
            row = lengthened(rows[index if index < len(rows) else 0], length)
            scores: list[Tensor] = []

            def score(hidden: Tensor, weight: Tensor, labels: Tensor, scores=scores) -> Tensor:
                scores.extend(token_scores(hidden, weight, labels, chunk))
                return scores[0]

            read(trainer, row["input_ids"], row["doc_ids"], row["labels"], score)
            if index < len(rows):
                size = max(0, mine.stop - mine.start)
                add(index, scores[0][:, :size].cpu(), scores[1][:, :size].cpu(), mine)
