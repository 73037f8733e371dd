"""Heads in another order are the same model: in fp64 to 1e-12.

They are so through load, export and plans of other orders.
"""

import numpy as np
import pytest
import torch

import pod
from pod.modeling.loading import from_dense, reordered
from pod.modeling.retrieval_heads import RetrievalHeads

FAMILIES = [
    "llama",
    "llama-tied-biased-llama3",
    "mistral",
    "qwen2-tied",
    "qwen3",
    "granite",
    "olmo2",
    "mixtral",
]
GROUPS = {1: (6, 6), 3: (9, 3), 4: (8, 2), 8: (16, 2)}


def random_order(config, seed=0):
    """KV heads in random places, and the query heads of each in a random order."""
    rng = np.random.default_rng(seed)
    heads, groups = config.num_key_value_heads, config.num_attention_heads // config.num_key_value_heads
    return [
        [int(head * groups + at) for head in rng.permutation(heads) for at in rng.permutation(groups)]
        for _ in range(config.num_hidden_layers)
    ]


# all three roles, other ones in each head
LEAD = [[0, 0, 0], [None, 0, 1], [0, 2, 1], [3, None, 1], [3, 2, None]]


def naive_order(stock, order):
    """The stock model with its heads moved one by one, written without the code under test."""
    config = stock.config
    d, groups = (
        stock.model.layers[0].self_attn.head_dim,
        config.num_attention_heads // config.num_key_value_heads,
    )
    of_all = config.model_type == "olmo2"  # norms are of all heads, which stand one after the other
    state = {name: weight.clone() for name, weight in stock.state_dict().items()}
    for layer, row in enumerate(order):
        for place, head in enumerate(row):
            to, of = slice(place * d, place * d + d), slice(head * d, head * d + d)
            kv_to, kv_of = (slice(x // groups * d, x // groups * d + d) for x in (place, head))
            for name, weight in stock.state_dict().items():
                if not name.startswith(f"model.layers.{layer}.self_attn."):
                    continue
                if "q_proj" in name or ("q_norm" in name and of_all):
                    state[name][to] = weight[of]
                elif "k_proj" in name or "v_proj" in name or ("k_norm" in name and of_all):
                    state[name][kv_to] = weight[kv_of]
                elif "o_proj.weight" in name:
                    state[name][:, to] = weight[:, of]
    return state


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("groups", GROUPS)
@torch.no_grad()
def test_a_model_with_its_heads_moved_is_the_same_model(tools, family, groups):
    query, key_value = GROUPS[groups]
    sizes = {
        "num_attention_heads": query,
        "num_key_value_heads": key_value,
        "hidden_size": 16 * query,
        "head_dim": 16,
    }
    stock = tools.make_stock(family, **sizes)
    dense = pod.load_model(stock)
    order = random_order(stock.config)
    plan = pod.SharingPlan.dense(stock.config.num_hidden_layers, key_value)
    before = {name: weight.clone() for name, weight in stock.state_dict().items()}
    moved = pod.load_model(stock, plan=pod.SharingPlan(plan.lead, head_order=order))
    expected = naive_order(stock, order)
    for name, weight in moved.state_dict().items():
        assert torch.equal(weight, expected[name]), name
    assert all(torch.equal(weight, before[name]) for name, weight in stock.state_dict().items())
    ids = tools.random_ids(2, 50)
    assert (moved(ids).logits - dense(ids).logits).abs().max() <= 1e-12 * dense(ids).logits.abs().max()
    assert moved.config.head_order == order
    assert moved.model.embed_tokens.weight.data_ptr() == stock.model.embed_tokens.weight.data_ptr()
    assert moved.lm_head.weight.data_ptr() == stock.lm_head.weight.data_ptr()


@pytest.mark.parametrize("family", ["llama", "qwen2-tied"])
@torch.no_grad()
def test_a_plan_in_another_order_is_the_same_plan(tools, family):
    """Roles moved with their heads change nothing; on the heads that stand there by chance they do."""
    stock = tools.make_stock(family, num_attention_heads=6, num_key_value_heads=3)
    shift = [1, 2, 0]  # the same in all layers, so that followers keep their leads
    order = [[2 * head + at for head in shift for at in (1, 0)]] * 5
    turned = [[2 * head + at for head in shift for at in (0, 1)]] * 5
    plan = pod.SharingPlan(LEAD)
    ids, windows = tools.random_ids(2, 60), {"num_sink_tokens": 2, "num_recent_tokens": 5}
    expected = pod.load_model(stock, plan=plan, **windows)(ids).logits
    scale = expected.abs().max()
    placed = [[row[head] for head in shift] for row in LEAD]
    for queries in (order, turned):
        moved = pod.load_model(stock, plan=pod.SharingPlan(placed, head_order=queries), **windows)
        assert (moved(ids).logits - expected).abs().max() <= 1e-12 * scale
        cached = moved(ids, past_key_values=pod.make_cache(moved, "pod")).logits
        assert (cached - expected).abs().max() <= 1e-12 * scale
    wrong = pod.load_model(stock, plan=pod.SharingPlan(LEAD, head_order=order), **windows)
    assert (wrong(ids).logits - expected).abs().max() > 1e-3 * scale


@torch.no_grad()
def test_plans_find_their_order_from_any_other(tools):
    """Plans find the order of a model in memory from any other.

    The same order shares all weights, another is composed with the inverse, none goes back to the original.
    """
    stock = tools.make_stock("qwen2-yarn")
    lead, config = tools.lead, stock.config
    plans = [pod.SharingPlan(lead, head_order=random_order(config, seed)) for seed in (1, 2)]
    plain = pod.SharingPlan(lead)
    fresh = [pod.load_model(stock, plan=plan) for plan in (*plans, plain)]
    for source in fresh:
        for target, plan in zip(fresh, (*plans, plain), strict=True):
            found = pod.load_model(source, plan=plan)
            assert found.config.head_order == target.config.head_order
            for name, weight in target.state_dict().items():
                assert torch.equal(found.state_dict()[name], weight), name
    windows = pod.SharingPlan(pod.SharingPlan.windows(5, 2).lead, head_order=plans[0].head_order)
    shared = pod.load_model(fresh[0], plan=windows)
    for name, weight in fresh[0].state_dict().items():
        assert weight.data_ptr() == shared.state_dict()[name].data_ptr()
    dense = pod.load_model(fresh[0], layout="dense")
    assert dense.config.sharing_plan.is_dense and dense.config.head_order is None
    for name, weight in stock.state_dict().items():
        assert torch.equal(dense.state_dict()[name], weight), name


@torch.no_grad()
def test_an_export_is_not_permuted_twice(tools, tmp_path):
    stock = tools.make_stock("qwen3-g3")
    lead, ids = tools.lead, tools.random_ids(1, 40)
    first, second = (pod.SharingPlan(lead, head_order=random_order(stock.config, s)) for s in (1, 2))
    model = pod.load_model(stock, plan=first, num_sink_tokens=2, num_recent_tokens=5)
    model.save_pretrained(tmp_path / "export")
    first.save(tmp_path / "plan.json")
    stock.save_pretrained(tmp_path / "stock")
    expected = model(ids).logits
    for plan in (None, first, tmp_path / "plan.json"):
        again = pod.load_model(tmp_path / "export", plan=plan)
        assert again.config.head_order == model.config.head_order
        assert torch.equal(again(ids).logits, expected)
    for plan in (second, pod.SharingPlan(lead)):
        found = pod.load_model(tmp_path / "export", plan=plan).state_dict()
        for name, weight in pod.load_model(tmp_path / "stock", plan=plan).state_dict().items():
            assert torch.equal(found[name], weight), name
    for layout in ("dense", "window", "cla"):  # which leave plan and order behind
        found = pod.load_model(tmp_path / "export", layout=layout)
        assert found.config.head_order is None
        assert torch.equal(found(ids).logits, pod.load_model(stock, layout=layout)(ids).logits)


def test_a_cache_of_another_order_is_refused(tools):
    stock = tools.make_stock("llama")
    plain = pod.load_model(stock)
    plan = pod.SharingPlan(pod.SharingPlan.dense(5, 2).lead, head_order=random_order(stock.config))
    moved = pod.load_model(plain, plan=plan)
    cache = pod.make_cache(plain, "full")
    plain(tools.random_ids(1, 9), past_key_values=cache)
    with pytest.raises(ValueError, match="another shape, plan"):
        moved(tools.random_ids(1, 1), past_key_values=cache)
    with pytest.raises(ValueError, match="another shape, plan"):
        pod.make_cache(moved, "full").from_state(cache.state())


def test_orders_that_do_not_fit_are_refused():
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 16}
    original = pod.PodConfig(**sizes, head_order=[[0, 1, 2, 3]] * 2)
    assert original.head_order is None
    with pytest.raises(ValueError, match="of 2 query heads a layer, the model has 4"):
        pod.PodConfig(**sizes, head_order=[[1, 0], [0, 1]])
    with pytest.raises(ValueError, match="staying together"):
        pod.PodConfig(**sizes, head_order=[[0, 2, 1, 3]] * 2)
    with pytest.raises(ValueError, match="no windows, no head_order"):
        pod.PodConfig(**sizes, layout="cla", head_order=[[2, 3, 0, 1]] * 2)


def test_retrieval_heads_of_another_order_are_refused(tools):
    config = pod.load_model(tools.make_stock("llama")).config
    moved = pod.PodConfig(**(config.to_dict() | {"head_order": random_order(config)}))
    scores = ((0.0,) * 6,) * 5
    heads = RetrievalHeads(echo=scores, induction=scores, num_key_value_heads=2)
    heads.check_fits(config)
    with pytest.raises(ValueError, match="of another order of heads"):
        heads.check_fits(moved)
    found = {"head_order": moved.head_order}
    RetrievalHeads(echo=scores, induction=scores, num_key_value_heads=2, provenance=found).check_fits(moved)


def test_layers_whose_order_stays_and_other_weights_are_left_alone(tools):
    stock = tools.make_stock("llama-tied-biased-llama3")
    order = [list(range(6))] * 4 + [[5, 4, 3, 0, 1, 2]]
    config = pod.load_model(stock).config
    config = pod.PodConfig(**(config.to_dict() | {"head_order": order}))
    state = stock.state_dict()
    names = [name for name, weight in state.items() if reordered(name, weight, config, None) is not weight]
    assert sorted(names) == sorted(
        f"model.layers.4.self_attn.{name}"
        for name in ("q_proj.weight", "q_proj.bias", "k_proj.weight", "k_proj.bias",
                     "v_proj.weight", "v_proj.bias", "o_proj.weight")
    )  # fmt: skip
    own = from_dense(pod.load_model(stock), config)
    assert all(
        own.state_dict()[n].data_ptr() == w.data_ptr()
        for n, w in stock.state_dict().items()
        if n not in names
    )
