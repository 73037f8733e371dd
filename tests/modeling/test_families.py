"""One decoder, the weights of all families: equal to the stock models."""

import copy

import pytest
import torch
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

import pod
from pod.families import read_weight
from pod.training.run.start_weights import weight_reader

FAMILIES = [
    "llama",
    "llama-tied-biased-llama3",
    "llama-linear-mha",
    "mistral",
    "qwen2-yarn",
    "qwen2-tied",
    "qwen3",
    "qwen3-g3",
    "granite",
    "phi3",
    "smollm3",
    "olmo2",
    "mistral-sliding",
    "phi3-sliding",
    "qwen2-sliding",
    "gemma3",
    "mixtral",
    "qwen3-moe",
]
NEW = FAMILIES[FAMILIES.index("granite") :]


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
    plan = pod.load_model(stock).config.sharing_plan
    ids = tools.random_ids(2, 60)
    model = pod.load_model(stock, plan=plan, num_sink_tokens=2, num_recent_tokens=5)
    assert torch.equal(model(ids).logits, pod.load_model(stock)(ids).logits)
    assert (model(ids).logits - stock(ids).logits).abs().max() <= 1e-6


@pytest.mark.parametrize("family", NEW)
@torch.no_grad()
def test_decoding_equals_the_stock_model(tools, family):
    """Decoding a prompt, a chunk and tokens equals the stock model, with padding on the left.

    Windows and rings are full behind the prompt.
    """
    stock = tools.make_stock(family, torch.float32, initializer_range=0.02)
    ids, mask = tools.random_ids(2, 60), torch.ones(2, 60, dtype=torch.long)
    mask[0, :13] = 0
    model = pod.load_model(stock)
    cache = pod.make_cache(model)
    parts = [(0, 40), (40, 50), *((i, i + 1) for i in range(50, 60))]
    logits = [model(ids[:, i:j], attention_mask=mask[:, :j], past_key_values=cache).logits for i, j in parts]
    expected = stock(ids, attention_mask=mask).logits
    assert (torch.cat(logits, dim=1) - expected)[mask.bool()].abs().max() <= 2e-6
    cache.check_integrity()


@pytest.mark.parametrize("family", NEW)
def test_loss_and_gradients_equal_the_stock_model(tools, family):
    stock = tools.make_stock(family)
    model, ids = pod.load_model(copy.deepcopy(stock)).train(), tools.random_ids(2, 40)
    losses = [one(input_ids=ids, labels=ids).loss for one in (stock.train(), model)]
    assert abs(losses[0] - losses[1]) <= 2e-6  # norms and angles of stock models are fp32 in any dtype
    for loss in losses:
        loss.backward()
    expected = {name: weight.grad for name, weight in stock.named_parameters()}
    for name, weight in model.named_parameters():
        wanted = read_weight(name, expected.__getitem__, expected, model.config)
        assert (weight.grad - wanted).abs().max() <= 1e-5 * wanted.abs().max(), name


@pytest.mark.parametrize("family", NEW)
@torch.no_grad()
def test_plans_of_new_families(tools, family):
    """A window that is larger than the text is the dense model under any plan.

    A short one decodes what it computes at once.
    """
    dense, ids = pod.load_model(tools.make_stock(family)), tools.random_ids(2, 60)
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    wide = tools.make_pod(family, windows=(4, 60))
    expected = dense(ids, attention_mask=mask).logits
    limit = 1e-11 * expected.abs().max()
    assert wide.config.sharing_plan.num_leads < wide.config.sharing_plan.num_pairs
    assert (wide(ids, attention_mask=mask).logits - expected)[mask.bool()].abs().max() <= limit
    model = tools.make_pod(family)
    expected = model(ids, attention_mask=mask).logits
    everything = {"budget": 200, "window": 4, "kernel": 3}  # rows go in groups, and nothing is dropped
    for spec, options, chunks in (
        ("pod", {}, [33, 9, *[1] * 18]),
        ("pod", {}, [1, 58, 1]),
        ("pod+snapkv", everything, [33, 9, *[1] * 18]),
    ):
        cache, parts, stop = pod.make_cache(model, spec, **options), [], 0
        for chunk in chunks:
            start, stop = stop, stop + chunk
            part = model(ids[:, start:stop], attention_mask=mask[:, :stop], past_key_values=cache)
            parts.append(part.logits)
        assert (torch.cat(parts, dim=1) - expected)[mask.bool()].abs().max() <= limit
        cache.check_integrity()


@pytest.mark.parametrize("family", ["phi3", "mixtral", "qwen3-moe"])
@torch.no_grad()
def test_files_of_new_families_are_read_weight_by_weight(tools, tmp_path, family):
    """Names and shapes are as the files have them, which are not those of the loaded stock model.

    This is what training starts from.
    """
    stock = tools.make_stock(family, torch.float32)
    stock.save_pretrained(tmp_path)
    model = pod.load_model(tmp_path)
    read = weight_reader(str(tmp_path), model.config, torch.float32)
    for name, weight in pod.load_model(stock).named_parameters():
        assert torch.equal(read(name), weight) and torch.equal(model.get_parameter(name), weight), name


@torch.no_grad()
def test_of_a_model_that_also_sees_the_text_part_is_loaded(tools, tmp_path):
    """Gemma 3 beyond 1B is stored so: from files, from memory, and weight by weight."""
    config = tools.make_stock("gemma3").config
    seeing = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    seeing |= {"image_size": 28, "patch_size": 14}
    both = Gemma3Config(text_config=config.to_dict(), vision_config=seeing, mm_tokens_per_image=1)
    stock, ids = Gemma3ForConditionalGeneration(both).eval(), tools.random_ids(1, 40)
    stock.save_pretrained(tmp_path)
    expected, model = stock(ids).logits, pod.load_model(tmp_path)
    for one in (model, pod.load_model(stock)):
        assert one.config.layer_windows == [None, None, 9, None, 9]
        assert (one(ids).logits - expected).abs().max() <= 2e-6 * expected.abs().max()
    read = weight_reader(str(tmp_path), model.config, torch.float32)
    assert all(torch.equal(read(name), weight) for name, weight in model.named_parameters())


def test_layers_with_windows_are_no_part_of_a_plan(tools):
    stock = tools.make_stock("gemma3")
    with pytest.raises(ValueError, match="layer 2 was trained to see its last 9 tokens only"):
        pod.load_model(stock, plan=pod.SharingPlan.dense(5, 2))
    with pytest.raises(ValueError, match="windows of their own"):
        pod.load_model(stock, layout="window", num_recent_tokens=5)
    model = pod.load_model(stock)
    assert model.config.sharing_plan.lead == ((0, 0), (1, 1), (None, None), (3, 3), (None, None))
    ids, held = tools.random_ids(1, 40), {}
    for spec in ("full", None):
        cache = pod.make_cache(model) if spec is None else pod.make_cache(model, spec)
        held[spec] = model(ids, past_key_values=cache, use_cache=True).logits, cache.nbytes
    assert torch.equal(held["full"][0], held[None][0]) and held["full"][1] == held[None][1]
    shared = pod.load_model(stock, plan=pod.SharingPlan([[0, 0], [0, 1], [None] * 2, [3, 3], [None] * 2]))
    for refused in (model, "snapkv"), (shared, "full"):
        with pytest.raises(ValueError, match=f"{refused[1]} needs a model without windows of its own"):
            pod.make_cache(*refused, **({"budget": 9} if refused[1] == "snapkv" else {}))


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"do_sample": True, "top_k": 5}], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3-g3", *NEW])
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
    stock = tools.make_stock("gemma3")
    stock.config.final_logit_softcapping = 30.0
    with pytest.raises(ValueError, match="final_logit_softcapping = 30.0 of this gemma3_text checkpoint"):
        pod.load_model(stock)
    stock = tools.make_stock("phi3")
    stock.config.rope_parameters["partial_rotary_factor"] = 0.5
    with pytest.raises(ValueError, match="partial_rotary_factor = 0.5 of this phi3 checkpoint"):
        pod.load_model(stock)
    stock = tools.make_stock("mixtral")
    stock.config.router_jitter_noise = 0.1
    with pytest.raises(ValueError, match="router_jitter_noise = 0.1 of this mixtral checkpoint"):
        pod.load_model(stock)
    stock = tools.make_stock("qwen2-sliding")
    stock.config.layer_types = ["chunked_attention", *stock.config.layer_types[1:]]
    with pytest.raises(ValueError, match="layer_types = {'chunked_attention'} of this qwen2 checkpoint"):
        pod.load_model(stock)
    stock = tools.make_stock("llama")
    stock.config.model_type = "gpt_neox"
    with pytest.raises(ValueError, match="'gpt_neox' is not supported"):
        pod.load_model(stock)
    stock = tools.make_stock("llama")
    stock.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(ValueError, match="'dynamic' is not supported"):
        pod.load_model(stock)


def test_a_window_that_the_context_fits_into_is_none(tools):
    stock = tools.make_stock("phi3-sliding")
    stock.config.sliding_window = 512
    assert pod.load_model(stock).config.own_method == "full"
    stock.config.sliding_window = 511
    assert pod.load_model(stock).config.layer_windows == [511] * 5


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
