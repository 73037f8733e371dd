"""An export in the hands of the stock trainers: adapters of peft; SFT, DPO and GRPO of trl."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import pod
from pod.modeling.model.config import PodConfig
from pod.modeling.model.llama import PodForCausalLM

WORKER = Path(__file__).with_name("worker_trainers.py")
LEAD = [[0, 0], [0, 1], [2, 1]]
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48, "initializer_range": 0.2,
    "max_position_embeddings": 128, "num_sink_tokens": 2, "num_recent_tokens": 5,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def small_tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", "<unk>", *(chr(97 + i) if i < 26 else f"w{i}" for i in range(60))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    named = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named)


@pytest.fixture(scope="module")
def export(tmp_path_factory):
    folder = tmp_path_factory.mktemp("export")
    torch.manual_seed(0)
    PodForCausalLM(PodConfig(**SIZES, lead=LEAD)).save_pretrained(folder)
    small_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def trained(export, tmp_path_factory):
    """What every trainer left, by its name; the package is not there."""
    pytest.importorskip("trl", reason="pip install trl")
    folder = tmp_path_factory.mktemp("trained")
    environment = os.environ | {"HF_MODULES_CACHE": str(folder / "modules"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(WORKER), str(export), str(folder / "out")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert all(one["answer"] == 24 and one["moved"][-1] > 0 for one in found.values())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sft", "sft_packed", "sft_lora_packed"])
def test_sft_begins_with_the_loss_of_the_documents_alone_and_lowers_it(trained, kind):
    found = trained[kind]
    assert abs(found["losses"][0] - found["before"]) <= 2e-4  # four digits are logged
    assert found["after"] < found["before"] - 0.05
    if "lora" in kind:
        assert found["moved"][0] == 0, "embeddings and norms are frozen"


@pytest.mark.slow
def test_dpo_begins_at_a_coin_flip(trained):
    found = trained["dpo"]
    assert abs(found["losses"][0] - math.log(2)) <= 2e-4 and found["losses"][-1] < found["losses"][0]


@pytest.mark.slow
def test_grpo_samples_and_scores(trained):
    rewards = trained["grpo"]["rewards"]
    assert len(rewards) == 4 and all(0 < reward <= 8 for reward in rewards)


def test_adapters_of_peft_with_a_task(tmp_path):
    """Loss, gradients, generation with a cache of ours, saved and loaded again, merged."""
    from peft import LoraConfig, PeftModel, get_peft_model

    torch.manual_seed(0)
    model, ids = PodForCausalLM(PodConfig(**SIZES, lead=LEAD)).eval(), torch.arange(60).reshape(2, 30) % 60
    plain = model(ids, labels=ids)
    config = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj", "up_proj"], r=4)
    adapted = get_peft_model(model, config)
    out = adapted(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids)
    assert torch.equal(out.logits, plain.logits) and torch.equal(out.loss, plain.loss)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.1)
    adapted.train()(input_ids=ids, labels=ids).loss.backward()
    assert all((p.grad is not None) == ("lora_" in name) for name, p in adapted.named_parameters())
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    expected = adapted.eval()(ids).logits
    assert (expected - plain.logits).abs().max() > 1e-2
    answer = adapted.generate(input_ids=ids, **options)
    cache = pod.make_cache(adapted, "pod+int4", group_size=4, residual=64)
    assert torch.equal(adapted.generate(input_ids=ids, past_key_values=cache, **options), answer)
    adapted.save_pretrained(tmp_path)
    torch.manual_seed(0)
    again = PeftModel.from_pretrained(PodForCausalLM(PodConfig(**SIZES, lead=LEAD)).eval(), tmp_path)
    assert (again(ids).logits - expected).abs().max() <= 1e-5
    merged = again.merge_and_unload()
    assert (merged(ids).logits - expected).abs().max() <= 1e-4
    assert torch.equal(merged.generate(ids, **options), answer)
