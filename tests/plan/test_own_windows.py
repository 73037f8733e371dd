"""Plans of models some of whose layers were trained with windows (Mistral, Gemma 3).

These layers keep their windows and take no part.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from plan_models import any_order, make_model

import pod
from pod.commands import explore
from pod.modeling.model.sharing import SharingPlan
from pod.models import resolve_model
from pod.plan.choose import in_all_layers
from pod.plan.costs import TextWithGradients, cost_shapes, measure_costs
from pod.plan.exploration import Exploration
from pod.plan.recording import planned_layers, record_attention_inputs
from pod.recipe import load_recipe

WINDOWS = {"num_sink_tokens": 2, "num_recent_tokens": 5}


@pytest.fixture(scope="module")
def input_ids():
    return torch.randint(0, 61, (1, 41), generator=torch.Generator().manual_seed(5))


def gemma(folder: Path, layer_types: str) -> Path:
    """A random Gemma 3 with the tiny model's tokenizer; a letter for each layer, s = sliding, f = full."""
    tiny = Path(resolve_model("package:tiny"))
    sizes = json.loads((tiny / "config.json").read_text())
    torch.manual_seed(0)
    kinds = {"s": "sliding_attention", "f": "full_attention"}
    config = transformers.Gemma3TextConfig(
        vocab_size=sizes["vocab_size"], hidden_size=32, intermediate_size=48,
        num_hidden_layers=len(layer_types), num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        max_position_embeddings=512, sliding_window=7,
        layer_types=[kinds[letter] for letter in layer_types],
        query_pre_attn_scalar=20, initializer_range=0.3,
    )  # fmt: skip
    transformers.Gemma3ForCausalLM(config).double().save_pretrained(folder)
    for file in tiny.glob("*token*"):
        shutil.copy(file, folder)
    return folder


@torch.no_grad()
def test_costs_are_those_of_the_same_layers_among_all(input_ids):
    """A window that covers the text changes nothing: its layer is left out of what is measured, no more."""
    whole, some = make_model(6, 2), make_model(6, 2, layer_windows=[None, 60, None, None])
    assert planned_layers(some.config) == [0, 2, 3]
    order = any_order(whole.config)
    chosen = torch.tensor([0, 2, 3])
    found = measure_costs(some, TextWithGradients.of(some, input_ids, 7), order[chosen][:, chosen])
    expected = measure_costs(whole, TextWithGradients.of(whole, input_ids, 7), order)
    assert {name: tuple(value.shape) for name, value in found.items()} == cost_shapes(3, 2)
    for name, value in expected.items():
        if name in ("follow", "in_place"):
            value = value[chosen][:, chosen]
        elif name == "windows":
            value = value[chosen][:, :, chosen]
        else:
            value = value[chosen]
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=0, msg=name)


@torch.no_grad()
def test_layers_above_windows_read_what_windows_leave(input_ids):
    model = make_model(6, 2, layer_windows=[None, 6, None, 3])
    states = model(input_ids, output_hidden_states=True).hidden_states
    found = [inputs.hidden_states for inputs in record_attention_inputs(model, input_ids)]
    assert len(found) == 2 and torch.equal(found[0], states[0][0]) and torch.equal(found[1], states[2][0])
    dense = make_model(6, 2)
    assert not torch.equal(dense(input_ids, output_hidden_states=True).hidden_states[2][0], found[1])


def test_a_plan_of_some_layers_is_one_of_all():
    lead, order = ((0, 0), (0, None), (2, 2)), ((1, 0), (0, 1), (1, 0))
    plan = SharingPlan(lead, {"layers": [1, 2, 5], "num_layers": 6}, head_order=order, bits=(16, 4, 16))
    whole = in_all_layers(plan)
    none, same = (None, None), (0, 1)
    assert whole.lead == (none, (1, 1), (1, None), none, none, (5, 5))
    assert whole.head_order == (same, (1, 0), (0, 1), same, same, (1, 0))
    assert whole.bits == (4, 16, 4, 4, 4, 16) and whole.provenance == plan.provenance
    plain = SharingPlan(lead)
    assert in_all_layers(plain) is plain
    native = in_all_layers(replace(plan, bits=(16, 16, 16)))
    assert native.bits == (16,) * 6, "nothing is packed where the plan packs nothing"


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["explore.bits=[16,4]"], ["similarity"]])
def test_explore_plans_the_layers_that_see_everything(explore_overrides, tmp_path, capsys, more):
    folder = gemma(tmp_path / "gemma", "sfsfsff")
    settings = [
        *explore_overrides,
        f"model.path={folder}",
        "model.dtype=float64",
        "explore.target_saving=0.4",
    ]
    settings += ["model.num_sink_tokens=2", "model.num_recent_tokens=5", "explore.loss_sequences=2"]
    if more == ["similarity"]:
        more = ["explore.cost=similarity", "explore.roles=[follow]", "explore.target_saving=0.2"]
    recipe = load_recipe(None, [*settings, *more])
    explore.main(recipe)
    assert "the plan covers 4 of 7 layers" in capsys.readouterr().out
    plan = SharingPlan.load(tmp_path / "run" / "plan" / "plan.json")
    assert [set(plan.lead[layer]) for layer in (0, 2, 4)] == [{None}] * 3
    assert plan.num_leads < 8 and {lead for row in plan.lead for lead in row} <= {None, 1, 3, 5, 6}
    for name in ("plan.json", "summary.txt", "blocks.png"):
        assert (tmp_path / "run" / "plan" / name).stat().st_size
    model = pod.load_model(str(folder), plan=plan, dtype=torch.float64, **WINDOWS)
    dense = pod.load_model(str(folder), plan=None, dtype=torch.float64, **WINDOWS)
    ids = torch.randint(3, 200, (1, 48))
    straight = pod.load_model(
        str(folder),
        plan=in_all_layers(
            replace(SharingPlan.dense(4, 2), provenance={"layers": [1, 3, 5, 6], "num_layers": 7})
        ),
        dtype=torch.float64,
        **WINDOWS,
    )
    with torch.no_grad():
        assert torch.equal(straight(ids).logits, dense(ids).logits)
        assert not torch.allclose(model(ids).logits, dense(ids).logits)
        if "losses" in plan.provenance and plan.bits is None:
            texts = Exploration.of(recipe).read()[-2:]
            losses = [model(row[None], labels=row[None]).loss.item() for row in texts]
            assert plan.provenance["losses"]["plan"]["text"] == pytest.approx(sum(losses) / 2, rel=1e-9)


def test_without_a_layer_to_plan_nothing_is_measured(explore_overrides, tmp_path, explore_refused):
    for kinds, more, words in (
        ("ss", [], "every layer of this model was trained with a window"),
        (
            "sf",
            ["explore.heads=true", "explore.head_tokens=16"],
            "razor cannot run it and needs no retrieval heads",
        ),
    ):
        folder = gemma(tmp_path / kinds, kinds)
        explore_refused([*explore_overrides, f"model.path={folder}", *more], words)
