"""Speed of every method against the dense cache on CPU: decoding behind 8K and 32K tokens, and reading a prompt of 8K.

    OMP_NUM_THREADS=2 python benchmarks/methods_cpu.py     # benchmarks/results/methods_cpu.json and .md

Four layers, 8 query and 2 KV heads of 128, and next to nothing else: attention over the cache is what is measured. The budget is an
eighth of the prompt; under a plan layer 0 leads for all. Each method decodes in turns with a copy of one dense cache whose
room is reserved, as in `generate()`; ratios are taken round by round, their median and range are in the table. Prompts are read in turns,
with true attention. To decode behind, a prompt is read with an attention that returns zeros (see decode_cpu.py), and by the
methods that rank tokens by attention of the whole prompt only as far as twice their budget, which is all they hold anyway.
"""

import argparse
import copy
import gc
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import pod
from pod.files import write_json
from pod.measure.machine import environment
from pod.measure.race import Contestant, fill, in_turns, race, spread, warm_up, without_attention

LAYERS, HIDDEN, QUERY_HEADS, KV_HEADS, HEAD_DIM, VOCAB = 4, 128, 8, 2, 128, 512
LENGTHS, SHARE, ROOM = (8192, 32768), 8, 512
RESULTS = Path(__file__).parent / "results" / "methods_cpu.json"
BASE = "full"


@dataclass(frozen=True)
class Row:
    """A method to measure; `"budget"` among the options stands for the budget in tokens.

    ranks: by attention of every token of a prompt, so that reading one cheaply is not possible.
    reserved: whether there is room for what is decoded.
    """

    spec: str
    options: dict[str, Any] = field(default_factory=dict)
    ranks: bool = False
    reserved: bool = False

    @property
    def name(self) -> str:
        return f"{self.spec}, reserved" if self.reserved else self.spec

    @property
    def layout(self) -> str:
        first = self.spec.split("+")[0]
        return first if first in ("pod", "cla", "window") else "full"


RAZOR = {"heads": [[0]] * LAYERS, "num_recent_tokens": "budget"}
SIMLAYER = {"num_recent_tokens": "budget", "threshold": 0.0}
ROWS = (
    Row("full"),
    Row("full", reserved=True),
    Row("pod"),
    Row("pod", reserved=True),
    Row("cla"),
    Row("window"),
    *(Row(spec) for spec in ("streamingllm", "lm_infinite", "wa", "local_window", "snapkv", "pyramidkv")),
    *(Row(spec, ranks=True) for spec in ("h2o", "roco", "d2o")),
    Row("simlayerkv", SIMLAYER),
    Row("razor", RAZOR),
    Row("quest"),
    Row("minicache"),
    Row("think"),
    *(Row(spec, {"chunk_size": "budget"}) for spec in ("imdc", "im", "fm")),
    Row("kivi"),
    Row("int4"),
    Row("full+int4", reserved=True),
    Row("int8"),
    *(Row(spec) for spec in ("pod+snapkv", "pod+pyramidkv", "pod+int4", "snapkv+int4", "pod+snapkv+int4")),
    Row("pod+int4", reserved=True),
    Row("simlayerkv+int4", SIMLAYER),
    Row("razor+int4", RAZOR),
)


def build_models(longest: int) -> dict[str, pod.PodForCausalLM]:
    """A model for each layout."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": QUERY_HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 2 * longest,
    }
    layouts = {
        "full": {},
        "pod": {"lead": [[0] * KV_HEADS] * LAYERS, "num_recent_tokens": 1008},
        "cla": {"layout": "cla"},
        "window": {"layout": "window", "num_recent_tokens": 1024},
    }
    return {name: pod.PodForCausalLM(pod.PodConfig(**sizes, **own)).eval() for name, own in layouts.items()}


def new_cache(model: pod.PodForCausalLM, row: Row, length: int) -> pod.PodCache:
    """An empty cache for a prompt of `length` tokens."""
    budget = length // SHARE
    options = {key: budget if value == "budget" else value for key, value in row.options.items()}
    if any(pod.methods()[part].takes_budget for part in row.spec.split("+")):
        options["budget"] = budget
    return pod.make_cache(model, row.spec, **options, **({"capacity": length + ROOM} if row.reserved else {}))


@torch.no_grad()
def filled(model: pod.PodForCausalLM, row: Row, prompt: torch.Tensor) -> pod.PodCache:
    """A cache that has seen the prompt [1, n], or what of it decides how much is held."""
    length = prompt.shape[1]
    cache = new_cache(model, row, length)
    part = prompt[:, : 2 * (length // SHARE)] if row.ranks else prompt
    with without_attention(model):
        model(input_ids=part, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return cache


def ratios(base: list[float], own: list[float]) -> dict[str, float]:
    """How many times as fast as the base, round by round."""
    return spread([other / seconds for other, seconds in zip(base, own, strict=True)])


def compare_decoding(models: dict, rows: list[Row], length: int, steps: int, repeats: int) -> dict[str, dict]:
    """Tokens per second, ratio and bytes of every method behind `length` tokens, each in turns with the dense cache."""
    prompt = torch.randint(VOCAB, (1, length), generator=torch.Generator().manual_seed(0))
    dense = filled(models[BASE], Row(BASE, reserved=True), prompt)
    result = {}
    for row in rows:
        base = Contestant(BASE, models[BASE], copy.deepcopy(dense), prompt[:, -1:])
        model = models[row.layout]
        own = Contestant(row.name, model, filled(model, row, prompt), prompt[:, -1:])
        race([base, own], steps, repeats)
        if own.failed is not None:
            result[row.name] = {"failed": f"{type(own.failed).__name__}: {own.failed}"}
            continue
        result[row.name] = {
            "tokens_per_second": spread([steps / seconds for seconds in own.seconds]),
            "full_tokens_per_second": spread([steps / seconds for seconds in base.seconds]),
            "speed_over_full": ratios(base.seconds, own.seconds),
            "bytes": own.cache.nbytes,
            "bytes_over_full": own.cache.nbytes / base.cache.nbytes,
        }
        print(line_of(length, row.name, result[row.name]["speed_over_full"]), flush=True)
        del base, own
        gc.collect()
    return result


def compare_prompts(models: dict, rows: list[Row], length: int, repeats: int) -> dict[str, dict]:
    """Seconds to the first token and ratio of every method for a prompt of `length` tokens, read in turns."""
    prompt = torch.randint(VOCAB, (1, length), generator=torch.Generator().manual_seed(0))
    base = Contestant(BASE, models[BASE], None)
    own = [Contestant(row.name, models[row.layout], None) for row in rows]
    by_name = {row.name: row for row in rows}
    for model in models.values():
        warm_up(model, prompt)
    for round_number in range(repeats):
        for contestant in in_turns([base, *own], round_number):
            row = Row(BASE) if contestant is base else by_name[contestant.name]
            contestant.cache = new_cache(contestant.model, row, length)
            fill(contestant, prompt)
            contestant.cache = None
            print(
                f"  prompt of {length}: {contestant.name} {contestant.prompt_seconds[-1]:.2f} s", flush=True
            )
    return {
        each.name: {
            "prompt_seconds": spread(each.prompt_seconds),
            "prefill_over_full": ratios(base.prompt_seconds, each.prompt_seconds),
        }
        for each in own
    }


def line_of(length: int, name: str, ratio: dict[str, float]) -> str:
    return f"{length:7,} {name:20} {ratio['median']:6.2f}x full ({ratio['min']:.2f}–{ratio['max']:.2f})"


def table(result: dict[str, Any]) -> str:
    """Markdown: one line per method, speed over `full` with its range, and the share of the bytes that is held."""
    decoding, prompts = result["decoding"], result["prompts"]
    heads = [f"decoding, {length}" for length in decoding] + [f"bytes, {length}" for length in decoding]
    lines = [f"| method | {' | '.join(heads)} | prompt, {result['prompt_length']} |"]
    lines.append("|---|" + "---|" * (len(heads) + 1))
    for name in next(iter(decoding.values()), prompts):
        speeds = [_cell(rows[name].get("speed_over_full")) for rows in decoding.values()]
        held = [
            f"{100 * rows[name].get('bytes_over_full', float('nan')):.0f} %" for rows in decoding.values()
        ]
        prefill = _cell(prompts.get(name, {}).get("prefill_over_full"))
        lines.append(f"| {name} | {' | '.join(speeds + held)} | {prefill} |")
    return "\n".join(lines) + "\n"


def _cell(ratio: dict[str, float] | None) -> str:
    return "–" if ratio is None else f"{ratio['median']:.2f} ({ratio['min']:.2f}–{ratio['max']:.2f})"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)), help="tokens in the cache")
    parser.add_argument("--prompt", type=int, default=LENGTHS[0], help="tokens of the prompt that is timed")
    parser.add_argument("--only", default="", help="names of methods, separated by semicolons; empty = all")
    parser.add_argument("--steps", type=int, default=8, help="tokens per timed repeat")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--prompt-repeats", type=int, default=3, help="0 = no prompts")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args()


def main() -> None:
    """Run and write the JSON and the table."""
    arguments = parse()
    lengths = [int(length) for length in arguments.lengths.split(",") if length]
    names = [name.strip() for name in arguments.only.split(";") if name]
    rows = [row for row in ROWS if not names or row.name in names]
    models = build_models(max([*lengths, arguments.prompt]))
    result: dict[str, Any] = {
        "schema": 1,
        "benchmark": "methods_cpu",
        "environment": environment(),
        "load_average_at_start": os.getloadavg()[0],
        "model": {
            "layers": LAYERS,
            "hidden": HIDDEN,
            "query_heads": QUERY_HEADS,
            "kv_heads": KV_HEADS,
            "head_dim": HEAD_DIM,
        },
        "budget_share": 1 / SHARE,
        "prompt_length": arguments.prompt,
        "decoding": {
            str(length): compare_decoding(models, rows, length, arguments.steps, arguments.repeats)
            for length in lengths
        },
    }
    result["prompts"] = (
        compare_prompts(models, rows, arguments.prompt, arguments.prompt_repeats)
        if arguments.prompt_repeats
        else {}
    )
    write_json(arguments.out, result)
    arguments.out.with_suffix(".md").write_text(table(result), encoding="utf-8")
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
