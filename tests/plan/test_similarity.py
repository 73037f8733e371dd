"""Jensen-Shannon similarity against its definition.

The bits are the same however the measurement is divided or interrupted.
"""

import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from pod.plan.args import ExploreArgs
from pod.plan.measured_costs import MeasuredCosts, measure_mean
from pod.plan.similarity import jensen_shannon_similarity


def random_rows(seed, num_layers=4, heads=3, queries=3, tokens=12, sharpness=3.0):
    """Causal attention rows of the last queries: later tokens are exactly 0."""
    logits = torch.randn(num_layers, heads, queries, tokens, generator=torch.Generator().manual_seed(seed))
    future = torch.ones(queries, tokens, dtype=torch.bool).triu(tokens - queries + 1)
    return torch.softmax((logits * sharpness).masked_fill(future, float("-inf")), dim=-1)


def rows_of(input_ids):
    """A stand-in for a model: rows that depend on the tokens."""
    return iter(random_rows(int(input_ids.sum())))


def divergence_by_definition(p, q):
    """JSD₂ = ½ KL(p ‖ m) + ½ KL(q ‖ m), m the mean, over the last axis."""
    p, q = p / p.sum(-1, keepdims=True), q / q.sum(-1, keepdims=True)
    mean = (p + q) / 2
    return sum(
        np.where(x > 0, x * np.log2(np.where(x > 0, x, 1) / np.where(x > 0, mean, 1)), 0).sum(-1) / 2
        for x in (p, q)
    )


def some_sequences(count=5):
    return [torch.arange(12) + 7 * index for index in range(count)]


def measure(folder, sequences=None, rows=rows_of):
    def similarity_of(ids):
        return jensen_shannon_similarity(torch.stack(list(rows(ids[None]))))

    return measure_mean(similarity_of, (4, 4, 3), sequences or some_sequences(), Path(folder))


@pytest.mark.parametrize("tile", [None, 1, 7, 36, 1000])
def test_equals_one_minus_the_divergence_by_definition(tile):
    rows = random_rows(0)
    found = jensen_shannon_similarity(rows, tile)
    exact = rows.double().numpy()
    for a in range(4):
        for b in range(4):
            divergence = divergence_by_definition(exact[a], exact[b])  # [Hq, q]
            np.testing.assert_allclose(found[a, b].numpy(), 1 - divergence.mean(-1), rtol=0, atol=1e-12)


def test_identical_rows_are_1_and_disjoint_rows_are_0():
    rows = torch.zeros(3, 1, 2, 4)
    rows[0, ..., :2] = rows[1, ..., :2] = 0.5
    rows[2, ..., 2:] = 0.5
    expected = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 1.0]], dtype=torch.float64)
    assert torch.equal(jensen_shannon_similarity(rows)[..., 0], expected)


def test_half_overlap_worked_by_hand():
    """p = (1, 0), q = (1/2, 1/2): JSD₂ = H(3/4, 1/4) - 1/2."""
    rows = torch.tensor([[1.0, 0.0], [0.5, 0.5]]).view(2, 1, 1, 2)
    expected = 1.5 + 0.75 * np.log2(0.75) + 0.25 * np.log2(0.25)
    assert jensen_shannon_similarity(rows)[0, 1, 0].item() == pytest.approx(expected, abs=1e-14)


def test_rows_that_are_no_distribution_are_refused():
    rows = random_rows(0)
    rows[1, 2, 0, 3] = float("nan")
    with pytest.raises(ValueError, match="NaN"):
        jensen_shannon_similarity(rows)


def test_mean_over_sequences(tmp_path):
    expected = torch.stack(
        [jensen_shannon_similarity(random_rows(int(s.sum()))) for s in some_sequences()]
    ).mean(0)
    assert (measure(tmp_path) - expected).abs().max() < 1e-12


def test_an_interrupted_run_continues_exactly(tmp_path):
    uninterrupted = measure(tmp_path / "whole")
    seen = []

    def failing(input_ids):
        if len(seen) == 3:
            raise KeyboardInterrupt
        seen.append(int(input_ids[0, 0]))
        return rows_of(input_ids)

    with pytest.raises(KeyboardInterrupt):
        measure(tmp_path / "cut", rows=failing)
    repeated = []
    resumed = measure(tmp_path / "cut", rows=lambda ids: repeated.append(int(ids[0, 0])) or rows_of(ids))
    assert torch.equal(resumed, uninterrupted)
    assert repeated == [21, 28]  # what was saved is not measured again


RANK_SCRIPT = """
import importlib.util, sys
import torch, torch.distributed as dist
spec = importlib.util.spec_from_file_location("helpers", sys.argv[1])
helpers = importlib.util.module_from_spec(spec)
spec.loader.exec_module(helpers)
dist.init_process_group("gloo")
found = helpers.measure(sys.argv[2], helpers.some_sequences(int(sys.argv[4])))
torch.save(found, f"{sys.argv[3]}-{dist.get_rank()}.pt")
dist.barrier()
dist.destroy_process_group()
"""


def run_ranks(tmp_path, world, num_sequences):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(RANK_SCRIPT))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": str(world),
    }
    command = [sys.executable, str(script), __file__, str(tmp_path / "cut"), str(tmp_path / "out")]
    processes = [
        subprocess.Popen([*command, str(num_sequences)], env=environment | {"RANK": str(rank)})
        for rank in range(world)
    ]
    try:
        assert [process.wait(timeout=3600) for process in processes] == [0] * world
    finally:
        for process in processes:
            process.kill()
    return [torch.load(tmp_path / f"out-{rank}.pt", weights_only=True) for rank in range(world)]


@pytest.mark.nightly
@pytest.mark.multiprocess
@pytest.mark.parametrize(("world", "num_sequences"), [(2, 5), (3, 2)])
def test_ranks_give_the_bits_of_one_process(tmp_path, world, num_sequences):
    """With 3 ranks and 2 sequences one rank has nothing to do; then one process reads what the ranks left."""
    alone = measure(tmp_path / "alone", some_sequences(num_sequences))
    for found in run_ranks(tmp_path, world, num_sequences):
        assert torch.equal(found, alone)

    def not_again(input_ids):
        raise AssertionError("measured again")

    assert torch.equal(measure(tmp_path / "cut", some_sequences(num_sequences), rows=not_again), alone)


def test_file_round_trip_and_foreign_files(tmp_path):
    path = tmp_path / "similarity.safetensors"
    values = jensen_shannon_similarity(random_rows(1))
    MeasuredCosts({"similarity": values}, {"model": "m", "n": 12}).save(path)
    loaded = MeasuredCosts.load(path)
    assert torch.equal(loaded.tensors["similarity"], values)
    assert loaded.provenance == {"model": "m", "n": 12}
    path.write_bytes(path.read_bytes()[:100])
    foreign = tmp_path / "foreign.safetensors"
    save_file({"similarity": values}, foreign, metadata={"schema": "1"})
    for broken in (path, foreign, tmp_path / "missing.safetensors"):
        with pytest.raises(ValueError, match=broken.name):
            MeasuredCosts.load(broken)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"threshold": 1.1}, "threshold is 1.1"),
        ({"target_saving": 1.0}, "target_saving is 1.0"),
        ({"roles": []}, "allowed are follow, window, or both"),
        ({"roles": ["follow", "follow"]}, "allowed are follow, window, or both"),
        ({"cost": "similarity"}, "prices followers only: set roles=follow"),
        ({"algorithm": "greedy"}, "groups by similarity only: set cost=similarity and roles=follow"),
        ({"budget_length": -1}, "budget_length is -1"),
        ({"retrieval_weight": -0.5}, "retrieval_weight is -0.5"),
        ({"num_sequences": 0}, "num_sequences is 0"),
    ],
)
def test_explore_args_say_what_is_allowed(values, words):
    with pytest.raises(ValueError, match=words):
        ExploreArgs(**values)
