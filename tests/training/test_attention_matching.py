"""Attention that learns from the dense model's: errors by definition, gradients, checkpoints, memory."""

import pytest
import torch

from pod.training.args import TrainArgs
from pod.training.run.attention_matching import _RelativeError
from pod.training.run.distillation import PARTS
from pod.training.run.loss import LanguageModelLoss
from tests.training.attention_outputs import outputs_of_attention
from tests.training.test_distillation import DOCUMENTS, IDS, LABELS, make_model, with_adapters

WEIGHT = 10.0


def expected_error(adapted, plain):
    """The error by its definition, token by token, from a model under its plan and a dense one."""
    inputs = {"input_ids": IDS, "doc_ids": DOCUMENTS}
    with torch.no_grad():
        targets = outputs_of_attention(plain, **inputs)
    total = 0.0
    for out, target in zip(outputs_of_attention(adapted.get_base_model(), **inputs), targets, strict=True):
        for row in range(len(IDS)):
            for token in range(IDS.shape[1]):
                if LABELS[row, token] != -100:
                    wanted = target[row, token]
                    total = total + ((out[row, token] - wanted) ** 2).sum() / (wanted**2).sum() / len(targets)
    return total


@pytest.mark.parametrize("sinks", ["tokens", "constant"])
def test_the_error_and_its_gradients_are_those_of_the_definition(sinks):
    model = make_model(sinks=sinks, dtype=torch.float64)
    plain = make_model(lead=None, sinks=None if sinks == "constant" else sinks, dtype=torch.float64)
    plain.load_state_dict(model.state_dict(), strict=False)
    adapted = with_adapters(model).train()
    trained = [one for one in adapted.parameters() if one.requires_grad]
    without = LanguageModelLoss(adapted, distill=1.0)(IDS, LABELS, DOCUMENTS)
    gradients = torch.autograd.grad(without[0], trained, allow_unused=True)

    module = LanguageModelLoss(adapted, distill=1.0, distill_attention=WEIGHT)
    assert module.parts == (*PARTS, "attention_error")
    found = module(IDS, LABELS, DOCUMENTS)
    own = torch.autograd.grad(found[0], trained, allow_unused=True)

    error = expected_error(adapted, plain)
    of_error = torch.autograd.grad(error, trained, allow_unused=True)
    torch.testing.assert_close(found[-1].item(), error.item(), rtol=1e-6, atol=0)
    torch.testing.assert_close(found[0], without[0] + WEIGHT * error, rtol=1e-6, atol=0)
    torch.testing.assert_close(found[1:3], without[1:3])
    assert error > 1.0
    for one, plain_one, error_one in zip(own, gradients, of_error, strict=True):
        parts = [x for x in (plain_one, None if error_one is None else WEIGHT * error_one) if x is not None]
        torch.testing.assert_close(one, sum(parts), rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_layer_that_is_computed_again_gives_the_same_gradients(checkpointing):
    """And a second micro-batch, or one after an evaluation, gives what it gives alone."""
    adapted = with_adapters(make_model()).train()
    trained = [one for one in adapted.parameters() if one.requires_grad]
    batches = [(IDS, LABELS), (IDS.flip(1), LABELS.roll(2, 1))]

    def new_loss():
        return LanguageModelLoss(adapted, distill=1.0, distill_attention=WEIGHT)

    expected = [torch.autograd.grad(new_loss()(*batch, DOCUMENTS)[0], trained) for batch in batches]
    if checkpointing:
        adapted.get_base_model().gradient_checkpointing_enable()
    module = new_loss()
    for batch, gradients in zip(batches, expected, strict=True):
        found = module(*batch, DOCUMENTS)
        own = torch.autograd.grad(found[0], trained)
        for one, wanted in zip(own, gradients, strict=True):
            torch.testing.assert_close(one, wanted)
        with torch.no_grad():
            module(IDS, LABELS, DOCUMENTS, reader=lambda hidden, weight, labels: hidden)
    assert not module._matching._targets and not module._matching._errors


def test_targets_go_when_they_were_needed_for_the_last_time():
    adapted = with_adapters(make_model()).train()
    module = LanguageModelLoss(adapted, distill=1.0, distill_attention=WEIGHT)
    module(IDS, LABELS, DOCUMENTS)
    assert not module._matching._targets
    adapted.get_base_model().gradient_checkpointing_enable()
    found = module(IDS, LABELS, DOCUMENTS)
    assert len(module._matching._targets) == 3
    found[0].backward()
    assert not module._matching._targets


def test_an_unlabelled_token_and_a_target_of_zeros_do_no_harm():
    torch.manual_seed(0)
    out, target = torch.randn(2, 1, 5, 8, dtype=torch.float64)
    counted = torch.tensor([[True, False, True, True, True]])
    target[0, 3] = 0
    out[0, 1] = float("nan")
    out.requires_grad_()
    found = _RelativeError.apply(out, target, counted)
    (gradient,) = torch.autograd.grad(2.5 * found, out)
    kept = [0, 2, 4]
    small = out[0, kept].detach().requires_grad_()
    expected = ((small - target[0, kept]).square().sum(-1) / target[0, kept].square().sum(-1)).sum()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradient[0, kept], torch.autograd.grad(2.5 * expected, small)[0])
    assert (gradient[0, [1, 3]] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_outputs_have_the_error_of_wide_numbers(dtype):
    """Squares of outputs of 300 are beyond fp16."""
    torch.manual_seed(0)
    target = (300 * torch.randn(1, 4, 64)).to(dtype)
    out = (target + 30 * torch.randn(1, 4, 64)).to(dtype).requires_grad_()
    found = _RelativeError.apply(out, target, torch.ones(1, 4, dtype=torch.bool))
    (gradient,) = torch.autograd.grad(1000 * found, out)
    wide = out.detach().double().requires_grad_()
    expected = ((wide - target).square().sum(-1) / target.double().square().sum(-1)).sum()
    torch.testing.assert_close(found.double(), expected, rtol=3e-3, atol=0)
    (exact,) = torch.autograd.grad(1000 * expected, wide)
    assert (gradient.double() - exact).norm() <= 1e-2 * exact.norm()


def test_without_a_teacher_it_is_refused():
    with pytest.raises(ValueError, match="distill is 0, so there is no teacher: set distill=1"):
        TrainArgs(method="lora", distill_attention=10.0)
    with pytest.raises(ValueError, match="needs a teacher"):
        LanguageModelLoss(with_adapters(make_model()), distill_attention=10.0)


def test_a_layer_that_was_not_taught_is_no_part_of_a_mean():
    adapted = with_adapters(make_model()).train()
    module = LanguageModelLoss(adapted, distill=1.0, distill_attention=WEIGHT)
    module(IDS, LABELS, DOCUMENTS)
    with pytest.raises(AssertionError, match="every layer was taught"):
        module._matching.error()
