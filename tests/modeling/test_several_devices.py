"""A model that lies on two devices computes what it computes on one, and nothing meets that lies apart.

The devices are simulated (`tests/helpers/simulated_device.py`): an operation over tensors of both is an
error.
"""

import pytest
from conftest import FAMILIES
from method_table import ROWS
from simulated_process import Runs, check_numbers

BOTH = ["sim:0", "sim:1"]
ONE = ["full", "pod", "cla", "window", "pod+int4", "cla+int4", "pod+snapkv", "pod+quest"]
"""Specs that also run with layers that do not stand side by side."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    process = Runs("spread_runs.py", tmp_path_factory.mktemp("runs") / "errors")
    yield process
    process.stop()


@pytest.mark.slow
@pytest.mark.nightly
def test_every_method_decodes_on_both_and_holds_tokens_on_both(runs):
    results = runs.results_of("methods")
    assert {row.id for row in ROWS} <= {one["name"] for one in results}
    check_numbers(results)
    assert [one["name"] for one in results if one["devices"] != BOTH] == []


@pytest.mark.slow
def test_layouts_generate_with_beams_and_where_devices_take_turns(runs):
    results = runs.results_of("layouts")
    assert len(results) == 2 * len(ONE)
    check_numbers(results)


@pytest.mark.slow
def test_a_token_waits_no_more_often_than_on_one_device(runs):
    (found,) = runs.results_of("reads")
    assert found["both"] == found["one"]


@pytest.mark.slow
@pytest.mark.nightly
def test_every_family_is_read_to_both(runs):
    results = runs.results_of("families")
    assert [one["name"] for one in results] == list(FAMILIES)
    check_numbers(results)
    assert [one["name"] for one in results if one["devices"] != BOTH] == []


@pytest.mark.slow
def test_each_layers_bytes_lie_on_its_device(runs):
    for one in runs.results_of("bytes"):
        assert one["found"] == one["planned"], one["name"]
        assert sum(one["found"].values()) == one["total"]
        assert min(one["found"].values()) > 0.3 * one["total"]


@pytest.mark.slow
def test_a_saved_cache_moves_between_one_and_two_devices(runs):
    results = runs.results_of("saved")
    check_numbers(results)
    assert {one["name"]: one["devices"] for one in results} == {"to two": BOTH, "to one": ["cpu"]}


@pytest.mark.slow
def test_an_export_runs_on_both_by_its_own_code(runs):
    (found,) = runs.results_of("exported")
    check_numbers([found])
    assert found["devices"] == BOTH


@pytest.mark.slow
def test_the_engine_steps_aside_and_minicache_keeps_its_pairs_together(runs):
    (found,) = runs.results_of("engine")
    check_numbers([found])
    assert found["steps"] == 0
    assert found["without"] == "the model lies on several devices"
    assert found["refused"].startswith("greedy() is one program on one device, and the model lies on several")
    (found,) = runs.results_of("refused")
    assert found["minicache"] == {
        "00011": "minicache keeps tokens of layers 2 and 3 in common, which lie on sim:0 and sim:1: "
        "load the model with a "
        "device_map that keeps them together"
    }


@pytest.mark.slow
def test_a_model_in_memory_stays_where_it_lies_and_auto_takes_one_device_that_is_enough(runs):
    (found,) = runs.results_of("loaded")
    assert found["in memory"] == ["sim:0", "sim:0", "sim:1", "sim:1", "sim:1"]
    assert found["auto"] == ["sim:0"]
    assert found["spread"] == [False, True, True, False]


@pytest.mark.slow
def test_a_plan_is_measured_on_both(runs):
    check_numbers(runs.results_of("exploring"))


@pytest.mark.slow
def test_constant_sinks_lie_with_their_layers(runs):
    check_numbers(runs.results_of("constants"))


@pytest.mark.slow
@pytest.mark.nightly
def test_an_evaluation_on_both_gives_the_same_scores_answers_and_bytes(runs):
    (found,) = runs.results_of("evaluation")
    check_numbers([found], limit=1e-3)  # nats of 128 tokens, in float32
    assert found["spread"] == [True]


@pytest.mark.slow
def test_an_adapter_is_merged_into_a_base_on_both_and_kept_beside_it(runs):
    results = runs.results_of("adapters")
    check_numbers(results)
    assert {one["name"]: one["devices"] for one in results} == {"merged": BOTH, "beside": BOTH}


@pytest.mark.slow
def test_a_benchmark_runs_on_both(runs):
    for one in runs.results_of("benched"):
        assert one["devices"] == [BOTH] * 3, one["name"]
        assert one["errors"] == [], one["name"]
        assert one["methods"] == ["pod", "snapkv[window=8]@50%", "int4", "transformers"], one["name"]
        assert one["no graph"] == "the model lies on several devices", one["name"]
