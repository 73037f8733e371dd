"""Variants of a method by name in one run: what a name says, who refuses it, what tells the answers apart."""

import json

import own_runs
import pytest

import pod
from pod.eval import runner
from pod.eval.answer.generate import generate
from pod.eval.answer.methods import find_method, safe_name
from pod.eval.args import EvalArgs
from pod.eval.report.merge import merge
from pod.recipe import load_recipe


@pytest.mark.parametrize(
    ("name", "plain", "options"),
    [
        ("simlayerkv[threshold=0.8]", "simlayerkv", {"threshold": 0.8}),
        ("d2o[merge=average, alpha=2]@25%", "d2o@25%", {"merge": "average", "alpha": 2}),
        ("imdc(snapkv)[function=sqrt]@1024", "imdc(snapkv)@1024", {"function": "sqrt"}),
        ("pod+snapkv[window=8]+int4[group_size=32]", "pod+snapkv+int4", {"window": 8, "group_size": 32}),
        ("pod-unadapted[tau=0.5]", "pod-unadapted", {"tau": 0.5}),
        ("model:cla[tau=null]", "model:cla", {"tau": None}),
        ("simlayerkv[layers=2-4,also=[1,[7]]]", "simlayerkv", {"layers": [2, 3, 4], "also": [1, [7]]}),
        ("simlayerkv[layers=2-4,also=[1,7]]", "simlayerkv", {"layers": [2, 3, 4], "also": [1, 7]}),
        ('razor[heads="0.5",compensation=false]', "razor", {"heads": "0.5", "compensation": False}),
        ("razor[heads=runs/a@b/heads.json]", "razor", {"heads": "runs/a@b/heads.json"}),
    ],
)
def test_what_a_name_says(name, plain, options):
    found, base = find_method(name), find_method(plain)
    assert (find_method(found.name), found.options, found.one_shot) == (found, options, False)
    same = "spec", "model", "takes_budget", "grows", "budget", "reads_any_length"
    assert [getattr(found, field) for field in same] == [getattr(base, field) for field in same]


def test_names_of_files_are_safe_and_each_its_own():
    names = ["d2o[alpha=2]@25%", "d2o[alpha=2]@25", "d2o[alpha=2]", "d2o[alpha=3]", "imdc(snapkv)", "d2o"]
    names += [
        "razor[heads=a/b]",
        "razor[heads=a b]",
        "razor[heads=a_b]",
        *(f"h2o[x={'1' * n}]" for n in (200, 300)),
    ]
    found = {safe_name(name) for name in names}
    assert len(found) == len(names)
    assert all("/" not in name and " " not in name and len(name) < 140 for name in found)
    assert safe_name("imdc(snapkv)@25%") == "imdc_snapkv_@25p" and safe_name("model:cla") == "model_cla"
    with pytest.raises(ValueError, match="twice"):
        EvalArgs(methods=["d2o[merge=average]", "d2o[merge=AVERAGE]"])


def test_what_a_name_says_goes_before_recipe_and_preset():
    named = "simlayerkv[num_recent_tokens=8,threshold=0.2]"
    args = EvalArgs(
        preset="simlayerkv", methods=["full", named], method_options={named: {"exempt_last_layer": True}}
    )
    assert args.method_options == {
        named: {
            "num_sink_tokens": 4,
            "num_recent_tokens": 8,
            "detector": "decode",
            "exempt_last_layer": True,
            "threshold": 0.2,
        }
    }
    with pytest.raises(
        ValueError, match="says threshold = 0.9 of simlayerkv.num_recent_tokens=8,threshold=0.2"
    ):
        EvalArgs(methods=[named], method_options={named: {"threshold": 0.9}})


def test_commas_inside_brackets_do_not_end_a_method():
    text = "full,d2o[merge=average,alpha=2]@25%,simlayerkv[lazy_layers=[0,3],threshold=0.5],imdc(snapkv)"
    recipe = load_recipe(None, [f"eval.methods={text}"])
    assert recipe.eval.methods == [
        "full",
        "d2o[alpha=2,merge=average]@25%",
        "simlayerkv[lazy_layers=[0,3],threshold=0.5]",
        "imdc(snapkv)",
    ]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POD_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield own_runs.write_place(tmp_path_factory.mktemp("sweeps"))


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("snapkv[windwo=8]@60", "snapkv has no parameter 'windwo'; did you mean 'window'"),
        ("snapkv[window=wide]@60", "window = 'wide' must be a whole number"),
        ("snapkv[pool=mean]+int4@60", "pool = 'mean' is unknown; choose avg or max"),
    ],
)
def test_wrong_options_are_one_line_before_a_model_is_loaded(place, method, message, monkeypatch):
    monkeypatch.setattr(runner.Models, "get", None)
    with pytest.raises(ValueError, match=message) as caught:
        own_runs.make_run(place, "passkey", [method], {})
    assert "\n" not in str(caught.value)


def test_what_methods_decided_is_in_results_and_report(place, tmp_path):
    """Means over samples of what each prompt decides alone, per layer; the report says them."""
    fixed = "simlayerkv[lazy_layers=[1,3],num_recent_tokens=20,num_sink_tokens=2]"
    judged = "simlayerkv[num_recent_tokens=20,num_sink_tokens=2,threshold=0.4]"
    methods = [fixed, judged, "d2o[gate=2,num_sink_tokens=2]@100", "snapkv[window=8]@60"]
    settings = own_runs.SETTINGS | {
        "output_dir": str(tmp_path),
        "eval.methods": methods,
        "eval.tasks": ["passkey"],
        "eval.passkey_lengths": [400],
        "eval.passkey_depths": [0.0, 0.5, 1.0],
        "eval.passkey_samples": 1,
    }
    recipe = load_recipe(None, [f"{key}={json.dumps(value)}" for key, value in settings.items()])
    results = runner.evaluate(recipe, log=lambda line: None)
    parts = {name: results[name]["parts"]["passkey"] for name in methods}
    assert "decisions" not in parts[methods[3]]
    assert parts[fixed]["decisions"] == {"lazy": [0, 1, 0, 1], "mass": [None] * 4}
    run = runner.prepare(recipe, log=lambda line: None)
    model, task = run.models.get("dense"), run.tasks["passkey"]
    for name in methods[1:3]:
        alone = []
        for prompt in task.items:
            found = find_method(name)
            cache = pod.make_cache(model, found.spec, budget=found.budget, **found.options)
            alone += [one["decisions"] for one in generate(model, run.tokenizer, cache, [prompt], 12)]
        key = "mass" if name == judged else "variance"
        means = [sum(one[key][layer] for one in alone) / 3 for layer in range(4)]
        assert parts[name]["decisions"][key] == pytest.approx(means, abs=1e-9) and len(set(means)) == 4
    page = (tmp_path / "eval" / "report.md").read_text()
    assert (
        "50% of the layers were lazy, so they kept a window only (layer ratio 2.00); "
        "share of samples with a lazy layer, by layer: 0.00 1.00 0.00 1.00." in page
    )
    assert "mean tokens kept per KV head, by layer" in page


def test_a_sweep_in_one_run(place, tmp_path):
    """A sweep of two variants has two files and two answer caches.

    It has rows of its own in one order, whatever the recipe's, and no answer is asked twice.
    """
    methods = ["snapkv[window=16]@60", "snapkv[window=8]@60", "snapkv@60", "full"]
    settings = own_runs.SETTINGS | {
        "output_dir": str(tmp_path),
        "eval.methods": methods,
        "eval.tasks": ["passkey"],
        "eval.passkey_lengths": [400],
        "eval.passkey_depths": [0.0, 1.0],
        "eval.passkey_samples": 1,
        "eval.method_options": {"snapkv@60": {"window": 8}},
    }
    recipe = load_recipe(None, [f"{key}={json.dumps(value)}" for key, value in settings.items()])
    results = runner.evaluate(recipe, log=lambda line: None)
    files = {file.stem for file in (tmp_path / "eval").glob("*.json")}
    assert files == {"snapkv_window=16_@60", "snapkv_window=8_@60", "snapkv@60", "full"}
    cached = [folder.name.rpartition(".")[0] for folder in (tmp_path / "eval" / "answers").iterdir()]
    assert sorted(cached) == sorted(files)
    assert (
        len({content["row"] for content in results.values()}) == 3
    )  # snapkv@60 has the window of one of them
    assert results[methods[1]]["row"] == results["snapkv@60"]["row"] != results[methods[0]]["row"]
    said = [[one["answer"] for one in results[name]["parts"]["passkey"]["samples"]] for name in methods[1:3]]
    assert said[0] == said[1]
    assert [entry.method for entry in merge([tmp_path]).entries] == [
        "full",
        "snapkv@60",
        *sorted(methods[:2]),
    ]
    again = load_recipe(
        None, [f"{key}={json.dumps(value)}" for key, value in settings.items()] + ["eval.steps=score,report"]
    )
    assert runner.evaluate(again, log=lambda line: None).keys() == set(methods)
