"""Greedy continuations of given texts during training, by repeated forward passes without a cache."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pod.training.args import TrainArgs
from pod.training.observe.observers import Periodic
from pod.training.observe.probes import Probes
from pod.training.observe.trackers import append_records
from pod.training.run.loss import IGNORED_LABEL
from pod.training.run.reading import read, reading, row_length_for, wide_logits

FILE_NAME = "samples.jsonl"
_GROWTH = 64  # tokens by which rows grow, so that most passes have the shape of the one before


class Samples(Periodic):
    """Whenever the model is evaluated, what it makes of `sample_prompts`: a line each in samples.jsonl."""

    def __init__(self, args: TrainArgs, folder: Path, probes: Probes):
        super().__init__(args.eval_every_steps)
        self.new_tokens, self.path, self.probes = args.sample_tokens, Path(folder) / FILE_NAME, probes

    def measure(self, trainer: Any, step: int) -> dict[str, float]:
        probes = self.probes
        continued = continue_greedily(trainer, probes.prompts, self.new_tokens, probes.end_ids)
        if trainer.mesh.rank == 0:
            records = []
            for text, token_ids in zip(probes.texts, continued, strict=True):
                said = probes.decode(token_ids) if probes.decode else str(token_ids)
                records.append({"prompt": text, "continuation": said, "token_ids": token_ids})
            append_records(self.path, step, records)
            shown = "\n\n".join(f"{record['prompt']} … {record['continuation']}" for record in records)
            trainer.monitor.text(step, "samples", shown)
        return {}


def check_samples(args: TrainArgs, probes: Probes, context_length: int) -> None:
    """Raise ValueError for a text that, continued, is longer than a row of the data, or that has no token."""
    for text, prompt in zip(probes.texts, probes.prompts, strict=True):
        if not prompt or len(prompt) + args.sample_tokens > context_length:
            raise ValueError(
                f"train.sample_prompts: {text[:40]!r} has {len(prompt)} tokens and is continued by {args.sample_tokens}; "
                f"allowed are 1 and more, together at most {context_length}, the length of a row"
            )


def continue_greedily(
    trainer: Any, prompts: Sequence[Sequence[int]], new_tokens: int, end_ids: frozenset[int] = frozenset()
) -> list[list[int]]:
    """The most likely next token, again and again; the same on all ranks.

    Every pass reads the whole texts anew: for some short prompts only. Prompts are divided among the data-parallel
    groups; each continuation ends before a token of `end_ids`.
    """
    mesh = trainer.mesh
    texts = [list(prompt) for prompt in prompts]
    share = -(-len(texts) // mesh.dp_size)
    own = range(mesh.dp_rank * share, min((mesh.dp_rank + 1) * share, len(texts)))
    rows = [*own, *[0] * (share - len(own))]  # all groups make passes over equally many rows
    ended = [False] * len(texts)
    for _ in range(new_tokens):
        longest = -(-max(map(len, texts)) // _GROWTH) * _GROWTH
        best = _next_tokens(trainer, [texts[at] for at in rows], row_length_for(longest, trainer))
        told = [0.0] * len(texts)
        for at, token in zip(own, best.tolist(), strict=False):
            told[at] = token
        for at, token in enumerate(map(int, mesh.sum(told))):
            ended[at] = ended[at] or token in end_ids
            if not ended[at]:
                texts[at].append(token)
        if all(ended):
            break
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]


def _next_tokens(trainer: Any, texts: list[list[int]], length: int) -> Tensor:
    """Most likely next tokens [B] (int64), on the one rank of the group that holds a text's end; 0 on the others."""
    tokens = torch.zeros(len(texts), length, dtype=torch.long)
    docs = torch.full_like(tokens, -1)
    for row, text in enumerate(texts):
        tokens[row, : len(text)], docs[row, : len(text)] = torch.tensor(text), 0
    ends = torch.tensor([len(text) - 1 for text in texts])
    with reading(trainer, length) as mine:
        local = ends - mine.start
        here = (local >= 0) & (local < mine.stop - mine.start)

        def last(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
            rows = torch.arange(len(texts), device=hidden.device)
            at = local.clamp(0, hidden.shape[1] - 1).to(hidden.device)
            return wide_logits(hidden[rows, at], weight).argmax(-1)

        best = read(trainer, tokens, docs, torch.full_like(tokens, IGNORED_LABEL), last)
    return torch.where(here, best.cpu(), 0)
