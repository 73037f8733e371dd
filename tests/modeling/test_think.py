"""ThinK: which channels stay, that no more is held, and codecs behind it."""

import pytest
import torch
from oracle_checks import MODELS, assert_agrees
from oracle_tools import TURNS, run_cache
from oracles_channels import PackedThinK, ThinK, behind
from oracles_ranked import AdaKV, PyramidKV, SnapKV
from rule_bytes import rule_nbytes

import pod

OPTIONS = {"ratio": 0.4, "queries": 5, "recent": 4}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama-g3", {}),
        ("qwen3-g4", {"ratio": 0.7}),
        ("llama-g1", {"queries": 50}),
        ("llama-g4", {"recent": 0}),
        ("llama-g3", {"recent": 33}),  # the first prompt leaves nothing to thin, the second one does
    ],
    ids=str,
)
def test_agrees_with_the_oracle(tools, name, changes):
    family, sizes = MODELS[name]
    model, options = tools.make_pod(family, plan=False, **sizes), OPTIONS | changes
    oracle, ids = ThinK(model, **options), tools.random_ids(1, 50)[0]
    cache = assert_agrees(model, oracle, lambda: pod.make_cache(model, "think", **options), ids, TURNS)
    cache.check_integrity()


@pytest.mark.parametrize(("codec", "bits", "kept"), [("int4", 4, 6), ("kivi", 2, 8), ("int8", 8, 5)])
def test_agrees_with_the_oracle_behind_a_codec(tools, codec, bits, kept):
    """Of 16 channels 5 stay, or as many as fill their bytes."""
    model, ids = tools.make_pod("qwen3", plan=False), tools.random_ids(1, 50)[0]
    options = OPTIONS | {"ratio": 0.7}
    oracle = PackedThinK(model, **options, kept=kept)
    oracle.bits = bits
    sizes = {"group_size": 4, "residual": 6}
    make = lambda: pod.make_cache(model, f"think+{codec}", **options, **sizes)  # noqa: E731
    full = ThinK(model, **options, kept=kept).run(ids, TURNS)
    assert_agrees(model, oracle, make, ids, TURNS, full=full)


@torch.no_grad()
def test_of_equal_channels_the_lower_stays(tools):
    """Of equal channels the lower stays.

    Queries and keys are one number in every channel: no rotation at position 0, where a prompt of one token
    stands.
    """
    model = tools.make_pod("llama", plan=False)
    for layer in model.model.layers:
        layer.self_attn.k_proj.weight.fill_(0.01)
        layer.self_attn.q_proj.weight.fill_(0.01)
    cache = pod.make_cache(model, "think", ratio=0.5, queries=1, recent=0)
    run_cache(model, cache, tools.random_ids(1, 1), [("prompt", 1)])
    for layer in cache.groups[0].layers:
        assert layer.head_groups[0].keys.channels.tolist() == [[[[0, 1, 2, 3]]] * 2]


@torch.no_grad()
@pytest.mark.parametrize(("spec", "number"), [("think", 2), ("think+int4", 5 / 8)])
def test_bytes_are_those_of_the_channels_held(tools, spec, number):
    """Bytes are those of the channels held.

    Of 32 channels 20 stay. 2,000 tokens, then 8: the newest 40 keys are whole; packed ones cost 4 bits and 1
    for scales.
    """
    sizes = {
        "head_dim": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
    }
    model = tools.make_pod("qwen3", torch.bfloat16, plan=False, **sizes)
    cache = pod.make_cache(model, spec)
    run_cache(model, cache, tools.random_ids(1, 2008), [("prompt", 2000), ("decode", 8)], (1500, 500))
    parts, heads = cache.nbytes_by_part(), 2 * model.config.num_hidden_layers
    ring = 160 if "+" in spec else 0  # tokens that stay native, with room for a group
    packed = 1824 if "+" in spec else 1968  # whole groups beyond the newest 128
    thin, whole, channels = 20 * (packed * number + ring * 2), 32 * 2 * 40, 20 * 8
    keys = sum(nbytes for name, nbytes in parts.items() if name.startswith("keys"))
    assert keys == pytest.approx(heads * (thin + whole + channels), rel=0.01)
    assert sum(parts.values()) - parts["bookkeeping"] == pytest.approx(rule_nbytes(cache), rel=0.01)


@pytest.mark.parametrize("ranking", [SnapKV, PyramidKV, AdaKV])
def test_agrees_with_the_oracle_behind_a_ranking(tools, ranking):
    """The end of a second prompt ranks what is held, thin keys with zeros."""
    model, ids = tools.make_pod("qwen3", plan=False), tools.random_ids(1, 50)[0]
    options = OPTIONS | {"ratio": 0.5, "budget": 14, "window": 4, "kernel": 3, "pool": "avg"}
    spec = f"{ranking.__name__.lower()}+think"
    oracle, plain = behind(ranking)(model, **options), {x: y for x, y in options.items() if x not in OPTIONS}
    full = ranking(model, **plain).run(ids, TURNS)
    assert_agrees(model, oracle, lambda: pod.make_cache(model, spec, **options), ids, TURNS, full=full)


def test_refusals(tools):
    model = tools.make_pod("llama")
    for spec, options, message in [
        ("think", {}, "needs a model without a sharing plan"),
        ("pod+think", {}, "'pod\\+think' is not possible: some heads of this layout keep no distant keys"),
        ("pod+think+int4", {}, "is not possible"),
    ]:
        with pytest.raises(ValueError, match=message):
            pod.make_cache(model, spec, **options)
    dense = tools.make_pod("llama", plan=False)
    with pytest.raises(ValueError, match="ratio = 1.0 must lie between 0 and 0.99"):
        pod.make_cache(dense, "think", ratio=1.0)
