"""Bits at head dimensions that 32 does not divide: one question, one answer.

Bytes are tested in tests/modeling/test_quantizers.py.
"""

import shutil
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import pod
from pod.commands import explore
from pod.modeling.model.group_quantizer import make_quantizer
from pod.modeling.model.packed_bytes import bits_per_number, channel_group
from pod.modeling.model.sharing import SharingPlan
from pod.models import resolve_model
from pod.plan.exploration import check_model
from pod.recipe import load_recipe, run
from pod.training.run.start_model import model_config


def checkpoint(folder, head_dim):
    """A small model with the tokenizer of `package:tiny`."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4, "initializer_range": 0.2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": head_dim}
    tokens = {"vocab_size": 258, "bos_token_id": 256, "eos_token_id": 256, "pad_token_id": 257}
    config = LlamaConfig(**sizes, **heads, **tokens, max_position_embeddings=8192)
    LlamaForCausalLM(config).save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(f"{resolve_model('package:tiny')}/{file}", folder)
    return folder


@pytest.mark.parametrize(
    ("head_dim", "group"),
    [
        (64, 32),
        (80, 40),
        (96, 32),
        (112, 28),
        (120, 30),
        (128, 32),
        (256, 32),
        (16, 16),
        (72, 36),
        (74, 37),
        (88, 44),
    ],
)
def test_groups_of_channels_divide_the_head(head_dim, group):
    assert channel_group(head_dim) == group
    assert bits_per_number(4, head_dim) == (5.0, 4 + 32 / group)


def test_explore_with_bits_at_head_dim_80(explore_overrides, tmp_path, capsys):
    """The dry run says yes, and the plan is made, saves what was asked for, and loads."""
    model = checkpoint(tmp_path / "model", 80)
    windows = ["model.num_sink_tokens=2", "model.num_recent_tokens=5", f"model.path={model}"]
    bits = ["explore.bits=[16,4]", "explore.target_saving=0.6", "explore.budget_length=4000"]
    settings = [*explore_overrides, *windows, *bits, "explore.roles=follow", "explore.loss_sequences=0"]
    argv = [part for setting in settings for part in ("--set", setting)]
    run(explore.main, sections=("model", "explore"), estimate=explore.estimate, argv=[*argv, "--dry-run"])
    assert not (tmp_path / "run" / "plan" / "plan.json").exists()
    explore.main(load_recipe(None, settings))
    plan = SharingPlan.load(tmp_path / "run" / "plan" / "plan.json")
    assert plan.bits is not None and plan.packs and plan.head_dim == 80
    assert 0.6 <= plan.saving(4000) < 0.69
    planned = pod.load_model(model, plan=plan)
    assert planned.config.num_recent_tokens == 5 and pod.make_cache(planned).nbytes == 0
    assert pod.make_cache(planned, "pod+int4") is not None
    config = model_config(
        load_recipe(None, [*windows, f"model.plan={tmp_path / 'run/plan/plan.json'}"]).model, ""
    )
    assert config[0].kv_bits == list(plan.bits), "training takes it too"


ASKED = {
    "make_cache": lambda config: make_quantizer("int4", 4, config, 32, 128),
    "load_model": lambda config: pod.PodConfig(**config.to_dict() | {"kv_bits": [4, 16]}),
    "explore": lambda config: check_model(
        config,
        load_recipe(None, ["explore.bits=[16,4]", "explore.sequence_length=64"]).explore,
        {"num_sink_tokens": 2, "num_recent_tokens": 5},
    ),
}


@pytest.mark.parametrize("asked", ASKED)
def test_a_head_that_fills_no_bytes_is_one_answer(asked):
    config = pod.PodConfig(num_hidden_layers=2, num_attention_heads=2, head_dim=15, hidden_size=32)
    with pytest.raises(ValueError, match="4 bits of head_dim = 15 channels do not fill whole bytes") as seen:
        ASKED[asked](config)
    assert "use 8 bits" in str(seen.value) and "\n" not in str(seen.value)
    assert make_quantizer("int8", 8, SimpleNamespace(head_dim=15), 32, 128) is not None
