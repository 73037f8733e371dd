"""The prompts of benchmarks/varied_keys.py: none is like another."""

import pytest

import pod
from pod.models import resolve_model


@pytest.fixture(scope="module")
def tokenizer():
    return pod.load_tokenizer(resolve_model("package:tiny"))


def test_prompts_differ_and_hide_their_number_once(script, tokenizer):
    keys = script("varied_keys")
    prompts = keys.repeated_prompts(tokenizer, length=600, count=12)
    assert len({prompt.key for prompt in prompts}) == 12
    wordings = set()
    for prompt in prompts:
        lines = prompt.text.removeprefix(keys.TASK).split("\n")
        wordings.add((lines[-2], max(set(lines), key=lines.count)))
        assert sum(prompt.key in line for line in lines) == 1
        assert prompt.key not in lines[-1]
        assert len(prompt.token_ids) <= 600
        assert 0 < prompt.num_asked < 100
    assert len(wordings) == 12
    places = [prompt.text.index(prompt.key) / len(prompt.text) for prompt in prompts]
    assert places[0] < 0.4 < 0.6 < places[-1]


def test_no_fact_is_worded_as_in_the_prompts_that_price_retrieval(script):
    from pod.plan.needles import FACTS

    begun = {answer.format(word="", number="").strip().lower() for _, answer in FACTS}
    assert not begun & {answer.lower() for *_, answer in script("varied_keys").FACTS}
