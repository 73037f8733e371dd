"""Specs: what they mean, what is refused and why, and the catalogue that says so."""

import math
import subprocess
import sys
from pathlib import Path

import pytest

import pod
from pod.eval.catalogue import combinations, describe
from pod.notation import parse
from pod.registry.combine import chosen_methods, in_order

PROMISED = [
    "pod+snapkv",
    "pod+pyramidkv",
    "pod+expected_attention",
    "pod+quest",
    "adakv+int4",
    "kvzip+int4",
    "pod+int4",
    "simlayerkv+int4",
    "razor+int4",
    "d2o+int4",
    "pod+snapkv+int4",
    "imdc(snapkv)",
    "snapkv+think",
    "adakv+think+int4",
]


def options_of(spec):
    methods = [pod.methods()[part.split("(")[0]] for part in spec.split("+")]
    options = {"budget": 64} if any(method.takes_budget for method in methods) else {}
    if "razor" in spec:
        options["heads"] = [[0], [], [1], [], []]
    if any("window" in method.parameters for method in methods) and "simlayerkv" not in spec:
        options["window"] = 8
    if "int4" in spec:
        options["group_size"] = 8
    if "kvzip" in spec:
        options["repeat_ids"] = [[1], [2], [3]]
    return options


@pytest.mark.parametrize("spec", PROMISED)
def test_promised_combinations_can_be_made(tools, spec):
    model = tools.make_pod("llama", plan="pod" in spec)
    cache = pod.make_cache(model, spec, **options_of(spec))
    model(tools.random_ids(2, 20), past_key_values=cache)
    assert cache.spec == spec and cache.nbytes > 0


def test_order_and_spaces_do_not_matter():
    chosen, inner = chosen_methods(parse(" int4 +snapkv + pod"))
    assert {axis: method.name for axis, method in chosen.items()} == {
        "layout": "pod",
        "selection": "snapkv",
        "codec": "int4",
    }
    assert inner is None
    assert str(in_order(parse(" int4 +snapkv + pod"))) == "pod+snapkv+int4"
    assert chosen_methods(parse("imdc"))[1] == "snapkv"
    assert chosen_methods(parse("imdc( streamingllm )"))[1] == "streamingllm"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("snapkv+h2o", "snapkv and h2o both decide which tokens stay: use one of them"),
        ("int4+int8", "int4 and int8 both decide how many bits each number has"),
        ("full+pod", "full and pod both decide which layers keep keys and values"),
        (
            "h2o+think",
            "think works only after a method that ranks the prompt: snapkv, pyramidkv, adakv, "
            "expected_attention",
        ),
        ("pod+snapkv+think", "heads of this layout"),
        ("snapkw", "did you mean 'snapkv'"),
        ("", "method '': '' is no part"),
        ("pod+", "method 'pod.': '' is no part"),
        ("snapkv(h2o)", r"'snapkv\(h2o\)' is not possible; choose snapkv alone"),
        ("imdc(h2o)", r"choose imdc\(snapkv\), imdc\(streamingllm\)"),
        ("imdc(snapkv", "is not closed"),
        ("int4[window=8]+snapkv", r"int4 has no parameter 'window', snapkv has: write snapkv\[window=8\]"),
        ("snapkv[windwo=8]", "snapkv has no parameter 'windwo'; did you mean 'window'"),
        ("pod+h2o", "'pod\\+h2o' is not possible: each layer drops tokens"),
        ("pod+streamingllm", "'pod\\+streamingllm' is not possible: "),
        ("pod+imdc(snapkv)", "is not possible: "),
    ],
)
def test_specs_that_cannot_be(tools, spec, message):
    with pytest.raises(ValueError, match=message):
        pod.make_cache(tools.make_pod("llama"), spec, budget=64)


def test_parameters_belong_to_the_methods_of_the_spec(tools):
    model = tools.make_pod("llama", plan=False)
    with pytest.raises(ValueError, match=r"snapkv\+int4 has no parameter 'resdual'; did you mean 'residual'"):
        pod.make_cache(model, "snapkv+int4", budget=64, resdual=3)
    with pytest.raises(ValueError, match="window = 8.5 must be a whole number"):
        pod.make_cache(model, "snapkv", budget=64, window=8.5)
    with pytest.raises(ValueError, match="window = True must be a whole number"):
        pod.make_cache(model, "snapkv", budget=64, window=True)
    with pytest.raises(ValueError, match="budget"):
        pod.make_cache(model, "snapkv", budget=0)


WRONG = {
    int: (None, 2.0, "12", [1]),
    float: (None, True, "0.5", [1], math.nan),
    bool: (None, 0, "no"),
    str: (None, 3, [1]),
}


@pytest.mark.parametrize("spec", pod.methods())
def test_a_value_of_another_kind_is_refused_in_one_line(tools, spec):
    """Before anything is computed: a text where a number belongs must not surface in a comparison later."""
    model, method = tools.make_pod("llama", plan=False), pod.methods()[spec]
    needed = {"razor": {"heads": [[]] * 5}, "kvzip": {"repeat_ids": [[3], [4], [5]]}}
    options = ({"budget": 64} if method.takes_budget else {}) | needed.get(spec, {})
    for name, parameter in method.parameters.items():
        for value in WRONG.get(type(parameter.default), ()):
            with pytest.raises(
                ValueError, match=rf"^{spec}: {name} = .+ must be (a|True) [^\n]+, as [^\n]+$"
            ):
                pod.make_cache(model, spec, **options | {name: value})


def test_a_budget_is_a_whole_number(tools):
    model = tools.make_pod("llama", plan=False)
    for budget in (None, 0, -1, 64.0, True, "many", math.inf, math.nan, [64.0], [], (8, 9)):
        with pytest.raises(ValueError, match=r"^[^\n]*(needs a budget|no budget|at least 1 token)[^\n]*$"):
            pod.make_cache(model, "h2o", budget)


def test_a_spec_is_a_string_and_capitals_get_a_hint(tools):
    model = tools.make_pod("llama", plan=False)
    for spec in (3, ["snapkv"], b"snapkv"):
        with pytest.raises(ValueError, match="^method .* must be a text, such as"):
            pod.make_cache(model, spec, budget=64)
    with pytest.raises(ValueError, match="unknown method 'SnapKV'; did you mean 'snapkv'"):
        pod.make_cache(model, "SnapKV", budget=64)


def test_a_plan_needs_a_layout(tools):
    with pytest.raises(ValueError, match=r"snapkv needs a model without a sharing plan: .* 'pod\+snapkv'"):
        pod.make_cache(tools.make_pod("llama"), "snapkv", budget=64)


def test_every_pair_is_either_possible_or_refused_with_a_reason(tools):
    """What the catalogue says is what ``make_cache`` does."""
    stock, registry = tools.make_stock("llama"), pod.methods()
    models = {name: pod.load_model(stock, layout=name, num_recent_tokens=9) for name in ("cla", "window")}
    models |= {"full": tools.make_pod("llama", plan=False), "pod": tools.make_pod("llama")}
    pairs = {spec: reason for name in registry for spec, reason in combinations(name).items()}
    assert len(pairs) > 50
    for spec, reason in pairs.items():
        model = models.get(spec.split("+")[0], models["full"])
        if reason is None:
            assert pod.make_cache(model, spec, **options_of(spec)).spec == spec
        else:
            with pytest.raises(ValueError, match="is not possible"):
                pod.make_cache(model, spec, **options_of(spec))


def test_catalogue_names_everything():
    text = describe()
    for name, method in pod.methods().items():
        assert name in text
        assert all(parameter in text for parameter in method.parameters)
    assert all(len(line) <= 110 for line in text.splitlines())


@pytest.mark.slow
def test_run_eval_lists_methods():
    script = Path(__file__).parents[2] / "launch" / "run_eval.py"
    done = subprocess.run(
        [sys.executable, script, "--list-methods"], capture_output=True, text=True, timeout=3600, check=True
    )
    assert done.stdout.strip() == describe().strip()
