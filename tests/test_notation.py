"""How a method is written: one notation, one canonical spelling, and one line for what is not a method."""

import json
import math
import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pod.notation import (
    POD,
    Budget,
    Part,
    Spec,
    cut_budget,
    parse,
    parse_budget,
    read_value,
    split,
    swap_commas,
    unknown,
    unknown_parameter,
    write_value,
)

CANONICAL = {
    "snapkv": "snapkv",
    "snapkv@4096": "snapkv@4096",
    " snapkv @ 0.25 ": "snapkv@25%",
    "snapkv@25.0%": "snapkv@25%",
    "snapkv@POD": "snapkv@pod",
    "snapkv@.5%": None,
    "pod + snapkv[window = 16] + int4@4096": "pod+snapkv[window=16]+int4@4096",
    "d2o[merge=average; alpha=2]@12.50%": "d2o[alpha=2,merge=average]@12.5%",
    "imdc( snapkv )[function=sqrt]@2048": "imdc(snapkv)[function=sqrt]@2048",
    "simlayerkv[lazy_layers=[0;1;2]]": "simlayerkv[lazy_layers=0-2]",
    "simlayerkv[lazy_layers=[0,3]]": "simlayerkv[lazy_layers=[0,3]]",
    'razor[heads="random"]': "razor[heads=random]",
    'razor[heads="0.5",compensation=false]': 'razor[compensation=false,heads="0.5"]',
    "razor[heads=runs/a@b+c/heads.json]": "razor[heads=runs/a@b+c/heads.json]",
    "model:cla[tau=null]": "model:cla[tau=null]",
}


@pytest.mark.parametrize(("text", "canonical"), CANONICAL.items())
def test_canonical_spelling(text, canonical):
    if canonical is None:
        with pytest.raises(ValueError, match="is no budget"):
            parse(text)
        return
    assert str(parse(text)) == canonical
    assert parse(canonical) == parse(text)


def test_what_a_method_says():
    found = parse("pod[tau=0.7]+snapkv[window=16,pool=avg]+int4[group_size=32]@25%")
    assert found.names == ("pod", "snapkv", "int4") and found.plain == "pod+snapkv+int4"
    assert found.params == {"tau": 0.7, "window": 16, "pool": "avg", "group_size": 32}
    assert found.budget == Budget(share=Fraction(1, 4))
    assert parse("imdc(streamingllm)").parts == (Part("imdc", "streamingllm"),)
    order = {"pod": 0, "snapkv": 1, "int4": 2}
    assert str(parse("int4+snapkv+pod@64").in_order(order.__getitem__)) == "pod+snapkv+int4@64"


WRONG = {
    "": "is no part",
    "pod++int4": "'' is no part",
    "pod+int4+": "'' is no part",
    "d2o[]": "stands each parameter once",
    "d2o[alpha]": "stands each parameter once",
    "d2o[alpha=]": "stands each parameter once",
    "d2o[alpha=2,]": "stands each parameter once",
    "d2o[alpha=2,alpha=3]": "stands each parameter once",
    "d2o[alpha=2": "'\\[' is not closed",
    "d2o[alpha=2)": "'\\)' closes nothing",
    "d2o]": "']' closes nothing",
    'd2o[alpha="2]': "a quote is not closed",
    'd2o[alpha=a"2"]': "is no JSON",
    "d2o[alpha=[1,]]": "is no JSON",
    "[alpha=2]d2o": "is no part",
    "d2o[alpha=2][beta=3]": "closes nothing",
    "d2o[alpha=2](snapkv)": "is no part",
    "d2o@25[alpha=2]": "the budget stands once, at the end",
    "snapkv@25%+int4": "the budget stands once, at the end",
    "snapkv@1@2": "the budget stands once, at the end",
    "snapkv@": "'' is no budget",
    "snapkv@0": "at least 1 token, got 0",
    "snapkv@0%": "more than 0 %",
    "snapkv@0.0": "more than 0 %",
    "snapkv@101%": "at most 100 %, got 101%",
    "snapkv@1.5": "1.5 is no budget: tokens are whole numbers",
    "snapkv@-4": "'-4' is no budget",
    "snapkv@4_096": "'4_096' is no budget",
    "snapkv@pdo": "did you mean 'pod'",
    "snap kv": "is no part",
}


@pytest.mark.parametrize(("text", "message"), WRONG.items())
def test_what_is_no_method_is_one_line(text, message):
    with pytest.raises(ValueError, match=message) as caught:
        parse(text)
    assert str(caught.value).startswith(f"method {text!r}: ") and "\n" not in str(caught.value)


def test_a_method_is_a_text():
    with pytest.raises(ValueError, match="method 3 must be a text, such as 'snapkv@25%'"):
        parse(3)


@pytest.mark.parametrize(
    ("said", "budget"),
    [
        (4096, Budget(tokens=4096)),
        ("4096", Budget(tokens=4096)),
        (0.25, Budget(share=Fraction(1, 4))),
        (0.1, Budget(share=Fraction(1, 10))),
        (1e-05, Budget(share=Fraction(1, 100_000))),
        ("25%", Budget(share=Fraction(1, 4))),
        ("100%", Budget(share=Fraction(1))),
        ("pod", POD),
    ],
)
def test_budgets_of_numbers_and_texts(said, budget):
    assert parse_budget(said) == budget


@pytest.mark.parametrize("said", [True, None, [4], -1, 0, 1.0, 2.5, 0.0, "0.25.1", "1e5", float("nan"), "٤"])
def test_what_is_no_budget_is_refused(said):
    with pytest.raises(ValueError, match="budget|share"):
        parse_budget(said)


@pytest.mark.parametrize(("length", "tokens"), [(1002, 250), (1000, 250), (3, 1), (4, 1), (0, 1)])
def test_a_share_is_rounded_down_and_at_least_one_token(length, tokens):
    assert Budget(share=Fraction(1, 4)).of_prompt(length) == tokens


def test_budgets_that_do_not_follow_the_prompt():
    assert Budget(tokens=64).of_prompt(7) == 64
    # a float's nearest fraction would give 29
    assert parse_budget("29%").of_prompt(100) == parse_budget(0.29).of_prompt(100) == 29
    with pytest.raises(ValueError, match="depends on a plan"):
        POD.of_prompt(64)


def test_nearest_names():
    assert str(unknown("method", "snapvk", ["full", "snapkv"])) == (
        "unknown method 'snapvk'; did you mean 'snapkv'? known: full, snapkv"
    )
    assert str(unknown("method", "xyz", ["full"])) == "unknown method 'xyz'; known: full"
    assert str(unknown_parameter("snapkv", "windwo", ["window", "kernel"])) == (
        "snapkv has no parameter 'windwo'; did you mean 'window'?"
    )
    assert str(unknown_parameter("wa", "x", [])) == "wa has no parameter 'x'; it has none"


# -- whatever is written --------------------------------------------------------------------

NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_-]{0,8}", fullmatch=True)
KEYS = st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
BUDGETS = st.one_of(
    st.none(),
    st.just(POD),
    st.builds(Budget, tokens=st.integers(1, 10**12)),
    st.builds(
        lambda part: Budget(share=Fraction(part, 10**8)),
        st.integers(1, 10**8),
    ),
)
PARTS = st.builds(Part, NAMES, st.none() | NAMES, st.dictionaries(KEYS, VALUES, max_size=3))
SPECS = st.builds(Spec, st.lists(PARTS, min_size=1, max_size=4).map(tuple), BUDGETS)


@pytest.mark.slow
@given(SPECS)
def test_the_canonical_text_of_any_method_reads_as_that_method(spec):
    assert parse(str(spec)) == spec
    assert str(parse(str(spec))) == str(spec)


@given(SPECS)
def test_semicolons_stand_for_commas_inside_brackets(spec):
    """As lm-eval's arguments need them: outside of quotes no comma is left."""
    swapped = swap_commas(str(spec))
    assert "," not in re.sub(r'"(?:[^"\\]|\\.)*"', "", swapped)
    assert parse(swapped) == spec


@given(st.text(alphabet='abc[](){}@+,;=:"\\%0.19- \n', max_size=24))
def test_any_text_is_a_method_or_one_line(text):
    try:
        found = parse(text)
    except ValueError as error:
        assert "\n" not in str(error)
    else:
        assert parse(str(found)) == found


@given(VALUES)
def test_values_survive(value):
    assert read_value(write_value(value)) == value
    assert type(read_value(write_value(value))) is type(value)


@given(st.lists(st.text(alphabet="ab+[](),=", max_size=8), min_size=1, max_size=5))
def test_pieces_are_the_text_again(pieces):
    text = "@".join(pieces)
    try:
        found = split(text, "@")
    except ValueError:
        return
    assert "@".join(found) == text
    assert all(piece.count("[") == piece.count("]") for piece in found)


@given(st.integers(0, 10**7), st.integers(1, 1000))
def test_a_share_of_a_prompt_is_a_floor(length, thousandths):
    tokens = Budget(share=Fraction(thousandths, 1000)).of_prompt(length)
    assert tokens == max(1, math.floor(length * thousandths / Fraction(1000)))
    assert json.loads(json.dumps(tokens)) == tokens <= max(1, length)


@pytest.mark.parametrize(
    "text, name, budget",
    [
        ("snapkv@25%", "snapkv", "25%"),
        ("pod+snapkv[window=16]+int4@4096", "pod+snapkv[window=16]+int4", "4096"),
        ("h2o@0.25", "h2o", "0.25"),
        ("snapkv@pod", "snapkv", "pod"),
        ("full", "full", ""),
        ("pod", "pod", ""),
        ('razor[heads="/data/me@home/heads.json"]', 'razor[heads="/data/me@home/heads.json"]', ""),
        ('razor[heads="a@25%"]@50%', 'razor[heads="a@25%"]', "50%"),
        ("model:mine@work", "model:mine@work", ""),
        ("/runs/me@home/export", "/runs/me@home/export", ""),
        ("@25%", "@25%", ""),
        ("", "", ""),
    ],
)
def test_a_name_is_cut_at_its_budget_and_nowhere_else(text, name, budget):
    assert cut_budget(text) == (name, budget)
