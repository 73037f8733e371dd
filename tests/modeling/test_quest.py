"""Quest: bounds of pages, which pages a query head reads, and that it reads nothing else."""

import pytest
import torch
from rule_bytes import rule_nbytes

import pod
from pod.modeling.methods.base import Request
from pod.modeling.methods.quest import QuestLayer


def feed(model, cache, ids, widths, mask=None):
    outputs, start = [], 0
    for width in widths:
        part = None if mask is None else mask[:, : start + width]
        outputs.append(
            model(ids[:, start : start + width], attention_mask=part, past_key_values=cache).logits
        )
        start += width
    return torch.cat(outputs, dim=1)


def layers_of(cache):
    (group,) = cache.groups
    return group.layers


@pytest.mark.parametrize("widths", [[50], [7, 1, 1, 20, 3, 18], [30] + [1] * 20], ids=str)
@torch.no_grad()
def test_bounds_are_those_of_the_keys_in_a_page(tools, widths):
    model = tools.make_pod("qwen3", plan=False)
    cache = pod.make_cache(model, "quest", budget=8, page_size=4)
    feed(model, cache, tools.random_ids(2, 50), widths)
    for layer in layers_of(cache)[2:]:
        keys, pages = layer.lead_keys.read(50), layer.pages.read(13)
        for page in range(13):
            inside = keys[:, :, 4 * page : min(4 * page + 4, 50)]
            expected = torch.cat((inside.amin(2), inside.amax(2)), dim=-1)
            assert torch.equal(pages[:, :, page], expected)
    assert all(layer.pages.is_empty for layer in layers_of(cache)[:2])


def test_each_query_head_chooses_its_own_pages_and_the_lower_one_of_equals():
    config = pod.PodConfig(hidden_size=48, num_attention_heads=6, num_key_value_heads=2, num_hidden_layers=1)
    generator = torch.Generator().manual_seed(3)
    keys = torch.randn(2, 2, 36, 8, generator=generator, dtype=torch.float64)
    keys[:, :, 12:16] = keys[:, :, 4:8]  # page 3 is page 1
    keys[:, :, 20:24] = keys[:, :, 4:8].flip(2)  # page 5 has the same bounds
    queries = torch.randn(2, 2, 3, 8, generator=generator, dtype=torch.float64)
    for budget in (1, 4, 5, 12, 20):
        params = {"page_size": 4, "num_dense_layers": 0}
        layer = QuestLayer(config, 0, Request(spec="quest", budget=budget, params=params))
        layer._update_pages(keys, 0)
        chosen, count = layer.choose_pages(queries, 9), -(-budget // 4)
        for index in torch.cartesian_prod(torch.arange(2), torch.arange(2), torch.arange(3)).tolist():
            b, h, _ = index
            query, scores = queries[tuple(index)], []
            for page in range(8):
                inside = keys[b, h, 4 * page : 4 * page + 4]
                bound = sum(
                    max(float(query[c] * inside[:, c].min()), float(query[c] * inside[:, c].max()))
                    for c in range(8)
                )
                scores.append((-round(bound, 9), page))
            expected = [*sorted(page for _, page in sorted(scores)[: count - 1]), 8]
            assert chosen[tuple(index)].tolist() == expected


@torch.no_grad()
def test_tokens_of_other_pages_are_not_read(tools):
    """Whatever no query head has chosen may hold anything: it is not part of the result."""
    model = tools.make_pod("llama", plan=False)
    ids = tools.random_ids(1, 60)
    expected, poisoned_tokens = None, 0
    for poison in (False, True):
        cache = pod.make_cache(model, "quest", budget=12, page_size=4)
        feed(model, cache, ids[:, :59], [59])
        for layer in layers_of(cache)[2:]:
            choose = layer.choose_pages

            def choose_then_poison(q, num_pages, layer=layer, choose=choose):
                nonlocal poisoned_tokens
                pages = choose(q, num_pages)
                for head in range(2):
                    unread = set(range(num_pages)) - set(pages[0, head].flatten().tolist())
                    for page in unread:
                        for buffer in (layer.lead_keys, layer.all_values):
                            buffer.data[:, head, 4 * page : 4 * page + 4] = float("nan")
                        poisoned_tokens += 4
                return pages

            if poison:
                layer.choose_pages = choose_then_poison
        logits = feed(model, cache, ids[:, 59:], [1])
        expected = logits if expected is None else expected
    assert torch.equal(logits, expected) and poisoned_tokens >= 3 * 2 * 12


@torch.no_grad()
def test_reading_less_changes_the_result_and_reading_all_does_not(tools):
    model = tools.make_pod("qwen3-g3", plan=False)
    ids = tools.random_ids(2, 60)
    full = model(ids).logits
    enough = feed(model, pod.make_cache(model, "quest", budget=60, page_size=7), ids, [40] + [1] * 20)
    assert (enough - full).abs().max() <= 1e-9
    little = feed(model, pod.make_cache(model, "quest", budget=8, page_size=4), ids, [40] + [1] * 20)
    assert (little - full)[:, :40].abs().max() <= 1e-9, "prompts attend to everything"
    assert (little - full)[:, 40:].abs().max() > 1e-3


@torch.no_grad()
def test_bytes_are_the_dense_ones_and_a_sixteenth(tools):
    model = tools.make_pod("qwen3", torch.float32, plan=False)
    cache = pod.make_cache(model, "quest", budget=64, num_dense_layers=0)
    feed(model, cache, tools.random_ids(2, 830), [800] + [1] * 30)
    parts, dense = (
        cache.nbytes_by_part(),
        2 * 2 * 5 * 2 * 16 * 4,
    )  # K and V, 2 rows, 5 layers, 2 KV heads, d 16, 4 B
    assert rule_nbytes(cache) == dense * 830 + dense * 52
    assert abs((cache.nbytes - parts["bookkeeping"]) / rule_nbytes(cache) - 1) <= 0.01
    assert parts["pages"] >= dense * 52


@torch.no_grad()
def test_padded_rows_equal_rows_alone_and_rows_can_be_reordered(tools):
    model = tools.make_pod("llama", plan=False)
    ids, mask = tools.random_ids(3, 50), torch.ones(3, 50, dtype=torch.long)
    mask[0, :9], mask[1, 33:35] = 0, 0
    options = {"budget": 8, "page_size": 4}
    cache = pod.make_cache(model, "quest", **options)
    logits = feed(model, cache, ids[:, :40], [25, 15], mask[:, :40])
    order = torch.tensor([2, 0, 1])
    cache.reorder_cache(order)
    parts = []
    for t in range(40, 50):
        parts.append(
            model(ids[order, t : t + 1], attention_mask=mask[order, : t + 1], past_key_values=cache).logits
        )
    logits = torch.cat((logits[order], *parts), dim=1)
    for place, row in enumerate(order.tolist()):
        real = mask[row].bool()
        prompt = int(mask[row, :40].sum())
        alone = feed(
            model, pod.make_cache(model, "quest", **options), ids[row][real][None], [prompt] + [1] * 10
        )
        assert (logits[place][real] - alone[0]).abs().max() <= 1e-9


@torch.no_grad()
def test_packed_keys_and_values_can_be_paged(tools):
    """int4 holds less than half; reading all pages then equals int4 alone."""
    model = tools.make_pod("qwen3", torch.float32, plan=False, head_dim=32)
    ids = tools.random_ids(1, 300)
    caches = [pod.make_cache(model, *spec) for spec in (("int4",), ("quest+int4", 300))]
    logits = [feed(model, cache, ids, [290] + [1] * 10) for cache in caches]
    assert (logits[0] - logits[1]).abs().max() <= 1e-4 * logits[0].abs().max()
    parts = caches[1].nbytes_by_part()
    assert parts["keys"] == caches[0].nbytes_by_part()["keys"] and parts["pages"] > 0


def test_what_cannot_be_is_refused(tools):
    model, dense = tools.make_pod(), tools.make_pod(plan=False)
    with pytest.raises(ValueError, match="dense checkpoint, or name the layout, as in 'pod.quest'"):
        pod.make_cache(model, "quest", budget=64)
    with pytest.raises(ValueError, match="needs a budget"):
        pod.make_cache(dense, "quest")
    with pytest.raises(ValueError, match="quest: page_size = 0 must be at least 1"):
        pod.make_cache(dense, "quest", budget=64, page_size=0)
