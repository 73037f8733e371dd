"""An optimizer step waits for the device twice: for its loss, and behind the update for its gradient norm."""

from types import SimpleNamespace

import pytest
import torch

from pod.data.rows.order import RowCursor
from pod.training.args import TrainArgs
from pod.training.run.step_batches import StepBatches

ON_THE_HOST = {"pod:sum", "pod:largest", "pod:<genexpr>", "pod:of_documents"}
"""Reads of tensors that were never on a device: what ranks agree on, labels and documents of the rows."""


@pytest.mark.multiprocess
@pytest.mark.parametrize("run", ["stage1", "stage2", "stage3", "stage1_distilled", "stage3_distilled"])
def test_a_step_waits_for_the_device_twice(syncs_results, run):
    places = syncs_results[run]["places"]
    waits = {name: count for name, count in places.items() if name not in ON_THE_HOST}
    own = {name: count for name, count in waits.items() if name.startswith("pod:")}
    assert own == {"pod:step": 2}
    assert sum(waits.values()) - 2 <= (1 if run.startswith("stage3") else 4), (
        "DeepSpeed's own: is a gradient NaN or infinite?"
    )


def test_what_is_read_on_the_host_stays_there():
    labels = torch.tensor([[1, -100, 2], [-100, -100, 3]])
    rows = {"input_ids": labels.clamp_min(0), "labels": labels, "doc_ids": torch.zeros_like(labels)}
    mesh = SimpleNamespace(dp_rank=0, dp_size=1, device=torch.device("meta"))
    args = TrainArgs(micro_batch_size=2, prefetch_steps=0)
    data = SimpleNamespace(rows=lambda indices: rows)
    batches = StepBatches(args, data, RowCursor(12, 0), mesh, slice(0, 2))
    (batch,) = batches.next()
    assert {name: value.device.type for name, value in batch.items()} == {
        "input_ids": "meta",
        "labels": "meta",
        "doc_ids": "cpu",
    }
    assert batches.num_labels == 1  # of its slice
