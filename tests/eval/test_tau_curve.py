"""The tau curve: scores are those of caches made with tau, skips are those that really happen, savings by hand."""

import pytest
import torch
from own_runs import make_run, measure, write_place

import pod
from pod.eval.answer.gates import COUNTS, GateProbe, counts_of, shares
from pod.eval.answer.methods import find_method
from pod.eval.answer.perplexity import score_by_decode, score_by_forward
from pod.eval.suites.buckets import Bucket
from pod.modeling.shipped import grouped

TAUS = [0.0, 0.5, 0.7, 0.95]
OPTIONS = {"taus": TAUS, "scored_tokens": 6, "passkeys": True}
CHANGES = {
    "eval__text_length": 150,
    "eval__min_context": 128,
    "eval__text_sequences": 3,
    "eval__batch_size": 2,
    "eval__passkey_lengths": [420],
    "eval__passkey_depths": [0.0, 1.0],
    "eval__passkey_samples": 1,
    "eval__passkey_new_tokens": 4,
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POD_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield write_place(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def run(place):
    return make_run(place, "tau_curve", ["pod-unadapted"], OPTIONS, **CHANGES)


@pytest.fixture(scope="module")
def payload(run):
    return measure(run, "pod-unadapted")


@pytest.mark.parametrize("tau", [None, *TAUS])
def test_scores_are_those_of_a_cache_with_this_tau(run, payload, tau):
    model, text = run.models.get("unadapted"), run.tasks["tau_curve"].text
    bucket = Bucket(start=100, end=150, first=144)
    nll = score_by_decode(model, pod.make_cache(model, "pod", tau=tau), text, bucket).sum(1)
    key = "exact" if tau is None else str(tau)
    for sample, wanted in zip(payload["samples"], nll.tolist(), strict=True):
        assert sample["by_tau"][key] == pytest.approx(wanted, abs=1e-9)


def test_exact_row_equals_one_forward_pass(run, payload):
    model, text = run.models.get("unadapted"), run.tasks["tau_curve"].text
    nll = score_by_forward(model, text, [Bucket(start=100, end=150, first=144)])[0]
    row = payload["rows"][0]
    assert row["tau"] is None and row["perplexity"] == pytest.approx(float(nll.mean().exp()), rel=1e-9)
    assert (row["skipped"], row["saved"], row["change"]) == (0, 0, 0)


def test_what_is_counted_is_what_is_skipped(run, payload, monkeypatch):
    """Beside the decoding itself: query heads of followers whose distant tokens it has given no weight."""
    done = {"heads": 0, "groups": 0}
    original = grouped._distant

    def counting(call, gate, length):
        skipped = gate[:, call.roles.followers] == 1
        done["heads"] += int(skipped.sum())
        done["groups"] += int(skipped.all(-1).sum())
        return original(call, gate, length)

    monkeypatch.setattr(grouped, "_distant", counting)
    model, text = run.models.get("unadapted"), run.tasks["tau_curve"].text
    score_by_decode(model, pod.make_cache(model, "pod", tau=0.5), text, Bucket(start=100, end=150, first=144))
    counts = [sample["counts"]["0.5"] for sample in payload["samples"]]
    assert sum(count["heads_skipped"] for count in counts) == done["heads"] > 0
    assert sum(count["groups_skipped"] for count in counts) == done["groups"]
    # 3 texts x 6 tokens x the 4 followers of the plan x their query heads
    assert sum(count["groups"] for count in counts) == 3 * 6 * 4


def test_tau_zero_always_skips(payload):
    row = payload["rows"][1]
    assert row["tau"] == 0 and row["skipped"] == row["skipped_groups"] == 1
    # tokens 144..149 are decoded: lengths 144..149; window 64; 4 leads and 4 followers
    lengths = range(144, 150)
    exact = sum(4 * 2 * n + 4 * (64 + n) for n in lengths)
    saved = sum(4 * (n - 64) for n in lengths)
    assert row["saved"] == pytest.approx(saved / exact, rel=1e-12)
    assert row["saved_over_dense"] == pytest.approx(
        1 - (exact - saved) / sum(16 * n for n in lengths), rel=1e-12
    )


def test_value_and_curves_are_of_the_chosen_tau(payload):
    row = next(row for row in payload["rows"] if row["tau"] == 0.7)
    assert payload["value"] == row["perplexity"] and payload["metric"] == "perplexity"
    assert [sample["score"] for sample in payload["samples"]] == [
        s["by_tau"]["0.7"] for s in payload["samples"]
    ]
    assert [curve["x"] for curve in payload["curves"]] == [TAUS] * 3
    assert [row["setting"] for row in payload["rows"]] == ["exact", "0.0", "0.5", "0.7", "0.95"]
    assert payload["curves"][0]["y"] == [row["saved"] for row in payload["rows"][1:]]
    skipped = [row["skipped"] for row in payload["rows"][1:]]
    assert skipped == sorted(skipped, reverse=True) and skipped[-1] < skipped[1]


def test_passkeys_are_answered_as_by_generate(run, payload):
    task, model = run.tasks["tau_curve"], run.models.get("unadapted")
    for tau in (None, 0.5):
        for prompt, record in zip(task.prompts, payload["passkeys"], strict=True):
            ids = torch.tensor([prompt.token_ids])
            cache = pod.make_cache(model, "pod", tau=tau)
            model.model(input_ids=ids[:, :-1], past_key_values=cache)
            out = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                past_key_values=cache,
                max_new_tokens=4,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
            text = run.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
            assert record["answers"]["exact" if tau is None else "0.5"] == text
    assert payload["rows"][0]["passkey"] == 0 and payload["rows"][0]["passkey_ci95"][0] == 0


def test_batch_does_not_change_an_answer(place, payload):
    alone = measure(
        make_run(place, "tau_curve", ["pod-unadapted"], OPTIONS, **(CHANGES | {"eval__batch_size": 1})),
        "pod-unadapted",
    )
    for one, other in zip(alone["samples"], payload["samples"], strict=True):
        assert one["counts"] == other["counts"]
        assert one["by_tau"] == pytest.approx(other["by_tau"], abs=1e-9)


def test_counts_by_hand():
    row = counts_of(torch.tensor([[True, False], [True, True]]), length=100, window=20, leads=3)
    assert row == {
        "heads": 4,
        "heads_skipped": 3,
        "groups": 2,
        "groups_skipped": 1,
        "exact": 2 * (3 * 200 + 2 * 120),
        "saved": 3 * 80,
        "dense": 2 * 5 * 200,
    }
    assert shares(row)["skipped"] == 0.75
    assert shares(dict.fromkeys(COUNTS, 0))["skipped"] is None


def test_tokens_without_distant_ones_are_not_counted(pod_model, text):
    cache = pod.make_cache(pod_model, "pod")
    pod_model.model(input_ids=text[:, :10], past_key_values=cache, use_cache=True)
    probe = GateProbe(cache, 0.0)
    pod_model.model(input_ids=text[:, 10:11], past_key_values=cache, use_cache=True)
    assert probe.rows[0]["heads"] == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"taus": [1.5]}, "tau = 1.5 must lie between 0 and 1"),
        ({"taus": []}, "taus must be different numbers from 0 to 1, at least one"),
        ({"taus": [0.5]}, "tau is 0.7, allowed is one of taus: 0.5"),
        ({"scored_tokens": 149}, "scored_tokens = 149 leaves no context in eval.text_length = 150"),
        ({"sequences": 4}, "sequences = 4 must be from 1 to eval.text_sequences = 3"),
        ({"tau_list": [0.5]}, "did you mean 'taus'|tau_list"),
    ],
)
def test_wrong_options_are_one_line_before_any_model(place, options, message, monkeypatch):
    monkeypatch.setattr(pod, "load_model", lambda *a, **k: pytest.fail("a model was loaded"))
    with pytest.raises(ValueError, match=message) as caught:
        make_run(place, "tau_curve", ["pod-unadapted"], options, **CHANGES)
    assert "\n" not in str(caught.value)


def test_what_cannot_be_measured_is_refused_with_the_reason(place, run):
    task = run.tasks["tau_curve"]
    assert "PoD's gate" in task.refuses(find_method("snapkv"))
    assert "PoD's gate" in task.refuses(find_method("full"))
    short = make_run(
        place,
        "tau_curve",
        ["pod-unadapted"],
        {"scored_tokens": 6},
        **(CHANGES | {"eval__text_length": 60, "eval__min_context": 30}),
    )
    assert "no distant token beyond a window of 64" in short.tasks["tau_curve"].refuses(
        find_method("pod-unadapted")
    )


def test_estimate(run):
    prompt, steps = run.tasks["tau_curve"].token_counts(find_method("pod-unadapted"))
    prompts = sum(len(prompt.token_ids) for prompt in run.tasks["tau_curve"].prompts)
    assert (prompt, steps) == (3 * 150 + prompts, 5 * (2 * 6 + 2 * 4))
