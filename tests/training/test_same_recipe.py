"""The same recipe on other ranks trains the same: rows, their order, and the loss curve."""

import pytest
from worker_recipe import LAYOUTS, STEPS

pytestmark = pytest.mark.multiprocess


def of_layout(results, ranks, size):
    return [results[f"ranks{ranks}_sp{size}_rank{rank}"] for rank in range(ranks)]


@pytest.mark.parametrize(("ranks", "size"), LAYOUTS[1:])
def test_loss_curves_are_one_curve(recipe_results, ranks, size):
    (alone,) = of_layout(recipe_results, 1, 1)
    for own in of_layout(recipe_results, ranks, size):
        assert own["losses"] == pytest.approx(alone["losses"], rel=1e-6)
    assert alone["losses"][-1] < 0.9 * alone["losses"][0]


@pytest.mark.parametrize(("ranks", "size"), LAYOUTS[1:])
def test_every_step_reads_the_same_rows(recipe_results, ranks, size):
    (alone,) = of_layout(recipe_results, 1, 1)
    groups: dict[int, list] = {}
    for own in of_layout(recipe_results, ranks, size):
        assert groups.setdefault(own["dp_rank"], own["read"]) == own["read"], "one group reads the same rows"
    assert len(groups) == ranks // size
    for step in range(STEPS):
        together = sorted(row for read in groups.values() for row in read[step])
        assert together == sorted(alone["read"][step]) and len(set(together)) == 4
