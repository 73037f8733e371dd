"""Checks of the train section, the schedule, the estimate and the head shares: no process group needed."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from pod.training.args import TrainArgs
from pod.training.predict.memory_estimate import TrainingJob, World, training_bytes
from pod.training.predict.shapes import Shapes, shared_qk_heads
from pod.training.run.lora import add_lora, lora_settings
from pod.training.run.loss import LossHead, loss_scale
from pod.training.run.mesh import check_world_size
from pod.training.run.optimization import learning_rate, make_optimizer
from pod.training.run.ulysses import kv_head_repeats, split_evenly

SMOLLM2 = Shapes(
    hidden=576, layers=30, query_heads=9, kv_heads=3, head_dim=64, intermediate=1536, vocab=49152, tied=True
)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_steps", 0),
        ("learning_rate", 0.0),
        ("adam_beta2", 1.0),
        ("min_lr_ratio", 1.5),
        ("prefetch_steps", -1),
        ("lora_target_modules", []),
        ("eval_passkeys", 3),  # and eval_every_steps is 0
    ],
)
def test_bad_values_are_refused_by_name(field, value):
    with pytest.raises(ValueError, match=field):
        TrainArgs(**{field: value})


@pytest.mark.parametrize("field", ["offload_optimizer", "offload_parameters"])
@pytest.mark.parametrize("stage", [1, 2])
def test_only_stage_3_lets_optimizer_or_weights_wait_on_the_host(field, stage):
    with pytest.raises(ValueError, match=f"{field}=cpu needs zero_stage=3, got zero_stage={stage}"):
        TrainArgs(**{field: "cpu", "zero_stage": stage})
    assert getattr(TrainArgs(**{field: "cpu"}), field) == "cpu"


def test_schedule_warms_up_then_follows_a_cosine_to_the_ratio():
    args = TrainArgs(max_steps=11, warmup_ratio=0.2, learning_rate=1.0, min_lr_ratio=0.1)
    rates = [learning_rate(step, args) for step in range(11)]
    assert rates[:3] == [0.5, 1.0, 1.0]
    assert rates[6] == pytest.approx(0.55)  # halfway down
    assert rates[10] == pytest.approx(0.1)
    assert all(a >= b for a, b in itertools.pairwise(rates[1:]))


@pytest.mark.parametrize(
    ("heads", "size", "repeats", "shares"),
    [
        ((9, 3), 2, 1, [2, 1]),
        ((32, 8), 8, 1, [1] * 8),
        ((32, 8), 16, 2, [1] * 16),
        ((6, 3), 4, 2, [2, 2, 1, 1]),
    ],
)
def test_kv_heads_are_shared_or_replicated(heads, size, repeats, shares):
    assert kv_head_repeats(*heads, size) == repeats
    assert split_evenly(heads[1] * repeats, size) == shares


def test_impossible_sizes_are_refused_with_those_that_work():
    with pytest.raises(ValueError, match="use a size from 1 to 9"):
        kv_head_repeats(9, 3, 10)
    with pytest.raises(ValueError, match="use 1, 2, 3, 6"):
        check_world_size(6, 4)


def test_chunked_loss_and_gradients_equal_plain_cross_entropy():
    torch.manual_seed(0)
    hidden, weight = torch.randn(2, 150, 16), torch.randn(3001, 16)
    labels = torch.randint(0, 3001, (2, 150))
    labels[0, 20:90] = -100
    results = []
    for chunked in (True, False):
        h, w = hidden.clone().requires_grad_(), torch.nn.Parameter(weight.clone())
        if chunked:
            head = LossHead(w, chunk_mib=1)  # 87 of 300 tokens at a time
            loss = head(h, labels)
        else:
            loss = torch.nn.functional.cross_entropy(
                (h @ w.T).flatten(0, 1), labels.flatten(), reduction="sum"
            )
        loss.backward()
        results.append((loss, h.grad, w.grad))
    for got, expected in zip(*results, strict=True):
        assert torch.linalg.vector_norm(got - expected) <= 1e-6 * torch.linalg.vector_norm(expected)


def test_a_row_without_labels_has_zero_loss_and_gradient():
    hidden, weight = torch.randn(1, 5, 4, requires_grad=True), torch.nn.Parameter(torch.randn(7, 4))
    loss = LossHead(weight)(hidden, torch.full((1, 5), -100))
    loss.backward()
    assert loss == 0
    assert hidden.grad.abs().max() == 0
    assert weight.grad.abs().max() == 0


def test_parameters_of_the_embedded_model_are_counted_exactly():
    assert SMOLLM2.parameters == 134_515_008


def test_estimate_scales_as_it_must():
    dense = tuple((layer,) * 3 for layer in range(30))
    blocks = tuple((layer - layer % 3,) * 3 for layer in range(30))

    def parts(lead, args, ranks=1):
        return training_bytes(TrainingJob(SMOLLM2, lead, args, 2048, World(ranks, ranks)))

    one, two = parts(blocks, TrainArgs()), parts(blocks, TrainArgs(sequence_parallel_size=2), 2)
    assert shared_qk_heads(blocks) == 30  # 10 leads x 3 heads
    assert one["shared_qk"] == 30 * (3 + 1) * 64 * 2048 * 2
    assert two["shared_qk"] * 3 == pytest.approx(
        one["shared_qk"] * 2, rel=1e-5
    )  # the rank with 2 of the 3 KV heads
    assert two["optimizer"] * 2 == one["optimizer"] == 134_515_008 * 8
    assert parts(dense, TrainArgs())["shared_qk"] == 0
    assert parts(dense, TrainArgs(method="lora"))["optimizer"] < one["optimizer"] / 50


def test_vectors_do_not_decay():
    module = torch.nn.Linear(3, 2)
    groups = make_optimizer(module, TrainArgs(weight_decay=0.1)).param_groups
    assert [(group["params"][0].ndim, group["weight_decay"]) for group in groups] == [(2, 0.1), (1, 0.0)]


def test_lora_refuses_modules_that_are_not_there():
    settings = lora_settings(TrainArgs(method="lora", lora_target_modules=["query"]))
    with pytest.raises(ValueError, match="names query; allowed for this model are 0"):
        add_lora(torch.nn.Sequential(torch.nn.Linear(2, 2)), settings)


@pytest.mark.parametrize(("stage", "divided_by"), [(1, 2), (3, 8)])
def test_the_scale_of_a_loss_undoes_what_the_stage_divides_by(stage, divided_by):
    """8 ranks in groups of 4 that share a row: stage 3 divides by all ranks, the others by the groups."""
    mesh = SimpleNamespace(world_size=8, dp_size=2)
    assert loss_scale(TrainArgs(zero_stage=stage), mesh, 1000.0) == divided_by / 1000
