"""Passkey retrieval (Mohtashami & Jaggi 2023): a five-digit number hidden at some depth of repetitive text.

A prompt is correct when the first number in the answer is the key, which is InfiniteBench's rule too.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pod.eval import answer
from pod.eval.suites import grid
from pod.eval.suites.base import scored_payload

if TYPE_CHECKING:
    from pod.eval.answer.methods import Method
    from pod.eval.answer.store import Shelf
    from pod.eval.runner import Evaluation

TASK = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there."
)
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "The pass key is {key}. Remember it. {key} is the pass key."
QUESTION = "What is the pass key?"
ANSWER = "The pass key is"  # the answer's beginning is given: what is tested is retrieval, not obedience


@dataclass(frozen=True)
class Prompt(grid.Prompt):
    """A prompt and the key that is hidden in it."""

    key: str


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
                asked = answer.reading.tokens_from(
                    lambda part: encode(tokenizer, part, chat_template), text, start
                )
                prompts.append(Prompt(length, depth, sample, text, ids, asked, key))
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


def is_correct(said: str, key: str) -> bool:
    """Whether the first run of digits in the answer is the key."""
    number = re.search(r"[0-9]+", said)
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


def prompts_of(run: "Evaluation") -> list[Prompt]:
    """The prompts that the recipe asks for (`eval.passkey_…`)."""
    args = run.args
    return make_prompts(
        run.tokenizer,
        args.passkey_lengths,
        args.passkey_depths,
        args.passkey_samples,
        run.recipe.seed,
        args.passkey_chat_template,
        args.question_aware,
    )


class Passkey(grid.PromptTask):
    """Every length × depth × sample, greedy answers, bytes held at the end of generation."""

    name = "passkey"
    title = "passkey"
    prompts: Sequence[Prompt]

    def __init__(self, run: Any, options: Any):
        super().__init__(run, options)
        self.prompts = prompts_of(run)
        self.plan(self.prompts, lambda prompt: len(prompt.token_ids), self.args.passkey_new_tokens)

    def longest(self) -> int:
        return max(self.args.passkey_lengths) + self.new_tokens

    def judge(self, prompt: Prompt, said: str) -> dict[str, Any]:
        correct = is_correct(said, prompt.key)
        return {"score": float(correct), "target": prompt.key, "correct": correct}

    def measure(self, method: "Method", shelf: "Shelf") -> dict[str, Any]:
        records, args = self.records(method, shelf), self.args
        return scored_payload(
            "binary",
            "accuracy",
            records,
            bytes_rows=self.bytes_rows(records),
            settings={
                "format": "chat template" if args.passkey_chat_template else "plain text",
                "question": args.asked_when(),
                "new_tokens": self.new_tokens,
            },
            prompts=len(records),
            correct=sum(record["correct"] for record in records),
            cells=_cells(records),
        )


def _cells(records: list[dict]) -> list[dict[str, Any]]:
    """Counts per (length, depth), in the order of the samples."""
    cells: dict[tuple[int, float], dict[str, Any]] = {}
    for record in records:
        key = (record["length"], record["depth"])
        cell = cells.setdefault(key, {"length": key[0], "depth": key[1], "correct": 0, "prompts": 0})
        cell["correct"] += record["correct"]
        cell["prompts"] += 1
    return list(cells.values())
