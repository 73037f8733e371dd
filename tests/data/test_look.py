"""`pod data verify` and `pod data inspect`.

Whole data passes. Every damage is one line and exit code 1. Wrong use is one line and exit code 2.
"""

import hashlib
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from pod.commands.inspect import main
from pod.data import DataArgs, PackedDataset, prepare
from pod.data.rows.manifest import manifest_checksum

SHARD_FILES = [f"shard-00001.{name}.npy" for name in ("tokens", "lengths", "starts")]
LISTED = [*SHARD_FILES, "held_out.tokens.bin", "held_out.lengths.npy"]


@pytest.fixture
def run(capsys):
    """run("verify", folder) → (exit code, lines on stdout, lines on stderr)"""

    def call(*arguments):
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as stop:
            code = stop.code
        captured = capsys.readouterr()
        return code, captured.out.splitlines(), captured.err.splitlines()

    return call


def rewrite(folder, change, file=None, array=None):
    """Change the manifest so that every checksum is right again.

    Before that, `array` is replaced in one of the files.
    """
    manifest = json.loads((folder / "manifest.json").read_text())
    if file is not None:
        with open(folder / file, "wb") as stream:
            np.lib.format.write_array(stream, array, allow_pickle=False)
        entry = next(
            e[k] for e in manifest["shards"] for k in ("tokens", "lengths", "starts") if e[k]["file"] == file
        )
        content = (folder / file).read_bytes()
        entry |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    change(manifest)
    manifest["manifest_sha256"] = manifest_checksum(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")


def test_whole_data(packed_folder, run):
    folder = packed_folder()
    code, out, err = run("verify", folder)
    assert (code, err) == (0, [])
    assert out == [f"no damage in {folder}: 8 rows, 498 tokens, 49 documents"]


@pytest.mark.parametrize("name", [*LISTED, "manifest.json"])
def test_every_flipped_byte_is_found(packed_folder, run, name):
    folder = packed_folder()
    whole = (folder / name).read_bytes()
    step = max(1, len(whole) // 60)
    for at in {*range(0, len(whole), step), len(whole) - 1}:
        (folder / name).write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        code, out, err = run("verify", folder)
        lines = out + err
        assert code in (1, 2) and len(lines) == 1 and name in lines[0], f"byte {at}: {lines}"
        # Only the digit of the version can turn whole data into data of another program.
        assert code == 1 or "schema version" in lines[0]
    (folder / name).write_bytes(whole)
    assert run("verify", folder)[0] == 0


@pytest.mark.parametrize("name", LISTED)
@pytest.mark.parametrize("damage", ["truncate", "grow", "delete", "empty"])
def test_size_damage_is_one_line(packed_folder, run, name, damage):
    folder = packed_folder()
    content = (folder / name).read_bytes()
    if damage == "delete":
        (folder / name).unlink()
    else:
        (folder / name).write_bytes({"truncate": content[:-1], "grow": content + b"\0", "empty": b""}[damage])
    code, out, _ = run("verify", folder)
    assert code == 1 and len(out) == 1
    assert (
        name in out[0] and ("is missing" if damage == "delete" else "bytes, but the manifest says") in out[0]
    )


def test_several_damages_are_all_named(packed_folder, run):
    folder = packed_folder()
    for name in LISTED:
        (folder / name).unlink()
    (folder / "notes.txt").write_text("x")
    code, out, _ = run("verify", folder)
    assert code == 1 and len(out) == len(LISTED) + 1
    assert all(sum(name in line for line in out) == 1 for name in [*LISTED, "notes.txt"])


@pytest.mark.parametrize("name", ["shard-00007.tokens.npy", ".shard-00001.tokens.npy.tmp-x", "more/"])
def test_extra_file(packed_folder, run, name):
    folder = packed_folder()
    if name.endswith("/"):
        (folder / name).mkdir()
    else:
        (folder / name).write_bytes(b"")
    code, out, _ = run("verify", folder)
    assert code == 1 and len(out) == 1 and "does not belong to the data" in out[0]


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda m: m.update(num_rows=9), "the shards have 8 rows, but the manifest says 9"),
        (lambda m: m.update(num_documents=50), "have 49 documents, but the manifest says 50"),
    ],
)
def test_counts_that_do_not_agree(packed_folder, run, change, message):
    folder = packed_folder()
    rewrite(folder, change)
    code, out, _ = run("verify", folder)
    assert code == 1 and len(out) == 1 and message in out[0]


@pytest.mark.parametrize(
    "tokens, lengths, message",
    [
        (
            np.full(39, 7),
            [10, 5, 5, 5, 5, 10],
            "has 39 tokens, but held_out.lengths.npy says 40",
        ),
        (
            np.full(40, 7),
            [10, 5, 5, 5, 5, 9],
            "has 40 tokens, but held_out.lengths.npy says 39",
        ),
    ],
)
def test_held_out_text_that_does_not_agree(packed_folder, run, tokens, lengths, message):
    folder = packed_folder()
    (folder / "held_out.tokens.bin").write_bytes(tokens.astype("<u2").tobytes())
    np.save(folder / "held_out.lengths.npy", np.array(lengths, dtype="<i8"))

    def change(manifest):
        for entry in manifest["held_out"]["files"]:
            content = (folder / entry["file"]).read_bytes()
            entry |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}

    rewrite(folder, change)
    code, out, _ = run("verify", folder)
    assert code == 1 and len(out) == 1 and message in out[0]
    (folder / "held_out.lengths.npy").write_bytes(b"no array")
    rewrite(folder, change)
    code, out, _ = run("verify", folder)
    assert code == 1 and len(out) == 1 and "held_out.lengths.npy is not a readable .npy array" in out[0]


def test_no_held_out_text(packed_folder, run):
    folder = packed_folder(held_out={"documents": 0, "tokens": 0, "token_dtype": "uint16", "files": []})
    (folder / "held_out.tokens.bin").write_bytes(b"")
    np.save(folder / "held_out.lengths.npy", np.array([], dtype="<i8"))

    def change(manifest):
        for name in ("held_out.tokens.bin", "held_out.lengths.npy"):
            content = (folder / name).read_bytes()
            digest = hashlib.sha256(content).hexdigest()
            manifest["held_out"]["files"].append({"file": name, "bytes": len(content), "sha256": digest})

    rewrite(folder, change)
    assert run("verify", folder)[0] == 0


def test_array_of_another_type_or_shape(packed_folder, run):
    folder = packed_folder()
    name = "shard-00001.tokens.npy"
    tokens = np.load(folder / name)
    for other in (tokens.astype("<u4"), tokens[:2], tokens.reshape(-1)):
        rewrite(folder, lambda manifest: None, name, other)
        code, out, _ = run("verify", folder)
        assert code == 1 and len(out) == 1 and f"{name} is" in out[0] and "expected uint16 [3, 64]" in out[0]


def test_missing_manifest_is_damage_beside_shards(packed_folder, run):
    folder = packed_folder()
    (folder / "manifest.json").unlink()
    for command in ("verify", "inspect"):
        code, out, err = run(command, folder)
        assert code == 1 and not out and len(err) == 1 and "manifest.json" in err[0]


def test_a_file_outside_the_folder_is_not_read(packed_folder, run):
    folder = packed_folder()
    rewrite(folder, lambda manifest: manifest["held_out"]["files"][0].update(file="../secret"))
    code, out, _ = run("verify", folder)
    assert code == 1 and any("'../secret' is outside the folder" in line for line in out)


def test_foreign_folders_are_wrong_use(tmp_path, packed_folder, run):
    folder = packed_folder("run/data")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/manifest.json").write_text('{"format": "something"}')
    cases = [
        ("missing", "does not exist"),
        ("file", "is a file"),
        ("empty", "has no prepared data"),
        ("run", f"did you mean {folder}?"),
        ("other", "not a manifest of packed rows"),
    ]
    for name, message in cases:
        for command in ("verify", "inspect"):
            code, out, err = run(command, tmp_path / name)
            assert (code, out, len(err)) == (2, [], 1) and err[0].startswith("error: ") and message in err[0]


def test_version_one_is_wrong_use(packed_folder, run):
    folder = packed_folder()
    rewrite(folder, lambda manifest: manifest.update(schema_version=1))
    code, _, err = run("verify", folder)
    assert code == 2 and len(err) == 1 and "schema version 1" in err[0]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["verify"], "the following arguments are required: folder"),
        (["inspect", "x", "--rows", "-1"], "'-1' is not a number of rows"),
        (["inspect", "x", "--rows", "all"], "'all' is not a number of rows"),
        (["check", "x"], "invalid choice: 'check'"),
        ([], "the following arguments are required: verify|inspect"),
    ],
)
def test_wrong_arguments(run, arguments, message):
    code, _, err = run(*arguments)
    assert code == 2 and message in err[-1]


def test_rows_are_decoded_with_the_tokenizer_of_the_data(packed_folder, run, tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    first = np.load(
        packed_folder("named", tokenizer_source=str(tmp_path / "tokenizer")) / "shard-00000.tokens.npy"
    )
    text = tokenizer.decode(first[0].tolist())
    code, out, err = run("inspect", tmp_path / "named", "--rows", 1)
    assert (code, err) == (0, []) and f"          64  {text[:60]}" in "\n".join(out)
    packed_folder("unnamed")
    code, out, err = run("inspect", tmp_path / "unnamed", "--rows", 1, "--tokenizer", tmp_path / "tokenizer")
    assert (code, err) == (0, []) and text[:60] in "\n".join(out)


def test_another_tokenizer_is_refused(packed_folder, run, tmp_path, byte_tokenizer):
    byte_tokenizer.save_pretrained(tmp_path / "other")
    folder = packed_folder(tokenizer_source=str(tmp_path / "other"))
    code, out, err = run("inspect", folder, "--rows", 1, "--tokenizer", tmp_path / "other")
    assert code == 2 and len(err) == 1 and "not the tokenizer that made this data" in err[0]
    code, out, err = run("inspect", folder, "--rows", 1)  # the manifest's own: ids, and why
    assert code == 0 and len(err) == 1 and "not the tokenizer that made this data" in err[0]
    first = np.load(folder / "shard-00000.tokens.npy")[0]
    assert " ".join(map(str, first[:8])) in "\n".join(out)
    code, out, err = run("inspect", folder, "--rows", 1, "--tokenizer", tmp_path / "nowhere")
    assert code == 2 and len(err) == 1


@pytest.fixture
def prepared(corpus, tokenizer, tmp_path):
    """Really prepared data of a folder and a file."""
    folder, other = corpus([30, 50, 70, 20, 60, 90] * 4), corpus([33, 44, 55] * 3, "other") / "00001.txt"
    args = DataArgs(
        sources=[str(folder), str(other)],
        context_length=64,
        shortest_interval=32,
        held_out_tokens=200,
        target_tokens=10**5,
    )
    prepare(args, tokenizer, tmp_path / "data")
    return tmp_path / "data"


def test_prepared_data_is_whole(prepared, run, tokenizer, capsys):
    tokenizer.save_pretrained(prepared.parent / "tokenizer")
    capsys.readouterr()
    assert run("verify", prepared)[0] == 0
    code, out, err = run("inspect", prepared, "--rows", 10**6, "--tokenizer", prepared.parent / "tokenizer")
    assert (code, err) == (0, []) and sum(line.startswith("Row ") for line in out) == len(
        PackedDataset(prepared)
    )


def test_the_installed_command_in_a_closed_pipe_without_utf8(packed_folder):
    """`pod data inspect … | head` on a terminal of another encoding: no traceback, no error code."""
    command = [sys.executable, "-m", "pod", "data", "inspect", packed_folder()]
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONUNBUFFERED": ""}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        error = process.stderr.read()
    assert (process.returncode, error) == (0, b"")
