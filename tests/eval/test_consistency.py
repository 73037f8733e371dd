"""Prediction consistency: which tokens a prediction may see, windows, methods, payload."""

import pytest
import torch
from own_runs import make_run, measure, write_place

import pod
from pod.eval.answer import score
from pod.eval.answer.methods import find_method
from pod.eval.runner import answers_of

OPTIONS = {"length": 200, "sequences": 3, "predictions": 20, "windows": [16, 64, 180]}
METHODS = ["full", "pod-unadapted", "snapkv", "snapkv@40", "snapkv@400"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POD_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield write_place(tmp_path_factory.mktemp("consistency"))


def test_forward_predicts_the_last_tokens(dense_model, text):
    logits = dense_model(input_ids=text).logits
    found = score.predict_by_forward(dense_model, text, 5)
    assert torch.equal(found, logits[:, 58:63].argmax(dim=-1))


@pytest.mark.parametrize(("spec", "plan"), [("full", False), ("pod", True)])
def test_decode_path_predicts_as_one_forward(spec, plan, dense_model, pod_model, text):
    model = pod_model if plan else dense_model
    cache = pod.make_cache(model, spec)
    found = score.predict_by_decode(model, cache, text, 9)
    assert torch.equal(found, score.predict_by_forward(model, text, 9))
    assert cache.get_seq_length() == 63, "the last token is not fed"


@pytest.mark.parametrize("window", [1, 7, 30])
@pytest.mark.parametrize("rows", [1, 4])
def test_cut_sees_the_window_and_nothing_else(dense_model, text, window, rows):
    found = score.predict_by_window(dense_model, text, 6, window, rows)
    for row in range(3):
        for column, position in enumerate(range(58, 64)):
            logits = dense_model(input_ids=text[row : row + 1, position - window : position]).logits
            assert found[row, column] == logits[0, -1].argmax()


def test_window_of_everything_changes_nothing(dense_model, text):
    full = score.predict_by_forward(dense_model, text, 1)
    assert torch.equal(score.predict_by_window(dense_model, text, 1, 63, 2), full)


@pytest.mark.parametrize("spec", ["wa", "streamingllm"])
def test_window_of_attention_is_a_method(dense_model, text, spec):
    hidden = dense_model.model(
        input_ids=text[:, :-1], past_key_values=pod.make_cache(dense_model, spec, budget=12), use_cache=True
    ).last_hidden_state
    found = score.predict_by_decode(dense_model, pod.make_cache(dense_model, spec, budget=12), text, 20)
    assert torch.equal(found, dense_model.lm_head(hidden[:, -20:]).argmax(-1))
    assert not torch.equal(found, score.predict_by_forward(dense_model, text, 20))


def test_payload_by_method_and_window(place):
    run = make_run(place, "consistency", METHODS, OPTIONS)
    found = {name: measure(run, name) for name in METHODS}
    values = {name: payload["value"] for name, payload in found.items()}
    assert values["full"] == values["snapkv@400"] == 1.0
    assert values["snapkv@40"] < 1 and values["pod-unadapted"] < 1
    assert found["full"]["kind"] == "score" and len(found["full"]["samples"]) == 3
    assert "metrics" not in found["snapkv"]
    assert found["snapkv"]["bytes"][0]["bytes_over_pod"] == pytest.approx(1, abs=0.05)
    assert all(
        sample["score"] * 20 == pytest.approx(round(sample["score"] * 20))
        for sample in found["snapkv"]["samples"]
    )


def test_windows_are_averaged_over_texts(place):
    run = make_run(place, "consistency", ["full"], OPTIONS)
    payload = measure(run, "full")
    model, text = run.models.get("dense"), run.tasks["consistency"].text
    reference = score.predict_by_forward(model, text, 20)
    (curve,) = payload["curves"]
    ends = zip(curve["low"], curve["high"], strict=True)
    for window, value, interval in zip(curve["x"], curve["y"], ends, strict=True):
        found = score.predict_by_window(model, text, 20, window, 7)
        assert value == pytest.approx((found == reference).double().mean().item())
        assert payload["metrics"][f"window {window}"] == {"value": value, "ci95": list(interval)}
    assert curve["y"][0] < curve["y"][2] < 1


@pytest.mark.slow
def test_batch_of_three_predicts_as_alone(place):
    found = [
        [
            measure(make_run(place, "consistency", ["full", "h2o"], OPTIONS, eval__batch_size=size), name)[
                "samples"
            ]
            for name in ("full", "h2o")
        ]
        for size in (1, 3)
    ]
    assert [[s | {"bytes": 0} for s in samples] for samples in found[0]] == [
        [s | {"bytes": 0} for s in samples] for samples in found[1]
    ]


def test_gate_skip_is_predicted_token_by_token(place):
    options = {"method_options": {"pod-unadapted": {"tau": 0.0}}}
    run = make_run(
        place, "consistency", ["pod-unadapted"], OPTIONS, eval__method_options=options["method_options"]
    )
    plain = make_run(place, "consistency", ["pod-unadapted"], OPTIONS)
    assert run.tasks["consistency"].token_counts(run.method_runners["pod-unadapted"].method)[1] == 20
    skipped, exact = measure(run, "pod-unadapted"), measure(plain, "pod-unadapted")
    assert skipped["samples"][0]["bytes"] and exact["samples"][0]["bytes"] is None
    assert [s["score"] for s in skipped["samples"]] != [s["score"] for s in exact["samples"]]


def test_what_a_result_depends_on(place):
    asked = []
    for changes in ({}, {"windows": [16]}, {"predictions": 19}):
        run = make_run(place, "consistency", ["full"], OPTIONS | changes, output_dir=str(place / "depends"))
        with answers_of(run, run.method_runners["full"]).asked_by("x") as answer_cache:
            run.tasks["consistency"].answer(run.method_runners["full"], answer_cache)
            asked.append(frozenset(answer_cache._asked))
    assert len(set().union(*asked)) == sum(map(len, asked)), "no answer serves two settings"
    assert run.tasks["consistency"].token_counts(find_method("full")) == (3 * (200 + 19 * 260), 0)
    assert run.tasks["consistency"].token_counts(find_method("h2o")) == (1200, 19)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"windows": [16, 181]},
            r"eval\.task_options\.consistency\.windows is \[16, 181\], but a window above length - "
            r"predictions = 180",
        ),
        ({"windows": [16, 16]}, "may appear only once"),
        ({"length": 21}, "length is 21, it must exceed predictions = 20 by at least 2"),
        ({"length": 9000}, "consistency.length is 9000 and the dense model reads 8192: lower it"),
        ({"predictions": 0}, "predictions is 0"),
    ],
)
def test_wrong_options_are_refused(place, changes, message):
    with pytest.raises(ValueError, match=message):
        make_run(place, "consistency", ["full"], OPTIONS | changes)
