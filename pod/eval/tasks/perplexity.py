"""Perplexity by position, of text that training never saw (`pod.eval.answer.score` says how it is scored)."""

from dataclasses import asdict
from typing import Any

from pod.eval import answer
from pod.eval.answer.answer_cache import AnswerCache, JsonObject, key_of, means
from pod.eval.answer.budget import CacheSpan, MethodRunner
from pod.eval.answer.methods import EvaluatedMethod
from pod.eval.statistics.comparison import perplexity_of
from pod.eval.suites.buckets import position_buckets, token_counts
from pod.eval.suites.task_base import scored_payload
from pod.eval.suites.text import TextTask

_CHECKED_TOKENS = 8
"""Tokens that a method scored in one pass also decodes, to compare the two scores on the real model."""


class Perplexity(TextTask):
    """Perplexity of every position bucket and in total, NLL sums of texts, and bytes held while scoring."""

    name = "perplexity"
    title = "perplexity"
    about = "how well text that training never saw is predicted, by position."
    length_setting = "eval.text_length"

    def __init__(self, run: Any, options: Any):
        super().__init__(run, options)
        args = self.args
        self.buckets = position_buckets(args.text_length, args.min_context, args.scored_tokens)

    def spans(self) -> list[CacheSpan]:
        return [CacheSpan(bucket.held_length, bucket.scored) for bucket in self.buckets]

    def longest(self) -> int:
        return self.args.text_length

    def token_counts(self, method: EvaluatedMethod) -> tuple[int, int]:
        args = self.args
        sizes = len(self.text), args.text_length, args.batch_size
        return token_counts(self.buckets, *sizes, method.one_shot)

    def answer(self, runner: MethodRunner, answer_cache: AnswerCache) -> JsonObject:
        """The `records` of all texts, and a `check` of the decode path where one pass scores, else None."""
        spans, one_shot = zip(self.buckets, self.spans(), strict=True), runner.method.one_shot
        asked = [[bucket.first, bucket.end, runner.cache_budget(span)] for bucket, span in spans]
        records = self.records(answer_cache, ["perplexity", asked], lambda rows: self._read(runner, rows))
        return {
            "records": records,
            "check": self._check_decode_path(runner, answer_cache) if one_shot else None,
        }

    def score(self, runner: MethodRunner, answers: JsonObject) -> JsonObject:
        one_shot = runner.method.one_shot
        return {
            "scored_by": "one forward pass" if one_shot else "decode path, token by token",
            "decode_path_check": answers["check"],
            **self._payload(runner, answers["records"]),
        }

    def _read(self, runner: MethodRunner, rows: Any) -> list[JsonObject]:
        """A record for each text of `rows` [B, n].

        Returns: `sums` (NLL in nats) and `held` (bytes) of each bucket; and where the method decides anything
        about a text (`reading.decided`), its `decisions`, averaged over buckets.
        """
        if runner.method.one_shot:
            found = answer.score.score_by_forward(runner.model, rows, self.buckets)
            nothing = [None] * len(found)
            by_bucket = [(-scored.logprobs).double().sum(dim=1).tolist() for scored in found]
            return [{"sums": list(sums), "held": nothing} for sums in zip(*by_bucket, strict=True)]
        records: list[JsonObject] = [{"sums": [], "held": []} for _ in rows]
        decided: list[list[Any]] = [[] for _ in rows]
        for bucket, span in zip(self.buckets, self.spans(), strict=True):
            cache = answer.gates.watch(runner.cache(span))
            found = answer.score.score_bucket(runner.model, cache, rows, bucket)
            # read after scoring: what a gate skips is counted while tokens are decoded
            said = answer.reading.decided(cache)
            for row, one in enumerate(found):
                nll = -one.continuations[0].logprobs
                records[row]["sums"].append(float(nll.double().sum()))
                records[row]["held"].append(one.held["bytes"])
                decided[row] += said[row].values()
        for record, of_row in zip(records, decided, strict=True):
            if of_row:
                record["decisions"] = means(of_row)
        return records

    def _payload(self, runner: MethodRunner, records: list[JsonObject]) -> JsonObject:
        rows = []
        for index, (bucket, span) in enumerate(zip(self.buckets, self.spans(), strict=True)):
            sums = [record["sums"][index] for record in records]
            held = [record["held"][index] for record in records if record["held"][index] is not None]
            summary = perplexity_of(sums, [bucket.scored] * len(sums))
            rows.append({**asdict(bucket), **summary, "bytes": runner.stated(span, held)})
        tokens = sum(bucket.scored for bucket in self.buckets)
        sums = [sum(record["sums"]) for record in records]
        scored = zip(sums, records, strict=True)
        return scored_payload(
            "nll",
            "perplexity",
            self.samples({"score": s, "tokens": tokens, "buckets": r["sums"]} for s, r in scored),
            bytes_rows=[row["bytes"] for row in rows],
            settings={"sequences": len(records), "length": self.args.text_length},
            buckets=rows,
            total=perplexity_of(sums, [tokens] * len(sums)),
        )

    def _check_decode_path(self, runner: MethodRunner, answer_cache: AnswerCache) -> JsonObject:
        """How far the scores of one pass are from those of the decode path on the real model.

        It is measured at the end of the first bucket that has distant tokens.
        """
        return answer_cache.answers(
            [0],
            key=lambda row: key_of("decode path", _CHECKED_TOKENS, self.buckets, self.text[row].tolist()),
            batches=lambda left: [left],
            compute=lambda rows: [self._forward_error(runner, self.on_device(rows))],
        )[0]

    def _forward_error(self, runner: MethodRunner, row: Any) -> JsonObject:
        model = runner.model
        window = model.config.num_sink_tokens + model.config.num_recent_tokens
        bucket = next((bucket for bucket in self.buckets if bucket.end > 1.5 * window), self.buckets[-1])
        cache = runner.cache(CacheSpan(bucket.held_length, bucket.scored))
        error = answer.score.forward_error(model, cache, row, bucket, _CHECKED_TOKENS)
        tokens = min(_CHECKED_TOKENS, bucket.scored)
        return {"tokens": tokens, "length": bucket.end, "max_abs_difference_nats": error}
