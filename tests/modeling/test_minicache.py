"""MiniCache: directions shared once, norms of their own, distant tokens native.

Also the bytes that are left.
"""

import math

import pytest
import torch
from rule_bytes import rule_nbytes

import pod
from pod.modeling.methods.base import Request
from pod.modeling.methods.minicache import PairLayer, interpolate, merge_pair, num_kept_apart


def feed(model, cache, ids, widths, mask=None):
    outputs, start = [], 0
    for width in widths:
        part = None if mask is None else mask[:, : start + width]
        outputs.append(
            model(ids[:, start : start + width], attention_mask=part, past_key_values=cache).logits
        )
        start += width
    return torch.cat(outputs, dim=1)


def restored(pair):
    """``(keys, values)`` of both layers as attention reads them."""
    return [layer.restored([None, None, *pair]) for layer in pair]


def make_pair(a, b):
    """Two layers that hold keys ``x[0]`` and values ``x[1]`` natively, each ``[B, H, n, d]``."""
    config = pod.PodConfig(
        hidden_size=48,
        num_attention_heads=6,
        num_key_value_heads=2,
        num_hidden_layers=4,
        head_dim=a[0].shape[3],
    )
    request = Request(spec="minicache", params={})
    pair = tuple(PairLayer(config, i, request, is_deeper=i == 3) for i in (2, 3))
    for layer, (keys, values) in zip(pair, (a, b), strict=True):
        layer.lead_keys.append(keys, 0)
        layer.all_values.append(values, 0)
    return pair


def random_pair(n, d=8, close=0.3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    base = [torch.randn(2, 2, n, d, generator=generator, dtype=torch.float64) for _ in range(2)]
    other = [2.5 * (x + close * torch.randn(x.shape, generator=generator, dtype=torch.float64)) for x in base]
    return base, other


@pytest.mark.parametrize("t", [0.0, 0.6, 1.0])
def test_interpolation_moves_along_the_great_circle(t):
    (a, _), (b, _) = random_pair(40, close=1.5)
    direction, norm_a, norm_b, angle = interpolate(a, b, t)
    ones = torch.ones_like(angle)
    torch.testing.assert_close(direction.norm(dim=-1), ones, rtol=0, atol=1e-12)
    torch.testing.assert_close(
        (direction * a).sum(-1) / a.norm(dim=-1), (t * angle).cos(), rtol=0, atol=1e-12
    )
    torch.testing.assert_close(
        (direction * b).sum(-1) / b.norm(dim=-1), ((1 - t) * angle).cos(), rtol=0, atol=1e-12
    )
    assert torch.equal(norm_a[..., 0], a.norm(dim=-1)) and torch.equal(norm_b[..., 0], b.norm(dim=-1))


def test_interpolation_of_parallel_opposite_and_zero_vectors():
    a = torch.tensor([[3.0, 4.0], [3.0, 4.0], [0.0, 0.0], [0.0, 0.0], [3.0, 4.0]], dtype=torch.float64)
    b = torch.tensor(
        [[6.0, 8.0], [-3.0, -4.0], [0.0, 0.0], [0.0, 2.0], [3.0, 4.0 + 1e-9]], dtype=torch.float64
    )
    direction, norm_a, norm_b, angle = interpolate(a, b, 0.6)
    unit = torch.tensor([0.6, 0.8], dtype=torch.float64)
    torch.testing.assert_close(direction[0], unit, rtol=0, atol=1e-12)
    torch.testing.assert_close(direction[1], -unit, rtol=0, atol=1e-12)  # 0.6 of the way to the deeper one
    assert torch.equal(direction[2], torch.zeros(2, dtype=torch.float64))
    expected = torch.tensor([0.0, math.sin(0.6 * math.pi / 2)], dtype=torch.float64)
    torch.testing.assert_close(direction[3], expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(direction[4], unit, rtol=0, atol=1e-8)
    assert angle[1] == pytest.approx(math.pi) and norm_a[2] == norm_b[2] == 0


@pytest.mark.parametrize("share", [0.0, 0.05, 0.3, 1.0])
@pytest.mark.parametrize("n", [1, 40, 140])
def test_distant_tokens_stay_native_and_the_others_keep_their_norm(share, n):
    a, b = random_pair(n)
    pair = make_pair(a, b)
    merge_pair(*pair, n, num_kept_apart({"share": share, "retained": None}, n, 0), 0.6)
    read = restored(pair)
    count = math.ceil(share * n - 1e-9)
    for part in range(2):
        angles = torch.nn.functional.cosine_similarity(a[part], b[part], dim=-1).clamp(-1, 1).acos()
        for row in range(2):
            for head in range(2):
                order = sorted(range(n), key=lambda i: (-float(angles[row, head, i]), i))
                native, merged = order[:count], order[count:]
                for layer, truth in enumerate((a, b)):
                    got, true = read[layer][part][row, head], truth[part][row, head]
                    assert torch.equal(got[native], true[native])
                    torch.testing.assert_close(
                        got[merged].norm(dim=-1), true[merged].norm(dim=-1), rtol=1e-12, atol=0
                    )
                    if merged:
                        assert (got[merged] - true[merged]).norm() > 1e-3 * true[merged].norm()
                one, two = read[0][part][row, head, merged], read[1][part][row, head, merged]
                cosine = torch.nn.functional.cosine_similarity(one, two, dim=-1)
                torch.testing.assert_close(cosine, torch.ones_like(cosine), rtol=0, atol=1e-12)


def test_a_second_group_is_merged_on_its_own():
    first, second = random_pair(30, seed=1), random_pair(21, seed=2)
    both, alone = make_pair(*first), make_pair(*second)
    merge_pair(*both, 30, 3, 0.6)
    merge_pair(*alone, 21, 3, 0.6)
    for layer, (keys, values) in zip(both, second, strict=True):
        layer.lead_keys.append(keys, 0)
        layer.all_values.append(values, 0)
    merge_pair(*both, 21, 3, 0.6)
    assert both[0].merged_tokens == 51 and both[0].num_apart == 3 + 3
    for got, expected in zip(restored(both), restored(alone), strict=True):
        for x, y in zip(got, expected, strict=True):
            assert torch.equal(x[:, :, 30:], y)


@pytest.mark.parametrize("layers", [5, 8])
@torch.no_grad()
def test_share_of_one_is_full_attention(tools, layers):
    model = tools.make_pod("qwen3", plan=False, num_hidden_layers=layers)
    ids = tools.random_ids(2, 60)
    full, widths = model(ids).logits, [20] + [1] * 15 + [10] + [1] * 15
    logits = feed(model, pod.make_cache(model, "minicache", share=1.0, block=4), ids, widths)
    assert (logits - full).abs().max() <= 1e-9
    merged = feed(model, pod.make_cache(model, "minicache", block=4), ids, widths)
    assert (merged - full)[:, :20].abs().max() <= 1e-9, "a prompt attends to its own native tokens"
    assert (merged - full)[:, 20:].abs().max() > 1e-3


@torch.no_grad()
def test_bytes_at_head_size_128(tools):
    """Measured against the rule, layer by layer; the ratio to dense keys and values in bfloat16."""
    changes = {"num_hidden_layers": 8, "head_dim": 128, "num_key_value_heads": 2, "initializer_range": 0.1}
    model = tools.make_pod("qwen3", torch.bfloat16, plan=False, **changes)
    cache, n = pod.make_cache(model, "minicache"), 700
    feed(model, cache, tools.random_ids(1, n), [n])
    parts = cache.nbytes_by_part()
    held = cache.nbytes - parts.pop("bookkeeping")
    per_token, apart = 2 * 2 * 2 * 128, math.ceil(0.05 * n)  # K and V, 2 KV heads, 2 B, d = 128
    rule = 4 * n * per_token  # the lower half
    rule += (
        2 * n * (per_token + 2 * 2 * 2 * 2)
    )  # per pair one direction and two norms for K, V and 2 KV heads
    rule += 2 * apart * (per_token + 4 * 2 * 2)  # the deeper layer's native vectors and where they belong
    assert rule_nbytes(cache) == rule
    assert abs(held / rule - 1) <= 0.01
    ratio = 8 * n * per_token / held
    print(
        f"minicache holds {ratio:.3f} times fewer bytes at d = 128; by the rule "
        f"{8 * n * per_token / rule:.3f}"
    )
    assert 1.28 <= ratio <= 1.31
    assert parts["keys"] + parts["values"] <= 1.01 * 4 * n * per_token, "pairs hold no native keys or values"


@torch.no_grad()
def test_decoded_tokens_wait_natively_for_a_whole_block(tools):
    model = tools.make_pod("llama", plan=False)
    cache, ids = pod.make_cache(model, "minicache", block=6), tools.random_ids(2, 60)
    feed(model, cache, ids[:, :20], [20])
    for decoded in range(1, 20):
        feed(model, cache, ids[:, 19 + decoded : 20 + decoded], [1])
        (group,) = cache.groups
        assert [type(layer).__name__ for layer in group.layers].count("PairLayer") == 2
        for layer in group.layers[2:4]:
            assert layer.merged_tokens == 20 + decoded // 6 * 6
            assert layer.lead_keys.is_empty == (decoded % 6 == 0)
            assert layer.num_apart == 1 + decoded // 6
        assert group.layers[3].merged["keys"].directions.is_empty, (
            "directions are held once, by the shallower layer"
        )
        dense = 2 * 2 * (20 + decoded) * 5 * 2 * 8 * 8
        assert abs((cache.nbytes - cache.nbytes_by_part()["bookkeeping"]) / rule_nbytes(cache) - 1) <= 0.08
        assert rule_nbytes(cache) < dense


@pytest.mark.parametrize("chunks", [[20], [7, 13], [1, 1, 18]], ids=str)
@torch.no_grad()
def test_padded_rows_equal_rows_alone_in_any_chunking(tools, chunks):
    model = tools.make_pod("qwen3-g3", plan=False)
    ids, mask = tools.random_ids(3, 50), torch.ones(3, 50, dtype=torch.long)
    mask[0, :9], mask[1, 36:38], mask[2, :2] = 0, 0, 0
    cache = pod.make_cache(model, "minicache", block=3)
    cache.begin_prompt(20)
    logits = feed(model, cache, ids[:, :34], [*chunks, *[1] * 14], mask[:, :34])
    order = torch.tensor([2, 0, 1])
    cache.reorder_cache(order)
    more = []
    for start, end in ((34, 44), *((t, t + 1) for t in range(44, 50))):
        more.append(
            model(ids[order, start:end], attention_mask=mask[order, :end], past_key_values=cache).logits
        )
    logits = torch.cat((logits[order], *more), dim=1)
    for place, row in enumerate(order.tolist()):
        real = mask[row].bool()
        widths = [int(mask[row, :20].sum()), *[1] * 14, int(mask[row, 34:44].sum()), *[1] * 6]
        alone = feed(model, pod.make_cache(model, "minicache", block=3), ids[row][real][None], widths)
        assert (logits[place][real] - alone[0]).abs().max() <= 1e-9


def test_what_cannot_be_is_refused(tools):
    model, dense = tools.make_pod(), tools.make_pod(plan=False)
    with pytest.raises(ValueError, match="both methods share between layers"):
        pod.make_cache(model, "pod+minicache")
    with pytest.raises(ValueError, match="takes no budget"):
        pod.make_cache(dense, "minicache", budget=100)
    for options, message in (
        ({"block": 0}, "block = 0 must be at least 1"),
        ({"share": 1.5}, "share = 1.5 must lie between 0 and 1"),
        ({"t": -0.1}, "t = -0.1 must lie between 0 and 1"),
    ):
        with pytest.raises(ValueError, match=message):
            pod.make_cache(dense, "minicache", **options)
