"""What the pictures of a plan show.

One mark per lead, one cell per (layer, KV head), and the measured numbers.
"""

from dataclasses import replace

import matplotlib.image
import numpy as np
import pytest
from matplotlib.colors import to_rgb

from pod.modeling.model.sharing import SharingPlan
from pod.modeling.retrieval_heads import RetrievalHeads
from pod.plan.plan_report import (
    SINGLE_COLOUR,
    block_picture,
    head_score_picture,
    pareto_picture,
    save_picture,
    similarity_picture,
)

PLAN = SharingPlan(lead=((0, 0), (0, 1), (0, None), (3, 1)))


def similarity(num_layers=4, num_query_heads=6):
    return np.random.default_rng(0).random((num_layers, num_layers, num_query_heads))


def test_block_picture_marks_leads_and_greys_single_layers():
    axes = block_picture(PLAN, "m").axes[0]
    leads = {
        tuple(point)
        for line in axes.lines
        for point in zip(*line.get_data(), strict=True)
        if line.get_marker() == "o"
    }
    assert leads == {(0, 0), (1, 1)}
    cells = axes.images[0].get_array()  # [L, H, 3]
    grey = {(x, y) for y, x in np.argwhere((cells == to_rgb(SINGLE_COLOUR)).all(-1))}
    assert grey == {(0, 3), (1, 0)}
    assert np.argwhere((cells == 1).all(-1)).tolist() == [[2, 1]]  # the window
    assert (cells[1, 0] == cells[0, 0]).all() and (cells[2, 0] == cells[0, 0]).all()
    title = axes.get_title()
    assert "31.2%" in title and "4 lead, 3 follow, 1 keep their window" in title


@pytest.mark.parametrize(
    ("sinks", "seen"),
    [
        ("tokens", "sinks and recent tokens"),
        ("constant", "a constant sink and recent tokens"),
        ("none", "recent tokens"),
    ],
)
def test_block_picture_says_what_windows_see(sinks, seen):
    plan = replace(PLAN, num_sink_tokens=4 if sinks == "tokens" else 0, num_recent_tokens=8, sinks=sinks)
    labels = [text.get_text() for text in block_picture(plan, "m").legends[0].get_texts()]
    assert labels[-1] == f"keeps only its window: {seen}"


@pytest.mark.parametrize(("query_heads", "kv_heads"), [(6, 2), (9, 3), (5, 5), (8, 1), (32, 8)])
def test_one_heat_map_per_query_head(query_heads, kv_heads):
    values = similarity(4, query_heads)
    figure = similarity_picture(values, kv_heads, "m")
    images = [axes.images[0] for axes in figure.axes if axes.images and axes.get_visible()]
    maps = images[:query_heads]
    assert len(images) >= query_heads
    for head, image in enumerate(maps):
        np.testing.assert_array_equal(image.get_array(), values[:, :, head])
        assert image.axes.get_title() == f"query head {head} (KV head {head // (query_heads // kv_heads)})"


def test_score_maps_show_both_scores_of_every_query_head_and_dot_those_chosen():
    induction, echo = np.random.default_rng(2).random((2, 3, 4))
    heads = RetrievalHeads(
        echo=tuple(map(tuple, echo)),
        induction=tuple(map(tuple, induction)),
        num_key_value_heads=2,
        induction_share=0.25,
        echo_share=0.25,
    )
    for axes, scores in zip(head_score_picture(heads, "m").axes, (induction, echo), strict=False):
        np.testing.assert_array_equal(axes.images[0].get_array(), scores)
        dots = {(layer, head) for head, layer in zip(*axes.lines[0].get_data(), strict=True)}
        best = {
            np.unravel_index(place, (3, 4)) for s in (induction, echo) for place in np.argsort(s.flat)[-3:]
        }
        assert dots == best
    none = replace(heads, induction_share=0.0, echo_share=0.0)
    assert not head_score_picture(none, "m").axes[0].lines[0].get_xdata().size


def curve():
    rows = [(0, 8, 0, 0, 0.0), (1, 7, 1, 0, 0.1), (4, 5, 2, 1, 0.4), (6, 4, 2, 2, 1.4)]
    points = [
        {
            "units": units, "saving": units / 16, "cost": cost, "leads": leads, "followers": followers,
            "windows": windows, "packed_layers": [3] if units > 4 else [],
            "cost_without": {"follow": 2 * cost, "window": None if units > 4 else 3 * cost},
        }
        for units, leads, followers, windows, cost in rows
    ]  # fmt: skip
    return {
        "points": points,
        "num_layers": 4,
        "chosen": {"units": 4, "saving": 0.25},
        "budget_length": 64,
        "cost": "nats",
    }


def test_the_curve_shows_every_cost_and_role():
    figure = pareto_picture(curve(), "m")
    lines = {line.get_label(): line.get_data() for line in figure.axes[0].lines}
    np.testing.assert_allclose(lines["allowed"][0], [0, 6.25, 25, 37.5])
    np.testing.assert_allclose(lines["allowed"][1], [0, 0.1, 0.4, 1.4])
    np.testing.assert_allclose(lines["without follow"][1], [0, 0.2, 0.8, 2.8])
    np.testing.assert_allclose(lines["without window"][1], [0, 0.3, 1.2, np.nan])
    np.testing.assert_allclose(lines["the plan"], [[25], [0.4]])
    below = figure.axes[1]
    heights = [area.get_paths()[0].get_extents().y1 for area in below.collections]
    assert heights == [8, 8, 8]  # leads, followers, windows: stacked up to all pairs
    np.testing.assert_array_equal(below.lines[0].get_ydata(), [0, 0, 0, 2])


def test_files_are_readable_pictures(tmp_path):
    figures = {
        "a": similarity_picture(similarity(), 2, "m"),
        "b": block_picture(PLAN, "m"),
        "c": pareto_picture(curve(), "m"),
    }
    for name, figure in figures.items():
        pixels = matplotlib.image.imread(save_picture(figure, tmp_path / "plan" / f"{name}.png"))
        assert min(pixels.shape[:2]) > 300 and pixels[..., :3].std() > 0.01
