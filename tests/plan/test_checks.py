"""Arrays in the wrong order of axes, of other sizes or with NaN are one line.

This holds wherever plans are made of arrays.
"""

import numpy as np
import pytest
import torch

from pod.modeling.model.sharing import SharingPlan
from pod.plan.align_heads import align
from pod.plan.costs import cost_shapes, match_query_heads, total_costs
from pod.plan.measured_costs import head_scores
from pod.plan.plan_report import similarity_picture
from pod.plan.similarity import dissimilarity, greedy_plan, jensen_shannon_similarity
from pod.plan.solve import PackedCosts, solve


def similarity(layers=6, heads=4):
    values = np.random.default_rng(0).random((layers, layers, heads))
    return (values + values.transpose(1, 0, 2)) / 2


def axes_turned(layers=6, heads=4):
    return similarity(layers, heads).transpose(2, 0, 1)


def with_nan(values, *place):
    values = np.array(values, dtype=np.float64)
    values[place] = np.nan
    return values


FOLLOW, WINDOW = np.ones((5, 5, 3)), np.ones((5, 3))
ALIGNED = np.ones((5, 5, 3, 3))
COSTS = {name: torch.ones(shape) for name, shape in cost_shapes(5, 3).items()}
HALF = {"n": 1024, "near": 32}
CASES = {
    "greedy, [Hq, L, L]": (lambda: greedy_plan(axes_turned(), 2), "similarity has shape [4, 6, 6]"),
    # a shape alone does not tell these apart
    "greedy, as many heads as layers": (lambda: greedy_plan(axes_turned(8, 8), 2), "from layer a to b"),
    "greedy, KV heads": (lambda: greedy_plan(similarity(), 3), "4 query heads, which must be a multiple"),
    "greedy, no KV heads": (lambda: greedy_plan(similarity(), 0), "num_key_value_heads is 0"),
    "greedy, NaN": (lambda: greedy_plan(with_nan(similarity(), 1, 1, 0), 2), "finite and from 0 to 1"),
    "greedy, divergences": (lambda: greedy_plan(5 * similarity(), 2), "it must be finite and from 0"),
    "greedy, threshold": (lambda: greedy_plan(similarity(), 2, threshold=50), "threshold is 50"),
    "dissimilarity": (lambda: dissimilarity(axes_turned(), 2), "similarity has shape [4, 6, 6]"),
    "picture": (lambda: similarity_picture(axes_turned(), 2, "m"), "similarity has shape [4, 6, 6]"),
    "rows": (lambda: jensen_shannon_similarity(torch.ones(4, 5, 6)), "rows has shape [4, 5, 6]"),
    "follow, [H, L, L]": (lambda: solve(FOLLOW.transpose(2, 0, 1), None), "follow has shape [3, 5, 5]"),
    "follow, aligned": (lambda: solve(ALIGNED, None), "follow has shape [5, 5, 3, 3]"),
    "window, [H, L]": (
        lambda: solve(FOLLOW, WINDOW.T),
        "window has shape [3, 5], it must be [L, H] with L = 5",
    ),
    "follow, NaN": (lambda: solve(with_nan(FOLLOW, 1, 2, 0), WINDOW), "follow holds NaN"),
    "window, NaN": (lambda: solve(None, with_nan(WINDOW, 1, 2)), "window holds NaN"),
    "nothing": (lambda: solve(None, np.ones((0, 3))), "window has shape [0, 3]"),
    "align": (lambda: align(FOLLOW, WINDOW, 3), "follow has shape [5, 5, 3], it must be [L, L, H, H]"),
    "align, window": (lambda: align(ALIGNED, WINDOW.T, 3), "window has shape [3, 5]"),
    "align, NaN": (lambda: align(with_nan(ALIGNED, 0, 1, 0, 0), None, 3), "follow holds NaN"),
    "bits": (lambda: PackedCosts(None, WINDOW, WINDOW, WINDOW.T, **HALF), "follow4 has shape [3, 5]"),
    "bits, NaN": (lambda: PackedCosts(None, None, with_nan(WINDOW, 0, 0), WINDOW, **HALF), "lead4 holds NaN"),
    "query heads": (lambda: match_query_heads(torch.ones(4, 5, 6, 6), 3), "errors has shape [4, 5, 6, 6]"),
    "query heads, groups": (lambda: match_query_heads(torch.ones(4, 4, 6, 6), 4), "a multiple of"),
    "costs": (lambda: total_costs(COSTS | {"lead4": torch.ones(3, 5)}, 1.0), "lead4 has shape [3, 5]"),
    "costs, less": (
        lambda: total_costs({"windows": torch.ones(3, 5, 3, 5)}, 1.0),
        "costs of lead4 are missing",
    ),
    "scores": (lambda: head_scores(torch.ones(4, 9, 8), torch.ones(2, 8, 9), 3), "k has shape [2, 8, 9]"),
    "scores, groups": (lambda: head_scores(torch.ones(4, 9, 8), torch.ones(3, 9, 8), 3), "4 query heads"),
    "scores, tokens": (lambda: head_scores(torch.ones(4, 9, 8), torch.ones(2, 9, 8), 9), "num_tokens is 9"),
    "leads": (lambda: SharingPlan.of_leads([[0], [2]], 2), "leads[1] names KV heads [2]"),
}


@pytest.mark.parametrize("case", CASES)
def test_wrong_arrays_are_one_line(case):
    call, words = CASES[case]
    with pytest.raises(ValueError) as seen:
        call()
    assert words in str(seen.value) and "\n" not in str(seen.value)
    assert ": " in str(seen.value), "what to do"


def test_right_arrays_pass():
    assert greedy_plan(similarity(), 2).num_layers == 6
    below = with_nan(FOLLOW, 3, 1, 0)  # not read there
    assert np.isfinite(solve(below, np.where(WINDOW > 0, np.inf, WINDOW)).costs).any()
    assert total_costs(COSTS, 1.0)["windows"].shape == (5, 3, 5, 3)
