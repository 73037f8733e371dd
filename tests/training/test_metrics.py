"""Monitor, trackers, their files, and the arithmetic behind MFU: no process group needed."""

import json
import sys
import time
from types import SimpleNamespace

import pytest
import torch

import pod
from pod.training.args import TrainArgs
from pod.training.observe.metrics import (
    JsonLines,
    Monitor,
    Wandb,
    attention_flops,
    check_tracker,
    peak_tokens_per_second,
    training_flops,
    wandb_run_id,
)
from pod.training.predict.shapes import Shapes, causal_pairs, proximal_pairs


@pytest.mark.parametrize("name", ["wandb", "tensorboard"])
def test_missing_tracker_is_named(monkeypatch, name):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    check_tracker("none")
    with pytest.raises(ValueError, match=f"train.tracker={name} needs .*pip install {name}"):
        check_tracker(name)


def lines_of(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_resumed_metrics_drop_repeated_and_half_written_lines(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"ste', encoding="utf-8")
    lines = JsonLines(file, first_step=2)
    lines.log(3, {"loss": 1.0})
    lines.close()
    assert [line["step"] for line in lines_of(file)] == [1, 2, 3]


def test_a_run_from_the_beginning_begins_a_new_file_and_keeps_the_old_ones(tmp_path):
    for step in (1, 2):
        lines = JsonLines(tmp_path / "metrics.jsonl", first_step=0)
        lines.log(step, {})
        lines.close()
    JsonLines(tmp_path / "metrics.jsonl", first_step=0).close()
    JsonLines(tmp_path / "metrics.jsonl", first_step=0).close()
    found = {file.name: lines_of(file) for file in tmp_path.iterdir()}
    assert found == {
        "metrics.jsonl": [],
        "metrics-1.jsonl": [{"step": 1}],
        "metrics-2.jsonl": [{"step": 2}],
    }


def test_wandb_gets_the_numbers_of_a_step(tmp_path):
    pytest.importorskip("wandb")
    args = TrainArgs(max_steps=2, tracker="wandb", wandb_mode="offline")
    monitor = Monitor(tmp_path, args, 0, 64, {"seed": 0}, enabled=True)
    monitor.values(0, {"eval_loss": 3.5, "eval_buckets": [[0.5]]})
    monitor.step(1, {"loss": 2.5, "learning_rate": 0.1})
    monitor.close()
    (written,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    deadline = (
        time.monotonic() + 60
    )  # wandb's own process writes the file, and may do so after finish() returned
    while not all(word in written.read_bytes() for word in (b"learning_rate", b"eval_loss")):
        assert time.monotonic() < deadline, f"{written} holds only {written.read_bytes()[:200]!r}"
        time.sleep(0.1)
    before, record = lines_of(tmp_path / "metrics.jsonl")
    assert before == {"step": 0, "eval_loss": 3.5, "eval_buckets": [[0.5]]}
    assert (record["step"], record["loss"]) == (1, 2.5)
    assert record["tokens_per_second"] > 0


@pytest.fixture
def clock(monkeypatch):
    """Seconds that the monitor sees; a test sets them."""
    now = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(time, "perf_counter", lambda: now.seconds)
    return now


def test_waiting_for_data_is_a_mean_over_the_steps_of_a_record(tmp_path, monkeypatch, clock):
    monitor = Monitor(tmp_path, TrainArgs(max_steps=4, log_every_steps=2), 0, 64, {}, enabled=True)
    shown = []
    monkeypatch.setattr(monitor.bar, "set_postfix_str", lambda text, refresh: shown.append(text))
    for step, waited in enumerate((3.0, 1.0, 0.0, 0.02), start=1):
        clock.seconds += 4
        monitor.step(step, {"loss": 2.5, "data_wait_s": waited})
    monitor.close()
    lines = lines_of(tmp_path / "metrics.jsonl")
    assert [line["data_wait_s"] for line in lines] == [2.0, 0.01]
    assert [line["compute_s"] for line in lines] == [2.0, 3.99]
    assert [line["tokens_per_second"] for line in lines] == [16.0, 16.0]
    assert shown == [
        "loss 2.5000, 16 tokens/s, 50% of the time waiting for data",
        "loss 2.5000, 16 tokens/s",
    ]


def test_saving_and_evaluating_have_fields_of_their_own_and_slow_no_rate(tmp_path, clock):
    args = TrainArgs(max_steps=3)
    monitor = Monitor(tmp_path, args, 0, 64, {}, enabled=True, peak=100 / 3)
    for step in (1, 2, 3):
        clock.seconds += 4
        if step == 2:
            with monitor.part("evaluate"):
                clock.seconds += 7
        monitor.step(step, {"loss": 1.0, "data_wait_s": 1.0})
        if step == 2:
            with monitor.part("save"):
                clock.seconds += 5
    monitor.close()
    one, two, three = lines_of(tmp_path / "metrics.jsonl")
    assert {one["tokens_per_second"], two["tokens_per_second"], three["tokens_per_second"]} == {16.0}
    assert {one["mfu"], two["mfu"], three["mfu"]} == {16.0 / (100 / 3)}
    assert (two["evaluate_s"], three["save_s"]) == (7.0, 5.0)
    assert "save_s" not in two and "evaluate_s" not in three and "evaluate_s" not in one


def test_rewind_takes_back_the_bar_and_the_lines(tmp_path, clock):
    monitor = Monitor(tmp_path, TrainArgs(max_steps=9), 0, 64, {}, enabled=True)
    for step in (1, 2, 3, 4):
        clock.seconds += 1
        monitor.step(step, {"loss": float(step)})
    clock.seconds += 50  # loading a checkpoint
    monitor.rewind(2)
    assert monitor.bar.n == 2
    clock.seconds += 2
    monitor.step(3, {"loss": 7.0})
    monitor.close()
    lines = lines_of(tmp_path / "metrics.jsonl")
    assert [(line["step"], line["loss"]) for line in lines] == [(1, 1.0), (2, 2.0), (3, 7.0)]
    assert lines[-1]["tokens_per_second"] == 32.0


def test_other_ranks_record_nothing(tmp_path):
    monitor = Monitor(tmp_path, TrainArgs(max_steps=4, log_every_steps=3), 0, 64, {}, enabled=False)
    with monitor.part("save"):
        monitor.step(1, {"loss": 1.0})
    monitor.values(0, {"a": 1.0})
    monitor.rewind(0)
    monitor.note("x")
    monitor.close()
    assert not list(tmp_path.iterdir())
    assert [monitor.logs(step) for step in (1, 2, 3, 4)] == [False, False, True, True]


def brute_force_pairs(length: int, sinks: int, recent: int) -> tuple[int, int]:
    near = [(i, j) for i in range(length) for j in range(i + 1) if j < sinks or i - j < recent]
    return sum(i + 1 for i in range(length)), len(near)


@pytest.mark.parametrize(("sinks", "recent"), [(0, 1), (2, 5), (7, 3), (0, 40), (3, 29)])
@pytest.mark.parametrize("length", [1, 2, 7, 8, 31, 32, 33])
def test_pairs_are_those_of_the_mask(length, sinks, recent):
    assert (causal_pairs(length), proximal_pairs(length, sinks, recent)) == brute_force_pairs(
        length, sinks, recent
    )


def small_config(layout: str = "pod", lead=None) -> pod.PodConfig:
    return pod.PodConfig(
        vocab_size=50,
        hidden_size=12,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=5,
        intermediate_size=20,
        layout=layout,
        lead=lead,
        num_sink_tokens=0 if layout == "window" else 2,
        num_recent_tokens=4,
    )


@pytest.mark.parametrize(
    ("layout", "lead"),
    [("pod", None), ("pod", [[0, 0], [0, 1], [2, 1]]), ("window", None), ("cla", [[0, 0], [0, 0], [2, 2]])],
)
def test_weights_are_those_of_the_linear_layers(layout, lead):
    config = small_config(layout, lead)
    with torch.device("meta"):
        model = pod.PodForCausalLM(config)
    linear = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    weights = Shapes.from_config(config).multiplied_weights(config.sharing_plan.lead)
    assert weights == sum(layer.weight.numel() for layer in linear)


def test_attention_counts_each_product_that_the_model_needs():
    """Attention counts two products per visible pair.

    A follower takes the logits of distant pairs from its lead, a window sees none.
    """
    lengths, groups, head_dim = [9, 3, 30], 2, 5
    every = sum(brute_force_pairs(n, 2, 4)[0] for n in lengths)
    near = sum(brute_force_pairs(n, 2, 4)[1] for n in lengths)
    one = 2 * head_dim * groups  # operations per pair of a KV head and product
    plan = ((0, 0), (0, 1), (2, 1))  # two of six heads follow
    assert attention_flops(small_config(), small_config().sharing_plan.lead, lengths) == 6 * one * 2 * every
    assert attention_flops(small_config(lead=plan), plan, lengths) == one * (
        4 * 2 * every + 2 * (every + near)
    )
    roles = ((0, None), (None, 1), (0, 2))  # one follows, two keep their window
    assert attention_flops(small_config(lead=roles), roles, lengths) == one * (
        3 * 2 * every + (every + near) + 2 * 2 * near
    )
    near_window = sum(brute_force_pairs(n, 0, 4)[1] for n in lengths)
    window = small_config("window")
    assert attention_flops(window, window.sharing_plan.lead, lengths) == 6 * one * 2 * near_window


def test_training_counts_what_the_method_computes():
    config, lengths = small_config(), [40, 24]
    lead = config.sharing_plan.lead
    weights = 2 * 64 * Shapes.from_config(config).multiplied_weights(lead)
    attention = attention_flops(config, lead, lengths)
    full = training_flops(config, lead, TrainArgs(), lengths)
    assert full == 3 * (weights + attention)
    adapters = sum(8 * (inputs + outputs) for inputs, outputs in [(12, 20), (12, 10), (12, 10), (20, 12)]) * 3
    lora = training_flops(config, lead, TrainArgs(method="lora", lora_rank=8), lengths)
    assert lora == 2 * weights + 3 * attention + 3 * 2 * 64 * adapters


class TwoRows:
    """A data set of two rows of 32 places."""

    context_length = 32

    def __len__(self) -> int:
        return 2

    def documents(self, row: int) -> list[range]:
        return [[range(10), range(20)], [range(30)]][row]


def test_mfu_is_the_share_of_the_stated_peak():
    config, args = small_config(), TrainArgs(peak_tflops=2e-6)
    mesh = SimpleNamespace(device=torch.device("cpu"), world_size=3)
    flops = training_flops(config, config.sharing_plan.lead, args, [10, 20, 30])
    # per place, not per token: what the rate counts
    assert peak_tokens_per_second(config, args, TwoRows(), mesh) == pytest.approx(
        6e6 / (flops / 64), rel=1e-12
    )
    assert peak_tokens_per_second(config, TrainArgs(), TwoRows(), mesh) is None


@pytest.fixture
def fake_wandb(monkeypatch):
    """A module `wandb` that notes what it is called with: `begun` and `lines`; `refuses` makes it fail."""
    for name in ("WANDB_PROJECT", "WANDB_ENTITY", "WANDB_MODE", "WANDB_NAME"):
        monkeypatch.delenv(name, raising=False)
    fake = SimpleNamespace(Error=RuntimeError, begun=[], lines=[], refuses=False)
    run = SimpleNamespace(
        log=fake.lines.append,
        finish=lambda: None,
        define_metric=lambda *a, **options: fake.begun.append(options),
    )

    def init(**options):
        if fake.refuses:
            raise fake.Error("api_key not configured\nsecond line")
        fake.begun.append(options)
        return run

    fake.init = init
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def test_a_continued_run_goes_on_in_the_same_wandb_run(tmp_path, fake_wandb):
    """Lines carry their step, because wandb's own steps cannot go back after a rewind."""
    for first in (0, 2):
        tracker = Wandb(tmp_path, TrainArgs(), {}, first)
        tracker.log(first + 2, {"loss": 1.0})
        tracker.rewind(first + 1)
        tracker.log(first + 2, {"loss": 2.0})
        tracker.close()
    first, axis, second, _ = fake_wandb.begun
    assert first["id"] == second["id"] and first["resume"] == second["resume"] == "allow"
    assert axis == {"step_metric": "step"}
    lines = [(line["step"], line["loss"]) for line in fake_wandb.lines]
    assert lines == [(2, 1.0), (2, 2.0), (4, 1.0), (4, 2.0)]


def test_a_run_from_the_beginning_leaves_the_curves_of_an_earlier_one(tmp_path):
    file = tmp_path / "wandb-run"
    first = wandb_run_id(file, 0)
    assert wandb_run_id(file, 5) == first
    second = wandb_run_id(file, 0)
    assert second != first and wandb_run_id(file, 5) == second
    assert file.read_text().split() == [first, second], "the earlier run can still be found"
    file.write_text("\n")
    assert len(wandb_run_id(file, 5)) == 8 and file.read_text().strip()


def test_wandb_gets_project_entity_name_and_its_own_mode(tmp_path, fake_wandb, monkeypatch):
    def where(**settings) -> tuple:
        fake_wandb.begun.clear()
        Wandb(tmp_path, TrainArgs(**settings), {})
        return tuple(fake_wandb.begun[0][name] for name in ("project", "entity", "name", "mode"))

    assert where() == ("pod-kv", None, None, None), "None leaves the mode to wandb: WANDB_MODE, else online"
    named = {"wandb_project": "p", "wandb_entity": "e", "wandb_run_name": "n", "wandb_mode": "offline"}
    assert where(**named) == ("p", "e", "n", "offline")
    monkeypatch.setenv("WANDB_PROJECT", "of the environment")
    assert where()[0] == "of the environment" and where(**named)[0] == "p"


def test_a_wandb_that_cannot_start_is_one_line(tmp_path, fake_wandb):
    fake_wandb.refuses = True
    with pytest.raises(ValueError, match="wandb login.*wandb_mode=offline") as raised:
        Wandb(tmp_path, TrainArgs(), {})
    assert "api_key not configured" in str(raised.value) and "\n" not in str(raised.value)


def test_tensorboard_gets_the_numbers_and_forgets_steps_that_come_again(tmp_path, monkeypatch):
    calls = []

    class Writer:
        def __init__(self, folder, purge_step):
            calls.append((folder, purge_step))

        def add_scalar(self, name, value, step):
            calls.append((name, value, step))

        def flush(self):
            calls.append("flush")

        def close(self):
            calls.append("close")

    module = SimpleNamespace(SummaryWriter=Writer)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    args = TrainArgs(max_steps=9, tracker="tensorboard")
    monitor = Monitor(tmp_path, args, 4, 64, {}, enabled=True)
    monitor.values(5, {"loss": 2.5, "eval_buckets": [[0.5]]})
    monitor.rewind(3)
    monitor.close()
    folder = str(tmp_path / "tensorboard")
    assert calls == [(folder, 5), ("loss", 2.5, 5), "flush", "close", (folder, 4), "close"]
    calls.clear()
    Monitor(tmp_path, args, 0, 64, {}, enabled=True).close()
    assert calls[0] == (folder, 0)
