"""Bytes that caches really hold: unique storages, against each method's own rule."""

import pytest
import torch
from rule_bytes import rule_nbytes

import pod


def storages(cache):
    """Every tensor reachable from the cache by walking attributes, counted once per storage."""
    found, visited, stack = {}, set(), [cache]
    while stack:
        item = stack.pop()
        if id(item) in visited:
            continue
        visited.add(id(item))
        if isinstance(item, torch.Tensor):
            found[item.untyped_storage().data_ptr()] = item.untyped_storage().nbytes()
        elif isinstance(item, dict):
            stack.extend(item.values())
        elif isinstance(item, list | tuple):
            stack.extend(item)
        elif hasattr(item, "__dict__") and not isinstance(item, torch.nn.Module | pod.PodConfig | type):
            stack.extend(vars(item).values())
    return sum(found.values())


CASES = [
    ("full", {}),
    ("pod", {}),
    ("streamingllm", {"budget": 100}),
    ("snapkv", {"budget": 100, "window": 8}),
]


@pytest.mark.parametrize(("spec", "options"), CASES, ids=[c[0] for c in CASES])
@pytest.mark.parametrize("batch", [1, 3])
@torch.no_grad()
def test_bytes_equal_rule_and_storages(tools, spec, options, batch):
    model = tools.make_pod("qwen3", torch.float32, windows=(8, 56), plan=spec == "pod")
    cache, n = pod.make_cache(model, spec, **options), 700
    ids = tools.random_ids(batch, n + 30)
    model(ids[:, :n], past_key_values=cache)
    for t in range(n, n + 30):
        model(ids[:, t : t + 1], past_key_values=cache)
    assert cache.nbytes == storages(cache) == sum(cache.nbytes_by_part().values())
    held = cache.nbytes - cache.nbytes_by_part()["bookkeeping"]
    assert abs(held / rule_nbytes(cache) - 1) <= 0.01
    assert cache.nbytes_by_part()["bookkeeping"] < 0.01 * pod_bytes(model, n + 30, batch)
    if spec == "pod":
        rule = 1 - model.config.sharing_plan.saving(n + 30, 8, 56)
        assert abs(held / pod_bytes(model, n + 30, batch) / rule - 1) <= 0.01
    if spec == "streamingllm":
        assert held == pod_bytes(model, 100, batch)


def pod_bytes(model, n, batch):
    """Dense K and V of ``n`` tokens."""
    config = model.config
    return 2 * batch * n * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4


@torch.no_grad()
def test_rows_can_be_reordered_repeated_and_reset(tools):
    model = tools.make_pod("llama")
    ids, mask = tools.random_ids(3, 40), torch.ones(3, 40, dtype=torch.long)
    mask[0, :7] = 0
    cache = pod.make_cache(model)
    model(ids[:, :39], attention_mask=mask[:, :39], past_key_values=cache)
    order = torch.tensor([2, 0, 0])
    cache.reorder_cache(order)
    out = model(ids[order, 39:], attention_mask=mask[order], past_key_values=cache).logits
    fresh = pod.make_cache(model)
    model(ids[:, :39], attention_mask=mask[:, :39], past_key_values=fresh)
    expected = model(ids[:, 39:], attention_mask=mask, past_key_values=fresh).logits[order]
    assert (out - expected).abs().max() <= 1e-12
    cache.batch_repeat_interleave(2)
    assert cache.batch_size == 6
    cache.reset()
    assert cache.nbytes == 0 and cache.get_seq_length() == 0
    assert torch.equal(
        model(ids, past_key_values=cache).logits, model(ids, past_key_values=pod.make_cache(model)).logits
    )
