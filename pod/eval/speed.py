"""Speeds and bytes of all methods side by side, in one process: `efficiency.json`, the one result file that is no method's."""

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from pod.eval import efficiency
from pod.eval.methods import find_method
from pod.eval.results import RunResults, one_line
from pod.eval.summary import SPEED_RUN

if TYPE_CHECKING:
    from pod.eval.runner import Evaluation


def measure_speed(run: "Evaluation") -> dict[str, str]:
    """Speeds of all methods side by side into efficiency.json; returns the error lines of methods that failed."""
    results = RunResults(run.recipe.eval_dir / f"{SPEED_RUN}.json", SPEED_RUN, {"config": asdict(run.args)})
    inputs = run.speed_fingerprint()
    results.keep({SPEED_RUN: inputs} if run.args.reuse else {})
    if results.finished(SPEED_RUN, inputs):
        run.log(f"speed: kept from {results.content['parts'][SPEED_RUN]['environment']['date']}")
        results.finish()
        return {}
    run.log("speed: all methods in turns …")
    began = time.perf_counter()
    errors: dict[str, str] = {}
    rows = [_race(run, length, errors) for length in run.args.efficiency_lengths]
    lengths = [row for row in rows if row["methods"]]
    payload = {"lengths": lengths, "failed": errors}
    # A run with failures is never taken for a finished one.
    results.store(SPEED_RUN, inputs if not errors else "failed", time.perf_counter() - began, payload)
    if errors:
        results.content["status"] = "failed"
        results.content["error"] = "; ".join(f"{name}: {error}" for name, error in errors.items())
        results.write()
    else:
        results.finish()
    run.log(f"speed: {_speed_headline(lengths)} ({time.perf_counter() - began:.0f} s)")
    return {name: f"{SPEED_RUN}: {error}" for name, error in errors.items()}


def _speed_headline(lengths: list[dict]) -> str:
    if not lengths:
        return "no method could be timed"
    rows = lengths[-1]["methods"]
    rates = (f"{name} {row['decode_tokens_per_second']['median']:.1f}" for name, row in rows.items())
    return f"tokens/s at {lengths[-1]['length']}: " + ", ".join(rates)


def _race(run: "Evaluation", length: int, errors: dict[str, str]) -> dict[str, Any]:
    """All methods at one prompt length. Adds the methods that cannot run to `errors`."""
    args = run.args
    contestants, rows = [], {}
    for name in args.methods:
        method = find_method(name)
        try:
            model = run.models.get(method.model)
            cache, budget = run.cache(method, length, 0)
            contestant = efficiency.Contestant(name=name, model=model, cache=cache)
            vocab, device = model.config.vocab_size, next(model.parameters()).device
            generator = torch.Generator().manual_seed(run.recipe.seed)
            efficiency.fill(contestant, torch.randint(vocab, (1, length), generator=generator).to(device))
            held = {part: int(size) for part, size in cache.nbytes_by_part().items()}
            rows[name] = {
                "bytes_by_part": held,
                "bytes": run.stated_bytes(length, budget, [sum(held.values())]),
            }
            contestants.append(contestant)
        except Exception as error:  # noqa: BLE001 - one method's failure must not lose the others
            errors[name] = one_line(error)
    if not contestants:
        return {"length": length, "methods": {}}
    efficiency.race(contestants, args.efficiency_tokens, args.efficiency_repeats)
    base = next((contestant for contestant in contestants if contestant.name == "full"), None)
    for contestant in contestants:
        rows[contestant.name] |= efficiency.speeds(contestant, base, args.efficiency_tokens)
    return {"length": length, "methods": rows}
