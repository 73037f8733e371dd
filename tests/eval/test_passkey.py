"""Passkey prompts and their scoring."""

import re
from types import SimpleNamespace

import pytest
import torch

from pod.eval.answer import reading
from pod.eval.answer.generate import generate
from pod.eval.suites.haystack import make_frame
from pod.eval.tasks import passkey
from pod.models import byte_tokenizer

CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
LINE = len(passkey.FILLER) + 1


@pytest.fixture(params=["plain", "chat"])
def chat(request) -> bool:
    return request.param == "chat"


@pytest.fixture
def tokenizer():
    """It has a chat template, which is used only when asked for."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def test_prompts_fill_their_length(tokenizer, chat):
    prompts = passkey.make_prompts(tokenizer, [400, 700], [0.0, 0.5, 1.0], 2, seed=3, chat_template=chat)
    assert len(prompts) == 12
    for prompt in prompts:
        assert prompt.length - LINE <= len(prompt.token_ids) <= prompt.length
        assert re.fullmatch(r"[1-9][0-9]{4}", prompt.key)
        assert prompt.text.count(prompt.key) == 2
        assert prompt.text.endswith(
            "<|assistant|>The pass key is" if chat else "What is the pass key?\nThe pass key is"
        )
        assert prompt.text.startswith("<|user|>" if chat else passkey.TASK)
    assert len({prompt.key for prompt in prompts}) == 12


def test_depth_places_the_key(tokenizer, chat):
    by_depth = {
        prompt.depth: prompt
        for prompt in passkey.make_prompts(tokenizer, [1500], [0.0, 0.5, 1.0], 1, seed=0, chat_template=chat)
    }
    needle = passkey.NEEDLE.format(key=by_depth[0.0].key)
    assert f"{passkey.TASK}\n\n{needle}\nThe grass" in by_depth[0.0].text
    needle = passkey.NEEDLE.format(key=by_depth[1.0].key)
    assert f"{needle}\n\n{passkey.QUESTION}" in by_depth[1.0].text
    middle = by_depth[0.5].text
    assert f"\n{passkey.NEEDLE.format(key=by_depth[0.5].key)}\n" in middle, "the key has its own line"
    assert abs(middle.index(by_depth[0.5].key) / len(middle) - 0.5) < 0.1


def test_keys_depend_on_the_seed_only(tokenizer):
    first = passkey.make_prompts(tokenizer, [400], [0.5], 3, seed=1)
    assert first == passkey.make_prompts(tokenizer, [400, 500], [0.5], 3, seed=1)[:3]
    assert [p.key for p in first] != [p.key for p in passkey.make_prompts(tokenizer, [400], [0.5], 3, seed=2)]


def test_too_short_length_is_refused(tokenizer):
    with pytest.raises(
        ValueError, match=r"passkey prompt of 100 tokens is too short, because the question alone takes \d+"
    ):
        passkey.make_prompts(tokenizer, [100], [0.5], 1, seed=0)


def test_chat_template_that_is_missing_is_refused():
    with pytest.raises(
        ValueError, match="passkey_chat_template is true and the tokenizer has no chat template"
    ):
        passkey.make_prompts(byte_tokenizer(), [400], [0.5], 1, seed=0, chat_template=True)


def test_bos_is_added_without_template_only():
    calls = []

    class Tokenizer:
        chat_template = "template"

        def __call__(self, text, add_special_tokens):
            calls.append(add_special_tokens)
            return {"input_ids": [1]}

        def apply_chat_template(self, messages, **options):
            return f"<{messages[0]['content']}>"

    for chat in (False, True):
        make_frame(Tokenizer(), "a", "b", "c", chat, "x").encode("t")
    assert calls == [True, False]


@pytest.mark.parametrize(
    ("answer", "correct"),
    [
        (" 71432", True),
        (" 71432. Remember it. 71432 is the pass key.", True),
        ("The pass key is 71432", True),
        (" 7143", False),
        (" 714322", False),
        (" 11111 or 71432", False),
        ("unknown", False),
        ("", False),
    ],
)
def test_scoring(answer, correct):
    assert passkey.is_correct(answer, "71432") is correct


def test_left_padding():
    ids, mask = reading.left_padded([(5, 6, 7), (8,)], pad=9)
    assert ids.tolist() == [[5, 6, 7], [9, 9, 8]]
    assert mask.tolist() == [[1, 1, 1], [0, 0, 1]]


class Spy(torch.nn.Linear):
    """Notes what it is fed, answers ` 12345`."""

    def __init__(self, tokenizer):
        super().__init__(1, 1)
        self.reply, self.seen = tokenizer(" 12345")["input_ids"], {}
        self.generation_config = SimpleNamespace(eos_token_id=None)

    def model(self, **kwargs):
        self.seen["read"] = kwargs
        return SimpleNamespace(last_hidden_state=torch.zeros(*kwargs["input_ids"].shape, 1))

    def generate(self, input_ids, **kwargs):
        self.seen |= kwargs | {"input_ids": input_ids}
        return torch.cat((input_ids, torch.tensor([self.reply] * len(input_ids))), dim=1)


class Cache:
    layers, lengths = (), torch.tensor([300, 340])

    def begin_prompt(self, num_columns):
        assert num_columns > 0

    def nbytes_by_row(self):
        return [4, 6]


def test_the_question_is_put_when_the_text_is_compressed():
    tokenizer, cache = byte_tokenizer(), Cache()
    model = Spy(tokenizer)
    prompts = passkey.make_prompts(tokenizer, [300, 340], [0.5], 1, seed=0)
    found = generate(model, tokenizer, cache, prompts, new_tokens=6)
    assert found == [{"answer": " 12345", "bytes": size, "held_tokens": 340} for size in (4, 6)]
    seen, question = model.seen, f"{passkey.QUESTION}\n{passkey.ANSWER}"
    assert seen["past_key_values"] is cache and seen["do_sample"] is False and seen["max_new_tokens"] == 6
    assert [tokenizer.decode(row) for row in seen["input_ids"]] == [question] * 2
    read = seen["read"]
    texts = [
        tokenizer.decode(row[mask.bool()])
        for row, mask in zip(read["input_ids"], read["attention_mask"], strict=True)
    ]
    assert [text + question for text in texts] == [prompt.text for prompt in prompts]
    assert seen["attention_mask"].sum(dim=1).tolist() == [len(prompt.token_ids) for prompt in prompts]


def test_methods_may_be_told_the_question_before():
    tokenizer = byte_tokenizer()
    model = Spy(tokenizer)
    prompts = passkey.make_prompts(tokenizer, [300, 340], [0.5], 1, seed=0, question_aware=True)
    assert [record["answer"] for record in generate(model, tokenizer, Cache(), prompts, 6)] == [" 12345"] * 2
    assert "read" not in model.seen
    assert model.seen["attention_mask"].sum(dim=1).tolist() == [len(prompt.token_ids) for prompt in prompts]
    other = passkey.make_prompts(tokenizer, [300, 340], [0.5], 1, seed=0)
    assert [p.token_ids for p in other] == [p.token_ids for p in prompts], "the same tokens either way"
    assert reading.key_of_prompt(other[0], 6, None) != reading.key_of_prompt(prompts[0], 6, None)
