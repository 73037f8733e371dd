"""Where generated answers end.

Every EOS, and stop strings across tokens, none of them in the text; `min_new_tokens`.
"""

import contextlib

import lm_tools
import pytest
import torch
from lm_tools import instance

from pod.eval.answer.generate import StopStrings, end_ids, text_of


@contextlib.contextmanager
def eos_of(model, ids):
    """The model with other EOS ids in its generation config."""
    before = model.generation_config.eos_token_id
    model.generation_config.eos_token_id = ids
    try:
        yield
    finally:
        model.generation_config.eos_token_id = before


def ask(spec="full", batch_size=3, **settings):
    """Answers to three prompts of different lengths."""
    settings = {"until": [], "max_gen_toks": 12, "do_sample": False} | settings
    requests = [
        instance("generate_until", (lm_tools.text(60 + doc, 5 + doc), settings), doc) for doc in range(3)
    ]
    return lm_tools.around(spec, batch_size=batch_size).generate_until(requests)


def raw():
    """The first 12 greedy tokens for the three prompts, alone, without any rule of ours."""
    model, tokenizer = lm_tools.model(), lm_tools.tokenizer()
    found = []
    for doc in range(3):
        ids = torch.tensor([tokenizer.encode(lm_tools.text(60 + doc, 5 + doc))])
        for _ in range(12):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
        found.append(ids[0, -12:].tolist())
    return found


def test_without_rules_every_new_token_is_there():
    assert ask() == [lm_tools.tokenizer().decode(row, skip_special_tokens=True) for row in raw()]


@pytest.mark.parametrize("spec", ["full", "snapkv", "h2o"])
def test_every_eos_of_the_generation_config_ends_its_row_only(spec):
    free = ask(spec)
    first, second = (next(c for c in text[1:] if c.isascii() and c.isprintable()) for text in free[:2])
    ids = [lm_tools.tokenizer().encode(char)[0] for char in (first, second)]
    wanted = [text.split(first)[0].split(second)[0] for text in free]
    assert wanted[0] != free[0] and wanted[1] != free[1]
    with eos_of(lm_tools.model(), ids):
        assert ask(spec) == ask(spec, batch_size=1) == wanted
    assert ask(spec) == free


def test_stop_strings_across_tokens_leave_nothing_of_themselves():
    free = ask()
    stop = free[0][2:5]
    assert len(lm_tools.tokenizer().encode(stop, add_special_tokens=False)) >= 3
    wanted = [text.split(stop)[0] for text in free]
    assert wanted[0] == free[0][:2] and wanted[1:] == free[1:]
    assert ask(until=[stop]) == ask(until=stop) == ask(until=["never there", stop], batch_size=1) == wanted


def test_rows_that_are_done_stop_the_batch():
    """Stop strings end generation, not only the text: no token more than needed is computed."""
    calls = []
    model = lm_tools.model()
    hook = model.model.register_forward_hook(lambda *_: calls.append(1))
    try:
        ask(until=["a", "e", " "] + [chr(code) for code in range(33, 127)] + ["�"])
    finally:
        hook.remove()
    assert len(calls) < 12


def test_a_stop_string_that_is_a_special_token_ends_the_answer():
    tokenizer = lm_tools.tokenizer()
    assert tokenizer.decode([65, 66]) != ""
    ends = end_ids(lm_tools.model(), tokenizer, ["<|pad|>", "x"])
    assert ends == [256, 257]
    assert text_of(tokenizer, [32, 33, 257, 34], ends, ["<|pad|>"]) == tokenizer.decode([32, 33])


def test_the_earliest_stop_wins_and_blanks_stay():
    tokenizer = lm_tools.tokenizer()
    ids = tokenizer.encode("  yes\n\nno. ")
    assert text_of(tokenizer, ids, [], ["no", "\n\n"]) == "  yes"
    assert text_of(tokenizer, ids, [], []) == "  yes\n\nno. "
    assert text_of(tokenizer, ids, [], [""]) == "  yes\n\nno. "


def test_the_window_of_the_stop_rule_is_long_enough():
    tokenizer = lm_tools.tokenizer()
    rule = StopStrings(tokenizer, ["Question:"], prompt_columns=2)
    rows = [tokenizer.encode(text) for text in ("ab answer Question:", "Question: answers..")]
    assert rule(torch.tensor(rows), None).tolist() == [True, False]  # a stop in the prompt does not count
    assert not StopStrings(tokenizer, [], 0)(torch.tensor(rows), None).any()


def test_min_new_tokens_holds_for_stop_strings_too():
    tokenizer = lm_tools.tokenizer()
    first = [tokenizer.decode(row[:1]) for row in raw()]
    assert ask(until=first[:1])[0] == ""
    answers = ask(until=first[:1], min_new_tokens=1)
    assert answers[0] != "" and not answers[0].startswith(first[0])
    with eos_of(lm_tools.model(), [raw()[1][0]]):
        assert ask()[1] == "" and ask(min_new_tokens=1)[1] != ""


def test_sampled_answers_are_the_same_after_a_restart():
    settings = {"do_sample": True, "temperature": 1.0}
    torch.manual_seed(1)
    first = ask(**settings)
    torch.manual_seed(2)
    assert ask(**settings) == first
    assert first != ask()
