"""Reading stops when every interval is full.

What was read is a fair sample, and the draw is that of all that was read.
"""

import json

import numpy as np
import pytest
from data_helpers import documents_of

from pod.data import DataArgs, prepare
from pod.data.balance.draw import draw
from pod.data.balance.length_intervals import interval_of
from pod.data.balance.reservoir import Reservoir
from pod.data.balance.sampling_keys import work_shard_order
from pod.data.run.read_sources import LEAST_WORK_SHARDS, prune_after

SEEDS = 200
BOUNDS = [1, 64, 128, 256, 512]
SOURCES = {"web": (400, 30, 4.2, 0.9), "books": (120, 10, 5.6, 0.7), "code": (200, 20, 4.9, 1.0)}
"""Work shards, documents in each, mean and deviation of the logarithm of their lengths."""


def corpus():
    """(documents of each work shard, source of each work shard); work shards of a source differ."""
    rng = np.random.default_rng(0)
    work_shards, sources = [], []
    for source, (count, size, mean, deviation) in enumerate(SOURCES.values()):
        for _ in range(count):
            number = max(3, int(size * np.exp(rng.normal(0, 0.4))))
            lengths = np.exp(rng.normal(mean + rng.normal(0, 0.25), deviation, number))
            work_shards.append(lengths.astype(int).clip(2, 512))
            sources.append(source)
    sizes = [len(work_shard) for work_shard in work_shards]
    documents = documents_of(np.concatenate(work_shards), np.repeat(sources, sizes))
    return np.split(documents, np.cumsum(sizes)[:-1]), np.array(sources)


def shares_of(pieces):
    """Share of each source in the tokens of each interval, and the tokens of each interval."""
    tokens = np.zeros((4, 3))
    np.add.at(tokens, (interval_of(pieces["length"], BOUNDS), pieces["source"]), pieces["length"])
    return tokens / tokens.sum(axis=1, keepdims=True), tokens.sum(axis=1)


def read_until_full(work_shards, order, args, seed):
    """(what is kept, number of work shards read), as preparation reads."""
    reservoir, due = Reservoir(args, seed, 0), 1
    for position, number in enumerate(order, start=1):
        reservoir.add(reservoir.cut(work_shards[number]))
        if position == due:
            reservoir.prune()
            due = prune_after(position)
            if reservoir.is_full and position >= LEAST_WORK_SHARDS:
                return reservoir, position
    raise AssertionError("some interval never fills")


@pytest.mark.slow
def test_early_stopping_is_unbiased_over_two_hundred_seeds():
    work_shards, sources = corpus()
    args = DataArgs(sources=list(SOURCES), context_length=512, shortest_interval=64, target_tokens=40_000)
    truth, _ = shares_of(np.concatenate(work_shards))
    shares, read = [], []
    for seed in range(SEEDS):
        reservoir, position = read_until_full(
            work_shards, work_shard_order(sources, seed).tolist(), args, seed
        )
        share, tokens = shares_of(draw(reservoir, args, seed).pieces)
        assert (tokens > 0.998 * 10_000).all() and (tokens <= 10_000).all()
        shares.append(share)
        read.append(position)
    assert LEAST_WORK_SHARDS <= np.mean(read) < 0.1 * len(work_shards)
    bias = np.mean(shares, axis=0) - truth
    assert np.abs(bias).max() < 0.012, bias.round(4)
    # The test could tell: one seed alone is that far off, and reading in the order of the files is no sample
    # at all.
    assert np.std(shares, axis=0).max() > 0.04
    reservoir, _ = read_until_full(work_shards, range(len(work_shards)), args, 0)
    assert np.abs(shares_of(draw(reservoir, args, 0).pieces)[0] - truth).max() > 0.1


def test_the_draw_is_that_of_all_that_was_read():
    """Equal to adding the same work shards at once, in any order, without settling in between."""
    work_shards, sources = corpus()
    args = DataArgs(sources=list(SOURCES), context_length=512, shortest_interval=64, target_tokens=20_000)
    for seed in range(3):
        order = work_shard_order(sources, seed).tolist()
        reservoir, position = read_until_full(work_shards, order, args, seed)
        whole = Reservoir(args, seed, 0)
        for number in sorted(order[:position]):
            whole.add(whole.cut(work_shards[number]))
        whole.prune()
        expected, found = draw(whole, args, seed), draw(reservoir, args, seed)
        assert found.pieces["work_shard"].tolist() == expected.pieces["work_shard"].tolist()
        assert found.intervals == expected.intervals


def test_work_shards_of_every_source_are_spread_evenly_and_in_another_order_for_every_seed():
    sources = np.repeat([0, 1, 2], [400, 40, 4])
    orders = [work_shard_order(sources, seed) for seed in range(2)]
    for order in orders:
        assert sorted(order) == list(range(444))
        for position in range(111, 444, 111):
            counts = np.bincount(sources[order[:position]], minlength=3)
            assert np.abs(counts - np.array([400, 40, 4]) * position / 444).max() <= 2
    assert (orders[0] == orders[1]).mean() < 0.1


@pytest.mark.usefixtures("no_pictures", "small_steps")
def test_sources_keep_their_shares_when_files_are_read(tmp_path, tokenizer, make_text):
    """End to end: two sources of 3 to 1, of which a part is read."""
    for name, count in (("a", 150), ("b", 50)):
        (tmp_path / name).mkdir()
        for number in range(count):
            records = [{"text": make_text(20 + 40 * (k % 2), seed=k + 10 * number)} for k in range(10)]
            (tmp_path / name / f"{number:03d}.jsonl").write_text("\n".join(map(json.dumps, records)))
    shares = []
    for seed in range(6):
        args = DataArgs(
            sources=[str(tmp_path / "a"), str(tmp_path / "b")],
            context_length=64,
            shortest_interval=32,
            target_tokens=4_000,
            deduplicate=False,
            workers=1,
        )
        told = prepare(args, tokenizer, tmp_path / f"out-{seed}", seed=seed).manifest["read"]
        assert told["units"] < 0.6 * told["units_of_all"]
        shares.append(told["sources"][0]["tokens_after"] / 4_000)
    assert np.mean(shares) == pytest.approx(0.75, abs=0.04)
