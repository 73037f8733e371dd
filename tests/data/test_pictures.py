"""The picture of the length histogram: numbers a reader understands, a file that holds bars."""

import matplotlib.image
import numpy as np
import pytest

from pod.data.pictures import AFTER, BEFORE, draw_lengths, short_number


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
    pixels = (matplotlib.image.imread(tmp_path / "lengths.png")[..., :3] * 255).round().astype(int)
    for color, expected in ((BEFORE, [100, 200, 400]), (AFTER, [100, 100, 100])):
        rgb = [int(color[at : at + 2], 16) for at in (1, 3, 5)]
        heights = (np.abs(pixels - rgb).max(-1) <= 1).sum(0)
        heights = heights[heights > 10]  # pixel columns inside bars, left to right
        bars = [heights[int(len(heights) * (number + 0.5) / 3)] for number in range(3)]
        np.testing.assert_allclose(np.array(bars) / bars[0], np.array(expected) / 100, rtol=0.05)
