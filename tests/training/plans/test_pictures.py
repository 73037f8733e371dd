"""What the pictures of a plan show: one mark per lead, one cell per (layer, KV head), the measured numbers."""

from dataclasses import replace

import matplotlib.image
import numpy as np
import pytest
from matplotlib.patches import Rectangle

from pod.modeling.retrieval_heads import RetrievalHeads
from pod.modeling.shipped.sharing import SharingPlan
from pod.training.plans.pictures import (
    SINGLE_COLOUR,
    adjacent_similarity,
    block_picture,
    cost_maps,
    head_maps,
    head_score_maps,
    pareto_picture,
    save_picture,
    save_similarity_pictures,
)

PLAN = SharingPlan(lead=((0, 0), (0, 1), (0, None), (3, 1)))


def similarity(num_layers=4, num_query_heads=6):
    return np.random.default_rng(0).random((num_layers, num_layers, num_query_heads))


def test_block_picture_marks_leads_and_greys_single_layers():
    axes = block_picture(PLAN, "m").axes[0]
    leads = {(line.get_xdata()[0], line.get_ydata()[0]) for line in axes.lines}
    assert leads == {(0, 0), (1, 1)}
    patches = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    cells = [patch for patch in patches if patch.get_fill()]
    assert len(cells) == 7
    grey = {
        (round(cell.get_x() + 0.45), round(cell.get_y() + 0.5))
        for cell in cells
        if cell.get_facecolor()[:3]
        == pytest.approx([int(SINGLE_COLOUR[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    }
    assert grey == {(0, 3), (1, 0)}
    hollow = [x for x in patches if not x.get_fill() and x.get_edgecolor()[0] < 0.9]
    assert [(round(x.get_x() + 0.41), round(x.get_y() + 0.4)) for x in hollow] == [(1, 2)]
    title = axes.get_title()
    assert "31.2%" in title and "4 lead, 3 follow, 1 keep their window" in title


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


def test_cost_maps_show_layers_over_leads_and_dot_what_the_plan_does():
    rng = np.random.default_rng(1)
    follow, window = rng.random((4, 4, 2)) + 0.1, rng.random((4, 2)) + 0.1
    figure = cost_maps(follow, window, PLAN, "m")
    dots = [
        {(x, y) for line in axes.lines for x, y in zip(*line.get_data(), strict=True)}
        for axes in figure.axes[:3]
    ]
    for head, axes in enumerate(figure.axes[:2]):
        image = axes.images[0]
        for layer in range(4):
            for lead in range(4):
                assert np.ma.is_masked(image.get_array()[layer, lead]) == (lead >= layer)
                if lead < layer:
                    assert image.get_array()[layer, lead] == max(follow[lead, layer, head], image.norm.vmin)
        owners = [(layer, row[head]) for layer, row in enumerate(PLAN.lead)]
        assert dots[head] == {(lead, layer) for layer, lead in owners if lead not in (layer, None)}
    low = figure.axes[2].images[0].norm.vmin
    np.testing.assert_array_equal(figure.axes[2].images[0].get_array(), np.maximum(window, low))
    assert dots[2] == {(1, 2)}
    dense = cost_maps(None, np.zeros((4, 2)), SharingPlan.dense(4, 2), "m")
    assert len(dense.axes) == 2 and not dense.axes[0].lines


def test_score_maps_show_both_scores_of_every_query_head_and_dot_those_chosen():
    induction, echo = np.random.default_rng(2).random((2, 3, 4))
    heads = RetrievalHeads(
        echo=tuple(map(tuple, echo)),
        induction=tuple(map(tuple, induction)),
        num_key_value_heads=2,
        induction_share=0.25,
        echo_share=0.25,
    )
    for axes, scores in zip(head_score_maps(heads, "m").axes, (induction, echo), strict=False):
        np.testing.assert_array_equal(axes.images[0].get_array(), scores)
        dots = {(layer, head) for head, layer in zip(*axes.lines[0].get_data(), strict=True)}
        best = {
            np.unravel_index(place, (3, 4)) for s in (induction, echo) for place in np.argsort(s.flat)[-3:]
        }
        assert dots == best
    none = replace(heads, induction_share=0.0, echo_share=0.0)
    assert not head_score_maps(none, "m").axes[0].lines[0].get_xdata().size


def curve():
    rows = [(0, 8, 0, 0, 0.0), (1, 7, 1, 0, 0.1), (4, 5, 2, 1, 0.4), (6, 4, 2, 2, 1.4)]
    points = [
        {
            "units": units, "saving": units / 16, "cost": cost, "leads": leads, "followers": followers,
            "windows": windows, "packed_layers": [3] if units > 4 else [], "cost_without": {"follow": 2 * cost, "window": None if units > 4 else 3 * cost},
            "per_layer": {
                "leads": [2, 2, 2, leads - 6], "followers": [0, 0, 0, followers], "windows": [0, 0, 0, windows]
            },
        }
        for units, leads, followers, windows, cost in rows
    ]  # fmt: skip
    return {
        "points": points,
        "chosen": {"units": 4, "saving": 0.25},
        "budget_length": 64,
        "cost": "projected",
    }


def test_the_curve_shows_every_cost_and_role():
    figure = pareto_picture(curve(), "m")
    lines = {line.get_label(): line.get_data() for line in figure.axes[0].lines}
    np.testing.assert_allclose(lines["allowed roles"][0], [0, 6.25, 25, 37.5])
    np.testing.assert_allclose(lines["allowed roles"][1], [np.nan, 0.1, 0.4, 1.4])
    np.testing.assert_allclose(lines["without follow"][1], [np.nan, 0.2, 0.8, 2.8])
    np.testing.assert_allclose(lines["without window"][1], [np.nan, 0.3, 1.2, np.nan])
    np.testing.assert_allclose(lines["the plan"], [[25], [0.4]])
    for axes, role in zip(figure.axes[2:5], ("leads", "followers", "windows"), strict=True):
        shown = axes.collections[0].get_array()
        np.testing.assert_array_equal(shown, np.array([x["per_layer"][role] for x in curve()["points"]]).T)
    packed = figure.axes[5].collections[0].get_array()
    np.testing.assert_array_equal(packed, np.outer([0, 0, 0, 1], [0, 0, 0, 2]))


def test_files_are_readable_pictures(tmp_path):
    paths = save_similarity_pictures(tmp_path / "plan", similarity(), 2, "m")
    assert [path.name for path in paths] == ["adjacent_similarity.png", "similarity_heads.png"]
    paths.append(save_picture(block_picture(PLAN, "m"), tmp_path / "plan" / "blocks.png"))
    paths.append(save_picture(pareto_picture(curve(), "m"), tmp_path / "plan" / "pareto.png"))
    assert {path.name for path in (tmp_path / "plan").iterdir()} == {path.name for path in paths}
    for path in paths:
        pixels = matplotlib.image.imread(path)
        assert min(pixels.shape[:2]) > 300 and pixels[..., :3].std() > 0.01
