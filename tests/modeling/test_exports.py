"""What a saved folder is to a user of transformers alone.

Also what `load_model` takes of `from_pretrained`.
"""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig

import pod

MODEL_FILES = sorted((Path(pod.__file__).parent / "modeling" / "model").glob("*.py"))
STOCK_USER = """
import json, sys, torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, DynamicCache
folder, ids = sys.argv[1], torch.tensor(json.loads(sys.argv[2]))

def load(cls=AutoModelForCausalLM, folder=folder, **options):
    return cls.from_pretrained(folder, trust_remote_code=True, **options).eval()

def said(function, *arguments, **options):
    try:
        function(*arguments, **options)
    except ValueError as error:
        return str(error)

with torch.no_grad():
    model, base, found = load(), load(AutoModel), {}
    found["base"] = [type(base).__name__, base(ids).last_hidden_state.tolist()]
    found["auto_map"] = sorted(model.config.auto_map)
    for name in ("eager", "sdpa", "flash_attention_2"):
        named = load(attn_implementation=name)
        context = named.model.context(torch.zeros(1, 1, 1), torch.zeros(1, 1))
        tokens = named.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=-1)
        found[name] = [context.backend, named(ids).logits.tolist(), tokens.tolist()]
    named.save_pretrained(sys.argv[3])
    found["kept"] = load(folder=sys.argv[3]).config.attention_backend
    found["again"] = load(folder=sys.argv[3])(ids).logits.tolist()
    for name in ("flex_attention", "flash_attention_3", "paged|eager"):
        found[name] = said(load, attn_implementation=name)
    found["set"] = said(model.set_attn_implementation, "flex_attention")
    model.set_attn_implementation("eager")
    found["eager later"] = model.model.context(torch.zeros(1, 1, 1), torch.zeros(1, 1)).backend
assert "pod" not in sys.modules
print(json.dumps(found))
"""


def ask(code, *arguments, cwd):
    """What a process prints last that has transformers and not this package."""
    environment = os.environ | {"HF_MODULES_CACHE": str(cwd / "modules"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-I", "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=cwd)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def stock_user(tmp_path_factory):
    """`(found, model, ids)`: a folder in the hands of transformers alone.

    `load_model` read it from an export and saved it again.
    """
    first, second, third = (tmp_path_factory.mktemp(name) for name in ("first", "second", "third"))
    sizes = {
        "vocab_size": 97,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "head_dim": 16,
    }
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "initializer_range": 0.25}
    lead = [[0, None], [0, 1], [None, 1], [3, 1]]
    windows = {"num_sink_tokens": 2, "num_recent_tokens": 9}
    torch.manual_seed(0)
    pod.PodForCausalLM(pod.PodConfig(**sizes, **heads, lead=lead, **windows)).save_pretrained(first)
    model = pod.load_model(first)
    model.save_pretrained(second)
    ids = torch.randint(3, 97, (2, 40), generator=torch.Generator().manual_seed(0))
    return ask(STOCK_USER, second, json.dumps(ids.tolist()), third, cwd=second), model, ids


@pytest.mark.slow
@torch.no_grad()
def test_what_load_model_gave_can_be_saved_for_transformers_alone(stock_user):
    """Logits are those of the model, for the causal model and for the base model.

    They are so again after another save.
    """
    found, model, ids = stock_user
    assert found["auto_map"] == ["AutoConfig", "AutoModel", "AutoModelForCausalLM"]
    name, hidden = found["base"]
    assert name == "PodModel"
    assert (torch.tensor(hidden) - model.model(ids).last_hidden_state).abs().max() <= 1e-6
    for logits in (found["sdpa"][1], found["again"]):
        assert (torch.tensor(logits) - model(ids).logits).abs().max() <= 1e-6


@torch.no_grad()
@pytest.mark.slow
def test_attention_implementations_of_stock_models_choose_ours(stock_user):
    found, model, ids = stock_user
    logits = model(ids).logits
    tokens = model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=-1).tolist()
    for name, backend in {"eager": "reference", "sdpa": "auto", "flash_attention_2": "flash"}.items():
        assert found[name][0] == backend
        assert (torch.tensor(found[name][1]) - logits).abs().max() <= 2e-5 * logits.abs().max()
        assert found[name][2] == tokens
    assert found["kept"] == "auto", "what one process asked for is no property of the weights"
    assert found["eager later"] == "reference"
    for name in ("flex_attention", "flash_attention_3", "paged|eager"):
        assert found[name] == f"attn_implementation = {name!r} is none of eager, flash_attention_2, sdpa"
    assert found["set"] == found["flex_attention"]


def messages(file):
    """Strings of a file that are no docstrings."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            yield node.value


@pytest.mark.parametrize("file", MODEL_FILES, ids=lambda file: file.stem)
def test_messages_of_an_export_name_nothing_that_its_user_lacks(file):
    wrong = [
        text for text in messages(file) if re.search(r"\bpod\.[a-z]|launch/|load_model\((?!.*pod-kv)", text)
    ]
    assert not wrong


# -- load_model -----------------------------------------------------------------------------


@pytest.fixture
def folder(tools, tmp_path):
    tools.make_stock(dtype=torch.float32).save_pretrained(tmp_path / "stock")
    return tmp_path / "stock"


def complaint(*arguments, **options):
    with pytest.raises(ValueError) as caught:
        pod.load_model(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_revision_token_and_places_reach_the_hub(folder, monkeypatch, tmp_path):
    """The configuration is read with them too, and first: a family that does not fit costs no weights."""
    asked = []

    def hub(cls, kind):
        read = cls.from_pretrained

        def from_pretrained(name, **options):
            if name == "owner/name":
                places = {key: options.pop(key, None) for key in ("revision", "token", "cache_dir")}
                asked.append((kind, name, places))
            return read(folder, **options)

        monkeypatch.setattr(cls, "from_pretrained", from_pretrained)

    hub(AutoConfig, "config")
    hub(AutoModelForCausalLM, "weights")
    given = {"revision": "v2", "token": "secret", "cache_dir": str(tmp_path)}
    pod.load_model("owner/name", **given)
    assert asked == [("config", "owner/name", given), ("weights", "owner/name", given)]
    asked.clear()
    LlamaConfig(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}).save_pretrained(
        folder
    )
    assert "'dynamic' is not supported" in complaint("owner/name", **given)
    assert asked == [("config", "owner/name", given)]


@pytest.mark.parametrize(
    "device_map",
    ["cpu", "auto", {"": "cpu"}, torch.device("cpu"), {"model": "cpu", "lm_head": "cpu"}],
    ids=str,
)
def test_a_device_map_of_one_device_is_that_device(folder, device_map, tools):
    ids = tools.random_ids(1, 20)
    model = pod.load_model(folder, device_map=device_map)
    assert torch.equal(model(ids).logits, pod.load_model(folder)(ids).logits)
    assert set(map(str, model.hf_device_map.values())) == {"cpu"}


def test_a_device_map_is_heeded(folder, tools):
    assert pod.load_model(folder, device_map={"": "meta"}).device.type == "meta"
    assert pod.load_model(folder, device="meta").device.type == "meta"
    assert pod.load_model(tools.make_stock().to("meta")).device.type == "meta"


def test_a_part_on_a_device_that_does_not_compute_is_refused(folder):
    said = complaint(folder, device_map={"model": "cpu", "lm_head": "meta"})
    assert said.startswith("device_map names cpu beside other devices: nothing is offloaded to host memory")


@pytest.mark.parametrize(
    ("device_map", "says"),
    [
        ({"foo": "cpu"}, "device_map names foo, which the model does not have"),
        ({"model.layers.0": "cpu"}, "device_map says nothing of model.embed_tokens"),
        ({0: "cpu"}, "device_map names 0: its keys are names of modules"),
        ({"": -1}, "device_map = -1 is no device"),
    ],
)
def test_a_wrong_map_of_one_device_is_refused_too(folder, device_map, says):
    assert complaint(folder, device_map=device_map).startswith(says)


def test_quantized_weights_are_refused_before_any_is_read(folder, monkeypatch, tmp_path):
    monkeypatch.setattr("pod.modeling.loading.AutoModelForCausalLM.from_pretrained", None)
    said = complaint(folder, quantization_config=BitsAndBytesConfig(load_in_8bit=True))
    assert "quantization_config" in said and "'pod+int4'" in said
    LlamaConfig(quantization_config={"quant_method": "gptq", "bits": 4}).save_pretrained(tmp_path / "gptq")
    said = complaint(tmp_path / "gptq")
    assert "gptq" in said and "quantized" in said


def test_what_load_model_does_not_take_is_named(folder, tools):
    said = complaint(folder, num_recent_token=4)
    assert said.endswith("take num_recent_token; num_recent_token: did you mean num_recent_tokens?")
    said = complaint(folder, tp_plan="auto", offload_folder="o")
    assert "not take offload_folder, tp_plan; offload_folder: nothing is offloaded to disk" in said
    assert "tp_plan: layers are not cut between devices: device_map='auto' spreads whole layers" in said
    assert "it takes attention_backend, attn_implementation, cache_dir" in complaint(folder, xyzzy=1)
    said = complaint(tools.make_stock(), revision="main", token="x")
    assert "revision, token" in said and "in memory" in said


@pytest.mark.parametrize("dtype", [torch.bfloat16, "bfloat16", "auto", None])
def test_dtypes_of_files_and_of_models_in_memory(folder, dtype, tools):
    expected = torch.float32 if dtype in ("auto", None) else torch.bfloat16
    for source in (folder, tools.make_stock(dtype=torch.float32)):
        model = pod.load_model(source, dtype=dtype)
        assert {weight.dtype for weight in model.parameters()} == {expected} == {model.config.dtype}


def test_a_tokenizer_is_read_at_the_same_revision(monkeypatch):
    asked = {}
    tokenizer = pod.load_tokenizer("package:tiny")

    def from_pretrained(name, **options):
        asked.update(options, name=name)
        return tokenizer

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", from_pretrained)
    pod.load_tokenizer("owner/name", revision="v2", token="secret")
    places = {"revision": "v2", "token": "secret"}
    assert asked == {"name": "owner/name", "trust_remote_code": False, **places}
