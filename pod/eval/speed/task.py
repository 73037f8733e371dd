"""Speeds, bytes, peak memory and largest batches of all methods side by side, in one process: `efficiency.json`, the one result file
that is no method's."""

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pod.eval.answer.methods import BASE, Method, find_method
from pod.eval.results import RunResults, environment, fingerprint, one_line, with_files
from pod.eval.speed import efficiency, max_batch, memory
from pod.eval.speed.args import NAME as SPEED_RUN
from pod.eval.speed.args import SpeedOptions, speed_options

if TYPE_CHECKING:
    from pod.eval.runner import Evaluation

_MEMORY_STEPS = 4  # decoded tokens whose peak memory is measured


def measure_speed(run: "Evaluation") -> dict[str, str]:
    """Speeds of all methods side by side into efficiency.json; returns the error lines of methods that failed."""
    results = _results(run)
    if is_known(run):
        run.log(f"speed: kept from {results.content['parts'][SPEED_RUN]['environment']['date']}")
        results.finish()
        return {}
    run.log("speed: all methods in turns …")
    began, options = time.perf_counter(), speed_options(run.args)
    errors: dict[str, str] = {}
    rows = [_race(run, options, length, errors) for length in run.args.efficiency_lengths]
    lengths = [row for row in rows if row["methods"]]
    batches = [_largest_batches(run, options, pair[0], pair[1], errors) for pair in options.max_batch]
    payload = {"lengths": lengths, "max_batch": batches, "options": asdict(options), "failed": errors}
    payload |= {
        "raced": _racers(run),
        "seconds": round(time.perf_counter() - began, 3),
        "environment": environment(),
    }
    results.store(SPEED_RUN, payload)
    if errors:
        results.content["status"] = "failed"
        results.content["error"] = "; ".join(f"{name}: {error}" for name, error in errors.items())
        results.write()
    else:
        results.finish()
    run.log(f"speed: {_speed_headline(lengths)} ({time.perf_counter() - began:.0f} s)")
    return {name: f"{SPEED_RUN}: {error}" for name, error in errors.items()}


def _results(run: "Evaluation") -> RunResults:
    header = {"config": asdict(run.args), "row": run.speed_fingerprint()}
    return RunResults(run.recipe.eval_dir / f"{SPEED_RUN}.json", SPEED_RUN, header)


def is_known(run: "Evaluation") -> bool:
    """Whether all methods raced before, as they are now and without a failure, maybe among others."""
    part = _results(run).content["parts"].get(SPEED_RUN)
    return (
        run.args.reuse
        and part is not None
        and not part["failed"]
        and _racers(run).items() <= part["raced"].items()
    )


def _racers(run: "Evaluation") -> dict[str, str]:
    """What each method runs on and with, as a digest."""
    methods = map(find_method, run.args.methods)
    return {
        m.name: fingerprint([run.models.identity(m.model), with_files(run.options(m))])[:16] for m in methods
    }


def check(run: "Evaluation") -> None:
    """Make every cache that will be used by methods with a budget. Raises: ValueError for a budget below a method's minimum."""
    options = speed_options(run.args)
    spans = [(length, 0) for length in run.args.efficiency_lengths]
    spans += [(prompt + generated - 1, generated - 1) for prompt, generated in options.max_batch]
    for method in map(find_method, run.args.methods):
        for length, fed in spans if method.takes_budget else ():
            run.cache(method, length, fed)


def _speed_headline(lengths: list[dict]) -> str:
    if not lengths:
        return "no method could be timed"
    rows = lengths[-1]["methods"]
    rates = (f"{name} {row['decode_tokens_per_second']['median']:.1f}" for name, row in rows.items())
    return f"tokens/s at {lengths[-1]['length']}: " + ", ".join(rates)


def _race(run: "Evaluation", options: SpeedOptions, length: int, errors: dict[str, str]) -> dict[str, Any]:
    """All methods at one prompt length. Adds the methods that cannot run to `errors`."""
    args = run.args
    rows: dict[str, dict[str, Any]] = {}
    contestants = [_enter(run, options, find_method(name), length, rows, errors) for name in args.methods]
    contestants = [contestant for contestant in contestants if contestant is not None]
    _read_prompts(run, options, contestants, length)
    for contestant in _still_in(contestants):
        budget = run.budget(find_method(contestant.name), length, 0)
        held = {part: int(size) for part, size in contestant.cache.nbytes_by_part().items()}
        stated = run.stated_bytes(length, budget, [sum(held.values())])
        rows[contestant.name] |= {"bytes_by_part": held, "bytes": stated}
    efficiency.race(contestants, args.efficiency_tokens, args.efficiency_repeats)
    base = next((one for one in _still_in(contestants) if one.name == BASE), None)
    for contestant in contestants:
        if contestant.failed is not None:
            errors[contestant.name] = one_line(contestant.failed)
            continue
        rows[contestant.name] |= efficiency.speeds(contestant, base, args.efficiency_tokens, length)
    finished = {one.name: rows[one.name] for one in _still_in(contestants)}
    return {"length": length, "methods": finished}


def _still_in(contestants: list[efficiency.Contestant]) -> list[efficiency.Contestant]:
    return [contestant for contestant in contestants if contestant.failed is None]


def _enter(
    run: "Evaluation",
    options: SpeedOptions,
    method: Method,
    length: int,
    rows: dict[str, dict[str, Any]],
    errors: dict[str, str],
) -> efficiency.Contestant | None:
    """A method with its model warm and its memory measured; None when it cannot run."""
    try:
        model, prompt = run.models.get(method.model), _prompt(run, method, length)
        rows[method.name] = {}
        if options.memory:  # reads the whole prompt: the model is warm afterwards
            found = memory.measure(model, lambda: run.cache(method, length, 0)[0], prompt, _MEMORY_STEPS)
            rows[method.name]["memory"] = found
        efficiency.warm_up(model, prompt)
    except Exception as error:  # noqa: BLE001 - one method's failure must not lose the others
        errors[method.name] = one_line(error)
        return None
    return efficiency.Contestant(name=method.name, model=model, cache=None)


def _read_prompts(
    run: "Evaluation", options: SpeedOptions, contestants: list[efficiency.Contestant], length: int
) -> None:
    """Every contestant reads the prompt into a new cache, in turns; the last one stays for decoding."""
    for round_number in range(options.prefill_repeats):
        for contestant in efficiency.in_turns(contestants, round_number):
            if contestant.failed is not None:
                continue
            method = find_method(contestant.name)
            try:
                contestant.cache = None  # frees the one before
                contestant.cache = run.cache(method, length, 0)[0]
                efficiency.fill(contestant, _prompt(run, method, length))
            except Exception as error:  # noqa: BLE001 - one method's failure must not lose the others
                contestant.failed, contestant.cache = error, None


def _prompt(run: "Evaluation", method: Method, length: int) -> Tensor:
    """[1, length] random tokens, the same for every method."""
    model = run.models.get(method.model)
    generator = torch.Generator().manual_seed(run.recipe.seed)
    tokens = torch.randint(model.config.vocab_size, (1, length), generator=generator)
    return tokens.to(next(model.parameters()).device)


def _largest_batches(
    run: "Evaluation", options: SpeedOptions, prompt: int, generated: int, errors: dict[str, str]
) -> dict[str, Any]:
    """The largest batch of every method for a prompt and a number of generated tokens."""
    rows: dict[str, dict[str, Any]] = {}
    for name in run.args.methods:
        try:
            rows[name] = _largest_batch(run, options, find_method(name), prompt, generated)
        except Exception as error:  # noqa: BLE001 - one method's failure must not lose the others
            errors[name] = f"max_batch {prompt} + {generated}: {one_line(error)}"
            continue
        run.log(f"{name}: {rows[name]['batch']} rows of {prompt} + {generated} tokens")
    for key in ("batch", "fractional_batch", "tokens_per_second"):
        base = rows.get(BASE, {}).get(key)
        for row in rows.values():
            row[f"{key}_over_full"] = row[key] / base if row.get(key) and base else None
    return {
        "prompt": prompt,
        "generated": generated,
        "limit_bytes": options.memory_limit,
        "methods": rows,
    }


def _largest_batch(
    run: "Evaluation", options: SpeedOptions, method: Method, prompt: int, generated: int
) -> dict[str, Any]:
    length, fed = prompt + generated - 1, generated - 1
    tries = max_batch.Tries(
        run.models.get(method.model),
        lambda: run.cache(method, length, fed)[0],
        prompt,
        generated,
        options.memory_limit,
        run.recipe.seed,
    )
    row = max_batch.search(tries, options.max_batch_rows)
    row["budget_tokens"] = run.budget(method, length, fed)
    if options.throughput and row["batch"]:
        row |= tries.throughput(row["batch"])
    return row
