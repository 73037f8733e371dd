"""Evaluation during training, under ZeRO and sequence parallelism: loss by position, and passkeys.

The loss is measured on rows made of the held-out text, which lies beside the prepared rows.
"""

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pod.data.rows.held_out import map_held_out
from pod.data.rows.loader import IGNORED_LABEL, shifted_labels
from pod.modeling.model.step import document_positions
from pod.modeling.token_scores import rows_in, token_scores, wide_logits
from pod.training.args import TrainArgs
from pod.training.observe.metrics import Values
from pod.training.run.mesh import Mesh
from pod.training.run.run_control import Interrupted, RunControl
from pod.training.run.ulysses import Ulysses

Rows = dict[str, Tensor]
"""`input_ids`, `labels` (shifted), `doc_ids` (-1 = padding), each int64 [rows, length]."""
ScoredRow = tuple[int, Tensor, Tensor, slice]
"""What a rank knows of one row: (index of the row, losses, next tokens, slice).

The slice is the part of the row that this rank holds. For each of its tokens there is the cross entropy in
nats and the most likely next token, `[1, n_local]` each, in host memory. Tokens that only lengthen the row
are left out.
"""
FILLS = {"input_ids": 0, "labels": IGNORED_LABEL, "doc_ids": -1}
"""The values of padding, by the name of the tensor."""


def held_out_rows(dataset: Any, count: int) -> Rows:
    """At most `count` rows of `dataset.context_length` tokens, the same in every run.

    Documents of at least that length come first. The beginning of each of them makes one row, so that every
    position has context. The other rows are packed with shorter documents in the order of the file, and the
    last document of a row is cut.

    Raises:
        ValueError: there is no held-out text.
    """
    length, documents = dataset.context_length, map_held_out(dataset.path, dataset.manifest)
    if not documents:
        raise ValueError(
            "train.eval_every_steps needs held-out text, but the data has none: prepare the data again with "
            "data.held_out_tokens empty or above 0, or set train.eval_every_steps to 0"
        )
    rows = [[document[:length]] for document in documents if len(document) >= length][:count]
    rows += _packed([x for x in documents if 0 < len(x) < length], length, count - len(rows))
    tokens = np.full((len(rows), length), dataset.manifest["pad_token_id"], dtype=np.int64)
    docs = np.full(tokens.shape, -1, dtype=np.int64)
    for at, row in enumerate(rows):
        filled = np.concatenate(row)
        tokens[at, : len(filled)] = filled
        docs[at, : len(filled)] = np.repeat(np.arange(len(row)), [len(document) for document in row])
    found = {"input_ids": tokens, "labels": shifted_labels(tokens, docs), "doc_ids": docs}
    return {name: torch.from_numpy(value) for name, value in found.items()}


def _packed(documents: Sequence[np.ndarray], length: int, count: int) -> Iterator[list[np.ndarray]]:
    """At most `count` rows, packed with documents that are shorter than a row, one after the other.

    Each row is a list of documents. The last row may hold fewer than `length` tokens.
    """
    row: list[np.ndarray] = []
    made = filled = 0
    for document in documents:
        if made >= count:
            return
        row.append(document[: length - filled])
        filled += len(row[-1])
        if filled == length:
            yield row
            row = []
            filled = 0
            made += 1
    if row and made < count:
        yield row


def padded_row(token_ids: Sequence[int], answer: int, length: int) -> Rows:
    """One document as a row of `length` tokens. Only its last `answer` tokens are to be predicted."""
    tokens = torch.tensor([token_ids])
    end = len(token_ids)
    labels = torch.full_like(tokens, IGNORED_LABEL)
    labels[0, end - 1 - answer : end - 1] = tokens[0, end - answer :]
    row = {"input_ids": tokens, "labels": labels, "doc_ids": torch.zeros_like(tokens)}
    return lengthened(row, length)


def lengthened(rows: Rows, length: int) -> Rows:
    """Rows with padding up to `length` tokens."""
    more = length - rows["input_ids"].shape[1]
    return {
        name: torch.nn.functional.pad(value, (0, more), value=FILLS[name]) for name, value in rows.items()
    }


_LEAST_BUCKET = 64  # tokens


@dataclass(frozen=True)
class PasskeyProbe:
    """A prompt that hides a number, and the number, which the model must say next.

    Attributes:
        prompt: token ids of the prompt.
        answer: token ids of the number.
        depth: where the number stands in the prompt; 0 = at the beginning, 1 = at the end.
    """

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    depth: float

    @classmethod
    def of(cls, tokenizer: Any, prompt: str, number: str, depth: float) -> "PasskeyProbe":
        """The passkey of a prompt and a number.

        Both are tokenised together, with a space between them, because their border may lie inside a token.
        The tokens with which the prompt alone begins too are the prompt; the others are the number.
        """
        alone = tokenizer(prompt)["input_ids"]
        whole = tokenizer(f"{prompt} {number}")["input_ids"]
        shared = 0
        while shared < min(len(alone), len(whole) - 1) and alone[shared] == whole[shared]:
            shared += 1
        return cls(tuple(whole[:shared]), tuple(whole[shared:]), depth)


def position_ranges(length: int) -> list[tuple[int, int]]:
    """`[start, end)` of at most 8 ranges of positions.

    From the second range on, each ends at twice the position at which it starts; the last range ends at
    `length`. Example: 300 tokens give (0, 64), (64, 128), (128, 256), (256, 300).
    """
    first = max(_LEAST_BUCKET, 1 << max(0, (length - 1).bit_length() - 7))
    doubles = [first << doubled for doubled in range(8)]
    bounds = [0, *(bound for bound in doubles if bound < length), length]
    return list(itertools.pairwise(bounds))


class HeldOutEvaluation:
    """Held-out rows and passkeys, measured by all ranks.

    Measuring leaves no trace: no weight, random state or position in the data changes. The metrics are:

    - `eval_loss`: nats per token, over all tokens with a label;
    - `eval_perplexity`;
    - `eval_loss_<start>_<end>`: the loss by position, which is the number of tokens of the same document
      before the predicted one;
    - `eval_passkey`: share of prompts whose number is the model's greedy continuation;
    - `eval_passkey_loss`: nats per token of the number;
    - `eval_passkeys`: for every passkey its depth, whether the number was continued right, and the loss.

    Args:
        rows: of held-out text, from `held_out_rows`.
        passkeys: prompts that are measured beside the text.

    Raises:
        ValueError: a passkey prompt with its number is longer than a row.
    """

    def __init__(self, rows: Rows, passkeys: Sequence[PasskeyProbe] = ()):
        self.passkeys = passkeys
        self.num_texts, length = rows["input_ids"].shape
        longest = max((len(key.prompt) + len(key.answer) for key in passkeys), default=0)
        if longest > length:
            raise ValueError(
                f"a passkey prompt has {longest} tokens, but rows have {length}: prepare data with a longer "
                "data.context_length, or set train.eval_passkeys to 0"
            )
        self.rows = [{name: x[at : at + 1] for name, x in rows.items()} for at in range(self.num_texts)]
        self.rows += [padded_row(key.prompt + key.answer, len(key.answer), length) for key in passkeys]
        self.buckets = position_ranges(length)

    @classmethod
    def of(
        cls, args: TrainArgs, dataset: Any, passkeys: Sequence[PasskeyProbe] = ()
    ) -> "HeldOutEvaluation | None":
        """The evaluation that a recipe asks for; None when it asks for none.

        Raises:
            ValueError: there is no held-out text, or a passkey prompt is longer than a row.
        """
        if not args.eval_every_steps:
            return None
        return cls(held_out_rows(dataset, args.eval_rows), passkeys)

    def measure(self, module: Any, mesh: Mesh, ulysses: Ulysses | None, control: RunControl) -> Values:
        """The metrics. All ranks call it together.

        Args:
            module: the `LanguageModelLoss` that the engine trains.
            ulysses: of the model; None = every rank holds whole rows.
            control: says when a signal came, and is told of progress.

        Raises:
            Interrupted: a signal came between two rows.
        """
        rows = scored_rows(module, mesh, ulysses, control, self.rows)
        texts, keys = self._sums(rows, mesh)
        total, tokens = texts.sum(1).tolist()
        loss = total / max(tokens, 1.0)
        perplexity = math.exp(min(loss, 100.0))  # the limit keeps it a number that fits into JSON
        values: Values = {"eval_loss": loss, "eval_perplexity": perplexity}
        for (start, end), total, tokens in zip(self.buckets, *texts.tolist(), strict=True):
            if tokens:
                values[f"eval_loss_{start}_{end}"] = total / tokens
        if self.passkeys:
            values |= self._by_depth(keys)
        return values

    def _sums(self, scored: Iterator[ScoredRow], mesh: Mesh) -> tuple[Tensor, Tensor]:
        """Sums over all ranks, for the text and for the passkeys.

        Args:
            scored: the rows that this rank scores.

        Returns:
            For the text `[2, buckets]`: the sum of losses and the number of tokens in each range of
            positions. For the passkeys `[2, passkeys]`: the sum of losses and the number of right tokens of
            each number.
        """
        ends = torch.tensor([end for _, end in self.buckets])
        texts = torch.zeros(2, len(self.buckets), dtype=torch.float64)
        keys = torch.zeros(2, len(self.passkeys), dtype=torch.float64)
        for index, losses, best, mine in scored:
            row = {name: value[:, mine] for name, value in self.rows[index].items()}
            labelled = row["labels"] != IGNORED_LABEL
            right = (best == row["labels"])[labelled].double()
            found = torch.stack([losses[labelled].double(), torch.ones_like(right)])
            if index >= self.num_texts:
                keys[:, index - self.num_texts] += torch.stack([found[0].sum(), right.sum()])
            else:
                positions = document_positions(self.rows[index]["doc_ids"])[:, mine] + 1
                texts.index_add_(1, torch.bucketize(positions[labelled], ends, right=True), found)
        sums = torch.tensor(mesh.sum([*texts.flatten().tolist(), *keys.flatten().tolist()]))
        return sums[: texts.numel()].view(texts.shape), sums[texts.numel() :].view(keys.shape)

    def _by_depth(self, sums: Tensor) -> Values:
        """Metrics of the passkeys, with every passkey's depth.

        All tokens of a number are judged at once: greedy decoding says the number exactly when each of its
        tokens is the most likely one after the true tokens before it.
        """
        details = [
            {"depth": key.depth, "correct": right == len(key.answer), "loss": loss / len(key.answer)}
            for key, loss, right in zip(self.passkeys, *sums.tolist(), strict=True)
        ]
        return {
            "eval_passkey": sum(key["correct"] for key in details) / len(details),
            "eval_passkey_loss": sum(key["loss"] for key in details) / len(details),
            "eval_passkeys": details,
        }


def scored_rows(
    module: Any, mesh: Mesh, ulysses: Ulysses | None, control: RunControl, rows: Sequence[Rows]
) -> Iterator[ScoredRow]:
    """Score rows of equal length, and yield what this rank holds of the rows that it scores.

    Every sequence-parallel group scores other rows. All ranks call it together. Further arguments and errors
    are those of `HeldOutEvaluation.measure`.

    Args:
        rows: single rows, each ``[1, length]``, the same list on all ranks.
    """
    tokens = rows[0]["input_ids"].shape[1]
    length = -(-tokens // mesh.sp_size) * mesh.sp_size  # the shortest length that falls into equal slices
    chunk = module.loss_head.chunk_bytes
    with _reading(module, ulysses, length) as whole:
        mine = slice(whole.start, max(whole.start, min(whole.stop, tokens)))
        for start in range(0, len(rows), mesh.dp_size):
            if control.interrupted():
                raise Interrupted
            index = start + mesh.dp_rank
            # ZeRO needs equally many passes of all groups. A group that has no row left repeats the first
            # row.
            row = lengthened(rows[index if index < len(rows) else 0], length)
            control.alive("evaluate")
            losses, best = _scores_of_row(module, mesh.device, row, whole, chunk)
            if index < len(rows):
                count = mine.stop - mine.start
                yield index, losses[:, :count].cpu(), best[:, :count].cpu(), mine


@contextlib.contextmanager
def _reading(module: Any, ulysses: Ulysses | None, row_length: int) -> Iterator[slice]:
    """Use it around the reading of rows of `row_length` tokens with a model that is being trained.

    The model is in evaluation mode meanwhile. The sequence-parallel size must divide `row_length`. Afterwards
    modes and row length are what they were.

    Yields:
        This rank's slice of a row.
    """
    modes = [(part, part.training) for part in module.modules()]
    trained_length = 0 if ulysses is None else ulysses.row_length
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


def _scores_of_row(
    module: Any, device: torch.device, row: Rows, mine: slice, chunk_bytes: int
) -> tuple[Tensor, Tensor]:
    """Losses and most likely next tokens of this rank's slice of a row, `[1, n_local]` each, on the device.

    A loss is in nats (fp32), and 0 without a label.

    Every rank of a sequence-parallel group is given the whole row.

    Args:
        mine: this rank's slice of the row.
        chunk_bytes: most bytes of logits that are held at a time.
    """

    def scores(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        rows = rows_in(chunk_bytes, len(weight))
        found = token_scores(partial(wide_logits, weight=weight), hidden, labels, rows)
        return -found.logprobs, found.likeliest

    return module(
        input_ids=row["input_ids"][:, mine].to(device),
        labels=row["labels"][:, mine].to(device),
        doc_ids=row["doc_ids"].to(device),
        reader=scores,
    )
