"""One decoder, the weights of four families: equal to the stock models."""

import pytest
import torch

import pod

FAMILIES = [
    "llama",
    "llama-tied-biased-llama3",
    "llama-linear-mha",
    "mistral",
    "qwen2-yarn",
    "qwen2-tied",
    "qwen3",
    "qwen3-g3",
]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("backend", ["flash", "reference"])
@torch.no_grad()
def test_logits_equal_the_stock_model(tools, family, backend):
    stock = tools.make_stock(family, torch.float32)
    model = pod.load_model(stock, attention_backend=backend)
    ids, mask = tools.random_ids(2, 90), torch.ones(2, 90, dtype=torch.long)
    mask[0, :13] = 0
    expected, real = stock(ids, attention_mask=mask).logits, mask.bool()
    logits = model(ids, attention_mask=mask).logits
    assert (logits - expected)[real].abs().max() <= 2e-5 * expected.abs().max()


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_all_lead_plan_is_dense(tools, family):
    stock = tools.make_stock(family, torch.float32, initializer_range=0.02)
    plan = pod.SharingPlan.dense(stock.config.num_hidden_layers, stock.config.num_key_value_heads)
    ids = tools.random_ids(2, 60)
    model = pod.load_model(stock, plan=plan, num_sink_tokens=2, num_recent_tokens=5)
    assert torch.equal(model(ids).logits, pod.load_model(stock)(ids).logits)
    assert (model(ids).logits - stock(ids).logits).abs().max() <= 1e-6


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"do_sample": True, "top_k": 5}], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3-g3"])
def test_generate_equals_the_stock_model(tools, family, options):
    stock = tools.make_stock(family, torch.float64)
    model = pod.load_model(stock)
    ids, mask = tools.random_ids(2, 40), torch.ones(2, 40, dtype=torch.long)
    mask[0, :9] = 0
    results = []
    for candidate in (stock, model):
        torch.manual_seed(7)
        arguments = {"max_new_tokens": 20, "do_sample": False} | options
        results.append(candidate.generate(ids, attention_mask=mask, **arguments))
    assert torch.equal(*results)


def test_bfloat16_norm_rope_softmax_compute_wide(tools):
    """Our bf16 logits are at least as close to fp64 as the stock model's, within rounding."""
    stock = tools.make_stock("llama", torch.float64, initializer_range=0.1)
    ids = tools.random_ids(1, 80)
    with torch.no_grad():
        truth = pod.load_model(stock)(ids).logits
        stock = stock.to(torch.bfloat16)
        ours, theirs = pod.load_model(stock)(ids).logits, stock(ids).logits
    assert (ours.double() - truth).norm() <= 1.5 * (theirs.double() - truth).norm()


def test_unsupported_checkpoints_are_refused(tools):
    stock = tools.make_stock("mistral")
    stock.config.sliding_window = 32
    with pytest.raises(ValueError, match="sliding-window"):
        pod.load_model(stock)
    stock = tools.make_stock("llama")
    stock.config.model_type = "gpt_neox"
    with pytest.raises(ValueError, match="'gpt_neox' is not supported"):
        pod.load_model(stock)
    stock = tools.make_stock("llama")
    stock.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(ValueError, match="'dynamic' is not supported"):
        pod.load_model(stock)


def test_missing_and_unexpected_weights_are_named(tools):
    stock = tools.make_stock("llama")
    del stock.model.layers[1].self_attn.k_proj.weight
    with pytest.raises(ValueError, match=r"missing \['model.layers.1.self_attn.k_proj.weight'\]"):
        pod.load_model(stock)
    stock = tools.make_stock("llama")
    stock.model.extra = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="unexpected"):
        pod.load_model(stock)


def test_save_and_load_keep_plan_and_logits(tools, tmp_path):
    model = tools.make_pod("llama", torch.float32)
    model.save_pretrained(tmp_path)
    again = pod.load_model(tmp_path)
    ids = tools.random_ids(1, 50)
    assert again.config.sharing_plan == model.config.sharing_plan
    assert again.config.num_recent_tokens == 11
    assert torch.equal(again(ids).logits, model(ids).logits)
    assert pod.load_model(tmp_path, num_recent_tokens=20).config.num_recent_tokens == 20
