"""The pictures of prepared data: numbers a reader understands, bars of the right size, labels that do not hide each other."""

import itertools
import json

import matplotlib.image
import numpy as np
import pytest

from pod.data import pictures
from pod.data.inspect import packing
from pod.data.pictures import (
    AFTER,
    BEFORE,
    DRY,
    SOURCE_COLORS,
    draw_all,
    draw_lengths,
    draw_packing,
    draw_sources,
    short_number,
    source_shares,
)
from pod.data.verify import open_manifest, png_is_whole


@pytest.mark.parametrize(
    "value, text",
    [
        (0, "0"),
        (7, "7"),
        (999, "999"),
        (1000, "1k"),
        (75_000, "75k"),
        (999_400, "999k"),
        (999_999, "1M"),
        (9_401_721, "9.4M"),
        (5e9, "5B"),
        (3.2e12, "3.2T"),
    ],
)
def test_short_number(value, text):
    assert short_number(value) == text


def test_bars_have_the_height_of_the_tokens(tmp_path):
    intervals = [
        {
            "name": name,
            "tokens_before": before,
            "documents_before": 5,
            "tokens_after": 100,
            "documents_after": 2,
        }
        for name, before in (("1–1K", 100), ("1K–2K", 200), ("2K–4K", 400))
    ]
    manifest = {
        "intervals": intervals,
        "balance": {"equal_share_tokens": 100},
        "num_tokens": 300,
        "num_rows": 2,
        "context_length": 4096,
        "padding_share": 0.01,
    }
    draw_lengths(manifest, tmp_path / "lengths.png")
    for color, expected in ((BEFORE, [100, 200, 400]), (AFTER, [100, 100, 100])):
        heights = colored(tmp_path / "lengths.png", color).sum(0)
        heights = heights[heights > 10]  # pixel columns inside bars, left to right
        bars = [heights[int(len(heights) * (number + 0.5) / 3)] for number in range(3)]
        np.testing.assert_allclose(np.array(bars) / bars[0], np.array(expected) / 100, rtol=0.05)


def colored(path, color):
    """Which pixels of a PNG have the color, bool [height, width]."""
    pixels = (matplotlib.image.imread(path)[..., :3] * 255).round().astype(int)
    rgb = [int(color[at : at + 2], 16) for at in (1, 3, 5)]
    return np.abs(pixels - rgb).max(-1) <= 1


def manifest_of(tokens_before, share, names=None, exhausted="redistribute"):
    """A manifest whose intervals hold `tokens_before` and give `share` each, as far as they can."""
    intervals = []
    for number, before in enumerate(tokens_before):
        after = share if exhausted == "repeat" else min(share, before)
        intervals.append(
            {
                "name": names[number] if names else f"{2**number}K–{2 ** (number + 1)}K",
                "tokens_before": before,
                "documents_before": before // 700,
                "tokens_after": after,
                "documents_after": after // 700,
                "ran_dry": before < share,
                "passes": after / max(before, 1),
            }
        )
    tokens = sum(interval["tokens_after"] for interval in intervals)
    return {
        "intervals": intervals,
        "balance": {"equal_share_tokens": share},
        "num_tokens": tokens,
        "num_rows": tokens // 8192 + 1,
        "context_length": 8192,
        "padding_share": 0.0041,
    }


def mixture(num_sources, num_intervals):
    """(sources, weights) of a manifest: sources that run dry here and there."""
    rng = np.random.default_rng(0)
    specs = [
        "stdlib:",
        "hub:allenai/dolma:v1_7@train",
        *(f"/data/{'long-name/' * 9}{n}.jsonl.zst" for n in range(9)),
    ]
    sources = [{"source": spec, "train_tokens": 0, "tokens_after": 0} for spec in specs[:num_sources]]
    weights = []
    for number, source in itertools.product(range(num_intervals), range(num_sources)):
        before = int(rng.integers(0, 10**9))
        after = min(before, int(10**9 / num_sources))
        sources[source]["train_tokens"] += before
        sources[source]["tokens_after"] += after
        weights.append(
            {
                "interval": f"{2**number}K–{2 ** (number + 1)}K",
                "source": source,
                "weight": 1 / num_sources,
                "tokens_before": before,
                "tokens_after": after,
            }
        )
    return sources, weights


PACKING = {
    "documents_per_row": {1: 50, 2: 100, 3: 80, 5: 40, 9: 22, 40: 3},
    "mean_documents_per_row": 2.9,
    "padding_share": 0.0041,
    "padding_classes": [
        {"name": name, "rows": rows}
        for name, rows in (
            ("none", 250),
            ("up to 0.1 %", 30),
            ("up to 1 %", 10),
            ("up to 10 %", 3),
            ("up to 50 %", 0),
            ("above 50 %", 2),
        )
    ],
}


@pytest.mark.parametrize(
    "draw",
    [
        lambda path: draw_lengths(manifest_of([9_400_000, 5_200_000, 2_300_000, 900_000], 1_000_000), path),
        lambda path: draw_lengths(
            manifest_of([10**9 // n for n in range(1, 11)], 5 * 10**8, None, "repeat"), path
        ),
        lambda path: draw_lengths(manifest_of([0, 10], 10**6), path),
        lambda path: draw_lengths(
            manifest_of(
                [4_000_000 // n for n in range(1, 33)], 300_000, [f"{n}000–{n + 1}000" for n in range(32)]
            ),
            path,
        ),
        lambda path: draw_packing({"num_rows": 295, "context_length": 8192}, PACKING, path),
        lambda path: draw_sources(source_shares(*mixture(5, 6)), path),
        lambda path: draw_sources(source_shares(*mixture(9, 16)), path),
        lambda path: draw_sources(source_shares(mixture(2, 1)[0], []), path),
    ],
    ids=["4 intervals", "10, repeated", "2, empty", "32", "packing", "5 sources", "9 sources", "no weights"],
)
def test_labels_are_inside_the_picture_and_do_not_hide_each_other(draw, tmp_path, monkeypatch):
    figures = []
    save = pictures._save
    monkeypatch.setattr(pictures, "_save", lambda figure, path: (figures.append(figure), save(figure, path)))
    draw(tmp_path / "picture.png")
    (figure,) = figures
    renderer = figure.canvas.get_renderer()
    boxes = []
    for axis in figure.axes:
        texts = [*axis.texts, axis.title]
        for one in (axis.xaxis, axis.yaxis):
            low, high = sorted(one.get_view_interval())
            texts += [tick.label1 for tick in one.get_major_ticks() if low <= tick.get_loc() <= high]
        boxes += [
            (text.get_text(), text.get_window_extent(renderer))
            for text in texts
            if text.get_text() and text.get_visible() and not text.get_rotation()
        ]
    assert len(boxes) > 8
    for name, box in boxes:
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1, name
    hidden = [
        (one, other)
        for (one, a), (other, b) in itertools.combinations(boxes, 2)
        if a.overlaps(b) and one != other
    ]
    assert not hidden


def test_dry_intervals_have_their_own_color(tmp_path):
    draw_lengths(manifest_of([400, 400, 100], 200), tmp_path / "dry.png")
    draw_lengths(manifest_of([400, 400, 400], 200), tmp_path / "wet.png")
    heights = {
        color: np.median([h for h in colored(tmp_path / "dry.png", color).sum(0) if h > 20])
        for color in (AFTER, DRY)
    }
    assert heights[DRY] / heights[AFTER] == pytest.approx(0.5, rel=0.05)
    assert not colored(tmp_path / "wet.png", DRY).any()


def test_packing_bars(tmp_path):
    draw_packing({"num_rows": 295, "context_length": 8192}, PACKING, tmp_path / "packing.png")
    for color, expected in ((AFTER, [50, 100, 80, 40, 22, 3]), (BEFORE, [250, 30, 10, 3, 2])):
        heights = colored(tmp_path / "packing.png", color).sum(0)
        inside = np.flatnonzero(heights > 1)
        bars = np.array(
            [np.median(heights[part]) for part in np.split(inside, np.flatnonzero(np.diff(inside) > 3) + 1)]
        )
        np.testing.assert_allclose(bars / max(bars), np.array(expected) / max(expected), atol=0.02)


def test_source_bars_have_the_width_of_their_share(tmp_path):
    sources = [
        {"source": name, "train_tokens": before, "tokens_after": after}
        for name, before, after in (("one", 600, 50), ("two", 300, 50), ("three", 100, 100))
    ]
    draw_sources(source_shares(sources, []), tmp_path / "sources.png")
    for color, before, after in zip(SOURCE_COLORS, (600, 300, 100), (50, 50, 100), strict=False):
        pixels = colored(tmp_path / "sources.png", color)
        half = pixels.shape[1] // 2
        widths = [
            np.percentile(side.sum(1)[side.sum(1) > 40], 90) for side in (pixels[:, :half], pixels[:, half:])
        ]
        assert widths[0] / widths[1] == pytest.approx((before / 1000) / (after / 200), rel=0.1)


def test_source_shares():
    sources = [{"source": name, "train_tokens": 10, "tokens_after": 4} for name in ("a", "b", "a")]
    weights = [
        {"interval": "1–2", "source": source, "weight": weight, "tokens_before": 5, "tokens_after": source}
        for source, weight in enumerate((0.5, 0.25, 0.25))
    ]
    shares = source_shares(sources, weights)
    assert [row["name"] for row in shares] == ["1–2", "all"]
    assert list(shares[0]["sources"]) == ["1: a", "b", "3: a"]
    assert shares[0]["sources"]["b"] == {"before": 5, "after": 1, "wanted": 0.25}
    assert shares[1]["sources"]["3: a"] == {"before": 10, "after": 4, "wanted": None}
    assert source_shares(sources[:1], []) == [] and source_shares([], []) == []


def test_draw_all_writes_the_same_bytes_again(packed_folder, tmp_path):
    folder = packed_folder()
    manifest = open_manifest(folder)
    for name in ("a", "b"):
        drawn = draw_all(manifest, packing(folder, manifest), tmp_path / name)
        assert [path.name for path in drawn] == ["lengths.png", "packing.png", "sources.png"]
    for path in drawn:
        assert path.read_bytes() == (tmp_path / "a" / path.name).read_bytes() and png_is_whole(
            path.read_bytes()
        )


def test_one_source_has_no_picture_of_sources(packed_folder, tmp_path):
    folder = packed_folder()
    manifest = json.loads(json.dumps(open_manifest(folder)))
    del manifest["read"]["sources"][1]
    drawn = draw_all(manifest, packing(folder, manifest), tmp_path)
    assert [path.name for path in drawn] == ["lengths.png", "packing.png"]


@pytest.mark.parametrize("count, stacked, documents", [(9, False, True), (10, True, True), (15, True, False)])
def test_many_intervals_get_room(count, stacked, documents, tmp_path, monkeypatch):
    """Before and after one above the other from ten intervals on; only tokens as labels above fourteen."""
    figures = []
    monkeypatch.setattr(pictures, "_save", lambda figure, path: figures.append(figure))
    draw_lengths(manifest_of([10**6] * count, 10**5), tmp_path / "picture.png")
    above, below = figures[0].axes
    assert (above.get_subplotspec().get_geometry()[:2] == (2, 1)) == stacked
    assert any("docs" in label.get_text() for label in [*above.texts, *below.texts]) == documents
