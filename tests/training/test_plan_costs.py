"""Costs of pairs against whole attention matrices and automatic differentiation, and what dp makes of them."""

import pytest
import torch

import pod
from pod.modeling.recording import record_attention_inputs
from pod.training.plan_costs import MEASURED_COSTS, measure_pair_costs, output_gradients, sample_queries

SINKS, RECENT, TOKENS = 2, 5, 41


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(1)
    config = pod.PodConfig(
        vocab_size=61,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=48,
        max_position_embeddings=64,
        initializer_range=0.3,
        num_sink_tokens=SINKS,
        num_recent_tokens=RECENT,
        attention_backend="reference",
    )
    return pod.PodForCausalLM(config).double().eval()


@pytest.fixture(scope="module")
def input_ids():
    return torch.randint(0, 61, (1, TOKENS), generator=torch.Generator().manual_seed(5))


def whole_logits(q, k, groups):
    """``[H, G, n, n]``, nothing masked."""
    heads, n, d = k.shape
    return (q.view(heads, groups, n, d) @ k[:, None].transpose(2, 3)) / d**0.5


def entropy(p):
    return -torch.where(p > 0, p * p.clamp_min(1e-300).log2(), 0.0).sum(-1)


def naive_costs(model, input_ids, positions, gradients):
    """The definitions, pair by pair, on n x n matrices. gradients: per layer ``[q, Hq * d]``."""
    inputs = list(record_attention_inputs(model, input_ids))
    groups, n = model.config.num_key_value_groups, input_ids.shape[1]
    i, j = torch.arange(n)[:, None], torch.arange(n)
    distant = (j >= SINKS) & (i - j >= RECENT)
    layers, heads = len(inputs), inputs[0].k.shape[0]
    costs = torch.zeros(4, layers, layers, heads, dtype=torch.float64)
    logits = [whole_logits(x.q, x.k, groups).masked_fill(j > i, float("-inf")) for x in inputs]
    for layer in range(layers):
        weight = model.model.layers[layer].self_attn.o_proj.weight
        for lead in range(layer):
            mixed = torch.where(distant, logits[lead], logits[layer]).softmax(-1)[:, :, positions]
            own = logits[layer].softmax(-1)[:, :, positions]
            out, error = (p @ inputs[layer].v[:, None] for p in (own, mixed - own))  # [H, G, q, d]
            mass = (own * distant[positions]).sum(-1)
            parts = [
                logits[x].masked_fill(~distant, float("-inf")).softmax(-1)[:, :, positions]
                for x in (lead, layer)
            ]
            middle = (parts[0] + parts[1]) / 2
            divergence = entropy(middle) - (entropy(parts[0]) + entropy(parts[1])) / 2
            stream = inputs[layer].hidden_states[positions]
            for head in range(heads):
                flat = torch.zeros(len(positions), heads, groups, 8, dtype=torch.float64)
                flat[:, head] = error[head].transpose(0, 1)
                flat = flat.flatten(1)
                costs[0, lead, layer, head] = (mass * divergence)[head].mean()
                costs[1, lead, layer, head] = error[head].square().sum() / out[head].square().sum()
                projected = (flat @ weight.T).norm(dim=-1) / stream.norm(dim=-1)
                costs[2, lead, layer, head] = projected.square().mean()
                costs[3, lead, layer, head] = (flat * gradients[layer]).sum(-1).square().mean() / 2
    return costs


def autograd_gradients(model, input_ids, positions):
    """Gradients of the summed loss at the inputs of o_proj, from one graph without checkpoints or slices."""
    seen = []

    def keep(module, arguments):
        arguments[0].retain_grad()
        seen.append(arguments[0])

    handles = [layer.self_attn.o_proj.register_forward_pre_hook(keep) for layer in model.model.layers]
    loss = model(input_ids, labels=input_ids).loss * (input_ids.shape[1] - 1)
    loss.backward()
    model.zero_grad()
    for handle in handles:
        handle.remove()
    return [x.grad[0, positions] for x in seen]


@pytest.mark.parametrize("num_queries", [1, 7, TOKENS - SINKS - RECENT])
def test_costs_equal_their_definitions(model, input_ids, num_queries):
    positions = sample_queries(TOKENS, num_queries, SINKS, RECENT).positions
    with torch.enable_grad():
        gradients = autograd_gradients(model, input_ids, positions)
    with torch.no_grad():
        expected = naive_costs(model, input_ids, positions, gradients)
    found = measure_pair_costs(model, input_ids, num_queries)
    predicting = 4 if num_queries > 1 else 3  # the last token predicts nothing, its gradient is 0
    assert (expected[:predicting, 0, 1:].amin((1, 2)) > 1e-6).all()
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_gradients_leave_the_model_as_it_was(model, input_ids):
    positions = torch.tensor([7, 20, 40])
    expected = autograd_gradients(model, input_ids, positions)
    model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    found = output_gradients(model, input_ids, positions)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-13)
    frozen = [name for name, weight in model.named_parameters() if not weight.requires_grad]
    assert frozen == ["model.layers.0.mlp.up_proj.weight"]
    assert not model.training and not model.model.gradient_checkpointing
    assert all(weight.grad is None for weight in model.parameters())
    assert not any(layer.self_attn.o_proj._backward_hooks for layer in model.model.layers)
    model.requires_grad_(True)


def test_only_lower_layers_are_leads_and_names_choose(model, input_ids):
    found = measure_pair_costs(model, input_ids, 5, ["projected", "distant"])
    assert found.shape == (2, 4, 4, 2)
    assert bool((found.permute(0, 3, 1, 2).tril() == 0).all())
    whole = measure_pair_costs(model, input_ids, 5)
    order = [MEASURED_COSTS.index(name) for name in ("projected", "distant")]
    assert torch.equal(found, whole[order])


def test_a_layer_with_the_leads_queries_and_keys_costs_nothing(model, input_ids):
    """Layers 1 and 2 with equal inputs and projections differ in nothing that sharing replaces."""
    twin = pod.PodForCausalLM(model.config).double().eval()
    twin.load_state_dict(model.state_dict())
    for name in ("q_proj", "k_proj"):
        source = getattr(twin.model.layers[1].self_attn, name).weight
        getattr(twin.model.layers[2].self_attn, name).weight.data.copy_(source)
    twin.model.layers[1].self_attn.o_proj.weight.data.zero_()
    twin.model.layers[1].mlp.down_proj.weight.data.zero_()
    found = measure_pair_costs(twin, input_ids, 9)
    assert found[:, 1, 2].max() < 1e-15
    assert found[:2, 0, 1].min() > 1e-6


def test_queries_are_spread_over_all_positions_with_distant_tokens():
    sample = sample_queries(41, 4, 2, 5)
    assert sample.positions.tolist() == [15, 23, 32, 40]
    assert sample_queries(10, 3, 2, 5).positions.tolist() == [7, 8, 9]
    assert sample.distant[0].nonzero().flatten().tolist() == list(range(2, 11))
    assert sample.future[0].nonzero().flatten().tolist() == list(range(16, 41))
    with pytest.raises(
        ValueError, match="35 queries with distant tokens asked for, a sequence of 41 tokens has 34"
    ):
        sample_queries(41, 35, 2, 5)
