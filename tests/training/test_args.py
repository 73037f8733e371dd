"""Checks of the train section, the schedule, the estimate and the head shares: no process group needed."""

import itertools
import json
import time

import pytest
import torch

from pod.training.args import TrainArgs
from pod.training.estimate import Shapes, carried_heads, training_bytes
from pod.training.lora import add_lora, lora_settings
from pod.training.loss import LossHead
from pod.training.mesh import check_world_size
from pod.training.metrics import JsonLines, Monitor, check_tracker
from pod.training.optim import learning_rate, make_optimizer
from pod.training.ulysses import kv_head_repeats, offsets, split_evenly

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
    ],
)
def test_bad_values_are_refused_by_name(field, value):
    with pytest.raises(ValueError, match=field):
        TrainArgs(**{field: value})


def test_schedule_warms_up_then_follows_a_cosine_to_the_ratio():
    args = TrainArgs(max_steps=11, warmup_steps=2, learning_rate=1.0, min_lr_ratio=0.1)
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


def test_shares_cover_everything_once():
    assert offsets(split_evenly(41, 3)) == [0, 14, 28, 41]


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
    dense = [[layer] * 3 for layer in range(30)]
    blocks = [[layer - layer % 3] * 3 for layer in range(30)]
    one = training_bytes(SMOLLM2, blocks, TrainArgs(), 2048, 1)
    two = training_bytes(SMOLLM2, blocks, TrainArgs(sequence_parallel_size=2), 2048, 2)
    assert carried_heads(blocks) == 30  # 10 leads x 3 heads
    assert one["carry"] == 30 * (3 + 1) * 64 * 2048 * 2
    assert two["carry"] * 2 == one["carry"]
    assert two["optimizer"] * 2 == one["optimizer"] == 134_515_008 * 8
    assert training_bytes(SMOLLM2, dense, TrainArgs(), 2048, 1)["carry"] == 0
    assert (
        training_bytes(SMOLLM2, dense, TrainArgs(method="lora"), 2048, 1)["optimizer"] < one["optimizer"] / 50
    )


def test_vectors_do_not_decay():
    module = torch.nn.Linear(3, 2)
    groups = make_optimizer(module, TrainArgs(weight_decay=0.1)).param_groups
    assert [(group["params"][0].ndim, group["weight_decay"]) for group in groups] == [(2, 0.1), (1, 0.0)]


def test_lora_refuses_modules_that_are_not_there():
    settings = lora_settings(TrainArgs(method="lora", lora_target_modules=["query"]))
    with pytest.raises(ValueError, match="names query; this model's linear layers are 0"):
        add_lora(torch.nn.Sequential(torch.nn.Linear(2, 2)), settings)


def test_missing_tracker_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install wandb"):
        check_tracker("wandb")


def test_resumed_metrics_drop_repeated_and_half_written_lines(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"ste', encoding="utf-8")
    lines = JsonLines(file, first_step=2)
    lines.log(3, {"loss": 1.0})
    lines.close()
    assert [json.loads(line)["step"] for line in file.read_text(encoding="utf-8").splitlines()] == [1, 2, 3]


@pytest.mark.parametrize(
    ("tracker", "files"), [("tensorboard", "tensorboard/events.*"), ("wandb", "wandb/offline-run-*/*.wandb")]
)
def test_tracker_gets_the_numbers_of_a_step(tmp_path, tracker, files):
    pytest.importorskip(tracker)
    monitor = Monitor(tmp_path, TrainArgs(max_steps=2, tracker=tracker), 0, 64, {"seed": 0}, enabled=True)
    monitor.step(1, {"loss": 2.5, "learning_rate": 0.1})
    monitor.close()
    (written,) = tmp_path.glob(files)
    deadline = (
        time.monotonic() + 60
    )  # wandb's own process writes the file, and may do so after finish() returned
    while b"learning_rate" not in written.read_bytes():
        assert time.monotonic() < deadline, f"{written} holds only {written.read_bytes()[:200]!r}"
        time.sleep(0.1)
    record = json.loads((tmp_path / "metrics.jsonl").read_text(encoding="utf-8"))
    assert (record["step"], record["loss"]) == (1, 2.5)
    assert record["tokens_per_second"] > 0


def test_waiting_for_data_is_a_mean_over_the_steps_of_a_record(tmp_path, monkeypatch):
    clock = iter([0.0, 0.0, 8.0, 16.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    monitor = Monitor(tmp_path, TrainArgs(max_steps=4, log_every_steps=2), 0, 64, {}, enabled=True)
    shown = []
    monkeypatch.setattr(monitor.bar, "set_postfix_str", shown.append)
    for step, waited in enumerate((3.0, 1.0, 0.0, 0.02), start=1):
        monitor.step(step, {"loss": 2.5, "data_wait_s": waited})
    monitor.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["data_wait_s"] for line in lines] == [2.0, 0.01]
    assert [line["tokens_per_second"] for line in lines] == [16.0, 16.0]
    assert shown == [
        "loss 2.5000, 16 tokens/s, 50% of it waiting for data",
        "loss 2.5000, 16 tokens/s",
    ]
