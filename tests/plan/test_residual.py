"""How many of the newest tokens stay in 16 bits: bytes, plans, files, and the cache of the model."""

import json
from dataclasses import replace

import pytest
import torch
from plan_costs_at_random import explore_args, random_costs

from pod.bench.args import POD, bench_method
from pod.bench.decode_bytes import Sizes
from pod.eval.answer.devices import cache_bytes
from pod.identity import plan_of
from pod.modeling.model.config import PodConfig
from pod.modeling.model.group_quantizer import GroupQuantizer
from pod.modeling.model.packed_bytes import bits_per_number, window_size
from pod.modeling.model.sharing import SharingPlan
from pod.plan.choose import choose
from pod.plan.exploration import check_model, residual_of

LEAD = [[0, None], [None, None], [2, None], [None, 3], [4, None]]


@pytest.mark.parametrize("sinks", [0, 4])
@pytest.mark.parametrize(("bits", "residual"), [(4, 0), (4, 32), (8, 32), (4, 100), (4, 128)])
@pytest.mark.parametrize("recent", [64, 128, 200])
def test_a_window_takes_as_many_bytes_as_plans_count(sinks, bits, residual, recent):
    head_dim, n = 64, 300
    window = GroupQuantizer(bits, 32, residual).window("keys", sinks, recent)
    x = torch.randn(1, 1, n, head_dim, dtype=torch.bfloat16)
    for position in range(n):
        window.append(x[:, :, position : position + 1], position)
        window.flush(position + 1)
    held = sum(tensor.nbytes for tensor in window.tensors())
    _, value_bits = bits_per_number(bits, head_dim)
    size = window_size(sinks + recent, sinks, residual, value_bits)
    assert held == size * head_dim * 2
    assert window_size(sinks + recent, sinks, residual, 16.0) == sinks + recent, "nothing is packed"


def test_a_quarter_of_the_window_stays_native():
    explore = explore_args(bits="16,4")
    of_windows = {
        recent: residual_of(explore, {"num_recent_tokens": recent})
        for recent in (16, 64, 72, 84, 85, 240, 256, 4080)
    }
    assert of_windows == {16: 32, 64: 32, 72: 40, 84: 52, 85: 32, 240: 32, 256: 64, 4080: 128}
    assert residual_of(explore_args(bits="16,4", residual=7), {"num_recent_tokens": 128}) == 7


WINDOWS = {"num_sink_tokens": 0, "num_recent_tokens": 128}


def chosen(saving, costs_of_bits=1e-3, windows=WINDOWS, **changes):
    """What is chosen by random costs at 512 tokens."""
    costs = random_costs(layers=6, heads=4)
    for name in ("lead4", "follow4"):
        costs.tensors[name] *= costs_of_bits
    given = {"bits": "16,4", "roles": "window", "budget_length": 512, "retrieval_weight": 0.0}
    explore = explore_args(**given | {"target_saving": saving} | changes)
    return choose(costs, explore, windows)


def few_leads(residual):
    """The plan of a third of the bytes."""
    changes = {} if residual is None else {"residual": residual}
    return chosen(0.66, **changes).plan


def test_packed_windows_leave_bytes_for_leads():
    """The plan holds what was asked for, not less, with windows that are packed too."""
    native, packed = few_leads(128), few_leads(None)
    assert (native.residual, packed.residual) == (128, 32)
    assert packed.packs and packed.num_leads > native.num_leads
    lead = 0.3 / native.num_pairs  # about what a lead in 4 bits takes
    for plan in (native, packed):
        assert 0.66 - 1e-6 <= plan.saving(512) < 0.66 + 0.5 * lead


def test_a_plan_that_would_save_too_little_gives_way_to_one_that_saves_more(monkeypatch):
    packed, seen = few_leads(None), []

    def at_the_third(plan, *settings):
        seen.append(plan)
        return len(seen) == 3

    monkeypatch.setattr("pod.plan.choose.saves_enough", at_the_third)
    safe = few_leads(None)
    assert safe.num_leads < packed.num_leads and safe.saving(512) > packed.saving(512)
    monkeypatch.setattr("pod.plan.choose.saves_enough", lambda plan, *settings: False)
    with pytest.raises(ValueError, match="explore.residual = 32 packed windows of 128 tokens are larger"):
        few_leads(None)


def test_windows_that_packing_makes_larger():
    """72 tokens take 84 packed. So they stay native, and a plan saves what was asked for."""
    windows = {"num_sink_tokens": 0, "num_recent_tokens": 72}
    for changes in ({}, {"residual": 32}):
        assert chosen(0.858, windows=windows, **changes).plan.saving(512) >= 0.858 - 1e-6
    plan = chosen(0.7, costs_of_bits=1e3, windows=windows, residual=32).plan
    assert not plan.packs, "layers of windows alone gain nothing"


def test_what_packed_windows_reach_is_not_refused():
    """All heads in windows save 0.75 in 16 bits, and 0.816 packed."""
    assert 0.8 <= chosen(0.8).plan.saving(512) < 0.82
    config = PodConfig(num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=4, head_dim=64)
    settings = {"bits": "16,4", "roles": "window", "sequence_length": 512, "retrieval_sequences": 0}
    check_model(config, explore_args(target_saving=0.8, **settings), WINDOWS)
    for refuse in (
        lambda: chosen(0.83),
        lambda: check_model(config, explore_args(target_saving=0.83, **settings), WINDOWS),
        lambda: check_model(config, explore_args(target_saving=0.8, residual=128, **settings), WINDOWS),
    ):
        with pytest.raises(ValueError, match=r"target_saving is 0\.8.*, but the allowed roles save"):
            refuse()


def test_layers_of_windows_alone_are_packed():
    """Also where 4 bits cost much, so that layers with leads stay in 16 bits."""
    choice = chosen(0.7, costs_of_bits=1e3)
    alone = [set(row) == {None} for row in choice.plan.lead]
    assert any(alone) and choice.plan.bits == tuple(4 if one else 16 for one in alone)
    assert not chosen(0.7, costs_of_bits=1e3, residual=128).plan.packs, "these windows stay native"


def test_a_plan_in_16_bits_is_compared_at_equal_bytes():
    """What is saved without 4 bits are the bytes of packed windows too."""
    choice = chosen(0.74)
    in_16_bits = chosen(choice.plan.saving(512), bits="16")
    found = choice.plan.provenance["plan_cost_without_4_bits"]
    assert found == pytest.approx(in_16_bits.plan.provenance["plan_cost"])


def test_every_plan_of_a_curve_has_the_residual():
    """Also where the chosen plan packs nothing."""
    choice = chosen(0.0)
    assert not choice.plan.packs and choice.plans.curve.targets[-1] > 0
    assert choice.plan_at(int(choice.plans.curve.targets[-1])).residual == 32


def test_a_plan_without_packed_layers_has_the_usual_residual():
    costs = random_costs()
    explore = explore_args(bits="16", target_saving=0.3, budget_length=512, residual=5)
    plan = choose(costs, explore, {"num_sink_tokens": 0, "num_recent_tokens": 64}).plan
    assert plan == replace(plan, residual=128)


def test_plan_files(tmp_path):
    plan = SharingPlan(LEAD, bits=[4] * 5, residual=3, num_sink_tokens=2, num_recent_tokens=60)
    plan.save(tmp_path / "plan.json")
    assert SharingPlan.load(tmp_path / "plan.json") == plan != replace(plan, residual=4)
    content = json.loads((tmp_path / "plan.json").read_text())
    old = {name: value for name, value in content.items() if name != "residual"} | {"schema": 4}
    (tmp_path / "old.json").write_text(json.dumps(old))
    assert SharingPlan.load(tmp_path / "old.json") == replace(plan, residual=128)
    assert len({str(plan_of(tmp_path / name)) for name in ("plan.json", "old.json")}) == 2, "other answers"
    for wrong in (-1, 1.5, None, True):
        with pytest.raises(ValueError, match="residual must be an integer >= 0, got"):
            replace(plan, residual=wrong)
    (tmp_path / "wrong.json").write_text(json.dumps(content | {"residual": "3"}))
    with pytest.raises(ValueError, match=r"wrong\.json: sharing plan: residual must be .* got '3'"):
        SharingPlan.load(tmp_path / "wrong.json")


def test_bytes_of_a_decoded_token_know_the_residual_of_the_plan():
    config = PodConfig(num_hidden_layers=5, num_attention_heads=2, head_dim=128)
    sizes = Sizes.of(config, SharingPlan(LEAD, bits=[4] * 5, residual=32), (0, 60), element=2)
    packed = 128 * 5 / 8
    for method, native in ((POD, 32 + 15.5), (bench_method("int4"), 128 + 15.5)):
        key, _ = sizes.token_bytes(method, 4, 1000)
        assert key == pytest.approx(packed + (256 - packed) * native / 1000)


@pytest.mark.parametrize("residual", [0, 32, 128])
def test_bytes_that_a_layout_of_gpus_counts_are_those_that_the_plan_holds(residual):
    config = PodConfig(
        num_hidden_layers=5, num_attention_heads=2, head_dim=80, num_sink_tokens=4, num_recent_tokens=120,
        lead=LEAD, kv_bits=[4, 16, 8, 4, 4], kv_residual=residual,
    )  # fmt: skip
    dense = 2 * 5 * 2 * 80 * 2 * 1000
    held = sum(cache_bytes(config, 1000, 2))
    assert held == pytest.approx((1 - config.sharing_plan.saving(1000)) * dense, rel=1e-4)
