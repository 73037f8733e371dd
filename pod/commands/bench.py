"""Measure decode speed: PoD and other cache methods beside the dense cache, all through the decode engine, in one process.

Takes your own model (model.path, model.plan) or random weights of given shapes (bench.shapes). Prints tokens per second, the
ratio to the dense cache round by round, bytes held, and the ratio that bytes alone would allow, with the share of it that was
reached; writes <output_dir>/bench/bench.json. No prompt is read: caches hold random keys and values."""

import argparse

from pod.recipe import Recipe

SECTIONS = "model", "bench"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Shorthands for `--set bench.…=…`."""
    add = parser.add_argument
    add("--shapes", dest="bench.shapes", metavar="NAME", help="random weights of these shapes, as llama3-8b")
    add("--lengths", dest="bench.lengths", metavar="N,M", help="tokens, comma-separated")
    add("--methods", dest="bench.methods", metavar="A,B", help="methods, comma-separated")


def estimate(recipe: Recipe) -> str:
    """Bytes held and read."""
    from pod.bench.run import estimate as estimate_bytes

    return estimate_bytes(recipe)


def main(recipe: Recipe) -> None:
    """Measure as the recipe says."""
    from pod.bench.run import run_bench  # loads torch, which --help and --dry-run do not need

    run_bench(recipe)
