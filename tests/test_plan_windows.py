"""A plan carries the windows that it was made for.

Every place that gives a model a plan takes them, and warns of others.
"""

import json
import warnings
from dataclasses import replace

import pytest
import torch

import pod
from pod.bench.run import load, plan_bench
from pod.eval.answer.model_set import Models
from pod.eval.lm.command import CommandLM
from pod.modeling.model.sink_constants import SinkConstants
from pod.models import resolve_model
from pod.recipe import load_recipe
from pod.training.run.start_model import model_config

LEAD = ((0, 0), (None, 1), (0, None), (3, None))
MADE = {"algorithm": "dp", "sequence_length": 2000, "plan_cost": 0.0125}
OWN = {"num_sink_tokens": 4, "num_recent_tokens": 28}


@pytest.fixture
def plan():
    return pod.SharingPlan(LEAD, MADE, **OWN)


@pytest.fixture
def file(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    return tmp_path / "plan.json"


def windows_of(config):
    return {name: getattr(config, name) for name in OWN}


def held(model):
    """Bytes of a cache after 2,000 tokens."""
    cache = pod.make_cache(model)
    with torch.no_grad():
        model(torch.arange(2000)[None] % 250, past_key_values=cache, logits_to_keep=1)
    return cache.nbytes


def test_a_model_takes_the_windows_of_its_plan(file, recwarn):
    """The documented way: a plan, no training."""
    folder = resolve_model("package:tiny")
    model = pod.load_model(folder, plan=file)
    assert windows_of(model.config) == OWN
    named = pod.load_model(folder, plan=file, **OWN)
    assert held(model) == held(named) < 0.7 * held(pod.load_model(folder))
    again = pod.load_model(model, plan=model.config.sharing_plan)
    assert windows_of(again.config) == OWN and windows_of(model.config.sharing_plan) == OWN
    assert not [one for one in recwarn if "windows" in str(one.message)]


@pytest.mark.parametrize("schema", [1, 2])
def test_older_files_say_the_windows_in_their_provenance(plan, schema, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"schema": schema, "lead": LEAD, "provenance": MADE | OWN}))
    assert windows_of(pod.SharingPlan.load(path)) == OWN
    path.write_text(json.dumps({"schema": schema, "lead": LEAD}))
    none = pod.SharingPlan.load(path)
    assert windows_of(none) == dict.fromkeys(OWN) and none == plan, "equality is of roles"
    assert pod.load_model(resolve_model("package:tiny"), plan=none).config.num_recent_tokens == 4080


def test_other_windows_are_a_warning_that_names_both_costs(plan):
    own, other = plan.saving(2000), plan.saving(2000, 16, 4080)
    assert own > 0.3 and other == 0.0
    with pytest.warns(UserWarning) as seen:
        model = pod.load_model(
            resolve_model("package:tiny"), plan=plan, num_sink_tokens=16, num_recent_tokens=4080
        )
    (said,) = [str(one.message) for one in seen]
    for words in ("16 first and 4080 last", "4 and 28", f"{own:.1%}", "yours 0.0%", "0.0125", "2,000 tokens"):
        assert words in said
    assert windows_of(model.config) == {"num_sink_tokens": 16, "num_recent_tokens": 4080}
    with pytest.warns(UserWarning, match="windows of 4 first and 9 last"):
        model = pod.load_model(resolve_model("package:tiny"), plan=plan, num_recent_tokens=9)
    assert windows_of(model.config) == {"num_sink_tokens": 4, "num_recent_tokens": 9}


def recipe_with(file, *settings):
    return load_recipe(None, [f"output_dir={file.parent}", "model.path=package:tiny", *settings])


def windows_in_training(recipe):
    return windows_of(model_config(recipe.model, recipe.output_dir)[0])


def windows_in_evaluation(recipe):
    recipe = replace(recipe, eval=replace(recipe.eval, methods=["full", "pod-unadapted"]))
    models = Models(recipe)
    assert models.windows("dense") == models.windows("unadapted")
    return windows_of(models.get("unadapted").config)


def windows_in_bench(recipe):
    sizes = plan_bench(recipe)[0]
    assert set(sizes.windows) == {(sizes.plan.num_sink_tokens, sizes.plan.num_recent_tokens)}
    return windows_of(sizes.plan)


@pytest.mark.parametrize("found", [windows_in_training, windows_in_evaluation, windows_in_bench])
@pytest.mark.parametrize("place", ["model.plan", "output_dir"])
def test_recipes_take_the_windows_of_the_plan(found, place, file, tmp_path):
    """A recipe that names no windows has the plan's; others are taken, with a warning."""
    settings = [] if place == "model.plan" else [f"output_dir={tmp_path / 'run'}"]
    if place == "output_dir":
        (tmp_path / "run" / "plan").mkdir(parents=True)
        file.rename(tmp_path / "run" / "plan" / "plan.json")
    else:
        settings = [f"model.plan={file}"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert found(recipe_with(file, *settings)) == OWN
    with pytest.warns(UserWarning, match="the plan was made for 4 and 28"):
        changed = found(recipe_with(file, *settings, "model.num_recent_tokens=60"))
    assert changed == {"num_sink_tokens": 4, "num_recent_tokens": 60}


def with_constants(plan):
    """The same plan with constants in the place of its first tokens.

    The sizes are those of ``package:tiny``.
    """
    has = [None in row for row in LEAD]
    logits = tuple((1.0,) * 4 if one else None for one in has)
    values = tuple(((0.5,) * 16,) * 2 if one else None for one in has)
    constants = SinkConstants(logits, values)
    return replace(plan, sinks="constant", num_sink_tokens=0, sink_constants=constants)


@pytest.mark.parametrize("found", [windows_in_training, windows_in_evaluation, windows_in_bench])
def test_recipes_take_the_sinks_of_the_plan(found, plan, file):
    """Constants need no slot; a recipe that asks for tokens has as many as usual, with a warning."""
    with_constants(plan).save(file)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert found(recipe_with(file, f"model.plan={file}")) == {**OWN, "num_sink_tokens": 0}
    with pytest.warns(UserWarning, match="sinks = 'tokens', the plan was made for 'constant'"):
        changed = found(recipe_with(file, f"model.plan={file}", "model.sinks=tokens"))
    assert changed == {**OWN, "num_sink_tokens": 16}


def test_evaluation_and_bench_load_the_constants(plan, file):
    with_constants(plan).save(file)
    recipe = recipe_with(file, f"model.plan={file}")
    evaluated = Models(replace(recipe, eval=replace(recipe.eval, methods=["full", "pod-unadapted"])))
    assert evaluated.get("unadapted").model.layers[1].self_attn.sinks.tolist() == [1.0] * 4
    planned = load(recipe, plan_bench(recipe), [torch.device("cpu")]).planned
    assert planned.config.sinks == "constant" and planned.model.layers[1].self_attn.sinks.shape == (4,)


def test_lm_eval_takes_the_windows_of_the_plan(file):
    folder = str(resolve_model("package:tiny"))
    assert windows_of(CommandLM(folder, method="pod", plan=str(file)).model.config) == OWN


@pytest.mark.parametrize(
    ("sinks", "recent"), [(None, 8), (4, None), (-1, 8), (4, 0), (4.0, 8), (True, 8), ("4", 8)]
)
def test_impossible_windows_are_refused(sinks, recent):
    with pytest.raises(ValueError, match="num_sink_tokens must be an integer >= 0") as seen:
        pod.SharingPlan(LEAD, num_sink_tokens=sinks, num_recent_tokens=recent)
    assert "\n" not in str(seen.value)


def test_a_saving_needs_windows():
    with pytest.raises(ValueError, match="does not record its windows: give num_sink_tokens"):
        pod.SharingPlan(LEAD).saving(100)


@pytest.mark.parametrize("changes", [{"sinks": "none"}, {"sinks": "constant"}, {"layout": "window"}])
def test_windows_without_stored_tokens_hold_as_many_tokens(changes):
    """4,096, as 16 and 4080 do."""
    assert windows_of(pod.PodConfig(**changes)) == {"num_sink_tokens": 0, "num_recent_tokens": 4096}
