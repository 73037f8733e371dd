"""Equal tokens per length interval, and what happens when an interval runs dry."""

import numpy as np
import pytest
from data_helpers import drawn_of
from hypothesis import given
from hypothesis import strategies as st

from pod.data.args import DataArgs
from pod.data.balance.length_intervals import (
    balance_report,
    bounds_of,
    choose,
    interval_of,
    share_out,
)

BOUNDS = [1, 64, 128, 256, 512]


def many_lengths(seed=0, number=4000):
    """Lengths as real corpora have them: log-normal, most documents short."""
    lengths = np.exp(np.random.default_rng(seed).normal(4.6, 0.9, number)).astype(np.int64)
    return lengths.clip(2, 512)


def settings(**options):
    options = {"sources": ["texts"], "context_length": BOUNDS[-1], "shortest_interval": BOUNDS[1]} | options
    return DataArgs(**options)


def run(lengths, target, exhausted="stop", seed=0, **options):
    args = settings(target_tokens=target, exhausted=exhausted, **options)
    numbers, drawn = drawn_of(lengths, args, seed)
    return numbers, drawn.intervals


@pytest.mark.parametrize(
    "shortest, context, bounds",
    [
        (1024, 32768, [1, 1024, 2048, 4096, 8192, 16384, 32768]),
        (1024, 2048, [1, 1024, 2048]),
        (1024, 24000, [1, 1024, 2048, 4096, 8192, 16384, 24000]),
        (2048, 2048, [1, 2048, 2048]),
    ],
)
def test_bounds_are_powers_of_two_up_to_the_context(shortest, context, bounds):
    args = DataArgs(shortest_interval=shortest, context_length=context)
    assert bounds_of(args) == bounds


def test_lengths_at_the_bounds():
    lengths = np.array([1, 63, 64, 127, 128, 511, 512])
    assert interval_of(lengths, BOUNDS).tolist() == [0, 0, 1, 1, 2, 3, 3]
    assert interval_of(np.array([2047, 2048]), [1, 2048, 2048]).tolist() == [0, 1]


@pytest.mark.parametrize("target", [8000, 30_000, 80_000])
@pytest.mark.parametrize("exhausted", ["stop", "redistribute", "repeat"])
def test_intervals_are_equal_when_supply_allows(target, exhausted):
    lengths = many_lengths()
    drawn, reports = run(lengths, target, exhausted)
    share = target // 4
    assert not any(report.ran_dry for report in reports)
    for number, report in enumerate(reports):
        tokens = int(lengths[drawn][interval_of(lengths[drawn], BOUNDS) == number].sum())
        assert tokens == report.tokens_after
        assert 0.995 * share <= tokens <= share
    assert len(set(drawn.tolist())) == len(drawn)
    # Counted from the part that is kept.
    assert sum(report.documents_before for report in reports) == pytest.approx(len(lengths), rel=0.25)


def test_lumpy_supply_is_brought_to_the_share_by_exchange():
    """Exchanging one or two documents closes the gap that a random head leaves.

    A plain random head of these documents misses 1,000 tokens by up to 200.
    """
    lengths = np.random.default_rng(1).integers(256, 513, 60)
    for seed in range(20):
        _, reports = run(lengths, 4000, shortest_interval=512, seed=seed, exhausted="redistribute")
        assert 0.995 * 4000 <= reports[0].tokens_after <= 4000


def test_drawing_is_deterministic_in_the_seed():
    lengths = many_lengths()
    assert run(lengths, 30_000, seed=7)[0].tolist() == run(lengths, 30_000, seed=7)[0].tolist()
    other = run(lengths, 30_000, seed=8)[0]
    assert set(run(lengths, 30_000, seed=7)[0].tolist()) != set(other.tolist())
    assert (np.diff(lengths[other]) < 0).mean() > 0.4  # intervals are mixed, not one after the other


SCARCE = [10] * 500 + [100] * 50 + [200] * 50 + [400] * 5  # 5000, 5000, 10000, 2000 tokens


LONG_SCARCE = [length for length in SCARCE if length >= 64]


def test_stop_ends_all_intervals_with_the_scarcest():
    _, reports = run(SCARCE, 16_000, "stop")
    assert [report.tokens_after for report in reports] == [2000] * 4
    assert [report.ran_dry for report in reports] == [False, False, False, True]


def test_repeat_uses_documents_again_as_evenly_as_possible():
    drawn, reports = run(SCARCE, 16_000, "repeat")
    assert [report.tokens_after for report in reports] == [4000] * 4
    counts = np.bincount(drawn, minlength=len(SCARCE))
    assert counts[-5:].tolist() == [2] * 5 and counts[:-5].max() == 1
    assert reports[3].passes == 2 and reports[3].ran_dry
    drawn, reports = run(SCARCE, 20_000, "repeat")
    assert sorted(np.bincount(drawn, minlength=len(SCARCE))[-5:]) == [2, 2, 2, 3, 3]


def test_redistribute_takes_the_missing_tokens_from_the_others():
    drawn, reports = run(SCARCE, 16_000, "redistribute")
    assert reports[3].tokens_after == 2000 and reports[3].ran_dry
    assert all(0.95 * 4667 <= report.tokens_after <= 4667 for report in reports[:3])
    assert len(set(drawn.tolist())) == len(drawn)
    _, reports = run(SCARCE, 10**6, "redistribute")
    assert [report.tokens_after for report in reports] == [report.tokens_before for report in reports]


def test_short_interval_can_be_left_out():
    drawn, reports = run(LONG_SCARCE, 6000, "stop", short_documents="drop")
    assert [report.name for report in reports] == ["64–128", "128–256", "256–512"]
    assert min(np.asarray(LONG_SCARCE)[drawn]) == 100


def test_empty_intervals():
    for exhausted in ("stop", "repeat"):
        with pytest.raises(ValueError, match="no document has 128–256, 256–512 tokens and data.exhausted"):
            run([100] * 50 + [10] * 50, 4000, exhausted)
    _, reports = run([100] * 50 + [10] * 100, 2000, "redistribute")
    assert [report.tokens_after for report in reports] == [1000, 1000, 0, 0]
    with pytest.raises(ValueError, match="no document is left to draw from: set data.long_documents to cut"):
        run(np.empty(0, np.int64), 4000)
    with pytest.raises(ValueError, match="no document was drawn"):
        run([350, 450], 512, "stop", intervals=[300, 400], short_documents="drop")


def test_explicit_intervals():
    assert bounds_of(settings(intervals=[100, 300])) == [1, 100, 300, 512]
    assert bounds_of(settings(intervals=[], shortest_interval=256)) == [1, 256, 512]
    _, reports = run(many_lengths(), 30_000, intervals=[100, 300])
    assert [report.name for report in reports] == ["1–100", "100–300", "300–512"]
    assert all(0.999 * 10_000 <= report.tokens_after <= 10_000 for report in reports)


@given(
    st.integers(0, 10_000),
    st.lists(
        st.tuples(st.integers(0, 3000), st.sampled_from([0.1, 0.3, 1, 2.5, 1e-9])), min_size=1, max_size=5
    ),
)
def test_shares_are_in_the_ratio_of_weights_until_a_source_is_dry(quota, sources):
    supply, weights = zip(*sources, strict=True)
    given_ = share_out(quota, supply, weights)
    assert sum(given_) == min(quota, sum(supply))
    assert all(0 <= share <= held for share, held in zip(given_, supply, strict=True))
    level = [
        share / weight for share, held, weight in zip(given_, supply, weights, strict=True) if share < held
    ]
    for share, held, weight in zip(given_, supply, weights, strict=True):
        if share < held:  # one that could give more: within one token of its ratio to all others
            assert all(abs(share - weight * other) <= 1 + weight / min(weights) for other in level)
        elif level:  # a dry one: has no more than its ratio
            assert share <= weight * max(level) + 1 + weight / min(weights)


def test_shares_in_decimal_weights_are_exact():
    assert share_out(1000, [10**6] * 3, [0.1, 0.2, 0.7]) == [100, 200, 700]
    assert share_out(10, [10**6] * 3, [1, 1, 1]) == [4, 3, 3]
    assert share_out(100, [10, 10**6, 0], [5, 1, 4]) == [10, 90, 0]


def test_choice_of_the_last_pieces():
    few = np.array([300, 300, 300, 500, 100, 260], dtype=np.uint32)
    # 300+300+300 misses 60 of 960; 300+300+260+100 is exact and keeps the first two.
    assert choose(few, 960, 512).tolist() == [0, 1, 4, 5]
    assert choose(few, 899, 512).tolist() == [0, 1, 5]  # 860 is the most below 899
    assert choose(few, 50, 512).tolist() == [] and choose(few, 10**6, 512).tolist() == list(range(6))
    many = np.full(5000, 300, dtype=np.uint32)
    assert len(choose(many, 300 * 4000 + 299, 512)) == 4000  # less than 0.1 % is missing
    assert len(choose(many, 300 * 4000, 512)) == 4000


def test_choice_does_not_need_memory_without_bound():
    """At a million tokens of context only few pieces around the end are chosen anew."""
    lengths = np.random.default_rng(0).integers(2**19, 2**20, 100)
    chosen = choose(lengths, 10_000_000, 2**20)
    assert 0.999 * 10_000_000 <= lengths[chosen].sum() <= 10_000_000


def test_notes_of_dry_intervals():
    for exhausted, what in (
        ("stop", "all intervals are reduced to the scarcest one"),
        ("repeat", "its documents are used 2.0 times"),
        ("redistribute", "the missing tokens come from the other intervals"),
    ):
        _, reports = run(SCARCE, 16_000, exhausted)
        balance = balance_report(settings(target_tokens=16_000, exhausted=exhausted), reports, [])
        assert balance["equal_share_tokens"] == 4000
        dry = f"interval 256–512 ran dry: it has 2,000 tokens, but its share is 4,000; {what}"
        coarse = [note for note in balance["notes"] if "comes closer" in note]
        assert [dry, *coarse] == balance["notes"] and len(coarse) == (2 if exhausted == "redistribute" else 0)
        worst = max(abs(report.tokens_after - 4000) for report in reports) / 4000
        assert balance["largest_deviation"] == worst


def test_notes_of_dry_sources():
    args = settings(
        sources=["a", "b"], weights=[1, 1], target_tokens=4000, intervals=[64], context_length=128
    )
    args.short_documents = "drop"
    _, drawn = drawn_of([100] * 50, args, 0, [1] * 10 + [0] * 40)
    notes = balance_report(args, drawn.intervals, drawn.shares)["notes"]
    assert notes == [
        "interval 64–128: source 'b' ran dry: it has 1,000 tokens, but its share is 2,000; the missing "
        "tokens come from the other sources"
    ]
    assert drawn.intervals[0].tokens_after == 4000


def test_note_when_documents_are_too_coarse():
    args = settings(target_tokens=900, intervals=[64, 300])
    _, reports = run([10] * 100 + [200] * 10 + [400] * 10, 900, intervals=[64, 300])
    assert balance_report(args, reports, [])["notes"] == [
        "interval 64–300 has 200 tokens, 33.3 % less than its quota of 300: "
        "no choice of whole documents comes closer",
        "interval 300–512 has 0 tokens, 100.0 % less than its quota of 300: "
        "no choice of whole documents comes closer",
    ]
