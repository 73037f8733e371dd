"""Pictures say where points are: true positions, ties as ties, no label outside the canvas."""

import io
import itertools

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from pod.eval.report import report_pictures

POINTS = [
    ("full", 1.0, 61.0),
    ("pod", 0.6976, 60.0),
    ("snapkv", 0.7006, 60.1),
    ("h2o", 0.7006, 60.1),
    ("streamingllm", 0.6976, 44.0),
    *[(f"imdc(streamingllm)@{number}%", 0.71, 50.0 + 0.1 * number) for number in range(12)],
]


def points(rows=POINTS):
    return [
        {"label": name, "family": name.partition("@")[0], "share": share, "value": value}
        | {"ci95": [value - 9, value + 7], "higher_is_better": True}
        for name, share, value in rows
    ]


@pytest.fixture
def figure(monkeypatch):
    """The last figure, drawn: `figure(function, …)`."""
    seen = []
    monkeypatch.setattr(report_pictures, "_svg", lambda figure: seen.append(figure) or "<svg>")

    def draw(function, *arguments):
        function(*arguments)
        FigureCanvasAgg(seen[-1]).draw()
        return seen[-1]

    return draw


def markers(figure):
    """(x, y) of everything that is drawn as a marker."""
    lines = [line for line in figure.axes[0].lines if line.get_marker() not in ("None", None, "")]
    return [pair for line in lines for pair in zip(line.get_xdata(), line.get_ydata(), strict=True)]


def labels(figure):
    return {text.get_text(): text for text in figure.axes[0].texts}


def test_points_stand_where_they_were_measured(figure):
    drawn = markers(figure(report_pictures.score_over_bytes, points(), "score", True))
    assert sorted(drawn) == sorted({(100 * share, value) for _, share, value in POINTS})


def test_ties_are_one_marker_with_both_names(figure):
    found = labels(figure(report_pictures.score_over_bytes, points(), "score", True))
    assert "snapkv, h2o" in found and "h2o" not in found
    assert len(found) == len(POINTS) - 1


def test_labels_are_moved_apart_and_joined_to_their_points(figure):
    drawn = figure(report_pictures.score_over_bytes, points(), "score", True)
    texts = list(labels(drawn).values())
    boxes = [Text.get_window_extent(text) for text in texts]  # an annotation's own holds its line, too
    for one, other in itertools.combinations(boxes, 2):
        assert min(one.y1, other.y1) - max(one.y0, other.y0) < 1 or one.x1 < other.x0 or other.x1 < one.x0
    assert {text.xy for text in texts} == set(markers(drawn)) and all(text.arrow_patch for text in texts)
    for box in boxes:
        assert box.x1 <= drawn.bbox.x1 and box.y1 <= drawn.bbox.y1 and box.y0 >= 0


@pytest.mark.parametrize("name", ["imdc(snapkv)@12.5% · {} of a run with a rather long name", "m{}"])
def test_legends_stay_on_the_canvas(figure, name):
    line = {"x": [1, 2], "y": [1, 2], "x_label": "x", "y_label": "y"}
    drawn = figure(report_pictures.curve, {name.format(number): line for number in range(17)})
    box = drawn.legends[0].get_window_extent()
    assert box.x0 >= 0 and box.x1 <= drawn.bbox.x1 and box.y1 <= drawn.bbox.y1
    assert drawn.axes[0].get_window_extent().height > 150  # points of a canvas at 100 per inch


def test_spans_of_perplexity_are_slots_and_not_shifted_positions(figure):
    buckets = [
        {"end": end, "perplexity": value, "ci95": [value - 1, value + 1]}
        for end, value in ((1024, 9.0), (2048, 8.0))
    ]
    drawn = figure(report_pictures.perplexity_by_position, {"full": buckets, "pod": buckets, "h2o": buckets})
    axes = drawn.axes[0]
    assert axes.get_xscale() == "linear" and [t.get_text() for t in axes.get_xticklabels()] == [
        "1,024",
        "2,048",
    ]
    assert sorted({round(x) for x, _ in markers(drawn)}) == [0, 1]


@pytest.mark.parametrize(("name", "percent"), [("passkeys found", True), ("loss (nats per token)", False)])
def test_shares_are_percent_in_curves_too(figure, name, percent):
    line = {"x": [1, 2], "y": [0.25, None], "x_label": "x", "y_label": name}
    texts = [
        tick.get_text() for tick in figure(report_pictures.curve, {"pod": line}).axes[0].get_yticklabels()
    ]
    assert texts and all(text.endswith("%") == percent for text in texts)


def test_pictures_are_svg():
    text = report_pictures.score_over_bytes(points(), "score", True)
    assert text.startswith("<svg") and text == report_pictures.score_over_bytes(points(), "score", True)
    assert io.StringIO(text).read().rstrip().endswith("</svg>")


@pytest.mark.parametrize(
    ("values", "ticks"),
    [([2.0, 3.0], None), ([2.0, 90.0], [2, 5, 10, 20, 50]), ([0.5, 2e5], [1, 10, 100, 1000, 1e4, 1e5])],
)
def test_an_axis_over_many_decades_names_decades_alone(values, ticks):
    axes = report_pictures._canvas(3.0)[1]
    axes.plot(values, values)
    report_pictures._log_if_wide(axes, values)
    if ticks is None:
        assert axes.get_yscale() == "linear"
        return
    shown = [tick for tick in axes.get_yticks() if min(values) <= tick <= max(values)]
    assert shown == pytest.approx(ticks)
