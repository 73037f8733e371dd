"""Weights that rank 0 reads one at a time.

The training is the same as from whole models on every rank, in a share of the memory.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from worker_start import CASES

import pod
from pod.modeling.checkpoints import weight_files
from pod.training.run.start_weights import hollow_model


@pytest.mark.multiprocess
@pytest.mark.parametrize("case", CASES)
def test_placed_weights_train_the_same_bits_as_whole_models(start_results, case):
    """Placed weights train the same bits as whole models.

    Stages, bfloat16, LoRA with dropout, means of layers, heads in another order, an output projection of its
    own.
    """
    for rank in (0, 1):
        placed, whole = (start_results[f"{case}_rank{rank}"][way] for way in ("placed", "whole"))
        assert placed == whole
        assert placed["generation"] == [88, 87], "the checkpoint's own generation configuration is kept"
        assert ("lm_head.weight" in placed["names"]) == (case in ("untied", "own_head"))
    assert placed["losses"][-1] < placed["losses"][0]


@pytest.mark.multiprocess
def test_a_checkpoint_that_does_not_fit_is_refused_on_all_ranks(start_results):
    first, second = (start_results[f"damaged_rank{rank}"]["said"] for rank in (0, 1))
    assert first == second
    assert first.startswith("checkpoint does not fit: missing ['model.")
    assert "unexpected ['model.surplus.weight']" in first


def test_a_hollow_model_takes_no_memory_and_is_tied():
    config = pod.PodConfig(vocab_size=50_000, hidden_size=64, num_attention_heads=4, num_hidden_layers=2)
    config.tie_word_embeddings = True
    model = hollow_model(config, torch.bfloat16)
    held = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    assert sum(held.values()) == 2 * len(held)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.dtype == torch.bfloat16


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's list of mapped files")
def test_only_the_file_that_was_read_last_is_open(tmp_path):
    tensors = {f"w{number}": torch.full((3,), float(number)) for number in range(3)}
    for name, tensor in tensors.items():
        old = {f"{name}.rotary_emb.inv_freq": tensor.clone()}
        save_file({name: tensor, **old}, tmp_path / f"{name}.safetensors")
    index = {"metadata": {}, "weight_map": {name: f"{name}.safetensors" for name in tensors}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    shapes, read = weight_files(tmp_path)
    assert shapes == dict.fromkeys(tensors, (3,))
    for name in ("w0", "w2", "w0"):
        assert torch.equal(read(name), tensors[name])
        mapped = Path("/proc/self/maps").read_text()
        assert [other for other in tensors if f"{tmp_path}/{other}.safe" in mapped] == [name]


def test_a_folder_without_safetensors_has_no_weight_files(tmp_path):
    assert weight_files(tmp_path) is None
