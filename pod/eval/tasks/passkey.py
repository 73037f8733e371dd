"""Passkey retrieval (Mohtashami & Jaggi 2023): a five-digit number hidden at some depth of repetitive text.

An answer is correct when its first number is the key, which is InfiniteBench's rule too.
"""

import bisect
import itertools
import random
import re
from dataclasses import dataclass
from typing import Any

from pod.eval import answer
from pod.eval.answer.answer_cache import JsonObject
from pod.eval.answer.budget import MethodRunner
from pod.eval.suites.grid_tasks import GridPrompt, PromptTask
from pod.eval.suites.haystack import Frame, make_frame

TASK = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there."
)
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "The pass key is {key}. Remember it. {key} is the pass key."
QUESTION = "What is the pass key?"
ANSWER = "The pass key is"  # the answer's beginning is given: what is tested is retrieval, not obedience


@dataclass(frozen=True)
class PasskeyPrompt(GridPrompt):
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
) -> list[PasskeyPrompt]:
    """A prompt for every length, depth and sample, in that order.

    Each is at most one line of filler shorter than its length.

    Args:
        chat_template: put the question into the tokenizer's chat template; see `render` for the format
            without it.
        question_aware: methods see the question when they compress the text.

    The keys depend on (seed, length, depth, sample) only.

    Raises:
        ValueError: when a length cannot hold the question, or when the tokenizer has no chat template to use.
    """
    where = "eval.passkey_chat_template"
    frame = make_frame(tokenizer, f"{TASK}\n\n", f"\n\n{QUESTION}", ANSWER, chat_template, where)
    prompts = []
    for length in lengths:
        lines = _filler_that_fits(frame, length)
        for depth, sample in itertools.product(depths, range(samples)):
            key = str(random.Random(f"{seed}/{length}/{depth}/{sample}").randrange(10_000, 100_000))
            text = render(frame, key, lines, depth)
            question = 0 if question_aware else text.rindex(QUESTION)
            prompts.append(PasskeyPrompt.of((length, depth, sample), text, frame.encode, question, key))
    return prompts


def render(frame: Frame, key: str, lines: int, depth: float) -> str:
    """The prompt with `lines` lines of filler and the key's line after `depth` of them.

    It ends in the beginning of the answer.

    Without a chat template it is the paper's text. The key and the answer's beginning stand on lines of their
    own: in running text the dense SmolLM2-135M misses the key at some depths, and the test would measure the
    wording.
    """
    filler = [FILLER] * lines
    filler.insert(round(depth * lines), NEEDLE.format(key=key))
    return frame.before + "\n".join(filler) + frame.after


def is_correct(said: str, key: str) -> bool:
    """Whether the first run of digits in the answer is the key."""
    number = re.search(r"[0-9]+", said)
    return number is not None and number.group() == key


def _filler_that_fits(frame: Frame, length: int) -> int:
    """The largest number of lines of filler with which a prompt has at most `length` tokens, by bisection."""

    def tokens(lines: int) -> int:
        return len(frame.encode(render(frame, "55555", lines, 0.5)))

    if tokens(0) > length:
        raise ValueError(
            f"a passkey prompt of {length} tokens is too short, because the question alone takes {tokens(0)}"
        )
    return bisect.bisect_right(range(length), length, key=tokens) - 1


class Passkey(PromptTask):
    """Every length × depth × sample, greedy answers, bytes held at the end of generation."""

    name = "passkey"
    title = "passkey"
    about = "a five-digit number that is hidden in repetitive text has to be found."
    length_setting = "eval.passkey_lengths"

    def __init__(self, run: Any, options: Any):
        super().__init__(run, options)
        args = self.args
        grid_of = args.passkey_lengths, args.passkey_depths, args.passkey_samples
        asked = run.recipe.seed, args.passkey_chat_template, args.question_aware
        self.plan_prompts(make_prompts(run.tokenizer, *grid_of, *asked), args.passkey_new_tokens)

    def longest(self) -> int:
        return max(self.args.passkey_lengths) + self.new_tokens

    def ask_model(self, runner: MethodRunner, cache: Any, batch: list[PasskeyPrompt]) -> list[JsonObject]:
        return answer.generate.generate(runner.model, self.run.tokenizer, cache, batch, self.new_tokens)

    def judge(self, prompt: PasskeyPrompt, said: str) -> JsonObject:
        return {"score": float(is_correct(said, prompt.key)), "target": prompt.key}

    def settings(self) -> JsonObject:
        return {
            "format": "chat template" if self.args.passkey_chat_template else "plain text",
            "question": self.args.asked_when(),
        }
