"""What windows cost where a number must be retrieved, against differences of the divergence."""

import itertools
import random
import re

import pytest
import torch
from plan_models import log_probabilities, make_model, sinks_at_random
from transformers import AutoTokenizer

from pod.models import resolve_model
from pod.plan.costs import SHARE, measure_retrieval
from pod.plan.needles import FACTS_OF_A_PROMPT, WORDS, Prompt, _Fact, needle_prompts

TOKENS = 29


@pytest.mark.parametrize("heads", [(6, 2), (3, 3), (4, 1)])
@pytest.mark.parametrize("constant", [False, True])
@torch.no_grad()
def test_costs_are_derivatives_of_the_divergence(heads, constant):
    model = make_model(*heads, **({"sinks": 0, "recent": 7} if constant else {}))
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 61, (1, TOKENS), generator=generator)
    answers = torch.tensor([20, 21, 27])
    sinks = sinks_at_random(*heads, generator) if constant else None
    found = measure_retrieval(model, Prompt(ids[0], answers), sinks)
    dense = model(ids, use_cache=False).logits[0].log_softmax(-1)[answers]

    def divergence(shares):
        own = log_probabilities(model, ids, shares, sinks)[answers]
        return (dense.exp() * (dense - own)).sum(-1).mean()

    for layer, head in itertools.product(range(4), range(heads[1])):
        step = torch.zeros(4, heads[1]).double()
        step[layer, head] = 1e-5
        above, below = divergence(SHARE + step), divergence(SHARE - step)
        expected = (above - below) / 2e-5 / (2 * SHARE)
        assert found[layer, head].item() == pytest.approx(max(0.0, expected.item()), rel=1e-5, abs=1e-9)
    assert found.abs().max() > 1e-4


def test_prompts_ask_for_numbers_that_stand_far_back():
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("package:tiny"))
    texts = [torch.randint(0, 200, (n,), generator=torch.Generator().manual_seed(n)) for n in (300, 420)]
    prompts = needle_prompts(tokenizer, texts, 8, windows=(20, 80), longest=10_000, seed=1)
    for prompt in prompts:
        after = prompt.answers + 1
        assert (after < len(prompt.input_ids)).all() and (after.diff() > 0).all()
        answers = tokenizer.decode(prompt.input_ids[after]).split()
        assert len(answers) == FACTS_OF_A_PROMPT and all(answer.isdigit() for answer in answers)
        stated = tokenizer.decode(prompt.input_ids[: int(prompt.answers[0]) - 100])
        assert all(answer in stated for answer in answers)
        assert any(word in stated for word in WORDS)
    again = needle_prompts(tokenizer, texts, 8, windows=(20, 80), longest=10_000, seed=1)
    assert all(torch.equal(a.input_ids, b.input_ids) for a, b in zip(prompts, again, strict=True))


def test_prompts_are_as_long_as_texts_and_ask_for_what_stands_anywhere_in_them():
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("package:tiny"))
    texts = [torch.arange(1900) % 211]
    for prompt in needle_prompts(tokenizer, texts, 4, windows=(20, 80), longest=10_000):
        assert len(prompt.input_ids) > 1900
        answers = tokenizer.decode(prompt.input_ids[prompt.answers + 1]).split()
        halves = [tokenizer.decode(half) for half in prompt.input_ids[:1900].split(950)]
        assert all(any(answer in half for answer in answers) for half in halves)


def test_texts_as_long_as_the_model_reads_are_cut_and_keep_their_facts():
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("package:tiny"))
    for prompt in needle_prompts(tokenizer, [torch.arange(3000) % 211], 4, windows=(16, 1500), longest=3000):
        assert 2800 < len(prompt.input_ids) <= 3000
        answers = tokenizer.decode(prompt.input_ids[prompt.answers + 1]).split()
        assert len(answers) == FACTS_OF_A_PROMPT


def test_a_passage_is_repeated():
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("package:tiny"))
    text = torch.arange(500) % 211
    prompt = needle_prompts(tokenizer, [text], 2, windows=(20, 80), longest=10_000)[1]
    ids = prompt.input_ids.tolist()
    places = itertools.product(range(int(prompt.answers[0]) - 160), (20, 40, 80))
    assert any(ids[at : at + 20] == ids[at + size : at + size + 20] for at, size in places)


def test_prompts_begin_as_texts_do_and_fit_the_model():
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("package:tiny"))
    tokenizer.bos_token = tokenizer.convert_ids_to_tokens(7)
    texts = [torch.tensor([7, *range(20, 420)])]
    for prompt in needle_prompts(tokenizer, texts, 6, windows=(9, 20), longest=1500):
        ids = prompt.input_ids.tolist()
        assert ids[0] == 7 and len(ids) <= 1500
        assert 7 not in ids[1:10] and max(ids[:10]) >= 20, "no fact among the first tokens of a window"
        assert ids[1:10] == [*range(ids[1], ids[1] + 9)], "the text begins as it stands"
    without = needle_prompts(tokenizer, [texts[0][1:]], 1, windows=(9, 20), longest=1500)[0]
    assert without.input_ids[0] != 7


def test_an_answer_is_cut_where_question_and_answer_are_read_together():
    """Here a word takes the space in front of it, and one at the beginning gets a token of its own."""

    def tokenizer(text, add_special_tokens):
        assert not add_special_tokens
        return {"input_ids": ["<begin>", *re.findall(r" ?[^ ]+", text)]}

    fact = _Fact.of(tokenizer, "x {word} {number}", "{word} is", "y", random.Random(0))
    assert fact.question == ["<begin>", "\ny", " is"]
    (number,) = fact.answer
    assert number[0] == " " and number[1:].isdigit() and fact.stated[-1] == number


def test_an_answer_has_what_the_number_changes_of_the_question():
    """Here a word takes the space behind it, so a number changes the question's last token."""

    def tokenizer(text, add_special_tokens):
        return {"input_ids": re.findall(r"[^ ]+ ?", text)}

    fact = _Fact.of(tokenizer, "x {word} {number}", "{word} is", "y", random.Random(0))
    assert fact.question == ["\ny "] and fact.answer[0] == "is "
    assert fact.answer[1:] == fact.stated[-1:]


def test_texts_that_are_too_short_are_one_line():
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("package:tiny"))
    with pytest.raises(ValueError, match="a text of 80 tokens.*stand 90 tokens back: raise") as seen:
        needle_prompts(tokenizer, [torch.arange(80)], 1, windows=(10, 80), longest=1000)
    assert "\n" not in str(seen.value)
    short = needle_prompts(tokenizer, [torch.arange(200)], 1, windows=(5, 15), longest=200)[0]
    assert len(short.input_ids) <= 200 and len(short.answers) < 20, (
        "fewer facts where a model reads few tokens"
    )
    with pytest.raises(ValueError, match="of which the model can read [0-9] beside"):
        needle_prompts(tokenizer, [torch.arange(200)], 1, windows=(5, 15), longest=64)
