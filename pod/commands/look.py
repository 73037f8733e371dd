"""`pod data verify` and `pod data inspect`: check prepared data, and look into it."""

import argparse
import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from pod.data.rows.loader import PackedDataset
from pod.data.rows.manifest import listed_files
from pod.data.rows.overview import overview
from pod.data.rows.verify import DamagedData, open_manifest, verify
from pod.recipe import exit_with
from pod.schema import one_line

WHOLE, DAMAGED = 0, 1
DESCRIPTION = """Prepared data, the folder that `pod data` writes: is it whole (verify), what is in it (inspect)?
Exit code: 0 all is well, 1 the data is damaged (one line each), 2 wrong use."""


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that is not UTF-8 shows ?, not an error
    arguments = _parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except DamagedData as error:
        print(f"damaged: {error}", file=sys.stderr)
        return DAMAGED
    except (ValueError, OSError, ImportError) as error:
        exit_with(error)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pod data", description=DESCRIPTION, allow_abbrev=False)
    commands = parser.add_subparsers(metavar="verify|inspect", required=True)
    check = commands.add_parser("verify", help="read every byte and compare it with the manifest")
    look = commands.add_parser("inspect", help="print what the data holds")
    for command, run in ((check, _verify), (look, _inspect)):
        command.add_argument("folder", type=Path, help="folder of the prepared data, such as runs/demo/data")
        command.set_defaults(run=run)
    look.add_argument("--rows", type=_count, default=0, metavar="N", help="also show N rows, decoded")
    which = "folder, hub id or tokenizer.json; default: the one in the manifest"
    look.add_argument("--tokenizer", metavar="T", help=which)
    return parser


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of rows (0 or more)")
    return int(text)


def _verify(arguments: argparse.Namespace) -> int:
    folder: Path = arguments.folder
    manifest = open_manifest(folder)
    damages = 0
    total = sum(entry["bytes"] for entry in listed_files(manifest))
    with tqdm(total=total, unit="B", unit_scale=True, desc="verify", disable=None) as progress:
        for line in verify(folder, manifest, progress.update):
            damages += 1
            with progress.external_write_mode():
                print(f"damaged: {line}", flush=True)
    if damages:
        return DAMAGED
    print(
        f"{folder} is whole: {manifest['num_rows']:,} rows, {manifest['num_tokens']:,} tokens, "
        f"{manifest['num_documents']:,} documents"
    )
    return WHOLE


def _inspect(arguments: argparse.Namespace) -> int:
    manifest = open_manifest(arguments.folder)
    tokenizer, note = _tokenizer(manifest, arguments.tokenizer) if arguments.rows else (None, None)
    try:
        print(overview(PackedDataset(arguments.folder), arguments.rows, tokenizer))
    except ValueError as error:
        raise DamagedData(one_line(error)) from None
    if note:
        print(note, file=sys.stderr)
    return WHOLE


def _tokenizer(manifest: dict[str, Any], wanted: str | None) -> tuple[Any, str | None]:
    """The tokenizer that made the data, or None and why the rows are shown as ids; ValueError when the `wanted` one cannot be loaded or is
    another than the data's."""
    from pod.data.tokens.tokenizers import load_tokenizer, tokenizer_sha256

    source = wanted or manifest.get("tokenizer_source")
    why = "the manifest names no tokenizer"
    if source is not None:
        try:
            tokenizer = load_tokenizer(source)
            if tokenizer_sha256(tokenizer) == manifest["tokenizer_sha256"]:
                return tokenizer, None
            why = f"{source} is not the tokenizer that made this data"
        except (ValueError, OSError, ImportError) as error:
            why = one_line(error)
    if wanted is not None:
        raise ValueError(f"--tokenizer {wanted}: {why}")
    return None, f"rows are shown as token ids ({why}): give --tokenizer"
