"""Turn text into packed training rows.

The command reads and tokenizes documents. It takes the same number of tokens from every interval of document
lengths and packs whole documents into rows of data.context_length tokens. It keeps some text out of training,
for explore and eval. The results are in <output_dir>/data, the only folder that the other commands read:
shards, held-out text, manifest.json and lengths.png.

  pod data --config demo                       prepare the data of a recipe
  pod data "my_text/**/*.txt" --set data.target_tokens=1000000 --set output_dir=runs/mine
  pod data verify runs/demo/data               check that prepared data is complete and undamaged
  pod data inspect runs/demo/data --rows 3     show what prepared data contains"""

import argparse
import difflib
import shlex
import sys
from dataclasses import replace
from pathlib import Path

from pod.commands import run_recipe
from pod.recipe import Recipe, exit_with

SECTIONS = "model", "data"
SUBCOMMANDS = ("verify", "inspect")


def estimate(recipe: Recipe) -> str:
    """Text for `--dry-run`: notes on lengths, then length intervals, tokens, disk space, memory and time."""
    from pod.commands.later_refusals import check_lengths
    from pod.data.run.prepare import estimate as estimate_data

    try:
        notes = check_lengths(recipe)
    except ValueError as error:
        notes = [f"note: `pod data` will refuse this: {error}"]
    return "\n".join([*notes, estimate_data(recipe.data)])


def main(recipe: Recipe, overwrite: bool = False) -> None:
    """Prepare the data of the recipe with the tokenizer of its model.

    Args:
        overwrite: replace finished rows that were made with other settings.
    """
    from pod.commands.later_refusals import check_lengths, notes_on_rows
    from pod.data.read.books import split_fragment
    from pod.data.read.discovery import check_sources
    from pod.data.rows.length_pictures import PICTURE_NAME
    from pod.data.rows.manifest import MANIFEST_NAME
    from pod.data.rows.overview import overview
    from pod.data.run.prepare import prepare
    from pod.models import resolve_model
    from pod.tokenizer import load_tokenizer

    # Finished rows are kept even when their sources are gone. Where there are none, the sources are checked
    # first, before the hub is asked for the model.
    if not (recipe.data_dir / MANIFEST_NAME).exists():
        check_sources(split_fragment(source)[0] for source in recipe.data.sources)
    notes = check_lengths(recipe)
    args, model, trained = recipe.data, recipe.model, recipe.train_dir
    tokenizer = args.tokenizer or load_tokenizer(resolve_model(model.path), gguf_file=model.gguf_file)
    args = replace(args, held_out_tokens=recipe.held_out_tokens)
    used_by = trained if any(trained.glob("step-*")) else None
    folder, seed = recipe.data_dir, recipe.seed
    data = prepare(args, tokenizer, folder, seed=seed, used_by=used_by, overwrite=overwrite)
    print(overview(data))
    for note in [*notes, *notes_on_rows(recipe, data.manifest)]:
        print(note)
    print(f"written: {data.path}, with a picture of the lengths in {PICTURE_NAME}")
    print(f"to see some rows: pod data inspect {shlex.quote(str(data.path))} --rows 3")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `pod data FILE …` for `--set data.sources=…`, and the consent to replace finished rows."""
    sources = "files, folders or patterns to read in place of data.sources"
    parser.add_argument("data.sources", nargs="*", metavar="SOURCE", help=sources)
    text = (
        "read the sources again and replace finished rows; "
        "without it rows of other settings are kept and the command stops"
    )
    parser.add_argument("--overwrite", action="store_true", help=text)


def start() -> None:
    """Run the command line: a subcommand, or `pod data` itself."""
    first = sys.argv[1] if len(sys.argv) > 1 else ""
    if first in SUBCOMMANDS:
        from pod.commands.inspect import main as look

        sys.exit(look(sys.argv[1:]))
    near = difflib.get_close_matches(first, SUBCOMMANDS, n=1, cutoff=0.7)
    if near and not Path(first).exists():
        exit_with(ValueError(f"there is no file or folder {first!r} (did you mean `pod data {near[0]}`?)"))
    run_recipe(sys.modules[__name__])
