"""Gradients from the loss to what heads put out, layer by layer, against one graph of the whole model."""

import gc
import weakref

import pytest
import torch
from plan_models import RECENT, SINKS, gradients_of_attention, make_model

from pod.modeling.model.attend import Visibility
from pod.plan import gradients
from pod.plan.divergence import Divergence, dense_states
from pod.plan.gradients import (
    Windows,
    drawn,
    gradient_of_draws,
    read_with_gradients,
    stream_under,
)
from pod.plan.recording import last_stream, record_attention_inputs


@pytest.fixture(scope="module")
def input_ids():
    return torch.randint(0, 61, (1, 41), generator=torch.Generator().manual_seed(5))


def test_tokens_are_drawn_by_their_probabilities():
    table = torch.tensor([[0.2, 0.5, 0.3]]).expand(5, 3)
    assert drawn(table, torch.tensor([0.0, 0.19, 0.21, 0.69, 0.71])).tolist() == [0, 0, 1, 1, 2]
    assert drawn(torch.tensor([[0.0, 1.0, 0.0]] * 2), torch.tensor([0.0, 0.9999999])).tolist() == [1, 1]


WINDOWS = Windows(Visibility(SINKS, RECENT))


def read(model, input_ids, windows=WINDOWS, objective=gradient_of_draws):
    """The text, and what was received of each layer, in the order in which it came."""
    found = {}
    text = read_with_gradients(
        model, input_ids, windows, objective, lambda layer, *pair: found.setdefault(layer, []).append(pair)
    )
    assert all(len(pairs) == 1 for pairs in found.values()), "once for each layer"
    return text, {layer: pair for layer, [pair] in found.items()}


@pytest.mark.parametrize("heads", [(6, 2), (3, 3), (4, 1)])
@pytest.mark.parametrize(
    "changes", [{}, {"norm_placement": "both", "norm_offset": 1.0}, {"logits_scaling": 3.0}]
)
@pytest.mark.parametrize("held", [True, False])
@torch.no_grad()
def test_gradients_are_those_of_one_graph(input_ids, heads, changes, held, monkeypatch):
    if not held:
        monkeypatch.setattr(gradients, "HELD_BYTES", 0)
    model = make_model(*heads, **changes)
    _, found = read(model, input_ids)
    assert list(found) == [3, 2, 1, 0], "from the last layer down"
    for number, of_projection in enumerate(gradients_of_attention(model, input_ids)):
        weight = model.model.layers[number].self_attn.o_proj.weight
        expected = (of_projection @ weight).unflatten(1, (heads[0], 8)).transpose(0, 1)
        torch.testing.assert_close(found[number][1], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("share", [0.0, 0.3])
@torch.no_grad()
def test_layers_that_are_computed_again_give_the_same(input_ids, share, monkeypatch):
    model = make_model(6, 2)
    windows = Windows(Visibility(SINKS, RECENT), share=share)
    held_text, held = read(model, input_ids, windows)
    monkeypatch.setattr(gradients, "HELD_BYTES", 0)
    again_text, again = read(model, input_ids, windows)
    for one, other in zip(held_text.streams, again_text.streams, strict=True):
        assert torch.equal(one, other)
    for layer in range(4):
        for one, other in zip(held[layer], again[layer], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)
            assert one.shape == (6, 41, 8) and one.abs().max() > 1e-6


@torch.no_grad()
def test_a_text_that_was_read_gives_what_layers_read(input_ids):
    model = make_model(6, 2)
    text, _ = read(model, input_ids)
    for layer, expected in enumerate(record_attention_inputs(model, input_ids)):
        for one, other in zip(text.inputs_of(model, layer)[:-1], expected[:-1], strict=True):
            torch.testing.assert_close(one, other)
    torch.testing.assert_close(
        model.lm_head(model.model.after_layers(text.streams[-1])), model(input_ids, use_cache=False).logits
    )


@torch.no_grad()
def test_a_mixture_of_share_1_is_the_model_with_windows_and_of_share_0_the_dense_one(input_ids):
    import pod

    model = make_model(6, 2)
    window = Visibility(SINKS, RECENT)
    windows = pod.SharingPlan(lead=[[None, None]] * 4)
    planned = pod.load_model(model, plan=windows)
    dense = last_stream(model, input_ids)
    torch.testing.assert_close(read(model, input_ids, Windows(window))[0].streams[-1], dense)
    mixed = read(model, input_ids, Windows(window, share=1.0))[0].streams[-1]
    expected = planned.model(input_ids=input_ids, use_cache=False).last_hidden_state
    torch.testing.assert_close(model.model.after_layers(mixed), expected)
    assert not torch.allclose(mixed, dense)
    torch.testing.assert_close(stream_under(model, input_ids, Windows(window, share=1.0)), mixed)


@torch.no_grad()
def test_each_head_goes_as_far_as_its_share_says(input_ids):
    import pod

    model = make_model(6, 2)
    lead = [[None, 0], [1, 1], [2, None], [None, None]]
    share = torch.tensor([[float(one is None) for one in row] for row in lead])
    stream = stream_under(model, input_ids, Windows(Visibility(SINKS, RECENT), share=share))
    planned = pod.load_model(model, plan=pod.SharingPlan(lead=lead))
    expected = planned.model(input_ids=input_ids, use_cache=False).last_hidden_state
    torch.testing.assert_close(model.model.after_layers(stream), expected)


@torch.no_grad()
def test_the_dense_model_has_no_divergence_from_itself(input_ids):
    model = make_model(6, 2)
    stream = last_stream(model, input_ids)
    at = torch.tensor([3, 30])
    objective = Divergence(dense_states(model, input_ids[0], at), at)
    assert objective(model, stream).abs().max() < 1e-15
    assert objective.value == pytest.approx(0.0, abs=1e-15)
    moved = objective(model, 1.1 * stream + 0.1)
    assert moved[0, at].abs().max() > 1e-5 and not moved[0, 4:30].any()
    assert objective.value > 1e-5


@torch.no_grad()
def test_a_divergence_is_that_of_whole_distributions_a_few_at_a_time(input_ids, monkeypatch):
    model = make_model(6, 2)
    dense = last_stream(model, input_ids)
    stream, at = 1.1 * dense + 0.1, torch.arange(3, 40)
    wanted, own = (model.lm_head(model.model.after_layers(x))[0, at].log_softmax(-1) for x in (dense, stream))
    expected = torch.nn.functional.kl_div(own, wanted, reduction="batchmean", log_target=True).item()
    objective = Divergence(dense_states(model, input_ids[0], at), at)
    whole = objective(model, stream)
    assert objective.value == pytest.approx(expected, rel=1e-12)
    monkeypatch.setattr("pod.plan.divergence.LOGIT_BYTES", 4 * 61 * 5)
    torch.testing.assert_close(objective(model, stream), whole)
    assert objective.value == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("share", [0.0, 0.3])
def test_nothing_of_a_text_that_was_read_is_left(input_ids, share, held, monkeypatch):
    if not held:
        monkeypatch.setattr(gradients, "HELD_BYTES", 0)
    model, alive = make_model(6, 2), []
    hooks = [
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _, given: alive.append(weakref.ref(given[0])))
        for layer in model.model.layers
    ]
    read(model, input_ids, WINDOWS._replace(share=share))
    for hook in hooks:
        hook.remove()
    gc.collect()
    assert len(alive) >= 4 and all(one() is None for one in alive)
