"""KVzip: what is read again, what stays, and that nothing of the repetition does.

The oracle's tests are in test_oracles_ranked.py.
"""

import re

import pytest
import torch
from oracle_tools import run_cache

import pod
from pod.eval.answer.methods import find_method, with_repeat_ids
from pod.modeling.methods.kvzip import repeat_ids

ASKED = [[5, 9, 3], [7, 2], [4]]
OPTIONS = {"budget": 20, "chunk_size": 16, "num_sink_tokens": 2, "repeat_ids": ASKED}


@pytest.fixture
def model(tools):
    return tools.make_pod("llama", plan=False)


def reread(cache):
    """What a cache has the model read again, as it is asked for: ids, mask and whose layers."""
    found, original = [], cache.rereadings

    def noted():
        for ids, mask, view in original():
            layers = [group.layers for group in view.groups], [group.layers for group in cache.groups]
            found.append((ids.clone(), mask.clone(), all(a is b for a, b in zip(*layers, strict=True))))
            yield ids, mask, view

    cache.rereadings = noted
    return found


def held(cache, row=0):
    (group,) = [group for group in cache.groups if group.rows == [row]]
    return [[head_group.held for head_group in layer.head_groups] for layer in group.layers]


@torch.no_grad()
def test_a_text_is_repeated_in_chunks_that_name_what_came_before(tools, model):
    cache, ids = pod.make_cache(model, "kvzip", **OPTIONS), tools.random_ids(1, 37)
    found = reread(cache)
    run_cache(model, cache, ids, [("prompt", 37)], (30, 7))
    text = ids[0].tolist()
    assert [x[0].tolist() for x, _, _ in found] == [
        [5, 9, 3, 4, *text[:16]],
        [7, 2, *text[8:16], 4, *text[16:32]],
        [7, 2, *text[24:32], 4, *text[32:]],
    ]
    assert all(mask.all() and mask.shape == (1, 37 + x.shape[1]) for x, mask, _ in found)
    assert all(same for _, _, same in found)  # no key or value is copied for it
    assert cache.lengths.tolist() == [37] and cache.get_seq_length() == 37


@torch.no_grad()
def test_rows_of_a_batch_repeat_their_own_text_and_only_once(tools, model):
    """Rows of 37 and 24 tokens, and one that fits."""
    cache, ids = pod.make_cache(model, "kvzip", **OPTIONS), tools.random_ids(3, 37)
    mask = torch.ones_like(ids)
    mask[1, :13], mask[2, :20] = 0, 0
    found = reread(cache)
    model(ids, attention_mask=mask, past_key_values=cache)
    assert [mask[:, 37:].sum(1).tolist() for _, mask, _ in found] == [[20, 20, 0], [27, 19, 0], [16, 0, 0]]
    assert found[1][0][1, :19].tolist() == [7, 2, *ids[1, 21:29].tolist(), 4, *ids[1, 29:].tolist()]
    assert [sum(map(sum, held(cache, row))) for row in range(3)] == [200, 200, 170]
    cache.batch_select_indices(torch.tensor([2, 0]))
    more = torch.cat((mask[[2, 0]], torch.ones(2, 9, dtype=torch.long)), 1)
    model(tools.random_ids(2, 9, seed=3), attention_mask=more, past_key_values=cache)
    assert len(found) == 5  # the row that did not fit any more, of two chunks
    assert found[3][1][:, 46:].sum(1).tolist() == [20, 0]
    assert sum(map(sum, held(cache, 0))) == 200 and sum(map(sum, held(cache, 1))) == 200 + 10 * 9


@torch.no_grad()
def test_layers_and_heads_share_the_budget_and_nothing_else_is_held(tools, model):
    cache = pod.make_cache(model, "kvzip", **OPTIONS)
    run_cache(model, cache, tools.random_ids(1, 60), [("prompt", 60)])
    config, sizes = model.config, held(cache)
    assert sum(map(sum, sizes)) == 20 * config.num_hidden_layers * config.num_key_value_heads
    assert len({sum(layer) for layer in sizes}) > 1 and any(len(set(layer)) > 1 for layer in sizes)
    assert min(map(min, sizes)) >= 2  # first tokens
    pairs = 20 * config.num_hidden_layers * config.num_key_value_heads
    assert cache.nbytes - cache.nbytes_by_part()["bookkeeping"] == pairs * 2 * config.head_dim * 8
    for layer in cache.groups[0].layers:
        assert not layer.heard and not layer.waits
    cache.check_integrity()


@torch.no_grad()
def test_what_is_repeated_is_packed_afterwards(tools, model):
    """So the repetition hears native keys, and nothing is packed twice."""
    found = []
    for spec, codec in (("kvzip", {}), ("kvzip+int4", {"group_size": 8, "residual": 0})):
        cache = pod.make_cache(model, spec, **OPTIONS, **codec)
        run_cache(model, cache, tools.random_ids(1, 60), [("prompt", 60)])
        found.append((held(cache), cache.groups[0].layers[0].head_groups[0].keys.read(24)))
    (sizes, keys), (packed_sizes, packed) = found
    assert sizes == packed_sizes and 0 < (keys - packed[:, :, : keys.shape[2]]).abs().max() < 0.5


@torch.no_grad()
def test_the_first_tokens_stay_whatever_they_score(tools, model):
    """With one token more than the first ones per head, and the text repeated at once."""
    options = OPTIONS | {"budget": 6, "num_sink_tokens": 5, "chunk_size": 2048}
    cache, full = pod.make_cache(model, "kvzip", **options), pod.make_cache(model, "full")
    ids = tools.random_ids(1, 40)
    for c in (cache, full):
        run_cache(model, c, ids, [("prompt", 40)])
    for layer, all_held in zip(cache.groups[0].layers, full.layers, strict=True):
        for head, group in enumerate(layer.head_groups):
            first = all_held.lead_keys.read(40)[:, head : head + 1, :5]
            assert torch.equal(group.keys.read(5), first)


@torch.no_grad()
def test_decoding_behind_a_text_that_fits_is_never_a_reason(tools, model):
    cache = pod.make_cache(model, "kvzip", **OPTIONS)
    found = reread(cache)
    run_cache(model, cache, tools.random_ids(1, 40), [("prompt", 18), ("decode", 22)])
    assert not found and held(cache) == [[40, 40]] * 5


@torch.no_grad()
def test_a_prompt_that_ends_in_padding_is_repeated(tools, model):
    """All of the last pass is padding."""
    cache, ids = pod.make_cache(model, "kvzip", **OPTIONS), tools.random_ids(1, 33)
    mask = torch.ones_like(ids)
    mask[:, 30:] = 0
    cache.begin_prompt(33)
    model(ids[:, :30], attention_mask=mask[:, :30], past_key_values=cache)
    assert held(cache) == [[30, 30]] * 5
    model(ids[:, 30:], attention_mask=mask, past_key_values=cache)
    assert sum(map(sum, held(cache))) == 200


@torch.no_grad()
def test_what_fails_half_way_leaves_the_cache_unusable(tools, model, monkeypatch):
    cache, ids = pod.make_cache(model, "kvzip", **OPTIONS), tools.random_ids(1, 40)
    forward, calls = model.model.forward, []

    def failing(*args, **kwargs):
        calls.append(args)
        if len(calls) == 3:
            raise RuntimeError("out of memory")
        return forward(*args, **kwargs)

    monkeypatch.setattr(model.model, "forward", failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        model(ids, past_key_values=cache)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="the last pass over this cache failed half-way"):
        model(ids[:, :1], past_key_values=cache)
    cache.reset()
    expected = run_cache(
        model, pod.make_cache(model, "kvzip", **OPTIONS), ids, [("prompt", 39), ("decode", 1)]
    )
    assert torch.equal(run_cache(model, cache, ids, [("prompt", 39), ("decode", 1)]), expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"repeat_ids": None},
            "has the model repeat what it reads: give repeat_ids=repeat_ids(tokenizer)",
        ),
        ({"repeat_ids": [[1], [2]]}, "three lists of token ids from 0 to"),
        ({"repeat_ids": [[1], [2], [10**6]]}, "got [[1], [2], [1000000]]"),
        ({"repeat_ids": [[1], [2], ["a"]]}, "got [[1], [2], ['a']]"),
        ({"budget": 2}, "kvzip: budget = 2 must exceed num_sink_tokens = 2"),
        ({"num_sink_tokens": 0}, "num_sink_tokens = 0 must be at least 1"),
        ({"prefill": "streaming"}, "prefill"),
    ],
)
def test_refusals(model, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        pod.make_cache(model, "kvzip", **(OPTIONS | options))


@torch.no_grad()
def test_embeddings_cannot_be_repeated(tools, model):
    cache = pod.make_cache(model, "kvzip", **OPTIONS)
    embeds = model.model.embed_tokens(tools.random_ids(1, 30))
    with pytest.raises(ValueError, match="kvzip repeats a text: feed its input_ids, not inputs_embeds"):
        model(inputs_embeds=embeds, past_key_values=cache)


class Words:
    """A tokenizer of characters."""

    chat_template = None

    def encode(self, text, add_special_tokens):
        assert not add_special_tokens
        return [ord(x) for x in text]

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        assert add_generation_prompt and not tokenize
        return f"<user>{messages[0]['content']}</user><assistant>"


def test_requests_are_those_of_the_authors():
    tokenizer = Words()
    first, later, end = (bytes(ids).decode() for ids in repeat_ids(tokenizer))
    assert first == "\n\nRepeat the previous context exactly." and end == "\n"
    assert later == "\n\nRepeat the part of the previous context exactly, starting with "
    tokenizer.chat_template = "<user>…"
    assert bytes(repeat_ids(tokenizer)[2]).decode() == "</user><assistant>"


def test_options_of_an_evaluation_have_the_requests():
    asked = repeat_ids(Words())
    for name in ("kvzip", "kvzip+int4", "kvzip[chunk_size=512]@25%"):
        assert with_repeat_ids(find_method(name), {"chunk_size": 3}, Words()) == {
            "chunk_size": 3,
            "repeat_ids": asked,
        }
    assert with_repeat_ids(find_method("kvzip"), {"repeat_ids": ASKED}, Words()) == {"repeat_ids": ASKED}
    assert with_repeat_ids(find_method("snapkv"), {}, Words()) == {}
