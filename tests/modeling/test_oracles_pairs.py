"""quest and minicache against their oracles."""

import math

import pytest
import torch
from oracle_checks import MODELS, assert_agrees
from oracle_tools import TURNS, NaiveDecoder, run_cache
from oracles_pairs import MiniCache, PackedMiniCache, PodQuest, Quest, angle, slerp, unit
from oracles_pod_selected import PodSelected

import pod

DECODING = [("prompt", 37), ("decode", 10), ("prompt", 3), ("decode", 6)]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "options", [{"budget": 8, "page_size": 4}, {"budget": 20}, {"budget": 40, "page_size": 4}], ids=str
)
def test_quest(tools, name, options):
    family, changes = MODELS[name]
    model, ids = tools.make_pod(family, plan=False, **changes), tools.random_ids(1, 56)[0]
    assert_agrees(
        model,
        Quest(model, **options),
        lambda: pod.make_cache(model, "quest", **options),
        ids,
        DECODING,
        ((), (7,)),
    )


@pytest.mark.parametrize(
    "options", [{"budget": 3, "page_size": 4}, {"budget": 9, "page_size": 3, "num_dense_layers": 0}], ids=str
)
def test_quest_reads_one_page_and_odd_pages(tools, options):
    model, ids = tools.make_pod("llama", plan=False), tools.random_ids(1, 50)[0]
    assert_agrees(
        model,
        Quest(model, **options),
        lambda: pod.make_cache(model, "quest", **options),
        ids,
        TURNS,
        ((), (1,)),
    )


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "options",
    [
        {"budget": 8, "page_size": 4},
        {"budget": 9, "page_size": 3, "num_dense_layers": 0},
        {"budget": 3, "page_size": 3},
    ],
    ids=str,
)
def test_pod_quest(tools, name, options):
    """Blocks that cross ``num_dense_layers``, windows and followers of several leads in one layer."""
    family, changes = MODELS[name]
    model, ids = tools.make_pod(family, **changes), tools.random_ids(1, 56)[0]
    alone = PodSelected(model, selection=None).run(ids, DECODING)
    oracle = PodQuest(model, **options)
    make = lambda: pod.make_cache(model, "pod+quest", **options)  # noqa: E731
    assert_agrees(model, oracle, make, ids, DECODING, ((), (7,)), full=alone)


@pytest.mark.parametrize("windows", [(0, 1), (2, 5), (4, 40)], ids=str)
def test_windows_of_pod_quest(tools, windows):
    model, ids = tools.make_pod("llama", windows=windows), tools.random_ids(1, 50)[0]
    options = {"budget": 9, "page_size": 4, "num_dense_layers": 1}
    alone = PodSelected(model, selection=None).run(ids, TURNS)
    make = lambda: pod.make_cache(model, "pod+quest", **options)  # noqa: E731
    assert_agrees(model, PodQuest(model, **options), make, ids, TURNS, ((), (5,)), full=alone)


@torch.no_grad()
def test_pod_quest_that_reads_all_pages_is_pod(tools):
    model, ids = tools.make_pod("llama"), tools.random_ids(1, 50)[0]
    alone = PodSelected(model, selection=None).run(ids, TURNS)
    for budget in (49, 64):
        cache = pod.make_cache(model, "pod+quest", budget=budget)
        assert (run_cache(model, cache, ids[None], TURNS)[0] - alone).abs().max() <= 1e-9


@torch.no_grad()
def test_quest_that_reads_all_pages_is_full_attention(tools):
    model, ids = tools.make_pod("llama", plan=False), tools.random_ids(1, 50)[0]
    full = NaiveDecoder(model).run(ids, TURNS)
    for budget in (49, 64):  # 4 pages of 16 for 50 tokens
        assert (Quest(model, budget=budget).run(ids, TURNS) - full).abs().max() <= 1e-12
        cache = pod.make_cache(model, "quest", budget=budget)
        assert (run_cache(model, cache, ids[None], TURNS)[0] - full).abs().max() <= 1e-9


def test_quest_bound_is_a_bound():
    """No key of a page has a larger product with the query than the page's bound."""
    generator = torch.Generator().manual_seed(0)
    quest = Quest.__new__(Quest)
    quest.page_size = 4
    for _ in range(50):
        q, keys = (torch.randn(n, 8, dtype=torch.float64, generator=generator) for n in (1, 10))
        for page in range(3):
            assert quest.bound(q[0], list(keys), page) >= (keys[page * 4 : page * 4 + 4] @ q[0]).max() - 1e-12


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("block", [4, 128])
def test_minicache(tools, name, block):
    family, changes = MODELS[name]
    model, ids = tools.make_pod(family, plan=False, **changes), tools.random_ids(1, 50)[0]
    assert_agrees(
        model,
        MiniCache(model, block=block),
        lambda: pod.make_cache(model, "minicache", block=block),
        ids,
        TURNS,
        ((), (7,)),
    )


@pytest.mark.parametrize(
    "options",
    [
        {"share": 0.0},
        {"share": 0.3, "t": 0.2},
        {"block": 1},
        {"retained": 0},
        {"retained": 33},
    ],
    ids=str,
)
@pytest.mark.parametrize("layers", [4, 5])
def test_minicache_settings(tools, options, layers):
    """Layers 2 and 3 are a pair; of five layers the last one stays alone."""
    model, ids = tools.make_pod("llama", plan=False, num_hidden_layers=layers), tools.random_ids(1, 50)[0]
    options = {"block": 6} | options
    assert_agrees(
        model,
        MiniCache(model, **options),
        lambda: pod.make_cache(model, "minicache", **options),
        ids,
        TURNS,
        ((), (7,)),
    )


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("options", [{"share": 0.3}, {"retained": 12}, {"share": 0.0, "block": 1}], ids=str)
@pytest.mark.parametrize("layers", [4, 5])
def test_packed_minicache(tools, options, layers, bits):
    model, ids = tools.make_pod("llama", plan=False, num_hidden_layers=layers), tools.random_ids(1, 50)[0]
    options = {"block": 6} | options
    oracle = PackedMiniCache(model, **options)
    oracle.bits = bits
    assert_agrees(
        model,
        oracle,
        lambda: pod.make_cache(model, f"minicache+int{bits}", group_size=4, residual=6, **options),
        ids,
        TURNS,
        ((), (7,)),
    )


@torch.no_grad()
def test_minicache_that_keeps_all_tokens_apart_is_full_attention(tools):
    model, ids = tools.make_pod("llama", plan=False), tools.random_ids(1, 50)[0]
    full = NaiveDecoder(model).run(ids, TURNS)
    assert torch.equal(MiniCache(model, block=4, share=1).run(ids, TURNS), full)
    cache = pod.make_cache(model, "minicache", block=4, share=1.0)
    assert (run_cache(model, cache, ids[None], TURNS)[0] - full).abs().max() <= 1e-9


def test_slerp():
    """A unit vector, t of the way along the angle; parallel and opposite vectors do not divide by zero."""
    x, y = (
        unit(torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(s))) for s in (1, 2)
    )
    omega = angle(x, y)
    e = slerp(x, y, omega, 0.6)
    assert math.isclose(e.norm(), 1, abs_tol=1e-12) and math.isclose(angle(x, e), 0.6 * omega, abs_tol=1e-9)
    assert (slerp(x, x, 0.0, 0.6) - x).abs().max() <= 1e-12
    assert (slerp(x, -x, math.pi, 0.6) + x).abs().max() <= 1e-12
