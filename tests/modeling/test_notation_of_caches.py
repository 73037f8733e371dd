"""`make_cache` takes the one notation; shares follow each row's prompt."""

import copy

import pytest
import torch

import pod
from pod.modeling.methods.budgets import least_budget
from pod.modeling.methods.kvzip import repeat_ids
from pod.models import resolve_model


@pytest.fixture(scope="module")
def model(tools):
    return tools.make_pod("llama", plan=False)


def logits_of(model, cache, ids, prompt, mask=None, chunks=None):
    """Of everything that is decoded behind a prompt, which comes in chunks."""
    chunks = chunks or [prompt]
    cache.begin_prompt(prompt)
    outputs, start = [], 0
    for width in chunks + [1] * (ids.shape[1] - prompt):
        end = start + width
        given = None if mask is None else mask[:, :end]
        out = model(ids[:, start:end], attention_mask=given, past_key_values=cache).logits
        outputs.append(out)
        start = end
    return torch.cat(outputs, 1)[:, prompt - 1 :]


@pytest.mark.parametrize(
    ("text", "spec", "options"),
    [
        ("snapkv[window=4;kernel=3]@14", "snapkv", {"budget": 14, "window": 4, "kernel": 3}),
        ("int4[residual=8,group_size=8]+snapkv[window=4]@14", "snapkv+int4", None),
        ("imdc(streamingllm)[chunk_size=12]@14", "imdc(streamingllm)", {"budget": 14, "chunk_size": 12}),
        ("razor[heads=[[0];[1];[];[0,1];[]],num_recent_tokens=6]", "razor", None),
    ],
)
@torch.no_grad()
def test_a_text_says_what_arguments_say(tools, model, text, spec, options):
    others = {
        "snapkv+int4": {"budget": 14, "window": 4, "residual": 8, "group_size": 8},
        "razor": {"heads": [[0], [1], [], [0, 1], []], "num_recent_tokens": 6},
    }
    ids, caches = tools.random_ids(1, 36), (pod.make_cache(model, text), None)
    other = pod.make_cache(model, spec, **(others[spec] if options is None else options))
    assert caches[0].spec == other.spec == spec
    assert torch.equal(logits_of(model, caches[0], ids, 30), logits_of(model, other, ids, 30))
    plain = pod.make_cache(model)
    assert not torch.allclose(logits_of(model, plain, ids, 30), logits_of(model, other, ids, 30))


SHARED = {
    "snapkv[window=4]@25%": 10,
    "streamingllm@0.25": 10,
    "h2o[num_recent_tokens=3]@25%": 10,
    "kvzip[repeat_ids=[[5],[7],[4]],chunk_size=10,num_sink_tokens=2]@25%": 10,
    "snapkv[window=4,prefill=streaming,chunk_size=7]@25%": 10,
    "quest[page_size=4]@25%": 10,
    "wa+int4[group_size=8,residual=8]@25%": 10,
}


@pytest.mark.parametrize("text", SHARED)
@pytest.mark.parametrize("chunks", [None, [9, 22, 10]], ids=["whole", "chunks"])
@torch.no_grad()
def test_a_share_is_of_each_rows_own_prompt(tools, model, text, chunks):
    """A share is of each row's own prompt.

    Rows of 41, 41, 30 and 3 tokens in one batch are as caches of 10, 10, 7 and the least tokens, each alone.
    """
    prompt, decoded, lengths = 41, 5, [41, 41, 30, 3]
    ids = tools.random_ids(4, prompt + decoded)
    mask = torch.ones_like(ids)
    for row, length in enumerate(lengths):
        mask[row, : prompt - length] = 0
    together = logits_of(model, pod.make_cache(model, text), ids, prompt, mask, chunks)
    plain = text.rpartition("@")[0]
    for row, length in enumerate(lengths):
        least = least_budget(lambda tokens: pod.make_cache(model, f"{plain}@{tokens}"), 0)
        alone = pod.make_cache(model, f"{plain}@{max(length // 4, least)}")
        expected = logits_of(model, alone, ids[row : row + 1, prompt - length :], length)
        assert (together[row] - expected[0]).abs().max() <= 1e-9, (row, length)


@torch.no_grad()
def test_later_prompts_and_tokens_do_not_change_a_share(tools, model):
    cache = pod.make_cache(model, "snapkv[window=4]@50%")
    ids = tools.random_ids(1, 100)
    model(ids[:, :40], past_key_values=cache)
    (group,) = cache.groups[0].layers[0].head_groups
    assert group.held == 20
    model(ids[:, 40:41], past_key_values=cache)
    model(ids[:, 41:91], past_key_values=cache)
    assert cache.groups[0].layers[0].head_groups[0].held == 20
    cache.reset()
    model(ids[:, :60], past_key_values=cache)
    assert cache.groups[0].layers[0].head_groups[0].held == 30


@torch.no_grad()
def test_caches_of_a_share_are_saved_copied_and_regrouped(tools, model, tmp_path):
    """Another process makes the budgets' layers anew, and what follows is the same.

    A prompt of a new row's kind is included.
    """
    ids, mask = tools.random_ids(2, 60), torch.ones(2, 60, dtype=torch.long)
    mask[1, :20] = 0
    cache = pod.make_cache(model, "int4[group_size=8,residual=8]+snapkv[window=4]@25%")
    model(ids[:, :40], attention_mask=mask[:, :40], past_key_values=cache)
    pod.save_cache(model, cache, tmp_path / "cache")
    again, copied = pod.load_cache(model, tmp_path / "cache"), copy.deepcopy(cache)
    assert again.made_with[0] == "25%" and again.prompt_budgets == [10, 5]
    for one in (cache, again, copied):
        one.batch_select_indices(torch.tensor([1, 0]))
    outputs = [
        model(ids[:, 40:], attention_mask=mask[[1, 0]], past_key_values=one).logits
        for one in (cache, again, copied)
    ]
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])


def test_compression_ratio_is_what_goes(model):
    assert pod.make_cache(model, "snapkv", compression_ratio=0.75).made_with[0] == "25%"
    assert pod.make_cache(model, "snapkv", compression_ratio=0.9).made_with[0] == "10%"
    for wrong in (1, 1.5, -0.1, True, "0.5"):
        with pytest.raises(ValueError, match="compression_ratio = .* must be a number of at least 0"):
            pod.make_cache(model, "snapkv", compression_ratio=wrong)


def test_what_is_said_twice_is_refused(model):
    for options, message in [
        ({"spec": "snapkv@25%", "budget": 64}, "snapkv has @25% and budget=64: name one of them"),
        ({"spec": "snapkv", "budget": 64, "compression_ratio": 0.5}, "budget=64 and compression_ratio=0.5"),
        (
            {"spec": "snapkv[window=4]@64", "window": 5},
            "window stands in 'snapkv.window=4.@64' and beside it",
        ),
        ({"spec": "int4@25%"}, "int4 takes no budget"),
    ]:
        with pytest.raises(ValueError, match=message):
            pod.make_cache(model, **options)


@torch.no_grad()
def test_the_budget_pod_is_what_the_plan_holds(tools):
    shared = tools.make_pod("llama")
    windows = shared.config.num_sink_tokens, shared.config.num_recent_tokens
    share = 1 - shared.config.sharing_plan.saving(200, *windows)
    cache = pod.make_cache(shared, "pod+snapkv[window=4]@pod")
    shared(tools.random_ids(1, 200), past_key_values=cache)
    assert 0.5 < share < 0.95 and cache.prompt_budgets == [int(200 * share)]
    dense = tools.make_pod("llama", plan=False)
    with pytest.raises(
        ValueError, match="snapkv@pod: the budget pod is as much as a sharing plan holds, and this"
    ):
        pod.make_cache(dense, "snapkv@pod")


def test_kvzip_and_razor_from_a_spec_alone(tools, model):
    with pytest.raises(
        ValueError, match=r"the model repeat what it reads: give repeat_ids=repeat_ids\(tokenizer\)"
    ) as no_ids:
        pod.make_cache(model, "kvzip@25%")
    with pytest.raises(
        ValueError, match="razor needs the model's retrieval heads: `pod explore --heads`"
    ) as no_heads:
        pod.make_cache(model, "razor")
    assert "\n" not in str(no_ids.value) + str(no_heads.value)


def test_kvzip_finds_the_tokenizer_in_the_models_folder():
    place = resolve_model("package:tiny")
    loaded = pod.load_model(place)
    cache = pod.make_cache(loaded, "kvzip@25%")
    assert cache.made_with[1]["repeat_ids"] == repeat_ids(pod.load_tokenizer(place))
    loaded.generate(torch.arange(3, 60)[None], past_key_values=cache, max_new_tokens=2, do_sample=False)
    assert cache.prompt_budgets == [14]
