"""Passkey retrieval (Mohtashami & Jaggi 2023): a five-digit number hidden at some depth of repetitive text.

A prompt is correct when the first number in the answer is the key, which is InfiniteBench's rule too.
"""

import random
import re
from dataclasses import dataclass
from typing import Any

from pod.eval.answer import reading
from pod.eval.answer.methods import Method
from pod.eval.answer.store import Shelf
from pod.eval.suites.base import Span, Task, in_batches, prompt_hash, scored_payload

TASK = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there."
)
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "The pass key is {key}. Remember it. {key} is the pass key."
QUESTION = "What is the pass key?"
ANSWER = "The pass key is"  # the answer's beginning is given: what is tested is retrieval, not obedience


@dataclass(frozen=True)
class Prompt:
    """One passkey prompt: what was asked for (length in tokens, depth in [0, 1], sample number) and what came of it.

    num_asked: tokens of the question, which is put when the text before it is compressed; 0: methods see it before.
    """

    length: int
    depth: float
    sample: int
    key: str
    text: str
    token_ids: tuple[int, ...]
    num_asked: int = 0


def make_prompts(
    tokenizer: Any,
    lengths: list[int],
    depths: list[float],
    samples: int,
    seed: int,
    chat_template: bool = False,
    question_aware: bool = False,
) -> list[Prompt]:
    """Prompts of every length × depth × sample, at most one line of filler shorter than asked, in that order.

    chat_template: put the question into the tokenizer's chat template; see `render` for the format without it.
    question_aware: methods see the question when they compress the text.
    The keys depend on (seed, length, depth, sample) only.
    Raises: ValueError when a length cannot hold the question, or when the tokenizer has no chat template to use.
    """
    if chat_template and not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            "eval.passkey_chat_template is true and the tokenizer has no chat template: set it to false"
        )
    prompts = []
    for length in lengths:
        lines = _filler_that_fits(tokenizer, length, chat_template)
        for depth in depths:
            for sample in range(samples):
                key = str(random.Random(f"{seed}/{length}/{depth}/{sample}").randrange(10_000, 100_000))
                text = render(tokenizer, key, lines, depth, chat_template)
                ids = tuple(encode(tokenizer, text, chat_template))
                start = 0 if question_aware else text.rindex(QUESTION)
                asked = reading.tokens_from(lambda part: encode(tokenizer, part, chat_template), text, start)
                prompts.append(Prompt(length, depth, sample, key, text, ids, asked))
    return prompts


def render(tokenizer: Any, key: str, lines: int, depth: float, chat_template: bool = False) -> str:
    """The prompt with `lines` lines of filler and the key's line after `depth` of them, ending in the beginning of the answer.

    Without a chat template it is the paper's text. The key and the answer's beginning stand on lines of their own: in
    running text the dense SmolLM2-135M misses the key at some depths, and the test would measure the wording.
    """
    filler = [FILLER] * lines
    filler.insert(round(depth * lines), NEEDLE.format(key=key))
    text = "\n".join(filler)
    question = f"{TASK}\n\n{text}\n\n{QUESTION}"
    if not chat_template:
        return f"{question}\n{ANSWER}"
    messages = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) + ANSWER


def encode(tokenizer: Any, text: str, chat_template: bool = False) -> list[int]:
    """Token ids; special tokens are added only where no chat template has written them already."""
    return list(tokenizer(text, add_special_tokens=not chat_template)["input_ids"])


def is_correct(answer: str, key: str) -> bool:
    """Whether the first run of digits in the answer is the key."""
    number = re.search(r"[0-9]+", answer)
    return number is not None and number.group() == key


def _filler_that_fits(tokenizer: Any, length: int, chat_template: bool) -> int:
    """The largest number of lines of filler with which a prompt has at most `length` tokens, by bisection."""

    def tokens(lines: int) -> int:
        text = render(tokenizer, "55555", lines, 0.5, chat_template)
        return len(encode(tokenizer, text, chat_template))

    if tokens(0) > length:
        raise ValueError(
            f"a passkey prompt of {length} tokens is too short: the question alone takes {tokens(0)} tokens"
        )
    low, high = 0, length
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if tokens(middle) <= length else (low, middle)
    return low


class Passkey(Task):
    """Every length × depth × sample, greedy answers through the method's cache, bytes held at the end of generation."""

    name = "passkey"
    title = "passkey"

    def __init__(self, run: Any, options: Any):
        super().__init__(run, options)
        args = self.args
        self.prompts = make_prompts(
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

    def _batches(self, prompts: list[Prompt]) -> list[list[Prompt]]:
        """Batches of one asked-for length."""
        size, batches = self.args.batch_size, []
        for length in self.args.passkey_lengths:
            batches += in_batches([prompt for prompt in prompts if prompt.length == length], size)
        return batches

    def _answer(self, method: Method, batch: list[Prompt]) -> list[dict[str, Any]]:
        """What is said to each prompt. The budget depends on the asked-for length only, so that an answer does not depend on its batch."""
        run, new_tokens = self.run, self.args.passkey_new_tokens
        model = run.models.get(method.model)
        cache, _ = run.cache(method, self.held_length[batch[0].length], new_tokens)
        return reading.answers(model, run.tokenizer, cache, batch, new_tokens)


def _record(prompt: Prompt, said: dict[str, Any], budget: int | None) -> dict[str, Any]:
    correct = is_correct(said["answer"], prompt.key)
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
