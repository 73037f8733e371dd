"""Random batches of unlike rows, every method: each row gets exactly the logits that it gets alone, and its oracle's.

A conversation is a few turns of prompts and decoded tokens. Rows differ in length and, where a method has one, in
budget, so that they begin to drop tokens at different steps. What a pass computes once for rows that are alike must
not serve rows that differ.

    POD_RANDOM_BATCHES=100 python -m pytest tests/modeling/test_random_batches.py     # a hundred batches per method
"""

import copy
import os
import random
import re
from dataclasses import dataclass

import oracles_ranked as ranked
import pytest
import torch
from method_table import ROWS, SELECTIONS, Row
from oracle_tools import run_cache, split
from oracles_channels import ThinK
from oracles_pairs import MiniCache, Quest
from oracles_windows import LMInfinite, StreamingLLM, WindowAttention

import pod

BATCHES = int(os.environ.get("POD_RANDOM_BATCHES", "1"))
"""Random batches per row of the method table."""

LONGEST_PROMPT = 70
ORACLES = {
    "full": ranked.Full,
    "streamingllm": StreamingLLM,
    "lm_infinite": LMInfinite,
    "wa": WindowAttention,
    "local_window": ranked.LocalWindow,
    "snapkv": ranked.SnapKV,
    "pyramidkv": ranked.PyramidKV,
    "adakv": ranked.AdaKV,
    "expected_attention": ranked.ExpectedAttention,
    "h2o": ranked.H2O,
    "roco": ranked.RoCo,
    "d2o": ranked.D2O,
    "think": ThinK,
    "quest": Quest,
    "minicache": MiniCache,
}
"""Oracles that take the options of a row as they are; the others have files of tests of their own."""

REFUSALS = "takes padding on the left only|would have|rows that are alike"
"""What methods that compress while a prompt is fed say of batches that they do not take."""


@dataclass(frozen=True)
class Turn:
    """What the rows of a batch are fed.

    Attributes:
        kind: "prompt" or "decode".
        counts: tokens of each row.
        side: where the padding of shorter rows stands: "left", "right" or "holes" (anywhere).
        widths: columns of the passes, see ``oracle_tools.split``.
    """

    kind: str
    counts: list[int]
    side: str = "left"
    widths: tuple[int, ...] = ()


def random_batch(rng: random.Random, row: Row) -> tuple[list[int] | None, list[Turn]]:
    """Budgets of the rows (None where the method has none), and one to four turns."""
    least = row.options.get("budget", 12)
    budgets = [least + rng.choice([0, 0, 1, 3, 4, 8]) for _ in range(rng.randint(2, 5))]
    turns = []
    for turn in range(rng.randint(1, 4)):
        if turn == 0:
            counts = [near(rng, budget) for budget in budgets]
        else:
            counts = [rng.randint(1, 9) for _ in budgets]
            if rng.random() < 0.15:
                counts[rng.randrange(len(counts))] = 0
        if rng.random() < 0.3:
            counts = counts[:1] * len(counts)
        if not any(counts):
            continue
        side = rng.choice(["left", "left", "left", "right", "holes"])
        widths = rng.choice([(), (), (rng.randint(1, 9),), (rng.randint(1, 20), rng.randint(1, 5))])
        turns.append(Turn("prompt", counts, side, widths))
        decoded = rng.choice([0, 1, 1, 2, 3, 5, rng.randint(6, 24)])
        if decoded:
            turns.append(Turn("decode", [decoded] * len(budgets), widths=(1,)))
    return (budgets if "budget" in row.options else None), turns


def near(rng: random.Random, budget: int) -> int:
    """Tokens of a first prompt: few, about as many as the budget, or many more."""
    return rng.choice([1, 2, 3, budget - 1, budget, budget + 1, budget + 5, rng.randint(30, LONGEST_PROMPT)])


def padding_mask(turn: Turn, generator: torch.Generator) -> torch.Tensor:
    """``[B, n]``: 1 = token."""
    columns = torch.arange(max(turn.counts))
    counts = torch.tensor(turn.counts)[:, None]
    if turn.side == "left":
        return (columns >= len(columns) - counts).long()
    mask = (columns < counts).long()
    if turn.side == "holes":
        for i in range(len(mask)):
            mask[i] = mask[i][torch.randperm(len(columns), generator=generator)]
    return mask


class Conversation:
    """Feeds turns to a cache of a batch, and notes what each row saw.

    Attributes:
        tokens, logits: of each row, without padding.
        turns: of each row, as ``run_cache`` and oracles take them.
    """

    def __init__(self, model, cache, count: int, seed: int):
        self.model, self.cache = model, cache
        self.generator = torch.Generator().manual_seed(seed)
        self.mask = torch.ones(count, 0, dtype=torch.long)
        self.tokens: list[list[int]] = [[] for _ in range(count)]
        self.logits: list[list[torch.Tensor]] = [[] for _ in range(count)]
        self.turns: list[list[tuple[str, int]]] = [[] for _ in range(count)]

    def feed(self, turn: Turn) -> None:
        mask = padding_mask(turn, self.generator)
        ids = torch.randint(3, 97, mask.shape, generator=self.generator)
        if turn.kind == "prompt":
            self.cache.begin_prompt(mask.shape[1])
        start = 0
        for width in split(mask.shape[1], turn.widths):
            columns = slice(start, start + width)
            self.mask = torch.cat((self.mask, mask[:, columns]), 1)
            logits = self.model(ids[:, columns], attention_mask=self.mask, past_key_values=self.cache).logits
            for i, real in enumerate(mask[:, columns].bool()):
                self.tokens[i].extend(ids[i, columns][real].tolist())
                self.logits[i].append(logits[i][real])
            start += width
        for own, count in zip(self.turns, turn.counts, strict=True):
            if count:
                own.append((turn.kind, count))


@torch.no_grad()
def check(model, row: Row, budgets: list[int] | None, turns: list[Turn], seed: int) -> None:
    """Assert that the rows of a batch do not disturb each other, and that each does what its oracle does."""
    options = row.options | ({"budget": budgets} if budgets else {})
    count = len(turns[0].counts)
    batch = Conversation(model, pod.make_cache(model, row.spec, **options), count, seed)
    try:
        for turn in turns:
            batch.feed(turn)
    except ValueError as error:
        if re.search(REFUSALS, str(error)):
            return
        raise
    batch.cache.check_integrity()
    for i in range(count):
        own = row.options | ({"budget": budgets[i]} if budgets else {})
        ids = torch.tensor(batch.tokens[i])
        got = torch.cat(batch.logits[i])
        alone = run_cache(model, pod.make_cache(model, row.spec, **own), ids[None], batch.turns[i])[0]
        where = f"row {i} of batch {seed}, budgets {budgets}, {turns}"
        assert (got - alone).abs().max() <= 1e-9, f"not the row alone: {where}"
        oracle = ORACLES.get(row.spec)
        if oracle is not None:
            arguments = {name: value for name, value in own.items() if name != "prefill"}
            expected = oracle(model, **arguments).run(ids, batch.turns[i])
            assert (got - expected).abs().max() <= 1e-9, f"not the oracle: {where}"


@pytest.mark.parametrize("row", ROWS, ids=[row.id for row in ROWS])
def test_each_row_of_a_random_batch_is_the_row_alone(model_of, row):
    for seed in range(BATCHES):
        budgets, turns = random_batch(random.Random(f"{row.id} {seed}"), row)
        check(model_of(row.model), row, budgets, turns, seed)


EQUAL_LENGTHS = [row for row in ROWS if row.id in ("streamingllm", "lm_infinite", "d2o", "roco")]


@pytest.mark.parametrize("row", EQUAL_LENGTHS, ids=[row.id for row in EQUAL_LENGTHS])
def test_rows_of_equal_lengths_and_unlike_budgets(model_of, row):
    """Rows go through each pass together. They are shorter than all budgets at first, or longer than all."""
    least = row.options["budget"]
    budgets = [least, least + 4, least + 1]
    for count in (3, least + 9):
        turns = [
            Turn("prompt", [count] * 3),
            Turn("decode", [3] * 3, widths=(1,)),
            Turn("prompt", [4] * 3),
            Turn("decode", [12] * 3, widths=(1,)),
        ]
        check(model_of(row.model), row, budgets, turns, count)


BUDGETED = [row for row in SELECTIONS if "budget" in row.options and row.spec != "kvzip"]


@pytest.mark.parametrize("row", BUDGETED, ids=[row.id for row in BUDGETED])
@torch.no_grad()
def test_copies_of_a_random_batch_continue_alike(model_of, row, tmp_path):
    """A copy in memory, one of the state and one from a file, with rows repeated and reordered as a beam search does."""
    model = model_of(row.model)
    least = row.options["budget"]
    budgets = [least, least + 3, least + 8]
    first = Conversation(model, pod.make_cache(model, row.spec, **(row.options | {"budget": budgets})), 3, 0)
    first.feed(Turn("prompt", [least + 5, 3, 30]))
    first.feed(Turn("decode", [4] * 3, widths=(1,)))
    restored = pod.make_cache(model, row.spec, **(row.options | {"budget": budgets}))
    restored.from_state(copy.deepcopy(first.cache.state()))
    pod.save_cache(model, first.cache, tmp_path / "cache.safetensors")
    caches = [
        copy.deepcopy(first.cache),
        restored,
        pod.load_cache(model, tmp_path / "cache.safetensors"),
        first.cache,
    ]
    beams = torch.tensor([2, 0, 0, 1])
    ids = torch.randint(3, 97, (4, 9), generator=torch.Generator().manual_seed(1))
    outputs = []
    for cache in caches:
        cache.reorder_cache(beams)
        mask = first.mask[beams]
        logits = []
        for column in range(ids.shape[1]):
            mask = torch.cat((mask, torch.ones(4, 1, dtype=torch.long)), 1)
            fed = ids[:, column : column + 1]
            logits.append(model(fed, attention_mask=mask, past_key_values=cache).logits)
        outputs.append(torch.cat(logits, 1))
    for output in outputs[1:]:
        assert (output - outputs[0]).abs().max() <= 1e-9
    for place, source in enumerate(beams.tolist()):
        cache = pod.make_cache(model, row.spec, **(row.options | {"budget": budgets[source]}))
        alone = torch.cat((torch.tensor(first.tokens[source]), ids[place]))[None]
        turns = [*first.turns[source][:1], ("decode", 4 + ids.shape[1])]
        expected = run_cache(model, cache, alone, turns)[0, -ids.shape[1] :]
        assert (outputs[0][place] - expected).abs().max() <= 1e-9
