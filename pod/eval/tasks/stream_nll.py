"""Cumulative NLL of long texts streamed through a cache: does a method stay stable for ever?

D2O Figure 6 (on PG-19 there); IMDC Figures 5 and 8, Table 4.

Any long text will do. The option `text` may name files of PG-19's test books; by default the text is that of
the task perplexity. `pod.eval.answer.score` says how a stream is scored.
"""

import math
from itertools import pairwise
from statistics import fmean
from typing import Any

from pydantic import PositiveInt

from pod.eval import answer
from pod.eval.answer.answer_cache import AnswerCache, JsonObject
from pod.eval.answer.budget import CacheSpan, MethodRunner
from pod.eval.answer.methods import EvaluatedMethod, find_method
from pod.eval.suites.task_base import curve, scored_payload
from pod.eval.suites.text import TextTask
from pod.schema import AtLeast2, section


@section
class StreamNllOptions:
    """`eval.task_options.stream_nll`."""

    text: list[str] | None = None
    """Files, folders or other sources. Default: eval.text, or else the held-out part of data.sources."""

    length: int = 4096
    """Tokens of each text. Only streamingllm, lm_infinite, im, imdc and fm read beyond the model's limit,
    because their distances do not grow with the text."""

    sequences: PositiveInt = 2
    """Number of texts. The confidence intervals are over texts."""

    prompt_tokens: AtLeast2 = 256
    """Number of tokens at the start of each text that serve as its prompt. They are not scored, and methods
    that compress a prompt do so after them."""

    every: PositiveInt = 256
    """Tokens between two points of the curve."""

    chunk_size: PositiveInt = 512
    """Tokens fed at once, to methods for which chunks give the same result as single tokens. Methods that
    compress while they read use their own chunks. All others read one token at a time."""

    def __post_init__(self) -> None:
        if self.length <= self.prompt_tokens:
            raise ValueError(f"length is {self.length}, it must exceed prompt_tokens = {self.prompt_tokens}")


class StreamNll(TextTask):
    """Perplexity over the tokens that every method reads, NLL and bytes by position as curves.

    Texts may be longer than a model's limit. The value then covers the part up to the smallest limit of the
    compared methods (and of the PoD model whose bytes budgets follow). This part is the same for all. Methods
    without a limit read on to the end of the text; their curves and a metric of its own show that part.

    Attributes:
        limit: that smallest limit (tokens).
        common: tokens of each text that every method reads.
        ends: positions (tokens) up to which NLL is summed; see `pod.eval.answer.score.ends_of`.
    """

    name = "stream_nll"
    title = "streamed text"
    about = "how well a long text is predicted while it streams through the cache."
    length_setting = "eval.task_options.stream_nll.length"
    Options = StreamNllOptions

    def __init__(self, run: Any, options: StreamNllOptions):
        super().__init__(run, options)
        methods = [find_method(name) for name in run.args.methods]
        bounded = [method.model for method in methods if not method.reads_any_length]
        kinds = {*bounded, run.models.reference_kind} - {None}
        limits = [limit for kind in kinds if (limit := run.models.limit(kind)) is not None]
        self.limit = min(limits, default=options.length)
        self.common = min(options.length, self.limit)
        if self.common <= options.prompt_tokens:
            raise ValueError(
                f"eval.task_options.stream_nll.prompt_tokens is {options.prompt_tokens}, but the model reads "
                f"only {self.limit} tokens: lower it"
            )
        ends_of = answer.score.ends_of
        self.ends = ends_of(options.prompt_tokens, options.length, options.every, self.common)

    def spans(self) -> list[CacheSpan]:
        return [CacheSpan(self.common - 1, self.common - self.options.prompt_tokens)]

    def longest(self) -> int:
        return self.common

    def token_counts(self, method: EvaluatedMethod) -> tuple[int, int]:
        options, end = self.options, self._end(method)
        behind = end - options.prompt_tokens
        chunked = self._fed(method)[0] > 1
        prompt = options.sequences * (end if chunked else options.prompt_tokens)
        return prompt, 0 if chunked else behind * -(-options.sequences // self.args.batch_size)

    def refuses(self, method: EvaluatedMethod) -> str | None:
        if method.fills_pod_bytes and method.grows:
            return (
                f"PoD's bytes give {method.name} no constant budget while a text streams: write a budget, "
                f"for example {method.name}@1024"
            )
        return None

    def _end(self, method: EvaluatedMethod) -> int:
        """Number of tokens of each text that a method reads."""
        return self.options.length if method.reads_any_length else self.common

    def _fed(self, method: EvaluatedMethod) -> tuple[int, bool]:
        """Tokens that a method takes at once, and whether the whole text is one prompt to it."""
        options = self.args.method_options.get(method.name, {})
        chunk = answer.score.chunk_of(method, self.options.chunk_size, options)
        return chunk, answer.score.reads_on(method, options)

    def prompt_of(self, method: EvaluatedMethod, span: CacheSpan) -> int:
        return self._end(method) - 1 if self._fed(method)[1] else super().prompt_of(method, span)

    def _ends(self, method: EvaluatedMethod) -> tuple[int, ...]:
        """The positions of `ends` that a method reaches (tokens)."""
        last = self._end(method)
        return tuple(end for end in self.ends if end <= last)

    def answer(self, runner: MethodRunner, answer_cache: AnswerCache) -> list[JsonObject]:
        (span,) = self.spans()
        ends = self._ends(runner.method)
        asked = [
            "stream",
            self.options.prompt_tokens,
            ends,
            *self._fed(runner.method),
            runner.cache_budget(span),
        ]
        return self.records(answer_cache, asked, lambda rows: self._stream(runner, rows, ends), ends[-1])

    def _stream(self, runner: MethodRunner, rows: Any, ends: tuple[int, ...]) -> list[JsonObject]:
        """A record for each text of `rows` [B, n]: the summed NLL (nats) and the bytes of every interval."""
        where = rows, self.options.prompt_tokens, ends, *self._fed(runner.method)
        sums, held = answer.score.score_stream(runner.model, runner.cache(self.spans()[0]), *where)
        sums_by_text = zip(*(total.tolist() for total in sums), strict=True)
        bytes_by_text = zip(*held, strict=True)
        by_text = zip(sums_by_text, bytes_by_text, strict=True)
        return [{"sums": list(of_text), "held": list(sizes)} for of_text, sizes in by_text]

    def score(self, runner: MethodRunner, answers: list[JsonObject]) -> JsonObject:
        ends = self._ends(runner.method)
        (span,) = self.spans()
        shared = ends.index(self.common) + 1
        tokens = self.common - self.options.prompt_tokens
        held = [record["held"][shared - 1] for record in answers]
        shared_by_all = {"tokens": tokens, "budget_tokens": runner.budget(span)}
        rows = [
            {"score": sum(record["sums"][:shared]), **shared_by_all, "bytes": size}
            for record, size in zip(answers, held, strict=True)
        ]
        chunk, reads_on = self._fed(runner.method)
        fed = f"{chunk} tokens at once, equal to single ones" if chunk > 1 else "token by token"
        return scored_payload(
            "nll",
            "perplexity",
            self.samples(rows, self.common),
            bytes_rows=[runner.stated(span, held)],
            settings={
                "texts": len(answers),
                "read": ends[-1],
                "scored": f"{self.options.prompt_tokens} to {self.common}",
                "fed": "one prompt, compressed while it is read" if reads_on else fed,
                "stopped": self._stopped(runner.method),
            },
            metrics=self._beyond(
                ends[-1] - self.common, [sum(record["sums"][shared:]) for record in answers]
            ),
            curves=self._curves(ends, answers),
        )

    def _stopped(self, method: EvaluatedMethod) -> str | None:
        """Why a method did not read the whole text; None if it did."""
        if self._end(method) == self.options.length:
            return None
        return (
            f"at {self.common} of {self.options.length} tokens: the model reads no more, and positions of "
            f"{method.name} grow with the text"
        )

    def _beyond(self, tokens: int, sums: list[float]) -> dict[str, JsonObject]:
        """Perplexity of the tokens that only methods without a limit read, as a metric.

        Args:
            tokens: number of these tokens in each text.
            sums: their summed NLL (nats), one sum per text.
        """
        if not tokens:
            return {}
        found = {"value": math.exp(fmean(sums) / tokens), "ci95": None, "percent": False}
        return {"perplexity beyond the model's limit": found}

    def _curves(self, ends: tuple[int, ...], records: list[JsonObject]) -> list[JsonObject]:
        """Three curves with a point at the end of every interval, each a mean over texts.

        They show the cumulative NLL, the NLL within the interval, and the bytes per text.
        """
        rows, total, first = [], 0.0, self.options.prompt_tokens
        for index, (start, end) in enumerate(pairwise((first, *ends))):
            nats = fmean(record["sums"][index] for record in records)
            held = fmean(record["held"][index] for record in records)
            total += nats
            within = nats / (end - start)
            rows.append({"read": end, "cumulative": total / (end - first), "within": within, "held": held})
        return [
            curve(rows, "read", key, title=title, x_label="tokens read", y_label=label)
            for key, title, label in (
                ("cumulative", "Cumulative NLL", "mean NLL so far (nats per token)"),
                ("within", "NLL by position", "NLL of the last tokens (nats per token)"),
                ("held", "Bytes by position", "KV cache (bytes)"),
            )
        ]
