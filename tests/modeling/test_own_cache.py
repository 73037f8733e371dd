"""What a model holds when `generate()` is given no cache.

It holds its plan's roles in its plan's bits, in the package and in an export alone.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace

import naive_layouts
import pytest
import torch

import pod
from pod.modeling.model.generation import own_cache
from pod.modeling.model.sharing import SharingPlan

BITS = [4, 16, 8, 4, 16]
OF_HEADS = [[0, None], [None, None], [2, None], [None, 3], [4, None]]
EXPORT = """
import json, sys, torch
from transformers import AutoModelForCausalLM
ids, mask = map(torch.tensor, json.loads(sys.argv[1]))
found = {}
for family in sys.argv[2:]:
    model = AutoModelForCausalLM.from_pretrained(family, trust_remote_code=True).eval()
    with torch.no_grad():
        options = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True}
        out = model.generate(ids, attention_mask=mask, **options)
    found[family] = out.sequences.tolist(), out.past_key_values.nbytes
assert "pod" not in sys.modules
print(json.dumps(found))
"""
FAMILIES = ["llama", "qwen3", "granite", "smollm3", "olmo2", "phi3", "gemma3", "mixtral"]


def packed_model(tools, **changes):
    model = tools.make_pod(**changes)
    model.config.kv_bits = BITS
    return model


@torch.no_grad()
def test_a_cache_that_nobody_named_is_the_planned_one(tools):
    model, ids = packed_model(tools), tools.random_ids(2, 300)
    named, own = pod.make_cache(model, "pod"), own_cache(model.config)
    expected = naive_layouts.feed(model, named, ids, [290] + [1] * 10)
    assert torch.equal(naive_layouts.feed(model, own, ids, [290] + [1] * 10), expected)
    assert own.nbytes == named.nbytes
    assert [getattr(layer.quantizer, "bits", 16) for layer in own.groups[0].layers] == BITS
    made = model(ids, use_cache=True).past_key_values
    native = tools.make_pod()(ids, use_cache=True).past_key_values
    assert made.nbytes < 0.85 * native.nbytes


@torch.no_grad()
def test_the_models_own_cache_packs_what_the_plan_says(tools, tmp_path):
    """Outputs and bytes are those of the method ``int4`` with this residual, before and after export."""
    dense, ids = tools.make_pod(plan=False, dtype=torch.float32), tools.random_ids(2, 150)
    plan = SharingPlan(OF_HEADS, bits=[4] * 5, residual=3, num_sink_tokens=2, num_recent_tokens=60)
    model = pod.load_model(dense, plan=plan)
    model.save_pretrained(tmp_path / "export")
    found = {}
    for name, one in (("planned", model), ("loaded", pod.load_model(tmp_path / "export"))):
        assert one.config.sharing_plan.residual == 3
        cache = pod.make_cache(one)
        found[name] = one(ids, past_key_values=cache).logits, cache.nbytes
    native = pod.load_model(dense, plan=replace(plan, bits=None))
    for residual in (3, 128):
        cache = pod.make_cache(native, "pod+int4", residual=residual)
        found[residual] = native(ids, past_key_values=cache).logits, cache.nbytes
    for name in ("planned", "loaded"):
        assert torch.equal(found[name][0], found[3][0]) and found[name][1] == found[3][1]
    assert found[3][1] < 0.75 * found[128][1]
    assert pod.load_model(dense).config.kv_residual == 128, "without a plan"


@pytest.fixture(scope="module")
def exports(tools, tmp_path_factory):
    """Of each family tokens and bytes of the package's cache, and of the export.

    The export runs in a process without the package.
    """
    folder, ids = tmp_path_factory.mktemp("exports"), tools.random_ids(3, 250)
    mask, expected = torch.ones_like(ids), {}
    mask[1, :70] = 0
    for family in FAMILIES:
        model = packed_model(tools, family=family)
        cache = pod.make_cache(model, "pod")
        options = {"attention_mask": mask, "past_key_values": cache, "max_new_tokens": 8, "do_sample": False}
        expected[family] = model.generate(ids, **options).tolist(), cache.nbytes
        model.save_pretrained(folder / family)
    environment = os.environ | {"HF_MODULES_CACHE": str(folder / "modules"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-I", "-c", EXPORT, json.dumps([ids.tolist(), mask.tolist()]), *FAMILIES]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder)
    assert done.returncode == 0, done.stderr
    return expected, json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.slow
def test_an_export_alone_holds_the_bits_of_its_plan(exports, family):
    """Left padding too; tokens and bytes are those of the package."""
    expected, found = exports
    assert [*expected[family]] == found[family]


@torch.no_grad()
def test_assisted_decoding_over_packed_layers(tools):
    """Tokens are those of plain greedy decoding: what is taken back is native still."""
    model, ids = packed_model(tools), tools.random_ids(1, 20).repeat(1, 12)
    plain = model.generate(ids, max_new_tokens=12, do_sample=False)
    assisted = model.generate(ids, max_new_tokens=12, do_sample=False, prompt_lookup_num_tokens=4)
    assert torch.equal(plain, assisted)


@torch.no_grad()
def test_a_cache_tells_its_method_tokens_and_bytes(tools):
    model, ids = tools.make_pod(dtype=torch.float32), tools.random_ids(2, 40)
    cache = pod.make_cache(model, "pod+int4")
    assert repr(cache) == "<pod cache pod+int4: empty>"
    model(ids, past_key_values=cache)
    token = 2 * 5 * 2 * 8 * 4  # keys and values of 5 layers, 2 heads of 8 numbers, 4 bytes
    said = f"{cache.nbytes:,} bytes of 0.05 MB dense ({100 * cache.nbytes / (80 * token):.0f} %)"
    assert repr(cache) == f"<pod cache pod+int4: 40 tokens in each of 2 rows, {said}>"
    mask, model = torch.ones_like(ids), tools.make_pod(plan=False, dtype=torch.float32)
    mask[1, :30] = 0
    cache = pod.make_cache(model, "streamingllm", budget=16)
    model(ids, attention_mask=mask, past_key_values=cache)
    named = "streamingllm, budget 16: 10 to 40 tokens in each of 2 rows"
    share = 100 * cache.nbytes / (50 * token)  # real tokens alone
    assert repr(cache) == f"<pod cache {named}, {cache.nbytes:,} bytes of 0.03 MB dense ({share:.0f} %)>"
    full = pod.make_cache(model, "full")
    model(torch.zeros(1, 1234, dtype=torch.long), past_key_values=full)
    assert repr(full).startswith("<pod cache full: 1,234 tokens in 1 row, ")
    assert repr(full).endswith(" bytes of 0.79 MB dense (101 %)>")


@torch.no_grad()
def test_a_crop_that_a_window_has_overwritten_names_the_slots_that_make_it_possible(tools):
    model, ids = tools.make_pod(dtype=torch.float32), tools.random_ids(1, 60)
    cache = pod.make_cache(model)
    model(ids, past_key_values=cache)
    with pytest.raises(ValueError, match=r"feed again, or make the cache with extra_slots=5, which keeps"):
        cache.crop(-5)
    roomy = pod.make_cache(model, "pod", extra_slots=5)
    model(ids, past_key_values=roomy)
    roomy.crop(-5)
    again = model(ids[:, -5:], past_key_values=roomy).logits
    assert (again - model(ids).logits[:, -5:]).abs().max() <= 2e-5 * again.abs().max()
    model = tools.make_pod(plan=False, dtype=torch.float32)
    selected = pod.make_cache(model, "streamingllm", budget=16)
    model(ids, past_key_values=selected)
    with pytest.raises(ValueError, match=r"reset\(\) and feed again$"):
        selected.crop(-5)
