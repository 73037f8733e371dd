"""Exports for serving engines.

Which folder a model becomes, that stock transformers computes the same, and what is refused. That vLLM
computes the same is tested in test_vllm.py.
"""

import ast
import json
import runpy
import subprocess
import sys
import tomllib

import pytest
import torch
from served_models import DENSE, FAMILIES, WINDOW, make_model
from transformers import AutoModelForCausalLM

import pod
from pod.export import export
from pod.export.served import GRANITE, NO_SINK, OWN, Target, served_weights, target_of

LLAMA = Target("llama", "LlamaForCausalLM")
BOTH = Target("qwen2", "LlamaForCausalLM")
QWEN2 = Target("qwen2", "Qwen2ForCausalLM")
QWEN3 = Target("qwen3", "Qwen3ForCausalLM")
QWEN3_WINDOWS = Target("qwen3", "PodServedForCausalLM")
IDS = torch.arange(2 * 60).reshape(2, 60) * 31 % 97

TARGETS = [
    ("llama", {}, BOTH),
    ("llama", DENSE, LLAMA),
    ("qwen2", {}, BOTH),
    ("qwen2", DENSE, QWEN2),
    ("qwen3", {}, QWEN3_WINDOWS),
    ("qwen3", DENSE, QWEN3),
    ("qwen3_bias", DENSE, QWEN3_WINDOWS),
    ("o_bias", {}, GRANITE),
    ("o_bias", DENSE, LLAMA),
    ("mlp_bias", {}, GRANITE),
    ("mlp_bias", DENSE, LLAMA),
    ("tied", {}, BOTH),
    ("yarn", {}, BOTH),
    ("own windows", {}, BOTH),
    ("all windows", {}, BOTH),
    ("granite", {}, GRANITE),
    ("granite", DENSE, GRANITE),
    ("smollm3", {}, GRANITE),
    ("sinks", {}, GRANITE),
    ("sinks of qwen2", {}, GRANITE),
    ("sinks of qwen3", {}, OWN),
    ("sinks, o_bias", {}, GRANITE),
    ("sinks, own window", {}, GRANITE),
    ("sinks, llama3", {}, GRANITE),
    ("sinks, mlp_bias, yarn", {}, GRANITE),
    ("sinks", FAMILIES["granite"], GRANITE),
]
SINKS = [name for name in FAMILIES if name.startswith("sinks")]


@torch.no_grad()
@pytest.mark.parametrize(("family", "changes", "target"), TARGETS)
def test_a_stock_model_of_transformers_computes_the_same(tmp_path, family, changes, target):
    model = make_model(**(FAMILIES[family] | changes))
    assert target_of(model.config) == target
    export(model, tmp_path / "served", format="vllm")
    content = json.loads((tmp_path / "served" / "config.json").read_text())
    assert (content["model_type"], content["architectures"]) == (target.model_type, [target.architecture])
    if not target.is_stock:
        with pytest.raises(ValueError, match="model type `pod_served`"):
            AutoModelForCausalLM.from_pretrained(tmp_path / "served")
        return
    stock, about = AutoModelForCausalLM.from_pretrained(tmp_path / "served", output_loading_info=True)
    assert not about["missing_keys"] and not about["unexpected_keys"]
    wanted = model(IDS).logits
    assert (stock.eval()(IDS).logits - wanted).abs().max() <= 2e-5 * wanted.abs().max()


@torch.no_grad()
def test_the_window_of_an_engine_counts_the_current_token_as_ours_does(tmp_path):
    """One token more or less would go unnoticed where nothing is attended to at the window's end."""
    model = make_model()
    export(model, tmp_path / "served", format="vllm")
    wanted = model(IDS).logits
    for tokens, is_equal in ((WINDOW - 1, False), (WINDOW, True), (WINDOW + 1, False)):
        stock = AutoModelForCausalLM.from_pretrained(tmp_path / "served", sliding_window=tokens)
        error = (stock.eval()(IDS).logits - wanted).abs().max() / wanted.abs().max()
        assert (error <= 2e-5) == is_equal, (tokens, error)


@pytest.mark.parametrize("family", ["llama", "sinks"])
def test_stock_transformers_frees_what_leaves_a_window(tmp_path, family):
    """Real memory: the storages of the cache that `generate()` returns."""
    export(make_model(**FAMILIES[family]), tmp_path / "served", format="vllm")
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "served")
    answer = stock.generate(IDS, max_new_tokens=9, do_sample=False, return_dict_in_generate=True)
    tokens = [layer.keys.untyped_storage().nbytes() // (4 * 2 * 2 * 32) for layer in answer[1].layers]
    assert tokens == [68, WINDOW, 68, WINDOW], "of float32, 2 texts, 2 KV heads and 32 channels"


@torch.no_grad()
@pytest.mark.parametrize("family", SINKS)
def test_sink_values_fold_into_biases(family):
    """What engines compute: the same model with biases, and a sink whose value is zero."""
    model = make_model(**FAMILIES[family])
    weights = served_weights(model)
    assert not any(name.endswith("sink_values") for name in weights)
    layers = [f"model.layers.{layer}.self_attn.sinks" for layer in model.config.sink_layers]
    assert layers and weights.keys() >= set(layers)
    changes = {"attention_qkv_bias": True, "attention_out_bias": True}
    engine = pod.PodForCausalLM(pod.PodConfig(**(model.config.to_dict() | changes))).eval()
    zeros = {name: torch.zeros_like(weight) for name, weight in engine.state_dict().items()}
    engine.load_state_dict({name: weights.get(name, zeros[name]) for name in zeros})
    others = weights.keys() - zeros.keys()
    assert all((weights[name] == NO_SINK).all() for name in others), "layers that need no sink have none"
    wanted = model(IDS).logits
    assert (engine(IDS).logits - wanted).abs().max() <= 2e-5 * wanted.abs().max()
    without = pod.PodForCausalLM(pod.PodConfig(**(model.config.to_dict() | {"sinks": "none"}))).eval()
    without.load_state_dict(model.state_dict(), strict=False)
    assert (without(IDS).logits - wanted).abs().max() > 1e-2 * wanted.abs().max()


def test_the_output_adds_what_rounded_values_have_lost():
    """In 16 bits too: the bias of the output is made of what the bias of the values really subtracts."""
    model = make_model(**FAMILIES["sinks of qwen2"]).to(torch.bfloat16)
    before, after = model.state_dict(), served_weights(model)
    layer = "model.layers.1.self_attn."
    lost = (before[f"{layer}v_proj.bias"].double() - after[f"{layer}v_proj.bias"].double()).view(2, 32)
    wanted = before[f"{layer}o_proj.weight"].double() @ lost.repeat_interleave(2, dim=0).flatten()
    assert torch.equal(after[f"{layer}o_proj.bias"], wanted.to(torch.bfloat16))


@torch.no_grad()
def test_a_folder_of_stock_kind_loads_here_again(tmp_path):
    model = make_model()
    export(model, tmp_path / "served", format="vllm")
    again = pod.load_model(tmp_path / "served")
    wanted = model(IDS).logits
    assert (again(IDS).logits - wanted).abs().max() <= 2e-5 * wanted.abs().max()


REFUSED = [
    ({"lead": [[0, 0], [None, 1], [2, 2], [3, 3]]}, "heads of layer 1 different roles.*granularity=layer"),
    ({"lead": [[0, 0], [0, 0], [2, 2], [3, 3]]}, "layer 1 follows another layer.*explore.target=vllm"),
    ({"kv_bits": [16, 4, 16, 16]}, "fewer bits.*explore.target=vllm"),
    ({"num_sink_tokens": 4}, "keep the first 4 tokens.*explore.target=vllm.*model.sinks=constant"),
    ({"layout": "cla", "lead": None}, "layout = 'cla'.*export.format=hf"),
    (
        {"layer_windows": [None, None, None, 9], "lead": [[0, 0], [None, None], [2, 2], [None, None]]},
        "windows of 9 and 16 tokens.*model.num_recent_tokens",
    ),
    ({"qk_norm": True, "qk_norm_across_heads": True}, "qk_norm_across_heads = True.*Llama, Mistral"),
    ({"norm_offset": 1.0}, "norm_offset = 1.0.*Llama, Mistral"),
    ({"norm_placement": "both"}, "norm_placement = 'both'.*Llama, Mistral"),
    ({"qk_norm": True, "logits_scaling": 2.0}, "qk_norm = True.*Llama, Mistral"),
    ({"hidden_act": "gelu"}, "hidden_act = 'gelu'.*Llama, Mistral"),
    ({"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}, "num_experts = 4.*Mistral"),
]


@pytest.mark.parametrize(("changes", "says"), REFUSED)
def test_what_no_engine_computes_is_refused_in_one_line(tmp_path, changes, says):
    with pytest.raises(ValueError, match=says) as raised:
        export(make_model(**changes), tmp_path / "served", format="vllm")
    assert "\n" not in str(raised.value)
    assert not list(tmp_path.iterdir()), "nothing half-written stays"


def test_a_token_that_the_model_does_not_have_is_in_no_export(tmp_path):
    """A family's configuration would fill in its own: 100257 ends a text of Granite."""
    for name in ("sinks", "llama"):
        model = make_model(**FAMILIES[name], bos_token_id=None, eos_token_id=None, pad_token_id=None)
        export(model, tmp_path / name, format="vllm")
        content = json.loads((tmp_path / name / "config.json").read_text(encoding="utf-8"))
        assert [content[token] for token in ("bos_token_id", "eos_token_id", "pad_token_id")] == [None] * 3
        served = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert served.config.eos_token_id is None


@pytest.mark.parametrize("format", ["hf", "vllm"])
def test_other_users_may_read_an_export(tmp_path, format):
    export(make_model(), tmp_path / "out", format=format)
    modes = {file.stat().st_mode & 0o777 for file in (tmp_path / "out").iterdir()}
    assert modes == {(tmp_path / "out" / "README.md").stat().st_mode & 0o777}


def test_an_export_for_engines_says_which_one_loads_here(tmp_path):
    export(make_model(**FAMILIES["sinks"]), tmp_path / "served", format="vllm")
    with pytest.raises(ValueError, match="is an export for serving engines.*--format hf"):
        pod.load_model(tmp_path / "served")


def test_an_unknown_format_is_refused(tmp_path):
    with pytest.raises(ValueError, match="export.format = 'sglang' is not known: choose hf or vllm"):
        export(make_model(), tmp_path / "served", format="sglang")


def test_an_export_of_one_format_does_not_replace_one_of_the_other(tmp_path):
    model = make_model()
    export(model, tmp_path / "one", format="vllm", max_shard_size="20KB")
    assert list((tmp_path / "one").glob("model-0*")), "weights are in shards"
    export(model, tmp_path / "one", format="vllm")
    assert not list((tmp_path / "one").glob("model-0*")), "shards of the earlier export are gone"
    with pytest.raises(ValueError, match="is an export of format vllm, so one of format hf does not"):
        export(model, tmp_path / "one")
    export(model, tmp_path / "two")
    with pytest.raises(ValueError, match="is an export of format hf, so one of format vllm does not"):
        export(model, tmp_path / "two", format="vllm")


def test_the_card_says_who_serves_it_and_how(tmp_path):
    export(make_model(), tmp_path / "stock", format="vllm")
    export(make_model(**FAMILIES["sinks of qwen3"]), tmp_path / "own", format="vllm")
    export(make_model(**FAMILIES["sinks"]), tmp_path / "granite", format="vllm")
    stock = (tmp_path / "stock" / "README.md").read_text(encoding="utf-8")
    own = (tmp_path / "own" / "README.md").read_text(encoding="utf-8")
    granite = (tmp_path / "granite" / "README.md").read_text(encoding="utf-8")
    for card in (stock, own, granite):
        assert "vllm serve" in card and "| vLLM, CPU | 0.32.0 |" in card
        assert "trust_remote_code" not in card
        assert "every token in 2 of 4 layers, and the last 16 tokens in the others" in card
    assert "as `LlamaForCausalLM`, without a plugin" in stock and "as `qwen2`" in stock
    assert "pip install ./integrations/vllm" in own
    assert "with the plugin" in own and "refuses the folder" in own
    assert "as `GraniteSWAForCausalLM`, without a plugin" in granite and "without biases" in granite
    assert "In 2 layers a constant stands for the first tokens." in granite
    skips = ["--kv-cache-dtype-skip-layers sliding_window" in card for card in (stock, own, granite)]
    assert skips == [False, True, True], "an 8-bit cache harms layers with constants"
    assert "library_name: vllm" in own and "library_name: transformers" in stock


def test_a_card_offers_no_8_bit_cache_where_no_layer_would_have_it(tmp_path):
    export(make_model(sinks="constant", lead=[[None, None]] * 4), tmp_path / "out", format="vllm")
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "every token in 0 of 4 layers" in card and "--kv-cache-dtype" not in card


def test_the_card_has_the_bytes_that_vllm_holds(tmp_path):
    """Two of four layers have windows of 16 tokens; blocks hold 16 tokens of a group of two layers."""
    model = make_model(max_position_embeddings=4096)
    export(model, tmp_path / "out", format="vllm")
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    config = model.config
    block = 16 * 2 * 2 * config.num_key_value_heads * config.head_dim  # of one layer, 16-bit numbers
    dense, near, reading = 4 * 128, 2 * 128 + 2 * 2, 2 * 128 + 2 * 129
    sizes = " | ".join(f"{blocks * block / 1e6:,.1f}" for blocks in (dense, reading, near))
    assert f"| 2,048 | {sizes} | {1 - near / dense:.1%} |" in card
    assert "as large as the original one" not in card


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, "the one that `pod export --format vllm` writes"),
        ({"num_sink_tokens": 4}, "vLLM and SGLang cannot run this cache layout. Use transformers or pod-kv."),
    ],
)
def test_the_card_of_the_other_format_says_whether_engines_run_it(tmp_path, changes, says):
    export(make_model(**changes), tmp_path / "export")
    assert says in (tmp_path / "export" / "README.md").read_text(encoding="utf-8")


def test_the_plugin_registers_what_exports_name(root):
    """It cannot import this package, and a model's class is named as a string."""
    folder = root / "integrations" / "vllm"
    names = runpy.run_path(str(folder / "pod_vllm" / "__init__.py"))
    assert (names["ARCHITECTURE"], names["MODEL_TYPE"]) == OWN[::-1]
    model = ast.parse((folder / "pod_vllm" / "model.py").read_text(encoding="utf-8"))
    assert OWN.architecture in [node.name for node in model.body if isinstance(node, ast.ClassDef)]
    for project in (root, folder):
        points = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["project"][
            "entry-points"
        ]
        assert points == {"vllm.general_plugins": {"pod_vllm": "pod_vllm:register"}}


@pytest.mark.slow
@pytest.mark.parametrize("version", ["0.32.0", "0.33.1"])
def test_registering_the_plugin_imports_no_model(root, version):
    """vLLM calls it in every process at the start: before it forks, and where another model is served."""
    code = (
        "import sys, types; calls = []; "
        "registry = types.SimpleNamespace(register_model=lambda *names: calls.append(names)); "
        "sys.modules['vllm'] = types.SimpleNamespace(ModelRegistry=registry, "
        f"__version__='{version}'); "
        "import pod_vllm; pod_vllm.register(); pod_vllm.register(); "
        "assert set(calls) == {('PodServedForCausalLM', 'pod_vllm.model:PodServedForCausalLM')}, calls; "
        "assert 'pod_vllm.model' not in sys.modules; "
        "from transformers import AutoConfig; "
        "config = AutoConfig.for_model('pod_served', layer_types=['full_attention'], sink_layers=[3], "
        "qk_norm=True); "
        "assert (config.sink_layers, config.qk_norm) == ([3], True); "
        "import pickle; "
        "assert pickle.loads(pickle.dumps(config)).sink_layers == [3], 'vLLM sends it to its processes'"
    )
    folder = root / "integrations" / "vllm"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert ("was tried with vLLM 0.32.x, this is 0.33.1" in done.stderr) == (version == "0.33.1")
