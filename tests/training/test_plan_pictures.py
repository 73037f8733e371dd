"""What the pictures of a plan show: one mark per lead, one cell per (layer, KV head), the measured numbers."""

import matplotlib.image
import numpy as np
import pytest
from matplotlib.patches import Rectangle

from pod.modeling.shipped.sharing import SharingPlan
from pod.training.plan_pictures import (
    SINGLE_COLOUR,
    adjacent_similarity,
    block_picture,
    cost_maps,
    head_maps,
    save_pictures,
)

PLAN = SharingPlan(lead=((0, 0), (0, 1), (0, 1), (3, 1)))


def similarity(num_layers=4, num_query_heads=6):
    return np.random.default_rng(0).random((num_layers, num_layers, num_query_heads))


def test_block_picture_marks_leads_and_greys_single_layers():
    axes = block_picture(PLAN, "m").axes[0]
    leads = {(line.get_xdata()[0], line.get_ydata()[0]) for line in axes.lines}
    assert leads == {(0, 0), (1, 1)}
    cells = [patch for patch in axes.patches if isinstance(patch, Rectangle) and patch.get_fill()]
    assert len(cells) == 8
    grey = {
        (round(cell.get_x() + 0.45), round(cell.get_y() + 0.5))
        for cell in cells
        if cell.get_facecolor()[:3]
        == pytest.approx([int(SINGLE_COLOUR[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    }
    assert grey == {(0, 3), (1, 0)}
    assert "25.0%" in axes.get_title() and "4 blocks" in axes.get_title()


def test_adjacent_curves_are_the_first_off_diagonal():
    values = similarity()
    lines = adjacent_similarity(values, 2, "m").axes[0].lines
    expected = np.array([values[layer, layer - 1] for layer in (1, 2, 3)])
    for head in range(6):
        np.testing.assert_array_equal(lines[head].get_ydata(), expected[:, head])
    np.testing.assert_allclose(lines[6].get_ydata(), expected.mean(1))


@pytest.mark.parametrize(("query_heads", "kv_heads"), [(6, 2), (9, 3), (5, 5), (8, 1), (32, 8)])
def test_one_heat_map_per_query_head(query_heads, kv_heads):
    values = similarity(4, query_heads)
    figure = head_maps(values, kv_heads, "m")
    images = [axes.images[0] for axes in figure.axes if axes.images and axes.get_visible()]
    maps = images[:query_heads]
    assert len(images) >= query_heads
    for head, image in enumerate(maps):
        np.testing.assert_array_equal(image.get_array(), values[:, :, head])
        assert image.axes.get_title() == f"query head {head} (KV head {head // (query_heads // kv_heads)})"


def test_cost_maps_show_layers_over_leads_and_dot_the_pairs_of_the_plan():
    costs = np.random.default_rng(1).random((4, 4, 2)) + 0.1
    figure = cost_maps(costs, PLAN, "loss", "m")
    for head, axes in enumerate(figure.axes[:2]):
        shown = axes.images[0].get_array()
        for layer in range(4):
            for lead in range(4):
                assert np.ma.is_masked(shown[layer, lead]) == (lead >= layer)
                if lead < layer:
                    assert shown[layer, lead] == max(costs[lead, layer, head], axes.images[0].norm.vmin)
        dots = {(x, y) for line in axes.lines for x, y in zip(*line.get_data(), strict=True)}
        assert dots == {(row[head], layer) for layer, row in enumerate(PLAN.lead) if row[head] != layer}
    dense = cost_maps(np.zeros((4, 4, 2)), SharingPlan.dense(4, 2), "loss", "m")
    assert not dense.axes[0].lines


def test_files_are_readable_pictures(tmp_path):
    paths = save_pictures(tmp_path / "plan", similarity(), PLAN, "m")
    assert sorted(path.name for path in paths) == [
        "adjacent_similarity.png",
        "blocks.png",
        "similarity_heads.png",
    ]
    assert sorted(path.name for path in (tmp_path / "plan").iterdir()) == sorted(path.name for path in paths)
    for path in paths:
        pixels = matplotlib.image.imread(path)
        assert min(pixels.shape[:2]) > 300 and pixels[..., :3].std() > 0.01
