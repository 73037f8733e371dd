"""Turn documents into packed training rows: tokenise, draw the same number of tokens from every length interval, pack whole
documents into rows of the context's size, and hold out as much text as explore, train and eval ask for. Writes shards, held-out text,
manifest.json and lengths.png into <output_dir>/data; that folder is all that the other commands read.

`pod data verify FOLDER` says whether such a folder is whole, `pod data inspect FOLDER --rows 3` what is in it."""

import argparse
import shlex
import sys
from dataclasses import replace

from pod.commands import run_recipe
from pod.recipe import Recipe

SECTIONS = "model", "data"


def estimate(recipe: Recipe) -> str:
    """Intervals, tokens and disk."""
    from pod.commands.ahead import check_lengths
    from pod.data.run.prepare import estimate as estimate_data

    try:
        notes = check_lengths(recipe)
    except ValueError as error:
        notes = [f"note: `pod data` will refuse this: {error}"]
    return "\n".join([*notes, estimate_data(recipe.data)])


def main(recipe: Recipe, overwrite: bool = False) -> None:
    """Prepare the data of the recipe for the tokenizer of its model; overwrite: replace rows of other settings."""
    from pod.commands.ahead import check_lengths, notes_on_rows
    from pod.data.rows.overview import overview
    from pod.data.rows.pictures import PICTURE_NAME
    from pod.data.run.prepare import prepare
    from pod.data.tokens.tokenizers import load_tokenizer
    from pod.models import resolve_model

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
    print(f"rows: {data.path}  picture: {data.path / PICTURE_NAME}")
    print(f"look into it: pod data inspect {shlex.quote(str(data.path))} --rows 3")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The sources by themselves, for `--set data.sources=…`, and the consent to replace what is there."""
    parser.add_argument("data.sources", nargs="*", metavar="SOURCE", help="files or folders, as data.sources")
    text = "replace rows of other settings, which are kept and refused otherwise"
    parser.add_argument("--overwrite", action="store_true", help=text)


def start() -> None:
    """The command line."""
    if sys.argv[1:2] in (["verify"], ["inspect"]):
        from pod.commands.look import main as look

        sys.exit(look(sys.argv[1:]))
    run_recipe(sys.modules[__name__])
