"""Costs of roles against whole attention matrices of models with other weights' order, head by head."""

import itertools

import pytest
import torch
from plan_models import RECENT, SINKS, any_order, gradients_of_attention, make_model

from pod.modeling.model.packed import Packing
from pod.plan.costs import (
    TextWithGradients,
    cost_shapes,
    match_query_heads,
    measure_costs,
    measure_query_head_errors,
    total_costs,
)
from pod.plan.recording import record_attention_inputs, sample_queries

TOKENS = 41
HEADS = [(6, 2), (3, 3), (4, 1), (9, 3)]  # query heads, KV heads


@pytest.fixture(scope="module")
def model():
    return make_model(6, 2)


@pytest.fixture(scope="module")
def input_ids():
    return torch.randint(0, 61, (1, TOKENS), generator=torch.Generator().manual_seed(5))


class Naive:
    """The definitions on n x n matrices, one query head after the other."""

    def __init__(self, model, input_ids, positions):
        self.model, self.positions = model, positions
        self.inputs = list(record_attention_inputs(model, input_ids))
        self.gradients = gradients_of_attention(model, input_ids)
        config = model.config
        self.groups, self.d = config.num_key_value_groups, config.head_dim
        n = input_ids.shape[1]
        i, j = torch.arange(n)[:, None], torch.arange(n)
        self.causal, self.distant = (
            j <= i,
            (j >= config.num_sink_tokens) & (i - j >= config.num_recent_tokens),
        )

    def logits(self, layer, query_head):
        inputs = self.inputs[layer]
        raw = inputs.q[query_head] @ inputs.k[query_head // self.groups].T / self.d**0.5
        return raw.masked_fill(~self.causal, float("-inf"))

    def error(self, layer, query_head, logits):
        """Change of the layer's attention output ``[n, hidden]`` when one query head has these logits."""
        change = logits.softmax(-1) - self.logits(layer, query_head).softmax(-1)
        out = change @ self.inputs[layer].v[query_head // self.groups]
        weight = self.model.model.layers[layer].self_attn.o_proj.weight
        return out @ weight[:, query_head * self.d : (query_head + 1) * self.d].T

    def changes(self, layer, errors):
        """By how much the summed loss changes, to first order, by the change at each position ``[n]``."""
        return (sum(errors) * self.gradients[layer]).sum(-1)

    def cost(self, layer, errors):
        """Every error against the gradient of every position with distant tokens, per token of the text."""
        has_distant = self.distant.logical_and(self.causal).any(-1)
        products = sum(errors)[self.positions] @ self.gradients[layer][has_distant].T
        return products.square().mean() / 2 * has_distant.double().mean()

    def following(self, lead, layer, of, query_head):
        logits = torch.where(self.distant, self.logits(lead, of), self.logits(layer, query_head))
        return self.error(layer, query_head, logits)

    def window(self, layer, head):
        masked = (
            (h, self.logits(layer, h).masked_fill(self.distant, float("-inf")))
            for h in range(head * self.groups, (head + 1) * self.groups)
        )
        return self.changes(layer, [self.error(layer, h, logits) for h, logits in masked])

    def follow(self, lead, layer, of, head, order):
        """The follower's query head order[place] takes the logits of the lead's query head at `place`."""
        pairs = [(of * self.groups + place, head * self.groups + int(g)) for place, g in enumerate(order)]
        return self.cost(layer, [self.following(lead, layer, a, b) for a, b in pairs])


@pytest.mark.parametrize(
    ("heads", "windows"), [*((x, (2, 5)) for x in HEADS), ((6, 2), (0, 1)), ((6, 2), (9, 3))]
)
@torch.no_grad()
def test_costs_equal_their_definitions(input_ids, heads, windows):
    model = make_model(*heads, *windows)
    order = any_order(model.config)
    for num_queries in (1, 7, TOKENS - sum(windows)):
        found = measure_costs(model, TextWithGradients.of(model, input_ids, num_queries), order)
        naive = Naive(model, input_ids, sample_queries(TOKENS, num_queries, *windows).positions)
        pairs = list(itertools.product(range(4), range(heads[1])))
        changes = torch.stack([naive.window(*pair) for pair in pairs])
        expected = changes @ changes.T / (2 * TOKENS)
        assert (expected.diagonal() > 1e-9).all()
        torch.testing.assert_close(found["windows"].flatten(2).flatten(0, 1), expected, rtol=1e-9, atol=1e-15)
        for layer, head in pairs:
            for lead, of in itertools.product(range(layer), range(heads[1])):
                expected = naive.follow(lead, layer, of, head, order[lead, layer, of, head])
                assert expected > 1e-9
                assert found["follow"][lead, layer, of, head].item() == pytest.approx(
                    expected.item(), rel=1e-9
                )
            for lead in range(layer):
                expected = naive.follow(lead, layer, head, head, range(heads[0] // heads[1]))
                assert found["in_place"][lead, layer, head].item() == pytest.approx(expected.item(), rel=1e-9)
        for name in ("follow", "in_place"):
            assert all(not found[name][lead, layer].any() for layer in range(4) for lead in range(layer, 4))


@torch.no_grad()
def test_costs_of_models_with_norms_behind_attention_and_factors_on_it(input_ids):
    """Norms behind attention and factors on it, as OLMo 2, Gemma 3 and Granite have them."""
    for changes in (
        {"norm_placement": "behind", "qk_norm": True},
        {"norm_placement": "both", "norm_offset": 1.0, "attention_out_bias": True},
        {"residual_multiplier": 0.3, "attention_multiplier": 0.2, "logits_scaling": 2.0},
    ):
        model = make_model(6, 2, **changes)
        for name, weight in model.named_parameters():
            if "layernorm" in name or "bias" in name:
                torch.nn.init.uniform_(weight, 0.2, 2.0)
        order = any_order(model.config)
        naive = Naive(model, input_ids, sample_queries(TOKENS, 7, SINKS, RECENT).positions)
        found = measure_costs(model, TextWithGradients.of(model, input_ids, 7), order)
        for layer, head in itertools.product(range(4), range(2)):
            expected = naive.window(layer, head).square().mean() / 2
            assert found["windows"][layer, head, layer, head].item() == pytest.approx(
                expected.item(), rel=1e-9
            )
        expected = naive.follow(1, 3, 0, 1, order[1, 3, 0, 1])
        assert found["follow"][1, 3, 0, 1].item() == pytest.approx(expected.item(), rel=1e-9)


@torch.no_grad()
def test_errors_of_query_heads_equal_their_definition(model, input_ids):
    found = measure_query_head_errors(model, TextWithGradients.of(model, input_ids, 7))
    naive = Naive(model, input_ids, sample_queries(TOKENS, 7, SINKS, RECENT).positions)
    assert found.shape == (4, 4, 6, 6)
    for lead, layer, a, b in itertools.product(range(4), range(4), range(6), range(6)):
        expected = naive.cost(layer, [naive.following(lead, layer, a, b)]).item() if lead < layer else 0.0
        assert found[lead, layer, a, b].item() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("heads", HEADS)
def test_the_order_is_the_cheapest_of_all(heads):
    errors = torch.rand(
        3, 3, heads[0], heads[0], dtype=torch.float64, generator=torch.Generator().manual_seed(2)
    )
    groups = heads[0] // heads[1]
    order = match_query_heads(errors, heads[1])
    assert order.shape == (3, 3, heads[1], heads[1], groups)
    changed = False
    for lead, layer, i, j in itertools.product(range(3), range(3), range(heads[1]), range(heads[1])):
        own = errors[lead, layer, i * groups : (i + 1) * groups, j * groups : (j + 1) * groups]
        cost = {
            x: sum(own[p, g].item() for p, g in enumerate(x)) for x in itertools.permutations(range(groups))
        }
        found = tuple(order[lead, layer, i, j].tolist())
        assert found == (min(cost, key=cost.__getitem__) if lead < layer else tuple(range(groups)))
        changed |= found != tuple(range(groups))
    assert changed == (groups > 1)


def test_a_pair_that_was_planted_in_another_head_and_order_is_found(input_ids):
    """Layer 2's KV head 0 gets the queries and keys of layer 1's KV head 1, its query heads turned round."""
    twin = make_model(6, 2)
    lower, upper = twin.model.layers[1], twin.model.layers[2]
    lower.self_attn.o_proj.weight.data.zero_()
    lower.mlp.down_proj.weight.data.zero_()
    for head, of in zip((0, 1, 2), (4, 5, 3), strict=True):
        rows, source = (slice(x * 8, x * 8 + 8) for x in (head, of))
        upper.self_attn.q_proj.weight.data[rows] = lower.self_attn.q_proj.weight.data[source]
    upper.self_attn.k_proj.weight.data[:8] = lower.self_attn.k_proj.weight.data[8:]
    order = match_query_heads(measure_query_head_errors(twin, TextWithGradients.of(twin, input_ids, 9)), 2)
    assert order[1, 2, 1, 0].tolist() == [2, 0, 1]
    found = measure_costs(twin, TextWithGradients.of(twin, input_ids, 9), order)
    assert found["follow"][1, 2, 1, 0] < 1e-15
    assert min(found["follow"][1, 2, 0, 0], found["follow"][1, 2, 1, 1], found["in_place"][1, 2, 0]) > 1e-6


def test_weights_that_give_no_numbers_are_one_line(model, input_ids):
    broken = make_model(6, 2)
    broken.model.layers[1].self_attn.v_proj.weight.data[0, 0] = float("nan")
    with pytest.raises(ValueError, match="NaN or infinite values on this text: try model.dtype=float32"):
        measure_costs(broken, TextWithGradients.of(broken, input_ids, 5), any_order(broken.config))


def test_retrieval_adds_with_its_weight():
    shapes = cost_shapes(2, 2)
    tensors = {name + end: torch.rand(shapes[name]) for name in shapes for end in ("", "_retrieval")}
    total = total_costs(tensors, 0.5)
    assert set(total) == set(cost_shapes(2, 2))
    expected = tensors["windows"] + 0.5 * tensors["windows_retrieval"]
    assert torch.equal(torch.from_numpy(total["windows"]), expected)
    alone = {name: tensors[name] for name in total}
    assert torch.equal(torch.from_numpy(total_costs(alone, 0.5)["follow"]), tensors["follow"])


def test_queries_are_spread_over_all_positions_with_distant_tokens():
    sample = sample_queries(41, 4, 2, 5)
    assert sample.positions.tolist() == [15, 23, 32, 40]
    assert sample_queries(10, 3, 2, 5).positions.tolist() == [7, 8, 9]
    assert sample.distant[0].nonzero().flatten().tolist() == list(range(2, 11))
    assert sample.future[0].nonzero().flatten().tolist() == list(range(16, 41))
    with pytest.raises(
        ValueError, match="num_queries is 35, but only 34 positions of a sequence of 41 tokens"
    ):
        sample_queries(41, 35, 2, 5)


@pytest.mark.parametrize("heads", [(6, 2), (3, 3)])
@torch.no_grad()
def test_costs_of_packing_equal_attention_to_packed_tokens(heads):
    """Costs of packing equal attention to packed tokens, query by query.

    What is 128 and more tokens back, in whole groups of 32, is read as 4 bits give it back.
    """
    model = make_model(*heads)
    ids = torch.randint(0, 61, (1, 250), generator=torch.Generator().manual_seed(5))
    found = measure_costs(model, TextWithGradients.of(model, ids, 60), any_order(model.config))
    positions = sample_queries(250, 60, SINKS, RECENT).positions
    naive = Naive(model, ids, positions)
    groups, d = heads[0] // heads[1], naive.d
    for layer, head in itertools.product(range(4), range(heads[1])):
        inputs = naive.inputs[layer]
        k, v = (as_4_bits(x[head], per_channel) for x, per_channel in ((inputs.k, True), (inputs.v, False)))
        errors = {"lead4": torch.zeros(250, 40).double(), "follow4": torch.zeros(250, 40).double()}
        for i, g in itertools.product(positions.tolist(), range(groups)):
            old = [j for j in range(i + 1) if j <= i - 128 and j < 224]
            q = inputs.q[head * groups + g, i]
            exact, keys, values = inputs.k[head, : i + 1] @ q, inputs.k[head].clone(), inputs.v[head].clone()
            keys[old], values[old] = k[old], v[old]
            dense = (exact / d**0.5).softmax(0) @ inputs.v[head, : i + 1]
            for name, logits in (("lead4", keys[: i + 1] @ q), ("follow4", exact)):
                change = (logits / d**0.5).softmax(0) @ values[: i + 1] - dense
                weight = model.model.layers[layer].self_attn.o_proj.weight
                place = head * groups + g
                errors[name][i] += weight[:, place * d : (place + 1) * d] @ change
        for name, error in errors.items():
            expected = naive.cost(layer, [error]).item()
            assert expected > 1e-12 and found[name][layer, head].item() == pytest.approx(expected, rel=1e-9)


def as_4_bits(x, per_channel):
    packing, out = Packing(bits=4, group_size=32, per_channel=per_channel), x.clone()
    packing.unpack(packing.pack(x[None, None, :224]), out[None, None, :224])
    return out


def test_costs_of_windows_alone_are_those_beside_followers(model, input_ids):
    """Without an order nobody may follow; what is left is the same."""
    everything = measure_costs(model, TextWithGradients.of(model, input_ids, 5), any_order(model.config))
    alone = measure_costs(model, TextWithGradients.of(model, input_ids, 5), None)
    assert set(alone) == set(everything) - {"follow", "in_place", "follow4"}
    for name, cost in alone.items():
        assert torch.equal(cost, everything[name])
    total = total_costs(alone, 1.0)
    assert set(total) == set(alone)
    with pytest.raises(ValueError, match="costs of follow4, in_place are missing"):
        total_costs({name: everything[name] for name in ("windows", "lead4", "follow")}, 1.0)
