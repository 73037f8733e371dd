"""One evaluation: check the inputs, measure every method on every task at equal bytes, keep each result, write the report."""

import functools
import hashlib
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

import pod
from pod.eval import efficiency, passkey, perplexity, stats
from pod.eval.buckets import position_buckets
from pod.eval.budget import ByteBudgets, native_bytes_per_token, stated
from pod.eval.methods import Method, find_method
from pod.eval.models import Models
from pod.eval.report import write_report
from pod.eval.results import RunResults, environment, fingerprint, one_line
from pod.eval.summary import SPEED_RUN
from pod.eval.text import load_text

if TYPE_CHECKING:
    from pod.recipe import Recipe

_CHECKED_TOKENS = (
    8  # tokens that a method scored in one pass also decodes, to compare the two on the real model
)

Log = Callable[[str], None]
_print_now: Log = functools.partial(print, flush=True)


class Evaluation:
    """The state of one run: recipe, models, texts, prompts, byte budgets. Nothing is loaded or computed before it is needed.

    Raises: ValueError, before any computation, for whatever is missing.
    """

    def __init__(self, recipe: "Recipe", log: Log = _print_now):
        self.recipe, self.args, self.log = recipe, recipe.eval, log
        self.models = Models(recipe)
        self.tokenizer = self.models.tokenizer()
        self.buckets = position_buckets(self.args.text_length, self.args.min_context, self.args.scored_tokens)
        self.text = load_text(recipe, self.tokenizer) if "perplexity" in self.args.tasks else None
        self.prompts = self._make_prompts() if "passkey" in self.args.tasks else []
        self._budgets: ByteBudgets | None = None

    def _make_prompts(self) -> list[passkey.Prompt]:
        args = self.args
        return passkey.make_prompts(
            self.tokenizer,
            args.passkey_lengths,
            args.passkey_depths,
            args.passkey_samples,
            self.recipe.seed,
            args.passkey_chat_template,
        )

    def prompt_batches(self) -> list[list[passkey.Prompt]]:
        """The passkey prompts in batches of one asked-for length."""
        size, batches = self.args.batch_size, []
        for length in self.args.passkey_lengths if self.prompts else ():
            prompts = [prompt for prompt in self.prompts if prompt.length == length]
            batches += [prompts[start : start + size] for start in range(0, len(prompts), size)]
        return batches

    def answered_length(self, batch: list[passkey.Prompt]) -> int:
        """Tokens in the cache after the longest prompt of a batch is answered; the last new token is never fed."""
        return max(len(prompt.token_ids) for prompt in batch) + self.args.passkey_new_tokens - 1

    @property
    def budgets(self) -> ByteBudgets | None:
        """PoD's measured bytes; None when no PoD model is at hand (and no method needs them)."""
        if self._budgets is None and self.models.reference_kind is not None:
            self._budgets = ByteBudgets(self.models.get(self.models.reference_kind), self._lengths())
        return self._budgets

    def _lengths(self) -> set[int]:
        """Every length at which bytes are compared."""
        lengths = set()
        if self.text is not None:
            lengths |= {bucket.held_length for bucket in self.buckets}
        lengths |= {self.answered_length(batch) for batch in self.prompt_batches()}
        if SPEED_RUN in self.args.tasks:
            lengths |= set(self.args.efficiency_lengths)
        return lengths

    def cache(self, method: Method, length: int, fed: int) -> tuple[Any, int | None]:
        """A new cache for a method, and its budget, so that it holds PoD's bytes once it has seen `length` tokens."""
        budget = None
        if method.takes_budget:
            assert self.budgets is not None, "Models refuses methods with a budget when there is no reference"
            budget = self.budgets.tokens(method, length, fed)
        options = self.args.method_options.get(method.name, {})
        return pod.make_cache(self.models.get(method.model), method.spec, budget=budget, **options), budget

    def check_budgets(self, method: Method, part: str) -> None:
        """Make every cache that a part will use, so that a budget below the method's minimum is an error before any measuring."""
        if part == "perplexity":
            spans = [(bucket.held_length, bucket.scored) for bucket in self.buckets]
        else:
            spans = [
                (self.answered_length(batch), self.args.passkey_new_tokens) for batch in self.prompt_batches()
            ]
        for length, fed in spans:
            self.cache(method, length, fed)

    def stated_bytes(self, length: int, budget: int | None, held: list[int]) -> dict[str, Any]:
        """What a result says about its bytes; held: bytes per sequence of every cache that was used."""
        model = self.models.get(self.models.kinds[0])
        return stated(self.budgets, native_bytes_per_token(model), length, budget, held)

    def fingerprint(self, part: str, method: Method | None) -> str:
        """Changes with anything that can change the result of a part."""
        args, models = self.args, self.models
        inputs: dict[str, Any] = {
            "part": part,
            "seed": self.recipe.seed,
            "reference": models.reference_layout(),
        }
        if method is not None:
            options = self.args.method_options.get(method.name, {})
            inputs |= {"method": asdict(method), "options": options, "model": models.identity(method.model)}
        if part == "perplexity":
            assert self.text is not None
            inputs |= {
                "text": hashlib.sha256(self.text.numpy().tobytes()).hexdigest(),
                "buckets": [asdict(bucket) for bucket in self.buckets],
                "resamples": args.bootstrap_samples,
            }
        elif part == "passkey":
            inputs |= {"prompts": [asdict(prompt) for prompt in self.prompts], "new": args.passkey_new_tokens}
        else:
            inputs |= {
                "models": {kind: models.identity(kind) for kind in models.kinds},
                "run": [
                    args.methods,
                    args.method_options,
                    args.efficiency_lengths,
                    args.efficiency_tokens,
                    args.efficiency_repeats,
                ],
                "hardware": environment()["hardware"],
            }
        return fingerprint(inputs)


def evaluate(recipe: "Recipe", log: Log = _print_now) -> dict[str, dict]:
    """Run the `eval` section of a recipe; returns the results by method.

    Writes <output_dir>/eval/<method>.json, efficiency.json, report.html and report.md. A method that fails is recorded in its
    file and the others go on.

    Raises: ValueError before any computation for wrong input; RuntimeError at the end when a method failed.
    """
    run = Evaluation(recipe, log)
    folder = recipe.eval_dir
    errors = {}
    results = {name: _method_results(run, find_method(name)) for name in recipe.eval.methods}
    pending = {name: _pending_parts(run, find_method(name), result) for name, result in results.items()}
    for name, parts in pending.items():
        for part in parts:
            if find_method(name).takes_budget:
                run.check_budgets(find_method(name), part)
    for name, result in results.items():
        error = _measure_method(run, find_method(name), result, pending[name])
        if error:
            errors[name] = error
    if SPEED_RUN in recipe.eval.tasks:
        errors |= _measure_speed(run)
    report = write_report(recipe)
    log(f"report: {report}")
    if errors:
        what = "; ".join(f"{name}: {error}" for name, error in errors.items())
        raise RuntimeError(
            f"{len(errors)} of {len(results)} methods failed ({what}); the others are in {folder}"
        )
    return {name: result.content for name, result in results.items()}


def _method_results(run: Evaluation, method: Method) -> RunResults:
    header = {"title": method.title, "spec": method.spec, "seed": run.recipe.seed, "config": asdict(run.args)}
    return RunResults(run.recipe.eval_dir / f"{method.name}.json", method.name, header)


def _pending_parts(run: Evaluation, method: Method, results: RunResults) -> dict[str, str]:
    """Parts to measure with the fingerprints of their inputs. Outdated parts are dropped from the results."""
    wanted = {part: run.fingerprint(part, method) for part in _PARTS if part in run.args.tasks}
    results.keep(wanted if run.args.reuse else {})
    for part, kept in results.content["parts"].items():
        run.log(f"{method.name}: {part} kept from {kept['environment']['date']}")
    return {part: inputs for part, inputs in wanted.items() if not results.finished(part, inputs)}


def _measure_method(
    run: Evaluation, method: Method, results: RunResults, pending: dict[str, str]
) -> str | None:
    """Measure what is missing; returns the error line of a method that failed."""
    for part, inputs in pending.items():
        run.log(f"{method.name}: {part} …")
        began = time.perf_counter()
        try:
            payload = _PARTS[part](run, method)
            results.content["model"] = run.models.description(method.model)
        except Exception as error:  # noqa: BLE001 - one method's failure must not lose the others
            results.fail(part, error)
            run.log(f"{method.name}: {part} FAILED: {one_line(error)}")
            return f"{part}: {one_line(error)}"
        results.store(part, inputs, time.perf_counter() - began, payload)
        run.log(f"{method.name}: {part} {_headline(part, payload)} ({time.perf_counter() - began:.0f} s)")
    results.finish()
    return None


def _headline(part: str, payload: dict) -> str:
    if part == "perplexity":
        return f"{payload['total']['perplexity']:.2f}"
    return f"{payload['correct']} of {payload['prompts']} correct"


def measure_perplexity(run: Evaluation, method: Method) -> dict[str, Any]:
    """Perplexity of every position bucket and in total, per-sequence sums, bytes held while scoring."""
    assert run.text is not None
    model = run.models.get(method.model)
    tokens = run.text.to(next(model.parameters()).device)
    one_shot = method.one_shot
    sums: list[list[float]] = [[] for _ in run.buckets]
    held: list[list[int]] = [[] for _ in run.buckets]
    budget: list[int | None] = [None for _ in run.buckets]
    for rows in tokens.split(run.args.batch_size):
        by_bucket = perplexity.score_by_forward(model, rows, run.buckets) if one_shot else None
        for index, bucket in enumerate(run.buckets):
            if by_bucket is not None:
                nll = by_bucket[index]
            else:
                cache, budget[index] = run.cache(method, bucket.held_length, bucket.scored)
                nll = perplexity.score_by_decode(model, cache, rows, bucket)
                held[index].append(cache.nbytes // len(rows))
            sums[index] += nll.double().sum(dim=1).tolist()
    return {
        "scored_by": "one forward pass" if one_shot else "decode path, token by token",
        "decode_path_check": _check_decode_path(run, method, tokens[:1]) if one_shot else None,
        **_perplexity_payload(run, sums, held, budget),
    }


def _perplexity_payload(
    run: Evaluation, sums: list[list[float]], held: list[list[int]], budget: list[int | None]
) -> dict[str, Any]:
    resamples, seed = run.args.bootstrap_samples, run.recipe.seed
    rows, samples = [], []
    for index, bucket in enumerate(run.buckets):
        counts = [bucket.scored] * len(sums[index])
        rows.append(
            {
                **asdict(bucket),
                **stats.perplexity_summary(sums[index], counts, resamples, seed),
                "bytes": run.stated_bytes(bucket.held_length, budget[index], held[index]),
            }
        )
        samples += [
            {"sequence": number, "bucket": index, "nll_sum": value, "tokens": bucket.scored}
            for number, value in enumerate(sums[index])
        ]
    per_sequence = [sum(column) for column in zip(*sums, strict=True)]
    counts = [sum(bucket.scored for bucket in run.buckets)] * len(per_sequence)
    total = stats.perplexity_summary(per_sequence, counts, resamples, seed)
    return {"buckets": rows, "total": total, "samples": samples}


def _check_decode_path(run: Evaluation, method: Method, row: torch.Tensor) -> dict[str, Any]:
    """The proof on this very model that one pass equals the decode path: the end of the shortest bucket with distant tokens."""
    model = run.models.get(method.model)
    window = model.config.num_sink_tokens + model.config.num_recent_tokens
    bucket = next((bucket for bucket in run.buckets if bucket.end > 1.5 * window), run.buckets[-1])
    cache, _ = run.cache(method, bucket.held_length, bucket.scored)
    error = perplexity.forward_error(model, cache, row, bucket, _CHECKED_TOKENS)
    return {
        "tokens": min(_CHECKED_TOKENS, bucket.scored),
        "length": bucket.end,
        "max_abs_difference_nats": error,
    }


def measure_passkey(run: Evaluation, method: Method) -> dict[str, Any]:
    """Accuracy by length and depth with Wilson intervals, every answer, bytes held at the end of generation."""
    model = run.models.get(method.model)
    samples, new_tokens = [], run.args.passkey_new_tokens
    held: dict[int, dict[str, Any]] = {}
    for batch in run.prompt_batches():
        length = run.answered_length(batch)
        cache, budget = run.cache(method, length, new_tokens)
        answers = passkey.answer(model, run.tokenizer, cache, batch, new_tokens)
        held[batch[0].length] = run.stated_bytes(length, budget, [cache.nbytes // len(batch)])
        samples += [_passkey_sample(prompt, text) for prompt, text in zip(batch, answers, strict=True)]
    correct = sum(sample["correct"] for sample in samples)
    return {
        "prompts": len(samples),
        "format": "chat template" if run.args.passkey_chat_template else "plain text",
        "correct": correct,
        "accuracy": correct / len(samples),
        "ci95": stats.wilson_interval(correct, len(samples)),
        "cells": _cells(samples),
        "bytes": [{"prompt_length": length, **row} for length, row in held.items()],
        "samples": samples,
    }


def _passkey_sample(prompt: passkey.Prompt, answer: str) -> dict[str, Any]:
    return {
        "length": prompt.length,
        "tokens": len(prompt.token_ids),
        "depth": prompt.depth,
        "sample": prompt.sample,
        "key": prompt.key,
        "answer": answer,
        "correct": passkey.is_correct(answer, prompt.key),
    }


def _cells(samples: list[dict]) -> list[dict[str, Any]]:
    """Counts per (length, depth), in the order of the samples."""
    cells: dict[tuple[int, float], dict[str, Any]] = {}
    for sample in samples:
        key = (sample["length"], sample["depth"])
        cell = cells.setdefault(key, {"length": key[0], "depth": key[1], "correct": 0, "prompts": 0})
        cell["correct"] += sample["correct"]
        cell["prompts"] += 1
    return list(cells.values())


def _measure_speed(run: Evaluation) -> dict[str, str]:
    """Speeds of all methods side by side into efficiency.json; returns the error lines of methods that failed."""
    results = RunResults(run.recipe.eval_dir / f"{SPEED_RUN}.json", SPEED_RUN, {"config": asdict(run.args)})
    inputs = run.fingerprint(SPEED_RUN, None)
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


def _race(run: Evaluation, length: int, errors: dict[str, str]) -> dict[str, Any]:
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


_PARTS: dict[str, Callable[[Evaluation, Method], dict[str, Any]]] = {
    "perplexity": measure_perplexity,
    "passkey": measure_passkey,
}
