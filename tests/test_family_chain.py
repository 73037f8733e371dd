"""A checkpoint of every family, with files as the hub has them, through data, explore, export and eval."""

import json
import random

import pytest
import torch
import transformers
from hub_tokenizers import FAMILIES, write_files
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.dynamic_module_utils import get_class_from_dynamic_module

import pod
from pod.commands import data, evaluate, explore
from pod.export import export
from pod.recipe import load_recipe

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
SLIDES = {"sliding_window": 24, "layer_types": ["full_attention", "sliding_attention", "full_attention"]}
OWN = {
    "mistral": {"sliding_window": None},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "mlp_only_layers": [1],
    },
    "phi3": {"sliding_window": None},
    "granite": {"attention_multiplier": 0.2, "residual_multiplier": 0.5, "logits_scaling": 4.0},
    "smollm3": {"no_rope_layers": [1, 0, 1]},
    "gemma3_text": {**SLIDES, "tie_word_embeddings": True, "query_pre_attn_scalar": 8},
}
WINDOWS = {"num_sink_tokens": 4, "num_recent_tokens": 28}
TEXT = "a dog and a fox went over the hill "


def write_checkpoint(folder, model_type):
    """A random model whose vocabulary is that of its tokenizer, and the tokenizer's files."""
    folder.mkdir()
    backend = write_files(folder, model_type)
    tokens = FAMILIES[model_type].tokens
    ends = {f"{name}_id": backend.token_to_id(token) for name, token in tokens.items() if name != "unk_token"}
    ends = {"bos_token_id": None, "pad_token_id": None, **ends}
    vocab_size = backend.get_vocab_size()
    config_class = transformers.CONFIG_MAPPING[model_type]
    config = config_class(**(SIZES | OWN.get(model_type, {}) | ends | {"vocab_size": vocab_size}))
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def write_texts(path):
    """Eighty documents of about 300 letters."""
    words, draw = TEXT.split(), random.Random(0)
    lines = [json.dumps({"text": " ".join(draw.choices(words, k=90))}) for _ in range(80)]
    path.write_text("\n".join(lines), encoding="utf-8")


def recipe_for(folder):
    settings = {
        "output_dir": folder / "run",
        "model.path": folder / "model",
        "model.dtype": "float32",
        **{f"model.{name}": value for name, value in WINDOWS.items()},
        "data.sources": f"[{folder / 'texts.jsonl'}]",
        "data.context_length": 128,
        "data.shortest_interval": 64,
        "data.target_tokens": 2048,
        "data.workers": 1,
        "explore.target_saving": 0.3,
        "explore.num_sequences": 1,
        "explore.sequence_length": 64,
        "explore.num_queries": 8,
        "explore.loss_sequences": 0,
        "explore.retrieval_sequences": 0,
        "eval.methods": "[pod]",
        "eval.tasks": "[passkey]",
        "eval.passkey_lengths": "[320]",
        "eval.passkey_depths": "[0.5]",
        "eval.passkey_samples": 1,
        "eval.passkey_new_tokens": 4,
    }
    return load_recipe(None, [f"{name}={value}" for name, value in settings.items()])


@pytest.mark.parametrize(
    "model_type",
    [name if name == "mistral" else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES],
)
@torch.no_grad()
def test_a_checkpoint_goes_through_the_commands_and_its_export_is_the_model(
    model_type, tmp_path, monkeypatch
):
    """The export has the plan that was found. Within the plan's windows it is the stock model.

    `pod export` needs a training, which a process can do once: the export is made of the model and its plan.
    """
    monkeypatch.chdir(tmp_path)
    write_checkpoint(tmp_path / "model", model_type)
    write_texts(tmp_path / "texts.jsonl")
    recipe = recipe_for(tmp_path)
    data.main(recipe)
    explore.main(recipe)
    plan = pod.SharingPlan.load(tmp_path / "run" / "plan" / "plan.json")
    assert plan.num_leads < plan.num_pairs
    planned = pod.load_model(tmp_path / "model", plan=plan, dtype=torch.float32, **WINDOWS)
    exported = recipe.export_dir
    export(planned, exported, pod.load_tokenizer(tmp_path / "model"))
    evaluate.main(recipe)
    results = json.loads((tmp_path / "run" / "eval" / "pod.json").read_text())
    assert results["model"]["path"] == str(exported)

    tokenizer = AutoTokenizer.from_pretrained(exported)
    ids = torch.tensor([tokenizer(3 * TEXT)["input_ids"]])
    assert ids.tolist() == [pod.load_tokenizer(tmp_path / "model")(3 * TEXT)["input_ids"]]
    model = pod.load_model(exported, dtype=torch.float32)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    short = ids[:, : sum(WINDOWS.values())]
    assert_close(model(short).logits, stock(short).logits)
    own_code = get_class_from_dynamic_module("llama.PodForCausalLM", str(exported))
    alone = own_code.from_pretrained(exported, dtype=torch.float32).eval()
    assert_close(model(ids).logits, planned(ids).logits)
    assert_close(alone(ids).logits, planned(ids).logits)


def assert_close(found, expected):
    """Equal but for rounding in float32."""
    assert (found - expected).abs().max() <= 2e-5 * expected.abs().max()
