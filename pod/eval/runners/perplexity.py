"""Perplexity by position, of text that training never saw (`pod.eval.perplexity` says how it is scored)."""

import hashlib
from dataclasses import asdict
from typing import Any

from torch import Tensor

from pod.eval import perplexity
from pod.eval.buckets import position_buckets
from pod.eval.journal import Journal
from pod.eval.judge.verdicts import perplexity_of
from pod.eval.methods import Method
from pod.eval.runners.base import Span, Task, perplexity_result, prompt_hash
from pod.eval.text import load_text

_CHECKED_TOKENS = (
    8  # tokens that a method scored in one pass also decodes, to compare the two on the real model
)


class Perplexity(Task):
    """Perplexity of every position bucket and in total, per-sequence sums, bytes held while scoring."""

    name = "perplexity"
    title = "perplexity"

    def __init__(self, run: Any, options: Any):
        super().__init__(run, options)
        args = self.args
        self.buckets = position_buckets(args.text_length, args.min_context, args.scored_tokens)
        self.text = load_text(run.recipe, run.tokenizer)

    def inputs(self) -> Any:
        return {
            "text": hashlib.sha256(self.text.numpy().tobytes()).hexdigest(),
            "buckets": [asdict(bucket) for bucket in self.buckets],
        }

    def spans(self) -> list[Span]:
        return [Span(bucket.held_length, bucket.scored) for bucket in self.buckets]

    def longest(self) -> int:
        return self.args.text_length

    def measure(self, method: Method, journal: Journal) -> dict[str, Any]:
        run, size = self.run, self.args.batch_size
        model = run.models.get(method.model)
        tokens = self.text.to(next(model.parameters()).device)
        records = journal.answers(
            list(range(len(tokens))),
            key=str,
            batches=lambda left: [left[start : start + size] for start in range(0, len(left), size)],
            compute=lambda rows: self._score(method, tokens[rows], rows),
        )
        return {
            "scored_by": "one forward pass" if method.one_shot else "decode path, token by token",
            "decode_path_check": self._check_decode_path(method, tokens[:1]) if method.one_shot else None,
            **self._payload(records),
        }

    def _score(self, method: Method, rows: Tensor, numbers: list[int]) -> list[dict[str, Any]]:
        """A record per sequence: summed NLL (nats), bytes and budget of each bucket."""
        model = self.run.models.get(method.model)
        records: list[dict[str, Any]] = [
            {"id": str(number), "sums": [], "held": [], "budget": []} for number in numbers
        ]
        by_bucket = perplexity.score_by_forward(model, rows, self.buckets) if method.one_shot else None
        for index, bucket in enumerate(self.buckets):
            held, budget = None, None
            if by_bucket is not None:
                nll = by_bucket[index]
            else:
                cache, budget = self.run.cache(method, bucket.held_length, bucket.scored)
                nll = perplexity.score_by_decode(model, cache, rows, bucket)
                held = cache.nbytes // len(rows)
            for record, total in zip(records, nll.double().sum(dim=1).tolist(), strict=True):
                record["sums"].append(total)
                record["held"].append(held)
                record["budget"].append(budget)
        return records

    def _payload(self, records: list[dict[str, Any]]) -> dict[str, Any]:
        rows = []
        for index, bucket in enumerate(self.buckets):
            sums = [record["sums"][index] for record in records]
            held = [record["held"][index] for record in records if record["held"][index] is not None]
            stated = self.run.stated_bytes(bucket.held_length, records[0]["budget"][index], held)
            summary = perplexity_of(sums, [bucket.scored] * len(sums))
            rows.append({**asdict(bucket), **summary, "bytes": stated})
        tokens = sum(bucket.scored for bucket in self.buckets)
        sums = [sum(record["sums"]) for record in records]
        total = perplexity_of(sums, [tokens] * len(sums))
        return {
            **perplexity_result(total["perplexity"], total["ci95"]),
            "samples": [
                {
                    "id": record["id"],
                    "score": sum(record["sums"]),
                    "tokens": tokens,
                    "prompt_hash": prompt_hash(self.text[int(record["id"])].tolist()),
                    "prompt_tokens": self.args.text_length,
                    "buckets": record["sums"],
                }
                for record in records
            ],
            "bytes": [row["bytes"] for row in rows],
            "settings": {"sequences": len(records), "length": self.args.text_length},
            "buckets": rows,
            "total": total,
        }

    def _check_decode_path(self, method: Method, row: Tensor) -> dict[str, Any]:
        """The proof on this very model that one pass equals the decode path: the end of the shortest bucket with distant tokens."""
        model = self.run.models.get(method.model)
        window = model.config.num_sink_tokens + model.config.num_recent_tokens
        bucket = next((bucket for bucket in self.buckets if bucket.end > 1.5 * window), self.buckets[-1])
        cache, _ = self.run.cache(method, bucket.held_length, bucket.scored)
        error = perplexity.forward_error(model, cache, row, bucket, _CHECKED_TOKENS)
        return {
            "tokens": min(_CHECKED_TOKENS, bucket.scored),
            "length": bucket.end,
            "max_abs_difference_nats": error,
        }
