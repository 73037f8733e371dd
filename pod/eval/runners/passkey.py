"""Passkey retrieval: accuracy by length and depth (`pod.eval.passkey` has prompts and rule)."""

from typing import Any

from pod.eval import passkey
from pod.eval.answer import reading
from pod.eval.answer.store import Shelf
from pod.eval.methods import Method
from pod.eval.runners.base import Span, Task, in_batches, prompt_hash, scored_payload


class Passkey(Task):
    """Every length × depth × sample, greedy answers through the method's cache, bytes held at the end of generation."""

    name = "passkey"
    title = "passkey"

    def __init__(self, run: Any, options: Any):
        super().__init__(run, options)
        args = self.args
        self.prompts = passkey.make_prompts(
            run.tokenizer,
            args.passkey_lengths,
            args.passkey_depths,
            args.passkey_samples,
            run.recipe.seed,
            args.passkey_chat_template,
            args.question_aware,
        )
        self.held_length = {
            length: self._answered(max(len(p.token_ids) for p in self.prompts if p.length == length))
            for length in args.passkey_lengths
        }

    def _answered(self, tokens: int) -> int:
        """Tokens in the cache after a prompt is answered; the last new token is never fed."""
        return tokens + self.args.passkey_new_tokens - 1

    def spans(self) -> list[Span]:
        return [Span(length, self.args.passkey_new_tokens) for length in self.held_length.values()]

    def longest(self) -> int:
        return max(self.args.passkey_lengths) + self.args.passkey_new_tokens

    def measure(self, method: Method, shelf: Shelf) -> dict[str, Any]:
        new_tokens = self.args.passkey_new_tokens
        budgets = {n: self.run.budget(method, held, new_tokens) for n, held in self.held_length.items()}
        rooms = {n: self.run.room(method, held, new_tokens) for n, held in self.held_length.items()}
        answers = shelf.answers(
            self.prompts,
            key=lambda prompt: reading.key_of_prompt(prompt, new_tokens, rooms[prompt.length]),
            batches=self._batches,
            compute=lambda batch: self._answer(method, batch),
        )
        records = [_record(p, a, budgets[p.length]) for p, a in zip(self.prompts, answers, strict=True)]
        held = {}
        for record in records:
            rows = [row for row in records if row["length"] == record["length"]]
            held[record["length"]] = self.run.stated_bytes(
                self.held_length[record["length"]],
                record["budget_tokens"],
                [row["bytes"] for row in rows],
            )
        correct = sum(record["correct"] for record in records)
        args = self.args
        return scored_payload(
            "binary",
            "accuracy",
            records,
            bytes_rows=[{"prompt_length": length, **row} for length, row in held.items()],
            settings={
                "format": "chat template" if args.passkey_chat_template else "plain text",
                "question": self.run.args.asked_when(),
                "new_tokens": args.passkey_new_tokens,
            },
            prompts=len(records),
            correct=correct,
            cells=_cells(records),
        )

    def _batches(self, prompts: list[passkey.Prompt]) -> list[list[passkey.Prompt]]:
        """Batches of one asked-for length."""
        size, batches = self.args.batch_size, []
        for length in self.args.passkey_lengths:
            batches += in_batches([prompt for prompt in prompts if prompt.length == length], size)
        return batches

    def _answer(self, method: Method, batch: list[passkey.Prompt]) -> list[dict[str, Any]]:
        """What is said to each prompt. The budget depends on the asked-for length only, so that an answer does not depend on its batch."""
        run, new_tokens = self.run, self.args.passkey_new_tokens
        model = run.models.get(method.model)
        cache, _ = run.cache(method, self.held_length[batch[0].length], new_tokens)
        return reading.answers(model, run.tokenizer, cache, batch, new_tokens)


def _record(prompt: passkey.Prompt, said: dict[str, Any], budget: int | None) -> dict[str, Any]:
    correct = passkey.is_correct(said["answer"], prompt.key)
    return {
        "id": f"{prompt.length}/{prompt.depth}/{prompt.sample}",
        "score": float(correct),
        "length": prompt.length,
        "depth": prompt.depth,
        "sample": prompt.sample,
        "prompt_tokens": len(prompt.token_ids),
        "prompt_hash": prompt_hash(prompt.text),
        "target": prompt.key,
        "correct": correct,
        "budget_tokens": budget,
        **said,
    }


def _cells(records: list[dict]) -> list[dict[str, Any]]:
    """Counts per (length, depth), in the order of the samples."""
    cells: dict[tuple[int, float], dict[str, Any]] = {}
    for record in records:
        key = (record["length"], record["depth"])
        cell = cells.setdefault(key, {"length": key[0], "depth": key[1], "correct": 0, "prompts": 0})
        cell["correct"] += record["correct"]
        cell["prompts"] += 1
    return list(cells.values())
