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
    from pod.data.run.prepare import estimate as estimate_data

    return estimate_data(recipe.data)


def main(recipe: Recipe) -> None:
    """Prepare the data of the recipe for the tokenizer of its model."""
    from pod.data.rows.overview import overview
    from pod.data.rows.pictures import PICTURE_NAME
    from pod.data.run.prepare import prepare
    from pod.data.tokens.tokenizers import load_tokenizer
    from pod.models import resolve_model

    args, model, trained = recipe.data, recipe.model, recipe.train_dir
    tokenizer = args.tokenizer or load_tokenizer(resolve_model(model.path), gguf_file=model.gguf_file)
    args = replace(args, held_out_tokens=recipe.held_out_tokens)
    used_by = trained if (trained / "latest").is_file() else None
    data = prepare(args, tokenizer, recipe.data_dir, seed=recipe.seed, used_by=used_by)
    print(overview(data))
    print(f"rows: {data.path}  picture: {data.path / PICTURE_NAME}")
    print(f"look into it: pod data inspect {shlex.quote(str(data.path))} --rows 3")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The sources by themselves, for `--set data.sources=…`."""
    parser.add_argument("data.sources", nargs="*", metavar="SOURCE", help="files or folders, as data.sources")


def start() -> None:
    """The command line."""
    if sys.argv[1:2] in (["verify"], ["inspect"]):
        from pod.commands.look import main as look

        sys.exit(look(sys.argv[1:]))
    run_recipe(sys.modules[__name__])
