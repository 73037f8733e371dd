"""Answers generated through a cache: greedy or sampled.

Every EOS of the model and stop strings end them.
"""

import hashlib
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

from pod.eval.answer import gates
from pod.eval.answer.reading import behind, decided, held, in_parts, read_prompts
from pod.eval.lm.requests import Encoded
from pod.tokenizer import pad_id

_MARGIN = 4  # tokens looked at beyond the longest stop string


def end_ids(model: Any, tokenizer: Any, stops: Sequence[str]) -> list[int]:
    """Token ids that end an answer.

    They are every EOS of the generation config, the tokenizer's EOS, and stop strings that are one special
    token.
    """
    configured = model.generation_config.eos_token_id
    found = list(configured) if isinstance(configured, (list, tuple)) else [configured]
    found.append(tokenizer.eos_token_id)
    special = set(tokenizer.all_special_tokens)
    found += [tokenizer.convert_tokens_to_ids(stop) for stop in stops if stop in special]
    return sorted({int(token) for token in found if token is not None})


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


def _ends(model: Any, tokenizer: Any, until: Sequence[str], at_once: bool) -> tuple[list[int], list[str]]:
    """Ids and strings that end an answer.

    Args:
        at_once: False under `min_new_tokens`. Stop strings of one token are then ids, because stock
            generate() keeps back only ids until so many tokens stand. (LongBench's samsum ends at a line
            break, but not before it has begun.)
    """
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


def _options(settings: dict[str, Any]) -> dict[str, Any]:
    """Arguments of generate(); greedy unless sampling is asked for."""
    of_sampling = () if settings["do_sample"] else ("temperature", "top_p", "top_k")
    left_out = ("until", "max_length", *of_sampling)
    return {name: value for name, value in settings.items() if name not in left_out}


@torch.no_grad()
def generate(model: Any, tokenizer: Any, cache: Any, items: Sequence[Encoded]) -> list[dict[str, Any]]:
    """The record of every request of a batch (left padding) through `cache`, a new one.

    A record has the `answer`, what was `held` at the end, and what was `decided`.

    A question of its own is put behind the compressed text. New tokens and settings are those of the first
    request (`until` holds the stop strings). Sampling depends on the requests' keys, so that a restarted run
    samples the same answers.
    """
    settings, seed = items[0].settings, " ".join(item.key for item in items)
    options = _options(settings)
    ends, stops = _ends(model, tokenizer, settings["until"], at_once=not options.get("min_new_tokens"))
    pad = pad_id(tokenizer, (ends or [0])[0])
    gates.watch(cache)
    before, rows = in_parts(items)
    mask = None if before is None else read_prompts(model, cache, before, pad)
    fed = behind(mask, rows, pad, next(model.parameters()).device)
    columns = fed["input_ids"].shape[1]
    with torch.random.fork_rng(enabled=bool(options["do_sample"])):
        if options["do_sample"]:
            torch.manual_seed(int.from_bytes(hashlib.sha256(seed.encode()).digest()[:7], "big"))
        out = model.generate(
            **fed,
            past_key_values=cache,
            max_new_tokens=items[0].new_tokens,
            eos_token_id=ends or None,
            pad_token_id=pad,
            stopping_criteria=StoppingCriteriaList([StopStrings(tokenizer, stops, columns)]),
            **options,
        )
    new = out[:, columns:]
    said = [text_of(tokenizer, row, ends, stops) for row in new.tolist()]
    more = decided(cache, new, pad)
    records = zip(said, held(cache), more, strict=True)
    return [{"answer": text, **size, **one} for text, size, one in records]
