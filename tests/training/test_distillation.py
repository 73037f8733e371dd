"""Distillation: the divergence and its gradients by definition, the teacher, and what is refused."""

import dataclasses

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

import pod
from pod.modeling.model.sharing import dense_lead
from pod.modeling.model.sinks import is_constant
from pod.training.args import TrainArgs, TrainRecipe
from pod.training.observe.metrics import training_flops
from pod.training.predict import preflight
from pod.training.predict.memory_estimate import TrainingJob, World, moments
from pod.training.predict.shapes import Shapes
from pod.training.predict.step_time import all_to_all_bytes, rank_flops, weight_bytes
from pod.training.run import loss
from pod.training.run.distillation import PARTS, distilled_losses, teacher_states
from pod.training.run.lora import add_lora, lora_settings
from pod.training.run.loss import LanguageModelLoss

LEAD = [[0, None], [None, 1], [0, None]]
IDS = torch.arange(46).reshape(2, 23) * 7 % 37
DOCUMENTS = torch.tensor([[0] * 23, [0] * 9 + [1] * 14])
LABELS = IDS.roll(-1, 1).masked_fill(torch.arange(23) % 5 == 4, -100)
SETTINGS = lora_settings(TrainArgs(method="lora", lora_rank=3))


def make_model(lead=LEAD, sinks="tokens", dtype=torch.float32):
    torch.manual_seed(0)
    config = pod.PodConfig(
        vocab_size=37, hidden_size=24, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        head_dim=6, intermediate_size=32, initializer_range=0.3, max_position_embeddings=64,
        attention_backend="reference", lead=lead, num_recent_tokens=3, sinks=sinks,
        num_sink_tokens=1 if sinks == "tokens" else 0, sink_keys=sinks == "constant",
    )  # fmt: skip
    model = pod.PodForCausalLM(config).to(dtype)
    for name, parameter in model.named_parameters():
        if is_constant(name):
            torch.nn.init.normal_(parameter)
    return model


def with_adapters(model):
    """Adapters that change what the model computes."""
    adapted = add_lora(model, SETTINGS)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator).to(parameter.dtype) / 5
    return adapted


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("chunk_bytes", [1, 8 * 37 * 5, 1 << 20])  # one token, five, all at a time
def test_losses_and_gradients_are_those_of_the_definition(share, chunk_bytes):
    torch.manual_seed(2)
    hidden, taught = torch.randn(2, 2, 23, 8, dtype=torch.float64)
    weight = torch.randn(37, 8, dtype=torch.float64)
    hidden.requires_grad_()
    found = distilled_losses(hidden, weight, taught, LABELS, share, chunk_bytes)
    (gradient,) = torch.autograd.grad(found[0] * 3.0, hidden)

    labelled = LABELS != -100
    own, wanted = ((x[labelled] @ weight.T).softmax(-1) for x in (hidden, taught))
    loss = -own[range(len(own)), LABELS[labelled]].log().sum()
    divergence = (wanted * (wanted / own).log()).sum()
    objective = (1 - share) * loss + share * divergence
    (expected,) = torch.autograd.grad(objective * 3.0, hidden)
    torch.testing.assert_close(found, torch.stack([objective, loss, divergence]).detach())
    torch.testing.assert_close(gradient, expected)
    assert (gradient[~labelled] == 0).all()


def test_16_bit_states_give_the_exact_divergence():
    """Two models that differ by little: rounded logits would hide it."""
    torch.manual_seed(3)
    weight = (torch.randn(500, 64) / 8).bfloat16()
    hidden = (4 * torch.randn(1, 40, 64)).bfloat16()
    taught = (hidden + 0.1 * torch.randn_like(hidden)).bfloat16()
    labels = torch.randint(500, (1, 40))
    results = []
    for kind in (torch.bfloat16, torch.float64):
        states = hidden.to(kind).requires_grad_()
        found = distilled_losses(states, weight.to(kind), taught.to(kind), labels, 1.0, 1 << 20)
        results.append((found.double(), torch.autograd.grad(found[0], states)[0].double()))
    (found, gradient), (expected, exact) = results
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert (gradient - exact).norm() <= 4e-3 * exact.norm()  # the gradient itself is rounded


def test_a_row_without_labels_has_no_loss_and_no_gradient():
    hidden = torch.randn(1, 5, 8, requires_grad=True)
    found = distilled_losses(hidden, torch.randn(37, 8), hidden.detach(), torch.full((1, 5), -100), 0.5, 99)
    assert found.tolist() == [0.0, 0.0, 0.0]
    assert (torch.autograd.grad(found[0], hidden)[0] == 0).all()


def test_what_is_not_finite_where_there_is_no_label_does_no_harm():
    torch.manual_seed(4)
    hidden, taught = torch.randn(2, 1, 5, 8)
    weight, labels = torch.randn(37, 8), torch.tensor([[3, -100, 4, -100, 5]])
    expected = distilled_losses(hidden, weight, taught, labels, 0.5, 99)
    hidden[0, 1], taught[0, 3] = float("nan"), float("inf")
    hidden.requires_grad_()
    found = distilled_losses(hidden, weight, taught, labels, 0.5, 99)
    torch.testing.assert_close(found, expected)
    assert torch.autograd.grad(found[0], hidden)[0].isfinite().all()


def test_a_trained_output_projection_is_refused():
    weight = torch.nn.Parameter(torch.randn(37, 8))
    with pytest.raises(ValueError, match="needs an output projection that is frozen"):
        distilled_losses(torch.randn(1, 5, 8), weight, torch.randn(1, 5, 8), torch.zeros(1, 5).long(), 1.0, 9)


@pytest.mark.parametrize("sinks", ["tokens", "constant", "none"])
def test_the_teacher_is_the_model_without_adapters_in_which_every_head_leads(sinks):
    model = make_model(sinks=sinks)
    plain = make_model(lead=None, sinks=None if sinks == "constant" else sinks)
    plain.load_state_dict(model.state_dict(), strict=False)
    adapted = with_adapters(model).train()
    before = adapted(input_ids=IDS).logits
    model.model.gradient_checkpointing = True
    found = teacher_states(model, IDS, DOCUMENTS)
    expected = plain.model(input_ids=IDS, doc_ids=DOCUMENTS).last_hidden_state
    torch.testing.assert_close(found, expected)
    assert not found.requires_grad
    # everything is as it was
    assert model.model.gradient_checkpointing and model.model.lead == model.config.sharing_plan.lead
    assert torch.equal(adapted(input_ids=IDS).logits, before)
    assert (before - plain(input_ids=IDS).logits).abs().max() > 0.1
    trained = {name for name, one in adapted.named_parameters() if one.requires_grad}
    assert all("lora_" in name or "sink" in name for name in trained) and trained


def test_a_teacher_that_fails_leaves_the_model_as_it_was(monkeypatch):
    model = with_adapters(make_model()).get_base_model()
    before = model(input_ids=IDS).logits

    def fail(*_, **__):
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="no memory"):
        patch.setattr(model.model, "run_layers", fail)
        teacher_states(model, IDS, DOCUMENTS)
    assert torch.equal(model(input_ids=IDS).logits, before)


def test_heads_of_layers_that_were_trained_with_windows_keep_them():
    sizes = {"vocab_size": 37, "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 6, "intermediate_size": 32}
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    stock = Gemma3ForCausalLM(Gemma3TextConfig(**sizes, layer_types=kinds, sliding_window=4))
    plan = pod.SharingPlan([[None, None], [1, None], [None, None]])
    model = pod.load_model(stock, plan=plan, num_sink_tokens=1, num_recent_tokens=3)
    dense = ((None, None), (1, 1), (None, None))
    assert dense_lead([2, 2, 2], model.config.trained_windows) == dense
    assert Shapes.from_config(model.config).dense == dense
    plain = pod.load_model(stock)
    adapted = with_adapters(model).get_base_model()
    found = teacher_states(adapted, IDS, DOCUMENTS)
    torch.testing.assert_close(found, plain.model(input_ids=IDS, doc_ids=DOCUMENTS).last_hidden_state)


def test_the_loss_of_a_model_has_parts_and_trains_adapters_and_constants(monkeypatch):
    module = LanguageModelLoss(with_adapters(make_model(sinks="constant")), distill=1.0)
    assert module.parts == PARTS
    sums = module(input_ids=IDS, labels=LABELS, doc_ids=DOCUMENTS)
    assert sums[0] == sums[2] > 0.1 and sums[1] > sums[2]
    sums[0].backward()
    for name, parameter in module.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, name
    with torch.no_grad():
        expected = LanguageModelLoss(module.model)(input_ids=IDS, labels=LABELS, doc_ids=DOCUMENTS)
    torch.testing.assert_close(sums[1], expected[0])
    # an evaluation asks no teacher
    monkeypatch.setattr(loss, "teacher_states", None)
    hidden = module(input_ids=IDS, labels=LABELS, doc_ids=DOCUMENTS, reader=lambda hidden, *_: hidden)
    assert hidden.shape == (2, 23, 24)


def test_a_model_that_is_its_own_teacher_stays_as_it_is():
    adapted = add_lora(make_model(lead=None), SETTINGS)  # adapters that change nothing yet
    module = LanguageModelLoss(adapted, distill=1.0)
    sums = module(input_ids=IDS, labels=LABELS, doc_ids=DOCUMENTS)
    sums[0].backward()
    assert sums[2].abs() <= 1e-5
    gradients = [one.grad.abs().max() for one in module.parameters() if one.grad is not None]
    assert gradients and max(gradients) <= 1e-5


def test_what_cannot_be_distilled_is_refused():
    with pytest.raises(ValueError, match=r"distill is 0.5 with method=full, .* set method=lora"):
        TrainRecipe(distill=0.5)
    for config, line in (
        (make_model(lead=None).config, r"distill is 0.5, but every head leads"),
        (pod.PodConfig(layer_windows=[4, None] * 16), r"distill is 0.5, but every head leads"),
        (pod.PodConfig(layout="window", num_sink_tokens=0), r"distill is 0.5 with model.layout=window"),
    ):
        with pytest.raises(ValueError, match=line):
            preflight.check_teacher(config, 0.5)
        preflight.check_teacher(config, 0.0)
    preflight.check_teacher(make_model().config, 0.5)


def test_estimates_count_the_teacher():
    model = make_model()
    lead = model.config.sharing_plan.lead
    args = TrainArgs(method="lora", sequence_parallel_size=2, loss_chunk_mib=1)
    jobs = [
        TrainingJob(Shapes.from_config(model.config), lead, changed, 4096, World(2, 2))
        for changed in (args, dataclasses.replace(args, distill=1.0))
    ]
    # forward, forward again and backward, and the teacher's forward; weights are gathered for two, and three
    for count, passes in ((all_to_all_bytes, 3), (weight_bytes, 2)):
        plain, distilled = map(count, jobs)
        assert distilled * passes == plain * (passes + 1), count.__name__
    assert 1.2 < rank_flops(jobs[1]) / rank_flops(jobs[0]) < 1.6
    plain, distilled = (training_flops(model.config, lead, job.args, [30, 11]) for job in jobs)
    pairs = 2 * sum(n * (n + 1) // 2 for n in (30, 11))  # for logits and for values
    shapes = jobs[0].shapes
    attention = 3 * 4 * 2 * 6 * pairs  # layers, query heads, two operations, head_dim
    assert distilled - plain == 2 * 41 * shapes.multiplied_weights(lead) + attention
    plain, distilled = (max(parts.get("teacher", 0) for parts in moments(job)) for job in jobs)
    states_and_gradient = 4096 // 2 * 24 * (2 + 4)  # tokens of a rank x hidden, in bfloat16 and in fp32
    assert (plain, distilled) == (0, states_and_gradient)


@pytest.mark.parametrize("checkpointing", ["full", "none"])
def test_estimates_count_what_attention_matching_keeps(checkpointing):
    model = make_model()
    args = TrainArgs(method="lora", distill=1.0, loss_chunk_mib=1, gradient_checkpointing=checkpointing)
    jobs = [
        TrainingJob(
            Shapes.from_config(model.config), model.config.sharing_plan.lead, changed, 64, World(1, 1)
        )
        for changed in (args, dataclasses.replace(args, distill_attention=10.0))
    ]
    plain, matched = map(moments, jobs)
    layer = 64 * 24 * 2  # tokens x hidden, in bfloat16
    added = [
        (after.get("teacher", 0) - before.get("teacher", 0)) / layer
        for before, after in zip(plain, matched, strict=True)
    ]
    # the loss, the reduction, the feed-forward part and attention of each layer, the update
    teacher = [3, 3, 1, 1, 2, 2, 3, 3, 0]
    own = [0, 0, 1, 1, 1, 1, 1, 1, 0] if checkpointing == "full" else teacher
    assert added == [a + b for a, b in zip(teacher, own, strict=True)]
