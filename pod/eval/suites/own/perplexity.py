"""Perplexity by position, of text that training never saw (`pod.eval.answer.perplexity` says how it is scored)."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pod.eval import answer
from pod.eval.answer.store import in_batches, key_of
from pod.eval.judge.verdicts import perplexity_of
from pod.eval.suites.base import Span, Task, perplexity_result
from pod.eval.suites.buckets import position_buckets
from pod.eval.suites.text import load_text, text_sample

if TYPE_CHECKING:
    from torch import Tensor

    from pod.eval.answer.methods import Method
    from pod.eval.answer.store import Shelf

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

    def spans(self) -> list[Span]:
        return [Span(bucket.held_length, bucket.scored) for bucket in self.buckets]

    def longest(self) -> int:
        return self.args.text_length

    def measure(self, method: "Method", shelf: "Shelf") -> dict[str, Any]:
        budgets = [self.run.budget(method, bucket.held_length, bucket.scored) for bucket in self.buckets]
        asked = [[b.first, b.end, self.run.room(method, b.held_length, b.scored)] for b in self.buckets]
        records = shelf.answers(
            list(range(len(self.text))),
            key=lambda row: key_of("perplexity", asked, self.text[row].tolist()),
            batches=lambda left: in_batches(left, self.args.batch_size),
            compute=lambda rows: self._score(method, self._rows(method, rows)),
        )
        return {
            "scored_by": "one forward pass" if method.one_shot else "decode path, token by token",
            "decode_path_check": self._check_decode_path(method, shelf) if method.one_shot else None,
            **self._payload(records, budgets),
        }

    def _rows(self, method: "Method", numbers: list[int]) -> "Tensor":
        """Texts on the model's device."""
        return self.text[numbers].to(next(self.run.models.get(method.model).parameters()).device)

    def _score(self, method: "Method", rows: "Tensor") -> list[dict[str, Any]]:
        """A record per sequence: summed NLL (nats) and bytes of each bucket."""
        model = self.run.models.get(method.model)
        records: list[dict[str, Any]] = [{"sums": [], "held": []} for _ in rows]
        by_bucket = answer.perplexity.score_by_forward(model, rows, self.buckets) if method.one_shot else None
        for index, bucket in enumerate(self.buckets):
            held = None
            if by_bucket is not None:
                nll = by_bucket[index]
            else:
                cache, _ = self.run.cache(method, bucket.held_length, bucket.scored)
                nll = answer.perplexity.score_by_decode(model, cache, rows, bucket)
                held = cache.nbytes // len(rows)
            for record, total in zip(records, nll.double().sum(dim=1).tolist(), strict=True):
                record["sums"].append(total)
                record["held"].append(held)
        return records

    def _payload(self, records: list[dict[str, Any]], budgets: list[int | None]) -> dict[str, Any]:
        rows = []
        for index, bucket in enumerate(self.buckets):
            sums = [record["sums"][index] for record in records]
            held = [record["held"][index] for record in records if record["held"][index] is not None]
            stated = self.run.stated_bytes(bucket.held_length, budgets[index], held)
            summary = perplexity_of(sums, [bucket.scored] * len(sums))
            rows.append({**asdict(bucket), **summary, "bytes": stated})
        tokens = sum(bucket.scored for bucket in self.buckets)
        sums = [sum(record["sums"]) for record in records]
        total = perplexity_of(sums, [tokens] * len(sums))
        return {
            **perplexity_result(total["perplexity"], total["ci95"]),
            "samples": [
                text_sample(
                    number,
                    self.text[number].tolist(),
                    score=sum(record["sums"]),
                    tokens=tokens,
                    buckets=record["sums"],
                )
                for number, record in enumerate(records)
            ],
            "bytes": [row["bytes"] for row in rows],
            "settings": {"sequences": len(records), "length": self.args.text_length},
            "buckets": rows,
            "total": total,
        }

    def _check_decode_path(self, method: "Method", shelf: "Shelf") -> dict[str, Any]:
        """The proof on this very model that one pass equals the decode path: the end of the shortest bucket with distant tokens."""
        return shelf.answers(
            [0],
            key=lambda row: key_of("decode path", _CHECKED_TOKENS, self.buckets, self.text[row].tolist()),
            batches=lambda left: [left],
            compute=lambda rows: [self._forward_error(method, self._rows(method, rows))],
        )[0]

    def _forward_error(self, method: "Method", row: "Tensor") -> dict[str, Any]:
        model = self.run.models.get(method.model)
        window = model.config.num_sink_tokens + model.config.num_recent_tokens
        bucket = next((bucket for bucket in self.buckets if bucket.end > 1.5 * window), self.buckets[-1])
        cache, _ = self.run.cache(method, bucket.held_length, bucket.scored)
        return {
            "tokens": min(_CHECKED_TOKENS, bucket.scored),
            "length": bucket.end,
            "max_abs_difference_nats": answer.perplexity.forward_error(
                model, cache, row, bucket, _CHECKED_TOKENS
            ),
        }
