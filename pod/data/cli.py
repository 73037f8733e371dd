"""`pod-data`: check prepared data (`verify`) and look into it (`inspect`)."""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from pod.data.inspect import report, to_text
from pod.data.pictures import draw_all
from pod.data.verify import DamagedData, changed_sources, open_manifest, total_bytes, verify
from pod.files import check_can_write

WHOLE, DAMAGED, WRONG_USE = 0, 1, 2
DESCRIPTION = """Prepared data, the folder that launch/prepare_data.py writes: is it whole (verify), what is in it (inspect)?
Exit code: 0 all is well, 1 the data is damaged or its sources changed (one line each), 2 wrong use."""


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(
                errors="replace"
            )  # a terminal that is not UTF-8 shows ? for a bar, not an error
    arguments = _parser().parse_args(argv)
    try:
        code = arguments.run(arguments)
        sys.stdout.flush()  # here, where a closed pipe can still be told from an error
        return code
    except BrokenPipeError:
        # `pod-data inspect … | head`: the reader has seen enough; keep the interpreter from flushing into the closed pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return WHOLE
    except DamagedData as error:
        print(f"damaged: {error}", file=sys.stderr)
        return DAMAGED
    except (ValueError, OSError, ImportError) as error:
        if os.environ.get("POD_TRACEBACK") == "1":
            raise
        print(f"error: {' '.join(str(error).split()) or type(error).__name__}", file=sys.stderr)
        return WRONG_USE
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pod-data",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    check = commands.add_parser(
        "verify", help="read every byte and compare it with the manifest", allow_abbrev=False
    )
    check.add_argument("folder", type=Path, help="folder of the prepared data, such as runs/demo/data")
    check.add_argument(
        "--sources",
        action="store_true",
        help="also: are the sources still the files that were read? (relative paths count from here)",
    )
    check.set_defaults(run=_verify)
    look = commands.add_parser("inspect", help="print and draw what the data holds", allow_abbrev=False)
    look.add_argument("folder", type=Path, help="folder of the prepared data, such as runs/demo/data")
    look.add_argument("--rows", type=_count, default=0, metavar="N", help="also show N rows, decoded")
    look.add_argument(
        "--tokenizer",
        metavar="T",
        help="folder, file or hub id of the tokenizer; default: the one in the manifest",
    )
    look.add_argument(
        "--pictures",
        type=Path,
        nargs="?",
        const=Path(),
        metavar="DIR",
        help="draw lengths.png, packing.png and, for several sources, sources.png into DIR (default: the data's folder)",
    )
    look.add_argument("--json", action="store_true", help="print JSON instead of text")
    look.set_defaults(run=_inspect)
    return parser


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of rows (0 or more)")
    return int(text)


def _verify(arguments: argparse.Namespace) -> int:
    folder: Path = arguments.folder
    manifest = open_manifest(folder)
    damages = 0
    with tqdm(
        total=total_bytes(manifest), unit="B", unit_scale=True, desc="verify", mininterval=0.5, disable=None
    ) as progress:
        for line in verify(folder, manifest, progress.update):
            damages += 1
            with progress.external_write_mode():
                print(f"damaged: {line}", flush=True)
    if arguments.sources:
        for line in changed_sources(manifest):
            damages += 1
            print(f"changed: {line}")
    if damages:
        return DAMAGED
    print(
        f"{folder} is whole: {manifest['num_rows']:,} rows, {manifest['num_tokens']:,} tokens, "
        f"{manifest['num_documents']:,} documents in {len(manifest['shards']):,} shard"
        + ("" if len(manifest["shards"]) == 1 else "s")
        + (", sources unchanged" if arguments.sources else "")
    )
    return WHOLE


def _inspect(arguments: argparse.Namespace) -> int:
    folder: Path = arguments.folder
    manifest = open_manifest(folder)
    pictures = None
    if arguments.pictures is not None:
        pictures = folder if arguments.pictures == Path() else arguments.pictures
        check_can_write(pictures, "--pictures")
    tokenizer, note = _tokenizer(manifest, arguments.tokenizer) if arguments.rows else (None, None)
    content = report(folder, manifest, arguments.rows, tokenizer)
    print(json.dumps(content, indent=2) if arguments.json else to_text(content))
    if note:
        print(note, file=sys.stderr)
    if pictures is not None:
        drawn = draw_all(manifest, content["packing"], pictures)
        print(f"pictures: {', '.join(map(str, drawn))}", file=sys.stderr if arguments.json else sys.stdout)
    return WHOLE


def _tokenizer(manifest: dict[str, Any], wanted: str | None) -> tuple[Any, str | None]:
    """The tokenizer that made the data, or None and why the rows are shown as ids.

    Raises `ValueError` when the `wanted` one cannot be loaded or is another than the data's.
    """
    from pod.data.tokenizers import load_tokenizer, tokenizer_sha256

    source = wanted or manifest.get("tokenizer_source")
    why = "the manifest names no tokenizer"
    if source is not None:
        try:
            tokenizer = load_tokenizer(source)
            if tokenizer_sha256(tokenizer) == manifest["tokenizer_sha256"]:
                return tokenizer, None
            why = f"{source} is not the tokenizer that made this data"
        except (ValueError, OSError, ImportError) as error:
            why = " ".join(str(error).split())
    if wanted is not None:
        raise ValueError(f"--tokenizer {wanted}: {why}")
    return None, f"rows are shown as token ids ({why}): give --tokenizer"


if __name__ == "__main__":
    sys.exit(main())
