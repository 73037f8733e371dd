"""`pod data verify` and `pod data inspect`: check prepared data, and show what it contains."""

import argparse
import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from pod.command_line import Parser, add_verbosity
from pod.data.rows.loader import PackedDataset
from pod.data.rows.manifest import listed_files
from pod.data.rows.overview import overview
from pod.data.rows.verify import DamagedData, open_manifest, verify
from pod.errors import one_line
from pod.recipe import exit_with
from pod.verbosity import is_quiet, printing

WHOLE, DAMAGED = 0, 1
"""Exit codes: the data is undamaged, or damaged."""
DESCRIPTION = """Check a folder of prepared data, as `pod data` writes it (verify), \
or show what it contains (inspect).

  pod data verify runs/demo/data               compare every file with its checksum
  pod data inspect runs/demo/data --rows 3     numbers of documents and tokens, and three rows as text

Exit code: 0 = no damage, 1 = damaged (one line for each fault), 2 = wrong arguments."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that is not UTF-8 shows ?, not an error
    arguments = _parser().parse_args(argv)
    try:
        with printing(arguments.verbosity):
            return arguments.run(arguments)
    except DamagedData as error:
        print(f"damaged: {error}", file=sys.stderr)
        return DAMAGED
    except (ValueError, OSError, ImportError) as error:
        exit_with(error)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="pod data", description=DESCRIPTION)
    commands = parser.add_subparsers(metavar="verify|inspect", required=True)
    checks = "compare every file with the checksums in manifest.json"
    shows = "print numbers of documents and tokens, and rows as text"
    check = commands.add_parser("verify", help=checks, description=f"Check prepared data: {checks}.")
    look = commands.add_parser("inspect", help=shows, description=f"Show prepared data: {shows}.")
    for command, run in ((check, _verify), (look, _inspect)):
        command.add_argument("folder", type=Path, help="folder of prepared data, for example runs/demo/data")
        add_verbosity(command)
        command.set_defaults(run=run)
    rows = "also print N rows as text, spread evenly over the data; default 0"
    look.add_argument("--rows", type=_count, default=0, metavar="N", help=rows)
    which = "tokenizer for the text: folder, hub id or tokenizer.json; default: the one that made the data"
    look.add_argument("--tokenizer", metavar="T", help=which)
    return parser


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of rows: give 0 or a larger whole number")
    return int(text)


def _verify(arguments: argparse.Namespace) -> int:
    folder: Path = arguments.folder
    manifest = open_manifest(folder)
    damages = 0
    total = sum(entry["bytes"] for entry in listed_files(manifest))
    with tqdm(total=total, unit="B", unit_scale=True, desc="verify", disable=is_quiet() or None) as progress:
        for line in verify(folder, manifest, progress.update):
            damages += 1
            with progress.external_write_mode():
                print(f"damaged: {line}", flush=True)
    if damages:
        return DAMAGED
    print(
        f"no damage in {folder}: {manifest['num_rows']:,} rows, {manifest['num_tokens']:,} tokens, "
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
    """The tokenizer that made the data, or None and the reason why rows are printed as ids.

    Raises:
        ValueError: the `wanted` tokenizer cannot be loaded, or did not make this data.
    """
    from pod.data.tokens.tokenizers import tokenizer_sha256
    from pod.tokenizer import load_tokenizer

    source = wanted or manifest.get("tokenizer_source")
    why = "its manifest.json does not name a tokenizer"
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
    return None, f"rows are printed as token ids ({why}); to print text, give --tokenizer"
