"""Distillation, progressive sharing and adapters on several ranks: parallel equals serial, resumed equals uninterrupted."""

import pytest

pytestmark = pytest.mark.multiprocess
PLAN = [[0, 0, 0], [1, 0, 0], [2, 0, 2], [3, 3, 2]]


@pytest.mark.parametrize(
    ("run", "serial"),
    [
        ("lora_sp2", "lora_serial"),
        ("full_sp2", "full_serial"),
        ("full_dp2_zero1", "full_serial"),
        ("masked_sp2", "masked_serial"),
    ],
)
def test_objective_and_gradients_equal_one_process(cheaper_results, run, serial):
    got, expected = cheaper_results[run], cheaper_results[serial]
    assert got["names_equal"]
    assert got["gradient_error"] <= 1e-6
    assert got["smallest"] > 1e-2, "a gradient that is zero compares nothing"
    assert got["labels"] == expected["labels"]
    for part in ("loss", "objective", "attention"):
        assert expected[part] > 1e-3
        assert abs(got[part] - expected[part]) <= 1e-6 * expected[part], part
    # the divergence is a small difference of log-probabilities of the loss's size
    assert expected["kl"] > 1e-3
    assert abs(got["kl"] - expected["kl"]) <= 1e-7 * expected["loss"]


def sum_of_parts(values):
    return 0.4 * values["loss"] + 0.6 * values["kl"] + 0.5 * values["attention"]


@pytest.mark.parametrize("run", ["masked_serial", "masked_sp2", "taught"])
def test_the_objective_is_the_weighted_sum_of_its_parts(cheaper_results, run):
    values = cheaper_results[run].get("metrics", [cheaper_results[run]])[0]
    assert values["objective"] == pytest.approx(sum_of_parts(values), rel=1e-6)


@pytest.mark.parametrize("run", ["lora_serial", "lora_sp2", "full_serial", "full_sp2", "full_dp2_zero1"])
def test_tokens_that_need_context_add_to_the_divergence_that_is_reported(cheaper_results, run):
    values = cheaper_results[run]
    assert values["objective"] > sum_of_parts(values) + 0.1 * 0.6 * values["kl"]


def test_resumed_equals_uninterrupted_with_lora_distillation_and_a_growing_plan(cheaper_results):
    whole, stopped, resumed = (cheaper_results[name] for name in ("whole", "stopped", "resumed"))
    assert (stopped["step"], resumed["step"]) == (3, 6)
    assert resumed["hash"] == whole["hash"] != stopped["hash"]
    assert stopped["leads"] + resumed["leads"] == whole["leads"]
    timings = ("_s", "per_second", "mfu", "gib")
    for got, expected in zip(resumed["metrics"], whole["metrics"], strict=True):
        assert {k: v for k, v in got.items() if not k.endswith(timings)} == {
            k: v for k, v in expected.items() if not k.endswith(timings)
        }


def test_the_plan_grows_on_every_rank_and_ends_as_the_plan(cheaper_results):
    serial, grown = cheaper_results["grown_serial"], cheaper_results["grown"]
    followers = [sum(lead != layer for layer, row in enumerate(p) for lead in row) for p in grown["leads"]]
    assert followers == [1, 1, 3, 3, 4, 4]
    assert grown["leads"] == serial["leads"]
    assert grown["leads"][-1] == PLAN
    assert grown["local"] == [
        [row[:2] for row in plan] for plan in grown["leads"]
    ]  # rank 0 has two of three heads
    for got, expected in zip(grown["metrics"], serial["metrics"], strict=True):
        assert got["loss"] == pytest.approx(expected["loss"], rel=1e-5)


def test_only_what_is_trained_has_optimizer_state_and_a_place_in_checkpoints(cheaper_results):
    lora, full, plain = (cheaper_results[name] for name in ("whole", "taught", "grown"))
    assert all("lora_" in name for name in lora["requires"]) and len(lora["requires"]) == 4 * 4 * 2
    assert not any("teacher" in name for name in full["requires"]) and full["requires"] == plain["requires"]
    for result in (lora, full):
        assert (
            2 * result["trained"] <= result["moments"] <= 2 * result["trained"] + 64
        )  # two moments, and padding
    assert full["bytes"] <= plain["bytes"] + 4 * 40_000 / 4  # the copy alone has 40,000 weights


@pytest.mark.parametrize(("name", "tolerance"), [("taught", 0), ("taught_half", 0), ("whole", 2e-6)])
def test_exports_have_the_trained_logits_and_no_teacher(cheaper_results, name, tolerance):
    result = cheaper_results[f"export_{name}"]
    assert result["error"] <= tolerance
    assert result["teacher"] == []


def test_an_exported_adapter_loads_with_peft_and_with_ours(cheaper_results):
    result = cheaper_results["adapter"]
    assert result["peft"] == 0
    assert result["ours"] <= 2e-6  # merged
    assert result["without"] > 0.1, "the adapter does nothing"
    assert result["lead"] == PLAN
    names = {"adapter_config.json", "adapter_model.safetensors", "plan.json", "pod_config.json", "README.md"}
    assert set(result["files"]) == names
    assert result["files"]["adapter_model.safetensors"] < 4 * 2176 + 8192  # fp32 adapters and a header
    assert result["generated"] == result["expected"]
