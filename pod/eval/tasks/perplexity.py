"""Perplexity by position, of text that training never saw (`pod.eval.answer.texts` says how it is scored)."""

from dataclasses import asdict
from typing import Any

from pod.eval import answer
from pod.eval.answer.answer_cache import AnswerCache, key_of, means
from pod.eval.answer.budget import MethodRunner, Span
from pod.eval.statistics.comparison import perplexity_of
from pod.eval.suites.base import scored_payload
from pod.eval.suites.buckets import position_buckets
from pod.eval.suites.text import Record, TextTask

_CHECKED_TOKENS = 8
"""A method that is scored in one pass also decodes so many tokens, to compare the two on the real model."""


class Perplexity(TextTask):
    """Perplexity of every position bucket and in total, per-sequence sums, bytes held while scoring."""

    name = "perplexity"
    title = "perplexity"
    about = "how well text that training never saw is predicted, by position."

    def __init__(self, run: Any, options: Any):
        super().__init__(run, options)
        args = self.args
        self.buckets = position_buckets(args.text_length, args.min_context, args.scored_tokens)

    def spans(self) -> list[Span]:
        return [Span(bucket.held_length, bucket.scored) for bucket in self.buckets]

    def longest(self) -> int:
        return self.args.text_length

    def measure(self, runner: MethodRunner, answer_cache: AnswerCache) -> Record:
        spans, one_shot = zip(self.buckets, self.spans(), strict=True), runner.method.one_shot
        asked = [[bucket.first, bucket.end, runner.room(span)] for bucket, span in spans]
        records = self.records(answer_cache, ["perplexity", asked], lambda rows: self._score(runner, rows))
        return {
            "scored_by": "one forward pass" if one_shot else "decode path, token by token",
            "decode_path_check": self._check_decode_path(runner, answer_cache) if one_shot else None,
            **self._payload(runner, records),
        }

    def _score(self, runner: MethodRunner, rows: Any) -> list[Record]:
        """A record per sequence of [B, n].

        It holds the summed NLL (nats) and the bytes of each bucket, and the mean over buckets of what was
        decided.
        """
        model, held, decided = runner.model, [[None] * len(rows)] * len(self.buckets), [[] for _ in rows]
        if runner.method.one_shot:
            scored = answer.texts.score_by_forward(model, rows, self.buckets)
        else:
            scored, held = [], []
            for bucket, span in zip(self.buckets, self.spans(), strict=True):
                cache = answer.gates.watch(runner.cache(span))
                scored.append(answer.texts.score_by_decode(model, cache, rows, bucket))
                held.append(cache.nbytes_by_row())
                for row, one in zip(decided, answer.reading.decided(cache), strict=True):
                    row += one.values()
        sums = zip(*(nll.double().sum(dim=1).tolist() for nll in scored), strict=True)
        return [
            {"sums": list(of_row), "held": list(sizes), **({"decisions": means(said)} if said else {})}
            for of_row, sizes, said in zip(sums, zip(*held, strict=True), decided, strict=True)
        ]

    def _payload(self, runner: MethodRunner, records: list[Record]) -> Record:
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

    def _check_decode_path(self, runner: MethodRunner, answer_cache: AnswerCache) -> Record:
        """The proof on this very model that one pass equals the decode path.

        It uses the end of the shortest bucket with distant tokens.
        """
        return answer_cache.answers(
            [0],
            key=lambda row: key_of("decode path", _CHECKED_TOKENS, self.buckets, self.text[row].tolist()),
            batches=lambda left: [left],
            compute=lambda rows: [self._forward_error(runner, self.on_device(rows))],
        )[0]

    def _forward_error(self, runner: MethodRunner, row: Any) -> Record:
        model = runner.model
        window = model.config.num_sink_tokens + model.config.num_recent_tokens
        bucket = next((bucket for bucket in self.buckets if bucket.end > 1.5 * window), self.buckets[-1])
        cache = runner.cache(Span(bucket.held_length, bucket.scored))
        error = answer.texts.forward_error(model, cache, row, bucket, _CHECKED_TOKENS)
        tokens = min(_CHECKED_TOKENS, bucket.scored)
        return {"tokens": tokens, "length": bucket.end, "max_abs_difference_nats": error}
