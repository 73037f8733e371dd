"""The schedules of FM, IM and IMDC against numbers worked by hand from the paper's equations."""

from fractions import Fraction
from itertools import pairwise
from statistics import mean

import pytest

from pod.modeling.methods.imdc import (
    LARGEST_RATIO,
    Settings,
    decremental_chunks,
    memory_curve,
    prompt_schedule,
    share_by_retention,
)


def chunk_sizes(plan):
    """``c_i``, in tokens."""
    return [end - start for start, end in pairwise((0, *plan.boundaries))]


def settings(variant="imdc", function="linear", m_max=1024, chunk_size=1024, num_layers=4):
    return Settings(variant, function, m_max, chunk_size, num_layers)


def test_memory_curves():
    """m_max = 100, n = 5: m_0 = 20 and steps of 80/4 (eq. 1), 80/16·i² (eq. 8), 80·sqrt(i)/2 (eq. 9)."""
    assert memory_curve("linear", 100, 5) == (20, 40, 60, 80, 100)
    assert memory_curve("square", 100, 5) == (20, 25, 40, 65, 100)
    assert memory_curve("sqrt", 100, 5) == (20, 60, 77, 89, 100)  # 76.57 and 89.28
    assert memory_curve("fixed", 100, 5) == (100,) * 5
    assert memory_curve("linear", 100, 1) == (100,)
    assert memory_curve("linear", 100, 5, Fraction(60)) == (60, 70, 80, 90, 100)
    assert memory_curve("linear", 3, 2)[0] == 2  # 1.5: halves go up
    assert memory_curve("square", 2, 9)[0] == 1  # 0.22: at least one token


def test_sqrt_is_exact_at_halves():
    """(m_max - m_0)·sqrt(1/4) + m_0 = 8.5 exactly, which goes up to 9."""
    assert memory_curve("sqrt", 17, 5, Fraction(0))[1] == 9
    assert memory_curve("sqrt", 16, 5, Fraction(0))[1] == 8


@pytest.mark.parametrize("num_chunks", [2, 3, 32, 257])
def test_mean_of_linear_memory_is_half_of_the_largest(num_chunks):
    """With m_0 = m_max/n eq. 1 gives m̂ = m_max/2 for every n; rounding moves it by half a token at most."""
    assert abs(mean(memory_curve("linear", 1024, num_chunks)[:-1]) - 512) <= Fraction(1, 2)


def test_chunks_can_become_negative():
    """c = 1024, m_max = 4096, n = 32: m̂ = 2048, m_30 = 3968, so the last chunk would have -896 tokens."""
    memory = memory_curve("linear", 4096, 32)
    assert mean(memory[:-1]) == 2048 and memory[30] == 3968
    assert decremental_chunks(1024, memory)[-1] == -896
    with pytest.raises(
        ValueError, match=r"chunk 32 of 32 would have -896 tokens.*linear 2, sqrt 3, square 1.5"
    ):
        prompt_schedule(settings(m_max=4096), 32768)
    assert chunk_sizes(prompt_schedule(settings("im", m_max=4096), 32768)) == [1024] * 32


@pytest.mark.parametrize("function", LARGEST_RATIO)
def test_limits_for_very_long_prompts(function):
    """A prompt of 2,000 chunks is read just below the stated m_max / c, and refused just above it."""
    limit = LARGEST_RATIO[function] * 4096
    prompt_schedule(settings(function=function, m_max=int(0.98 * limit), chunk_size=4096), 2000 * 4096)
    with pytest.raises(ValueError, match="would have"):
        prompt_schedule(settings(function=function, m_max=int(1.02 * limit), chunk_size=4096), 2000 * 4096)


@pytest.mark.parametrize(("m_max", "change"), [(1024, -1 / 4), (2048, -1 / 3)])
def test_attention_length_against_fixed_memory(m_max, change):
    """The attention length is constant at c + m̂ from the second chunk on (eq. 6).

    That is -25 % of FM's c + m_max for m_max = c, and -33 % for 2c.
    """
    plan, fixed = (prompt_schedule(settings(v, m_max=m_max), 32768) for v in ("imdc", "fm"))
    lengths, longest = (
        [size + before for size, before in zip(chunk_sizes(x), (0, *x.memory[0][:-1]), strict=True)]
        for x in (plan, fixed)
    )
    assert set(lengths[1:]) == {1024 + m_max // 2} and lengths[0] == 1024
    assert max(lengths) / max(longest) - 1 == pytest.approx(change, abs=1e-12)


def test_example_by_hand():
    """P = 100, c = 30, m_max = 40: n = 4, mean 25, m = 10, 20, 30, 40, m̂ = 20, c_i = 25, 35, 25, 15."""
    plan = prompt_schedule(settings(m_max=40, chunk_size=30), 100)
    assert chunk_sizes(plan) == [25, 35, 25, 15] and plan.boundaries == (25, 60, 85, 100)
    assert plan.memory == ((10, 20, 30, 40),) * 4
    assert [plan.next_boundary(done) for done in (0, 24, 25, 59, 84, 85, 99)] == [
        25,
        25,
        60,
        60,
        85,
        100,
        100,
    ]
    assert chunk_sizes(prompt_schedule(settings("im", m_max=40, chunk_size=30), 100)) == [25] * 4
    assert prompt_schedule(settings("fm", m_max=40, chunk_size=30), 100).memory == ((40,) * 4,) * 4


def test_square_sqrt_uses_the_mean_of_the_layers():
    """With square-sqrt, m̂ is the mean of (2·square + 3·sqrt)/5 over m_0 … m_3.

    n = 5, m_max = 100: layers 0, 1 are SQUARE and 2, 3, 4 SQRT.
    """
    plan = prompt_schedule(settings(function="square-sqrt", m_max=100, chunk_size=100, num_layers=5), 500)
    assert plan.memory == ((20, 25, 40, 65, 100),) * 2 + ((20, 60, 77, 89, 100),) * 3
    means = [Fraction(2 * a + 3 * b, 5) for a, b in [(20, 20), (25, 60), (40, 77), (65, 89)]]
    wanted = [Fraction(100), *(100 + sum(means) / 4 - mean for mean in means)]
    assert sum(wanted) == 500
    assert chunk_sizes(plan) == [100, 132, 106, 90, 72]  # ends at 231.9, 337.8, 427.5, 500


def test_a_later_prompt_starts_from_what_is_held():
    """A later prompt starts from what is held.

    n = 4, m_max = 40, 28 tokens held: m_0 = 28, then steps of 4. A full memory stays full, so chunks are
    equal.
    """
    plan = prompt_schedule(settings(m_max=40, chunk_size=30), 100, held=28)
    assert plan.memory[0] == (28, 32, 36, 40) and chunk_sizes(plan) == [25, 29, 25, 21]
    assert chunk_sizes(prompt_schedule(settings(m_max=40, chunk_size=30), 100, held=47)) == [25] * 4
    assert prompt_schedule(settings(m_max=40, chunk_size=30), 12, held=28).memory is None
    assert prompt_schedule(settings(m_max=40, chunk_size=30), 13, held=28).memory == ((40,),) * 4


def test_what_fits_is_one_chunk():
    plan = prompt_schedule(settings(m_max=1024, chunk_size=100), 1024)
    assert plan.boundaries == (1024,) and plan.memory is None
    assert len(prompt_schedule(settings(m_max=1024, chunk_size=400), 1025).boundaries) == 3


@pytest.mark.parametrize("variant", ["fm", "im", "imdc"])
@pytest.mark.parametrize("function", LARGEST_RATIO)
def test_chunks_sum_to_the_prompt(variant, function):
    """Chunks sum to the prompt, for ragged prompts and sizes.

    Boundaries rise to the prompt's length, and chunks are the real ones within a token.
    """
    plans = 0
    for length in (1, 7, 101, 700):
        for chunk_size in (1, 3, 64, 100):
            for m_max in (1, 5, 64, 97):
                for layers in (1, 5):
                    try:
                        plan = prompt_schedule(settings(variant, function, m_max, chunk_size, layers), length)
                    except ValueError:
                        continue
                    plans += 1
                    assert plan.boundaries[-1] == length and min(chunk_sizes(plan)) >= 1
                    if plan.memory is not None:
                        assert all(
                            len(sizes) == len(plan.boundaries) and sizes[-1] == m_max for sizes in plan.memory
                        )
                        assert all(list(sizes) == sorted(sizes) for sizes in plan.memory)
    assert plans >= 80


def test_share_by_retention():
    """Eq. 3 in exact fractions: proportional to p, clamped to what a layer has, the rest to the others."""
    half = Fraction(1, 2)
    assert share_by_retention(40, [half, half], [100, 100], 5) == (20, 20)
    assert share_by_retention(40, [half, Fraction(1, 6)], [100, 100], 5) == (30, 10)
    assert share_by_retention(40, [half, Fraction(1, 6)], [24, 100], 5) == (24, 16)  # 6 tokens move over
    assert share_by_retention(40, [half, Fraction(0)], [100, 100], 5) == (
        35,
        5,
    )  # the lowest size counts, too
    assert share_by_retention(40, [half, Fraction(0)], [20, 100], 5) == (20, 5)  # 15 tokens stay unused
    assert share_by_retention(40, [half, half], [15, 20], 5) == (15, 20)
    assert share_by_retention(10, [half, half, half], [9, 9, 9], 1) == (
        4,
        3,
        3,
    )  # 3.33 each: the lower layer first
    assert share_by_retention(40, [half, half], [3, 100], 5) == (3, 37)
    quarter, more = Fraction(1, 4), Fraction(3, 8)  # 2.5, 3.75 and 3.75: the largest fractions first
    assert share_by_retention(10, [quarter, more, more], [9, 9, 9], 1) == (2, 4, 4)
