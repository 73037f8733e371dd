"""Prediction consistency: how often is the next token the one that the dense model predicts?

The dense model predicts each of the last tokens of long texts (100 in the paper) from the full context. Texts
are fed as they are, without a prompt around them. What is compared with these predictions:

* For the method `full`: the dense model's predictions when it is fed only the nearest tokens, by the size of
  this window (PoD Table 7 and Figure 1c). The paper does not say whether its window cuts the text or the
  attention of every layer. Here it cuts the text; the method `wa@N` cuts the attention.
* For every other method: its own predictions, at its bytes.
"""

from dataclasses import field
from typing import Any

from pydantic import PositiveInt

from pod.eval import answer
from pod.eval.answer.answer_cache import AnswerCache, JsonObject
from pod.eval.answer.budget import CacheSpan, MethodRunner
from pod.eval.answer.methods import EvaluatedMethod
from pod.eval.statistics.confidence import share
from pod.eval.suites.task_base import curve, scored_payload
from pod.eval.suites.text import TextTask
from pod.schema import section

_WHERE = "eval.task_options.consistency"


@section
class ConsistencyOptions:
    """`eval.task_options.consistency`."""

    text: list[str] | None = None
    """Files, folders or other sources. Default: eval.text, or else the held-out part of data.sources."""

    length: int = 2048
    """Tokens of each text (paper: 32K)."""

    sequences: PositiveInt = 8
    """Number of texts (paper: 1000)."""

    predictions: PositiveInt = 100
    """Number of tokens at the end of each text whose predictions are compared (paper: 100)."""

    windows: list[PositiveInt] = field(default_factory=lambda: [256, 512, 1024])
    """Window sizes in tokens for the method `full` (paper: 256 to 4096)."""

    def __post_init__(self) -> None:
        if self.length < self.predictions + 2:
            raise ValueError(
                f"length is {self.length}, it must exceed predictions = {self.predictions} by at least 2"
            )
        if len(set(self.windows)) < len(self.windows):
            raise ValueError(f"windows is {self.windows}, but every size may appear only once")
        if self.windows and max(self.windows) > self.length - self.predictions:
            raise ValueError(
                f"windows is {self.windows}, but a window above length - predictions = "
                f"{self.length - self.predictions} drops no token: lower it"
            )


class Consistency(TextTask):
    """Share of identical greedy predictions per text.

    The reference is the dense model with everything in its context.
    """

    name = "consistency"
    title = "same predictions as dense"
    about = "how often the next token is predicted as the dense model does it from the whole text."
    length_setting = "eval.task_options.consistency.length"
    Options = ConsistencyOptions

    def __init__(self, run: Any, options: ConsistencyOptions):
        limit = run.models.limit("dense")
        if limit is not None and options.length > limit:
            raise ValueError(
                f"{_WHERE}.length is {options.length} and the dense model reads {limit}: lower it"
            )
        super().__init__(run, options)

    def spans(self) -> list[CacheSpan]:
        return [CacheSpan(self.options.length - 1, self.options.predictions)]

    def longest(self) -> int:
        return self.options.length

    def token_counts(self, method: EvaluatedMethod) -> tuple[int, int]:
        """See `Task.token_counts`. The tokens that the dense reference reads are included."""
        options = self.options
        prompt = 2 * options.length
        if method.name == "full":
            prompt = options.length + options.predictions * sum(options.windows)
        batches = -(-options.sequences // self.args.batch_size)
        return options.sequences * prompt, 0 if method.one_shot else batches * options.predictions

    def _windows_of(self, method: EvaluatedMethod) -> list[int]:
        """Window sizes to measure with a method: those of the options for `full`, none for the others."""
        return self.options.windows if method.name == "full" else []

    def answer(self, runner: MethodRunner, answer_cache: AnswerCache) -> list[JsonObject]:
        options, method, (span,) = self.options, runner.method, self.spans()
        windows = self._windows_of(method)
        asked = [
            options.predictions,
            method.one_shot,
            runner.cache_budget(span),
            self.run.models.identity("dense"),
            windows,
        ]

        def compute(rows: Any) -> list[JsonObject]:
            return self._compare(runner, rows, span, windows)

        return self.records(answer_cache, ["same predictions", *asked], compute)

    def score(self, runner: MethodRunner, answers: list[JsonObject]) -> JsonObject:
        options, records, (span,) = self.options, answers, self.spans()
        said = {
            "prompt_tokens": options.length - options.predictions,
            "budget_tokens": runner.budget(span),
        }
        held = [record["bytes"] for record in records if record["bytes"] is not None]
        return scored_payload(
            "score",
            "identical predictions",
            self.samples({**said, **record} for record in records),
            bytes_rows=[runner.stated(span, held)],
            settings={"length": options.length, "predictions": options.predictions},
            **(self._windows(records) if self._windows_of(runner.method) else {}),
        )

    def _compare(
        self, runner: MethodRunner, rows: Any, span: CacheSpan, windows: list[int]
    ) -> list[JsonObject]:
        """A record for each text of `rows` [B, n].

        Returns: `score` (share of identical predictions), `windows` (the same share for each window), `bytes`
        (that the method's cache held; None where no cache was used).
        """
        dense, last, scores = self.run.models.get("dense"), self.options.predictions, answer.score
        reference = scores.predict_by_forward(dense, rows, last)
        held = [None] * len(rows)
        if runner.method.name == "full":
            own = reference
        elif runner.method.one_shot:
            own = scores.predict_by_forward(runner.model, rows, last)
        else:
            cache = runner.cache(span)
            own = scores.predict_by_decode(runner.model, cache, rows, last)
            held = cache.nbytes_by_row()
        found, at_once = [own], self.args.batch_size
        for window in windows:
            found.append(scores.predict_by_window(dense, rows, last, window, at_once))
        shares = zip(*((one == reference).double().mean(dim=1).tolist() for one in found), strict=True)
        records = []
        for size, (score, *of_windows) in zip(held, shares, strict=True):
            records.append({"score": score, "windows": of_windows, "bytes": size})
        return records

    def _windows(self, records: list[JsonObject]) -> JsonObject:
        """PoD Table 7 as metrics and a curve."""
        rows = []
        for index, window in enumerate(self.options.windows):
            found = share([record["windows"][index] for record in records])
            rows.append({"window": window, "value": found.value, "ci95": found.interval})
        labels = {"x_label": "window (tokens)", "y_label": "share identical", "log_x": True}
        return {
            "metrics": {
                f"window {row['window']}": {key: row[key] for key in ("value", "ci95")} for row in rows
            },
            "curves": [curve(rows, "window", "value", "ci95", title="Same predictions by window", **labels)],
        }
