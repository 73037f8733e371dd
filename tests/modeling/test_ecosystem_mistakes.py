"""Likely first mistakes, each answered in one line that says what to do.

Also `torch.compile` around a decoding step.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import DynamicCache, Gemma3TextConfig, GPT2Config

import pod
from pod.bench.run import plan_bench
from pod.models import ModelArgs, check_has_config, read_config, ways_without_network
from pod.recipe import load_recipe
from pod.training.run.start_model import source_config

ROOT = Path(__file__).resolve().parents[2]


def complaint(function, *arguments, **options):
    """The message of a ValueError of one line."""
    with pytest.raises(ValueError) as caught:
        function(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_stock_models_and_pod_caches(tools):
    stock, model, ids = tools.make_stock(), tools.make_pod(plan=False), tools.random_ids(1, 12)
    for other in (stock, "runs/demo/export", model.config, None):
        said = complaint(pod.make_cache, other)
        assert type(other).__name__ in said and "pod.load_model" in said
    for use in (stock, lambda ids, **given: stock.generate(ids, max_new_tokens=2, **given)):
        said = complaint(use, ids, past_key_values=pod.make_cache(model))
        assert "only PodForCausalLM" in said and "load_model of pod-kv" in said
    for cache in (DynamicCache(), ((ids, ids),)):
        said = complaint(model, ids, past_key_values=cache)
        assert f"a {type(cache).__name__} cannot serve" in said and "pod-kv's make_cache" in said
        assert model(ids).logits.shape == (1, 12, 97)


def test_a_used_cache_for_another_prompt(tools):
    model, cache = tools.make_pod(), None
    options = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None}
    cache = pod.make_cache(model)
    model.generate(tools.random_ids(1, 20), past_key_values=cache, **options)
    for batch, n in ((1, 20), (1, 40), (2, 40)):
        ids = tools.random_ids(batch, n, seed=5)
        assert re.search(
            r"reset\(\) or make a new", complaint(model.generate, ids, past_key_values=cache, **options)
        )
    ids = tools.random_ids(1, 9, seed=5)
    assert "reset()" in complaint(model, ids, attention_mask=torch.ones_like(ids), past_key_values=cache)
    cache.reset()
    assert torch.equal(model.generate(ids, past_key_values=cache, **options), model.generate(ids, **options))


@pytest.mark.parametrize("options", [{}, {"use_cache": False}, {"num_beams": 2}], ids=str)
def test_generate_behind_padding_is_refused(tools, options):
    """The first new token would be that of the padding in the last column."""
    model, ids, mask = tools.make_pod(use_cache=True), tools.random_ids(2, 20), torch.ones(2, 20)
    mask[0, 15:] = 0
    said = complaint(model.generate, ids, attention_mask=mask.long(), max_new_tokens=3, **options)
    assert "ends with padding" in said and "padding_side='left'" in said


def test_tokens_without_rows_are_refused(tools):
    assert "the tokens are [20], expected [rows, tokens]" in complaint(tools.make_pod(), torch.arange(20))


OPTIONS = {"think": {"window": 4}, "razor": {"retrieval_heads": "sharing"}}


@pytest.mark.parametrize("codec", ["", "int4"])
@pytest.mark.parametrize("spec", sorted(set(pod.methods()) - {"pod", "cla", "window"}))
def test_pod_plus_is_suggested_where_it_is_allowed_and_only_there(tools, spec, codec):
    """What is suggested can be made, for a budget.

    What is not suggested is refused, for the reason that was given.
    """
    method, model = pod.methods()[spec], tools.make_pod()
    if codec and method.axis == "codec":
        pytest.skip("two codecs")
    spec = f"{spec}+{codec}" if codec else spec
    said = complaint(pod.make_cache, model, spec)
    suggested = re.search(r"as in '([^']*)'", said)
    options = {"budget": 200} if method.takes_budget else {}
    if suggested:
        assert pod.make_cache(model, suggested[1], **options).spec == suggested[1]
    else:
        reason = re.search(r"load the dense checkpoint \((.*)\)$", said)[1]
        assert reason in complaint(pod.make_cache, model, f"pod+{spec}", **options)


def test_models_in_memory(tools):
    """Of transformers, of ours; an adapter has to be merged, anything else is refused."""
    config = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])
    adapted = get_peft_model(tools.make_stock(), config)
    assert (
        "PeftModelForCausalLM" in (said := complaint(pod.load_model, adapted)) and "merge_and_unload" in said
    )
    assert "Linear" in complaint(pod.load_model, nn.Linear(2, 2))
    ids, model = tools.random_ids(1, 20), tools.make_pod()
    for source in (model, adapted.merge_and_unload()):
        plan = pod.SharingPlan(tools.lead)
        again = pod.load_model(source, plan=plan, num_sink_tokens=4, num_recent_tokens=11)
        assert torch.equal(again(ids).logits, model(ids).logits)


def test_what_cannot_be_loaded_is_known_before_weights_are_read(tmp_path, monkeypatch):
    """A folder that is not there is not looked for on the hub.

    A family is told by its configuration alone.
    """

    def never(*arguments, **options):
        raise AssertionError("the hub was asked, or weights")

    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    for hub in ("AutoConfig", "AutoModelForCausalLM"):
        monkeypatch.setattr(f"transformers.{hub}.from_pretrained", never)
    for missing in (
        str(tmp_path / "nowhere"),
        "./nowhere",
        "runs/export",
        "other/demo/export",
        "~/no/such",
        "export",
    ):
        for load in (pod.load_model, pod.load_tokenizer):
            said = complaint(load, missing)
            assert said == f"cannot load a model from {missing}: there is no such folder"
    monkeypatch.undo()
    monkeypatch.setattr("pod.modeling.loading.AutoModelForCausalLM.from_pretrained", never)
    for config in (GPT2Config(), Gemma3TextConfig(final_logit_softcapping=30.0)):
        config.save_pretrained(tmp_path / "other")
        assert config.model_type in complaint(pod.load_model, tmp_path / "other")


def test_a_folder_without_a_configuration_is_no_model_folder(tmp_path):
    (tmp_path / "model.gguf").touch()
    expected = (
        f"cannot load a model from {tmp_path}: the folder has no config.json, so it is not a model folder; "
        "give the folder that holds config.json and the weights"
    )
    assert complaint(pod.load_model, tmp_path) == expected
    assert complaint(source_config, ModelArgs(path=str(tmp_path))) == expected
    assert complaint(read_config, str(tmp_path)) == expected
    assert (
        complaint(plan_bench, load_recipe("bench_cpu", [f"model.path={tmp_path}", "bench.shapes=null"]))
        == expected
    )
    check_has_config(str(tmp_path), gguf_file="model.gguf")  # brings its own
    check_has_config("owner/model")


def test_without_a_network_the_ways_out_are_told():
    """As the tests run, with HF_HUB_OFFLINE=1."""
    source = "owner/model"
    for load in (pod.load_model, lambda name: source_config(ModelArgs(path=name))):
        said = complaint(load, source)
        assert "couldn't connect" in said
        assert (
            ".;" not in said and f"; without a network: run `hf download {source}` where there is one" in said
        )
        assert "set HF_HUB_OFFLINE=1, or give the folder of the model" in said
    assert ways_without_network(source, "owner/model has no file named config.json") == ""


def test_weights_that_are_not_in_the_files_are_never_drawn(tools, tmp_path):
    """Transformers loads what fits, and says the rest in a table."""
    stock = tools.make_stock(dtype=torch.float32)
    stock.save_pretrained(tmp_path)
    file, ids = tmp_path / "model.safetensors", tools.random_ids(1, 9)
    weights, name = load_file(file), "model.layers.1.self_attn.k_proj.weight"
    for change, says in (
        ({name: None}, rf"missing \['{name}'\]"),
        (
            {"model.layers.0.self_attn.o_proj.bias": torch.ones(48)},
            r"unexpected \['model.layers.0.*o_proj.bias",
        ),
        ({name: weights[name][:-1].clone()}, rf"mismatched .*{name}.*15, 48"),
    ):
        changed = {one: weight for one, weight in (weights | change).items() if weight is not None}
        save_file(changed, file, metadata={"format": "pt"})
        assert re.search(f"checkpoint does not fit: {says}", complaint(pod.load_model, tmp_path))
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    assert f"{file} cannot be read (" in complaint(pod.load_model, tmp_path)
    file.unlink()
    assert f"cannot load a model from {tmp_path}: Error no file" in complaint(pod.load_model, tmp_path)
    angles = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}  # of old files; no weight
    save_file(weights | angles, file, metadata={"format": "pt"})
    assert (pod.load_model(tmp_path)(ids).logits - stock(ids).logits).abs().max() <= 1e-4
    tools.make_pod().model.save_pretrained(tmp_path / "without_head")
    assert "missing ['lm_head.weight']" in complaint(pod.load_model, tmp_path / "without_head")


def test_names_of_types_devices_and_packages(tools, tmp_path):
    model = tools.make_pod(dtype=torch.float32)
    model.save_pretrained(tmp_path)
    for source in (model, tmp_path):
        for dtype in ("bfloat16", "torch.bfloat16", torch.bfloat16):
            assert pod.load_model(source, dtype=dtype).dtype == torch.bfloat16
        assert pod.load_model(source, dtype="auto").dtype == torch.float32
        for dtype in ("bf16", "sum"):
            assert f"dtype = '{dtype}' is not a torch dtype" in complaint(pod.load_model, source, dtype=dtype)
    if not torch.cuda.is_available():  # the first GPU is not the CPU
        assert "device names cuda:0, but this machine has no GPU" in complaint(
            pod.load_model, tmp_path, device=0
        )
    assert pod.load_model("package:tiny").config.vocab_size == len(pod.load_tokenizer("package:tiny"))


AUTO = """
import sys
{first}
{second}
config = AutoConfig.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
assert (type(config), type(model)) == (pod.PodConfig, pod.PodForCausalLM), (type(config), type(model))
assert type(AutoModel.from_pretrained(sys.argv[1])) is pod.PodModel
assert pod.make_cache(model, "pod+int4").spec == "pod+int4"
"""


@pytest.mark.slow
@pytest.mark.parametrize("pod_first", [True, False])
def test_auto_classes_know_the_model_once_pod_is_imported(tools, tmp_path, pod_first):
    """An export's own code is not asked for, and `trust_remote_code` neither.

    Before transformers, it must be `pod.modeling`; behind it, `pod` will do.
    """
    tools.make_pod().save_pretrained(tmp_path)
    auto = "from transformers import AutoConfig, AutoModel, AutoModelForCausalLM"
    first, second = ("import pod.modeling", auto) if pod_first else (auto, "import pod")
    code = AUTO.format(first=first, second=second)
    done = subprocess.run([sys.executable, "-c", code, tmp_path], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@torch.no_grad()
@pytest.mark.parametrize("spec", ["pod", "int4"])
def test_a_compiled_model_is_not_compiled_again_for_every_token(tools, spec):
    model, ids = tools.make_pod(plan=spec == "pod"), tools.random_ids(1, 30)
    torch._dynamo.reset()
    programs = []

    def count(graph, inputs):
        programs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=count)

    def decode(model):
        cache, fed, tokens, seen = pod.make_cache(model, spec), ids, [], []
        for _ in range(12):
            fed = model(fed, past_key_values=cache).logits[:, -1:].argmax(-1)
            tokens.append(fed)
            seen.append(len(programs))
        return torch.cat(tokens, dim=1), seen

    tokens, seen = decode(compiled)
    assert programs and seen[-1] == seen[3], seen
    assert torch.equal(tokens, decode(model)[0])
    torch._dynamo.reset()
