"""Speeds, bytes, peak memory and largest batches of all methods side by side, in one process.

The task `pod.eval.tasks.efficiency` stores them as its part of the methods' result files.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from pod.errors import one_line
from pod.eval.answer.budget import CacheSpan, MethodRunner
from pod.eval.answer.methods import BASE
from pod.eval.speed.args import SpeedOptions
from pod.measure import max_batch, measured_memory
from pod.measure.machine import environment
from pod.measure.random_cache import fill_with_random_tokens, is_filled_directly
from pod.measure.speed_comparison import (
    RaceEntry,
    in_turns,
    race,
    read_prompt,
    spread,
    warm_up,
)

if TYPE_CHECKING:
    from pod.eval.args import EvalArgs
    from pod.recipe import Recipe

MEMORY_STEPS = 4
"""Decoded tokens whose peak memory is measured."""


@dataclass(frozen=True)
class SpeedRun:
    """What the speed measurement works with.

    Attributes:
        recipe: its section `eval` says what is measured.
        options: `eval.task_options.efficiency`.
        asked: a digest of what is measured (`SideBySideTask.asked`); every part of the result holds it.
        method_runners: the methods by name, each with its model and its caches.
        log: takes lines about progress.
    """

    recipe: "Recipe"
    options: SpeedOptions
    asked: str
    method_runners: Mapping[str, MethodRunner]
    log: Callable[[str], None]

    @property
    def args(self) -> "EvalArgs":
        """The recipe's section `eval`."""
        return self.recipe.eval


def measure_speed(run: SpeedRun) -> tuple[dict[str, dict[str, Any]], dict[str, Exception]]:
    """Measure the speeds of all methods side by side.

    Returns: by method, its part of its result file; and by method that failed, its error.
    """
    began = time.perf_counter()
    errors = dict[str, Exception]()
    lengths = [_race(run, length, errors) for length in run.args.efficiency_lengths]
    batches = [_largest_batches(run, prompt, new, errors) for prompt, new in run.options.max_batch]
    if run.options.longest_prompt:
        batches.append(_longest_prompts(run, errors))
    decoding = [_race_filled(run, length, errors) for length in run.options.decode_lengths]
    seconds = round(time.perf_counter() - began, 3)
    race_of_all = {"asked": run.asked, "options": asdict(run.options), "environment": environment()}
    parts = {}
    for name in run.method_runners:
        if name not in errors:
            own = {"lengths": _own(lengths, name), "max_batch": _own(batches, name)}
            own["decoding"] = _own(decoding, name)
            parts[name] = own | race_of_all | {"seconds": seconds}
    return parts, errors


def _own(rows: list[dict[str, dict]], name: str) -> list[dict]:
    """The rows of one method."""
    return [row[name] for row in rows if name in row]


def _race(run: SpeedRun, length: int, errors: dict[str, Exception]) -> dict[str, dict[str, Any]]:
    """A row per method at one prompt length. Methods that cannot run are added to `errors`."""
    args = run.args
    rows: dict[str, dict[str, Any]] = {name: {"length": length} for name in args.methods}
    entries = [RaceEntry(name) for name in args.methods]
    for one in entries:
        with one.trying():
            one.model = run.method_runners[one.name].model
            if run.options.memory:  # measuring reads the whole prompt: the model is warm afterwards
                make = partial(_cache, run, one.name, length)
                prompt = _prompt(run, one.model, length)
                rows[one.name]["memory"] = measured_memory.measure(one.model, make, prompt, MEMORY_STEPS)
            warm_up(one.model, _prompt(run, one.model, length))
    entries = _still_in(entries, errors)
    for turn in range(run.options.prefill_repeats):
        for one in in_turns(entries, turn):
            with one.trying():
                if one.failed is None:
                    one.cache = None  # frees the cache of the turn before
                    one.cache = _cache(run, one.name, length)
                    read_prompt(one, _prompt(run, one.model, length))
    entries = _still_in(entries, errors)
    for one in entries:
        held = {part: int(size) for part, size in one.cache.nbytes_by_part().items()}
        stated = run.method_runners[one.name].stated(CacheSpan(length, 0), [sum(held.values())])
        rows[one.name] |= {"bytes_by_part": held, "bytes": stated}
    race(entries, args.efficiency_tokens, args.efficiency_repeats)
    entries = _still_in(entries, errors)
    base = next((one for one in entries if one.name == BASE), None)
    return {one.name: rows[one.name] | speeds(one, base, args.efficiency_tokens) for one in entries}


def _race_filled(run: SpeedRun, length: int, errors: dict[str, Exception]) -> dict[str, dict[str, Any]]:
    """Race decoding at a length without reading a prompt: caches are filled with random tokens instead.

    Returns: a row per method whose cache can be filled so. Methods that fail are added to `errors`.
    """
    entries = []
    for one in map(RaceEntry, run.args.methods):
        method_runner = run.method_runners[one.name]
        if method_runner.method.takes_budget:
            continue
        with one.trying():
            one.model = method_runner.model
            one.cache = method_runner.cache()
            if is_filled_directly(one.cache):
                fill_with_random_tokens(one.model, one.cache, 1, length)
                one.token = _prompt(run, one.model, 1)
                entries.append(one)
        if one.failed is not None:
            entries.append(one)
    entries = _still_in(entries, errors)
    held = {one.name: one.cache.nbytes for one in entries}
    race(entries, run.args.efficiency_tokens, run.args.efficiency_repeats)
    entries = _still_in(entries, errors)
    base = next((one for one in entries if one.name == BASE), None)
    rows: dict[str, dict[str, Any]] = {}
    for one in entries:
        rows[one.name] = {"length": length, "bytes": held[one.name]}
        rows[one.name] |= decode_speeds(one, base, run.args.efficiency_tokens)
        if base is not None:
            rows[one.name]["bytes_over_full"] = held[one.name] / held[BASE]
    return rows


def _still_in(entries: list[RaceEntry], errors: dict[str, Exception]) -> list[RaceEntry]:
    """The entries that did not fail. The errors of the others go to `errors`."""
    errors |= {one.name: one.failed for one in entries if one.failed is not None}
    return [one for one in entries if one.failed is None]


def _cache(run: SpeedRun, name: str, length: int) -> Any:
    """A method's new cache for a prompt."""
    return run.method_runners[name].cache(CacheSpan(length, 0))


def _prompt(run: SpeedRun, model: Any, length: int) -> Tensor:
    """[1, length] random tokens, the same for every method."""
    return max_batch.random_rows(model, 1, length, run.recipe.seed)


def _largest_batches(
    run: SpeedRun, prompt: int, generated: int, errors: dict[str, Exception]
) -> dict[str, dict[str, Any]]:
    """The largest batch of every method for a prompt and a number of generated tokens."""
    limit, span = run.options.memory_limit, CacheSpan(prompt + generated - 1, generated - 1)

    def measured(runner: MethodRunner) -> dict[str, Any]:
        make_cache = partial(runner.cache, span)
        tries = max_batch.Tries(runner.model, make_cache, prompt, generated, limit, run.recipe.seed)
        row = {"prompt": prompt, "generated": generated, "limit_bytes": limit}
        row |= max_batch.search(tries, run.options.max_batch_rows) | {"budget_tokens": runner.budget(span)}
        if row["batch"]:
            row |= tries.throughput(row["batch"])
        return row

    rows = _searched(run, measured, errors)
    for key in ("batch", "fractional_batch", "tokens_per_second"):
        base = rows.get(BASE, {}).get(key)
        for row in rows.values():
            row[f"{key}_over_full"] = row[key] / base if row.get(key) and base else None
    return rows


def _longest_prompts(run: SpeedRun, errors: dict[str, Exception]) -> dict[str, dict[str, Any]]:
    """The longest prompt of every method that fits as one row.

    In the rows of the result, `batch` is 1 (0 if not even the shortest prompt fits), and `batch_over_full` is
    the ratio of prompt tokens.
    """
    step, limit, most = (
        run.options.longest_prompt,
        run.options.memory_limit,
        run.options.longest_prompt_tokens,
    )

    def measured(runner: MethodRunner) -> dict[str, Any]:
        def make_cache(tokens: int) -> Any:
            return runner.cache(CacheSpan(tokens, 0))

        tries = max_batch.LongTries(runner.model, make_cache, step, 1, limit, run.recipe.seed)
        steps = max_batch.largest(tries.fits, 1, max(1, most // step))
        found = {"prompt": steps * step, "generated": 1, "limit_bytes": limit, "batch": int(steps > 0)}
        return found | {"most_reached": steps >= most // step}

    rows = _searched(run, measured, errors)
    base = rows.get(BASE, {}).get("prompt")
    return {
        name: row | {"batch_over_full": row["prompt"] / base if base else None} for name, row in rows.items()
    }


def _searched(
    run: SpeedRun, measured: Callable[[MethodRunner], dict[str, Any]], errors: dict[str, Exception]
) -> dict[str, dict[str, Any]]:
    """A row per method, made by `measured`. Methods that fail are added to `errors`."""
    rows: dict[str, dict[str, Any]] = {}
    for one in map(RaceEntry, run.args.methods):
        with one.trying():
            row = rows[one.name] = measured(run.method_runners[one.name])
            run.log(f"{one.name}: {row['batch']} rows of {row['prompt']} + {row['generated']} tokens")
        if one.failed is not None:
            errors[one.name] = ValueError(f"what fits: {one_line(one.failed, with_class=True)}")
    return rows


def speeds(entry: RaceEntry, base: RaceEntry | None, steps: int) -> dict[str, Any]:
    """Seconds to the first token and tokens per second of a method, and the ratios to `base`.

    Numbers are the median, min and max over the repeats. Ratios are taken round by round.

    Args:
        base: the method `full`; None if it is not measured.
        steps: tokens that are decoded in a round.
    """
    first = spread(entry.prompt_seconds)
    found: dict[str, Any] = {"time_to_first_token_seconds": first["median"], "time_to_first_token": first}
    found |= decode_speeds(entry, base, steps)
    if base is not None:
        found["prefill_speed_over_full"] = _ratios(base.prompt_seconds, entry.prompt_seconds)
    return found


def decode_speeds(entry: RaceEntry, base: RaceEntry | None, steps: int) -> dict[str, Any]:
    """Tokens per second of decoding, and the ratio to `base`; for the arguments see `speeds`.

    Numbers are the median, min and max over the repeats. The ratio is taken round by round.
    """
    rates = spread([steps / seconds for seconds in entry.seconds])
    found: dict[str, Any] = {"decode_tokens_per_second": rates}
    if base is not None:
        found["speed_over_full"] = _ratios(base.seconds, entry.seconds)
    return found


def _ratios(theirs: list[float], own: list[float]) -> dict[str, float | int]:
    """The spread of `theirs / own` (seconds), taken round by round: above 1 our own are faster."""
    return spread([other / mine for other, mine in zip(theirs, own, strict=True)])
