"""Parallel equals serial: one optimizer step on many rank layouts against plain PyTorch in one process."""

import pytest

LAYOUTS = (
    "sp2",
    "sp3",
    "sp4_replicated",
    "dp2",
    "sp2_dp2",
    "sp2_accumulated",
    "sp2_masked",
    "sp2_plain_store",
    "sp2_dense",
)
pytestmark = pytest.mark.multiprocess


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_and_every_raw_gradient_equal_one_process(parallel_results, layout):
    result = parallel_results[layout]
    assert result["names_equal"], "a parameter got no gradient, or one under another name"
    assert result["loss"] <= 1e-6
    assert result["gradient"] <= 1e-6, f"worst parameter: {result['worst']}"


def test_plan_is_sliced_by_the_heads_of_the_rank(parallel_results):
    whole = [[0, 0, 0], [1, 0, 0], [2, 0, 2], [3, 3, 2]]
    assert parallel_results["sp2"]["lead"] == [row[2:] for row in whole]  # 3 KV heads on 2 ranks: 2 + 1
    assert parallel_results["sp4_replicated"]["lead"] == [
        row[2:] for row in whole
    ]  # 6 replicas: 2 + 2 + 1 + 1


def test_sharing_sends_not_one_byte_more(parallel_results):
    assert parallel_results["sp2"]["bytes"] == parallel_results["sp2_dense"]["bytes"]
    assert all(count > 0 for count in parallel_results["sp2"]["bytes"].values())
