"""Ablations: every setting is the model that it says, tied to numbers measured otherwise."""

import json

import pytest
import torch
from own_runs import PLAN, make_run, measure, write_place

import pod
from pod.eval.answer import perplexity
from pod.eval.answer.methods import find_method
from pod.eval.answer.variants import variant

OTHER = pod.SharingPlan(lead=[[0, 0], [1, 0], [1, 2], [3, 2]])
CHANGES = {
    "eval__text_length": 200,
    "eval__min_context": 100,
    "eval__text_sequences": 3,
    "eval__scored_tokens": 20,
    "eval__passkey_lengths": [420],
    "eval__passkey_depths": [0.0, 1.0],
    "eval__passkey_samples": 1,
    "eval__passkey_new_tokens": 4,
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POD_CACHE", str(tmp_path_factory.mktemp("cache")))
        folder = write_place(tmp_path_factory.mktemp("run"))
        OTHER.save(folder / "other.json")
        yield folder


@pytest.fixture(scope="module")
def run(place):
    options = {"windows": [2000, 16], "plans": [str(place / "other.json")]}
    return make_run(place, "ablation", ["pod-unadapted"], options, **CHANGES)


@pytest.fixture(scope="module")
def payload(run):
    return measure(run, "pod-unadapted")


def row(payload, name):
    return next(row for row in payload["rows"] if row["setting"] == name)


def scored(run, model):
    task = run.tasks["ablation"]
    return sum(nll.sum(1) for nll in perplexity.score_by_forward(model, task.text, task.buckets)).tolist()


def test_settings_in_order(payload):
    names = ["own", "no sharing", "window 16", "window 2000", "plan other"]
    assert [row["setting"] for row in payload["rows"]] == names
    assert list(payload["samples"][0]["by_setting"]) == names


@pytest.mark.parametrize(
    ("name", "plan", "recent"),
    [
        ("own", PLAN, 60),
        ("no sharing", None, 60),
        ("window 16", PLAN, 16),
        ("window 2000", PLAN, 2000),
        ("plan other", OTHER, 60),
    ],
)
def test_every_setting_is_a_model_loaded_so(run, payload, name, plan, recent):
    model = pod.load_model(
        run.models.dense_path, plan=plan, num_sink_tokens=4, num_recent_tokens=recent, dtype=torch.float64
    ).eval()
    wanted = scored(run, model)
    for sample, total in zip(payload["samples"], wanted, strict=True):
        assert sample["by_setting"][name] == pytest.approx(total, abs=1e-9)
    found = row(payload, name)
    share = 0 if plan is None else plan.share_followers
    assert (found["num_recent_tokens"], found["share_followers"]) == (recent, share)
    tokens = payload["samples"][0]["tokens"] * len(wanted)
    assert found["perplexity"] == pytest.approx(
        float(torch.tensor(sum(wanted) / tokens, dtype=torch.float64).exp())
    )


def test_change_is_against_no_sharing(payload):
    dense, narrow, wide = (row(payload, name) for name in ("no sharing", "window 16", "window 2000"))
    assert dense["change"] == 0
    assert wide["perplexity"] == pytest.approx(dense["perplexity"], rel=1e-9)
    assert narrow["change"] == pytest.approx(narrow["perplexity"] / dense["perplexity"] - 1)
    assert narrow["change"] != 0 and narrow["change_ci95"][0] <= narrow["change"] <= narrow["change_ci95"][1]


def test_saving_is_that_of_bytes_held(payload):
    """The formula, less 1/128 of room to grow and what a cache writes down about its tokens."""
    for name, plan, recent in (("own", PLAN, 60), ("window 16", PLAN, 16), ("plan other", OTHER, 60)):
        assert row(payload, name)["saving"] == pytest.approx(plan.saving(200, 4, recent), abs=0.02)
    assert row(payload, "window 16")["saving"] > row(payload, "own")["saving"] + 0.02


def test_passkeys_are_those_of_the_task_passkey(place, payload):
    other = measure(make_run(place, "passkey", ["pod-unadapted"], {}, **CHANGES), "pod-unadapted")
    own = payload["passkeys"]["own"]
    assert [record["answer"] for record in own] == [sample["answer"] for sample in other["samples"]]
    assert row(payload, "own")["passkey"] == other["value"]


def test_curves_are_both_halves_of_the_figure(payload):
    curves = {(curve["x_label"], curve["y_label"]): curve for curve in payload["curves"]}
    windows = curves["recent tokens", "perplexity"]
    assert windows["x"] == [16, 60, 2000] and windows["labels"] == ["window 16", "own", "window 2000"]
    savings = curves["KV saving in the limit", "perplexity"]
    assert savings["x"] == [0, OTHER.asymptotic_saving, PLAN.asymptotic_saving]
    assert savings["reference"] == row(payload, "no sharing")["perplexity"]
    assert len(curves) == 4


def test_variants_share_their_weights(run):
    model = run.models.get("unadapted")
    other = variant(model, num_recent_tokens=7)
    assert other.config.num_recent_tokens == 7 and model.config.num_recent_tokens == 60
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert one.data_ptr() == two.data_ptr()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "windows and plans are empty"),
        ({"windows": [0]}, "windows must be different token counts of at least 1"),
        ({"windows": [16], "sequences": 9}, "sequences = 9 must be from 1 to eval.text_sequences = 3"),
        ({"plans": ["/nowhere.json"]}, "/nowhere.json does not exist: make a plan with launch/explore.py"),
        ({"plans": ["PLACE/big.json"]}, "is for 6 layers x 5 KV heads, the model has 4 x 2"),
        ({"plans": ["PLACE/bad.json"]}, "is not a sharing plan of schema 1"),
    ],
)
def test_wrong_options_are_one_line_before_any_model(place, options, message, monkeypatch):
    pod.SharingPlan(lead=[[0] * 5 for _ in range(6)]).save(place / "big.json")
    (place / "bad.json").write_text(json.dumps({"schema": 9}))
    monkeypatch.setattr(pod, "load_model", lambda *a, **k: pytest.fail("a model was loaded"))
    options = json.loads(json.dumps(options).replace("PLACE", str(place)))
    with pytest.raises(ValueError, match=message) as caught:
        make_run(place, "ablation", ["pod-unadapted"], options, **CHANGES)
    assert "\n" not in str(caught.value)


def test_methods_that_have_no_plan_are_refused(run):
    assert "PoD's windows and plan" in run.tasks["ablation"].refuses(find_method("snapkv"))


def test_estimate(run):
    task = run.tasks["ablation"]
    prompts = sum(len(prompt.token_ids) for prompt in task.prompts)
    assert task.token_counts(find_method("pod-unadapted")) == (5 * (4 * 200 + prompts), 5 * 1 * 4)
