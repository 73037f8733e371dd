"""Equal bytes: PoD's are measured, the others' budgets follow."""

import pytest
import torch

from pod.eval.answer.budget import (
    ByteBudgets,
    CacheSpan,
    MethodRunner,
    length_class,
    measure_bytes,
    native_bytes_per_token,
)
from pod.eval.answer.methods import EVALUATED_METHODS


def test_bytes_per_token_by_hand(dense_model):
    assert (
        native_bytes_per_token(dense_model) == 2 * 4 * 2 * 8 * 8
    )  # K and V, layers, KV heads, head_dim, fp64


def test_pod_bytes_follow_the_plan(pod_model):
    measured = measure_bytes(pod_model, "pod", [400, 900])
    saving = pod_model.config.sharing_plan.saving(900, 4, 12)
    dense = 900 * native_bytes_per_token(pod_model)
    assert sum(measured[900].values()) == pytest.approx((1 - saving) * dense, rel=0.02)
    assert sum(measured[400].values()) < sum(measured[900].values())


def budgets_of(model):
    return ByteBudgets(native_bytes_per_token(model), lambda lengths: measure_bytes(model, "pod", lengths))


@torch.no_grad()
@pytest.mark.parametrize("name", ["streamingllm", "snapkv"])
def test_budgets_hold_pods_bytes_at_the_end(name, dense_model, pod_model):
    """After a prompt and 12 more tokens the method holds what PoD holds, within 2 %.

    It is measured on the caches.
    """
    length, fed, method = 900, 12, EVALUATED_METHODS[name]
    budgets = budgets_of(pod_model)
    cache = MethodRunner(method, lambda: dense_model, {}, budgets).cache(CacheSpan(length, fed))
    ids = torch.arange(length)[None] % 96
    dense_model(input_ids=ids[:, : length - fed], past_key_values=cache, use_cache=True)
    for position in range(length - fed, length):
        dense_model(input_ids=ids[:, position : position + 1], past_key_values=cache, use_cache=True)
    assert cache.nbytes == pytest.approx(budgets.pod_bytes(length), rel=0.02)
    assert budgets.pod_bytes(length) < 0.8 * length * native_bytes_per_token(dense_model)


def test_methods_without_budget_get_none(pod_model):
    for name in ("full", "pod"):
        runner = MethodRunner(EVALUATED_METHODS[name], lambda: pod_model, {}, budgets_of(pod_model))
        assert runner.budget(CacheSpan(64, 4)) is None and runner.cache_budget(CacheSpan(64, 4)) is None


def test_more_fed_tokens_than_bytes_is_an_error(pod_model):
    with pytest.raises(ValueError, match="snapkv: PoD's bytes at 64 tokens leave -"):
        budgets_of(pod_model).tokens(EVALUATED_METHODS["snapkv"], CacheSpan(64, fed=80))


def test_stated_bytes_without_pod_and_without_cache():
    row = ByteBudgets(10).stated(5, None, [])
    assert (row["dense_bytes"], row["bytes"], row["bytes_over_pod"], row["saving"]) == (50, None, None, None)
    row = ByteBudgets(10).stated(5, None, [20, 30])
    assert (row["bytes"], row["saving"]) == (30, pytest.approx(0.4))


def test_length_classes_round_up_to_64():
    assert [length_class(n) for n in (1, 63, 64, 65, 128, 1000)] == [64, 64, 64, 128, 128, 1024]
