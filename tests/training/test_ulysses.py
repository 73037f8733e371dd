"""Which rank computes which heads.

As little as possible on the busiest rank of every layer, and `shared_qk` stays where it is.
"""

import itertools
import random

import pytest

from pod.modeling.model.sharing import is_followed
from pod.training.run.ulysses import busiest_pairs, head_pairs, place_heads, share_heads, split_evenly

N, WINDOWS = 4096, (16, 240)


def random_plan(layers, heads, windows, follow, seed):
    """Each pair keeps its window with one probability, else follows its head's last lead with the other."""
    draw, columns = random.Random(seed), []
    for _ in range(heads):
        lead, column = None, []
        for layer in range(layers):
            if draw.random() < windows:
                column.append(None)
                continue
            if lead is None or draw.random() >= follow:
                lead = layer
            column.append(lead)
        columns.append(column)
    return tuple(zip(*columns, strict=True))


def least(work, size):
    """Least work of the busiest rank over every way to deal out heads."""
    shares = split_evenly(len(work), size)
    ends = list(itertools.accumulate(shares))
    return min(
        max(sum(order[end - share : end]) for share, end in zip(shares, ends, strict=True))
        for order in set(itertools.permutations(work))
    )


@pytest.mark.parametrize(
    ("heads", "repeats", "size"), [(4, 1, 2), (5, 1, 2), (3, 1, 2), (6, 1, 3), (3, 2, 4)]
)
@pytest.mark.parametrize("seed", range(4))
def test_without_followers_no_other_way_is_shorter(heads, repeats, size, seed):
    lead = random_plan(6, heads, 0.5, 0.0, seed)
    pairs = head_pairs(lead, repeats, N, WINDOWS)
    orders = place_heads(lead, repeats, pairs, size)
    assert busiest_pairs(orders, pairs, size) == sum(least(row, size) for row in pairs)


@pytest.mark.parametrize(
    ("heads", "repeats", "size"), [(8, 1, 2), (8, 1, 3), (8, 1, 4), (2, 4, 5), (9, 1, 9)]
)
@pytest.mark.parametrize("follow", [0.0, 0.3, 0.8])
def test_every_head_is_computed_once_and_stays_while_its_lead_is_followed(heads, repeats, size, follow):
    for seed in range(5):
        lead = random_plan(12, heads, 0.5, follow, seed)
        pairs = head_pairs(lead, repeats, N, WINDOWS)
        orders = place_heads(lead, repeats, pairs, size)
        assert all(sorted(order) == list(range(heads * repeats)) for order in orders)
        for layer, (order, above) in enumerate(itertools.pairwise(orders)):
            moved = [one for one, other in zip(order, above, strict=True) if one != other]
            assert not any(is_followed(lead, layer, replica // repeats) for replica in moved)
        in_order = [range(heads * repeats)] * 12
        assert busiest_pairs(orders, pairs, size) <= busiest_pairs(in_order, pairs, size)


def test_a_plan_without_windows_keeps_its_order():
    lead = random_plan(12, 8, 0.0, 0.6, 0)
    orders = place_heads(lead, 1, head_pairs(lead, 1, N, WINDOWS), 4)
    assert set(orders) == {tuple(range(8))}


@pytest.mark.parametrize(("size", "most"), [(2, 1.0), (4, 0.9), (8, 0.8)])
def test_query_heads_of_a_kv_head_part_where_ranks_would_wait(size, most):
    """Query heads of a KV head part where ranks would wait.

    8 KV heads of 4 query heads, half of them windows: eight ranks of one KV head each would wait for a whole
    one.
    """
    lead = random_plan(32, 8, 0.5, 0.1, 0)
    shares = share_heads(lead, 32, 8, size, 32_768, (16, 4080))
    pairs = head_pairs(lead, 1, 32_768, (16, 4080))
    whole = 4 * busiest_pairs(place_heads(lead, 1, pairs, size), pairs, size)
    assert shares.repeats > 1 and shares.waited < most * whole
    again = head_pairs(lead, shares.repeats, 32_768, (16, 4080))
    assert shares.waited == 4 // shares.repeats * busiest_pairs(shares.orders, again, size)


def test_heads_stay_whole_where_parting_them_wins_nothing():
    roles, sharing = random_plan(32, 8, 0.5, 0.1, 0), random_plan(32, 8, 0.0, 0.6, 0)
    assert share_heads(sharing, 32, 8, 8, 32_768, (16, 4080)).repeats == 1  # all ranks alike
    assert share_heads(roles, 32, 8, 8, 4096, (16, 4080)).repeats == 1  # every token is proximal
    assert share_heads(roles, 32, 8, 1, 32_768, (16, 4080)).repeats == 1
    assert share_heads(roles, 8, 8, 8, 32_768, (16, 4080)).repeats == 1  # one query head each
    assert share_heads(roles, 32, 8, 16, 4096, (16, 4080)).repeats == 2


def test_half_windows_on_four_ranks_wait_a_tenth_less_than_in_order():
    """8 KV heads, 32 layers: what the module says it wins, for random plans."""
    shorter = []
    for seed in range(6):
        lead = random_plan(32, 8, 0.5, 0.1, seed)
        pairs = head_pairs(lead, 1, 32_768, (16, 4080))
        orders = place_heads(lead, 1, pairs, 4)
        shorter.append(busiest_pairs(orders, pairs, 4) / busiest_pairs([range(8)] * 32, pairs, 4))
    assert max(shorter) < 0.92
