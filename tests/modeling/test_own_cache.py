"""What a model holds when `generate()` is given no cache: its plan's roles in its plan's bits, in the package and in an export alone."""

import json
import os
import subprocess
import sys

import naive_layouts
import pytest
import torch

import pod
from pod.modeling.shipped.generation import own_cache

BITS = [4, 16, 8, 4, 16]
EXPORT = """
import json, sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True).eval()
ids, mask = map(torch.tensor, json.loads(sys.argv[2]))
with torch.no_grad():
    out = model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False, return_dict_in_generate=True)
assert "pod" not in sys.modules
print(json.dumps([out.sequences.tolist(), out.past_key_values.nbytes]))
"""


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
    assert [getattr(layer.codec, "bits", 16) for layer in own.groups[0].layers] == BITS
    made = model(ids, use_cache=True).past_key_values
    native = tools.make_pod()(ids, use_cache=True).past_key_values
    assert made.nbytes < 0.85 * native.nbytes


@torch.no_grad()
@pytest.mark.parametrize(
    "family", ["llama", "qwen3", "granite", "smollm3", "olmo2", "phi3", "gemma3", "mixtral"]
)
def test_an_export_alone_holds_the_bits_of_its_plan(tools, tmp_path, family):
    """Left padding too; tokens and bytes are those of the package."""

    model, ids = packed_model(tools, family=family), tools.random_ids(3, 250)
    mask = torch.ones_like(ids)
    mask[1, :70] = 0
    cache = pod.make_cache(model, "pod")
    expected = model.generate(
        ids, attention_mask=mask, past_key_values=cache, max_new_tokens=8, do_sample=False
    )
    model.save_pretrained(tmp_path)
    environment = os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-I", "-c", EXPORT, str(tmp_path), json.dumps([ids.tolist(), mask.tolist()])]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    tokens, held = json.loads(done.stdout.strip().splitlines()[-1])
    assert torch.equal(torch.tensor(tokens), expected)
    assert held == cache.nbytes


@torch.no_grad()
def test_assisted_decoding_over_packed_layers(tools):
    """Tokens are those of plain greedy decoding: what is taken back is native still."""
    model, ids = packed_model(tools), tools.random_ids(1, 20).repeat(1, 12)
    plain = model.generate(ids, max_new_tokens=12, do_sample=False)
    assisted = model.generate(ids, max_new_tokens=12, do_sample=False, prompt_lookup_num_tokens=4)
    assert torch.equal(plain, assisted)
