"""The picture of prepared data.

Its numbers are ones that a reader understands, its bars have the right size, and it has the same bytes again.
"""

import matplotlib.image
import numpy as np
import pytest

from pod.data.rows.length_pictures import AFTER, BEFORE, DRY, draw_lengths, short_number


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


def manifest_of(before, after, dry=()):
    intervals = [
        {
            "name": f"{number}K–{number + 1}K",
            "tokens_before": tokens,
            "documents_before": 5,
            "tokens_after": drawn,
            "documents_after": 2,
            "ran_dry": number in dry,
            "passes": 1.5 * drawn / tokens,
        }
        for number, (tokens, drawn) in enumerate(zip(before, after, strict=True))
    ]
    totals = {"num_tokens": sum(after), "num_rows": 2, "context_length": 4096}
    return {"intervals": intervals, "balance": {"equal_share_tokens": 100}, **totals}


def colored(path, color):
    """Which pixels of a PNG have the color, bool [height, width]."""
    pixels = (matplotlib.image.imread(path)[..., :3] * 255).round().astype(int)
    rgb = [int(color[at : at + 2], 16) for at in (1, 3, 5)]
    return np.abs(pixels - rgb).max(-1) <= 1


def test_bars_have_the_height_of_the_tokens(tmp_path):
    draw_lengths(manifest_of([100, 200, 400], [100, 100, 100]), tmp_path / "lengths.png")
    for color, expected in ((BEFORE, [100, 200, 400]), (AFTER, [100, 100, 100])):
        heights = colored(tmp_path / "lengths.png", color).sum(0)
        heights = heights[heights > 10]  # pixel columns inside bars, left to right
        bars = [heights[int(len(heights) * (number + 0.5) / 3)] for number in range(3)]
        np.testing.assert_allclose(np.array(bars) / bars[0], np.array(expected) / 100, rtol=0.05)


def test_dry_intervals_have_their_own_color(tmp_path):
    draw_lengths(manifest_of([50, 400], [50, 150]), tmp_path / "wet.png")
    draw_lengths(manifest_of([50, 400], [50, 150], dry=[0]), tmp_path / "dry.png")
    assert not colored(tmp_path / "wet.png", DRY).any() and colored(tmp_path / "dry.png", DRY).sum() > 1000


def test_many_intervals_have_room_and_the_same_bytes_again(tmp_path):
    for name in ("a.png", "b.png"):
        draw_lengths(manifest_of([100] * 30, [70] * 30), tmp_path / name)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    assert matplotlib.image.imread(tmp_path / "a.png").shape[1] > 3000
