"""Measure how fast cache methods decode, compared with the dense cache.

The command uses your model (model.path, model.plan) or random weights of a known shape (bench.shapes). It
fills the caches with random keys and values, so it needs no prompt. Its table shows, for each method:
  tokens/s    decoding speed
  full        speed of the dense cache, measured in turns with the method
  x full      tokens/s divided by full
  min–max     lowest and highest x full of all rounds
  graph       whether a decoded token is one CUDA graph
  fused       whether norms, rotation and gates are fused kernels
  x alike     x full where both decode without graphs and fused kernels, which not every method can have
  ceiling     highest ratio possible, if time depended only on the bytes that decoding reads
  reached     x full as a share of the ceiling
  GB          size of the cache
It also writes <output_dir>/bench/bench.json.

  pod bench --config bench_cpu                         a minute on a CPU
  pod bench --shapes llama3-8b --lengths 32768,131072 --methods pod,pod+int4,snapkv@25% \\
            --set model.dtype=bfloat16"""

import argparse

from pod.commands.gpu import prepare
from pod.recipe import Recipe

SECTIONS = "model", "bench"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add shorthands for `--set bench.…=…`."""
    add = parser.add_argument
    shapes = "random weights in the shape of llama3-8b, llama-1b, cpu or tiny, in place of model.path"
    add("--shapes", dest="bench.shapes", metavar="NAME", help=shapes)
    lengths = "tokens in the cache when decoding starts, for example 8192,32768"
    add("--lengths", dest="bench.lengths", metavar="N,M", help=lengths)
    add("--methods", dest="bench.methods", metavar="A,B", help="methods to measure, for example pod,pod+int4")


def estimate(recipe: Recipe) -> str:
    """The size of every cache, the bytes read per step, and the speed that these bytes allow."""
    from pod.bench.run import estimate as estimate_bytes

    return estimate_bytes(recipe)


def main(recipe: Recipe) -> None:
    """Measure what section `bench` asks for."""
    from pod.bench.run import run_bench  # loads torch, which --help and --dry-run do not need

    prepare(recipe, recipe.bench.device, reads=False, decodes=True)
    run_bench(recipe)
