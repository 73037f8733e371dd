"""Requests as token ids.

lm-eval's encoding, truncation by rule with BOS and chat template whole, sizes, skips, and errors.
"""

import copy

import lm_tools
import pytest
from lm_eval.models.huggingface import HFLM
from lm_tools import instance
from tokenizers.processors import TemplateProcessing

from pod.eval.answer.budget import CacheSpan
from pod.eval.lm.batches import (
    forward_batches,
    generation_batches,
    spans_of,
    unit_batches,
    units_of,
)
from pod.eval.lm.index import Rule
from pod.eval.lm.requests import RequestEncoder, request_keys, span_of

CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</{{ m.role }}>\n"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}"
    "{{ raise_exception('no system role') }}{% endif %}{{ m.content }}|{% endfor %}"
)
BOS = 256  # <|endoftext|> of the tiny tokenizer, one token per byte otherwise


def with_bos():
    """The tiny tokenizer, adding BOS as Llama's does."""
    found = copy.deepcopy(lm_tools.tokenizer())
    found.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", pair="<|endoftext|> $A $B", special_tokens=[("<|endoftext|>", BOS)]
    )
    return found


def chatty(template=CHAT):
    found = with_bos()
    found.chat_template = template
    return found


def asks(text, new_tokens=10, doc=0, **settings):
    return instance("generate_until", (text, {"until": [], "max_gen_toks": new_tokens} | settings), doc)


def read(encoder, encoded):
    return encoder.tokenizer.decode(encoded.context)


@pytest.mark.parametrize("tokenizer", [lm_tools.tokenizer(), with_bos()], ids=["plain", "bos"])
def test_pairs_equal_hflms(tokenizer):
    """Contexts with and without trailing blanks, without text, beginning with BOS already."""
    stock = HFLM(pretrained=lm_tools.model(), tokenizer=tokenizer, backend="causal")
    encoder = RequestEncoder(tokenizer, 100)
    for context, continuation in [
        ("a b", " c"),
        ("a b  ", "c"),
        ("x", "y"),
        ("<|endoftext|>q", " r"),
        ("Ünï", "çé"),
    ]:
        assert encoder.pair(context, continuation) == stock._encode_pair(context, continuation)
    seen = []
    stock._loglikelihood_tokens = lambda requests, **_: seen.append(requests) or [(0.0, True)]
    for continuation in ("abc", "<|endoftext|>abc"):
        stock.loglikelihood([instance("loglikelihood", ("", continuation), 0)], disable_tqdm=True)
        assert encoder.pair("", continuation) == seen.pop()[0][1:]


@pytest.mark.parametrize(
    ("drop", "wanted"),
    [("middle", "0123" + "WXYZ"), ("start", "STUVWXYZ"), ("end", "01234567")],
)
def test_what_is_dropped_and_bos_stays(drop, wanted):
    text = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
    encoder = RequestEncoder(with_bos(), 19)
    item = encoder.request(asks(text), Rule(truncation=drop))  # 19 - 10 new tokens = 9, BOS is one of them
    assert item.context[0] == BOS
    assert encoder.tokenizer.decode(item.context[1:]) == wanted
    assert (item.prompt_tokens, item.dropped, item.skipped) == (9, 63 - 9, None)


def test_a_prompt_that_just_fits_is_not_touched():
    encoder = RequestEncoder(with_bos(), 19)
    assert encoder.request(asks("01234567"), Rule()).dropped == 0
    assert encoder.request(asks("012345678"), Rule()).dropped == 1
    capped = encoder.request(asks("01234567"), Rule(max_prompt_tokens=5))
    assert read(encoder, capped) == "<|endoftext|>0167"


def test_scored_contexts_are_cut_and_answers_are_not():
    encoder = RequestEncoder(with_bos(), 12)
    item = encoder.request(
        instance("loglikelihood", ("0123456789abcdef", " yes"), 0), Rule(truncation="start")
    )
    assert encoder.tokenizer.decode(item.continuation) == " yes"
    assert read(encoder, item) == "<|endoftext|>89abcdef"
    assert len(item.context) + len(item.continuation) - 1 == 12  # the last token is never fed
    long = encoder.request(instance("loglikelihood", ("q", "x" * 13), 0), Rule())
    assert long.skipped == "too long, and may not be shortened"


def test_characters_of_several_tokens_stay_whole():
    encoder = RequestEncoder(lm_tools.tokenizer(), 31)
    item = encoder.request(asks("漢字" * 20), Rule())  # 3 tokens each, room for 21
    assert "�" not in read(encoder, item)
    assert read(encoder, item) == "漢字漢" + "字漢字"


def test_only_the_users_message_of_a_chat_is_cut():
    encoder = RequestEncoder(chatty(), 70)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " 0123456789" * 8}]
    prompt = encoder.apply_chat_template(messages)
    item = encoder.request(asks(prompt), Rule())
    assert len(item.context) <= 60 and item.dropped == len(encoder.encode(prompt)) - len(item.context)
    assert read(encoder, item).startswith("<|endoftext|><system>Be brief.</system>\n<user>01")
    assert read(encoder, item).endswith("89</user>\n<assistant>")
    assert len(item.context) >= 59


def test_a_document_is_cut_and_its_question_stays():
    encoder = RequestEncoder(with_bos(), 70)
    document = " ".join(f"w{number}" for number in range(40))
    request = asks(f"Read this. {document} What is w1?")
    request.doc = {"document": document}
    start = read(encoder, encoder.request(request, Rule(truncation="document", keep="start")))
    assert start.startswith("<|endoftext|>Read this. w0 w1") and start.endswith(" What is w1?")
    end = read(encoder, encoder.request(request, Rule(truncation="document", keep="end")))
    assert "w39 What is w1?" in end and "w0" not in end
    request.doc = {}
    assert "document" in encoder.request(request, Rule(truncation="document")).skipped


def test_too_long_is_skipped_or_an_error_when_asked_for():
    skip, error = (RequestEncoder(with_bos(), 19, too_long=what) for what in ("skip", "error"))
    assert skip.request(asks("0" * 40), Rule()).skipped == "too long for the model"
    assert skip.request(asks("0" * 8), Rule()).skipped is None
    assert RequestEncoder(with_bos(), 19).request(asks("0" * 40), Rule(truncation="none")).skipped
    with pytest.raises(ValueError, match="document 3: a prompt of 41 tokens exceeds the 9 tokens that fit"):
        error.request(asks("0" * 40, doc=3), Rule())


def test_templates_without_a_system_role_keep_its_text():
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    assert RequestEncoder(chatty(NO_SYSTEM), 99).apply_chat_template(messages) == "Be brief.\n\nWhy?|"
    with pytest.raises(ValueError, match="no chat template: set chat_template to off"):
        RequestEncoder(with_bos(), 99).apply_chat_template(messages)


def test_an_open_answer_is_continued():
    messages = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because"}]
    text = RequestEncoder(chatty(), 99).apply_chat_template(messages, add_generation_prompt=False)
    assert text.endswith("<assistant>Because")


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: RequestEncoder(lm_tools.tokenizer(), 1), "max_length = 1 must be"),
        (
            lambda: RequestEncoder(lm_tools.tokenizer(), 9, "cut"),
            "too_long = 'cut': known are truncate, skip, error",
        ),
        (lambda: Rule(truncation="left"), "metadata.pod.truncation = 'left'"),
        (
            lambda: RequestEncoder(lm_tools.tokenizer(), 9).request(asks("a", 9), Rule()),
            "generates 9 tokens and the model reads 9",
        ),
        (
            lambda: RequestEncoder(lm_tools.tokenizer(), 99).request(asks("a", num_beams=2), Rule()),
            "num_beams = 2",
        ),
    ],
)
def test_errors_are_one_line(build, message):
    with pytest.raises(ValueError, match=message) as error:
        build()
    assert "\n" not in str(error.value)


def test_sizes():
    """Scoring n context and m answer tokens ends with n + m - 1 in the cache, m of them after the prompt."""
    assert span_of(63, 2) == CacheSpan(length=64, fed=2)
    assert span_of(64, 2) == CacheSpan(length=128, fed=2)
    assert span_of(60, 5) == CacheSpan(length=64, fed=8)
    assert span_of(60, 0, 5) == CacheSpan(length=64, fed=4)
    assert span_of(60, 0, 1) == CacheSpan(length=64, fed=0)
    assert span_of(60, 0, 1200) == CacheSpan(
        length=1280, fed=1199
    )  # InfiniteBench's summaries: not 2048 slots less
    encoder = RequestEncoder(lm_tools.tokenizer(), 4096)
    requests = lm_tools.choices() + lm_tools.generations()
    encoded = encoder.requests(requests, Rule())
    asked = {unit.span for batch in unit_batches(units_of(encoded[:-4]), 3) for unit in batch}
    generated = [item for batch in generation_batches(encoded[-4:], 3) for item in batch]
    asked |= {span_of(len(item.context), 0, 6) for item in generated}
    assert spans_of(encoded) == asked


@pytest.mark.parametrize("kind", ["generate", "score"])
def test_batches_are_full_whatever_the_budgets(kind):
    """60 prompts of 100 to 3,000 tokens, batches of 8; neighbours in length stand together."""
    lengths = [100 + 49 * i * i % 2900 for i in range(60)]
    requests = [
        instance("generate_until", ("x" * n, {"until": [], "max_gen_toks": 8}), i)
        if kind == "generate"
        else instance("loglikelihood", ("x" * n, "A"), i)
        for i, n in enumerate(lengths)
    ]
    encoded = RequestEncoder(lm_tools.tokenizer(), 4096).requests(requests, Rule())
    batches = generation_batches(encoded, 8) if kind == "generate" else unit_batches(units_of(encoded), 8)
    assert len(encoded) / len(batches) >= 6
    asked = [item for batch in batches for item in batch]
    assert [item.span for item in asked] == sorted((item.span for item in asked), reverse=True)
    assert sorted(len(item.context) for item in asked) == sorted(lengths)


def test_choices_of_a_document_share_a_unit_and_batches_hold_them_together():
    encoded = RequestEncoder(lm_tools.tokenizer(), 4096).requests(lm_tools.choices(), Rule())
    units = units_of(encoded)
    assert [unit.owners for unit in units] == [(0, 1, 2), (3, 4, 5), (6, 7, 8), (9, 10, 11), (12,)]
    batches = unit_batches(units, 4)
    assert sorted(n for batch in batches for unit in batch for n in unit.owners) == list(range(13))
    for batch in batches:
        assert len({unit.holds_out for unit in batch}) == 1
        assert len(batch) == 1 or sum(len(unit.owners) for unit in batch) <= 4
    alone = units_of(encoded, one_shot=True)
    rows = [[unit.owners[0] for unit in batch] for batch in forward_batches(alone, 2, in_order=False)]
    assert sorted(n for batch in rows for n in batch) == list(range(13))
    assert [8, 9, 10, 11] in rows  # A, B, C after one context are one row of two


def test_blocks_score_every_token_once():
    encoded = RequestEncoder(lm_tools.tokenizer(), 400).requests(
        [instance("loglikelihood_rolling", ("x" * 1000,), 0)], Rule()
    )[0]
    assert [len(ids) for _, ids in encoded.windows] == [400, 400, 200]
    assert [len(ids) for _, ids in encoded.blocks()[:10]] == [1, 2, 4, 8, 16, 32, 64, 128, 145, 1]
    assert sum(len(ids) for _, ids in encoded.blocks()) == 1000
    assert all(len(context) + len(ids) <= 401 for context, ids in encoded.blocks())


def test_repeats_have_keys_of_their_own():
    request = asks("a", doc=2)
    assert request_keys([request, request]) == ["generate_until/t/2/0/0", "generate_until/t/2/0/1"]


def test_a_tokenizer_without_bos_and_eos_is_named():
    import copy

    bare = copy.deepcopy(lm_tools.tokenizer())
    bare.bos_token = bare.eos_token = None
    with pytest.raises(ValueError, match="neither a BOS nor an EOS token: set eos_token"):
        RequestEncoder(bare, 64).request(asks("a"), Rule())
