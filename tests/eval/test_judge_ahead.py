"""SimLayerKV's decode detector under evaluation.

It judges by what the model would generate, before anything is scored or asked.

Changes of one token, each of which a test here sees (16 of 16, each was tried):

- judge_ahead, copies: the cache itself for its copy; its layers for those of the copy; tokens fed to it;
  `copied.adopt(layer)`
- judge_ahead, tokens: `mask is not None`; `new_zeros`; `last - 1`; `argmin`
- judge_ahead, who: `if waiting`; `judges_next = True` before the last token; `= False` behind it
- _waiting: `True` for layers that say nothing
- read: the first hidden state for the last; the token before the last; no mask
- score: the hidden state where the last token is held out
"""

import lm_tools
import pytest
import torch
from own_runs import nll_by_decode

import pod
from pod.eval.answer import reading
from pod.eval.answer.generate import behind as fed_behind
from pod.eval.answer.score import score
from pod.eval.lm.index import Rule
from pod.eval.suites.buckets import Bucket

SMALL = {"num_recent_tokens": 8, "num_sink_tokens": 2}


def cache(detector="decode", threshold=0.5):
    options = SMALL | {"detector": detector, "threshold": threshold}
    return pod.make_cache(lm_tools.model(), "simlayerkv", **options)


def layers(of):
    return [layer for group in of.groups for layer in group.layers]


def scores(**options):
    lm = lm_tools.around("simlayerkv", batch_size=3, **SMALL | {"num_last_queries": 4} | options)
    with lm.rules(Rule()):
        return [total for total, _ in lm.loglikelihood(lm_tools.choices())]


def test_choices_are_scored_from_the_compressed_cache():
    """All layers lazy: the same as judged by the prompt, whatever judges; none lazy: the dense model."""
    full = [total for total, _ in lm_tools.around("full").loglikelihood(lm_tools.choices())]
    every = scores(detector="decode", threshold=0.0)
    assert every == pytest.approx(scores(detector="prefill", threshold=0.0), abs=1e-9)
    assert max(abs(a - b) for a, b in zip(every, full, strict=True)) > 1e-3
    assert scores(detector="decode", threshold=1.0) == pytest.approx(full, abs=1e-9)


@torch.no_grad()
@pytest.mark.parametrize("padded", [False, True])
def test_the_decision_is_that_of_generation(padded):
    """By the same attention of the same first generated token; on rows of one length and of two."""
    model = lm_tools.model()
    draw = torch.Generator().manual_seed(0)
    rows = [torch.randint(1, 250, (60 - 7 * padded * row,), generator=draw).tolist() for row in range(3)]
    generated, ahead, behind = (cache(threshold=0.2) for _ in range(3))
    fed = fed_behind(None, rows, 0, "cpu")
    model.generate(**fed, past_key_values=generated, max_new_tokens=3, do_sample=False, eos_token_id=[])
    mask = reading.read(model, ahead, rows, hold_out=False).mask
    short = fed_behind(None, [row[:-1] for row in rows], 0, "cpu")
    model.model(input_ids=short["input_ids"], attention_mask=short["attention_mask"], past_key_values=behind)
    last = torch.tensor([row[-1:] for row in rows])
    reading.judge_ahead(model, behind, short["attention_mask"], last=last)
    wanted = [(layer.is_lazy, layer.mass) for layer in layers(generated)]
    assert {lazy for lazy, _ in wanted} == {True, False}, "the threshold decides nothing here"
    for found in (ahead, behind):
        assert [layer.is_lazy for layer in layers(found)] == [lazy for lazy, _ in wanted]
        assert [layer.mass for layer in layers(found)] == pytest.approx(
            [mass for _, mass in wanted], abs=1e-9
        )
        assert not any(layer.judges_next for layer in layers(found))
        found.check_integrity()
    assert ahead.nbytes < cache_of_all(model, rows).nbytes and mask.shape == fed["attention_mask"].shape


def cache_of_all(model, rows):
    found = cache(threshold=1.0)
    reading.read(model, found, rows, hold_out=False)
    return found


def test_perplexity_is_scored_from_the_compressed_cache():
    model = lm_tools.model()
    tokens = torch.randint(1, 250, (2, 70), generator=torch.Generator().manual_seed(1))
    bucket = Bucket(start=0, end=70, first=62)
    by_decode = nll_by_decode(model, cache(threshold=0.0), tokens, bucket)
    by_prompt = nll_by_decode(model, cache("prefill", threshold=0.0), tokens, bucket)
    dense = nll_by_decode(model, pod.make_cache(model, "full"), tokens, bucket)
    assert torch.allclose(by_decode, by_prompt, atol=1e-9)
    assert (by_decode - dense)[:, 0].abs().min() > 1e-4, "already the first score"


def decisions(found):
    """What every layer decided, and by which attention to 9 digits."""
    return [(layer.is_lazy, round(layer.mass, 9)) for layer in layers(found)]


def test_who_holds_the_last_token_out_judges_by_what_follows_it():
    """Perplexity, and choices after contexts of several lengths: as where the whole context is read."""
    model, draw = lm_tools.model(), torch.Generator().manual_seed(0)
    rows = [torch.randint(1, 250, (60 - 7 * row,), generator=draw).tolist() for row in range(3)]
    for contexts in (rows[:1], rows):
        whole, scored = cache(threshold=0.2), cache(threshold=0.2)
        reading.read(model, whole, contexts, hold_out=False)
        score(model, scored, contexts, [[(7, 8)]] * len(contexts))
        assert decisions(scored) == decisions(whole)


def test_other_methods_are_left_alone(monkeypatch):
    monkeypatch.setattr(reading, "branch", lambda found: pytest.fail("a copy was made"))
    for found in (pod.make_cache(lm_tools.model(), "snapkv", budget=20, window=6), cache("prefill")):
        reading.read(lm_tools.model(), found, [list(range(1, 50))], hold_out=False)
