"""Answers generated through a cache: greedy or sampled, to questions behind the compressed text."""

import hashlib
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

from pod.eval.answer import gates
from pod.eval.answer.reading import Asked, decided, held, in_parts, left_padded, read
from pod.tokenizer import pad_id

_MARGIN = 4  # tokens looked at beyond the longest stop string


@torch.no_grad()
def generate(
    model: Any,
    tokenizer: Any,
    cache: Any,
    prompts: Sequence[Asked],
    new_tokens: int,
    until: Sequence[str] | None = None,
    seed: str = "",
    **options: Any,
) -> list[dict[str, Any]]:
    """Answer a batch of prompts (left padding) through `cache`, which must be new.

    A prompt's question, if it has one, is read behind the compressed text.

    Args:
        new_tokens: tokens of an answer, at most.
        until: strings that end an answer, beside the end of text as the model and the tokenizer know it.
            None: only the model's own end of text does, as in stock generate().
        seed: decides what is sampled, so that a restarted run samples the same answers.
        options: further arguments of generate(); greedy unless they say `do_sample`.
    Returns: a record per prompt: the `answer`, what the cache held at its end (`reading.held`), and what the
        method decided (`reading.decided`).
    """
    gates.watch(cache)
    before, questions = in_parts(prompts)
    mask = None
    if before is not None:
        mask = read(model, cache, before, pad_id(tokenizer), hold_out=False).mask
    return generate_behind(model, tokenizer, cache, mask, questions, new_tokens, until, seed, **options)


@torch.no_grad()
def generate_behind(
    model: Any,
    tokenizer: Any,
    cache: Any,
    mask: Tensor | None,
    questions: Sequence[Sequence[int]],
    new_tokens: int,
    until: Sequence[str] | None = None,
    seed: str = "",
    **options: Any,
) -> list[dict[str, Any]]:
    """Answer questions behind what `cache` holds; see `generate`. The cache is used up.

    To the method the questions are one more prompt, as in a conversation.

    Args:
        mask: [B, n] of what the cache has seen; None for a new one.
        questions: token ids, at least one each.
    """
    ends, stops = _ends(model, tokenizer, until, at_once=not options.get("min_new_tokens"))
    pad = pad_id(tokenizer, (ends or [0])[0])
    fed = behind(mask, questions, pad, next(model.parameters()).device)
    columns = fed["input_ids"].shape[1]
    options = {"do_sample": False} | options
    criteria = [StopStrings(tokenizer, stops, columns)] if stops else []
    with torch.random.fork_rng(enabled=bool(options["do_sample"])):
        if options["do_sample"]:
            torch.manual_seed(int.from_bytes(hashlib.sha256(seed.encode()).digest()[:7], "big"))
        out = model.generate(
            **fed,
            past_key_values=cache,
            max_new_tokens=new_tokens,
            eos_token_id=ends or None,
            pad_token_id=pad,
            stopping_criteria=StoppingCriteriaList(criteria),
            **options,
        )
    new = out[:, columns:]
    said = [text_of(tokenizer, row, ends, stops) for row in new.tolist()]
    records = zip(said, held(cache), decided(cache, new, pad), strict=True)
    return [{"answer": text, **size, **one} for text, size, one in records]


def behind(mask: Tensor | None, rows: Sequence[Sequence[int]], pad: int, device: Any) -> dict[str, Tensor]:
    """`input_ids` and `attention_mask` for `generate`: rows (left padding) behind what a cache has seen.

    Args:
        mask: [B, n] of what the cache has seen; None for a new one.
    """
    ids, new = left_padded(rows, pad, device)
    return {"input_ids": ids, "attention_mask": new if mask is None else torch.cat((mask, new), dim=1)}


# -- where answers end ---------------------------------------------------------------------------------------


def end_ids(model: Any, tokenizer: Any, stops: Sequence[str] | None) -> list[int]:
    """Token ids that end an answer.

    They are every EOS of the generation config, the tokenizer's EOS, and stop strings that are one special
    token.

    Args:
        stops: None = only the ids of the generation config.
    """
    configured = model.generation_config.eos_token_id
    found = list(configured) if isinstance(configured, (list, tuple)) else [configured]
    if stops is not None:
        found.append(tokenizer.eos_token_id)
        special = set(tokenizer.all_special_tokens)
        found += [tokenizer.convert_tokens_to_ids(stop) for stop in stops if stop in special]
    return sorted({int(token) for token in found if token is not None})


def _ends(
    model: Any, tokenizer: Any, until: Sequence[str] | None, at_once: bool
) -> tuple[list[int], list[str]]:
    """Ids and strings that end an answer.

    Args:
        at_once: False with `min_new_tokens`. Stop strings of one token then become ids, because stock
            generate() suppresses only ids until so many tokens are generated. (LongBench's samsum ends at a
            line break, but not before it has begun.)
    """
    if until is None:
        return end_ids(model, tokenizer, None), []
    stops = [stop for stop in until if stop]
    ends = end_ids(model, tokenizer, stops)
    if not at_once:
        alone = {stop: tokenizer.encode(stop, add_special_tokens=False)[-1:] for stop in stops}
        alone = {stop: ids for stop, ids in alone.items() if ids and tokenizer.decode(ids) == stop}
        ends = sorted({*ends, *(ids[0] for ids in alone.values())})
        stops = [stop for stop in stops if stop not in alone]
    if tokenizer.eos_token_id is not None:
        stops.append(tokenizer.decode([tokenizer.eos_token_id]))  # spelled out, as lm-eval does
    return ends, stops


def text_of(tokenizer: Any, ids: Sequence[int], ends: Sequence[int], stops: Sequence[str]) -> str:
    """The answer up to the first end id and the first stop string. Neither is included."""
    kept = itertools.takewhile(lambda token: token not in ends, ids)
    text = tokenizer.decode(list(kept), skip_special_tokens=True)
    for stop in filter(None, stops):
        text = text.split(stop)[0]
    return text


class StopStrings(StoppingCriteria):
    """Ends each row on its own, as soon as one of the stop strings stands in its new text.

    Only the newest tokens are decoded: a stop string of k bytes ends within the last k of them.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str], prompt_columns: int):
        self.tokenizer, self.prompt_columns = tokenizer, prompt_columns
        self.stops = [stop for stop in stops if stop]
        self.window = max((len(stop.encode()) for stop in self.stops), default=0) + _MARGIN

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        new = input_ids[:, self.prompt_columns :][:, -self.window :]
        texts = self.tokenizer.batch_decode(new)
        done = [any(stop in text for stop in self.stops) for text in texts]
        return torch.tensor(done, device=input_ids.device)
