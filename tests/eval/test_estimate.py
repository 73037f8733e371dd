"""`pod eval --dry-run` counts the tokens that the evaluation will read."""

import json
import re

import pytest
from own_runs import PLAN, SETTINGS, SMALL_TASKS, write_place

import pod
from pod.eval import runner
from pod.eval.estimate import estimate
from pod.recipe import load_recipe


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = write_place(tmp_path_factory.mktemp("estimate"))
    pod.SharingPlan(lead=PLAN.lead, bits=(16, 16, 4, 4)).save(folder / "packed.json")
    return folder


def recipe_of(place, methods, tasks, **changes):
    settings = (
        SETTINGS | SMALL_TASKS | {"output_dir": str(place / "out"), "eval.text": [str(place / "text.txt")]}
    )
    settings |= {"eval.methods": methods, "eval.tasks": tasks}
    settings |= {key.replace("__", "."): value for key, value in changes.items()}
    return load_recipe(None, [f"{key}={json.dumps(value)}" for key, value in settings.items()])


def counted(text):
    """(prompt tokens, decode steps) by method."""
    rows = re.findall(r"^  (\S+) +([\d,]+) prompt tokens +([\d,]+) decode steps$", text, re.MULTILINE)
    return {name: tuple(int(number.replace(",", "")) for number in numbers) for name, *numbers in rows}


@pytest.mark.parametrize("plan", ["plan.json", "packed.json"])
def test_the_estimate_counts_what_the_tasks_will_read(place, plan):
    """Under a plan that packs keys and values, one forward pass does not equal the decode path."""
    methods = ["full", "pod-unadapted", "snapkv@64", "snapkv[window=16]@64"]
    recipe = recipe_of(place, methods, ["perplexity", "passkey"], model__plan=str(place / plan))
    run = runner.prepare(recipe, log=lambda line: None)
    found = counted(estimate(recipe))
    assert list(found) == methods
    for name, one in run.method_runners.items():
        counts = [task.token_counts(one.method) for task in run.tasks.values()]
        assert found[name] == tuple(map(sum, zip(*counts, strict=True))), name
    decoded = found["pod-unadapted"][1] > found["full"][1]
    assert decoded == (plan == "packed.json")


def efficiency(place, **options):
    changes = {f"eval.task_options.efficiency.{name}": value for name, value in options.items()}
    text = estimate(recipe_of(place, ["full", "streamingllm@64"], ["efficiency"], **changes))
    return counted(text), text


def test_the_estimate_counts_every_reading_of_the_speed_run(place):
    """The prompt has 300 tokens, a warm-up pass 16 of them; three rounds decode two tokens each."""
    found, text = efficiency(place, memory=False)
    assert found == dict.fromkeys(found, (300 + 16, 6)) and len(found) == 2
    assert "Not counted" not in text and "at least" not in text
    assert efficiency(place, memory=False, prefill_repeats=5)[0]["full"] == (5 * 300 + 16, 6)
    assert efficiency(place, memory=True)[0]["full"] == (2 * 300 + 16, 6 + 4)


def test_the_estimate_counts_filled_caches_for_methods_without_a_budget(place):
    found, _ = efficiency(place, memory=False, decode_lengths=[1000, 2000])
    assert found == {"full": (300 + 16 + 2, 3 * 6), "streamingllm@64": (300 + 16, 6)}


def test_the_estimate_counts_the_first_tries_of_a_search_and_says_so(place):
    """One and two rows are tried, and the speed is measured at two rows."""
    found, text = efficiency(place, memory=False, max_batch=[[50, 10]], memory_limit_gib=1)
    assert found["full"] == (300 + 16 + 5 * 50, 6 + 3 * 9)
    assert "efficiency.max_batch" in text and "at least" in text
    found, text = efficiency(place, memory=False, longest_prompt=64, memory_limit_gib=1)
    assert found["full"] == (300 + 16 + 64, 6)
    assert "efficiency.longest_prompt" in text and "at least" in text


def test_a_speed_run_is_counted_even_where_tasks_cannot_be_built(place):
    text = estimate(recipe_of(place, ["full"], ["perplexity", "efficiency"], eval__text=["/nowhere.txt"]))
    assert counted(text)["full"] == (2 * 300 + 16, 6 + 4)
    assert "Not counted: perplexity." in text
    text = estimate(recipe_of(place, ["full"], ["perplexity"], eval__text=["/nowhere.txt"]))
    assert counted(text) == {} and "Not counted: perplexity." in text
