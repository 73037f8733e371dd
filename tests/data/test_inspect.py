"""What `pod-data inspect` says: the right numbers, everything that was left out, and lines that a terminal can show."""

import json

import numpy as np
import pytest

from pod.data.inspect import (
    bar,
    clean,
    columns,
    left_out,
    packing,
    report,
    sample_row,
    shorten,
    to_text,
    wrapped,
)
from pod.data.pictures import count_classes
from pod.data.verify import open_manifest

ROWS = [[64], [40, 24], [20, 20, 20], [10] * 6, [63], [2] * 32, [30, 30], [50, 13]]
"""Document lengths of the rows that `packed_folder` writes."""


class Spelling:
    """A tokenizer that says `<id>` for each token; decodes with what all kinds of tokenizers have."""

    def decode(self, ids, skip_special_tokens=True):
        assert not skip_special_tokens, "a reader wants to see the boundary tokens"
        return "".join(f"<{token}>" for token in ids)


def text_of(folder, **options):
    return to_text(report(folder, open_manifest(folder), **options))


def test_report_is_json_and_holds_the_totals(packed_folder):
    folder = packed_folder()
    content = json.loads(json.dumps(report(folder, open_manifest(folder), rows=3)))
    assert (content["num_tokens"], content["num_documents"], content["num_rows"]) == (498, 49, 8)
    assert content["num_shards"] == 3 and content["seed"] == 3
    assert content["bytes"] == sum(f.stat().st_size for f in folder.iterdir() if f.name != "manifest.json")
    assert [row["row"] for row in content["rows"]] == [0, 2, 5]


def test_packing_counts_documents_and_padding(packed_folder):
    folder = packed_folder()
    found = packing(folder, open_manifest(folder))
    assert found["documents_per_row"] == {1: 2, 2: 3, 3: 1, 6: 1, 32: 1}
    assert found["mean_documents_per_row"] == 49 / 8 and found["longest_document"] == 64
    assert found["padding_tokens"] == 8 * 64 - 498
    # padding of the rows: 0 0 4 4 1 0 4 1 of 64
    classes = {entry["name"]: (entry["rows"], entry["padding_tokens"]) for entry in found["padding_classes"]}
    assert classes == {
        "none": (3, 0),
        "up to 0.1 %": (0, 0),
        "up to 1 %": (0, 0),
        "up to 10 %": (5, 14),
        "up to 50 %": (0, 0),
        "above 50 %": (0, 0),
    }


@pytest.mark.parametrize("number", range(len(ROWS)))
def test_sample_row_is_the_row(packed_folder, number):
    folder = packed_folder()
    tokens = np.concatenate([np.load(folder / f"shard-0000{shard}.tokens.npy") for shard in range(3)])[number]
    row = sample_row(folder, open_manifest(folder), number, Spelling())
    assert [document["tokens"] for document in row["documents"]] == ROWS[number]
    assert row["padding"] == 64 - sum(ROWS[number]) and row["tokens"] == sum(ROWS[number])
    assert "".join(document["text"] for document in row["documents"]) == "".join(
        f"<{token}>" for token in tokens[: row["tokens"]]
    )
    for document in row["documents"]:
        ids = [int(token) for token in document["text"][1:-1].split("><")]
        assert document["first_ids"] == ids[:16] and document["last_ids"] == ids[-16:]


def test_rows_are_spread_and_never_more_than_there_are(packed_folder):
    folder = packed_folder()
    numbers = lambda rows: [row["row"] for row in report(folder, open_manifest(folder), rows)["rows"]]  # noqa: E731
    assert numbers(0) == [] and numbers(1) == [0] and numbers(4) == [0, 2, 4, 6]
    assert numbers(8) == numbers(100) == list(range(8))


def test_everything_left_out_is_there(packed_folder):
    entries = left_out(open_manifest(packed_folder()))
    assert [(entry["reason"], entry["documents"], entry["tokens"]) for entry in entries] == [
        ("empty", 2, None),
        ("unreadable records", 4, None),
        ("gate language", 5, None),
        ("identical to an earlier document", 5, None),
        ("nearly like an earlier document", 3, None),
        ("held out of training", 6, 40),
        ("beyond max_documents", 7, None),
        ("longer than the context", 9, 900),
    ]


def test_text_shows_every_number_in_80_columns(packed_folder):
    text = text_of(packed_folder(), rows=8, tokenizer=Spelling())
    lines = text.splitlines()
    assert max(map(columns, lines)) <= 80
    for part in (
        "498 of 49 documents",
        "8 of 64 tokens, padding 2.73 %",
        "in 3 shards",
        "40 tokens of 6 documents",
        "8 documents, into pieces of 64 and a rest",
        "2 documents spell a special token",
        "1–31",
        "! interval 32–64 ran dry",
        "texts",
        "more/*.txt",
        "from wiki",
        "gate language",
        "longer than the context",
        "a.jsonl line 3 is not JSON",
        "near duplicates (the first 1 of 3):",
        "b.txt: document 7",
        "unreadable in 'texts' (the first 1 of 2):",
        "75.0 %",
        "Row 7: 2 documents, 63 tokens, 1 padding",
        "24 more documents with 48 tokens",
    ):
        assert part in text, part
    # Intervals: documents and tokens before and after, share of the equal share.
    after = {
        name: sum(n for row in ROWS for n in row if low <= n < high)
        for name, low, high in (("1–31", 1, 32), ("32–64", 32, 65))
    }
    for name, tokens in after.items():
        line = next(line for line in lines if line.startswith(name + " "))
        assert line.split()[2:] == [
            str(2 * tokens),
            line.split()[3],
            str(tokens),
            f"{100 * tokens / 249:.1f}",
            "%",
            "0.50",
        ]


def test_long_names_and_large_numbers_stay_in_80_columns(packed_folder):
    folder = packed_folder("a-folder-with-a-rather-long-name-that-nobody-types-twice-but-somebody-made-once")
    manifest = open_manifest(folder)
    manifest["num_tokens"] *= 10**10
    manifest["balance"]["equal_share_tokens"] *= 10**6
    for interval in manifest["intervals"]:
        for name in ("tokens_before", "documents_before", "tokens_after", "documents_after"):
            interval[name] *= 10**6
        interval["name"] = "65536–131072"
    for source in manifest["read"]["sources"]:
        source["source"] = "数据/" + "very-long/" * 20 + source["source"]
        source["documents"] = 10**9
        source["origins"] = {f"origin {number} " + "x" * 100: number * 10**7 for number in range(300)}
        source["skipped_files"] = ["/folder/" + "y" * 300 + ".jsonl.gz cannot be read to its end\x1b[31m"]
    text = to_text(report(folder, manifest))
    assert max(map(columns, text.splitlines())) <= 80
    assert "\x1b" not in text and "\\x1b[31m" in text
    assert text.count("from origin") == 24 and text.count("from 288 more") == 2


def test_a_manifest_without_details_is_shown(tmp_path):
    from pod.data.shards import write_packed_rows

    write_packed_rows(
        tmp_path / "data", [[np.arange(5)]], context_length=8, vocab_size=70_000, tokenizer_sha256="ab" * 32
    )
    text = text_of(tmp_path / "data", rows=1)
    assert "5 of 1 documents" in text and "Row 0: 1 document, 5 tokens, 3 padding" in text
    assert "0 1 2 3 4" in text and "Source" not in text and "Length" not in text


def test_count_classes():
    assert count_classes({1: 4, 2: 3, 3: 2, 4: 1, 5: 7, 8: 1, 9: 1}) == [
        ("1", 4),
        ("2", 3),
        ("3–4", 3),
        ("5–8", 8),
        ("9–16", 1),
    ]
    assert count_classes({3: 1, 40: 2}) == [("3–4", 1), ("5–8", 0), ("9–16", 0), ("17–32", 0), ("33–64", 2)]
    assert count_classes({}) == []


def test_terminal_text():
    assert clean("a\nb\tc\x1b[0m\u202e é 数\0") == "a\\nb\\tc\\x1b[0m\\u202e é 数\\x00"
    assert columns("é数e\u0301") == 4
    assert shorten("abcdef", 6) == "abcdef"
    assert [shorten("abcdefg", 5, where) for where in ("start", "middle", "end")] == [
        "…defg",
        "ab…fg",
        "abcd…",
    ]
    assert shorten("数据数据", 6, "end") == "数据…" and columns(shorten("数据数据", 6)) <= 6
    assert list(wrapped("数据 ab " + "c" * 90, "  ")) == ["  数据 ab", "    " + "c" * 76, "    " + "c" * 14]
    assert list(wrapped("a" * 77 + " b", "  ")) == ["  " + "a" * 77, "    b"]
    assert list(wrapped("a" * 76 + " b", "  ")) == ["  " + "a" * 76 + " b"]
    assert [bar(share) for share in (0, 1e-9, 0.5, 1)] == ["", "▏", "█" * 8, "█" * 16]
