"""The language model class of lm-eval for every method: the compressed cache is used in generation *and* in scoring."""

import functools
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lm_eval.api.model import LM, TemplateLM
from lm_eval.models.huggingface import HFLM

from pod.eval.answer.budget import without_limit
from pod.eval.answer.ranks import Ranks
from pod.eval.answer.store import Shelf, key_of
from pod.eval.lm.batches import (
    Unit,
    forward_batches,
    forward_units,
    generation_batches,
    generation_size,
    unit_batches,
    units_of,
)
from pod.eval.lm.generate import generate
from pod.eval.lm.index import Rule, own_rule, quiet_logger
from pod.eval.lm.requests import Encoded, Encoder, Size, request_keys
from pod.eval.lm.scoring import score_by_decode

_log = logging.getLogger(__name__)
_Stock: Any = HFLM  # lm-eval's decorator hides its type


class PodLM(LM):
    """A model under a method, for lm-eval. It is loaded when something is not answered yet.

    Every rank runs lm-eval's pipeline as if it were alone (rank 0 of 1); only the batches of requests are shared, so that results are
    the same on any number of ranks.

    Args:
        load: gives the model.
        make_cache: `(length, fed) -> (a new cache, its budget)`, both in tokens: those at the end, and of them those fed after the
            prompt; budget: what such a cache is made with, a part of what is asked; prepare: told all lengths before.
        encoder: text to token ids; the one that rendered this run's chat templates.
        one_shot: score by one forward without a cache, only for methods whose decode path equals it
            (`pod.eval.answer.methods.Method.one_shot`).
        batch_size: sequences that run together; ranks: who shares the requests; None = this process alone.

    Attributes:
        records: by request key: prompt_tokens, prompt_hash, dropped_tokens, skipped, budget_tokens, bytes (held at the end per
            sequence) and held_tokens (that the cache had seen then); None where one forward without a cache scores.
    """

    def __init__(
        self,
        load: Callable[[], Any],
        make_cache: Callable[[int, int], tuple[Any, int | None]],
        encoder: Encoder,
        *,
        budget: Callable[[int, int], int | None] = lambda length, fed: None,
        prepare: Callable[[Iterable[int]], None] = lambda lengths: None,
        one_shot: bool = False,
        batch_size: int = 1,
        ranks: Ranks | None = None,
    ):
        super().__init__()
        self._load, self.make_cache, self.encoder = load, make_cache, encoder
        self.budget, self.prepare, self.one_shot = budget, prepare, one_shot
        self.batch_size, self.ranks, self.tokenizer = batch_size, ranks, encoder.tokenizer
        self._rule: Rule | None = None
        self._shelf: Shelf | None = None
        self.records: dict[str, dict[str, Any]] = {}

    @functools.cached_property
    def model(self) -> Any:
        """The model itself."""
        return self._load()

    @functools.cached_property
    def _stock(self) -> Any:
        """lm-eval's own class around the model."""
        with quiet_logger("lm_eval.models.huggingface"):  # which warns that a loaded model is handed over
            stock: Any = _Stock(self.model, "causal", tokenizer=self.tokenizer, batch_size=self.batch_size)
        stock._max_length = self.encoder.max_length
        # HFLM takes the softmax in the model's dtype: bfloat16 rounds log-likelihoods to 3 digits
        stock.softmax_dtype = torch.promote_types(self.model.dtype, torch.float32)
        return stock

    @contextmanager
    def rules(self, rule: Rule, shelf: Shelf | None = None) -> Iterator[None]:
        """Requests within belong to one task: its truncation and chat rule, and the shelf that keeps its answers."""
        before = self._rule, self._shelf
        self._rule, self._shelf, self.records = rule, shelf, {}
        try:
            yield
        finally:
            self._rule, self._shelf = before

    # -- what lm-eval calls ------------------------------------------------------------------------------------

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        return self._score(self._encode(requests), whole_texts=False)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        return [total for total, _ in self._score(self._encode(requests), whole_texts=True)]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        encoded = self._encode(requests)
        items = [item for item in encoded if item.skipped is None]
        self.prepare({generation_size(item).length for item in items})
        found = self._ask(
            items,
            self._generation_key,
            lambda left: generation_batches(left, self.batch_size, self._room),
            self._generate,
        )
        said = {item.key: record for item, record in zip(items, found, strict=True)}
        for item in encoded:
            self._keep(item, [(generation_size(item), said[item.key])] if item.key in said else [])
        return [said[item.key]["answer"] if item.key in said else "" for item in encoded]

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        return self.encoder.apply_chat_template(chat_history, add_generation_prompt)

    chat_template = TemplateLM.chat_template

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.name_or_path.replace("/", "__")

    def set_cache_hook(self, cache_hook: Any) -> None:
        """Raises: ValueError for a `--use_cache`, whose keys name the prompt only."""
        if cache_hook.dbdict is not None:
            raise ValueError(
                "--use_cache is for one process with --model pod: here answers are kept by pod.eval.answer.store; leave it out"
            )
        super().set_cache_hook(cache_hook)

    # -- answers ---------------------------------------------------------------------------------------------

    def _encode(self, requests: Sequence[Any]) -> list[Encoded]:
        """The requests as token ids, by the rule of their task: the one that is set, else the one in its YAML."""
        keys = request_keys(requests)
        encoded = [
            self.encoder.request(request, self._rule or own_rule(str(request.task_name)), key)
            for request, key in zip(requests, keys, strict=True)
        ]
        skipped = Counter(item.skipped for item in encoded if item.skipped)
        for reason, number in skipped.items():
            _log.warning("%d of %d requests skipped: %s", number, len(encoded), reason)
        return encoded

    def _score(self, encoded: list[Encoded], whole_texts: bool) -> list[tuple[float, bool]]:
        """Sum in nats and whether it is greedy, per request; of a text in blocks the sums add up. Skipped: (-inf, False)."""
        totals = [(-float("inf"), False) if item.skipped else (0.0, True) for item in encoded]
        if self.one_shot:
            units, compute = forward_units(encoded), self._forward
        else:
            units, compute = units_of(encoded), self._decode
            self.prepare({unit.size.length for unit in units})

        def batches(left: list[Unit]) -> list[list[Unit]]:
            if self.one_shot:
                return forward_batches(left, self.batch_size, in_order=whole_texts)
            return unit_batches(left, self.batch_size, self._room)

        found = self._ask(units, self._unit_key, batches, compute)
        held: list[list[tuple[Size, dict[str, Any]]]] = [[] for _ in encoded]
        for unit, record in zip(units, found, strict=True):
            for number, (total, greedy) in zip(unit.owners, record["answers"], strict=True):
                totals[number] = (totals[number][0] + total, totals[number][1] and greedy)
                held[number].append((unit.size, record))
        for item, answers in zip(encoded, held, strict=True):
            self._keep(item, answers)
        return totals

    def _generation_key(self, item: Encoded) -> str:
        sampled = item.key if item.settings.get("do_sample") else None  # its repeats are to differ
        need = generation_size(item)
        asked = [item.context, item.num_asked, item.new_tokens, item.settings, sampled]
        return key_of("generate", *asked, self._room(need))

    def _unit_key(self, unit: Unit) -> str:
        if self.one_shot:
            return key_of("forward", unit.context, unit.continuations)
        return key_of("decode", unit.context, unit.continuations, self._room(unit.size))

    def _room(self, size: Size) -> int | None:
        """What decides a cache of a size: its budget, and whether that is without limit at its length."""
        return without_limit(self.budget(size.length, size.fed), size.length)

    def _ask(
        self,
        items: list[Any],
        key: Callable[[Any], str],
        batches: Callable[[list[Any]], list[list[Any]]],
        compute: Callable[[list[Any]], list[dict[str, Any]]],
    ) -> list[dict[str, Any]]:
        """A record per item, shared over ranks; those that are on the task's shelf are not computed."""
        if self._shelf is not None:
            return self._shelf.answers(items, key, batches, compute)
        places = {id(item): place for place, item in enumerate(items)}
        planned = batches(items)
        mine = self.ranks.share(planned) if self.ranks else planned
        done = [
            (places[id(item)], record)
            for batch in mine
            for item, record in zip(batch, compute(batch), strict=True)
        ]
        parts = self.ranks.gather(done) if self.ranks else [done]
        return [record for _, record in sorted((pair for part in parts for pair in part), key=lambda p: p[0])]

    def _keep(self, item: Encoded, answers: list[tuple[Size, dict[str, Any]]]) -> None:
        """The record of a request; of what its caches held, one for each part of a text in blocks, the largest counts."""
        held: list[dict[str, Any]] = [
            a | {"budget_tokens": self.budget(size.length, size.fed)}
            for size, a in answers
            if a["bytes"] is not None
        ]
        largest = {
            name: max((a[name] for a in held if a[name] is not None), default=None)
            for name in ("budget_tokens", "bytes", "held_tokens")
        }
        self.records[item.key] = {
            "prompt_tokens": item.prompt_tokens,
            "prompt_hash": item.prompt_hash,
            "dropped_tokens": item.dropped,
            "skipped": item.skipped,
            **largest,
        }

    def _generate(self, items: list[Encoded]) -> list[dict[str, Any]]:
        need = generation_size(items[0])
        cache, _ = self.make_cache(need.length, need.fed)
        return generate(self.model, self.tokenizer, cache, items)

    def _decode(self, units: list[Unit]) -> list[dict[str, Any]]:
        cache, _ = self.make_cache(units[0].size.length, units[0].size.fed)
        return score_by_decode(
            self.model, cache, units, int(self.tokenizer.pad_token_id or 0), self.batch_size
        )

    def _forward(self, units: list[Unit]) -> list[dict[str, Any]]:
        """HFLM's own scoring of one of its batches."""
        requests = [(None, list(unit.context), list(unit.continuations[0])) for unit in units]
        answers = self._stock._loglikelihood_tokens(requests, disable_tqdm=True)  # type: ignore[arg-type]
        return [{"answers": [list(answer)], "bytes": None, "held_tokens": None} for answer in answers]
