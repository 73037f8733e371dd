"""Distillation: the chunked divergence and the attention error against whole matrices in fp64, and an untouched student."""

import gc
import weakref

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import pod
from pod.training.args import TrainArgs
from pod.training.run.distill import AttentionError, linear_distillation, make_distillation, needs_teacher
from pod.training.run.engine import save_activations
from pod.training.run.lora import add_lora, lora_settings
from pod.training.run.loss import LanguageModelLoss, causal_model

VOCAB, HIDDEN = 53, 12
LEAD = [[0, None], [None, 1], [0, None], [3, 1]]


def inputs(dtype=torch.float64, masked=True):
    generator = torch.Generator().manual_seed(0)
    tensors = [
        torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)
        for shape in ((2, 19, HIDDEN), (VOCAB, HIDDEN), (2, 19, HIDDEN), (VOCAB, HIDDEN))
    ]
    labels = torch.randint(0, VOCAB, (2, 19), generator=generator)
    if masked:
        labels[:, ::3] = -100
    return *tensors, labels


def naive(hidden, weight, taught, teacher_weight, labels, share, temperature, near=None, context=0.0):
    """The definition, with whole logits; the divergence that is given back counts every token once."""
    student, teacher = hidden @ weight.T, taught @ teacher_weight.T
    keep = labels != -100
    cross_entropy = torch.nn.functional.cross_entropy(student[keep], labels[keep], reduction="sum")
    p, q = ((x[keep] / temperature).softmax(-1) for x in (teacher, student))
    divergence = temperature**2 * (p * (p.log() - q.log())).sum(-1)
    counts = 1 + context * need_of(taught, near, teacher_weight, labels) if context else 1
    mixed = (1 - share) * cross_entropy + share * (counts * divergence).sum()
    return mixed, cross_entropy, divergence.sum()


def need_of(taught, near, teacher_weight, labels):
    """Nats by which the loss of each labelled token rises from `taught` to `near`, from 0 to 5."""
    keep = labels != -100
    every, window = (x[keep] @ teacher_weight.T for x in (taught, near))
    losses = [-x.softmax(-1)[range(len(x)), labels[keep]].log() for x in (every, window)]
    return (losses[1] - losses[0]).clamp(0, 5)


def window_states(dtype=torch.float64):
    """What stands in for the hidden states of a teacher of windows."""
    return torch.randn(2, 19, HIDDEN, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(
        dtype
    )


@pytest.mark.parametrize("context", [0.0, 0.7])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("rows", [1, 7, 100])
@pytest.mark.parametrize("masked", [True, False])
def test_value_and_gradients_equal_whole_logits(share, temperature, rows, masked, context):
    hidden, weight, taught, teacher_weight, labels = inputs(masked=masked)
    near = window_states() if context else None
    results = []
    for chunked in (True, False):
        leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
        arguments = (*leaves, taught, teacher_weight, labels, share, temperature)
        chunk = [rows * 2 * 8 * VOCAB] if chunked else []
        values = (linear_distillation if chunked else naive)(*arguments, *chunk, near, context)
        (values[0] * 0.37).backward()
        results.append([*values, *(leaf.grad for leaf in leaves)])
    for got, expected in zip(*results, strict=True):
        assert torch.linalg.vector_norm(got - expected) <= 1e-13 * torch.linalg.vector_norm(expected)


def test_needs_of_the_random_rows_are_of_every_kind():
    _, _, taught, teacher_weight, labels = inputs()
    need = need_of(taught, window_states(), teacher_weight, labels)
    assert (need == 0).any() and (need == 5).any() and ((need > 0) & (need < 5)).any()


@pytest.mark.parametrize("context", [0.0, 0.7])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-7), (torch.bfloat16, 2e-2)])
def test_lower_precision_is_as_near_as_its_rounding(dtype, tolerance, context):
    rounded, near = inputs(dtype), window_states(dtype)
    leaves = [x.clone().requires_grad_() for x in rounded[:2]]
    value = linear_distillation(*leaves, *rounded[2:], 0.5, 2.0, 3 * 2 * 4 * VOCAB, near, context)[0]
    value.backward()
    exact = [x.double().requires_grad_() for x in rounded[:2]]
    wide = [x.double() for x in (rounded[2], rounded[3], near)]
    expected = naive(*exact, *wide[:2], rounded[4], 0.5, 2.0, wide[2], context)[0]
    expected.backward()
    assert value.dtype == torch.float32
    assert abs(value - expected) <= tolerance * expected
    for got, want in zip(leaves, exact, strict=True):
        assert got.grad.dtype == dtype
        error = torch.linalg.vector_norm(got.grad.double() - want.grad)
        assert error <= tolerance * torch.linalg.vector_norm(want.grad)


def test_no_label_gives_zero_and_zero_gradients():
    hidden, weight, taught, teacher_weight, labels = inputs()
    leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
    value = linear_distillation(*leaves, taught, teacher_weight, torch.full_like(labels, -100), 0.5, 1.0, 1)[
        0
    ]
    value.backward()
    assert value == 0 and all(torch.count_nonzero(leaf.grad) == 0 for leaf in leaves)


class LiveLogits(TorchDispatchMode):
    """Most elements of tensors [rows, V] that lived at a time; [8, V] is the weight."""

    def __init__(self, vocab):
        super().__init__()
        self.vocab, self.most, self.seen = vocab, 0, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.shape[1:] == (self.vocab,) and len(leaf) != 8:
                storage = leaf.untyped_storage()
                self.seen[storage._cdata] = StorageWeakRef(storage), leaf.numel()
        self.seen = {key: entry for key, entry in self.seen.items() if not entry[0].expired()}
        self.most = max(self.most, sum(count for _, count in self.seen.values()))
        return result


@pytest.mark.parametrize("context", [0.0, 1.0])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_logits_of_a_few_tokens_live_at_a_time(temperature, context):
    generator = torch.Generator().manual_seed(0)
    vocab, tokens, chunk = 1009, 64, 4
    hidden = torch.randn(1, tokens, 8, generator=generator).requires_grad_()
    weight = torch.randn(vocab, 8, generator=generator).requires_grad_()
    labels = torch.randint(0, vocab, (1, tokens), generator=generator)
    taught, near = hidden.detach() + 1, hidden.detach() - 1 if context else None
    with LiveLogits(vocab) as live:
        value = linear_distillation(
            hidden,
            weight,
            taught,
            weight.detach(),
            labels,
            0.5,
            temperature,
            chunk * 8 * vocab,
            near,
            context,
        )[0]
        value.backward()
    # student, teacher and the teacher's probabilities, of 4 of 64 tokens; the student's own at another temperature
    assert live.most == (3 if temperature == 1 else 4) * chunk * vocab


def make_model(lead=LEAD, layout="pod", seed=0):
    torch.manual_seed(seed)
    config = pod.PodConfig(
        vocab_size=VOCAB, hidden_size=24, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=6,
        intermediate_size=32, initializer_range=0.2, num_sink_tokens=0 if layout == "window" else 1,
        num_recent_tokens=3, lead=lead, layout=layout, attention_backend="reference",
    )  # fmt: skip
    return pod.PodForCausalLM(config).double().train()


def packed():
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, VOCAB, (2, 24), generator=generator)
    docs = torch.tensor([[0] * 15 + [1] * 9, [0] * 4 + [1] * 17 + [-1] * 3])
    labels = ids.roll(-1, 1).masked_fill((docs != docs.roll(-1, 1)) | (docs < 0), -100)
    return {"input_ids": ids, "labels": labels, "doc_ids": docs}


def attention_outputs(model, batch):
    """Last hidden state and every layer's attention output, by module hooks and without checkpoints."""
    outputs = []
    hooks = [
        layer.self_attn.register_forward_hook(lambda module, inputs, result: outputs.append(result[0]))
        for layer in model.model.layers
    ]
    hidden = model.model(input_ids=batch["input_ids"], doc_ids=batch["doc_ids"]).last_hidden_state
    for hook in hooks:
        hook.remove()
    return hidden, outputs


def naive_objective(student, teacher, batch, args, windows=None):
    """The whole objective in one process from whole matrices; windows: the teacher under a plan of windows."""
    hidden, outputs = attention_outputs(student, batch)
    with torch.no_grad():
        taught, targets = attention_outputs(teacher, batch)
        near = attention_outputs(windows or make_model([[None, None]] * 4), batch)[0]
    weight, teacher_weight = student.lm_head.weight, teacher.lm_head.weight.detach()
    mixed = naive(
        hidden, weight, taught, teacher_weight, batch["labels"], args.distill_logits, args.distill_temperature,
        near, args.distill_context,
    )  # fmt: skip
    keep = batch["labels"] != -100
    errors = [
        ((s - t)[keep].square().sum(-1) / t[keep].square().sum(-1)).sum()
        for s, t in zip(outputs, targets, strict=True)
    ]
    attention = sum(errors) / len(errors)
    return mixed[0] + args.distill_attention * attention, mixed[1], mixed[2], attention


def randomise(adapted):
    """Adapters that do something: lora_B starts at zero."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.2)
    return adapted


CARRIES = [(False, "keep"), (True, "keep"), (True, "offload"), (True, "recompute")]


@pytest.mark.parametrize(("checkpointing", "carry"), CARRIES)
@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize(
    ("logits", "attention", "context"), [(0.6, 0.7, 0.0), (0.6, 0.0, 3.0), (0.6, 0.7, 3.0), (0.0, 0.7, 0.0)]
)
def test_objective_and_gradients_equal_a_naive_pass(method, checkpointing, carry, logits, attention, context):
    args = TrainArgs(
        method=method, carry=carry, gradient_checkpointing="full" if checkpointing else "none", distill_logits=logits,
        distill_attention=attention, distill_context=context, distill_temperature=2.0, lora_rank=3,
    )  # fmt: skip
    batch, models = packed(), []
    for _ in range(2):
        model = make_model()
        models.append(randomise(add_lora(model, lora_settings(args))) if method == "lora" else model)
    trained, plain = models
    teacher = make_model(lead=None)  # the same weights, dense, no adapters
    save_activations(causal_model(trained), args, 24)
    copy = make_model(lead=None) if needs_teacher(args, "pod") else None
    module = LanguageModelLoss(trained, 1, make_distillation(args, "pod", copy)).train()
    before = {name: parameter.requires_grad for name, parameter in trained.named_parameters()}
    expected = naive_objective(causal_model(plain), teacher, batch, args)
    for _ in range(2):  # a second pass finds nothing of the first
        module.zero_grad()
        objective = module(**batch)
        objective.backward()
    tolerance = 1e-12 if logits else 1e-6  # DeepSpeed's cross entropy is fp32
    assert abs(objective - expected[0]) <= tolerance * expected[0]
    names = ["cross_entropy", *(["kl"] if logits else []), *(["attention"] if attention else [])]
    assert list(module.parts) == names
    for name, value in zip(("cross_entropy", "kl", "attention"), expected[1:], strict=True):
        if name in names:
            assert not module.parts[name].requires_grad
            assert abs(module.parts[name] - value) <= tolerance * value
    expected[0].backward()
    for (name, got), (_, want) in zip(trained.named_parameters(), plain.named_parameters(), strict=True):
        assert (got.grad is None) == (want.grad is None), name
        if want.grad is not None:
            error = torch.linalg.vector_norm(got.grad - want.grad)
            assert error <= 10 * tolerance * torch.linalg.vector_norm(want.grad), name
    assert before == {name: parameter.requires_grad for name, parameter in trained.named_parameters()}
    assert causal_model(trained).model.lead == tuple(map(tuple, LEAD))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_teacher_leaves_one_hidden_state_per_layer_until_backward(checkpointing, monkeypatch):
    held = []
    start = AttentionError.__init__

    def record(self, outputs, labelled):
        held.extend((weakref.ref(out), out.nbytes) for out in outputs)
        start(self, outputs, labelled)

    monkeypatch.setattr(AttentionError, "__init__", record)
    mode = "full" if checkpointing else "none"
    args = TrainArgs(method="lora", distill_attention=1.0, lora_rank=3, gradient_checkpointing=mode)
    adapted = add_lora(make_model(), lora_settings(args))
    save_activations(causal_model(adapted), args, 24)
    module = LanguageModelLoss(adapted, 1, make_distillation(args, "pod")).train()
    objective = module(**packed())
    assert [size for _, size in held] == [2 * 24 * 24 * 8] * 4  # rows x tokens x hidden x fp64, four layers
    # without checkpoints the graph holds the difference from the student's in their place
    assert all((reference() is not None) == checkpointing for reference, _ in held)
    objective.backward()
    del objective
    gc.collect()
    assert all(reference() is None for reference, _ in held)


def test_evaluation_is_plain_cross_entropy_and_the_teacher_draws_no_random_numbers():
    args = TrainArgs(method="lora", distill_logits=1.0, distill_attention=1.0, lora_rank=3, lora_dropout=0.5)
    adapted = randomise(add_lora(make_model(), lora_settings(args)))
    module = LanguageModelLoss(adapted, 1, make_distillation(args, "pod")).train()
    plain = LanguageModelLoss(adapted, 1).train()
    states = []
    for loss in (module, plain):
        torch.manual_seed(1)
        loss(**packed())
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
    assert module.eval()(**packed()) == plain.eval()(**packed())
    assert module.parts == {} and plain.parts == {}


@pytest.mark.parametrize("layout", ["cla", "window"])
def test_another_layout_learns_from_a_dense_copy(layout):
    args = TrainArgs(distill_logits=0.5, distill_attention=0.5, distill_context=2.0)
    assert needs_teacher(args, layout)
    assert needs_teacher(TrainArgs(method="lora", distill_logits=1.0), layout) == (layout == "cla")
    student, same = make_model(None, layout), make_model(None, layout)
    module = LanguageModelLoss(student, 1, make_distillation(args, layout, make_model(None))).train()
    objective = module(**packed())
    expected = naive_objective(same, make_model(None), packed(), args)[0]
    assert abs(objective - expected) <= 1e-12 * expected


def test_adapters_of_a_window_model_learn_from_their_own_weights():
    args = TrainArgs(
        method="lora", distill_logits=0.5, distill_attention=0.5, distill_context=2.0, lora_rank=3
    )
    adapted, same = (randomise(add_lora(make_model(None, "window"), lora_settings(args))) for _ in range(2))
    module = LanguageModelLoss(adapted, 1, make_distillation(args, "window")).train()
    windows = make_model(None, "window")
    expected = naive_objective(causal_model(same), make_model(None), packed(), args, windows)[0]
    assert abs(module(**packed()) - expected) <= 1e-12 * expected


def test_who_needs_a_copy_and_what_is_refused():
    assert not needs_teacher(TrainArgs(), "pod")
    assert not needs_teacher(TrainArgs(method="lora", distill_attention=0.1), "pod")
    assert needs_teacher(TrainArgs(distill_attention=0.1), "pod")
    assert make_distillation(TrainArgs(), "pod") is None
    with pytest.raises(ValueError, match="train.method=full and layout pod needs a copy of the start model"):
        make_distillation(TrainArgs(distill_logits=0.5), "pod")
