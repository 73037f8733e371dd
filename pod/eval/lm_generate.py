"""Answers generated through a cache: greedy or sampled, ended by every EOS of the model and by stop strings."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from pod.eval.passkey import left_padded

_MARGIN = 4  # tokens looked at beyond the longest stop string


def end_ids(model: Any, tokenizer: Any, stops: Sequence[str]) -> list[int]:
    """Token ids that end an answer: every EOS of the generation config, the tokenizer's, and stop strings that are one special token."""
    configured = model.generation_config.eos_token_id
    found = list(configured) if isinstance(configured, (list, tuple)) else [configured]
    found.append(tokenizer.eos_token_id)
    special = set(tokenizer.all_special_tokens)
    found += [tokenizer.convert_tokens_to_ids(stop) for stop in stops if stop in special]
    return sorted({int(token) for token in found if token is not None})


def text_of(tokenizer: Any, ids: Sequence[int], ends: Sequence[int], stops: Sequence[str]) -> str:
    """The answer: up to the first end id and the first stop string, neither included."""
    kept = list(ids)
    for place, token in enumerate(kept):
        if token in ends:
            kept = kept[:place]
            break
    text = tokenizer.decode(kept, skip_special_tokens=True)
    for stop in stops:
        if stop:
            text = text.split(stop)[0]
    return text


class StopStrings(StoppingCriteria):
    """Ends each row of its own as soon as one of the stop strings stands in its new text.

    Only the newest tokens are decoded: a stop string of k bytes ends within the last k of them.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str], prompt_columns: int):
        self.tokenizer, self.stops, self.prompt_columns = (
            tokenizer,
            [stop for stop in stops if stop],
            prompt_columns,
        )
        self.window = max((len(stop.encode()) for stop in self.stops), default=0) + _MARGIN

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        new = input_ids[:, self.prompt_columns :][:, -self.window :]
        texts = self.tokenizer.batch_decode(new)
        done = [any(stop in text for stop in self.stops) for text in texts]
        return torch.tensor(done, device=input_ids.device)


class NotAtFirst(LogitsProcessor):
    """Bans token ids as long as fewer than `tokens` new ones stand: stop strings under `min_new_tokens`, which stock generate() applies to
    EOS alone (LongBench's samsum ends at a line break, but not before it has begun)."""

    def __init__(self, ids: Sequence[int], tokens: int, prompt_columns: int):
        self.ids, self.columns = list(ids), tokens + prompt_columns

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] >= self.columns or not self.ids:
            return scores
        scores = scores.clone()
        scores[:, self.ids] = -float("inf")
        return scores


def one_token_stops(tokenizer: Any, stops: Sequence[str]) -> list[int]:
    """Ids of the stop strings that are one token."""
    found = [(stop, tokenizer.encode(stop, add_special_tokens=False)) for stop in stops if stop]
    return [ids[-1] for stop, ids in found if ids and tokenizer.decode(ids[-1:]) == stop]


@dataclass(frozen=True)
class Generated:
    """Answers of a batch, bytes held per row and tokens seen by the longest row at the end."""

    texts: list[str]
    held_bytes: int
    held_tokens: int


@torch.no_grad()
def generate(
    model: Any,
    tokenizer: Any,
    cache: Any,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    settings: dict[str, Any],
    seed: str = "",
) -> Generated:
    """Answers to a batch of prompts (left padding) through `cache`, a new one.

    settings: of lm-eval's `generation_kwargs`, normalized; `until` holds the stop strings. seed: what sampling depends on, so that a
    restarted run samples the same answers.
    """
    options = dict(settings)
    until = options.pop("until", None) or []
    end_text = tokenizer.decode([tokenizer.eos_token_id]) if tokenizer.eos_token_id is not None else ""
    stops = [*([until] if isinstance(until, str) else until), end_text]
    options.pop("max_length", None)  # lm-eval's key for prompt + new tokens; new_tokens says it
    if not options.get("do_sample"):
        options = {
            name: value for name, value in options.items() if name not in ("temperature", "top_p", "top_k")
        }
        options["do_sample"] = False
    ends = end_ids(model, tokenizer, stops)
    pad = int(tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (ends or [0])[0])
    device = next(model.parameters()).device
    ids, mask = left_padded([tuple(row) for row in prompts], pad, device)
    columns, least = ids.shape[1], int(options.get("min_new_tokens") or 0)
    banned = NotAtFirst(one_token_stops(tokenizer, stops) if least else [], least, columns)
    with torch.random.fork_rng(enabled=bool(options["do_sample"])):
        if options["do_sample"]:
            torch.manual_seed(int.from_bytes(hashlib.sha256(seed.encode()).digest()[:7], "big"))
        out = model.generate(
            input_ids=ids,
            attention_mask=mask,
            past_key_values=cache,
            max_new_tokens=new_tokens,
            eos_token_id=ends or None,
            pad_token_id=pad,
            logits_processor=LogitsProcessorList([banned]),
            stopping_criteria=StoppingCriteriaList([StopStrings(tokenizer, stops, columns)]),
            **options,
        )
    new = out[:, columns:].tolist()
    texts = [text_of(tokenizer, row, ends, stops) for row in new]
    return Generated(texts, cache.nbytes // len(prompts), int(cache.lengths.max()))
