"""The eval section: bad input is one line that says what is allowed."""

from pathlib import Path

import pytest

import pod
from pod.eval.answer.methods import EVALUATED_METHODS, find_method
from pod.eval.args import EvalArgs
from pod.eval.method_and_task_lists import list_methods
from pod.eval.runner import prepare
from pod.eval.suites.buckets import position_buckets, token_counts
from pod.eval.suites.task_base import make_options, side_by_side_tasks
from pod.eval.tasks.passkey import Passkey
from pod.recipe import Recipe, load_recipe

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("snapvk", "snapkv"), ("streaming-llm", "streamingllm"), ("POD", "pod"), ("fulll", "full")],
)
def test_unknown_method_names_the_nearest(name, nearest):
    with pytest.raises(ValueError, match=f"unknown method '{name}'; did you mean '{nearest}'"):
        EvalArgs(methods=[name])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"methods": []}, "at least one method"),
        ({"methods": ["full", "full"]}, "twice"),
        ({"text_sequences": 0}, "text_sequences is 0: it should be greater than 0"),
        ({"passkey_lengths": []}, "passkey_lengths is empty"),
        ({"passkey_depths": [1.5]}, "passkey_depths\\[0\\] is 1.5: it should be less than or equal to 1"),
        ({"text_length": 256, "min_context": 256}, "less than text_length = 256"),
    ],
)
def test_wrong_values(values, message):
    with pytest.raises(ValueError, match=message) as caught:
        EvalArgs(**values)
    assert "\n" not in str(caught.value)


def test_methods_that_drop_tokens_are_never_scored_in_one_pass():
    assert not any(method.takes_budget and method.one_shot for method in EVALUATED_METHODS.values())


def test_every_method_can_be_evaluated_but_layouts_that_weights_were_trained_with():
    for name, method in pod.methods().items():
        if method.trained:
            with pytest.raises(ValueError, match=f"unknown method '{name}'"):
                find_method(name)
        else:
            found = find_method(name)
            assert (found.name, found.takes_budget) == (name, method.takes_budget)
            if method.axis != "layout":
                assert find_method(f"{name}+pod-unadapted").spec == f"pod+{name}"


def test_every_method_has_its_parameters_in_the_list():
    for name in EVALUATED_METHODS:
        assert "source: " in list_methods([name]), name
    assert list_methods(["pod", "pod-unadapted"]) == list_methods(["pod"])


def test_a_task_without_options_says_that_it_has_none():
    with pytest.raises(ValueError, match="unknown key 'foo' in eval.task_options.passkey; valid keys: none$"):
        make_options(Passkey, {"foo": 1})


def test_a_name_is_canonical_however_it_is_written():
    args = EvalArgs(
        methods=["full", "int4 + snapkv[window=8; kernel=3] @0.25", "h2o@pod"],
        method_options={"snapkv[kernel=3,window=8]+int4@25%": {"residual": 8}},
    )
    assert args.methods == ["full", "snapkv[kernel=3,window=8]+int4@25%", "h2o"]
    assert args.method_options[args.methods[1]] == {"residual": 8, "kernel": 3, "window": 8}
    for twice in (["snapkv", "snapkv@pod"], ["snapkv@25%", "snapkv@0.25"], ["pod+int4", "int4+pod"]):
        with pytest.raises(ValueError, match="names one method twice"):
            EvalArgs(methods=twice)
    with pytest.raises(ValueError, match="method_options names one method twice"):
        EvalArgs(methods=["full"], method_options={"snapkv@25%": {}, "snapkv@0.25": {}})


def test_combinations_are_methods_too():
    both = find_method("pod+snapkv+int4")
    assert (both.model, both.takes_budget, both.one_shot) == ("adapted", True, False)
    assert find_method("pod-unadapted+int4").spec == "pod+int4"
    assert find_method("pod-unadapted+int4").model == "unadapted"
    assert find_method("imdc(streamingllm)").takes_budget
    with pytest.raises(ValueError, match="unknown method 'snap'"):
        find_method("pod+snap")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"snapkw": {}}, "unknown method 'snapkw'; did you mean 'snapkv'"),
        ({"snapkv": 3}, "method_options.snapkv is 3: it should be a valid dictionary"),
        ([1], "method_options is .1.: it should be a valid dictionary"),
    ],
)
def test_wrong_method_options(options, message):
    with pytest.raises(ValueError, match=message):
        EvalArgs(methods=["full", "snapkv"], method_options=options)


@pytest.mark.nightly
@pytest.mark.slow
def test_a_run_may_ask_less_than_its_recipe_has_options_for(tmp_path):
    """`--methods full --tasks perplexity` on a recipe with options for razor and for a task of its own."""
    asked = ["eval.methods=full,pod-unadapted", "eval.tasks=perplexity", f"output_dir={tmp_path}"]
    for name in ("demo", "eval_efficiency"):
        assert load_recipe(ROOT / "configs" / f"{name}.yaml", asked).eval.tasks == ["perplexity"]
    options = ["eval.methods=full", "eval.task_options={perplexety: {}}"]
    recipe = load_recipe(ROOT / "configs" / "demo_tiny.yaml", [*asked, *options])
    with pytest.raises(ValueError, match="unknown task 'perplexety'; did you mean 'perplexity'"):
        prepare(recipe, log=lambda line: None)


def test_the_longest_speed_run_counts_the_warm_up_round():
    args = EvalArgs(
        tasks=["efficiency"],
        efficiency_lengths=[64, 32],
        efficiency_tokens=9,
        efficiency_repeats=3,
        task_options={"efficiency": {"decode_lengths": [100, 70]}},
    )
    (task,) = side_by_side_tasks(Recipe(eval=args)).values()
    assert task.load_tokens() == 64 + 9 * (3 + 1)
    assert task.longest() == 100 + 9 * (3 + 1), "caches that are filled with random tokens count too"


def test_position_buckets_double_and_score_their_end():
    assert [(b.start, b.end, b.first) for b in position_buckets(1500, 256, 100)] == [
        (256, 512, 412),
        (512, 1024, 924),
        (1024, 1500, 1400),
    ]


def test_position_buckets_score_everything_when_asked():
    buckets = position_buckets(64, 8, 1000)
    assert [bucket.first for bucket in buckets] == [8, 16, 32]
    assert sum(bucket.scored for bucket in buckets) == 64 - 8


def test_token_counts_of_texts():
    buckets = position_buckets(64, 16, 4)
    # buckets end at 32 and 64: contexts 27 and 59 tokens, 4 decode steps each, 2 batches
    assert token_counts(buckets, 3, 64, 2, one_shot=False) == (3 * (27 + 59), 2 * 8)
    assert token_counts(buckets, 3, 64, 2, one_shot=True) == (3 * 64, 0)
