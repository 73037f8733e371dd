"""Autocast, as trainers use it with ``bf16=True``: queries, keys, values have one dtype, little is lost."""

import copy

import pytest
import torch

import pod
from pod.modeling.model import decoder_layer

FAMILIES = ["llama", "qwen3", "olmo2", "gemma3", "qwen3-moe"]
WITH_HEAD_NORMS = ["qwen3", "olmo2", "gemma3", "qwen3-moe"]


def bfloat16():
    return torch.autocast("cpu", dtype=torch.bfloat16)


def relative_error(found, exact):
    return ((found.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_autocast_loses_no_more_than_in_the_stock_model(tools, family):
    stock, ids = tools.make_stock(family, torch.float32, initializer_range=0.1), tools.random_ids(2, 60)
    model = pod.load_model(stock)
    exact = copy.deepcopy(model).double()(ids).logits
    with bfloat16():
        ours, theirs = model(ids).logits, stock(ids).logits
        cache = pod.make_cache(model)
        parts = [model(part, past_key_values=cache).logits for part in ids.split([40, 18, 1, 1], dim=1)]
    limit = 1.5 * relative_error(theirs, exact)
    assert relative_error(ours, exact) <= limit
    assert relative_error(torch.cat(parts, dim=1), exact) <= limit


@pytest.mark.parametrize("family", WITH_HEAD_NORMS)
def test_queries_keys_and_values_are_of_one_dtype(tools, family, monkeypatch):
    """Where they are not, flash refuses them, and CUDA falls to the n × n reference."""
    model, ids, seen = tools.make_pod(family, torch.float32).train(), tools.random_ids(2, 40), []
    attend = decoder_layer.attend

    def recording(q, tokens, lead, *arguments, **options):
        seen.append({x.dtype for x in (q, *tokens, *(lead or ()))})
        return attend(q, tokens, lead, *arguments, **options)

    monkeypatch.setattr(decoder_layer, "attend", recording)
    with bfloat16():
        loss = model(ids, labels=ids).loss
    loss.backward()
    assert seen == [{torch.bfloat16}] * 5
    assert all(
        weight.grad.isfinite().all() and weight.dtype == torch.float32 for weight in model.parameters()
    )
