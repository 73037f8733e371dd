"""Passkey retrieval (Mohtashami & Jaggi 2023): a five-digit number hidden at some depth of repetitive text.

A prompt is correct when the first number in the answer is the key, which is InfiniteBench's rule too.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from pod.eval.answer.store import key_of

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
    """One passkey prompt: what was asked for (length in tokens, depth in [0, 1], sample number) and what came of it."""

    length: int
    depth: float
    sample: int
    key: str
    text: str
    token_ids: tuple[int, ...]


def make_prompts(
    tokenizer: Any,
    lengths: list[int],
    depths: list[float],
    samples: int,
    seed: int,
    chat_template: bool = False,
) -> list[Prompt]:
    """Prompts of every length × depth × sample, at most one line of filler shorter than asked, in that order.

    chat_template: put the question into the tokenizer's chat template; see `render` for the format without it.
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
                prompts.append(
                    Prompt(length=length, depth=depth, sample=sample, key=key, text=text, token_ids=ids)
                )
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


def left_padded(
    rows: list[tuple[int, ...]], pad: int, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor]:
    """`input_ids` and `attention_mask` [B, longest] with the padding on the left."""
    longest = max(len(row) for row in rows)
    ids = [[pad] * (longest - len(row)) + list(row) for row in rows]
    mask = [[0] * (longest - len(row)) + [1] * len(row) for row in rows]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


class Tokenized(Protocol):
    """Anything with the token ids of a prompt."""

    @property
    def token_ids(self) -> tuple[int, ...]: ...


@torch.no_grad()
def answer(
    model: Any, tokenizer: Any, cache: Any, prompts: Sequence[Tokenized], new_tokens: int
) -> list[str]:
    """Greedy answers to a batch of prompts (left padding) through `cache`, a new one."""
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    ids, mask = left_padded(
        [prompt.token_ids for prompt in prompts], pad or 0, next(model.parameters()).device
    )
    out = model.generate(
        input_ids=ids,
        attention_mask=mask,
        past_key_values=cache,
        max_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=pad or 0,
    )
    return [tokenizer.decode(row[ids.shape[1] :], skip_special_tokens=True) for row in out]


def answers(
    model: Any, tokenizer: Any, cache: Any, prompts: Sequence[Tokenized], new_tokens: int
) -> list[dict[str, Any]]:
    """`answer` as records for a shelf: what was said, and the bytes held per row at the end."""
    said = answer(model, tokenizer, cache, prompts, new_tokens)
    return [{"answer": text, "bytes": cache.nbytes // len(prompts)} for text in said]


def key(prompt: Tokenized, new_tokens: int, room: int | None) -> str:
    """What `answers` is asked; room: the budget of its cache."""
    return key_of("greedy", prompt.token_ids, new_tokens, room)
