"""Attention rows of the last queries equal those of the stock model's eager attention."""

import pytest
import torch

import pod
from pod.plan.recording import record_attention_rows


@pytest.mark.parametrize("family", ["llama", "qwen3-g3"])
@torch.no_grad()
def test_rows_equal_stock_attention(tools, family):
    stock = tools.make_stock(family, torch.float32)
    stock.set_attn_implementation("eager")
    ids = tools.random_ids(1, 60)
    expected = stock(ids, output_attentions=True).attentions
    rows = list(record_attention_rows(pod.load_model(stock), ids, 7))
    assert len(rows) == len(expected)
    for ours, theirs in zip(rows, expected, strict=True):
        torch.testing.assert_close(ours, theirs[0, :, -7:], rtol=1e-4, atol=1e-6)


def test_bad_requests(tools):
    with pytest.raises(ValueError, match="dense model"):
        next(record_attention_rows(tools.make_pod("llama"), tools.random_ids(1, 9), 2))
    with pytest.raises(ValueError, match="num_queries"):
        next(record_attention_rows(tools.make_pod("llama", plan=False), tools.random_ids(1, 9), 10))
