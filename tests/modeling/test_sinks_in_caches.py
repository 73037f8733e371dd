"""Constant sinks in every cache that a plan allows, and what is done with caches: saved, cropped, regrouped,
assisted."""

import pytest
import torch
from conftest import LEAD, make_stock, random_ids
from test_sinks_of_models import constants_for, plan_for

import pod

KEEP_ALL = {
    "pod": {},
    "pod[capacity=64]": {},
    "pod[tau=1.0]": {},
    "pod[extra_slots=4]": {},
    "pod+snapkv": {"budget": 80},
    "pod+pyramidkv": {"budget": 80},
    "pod+expected_attention": {"budget": 80},
    "pod+quest": {"budget": 80},
    "pod+int4": {},
    "pod+int8": {},
    "pod+kivi": {},
}
"""Caches in which nothing is lost before 60 tokens: packed ones keep their last 128 as they are."""
WIDTHS = [[30] + [1] * 30, [20, 1, 19, 20]]


@pytest.fixture(scope="module")
def model():
    stock = make_stock()
    model = pod.load_model(stock, plan=plan_for(stock))
    model.config.use_cache = False
    return model


@torch.no_grad()
def fed(model, cache, ids, widths):
    outputs, start = [], 0
    for width in widths:
        outputs.append(model(ids[:, start : start + width], past_key_values=cache).logits)
        start += width
    return torch.cat(outputs, 1)


@pytest.mark.parametrize("widths", WIDTHS, ids=len)
@pytest.mark.parametrize("spec", KEEP_ALL)
def test_caches_that_lose_nothing(model, spec, widths):
    ids = random_ids(1, 60)
    cache = pod.make_cache(model, spec, **KEEP_ALL[spec])
    found = fed(model, cache, ids, widths)
    torch.testing.assert_close(found, model(ids).logits.detach(), rtol=0, atol=1e-10)
    cache.check_integrity()


def test_every_other_method_is_refused_in_one_line(model):
    """None of them could leave the sinks out unseen."""
    tried = 0
    for name in pod.methods().keys() - {"pod"}:
        if f"pod+{name}" in KEEP_ALL:
            continue
        for spec in (name, f"pod+{name}"):
            with pytest.raises(ValueError) as said:
                pod.make_cache(model, spec)
            assert "\n" not in str(said.value)
            tried += 1
    assert tried > 20


def test_saved_and_loaded(model, tmp_path):
    ids = random_ids(1, 60)
    cache = pod.make_cache(model, "pod")
    fed(model, cache, ids[:, :40], [40])
    pod.save_cache(model, cache, tmp_path / "cache")
    again = pod.load_cache(model, tmp_path / "cache")
    found = fed(model, again, ids[:, 40:], [1] * 20)
    torch.testing.assert_close(found, model(ids).logits[:, 40:].detach(), rtol=0, atol=1e-10)
    with pytest.warns(UserWarning, match="sinks = 'none', the plan was made for 'constant'"):
        other = pod.load_model(make_stock(), plan=plan_for(make_stock()), sinks="none")
    with pytest.raises(ValueError, match="another shape, plan or windows"):
        pod.load_cache(other, tmp_path / "cache")


def test_cropped(model):
    """Tokens that are taken back may have pushed others out of the window, which extra slots keep."""
    ids, cache = random_ids(1, 60), pod.make_cache(model, "pod", extra_slots=5)
    fed(model, cache, ids[:, :40], [39, 1])
    fed(model, cache, random_ids(1, 5, seed=8), [5])
    cache.crop(-5)
    found = fed(model, cache, ids[:, 40:], [3] + [1] * 17)
    torch.testing.assert_close(found, model(ids).logits[:, 40:].detach(), rtol=0, atol=1e-10)


def test_rows_in_another_order(model):
    ids, cache = random_ids(3, 40), pod.make_cache(model, "pod")
    fed(model, cache, ids[:, :30], [30])
    order = torch.tensor([2, 0, 0, 1])
    cache.batch_select_indices(order)
    found = fed(model, cache, ids[order, 30:], [1] * 10)
    torch.testing.assert_close(found, model(ids[order]).logits[:, 30:].detach(), rtol=0, atol=1e-10)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_assisted_decoding_and_beams(model):
    """As without assistance; the assistant is the same plan with other constants."""
    stock, ids = make_stock(), random_ids(1, 30)
    assistant = pod.load_model(stock, plan=plan_for(stock, sink_constants=constants_for(stock, seed=4)))
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "use_cache": True}
    truth = model.generate(ids, **options)
    cache = pod.make_cache(model, "pod", extra_slots=24)
    found = model.generate(ids, past_key_values=cache, assistant_model=assistant, **options)
    assert torch.equal(found, truth)
    beams = model.generate(ids, num_beams=3, **options)
    slow = model.generate(ids, num_beams=3, **(options | {"use_cache": False}))
    assert torch.equal(beams, slow)


def test_a_recorded_step_reads_the_parameters_of_today(model):
    """The engine binds the cache's tensors, not the constants."""
    stock, ids = make_stock(), random_ids(1, 60)
    own = pod.load_model(stock, plan=plan_for(stock)).requires_grad_(False)
    cache = pod.make_cache(own, "pod", capacity=64)
    fed(own, cache, ids[:, :50], [30] + [1] * 20)
    assert cache.engine.steps == 20
    before = own(ids, use_cache=False).logits
    for layer, row in enumerate(LEAD):
        if None in row:
            own.model.layers[layer].self_attn.sinks.data.add_(2.0)
    # what came before stands in the cache as it was
    cache.reset()
    found = fed(own, cache, ids, [30] + [1] * 30)
    after = own(ids, use_cache=False).logits
    assert (before - after).abs().max() > 0.1
    torch.testing.assert_close(found, after, rtol=0, atol=1e-10)
