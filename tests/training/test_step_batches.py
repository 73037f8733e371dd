"""The micro-batches of one rank, without process groups.

Which rows, which tokens of them, on which device.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pod.data import PackedDataset, write_packed_rows
from pod.data.rows.order import epoch_order
from pod.training.args import TrainArgs
from pod.training.run.step_batches import StepBatches

ROWS, CONTEXT = 11, 12


@pytest.fixture
def dataset(tmp_path):
    """Row r holds the tokens 20r, 20r + 1, … in documents of 5 and 4, and three of padding."""
    rows = [[np.arange(5) + 20 * row, np.arange(5, 9) + 20 * row] for row in range(ROWS)]
    write_packed_rows(tmp_path / "data", rows, context_length=CONTEXT, vocab_size=1000, tokenizer_sha256="ab")
    return PackedDataset(tmp_path / "data")


def make_batches(dataset, device="cpu", dp=(0, 1), tokens=slice(None), ahead=2, **settings):
    args = TrainArgs(prefetch_steps=ahead, **settings)
    mesh = SimpleNamespace(dp_rank=dp[0], dp_size=dp[1], device=torch.device(device))
    return StepBatches(args, dataset, dataset.cursor(seed=4), mesh, tokens)


@pytest.mark.parametrize("dp_rank", [0, 1, 2])
@pytest.mark.parametrize("ahead", [0, 2])
def test_micro_batches_are_the_ranks_share_of_the_step(dataset, dp_rank, ahead):
    """3 data-parallel ranks x 2 micro-batches of 2 rows: 12 rows a step, one more than an epoch has."""
    batches = make_batches(
        dataset, dp=(dp_rank, 3), ahead=ahead, micro_batch_size=2, gradient_accumulation_steps=2
    )
    assert batches.rows_per_step == 12
    stream = [row for epoch in range(4) for row in epoch_order(len(dataset), 4, epoch)]
    for step in range(3):
        start = 12 * step + 4 * dp_rank
        micro = batches.next()
        rows = [(batch["input_ids"][:, 0] // 20).tolist() for batch in micro]
        assert rows == [stream[start : start + 2], stream[start + 2 : start + 4]]
        assert all(batch["doc_ids"].shape == (2, CONTEXT) for batch in micro)
    batches.close()


def test_a_rank_of_a_group_gets_its_tokens_and_all_documents(dataset):
    batches = make_batches(dataset, tokens=slice(3, 10))
    (batch,) = batches.next()
    row = int(epoch_order(len(dataset), 4, 0)[0])
    ids = [20 * row + token for token in (3, 4, 5, 6, 7, 8)]
    assert batch["input_ids"].tolist() == [[*ids, 0]]
    assert batch["labels"].tolist() == [[ids[1], -100, *ids[3:], -100, -100]]
    assert batch["doc_ids"].tolist() == [[0] * 5 + [1] * 4 + [-1] * 3]
    assert all(value.is_contiguous() for value in batch.values())
    batches.close()


@pytest.mark.gpu
def test_batches_come_to_the_gpu_through_pinned_memory(dataset):
    # not the device that a new thread starts with, where there are two
    device = f"cuda:{torch.cuda.device_count() - 1}"
    batches, plain = make_batches(dataset, device), make_batches(dataset, ahead=0)
    for _ in range(2 * ROWS):
        (batch,), (expected,) = batches.next(), plain.next()
        places = {name: str(value.device) for name, value in batch.items()}
        assert places == {
            "input_ids": device,
            "labels": device,
            "doc_ids": "cpu",
        }  # segments are made on the host
        assert all(value.cpu().equal(expected[name]) for name, value in batch.items())
    (loaded,) = batches._load(dataset.cursor())
    assert all(value.is_pinned() for value in loaded.values())
    batches.close()
