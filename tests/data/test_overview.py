"""What `pod data inspect` says.

It gives the right numbers and everything that was left out, and nothing that a terminal would act upon.
"""

import numpy as np
import pytest

from pod.data import PackedDataset, write_packed_rows
from pod.data.rows.overview import clean, left_out, overview
from pod.data.rows.verify import open_manifest

ROWS = [[64], [40, 24], [20, 20, 20], [10] * 6, [63], [2] * 32, [30, 30], [50, 13]]
"""Document lengths of the rows that `packed_folder` writes."""


class Spelling:
    """A tokenizer that says `<id>` for each token; decodes with what all kinds of tokenizers have."""

    def decode(self, ids, skip_special_tokens=True):
        assert not skip_special_tokens, "a reader wants to see the boundary tokens"
        return "".join(f"<{token}>" for token in ids)


def test_every_number_is_shown(packed_folder):
    text = overview(PackedDataset(packed_folder()), rows=8, tokenizer=Spelling())
    for part in (
        "498 of 49 pieces",
        "8 of 64 tokens, padding 2.73 %",
        "40 tokens of 6 documents",
        "8 pieces of longer documents",
        "3 of 4 work shards of the sources, 140 documents",
        "2 pieces spell a special token",
        "! interval 32–64 ran dry",
        "60                            from  wiki",
        "5  document_filter",
        "9  longer than the context",
        "not read: a.jsonl line 3 is not JSON",
        "Row 7: 2 documents, 63 tokens, 1 padding",
        "48  in 24 more documents",
    ):
        assert part in text, part
    for name, low, high in (("1–31", 1, 32), ("32–64", 32, 65)):
        tokens = sum(n for row in ROWS for n in row if low <= n < high)
        line = next(line for line in text.splitlines() if line.startswith(name + " "))
        assert line.split()[1:] == [str(2 * tokens), str(tokens), f"{100 * tokens / 249:.1f}", "%", "0.50"]


def test_the_columns_of_intervals_are_explained_below_them(packed_folder):
    lines = overview(PackedDataset(packed_folder())).splitlines()
    head = next(number for number, line in enumerate(lines) if line.startswith("Length [tokens]"))
    below = next(line for line in lines[head:] if not line.startswith(("Length", "1–31", "32–64")))
    explained = dict(part.split(": ") for part in below.split("; "))
    assert explained == {
        "of share": "drawn tokens over an equal share of all intervals",
        "passes": "how often each document was drawn",
    }
    assert all(name in lines[head] for name in explained)


@pytest.mark.parametrize(
    "count, numbers", [(0, []), (1, [0]), (4, [0, 2, 4, 6]), (8, range(8)), (99, range(8))]
)
def test_sample_rows_are_the_rows(packed_folder, count, numbers):
    folder = packed_folder()
    text = overview(PackedDataset(folder), count, Spelling())
    tokens = np.concatenate([np.load(folder / f"shard-0000{shard}.tokens.npy") for shard in range(3)])
    shown = [int(line.split()[1][:-1]) for line in text.splitlines() if line.startswith("Row ")]
    assert shown == list(numbers)
    for number in shown:
        first = "".join(f"<{token}>" for token in tokens[number][: ROWS[number][0]])
        assert f"{ROWS[number][0]:>12}  {first[:60]}" in text


def test_everything_left_out_is_there(packed_folder):
    assert list(left_out(open_manifest(packed_folder()))) == [
        ("empty", 2),
        ("unreadable records", 4),
        ("document_filter", 5),
        ("held out of training", 6),
        ("identical to an earlier one", 5),
        ("longer than the context", 9),
    ]


def test_a_manifest_without_details_is_shown(tmp_path):
    write_packed_rows(
        tmp_path / "data", [[np.arange(5)]], context_length=8, vocab_size=70_000, tokenizer_sha256="ab" * 32
    )
    text = overview(PackedDataset(tmp_path / "data"), rows=1)
    assert "5 of 1 documents" in text and "Row 0: 1 documents, 5 tokens, 3 padding" in text
    assert "0 1 2 3 4" in text and "source" not in text and "Length" not in text


def test_terminal_text(packed_folder):
    assert clean("a\nb\tc\x1b[0m\u202e é 数\0") == "a\\nb\\tc\\x1b[0m\\u202e é 数\\x00"
    data = PackedDataset(packed_folder())
    data.manifest["read"]["sources"][0] |= {"source": "x\x1b[31m", "origins": {"y\x1b[2J": 1}}
    assert "\x1b" not in overview(data) and "x\\x1b[31m" in overview(data)
