"""Models of a recipe's own, `eval.models`.

The dense weights under other plans and windows are the models that they say.
"""

import json
import weakref

import pytest
import torch
from own_runs import PLAN, make_run, measure, nll_by_forward, write_place

import pod
from pod.eval.answer import model_set
from pod.eval.runner import answers_of

OTHER = pod.SharingPlan(lead=[[0, 0], [1, 0], [1, 2], [3, 2]])
KINDS = {"own": (PLAN, 4, 60), "narrow": (PLAN, 4, 16), "wide": (PLAN, 4, 2000), "other": (OTHER, 2, 60)}
CHANGES = {
    "eval__text_length": 200,
    "eval__min_context": 100,
    "eval__text_sequences": 3,
    "eval__scored_tokens": 20,
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POD_CACHE", str(tmp_path_factory.mktemp("cache")))
        folder = write_place(tmp_path_factory.mktemp("run"))
        OTHER.save(folder / "other.json")
        yield folder


def run_of(place, models, **changes):
    models = {name: text.replace("PLACE", str(place)) for name, text in models.items()}
    methods = ["full", "pod-unadapted", *(f"model:{name}" for name in models)]
    return make_run(place, "perplexity", methods, {}, eval__models=models, **CHANGES, **changes)


@pytest.fixture(scope="module")
def run(place):
    plan = "PLACE/plan.json"
    windows = {
        "own": plan,
        "narrow": f"{plan}@4+16",
        "wide": f"{plan}@4+2000",
        "other": "PLACE/other.json@2+60",
    }
    return run_of(place, windows)


@pytest.fixture(scope="module")
def payloads(run):
    return {name: measure(run, name) for name in run.method_runners}


def test_dense_weights_under_a_plan_are_those_of_the_dense_model(place):
    found = run_of(place, {"narrow": "PLACE/plan.json@4+16"}).models
    dense, planned = found.get("dense"), [found.get("unadapted"), found.get("narrow")]
    weight = dense.model.layers[0].mlp.up_proj.weight
    assert all(one.model.layers[0].mlp.up_proj.weight.data_ptr() == weight.data_ptr() for one in planned)
    assert dense.config.sharing_plan.is_dense and planned[0].config.sharing_plan.lead == PLAN.lead


@pytest.mark.parametrize("room", [1.5, 100])
def test_a_model_is_dropped_where_the_next_does_not_fit_beside_it(place, monkeypatch, room):
    """The device has room for `room` models of this size."""
    run_of(place, {}).models.get("unadapted").save_pretrained(place / "export")
    found = run_of(place, {"export": "PLACE/export"}).models
    first = weakref.ref(found.get("dense"))
    size = sum(weight.nbytes for weight in first().parameters())

    def left(devices):
        return {device: (room - len(found._loaded)) * size for device in devices}

    monkeypatch.setattr(model_set, "room_on", left)
    found.get("export")
    assert (first() is None) == (room < 2)
    assert found.get("dense").config.sharing_plan.is_dense, "it is loaded again where it was dropped"


@pytest.mark.parametrize("kind", KINDS)
def test_every_entry_is_a_model_loaded_so(run, payloads, kind):
    plan, sinks, recent = KINDS[kind]
    windows = {"num_sink_tokens": sinks, "num_recent_tokens": recent}
    model = pod.load_model(run.models.dense_path, plan=plan, dtype=torch.float64, **windows).eval()
    task, payload = run.tasks["perplexity"], payloads[f"model:{kind}"]
    scored = nll_by_forward(model, task.text, task.buckets)
    wanted = sum(nll.sum(1) for nll in scored).tolist()
    assert [sample["score"] for sample in payload["samples"]] == pytest.approx(wanted, abs=1e-9)
    assert payload["scored_by"] == "one forward pass", "PoD, whatever the recipe calls it"
    assert run.models.windows(kind) == (sinks, recent)


def test_settings_differ_and_a_window_of_everything_shares_nothing(payloads):
    values = {name: payload["value"] for name, payload in payloads.items()}
    assert values["model:own"] == values["pod-unadapted"]
    assert values["model:wide"] == pytest.approx(values["full"], rel=1e-9)
    assert len({round(values[f"model:{kind}"], 9) for kind in KINDS}) == len(KINDS)


def test_answers_of_unlike_models_stand_on_shelves_of_their_own(run):
    names = [answers_of(run, run.method_runners[f"model:{kind}"]).name for kind in KINDS]
    assert len({name.rpartition(".")[2] for name in names}) == len(KINDS)


def test_an_export_may_get_other_windows(place, run):
    run.models.get("other").save_pretrained(place / "export")
    found = run_of(place, {"as_it_is": "PLACE/export", "short": "PLACE/export@1+7"})
    assert [found.models.windows(kind) for kind in ("as_it_is", "short")] == [(2, 60), (1, 7)]
    config = found.models.get("short").config
    assert (config.num_sink_tokens, config.num_recent_tokens) == (1, 7)
    assert config.sharing_plan.lead == OTHER.lead
    assert not found.method_runners["model:short"].method.one_shot, "an export may have any layout"


def test_a_plan_that_packs_is_scored_token_by_token(place):
    pod.SharingPlan(lead=PLAN.lead, bits=(16, 16, 4, 4)).save(place / "packed.json")
    found = run_of(place, {"packed": "PLACE/packed.json"})
    one_shot = {name: runner.method.one_shot for name, runner in found.method_runners.items()}
    assert not one_shot["model:packed"] and one_shot["pod-unadapted"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("/nowhere.json", "/nowhere.json does not exist: make a plan with `pod explore`"),
        ("/nowhere", "eval.models.x = /nowhere has no model"),
        ("PLACE/export@4", "has no model"),
        ("", "eval.models.x is ''; it must be the folder of an export or a plan.json"),
        ("PLACE/big.json", "is for 6 layers x 5 KV heads, the model has 4 x 2"),
        ("PLACE/bad.json", "is not a sharing plan"),
    ],
)
def test_wrong_entries_are_one_line_before_any_model(place, text, message, monkeypatch):
    pod.SharingPlan(lead=[[0] * 5 for _ in range(6)]).save(place / "big.json")
    (place / "bad.json").write_text(json.dumps({"schema": 9}))
    monkeypatch.setattr(pod, "load_model", lambda *a, **k: pytest.fail("a model was loaded"))
    with pytest.raises(ValueError, match=message) as caught:
        run_of(place, {"x": text})
    assert "\n" not in str(caught.value)


def test_a_model_that_the_hub_does_not_give_is_said_at_once(place, tmp_path, monkeypatch):
    asked = []

    def ask(url, **options):
        asked.append(url)
        raise OSError("no network")

    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", ask)
    with pytest.raises(ValueError, match="cannot load a model from nobody/nothing: no network"):
        make_run(place, "perplexity", ["full"], {}, model__path="nobody/nothing")
    assert len(asked) == 1 and asked[0].endswith("nobody/nothing/resolve/main/config.json")
