"""The lm-eval model class.

It equals stock HFLM where nothing is compressed, and goes through the compressed cache everywhere else.
"""

import lm_tools
import pytest
import torch
from lm_eval.models.huggingface import HFLM
from transformers import AutoModelForCausalLM

import pod
from pod.eval.lm.batches import unit_batches, units_of
from pod.eval.lm.index import Rule
from pod.models import resolve_model

EVERY = sorted(lm_tools.SMALL)
IN_FORWARD = ("full", "pod", "cla")  # scored by one forward; all others go through the decode path


def stock(model, batch_size=1):
    return HFLM(pretrained=model, tokenizer=lm_tools.tokenizer(), backend="causal", batch_size=batch_size)


def answers(lm):
    """Every kind of answer."""
    return (
        lm.loglikelihood(lm_tools.choices() + lm_tools.ragged(), disable_tqdm=True),
        lm.loglikelihood_rolling(lm_tools.texts(), disable_tqdm=True),
        lm.generate_until(lm_tools.generations(), disable_tqdm=True),
    )


def differences(found, other):
    """Largest difference of log-likelihoods; the rest must be equal."""
    assert [greedy for _, greedy in found[0]] == [greedy for _, greedy in other[0]]
    assert found[2] == other[2]
    scores = [(a, b) for (a, _), (b, _) in zip(found[0], other[0], strict=True)] + list(
        zip(found[1], other[1], strict=True)
    )
    return max(abs(a - b) for a, b in scores)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_full_equals_hflm_bit_for_bit(dtype, batch_size):
    ours = lm_tools.around("full", dtype=dtype, one_shot=True, batch_size=batch_size)
    found, wanted = answers(ours), answers(stock(lm_tools.model("full", dtype), batch_size))
    assert differences(found, wanted) == 0.0
    assert len(set(wanted[2])) == 4  # the answers tell prompts apart


def test_one_forward_sees_the_very_batches_of_hflm(monkeypatch):
    """Bits of large models depend on what runs together."""
    fed = []
    original = HFLM._model_call
    monkeypatch.setattr(
        HFLM, "_model_call", lambda self, ids: fed.append(ids.tolist()) or original(self, ids)
    )
    answers(lm_tools.around("full", one_shot=True, batch_size=3))
    ours = fed.copy()
    fed.clear()
    answers(stock(lm_tools.model(), 3))
    assert len(ours) >= 5 and ours == fed


def test_padding_is_part_of_the_batches():
    """Rows of different lengths do meet in one batch.

    Otherwise the comparison of batches would say nothing about padding.
    """
    encoded = lm_tools.around("snapkv").encoder.requests(lm_tools.ragged(), Rule())
    batches = unit_batches(units_of(encoded), 3)
    assert max(len({len(unit.context) for unit in batch}) for batch in batches) >= 2


def test_bfloat16_scores_are_hflms_with_a_float32_softmax():
    model = lm_tools.model("full", "bfloat16")
    wide = HFLM(
        pretrained=model,
        tokenizer=lm_tools.tokenizer(),
        backend="causal",
        batch_size=1,
        softmax_dtype="float32",
    )
    ours = lm_tools.around("full", dtype="bfloat16", one_shot=True)
    assert ours.loglikelihood(lm_tools.choices()) == wide.loglikelihood(lm_tools.choices())
    assert ours.loglikelihood(lm_tools.choices()) != stock(model).loglikelihood(lm_tools.choices())


@pytest.mark.parametrize(("dtype", "allowed"), [("float32", 2e-4), ("float64", 1e-4)])
def test_stock_weights_give_the_same_answers(dtype, allowed):
    """Against transformers' own Llama, whose RMSNorm computes in float32 whatever the dtype."""
    llama = AutoModelForCausalLM.from_pretrained(
        resolve_model("package:tiny"), dtype=getattr(torch, dtype)
    ).eval()
    difference = differences(
        answers(lm_tools.around("full", dtype=dtype, one_shot=True)), answers(stock(llama))
    )
    assert difference <= allowed


@pytest.mark.parametrize("kind", IN_FORWARD)
def test_one_forward_equals_the_decode_path(kind):
    """What `one_shot` means, for the layouts that claim it; a window layout must not."""
    forward = answers(lm_tools.around(kind, one_shot=True))
    assert differences(forward, answers(lm_tools.around(kind, batch_size=3))) <= 1e-9


@pytest.mark.parametrize("spec", EVERY)
def test_batch_1_equals_batch_3(spec):
    alone, together = (answers(lm_tools.around(spec, batch_size=size)) for size in (1, 3))
    assert differences(alone, together) <= 1e-9


def test_every_method_is_tested():
    assert set(EVERY) == set(pod.methods())


BUDGETED = [name for name in EVERY if "budget" in lm_tools.SMALL[name]]


@pytest.mark.parametrize("spec", BUDGETED)
def test_prompts_with_budgets_of_their_own_share_a_batch(spec):
    """Scores, answers and what is held are those of each prompt alone.

    The budget is a share of the tokens, so every length has its own.
    """
    alone, together = (lm_tools.around(spec, budget=0.4, batch_size=size) for size in (1, 5))
    assert differences(answers(alone), answers(together)) <= 1e-9
    requests = lm_tools.generations()
    assert alone.generate_until(requests) == together.generate_until(requests)
    records = list(zip(alone.records.values(), together.records.values(), strict=True))
    assert len({one["budget_tokens"] for one, _ in records}) >= 4
    for one, other in records:
        assert one["budget_tokens"] == other["budget_tokens"]
        if one["held_tokens"] == other["held_tokens"]:  # a row that ends before others is fed on
            assert abs(one["bytes"] - other["bytes"]) <= 0.02 * one["bytes"]  # bookkeeping


@pytest.mark.parametrize("spec", BUDGETED)
def test_a_budget_that_holds_everything_is_full(spec):
    found = answers(lm_tools.around(spec, budget=4096, batch_size=2))
    assert differences(found, answers(lm_tools.around("full", one_shot=True))) <= 1e-9


@pytest.mark.parametrize("spec", [name for name in EVERY if name not in ("full", "pod", "cla", "window")])
def test_compression_changes_scores_even_of_one_token_answers(spec):
    """Scores come from the compressed cache, for one-token answers too.

    Prefill → compress → score would let these through.
    """
    requests = [request for request in lm_tools.choices() if request.args[1] in "ABC" and request.doc_id == 3]
    assert [len(lm_tools.tokenizer().encode(r.args[1], add_special_tokens=False)) for r in requests] == [
        1,
        1,
        1,
    ]
    full = lm_tools.around("full", one_shot=True).loglikelihood(requests)
    found = lm_tools.around(spec).loglikelihood(requests)
    changed = [abs(a - b) for (a, _), (b, _) in zip(found, full, strict=True)]
    assert min(changed) > 1e-6, changed
