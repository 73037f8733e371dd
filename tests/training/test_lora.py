"""Adapters: what can have one, what an exported folder brings along, and what is refused."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

import pod
from pod.export import export_adapter
from pod.export import folder as export_folder
from pod.models import ModelArgs
from pod.training.args import TrainArgs
from pod.training.checkpoint import checkpoint_files
from pod.training.checkpoint.checkpoint_files import restore_model
from pod.training.checkpoint.run_identity import TrainState, sample_of, start_identity_of
from pod.training.run.lora import add_lora, lora_settings
from pod.training.run.start_model import source_config

LEAD = [[0, 0], [0, 1], [2, 1]]
ORDER = [[2, 3, 0, 1], [0, 1, 3, 2], [3, 2, 1, 0]]
IDS = torch.arange(60).reshape(2, 30) % 37


def make_model(**changes):
    torch.manual_seed(0)
    fields = {
        "vocab_size": 37, "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 6, "intermediate_size": 32, "initializer_range": 0.2,
        "max_position_embeddings": 64, "attention_backend": "reference",
    }  # fmt: skip
    return pod.PodForCausalLM(pod.PodConfig(**{**fields, **changes})).eval()


def settings(**changes):
    return lora_settings(TrainArgs(method="lora", lora_rank=3, **changes))


@pytest.mark.parametrize("names", [["lm_head"], ["q_proj", "qkv"]])
def test_layers_that_cannot_have_an_adapter_are_refused_by_name(names):
    with pytest.raises(
        ValueError, match=f"names {names[-1]}; .* are down_proj, gate_proj, k_proj, o_proj, q_proj"
    ):
        add_lora(make_model(), settings(lora_target_modules=names))


def test_only_adapters_are_trained_and_the_start_is_the_model_itself():
    model = make_model(lead=LEAD)
    before = model(input_ids=IDS).logits
    adapted = add_lora(model, settings())
    assert type(adapted).__name__ == "PeftModelForCausalLM"
    trained = {name: p.numel() for name, p in adapted.named_parameters() if p.requires_grad}
    assert len(trained) == 3 * 4 * 2 and all("lora_" in name for name in trained)
    assert sum(trained.values()) == 3 * 3 * ((24 + 24) + 2 * (24 + 12) + (24 + 24))
    assert torch.equal(adapted(input_ids=IDS).logits, before)


@pytest.fixture
def checkpoint(tmp_path, monkeypatch, request):
    """A checkpoint of LoRA, without the engine's files.

    What `trained_weights` reads from them is made up here. A parameter is the order of heads of its plan.
    """
    rope = {"rope_type": "default", "rope_theta": 500.0}
    model = make_model(num_sink_tokens=1, num_recent_tokens=4, rope_parameters=rope)
    plan = pod.SharingPlan(LEAD, head_order=getattr(request, "param", None))
    model = pod.load_model(model, plan=plan, attention_backend="reference")
    folder = tmp_path / "checkpoint"
    model.config.save_pretrained(folder)
    model.config.sharing_plan.save(folder / "plan.json")
    adapted = add_lora(model, settings(lora_dropout=0.3)).eval()
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.1)
    weights = {name: p.detach() for name, p in adapted.named_parameters() if p.requires_grad}
    state = TrainState(identity={"dtype": "float32"}, lora=settings(lora_dropout=0.3))
    monkeypatch.setattr(export_folder, "read_state", lambda folder: state)
    for module in (export_folder, checkpoint_files):
        monkeypatch.setattr(module, "trained_weights", lambda folder: weights)
    return folder, adapted, state


@pytest.mark.parametrize("checkpoint", [None, ORDER], indirect=True)
def test_an_adapter_brings_plan_windows_and_rope(checkpoint, tmp_path):
    folder, adapted, _ = checkpoint
    export_adapter(folder, tmp_path / "adapter", "the/base")
    make_model().save_pretrained(tmp_path / "base")
    loaded = pod.load_adapter(tmp_path / "adapter", str(tmp_path / "base"), attention_backend="reference")
    with torch.no_grad():
        got, expected = loaded.eval()(input_ids=IDS).logits, adapted(input_ids=IDS).logits
        base = make_model()(input_ids=IDS).logits
    assert torch.equal(got, expected)
    assert (got - base).abs().max() > 0.1
    config = loaded.get_base_model().config
    assert config.lead == LEAD and config.num_recent_tokens == 4
    assert config.head_order == adapted.get_base_model().config.head_order
    assert config.rope_parameters["rope_theta"] == 500.0
    assert "the/base" in (tmp_path / "adapter" / "README.md").read_text()


@torch.no_grad()
@pytest.mark.parametrize("checkpoint", [ORDER], indirect=True)
def test_load_model_merges_an_adapter_of_ours_into_the_base_that_it_names(checkpoint, tmp_path):
    folder, adapted, _ = checkpoint
    export_adapter(folder, tmp_path / "adapter", str(tmp_path / "base"))
    make_model().save_pretrained(tmp_path / "base")
    loaded = pod.load_model(tmp_path / "adapter", attention_backend="reference")
    assert type(loaded) is pod.PodForCausalLM and loaded.config.num_recent_tokens == 4
    got, expected = (model(input_ids=IDS).logits for model in (loaded, adapted))
    assert (got - expected).abs().max() <= 2e-5 * expected.abs().max()
    adapted = pod.load_adapter(tmp_path / "adapter", attention_backend="reference").eval()
    assert torch.equal(adapted(input_ids=IDS).logits, expected)
    with pytest.raises(
        ValueError, match="has its own plan, layout and windows: leave layout, num_recent_tokens out"
    ):
        pod.load_model(tmp_path / "adapter", layout="dense", num_recent_tokens=9)


def test_adapters_are_written_in_the_asked_type(checkpoint, tmp_path):
    export_adapter(checkpoint[0], tmp_path / "adapter", "base", "bfloat16")
    weights = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    name = "base_model.model.model.layers.2.self_attn.v_proj.lora_B.weight"
    assert weights[name].shape == (12, 3)


def test_wrong_adapter_folders_and_checkpoints_are_refused(checkpoint, tmp_path):
    folder, _, state = checkpoint
    with pytest.raises(ValueError, match="has no adapter_config.json: give the folder of an adapter"):
        pod.load_adapter(tmp_path, "base")
    state.lora = None
    with pytest.raises(ValueError, match="was trained with train.method=full and has no adapters"):
        export_adapter(folder, tmp_path / "adapter", "base")
    assert not (tmp_path / "adapter").exists()


def test_adapters_are_merged_into_their_own_start_model_only(checkpoint):
    folder, adapted, state = checkpoint
    rope = {"rope_type": "default", "rope_theta": 500.0}
    fields = {"lead": LEAD, "num_sink_tokens": 1, "num_recent_tokens": 4, "rope_parameters": rope}
    base = make_model(**fields)
    state.identity |= start_identity_of(
        base.config, {name: sample_of(one) for name, one in base.named_parameters()}
    )
    merged = restore_model(folder, state, lambda plan: make_model(**fields))
    with torch.no_grad():
        torch.testing.assert_close(merged(input_ids=IDS).logits, adapted(input_ids=IDS).logits)

    def other_weights(plan):
        model = make_model(**fields)
        with torch.no_grad():
            model.model.layers[1].self_attn.q_proj.weight.mul_(1.01)
        return model

    others = {
        "another model: use the model that it was started from": other_weights,
        "other windows: use the same model.num_sink": lambda plan: make_model(
            **{**fields, "num_sink_tokens": 2}
        ),
        "another RoPE: use the same model.rope": lambda plan: make_model(
            **{**fields, "rope_parameters": None}
        ),
    }
    for message, start_model in others.items():
        with pytest.raises(ValueError, match=f"^the adapters of checkpoint .* were trained with {message}"):
            restore_model(folder, state, start_model)


@torch.no_grad()
def test_an_adapter_of_anybody_is_merged_before_heads_move(tmp_path):
    """As a trainer saves it that knows transformers and peft only, with a head of its own beside it."""
    stock = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=37, hidden_size=24, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
            intermediate_size=32, initializer_range=0.2, tie_word_embeddings=True,
        )
    ).eval()  # fmt: skip
    stock.save_pretrained(tmp_path / "base")
    stock = LlamaForCausalLM.from_pretrained(tmp_path / "base")
    adapted = get_peft_model(
        stock, LoraConfig(target_modules=["q_proj", "o_proj"], modules_to_save=["lm_head"])
    )
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.add_(0.1 * torch.randn_like(parameter))
    adapter = tmp_path / "adapter"
    adapted.save_pretrained(adapter)
    expected = adapted.eval()(input_ids=IDS).logits
    order = pod.SharingPlan([[layer] * 2 for layer in range(3)], head_order=ORDER)
    for model in (
        pod.load_model(adapter),
        pod.load_model(adapter, plan=order),
        pod.load_adapter(adapter).eval(),
    ):
        assert (model(input_ids=IDS).logits - expected).abs().max() <= 2e-5 * expected.abs().max()
    with pytest.raises(ValueError, match="the plan reorders heads.*: use pod.load_model"):
        pod.load_adapter(adapter, plan=order)
    with pytest.raises(ValueError, match="is an adapter: merge it first"):
        source_config(ModelArgs(path=str(adapter)))
    weights = load_file(adapter / "adapter_model.safetensors")
    save_file({f"{name}.x" if "layers.1" in name else name: one for name, one in weights.items()},
              adapter / "adapter_model.safetensors")  # fmt: skip
    with pytest.raises(ValueError, match="does not fit its base: missing .*layers.1"):
        pod.load_model(adapter)
    (tmp_path / "base").rename(tmp_path / "moved")
    with pytest.raises(ValueError, match="there is no such folder; give another as pod.load_adapter"):
        pod.load_model(adapter)
    (adapter / "model.safetensors").touch()
    with pytest.raises(ValueError, match="holds an adapter .* and a whole model"):
        pod.load_model(adapter)
