"""The language model class of lm-eval for every method: the compressed cache is used in generation *and* in scoring.

Importing this module registers it with lm-eval as the model `pod`; `launch/run_eval.py lm-eval …` does so.
"""

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

import pod
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
from pod.eval.lm.caches import POD_BYTES, MethodCaches
from pod.eval.lm.generate import generate
from pod.eval.lm.index import Rule, own_rule
from pod.eval.lm.requests import Encoded, Encoder, Size, request_keys
from pod.eval.lm.scoring import score_by_decode
from pod.eval.results import identity, with_files
from pod.modeling.loading import with_plan

CacheFactory = Callable[[int, int], tuple[Any, int | None]]
"""(tokens at the end, tokens fed after the prompt) -> (a new cache, its budget in tokens or None)"""

_RANKS: list[Ranks] = []
_log = logging.getLogger(__name__)

_MARK = "pod-kv: made by"  # in the database of --use_cache


_Base: Any = HFLM  # lm-eval's decorator hides its type


class PodLM(_Base):
    """A PoD or dense model under a method, for lm-eval.

    `lm-eval --model pod --model_args pretrained=…,method=snapkv,budget=25%` uses the arguments of the constructor; in process a loaded
    model is handed over by `PodLM.around(model, tokenizer, make_cache, …)`.

    Every rank runs lm-eval's pipeline as if it were alone (rank 0 of 1); only the batches of requests are shared, so that results are
    the same on any number of ranks.

    Attributes:
        encoder: text to token ids.
        records: by request key: prompt_tokens, prompt_hash, dropped_tokens, skipped, budget_tokens, bytes (held at the end per
            sequence) and held_tokens (that the cache had seen then); None where one forward without a cache scores.
    """

    encoder: Encoder
    records: dict[str, dict[str, Any]]

    def __init__(
        self,
        pretrained: str,
        method: str | None = None,
        budget: int | str | None = None,
        plan: str | None = None,
        num_sink_tokens: int | None = None,
        num_recent_tokens: int | None = None,
        gguf_file: str | None = None,
        dtype: str | None = None,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        device: str | None = None,
        max_length: int | None = None,
        too_long: str = "truncate",
        question_aware: bool = False,
        attention_backend: str = "auto",
        **options: Any,
    ):
        """
        Args:
            pretrained: folder or hub id: a dense model or an export of this project.
            method: a spec of `pod.make_cache`, as `snapkv` or `pod+snapkv+int4`; default: the layout of the model itself.
            budget: tokens per KV head and layer, a share of the tokens as `25%`, or `pod`: as many as fill PoD's bytes.
            plan: plan.json for the method `pod` on dense weights and for `budget=pod`; an export has its own.
            num_sink_tokens, num_recent_tokens: PoD's windows (tokens).
            gguf_file: name of a GGUF file in `pretrained`; dtype: of the weights, default the checkpoint's.
            batch_size: sequences that run together (a number; `auto` is not supported).
            device: default a GPU where there is one.
            max_length: longest sequence (tokens), default what the model reads; too_long: truncate or error (skip: in recipes).
            question_aware: methods see the question when they compress a prompt (see eval.question_aware).
            options: parameters of the method (`run_eval.py --list-methods`).
        Raises: ValueError, before any computation, for whatever does not go together.
        """
        _check_batch_size(batch_size, max_batch_size)
        _check_too_long(too_long)
        ranks = Ranks()
        _RANKS.append(ranks)
        # for other methods the plan only says how many bytes PoD would hold
        parts = [part.strip() for part in (method or "pod").split("@")[0].split("+")]
        shares = plan is not None and ("pod" in parts or "pod-unadapted" in parts)
        model = pod.load_model(
            pretrained,
            plan=plan if shares else None,
            num_sink_tokens=num_sink_tokens,
            num_recent_tokens=num_recent_tokens,
            dtype=dtype,
            gguf_file=gguf_file,
            attention_backend=attention_backend,
            device=_device(device, ranks),
        )
        reference = _reference(model, plan, budget)
        caches = MethodCaches(model, method, budget, reference, options)
        tokenizer = pod.load_tokenizer(pretrained, gguf_file)
        length = int(max_length or model.config.max_position_embeddings)
        self._start(lambda: model, tokenizer, int(batch_size))
        self._connect(caches, caches.one_shot, Encoder(tokenizer, length, too_long, question_aware), ranks)
        self._awake()
        self.budget = caches.budget
        self.identity = {
            "pretrained": identity(pretrained),
            "method": caches.method.name,
            "budget": budget,
            "plan": None if plan is None else json.loads(Path(plan).read_text(encoding="utf-8")),
            "windows": [model.config.num_sink_tokens, model.config.num_recent_tokens],
            "model": [gguf_file, str(model.dtype), attention_backend],
            "limits": [length, too_long, question_aware],
            "options": with_files(options),
        }

    @classmethod
    def around(
        cls,
        load: Callable[[], Any],
        tokenizer: Any,
        make_cache: CacheFactory,
        *,
        budget: Callable[[int, int], int | None] = lambda length, fed: None,
        one_shot: bool = False,
        batch_size: int = 1,
        encoder: Encoder,
        ranks: Ranks | None = None,
    ) -> "PodLM":
        """A PodLM around a model that is loaded when something is not answered yet.

        make_cache: `(length, fed) -> (cache, budget)`; budget: what such a cache is made with, a part of what is asked.
        one_shot: score by one forward without a cache, only for methods whose decode path equals it
            (`pod.eval.answer.methods.Method.one_shot`).
        encoder: the one that rendered this run's chat templates; ranks: who shares the requests; None = this process alone.
        """
        self = cls.__new__(cls)
        self._start(load, tokenizer, batch_size)
        self._connect(make_cache, one_shot, encoder, ranks)
        self.budget, self.identity = budget, None
        return self

    def _start(self, load: Callable[[], Any], tokenizer: Any, batch_size: int) -> None:
        """What lm-eval asks for before a model is loaded."""
        self._load, self._is_awake = load, False
        self.tokenizer, self.batch_size_per_gpu = tokenizer, batch_size
        self._rank, self._world_size = 0, 1

    def _awake(self) -> None:
        """Load the model, if nobody did."""
        if self._is_awake:
            return
        length = self._max_length
        with _quiet("lm_eval.models.huggingface"):  # which warns that a loaded model is handed over
            _Base.__init__(
                self,
                pretrained=self._load(),
                tokenizer=self.tokenizer,
                backend="causal",
                batch_size=self.batch_size_per_gpu,
            )
        self._is_awake, self._max_length = True, length
        # HFLM takes the softmax in the model's dtype: bfloat16 rounds log-likelihoods to 3 digits
        self.softmax_dtype = torch.promote_types(self.model.dtype, torch.float32)

    def _connect(
        self, make_cache: CacheFactory, one_shot: bool, encoder: Encoder, ranks: Ranks | None
    ) -> None:
        self.make_cache, self.one_shot, self.encoder, self.ranks = make_cache, one_shot, encoder, ranks
        self._max_length = encoder.max_length
        self._rule: Rule | None = None
        self._shelf: Shelf | None = None
        self.records = {}

    @contextmanager
    def rules(self, rule: Rule, shelf: Shelf | None = None) -> Iterator[None]:
        """Requests within belong to one task: its truncation and chat rule, and the shelf that keeps its answers."""
        before = self._rule, self._shelf
        self._rule, self._shelf, self.records = rule, shelf, {}
        try:
            yield
        finally:
            self._rule, self._shelf = before

    def records_of(self, requests: Sequence[Any]) -> list[dict[str, Any]]:
        """The records of answered requests, in order."""
        return [self.records[key] for key in request_keys(requests)]

    # -- what lm-eval calls ------------------------------------------------------------------------------------

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        return self._score(self._encode(requests), whole_texts=False)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        return [total for total, _ in self._score(self._encode(requests), whole_texts=True)]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        encoded = self._encode(requests)
        items = [item for item in encoded if item.skipped is None]
        self._prepare(generation_size(item).length for item in items)
        found = self._ask(
            items,
            self._generation_key,
            lambda left: generation_batches(left, self.batch_size, self._room),
            self._generate,
        )
        self._keep_records(encoded)
        answers = dict.fromkeys((item.key for item in encoded), "")
        for item, record in zip(items, found, strict=True):
            self._note(item, generation_size(item), record)
            answers[item.key] = record["answer"]
        return list(answers.values())

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        return self.encoder.apply_chat_template(chat_history, add_generation_prompt)

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes into its results; asks no network."""
        self._awake()
        return {
            "model_num_parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "model_dtype": str(self.model.dtype),
            "model_revision": None,
            "model_sha": None,
            "pod": self.identity,
        }

    def set_cache_hook(self, cache_hook: Any) -> None:
        """Refuse a `--use_cache` of another method, budget or model: lm-eval's keys name the prompt only.

        Raises: ValueError.
        """
        if cache_hook.dbdict is not None:
            self._claim(cache_hook.dbdict)
        super().set_cache_hook(cache_hook)

    def _claim(self, database: Any) -> None:
        if self.identity is None or (self.ranks and self.ranks.world_size > 1):
            raise ValueError(
                "--use_cache is for one process with --model pod: here answers are kept by pod.eval.answer.store; leave it out"
            )
        mine = hashlib.sha256(json.dumps(self.identity, sort_keys=True, default=str).encode()).hexdigest()
        if len(database) and database.get(_MARK) != mine:
            raise ValueError(
                f"the answers in {database.filename} come from another method, budget or model: take another --use_cache path"
            )
        database[_MARK] = mine

    # -- answers ---------------------------------------------------------------------------------------------

    @property
    def _pad(self) -> int:
        return int(self.tokenizer.pad_token_id or 0)

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

    def _prepare(self, lengths: Iterator[int]) -> None:
        if isinstance(self.make_cache, MethodCaches):
            self.make_cache.prepare(sorted(set(lengths)))

    def _score(self, encoded: list[Encoded], whole_texts: bool) -> list[tuple[float, bool]]:
        """Sum in nats and whether it is greedy, per request; of a text in blocks the sums add up. Skipped: (-inf, False)."""
        totals = [(-float("inf"), False) if item.skipped else (0.0, True) for item in encoded]
        if self.one_shot:
            units, compute = forward_units(encoded), self._forward
        else:
            units, compute = units_of(encoded), self._decode
            self._prepare(unit.size.length for unit in units)

        def batches(left: list[Unit]) -> list[list[Unit]]:
            if self.one_shot:
                return forward_batches(left, self.batch_size, in_order=whole_texts)
            return unit_batches(left, self.batch_size, self._room)

        found = self._ask(units, self._unit_key, batches, compute)
        self._keep_records(encoded)
        for unit, record in zip(units, found, strict=True):
            for number, (total, greedy) in zip(unit.owners, record["answers"], strict=True):
                totals[number] = (totals[number][0] + total, totals[number][1] and greedy)
                self._note(encoded[number], unit.size, record)
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
        budget = self.budget(size.length, size.fed)
        return without_limit(budget, size.length)

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

    def _keep_records(self, encoded: list[Encoded]) -> None:
        for item in encoded:
            self.records[item.key] = {
                "prompt_tokens": item.prompt_tokens,
                "prompt_hash": item.prompt_hash,
                "dropped_tokens": item.dropped,
                "skipped": item.skipped,
                "budget_tokens": None,
                "bytes": None,
                "held_tokens": None,
            }

    def _note(self, item: Encoded, size: Size, answer: dict[str, Any]) -> None:
        """Add what an answer held to its request's record; of a text in blocks the largest counts."""
        record, found = self.records[item.key], dict(answer)
        if answer["bytes"] is not None:
            found["budget_tokens"] = self.budget(size.length, size.fed)
        for name in ("budget_tokens", "bytes", "held_tokens"):
            known = [value for value in (record[name], found.get(name)) if value is not None]
            record[name] = max(known, default=None)

    def _generate(self, items: list[Encoded]) -> list[dict[str, Any]]:
        self._awake()
        need = generation_size(items[0])
        cache, _ = self.make_cache(need.length, need.fed)
        found = generate(
            self.model,
            self.tokenizer,
            cache,
            items,
            items[0].new_tokens,
            items[0].settings,
            seed=" ".join(item.key for item in items),
        )
        held = {"bytes": found.held_bytes, "held_tokens": found.held_tokens}
        return [{"answer": text, **held} for text in found.texts]

    def _decode(self, units: list[Unit]) -> list[dict[str, Any]]:
        self._awake()
        cache, _ = self.make_cache(units[0].size.length, units[0].size.fed)
        found = score_by_decode(
            self.model,
            cache,
            [unit.context for unit in units],
            [unit.continuations for unit in units],
            self._pad,
            max(self.batch_size, 1),
        )
        held = {"bytes": found.held_bytes, "held_tokens": found.held_tokens}
        return [{"answers": [[s.logprob, s.is_greedy] for s in scores], **held} for scores in found.scores]

    def _forward(self, units: list[Unit]) -> list[dict[str, Any]]:
        """HFLM's own scoring of one of its batches."""
        self._awake()
        requests = [(None, list(unit.context), list(unit.continuations[0])) for unit in units]
        answers = HFLM._loglikelihood_tokens(self, requests, disable_tqdm=True)  # type: ignore[arg-type]
        return [{"answers": [list(answer)], "bytes": None, "held_tokens": None} for answer in answers]


register_model("pod")(PodLM)


def close_ranks() -> None:
    """Leave the process group that a `PodLM(pretrained=…)` of this process has joined."""
    while _RANKS:
        _RANKS.pop().close()


def _device(asked: str | None, ranks: Ranks) -> str:
    """lm-eval's command line asks for cuda:0 by itself: that means a GPU where there is one, and each rank its own."""
    if asked is not None and not asked.startswith("cuda"):
        return asked
    if not torch.cuda.is_available():
        return "cpu"
    return f"cuda:{ranks.local_rank}" if ranks.world_size > 1 else asked or "cuda"


def _check_batch_size(batch_size: int | str, max_batch_size: int | None) -> None:
    if not str(batch_size).isdecimal() or int(batch_size) < 1 or max_batch_size is not None:
        raise ValueError(
            f"batch_size = {batch_size!r}: a number of sequences is needed (auto and max_batch_size are not supported: what runs "
            "together would depend on the machine)"
        )


def _check_too_long(too_long: str) -> None:
    if too_long == "skip":
        raise ValueError(
            "too_long=skip: lm-eval's command line would score the prompts that are left out as wrong; take truncate or error, or run the "
            "tasks by a recipe, which counts them apart (eval.too_long)"
        )


def _reference(model: Any, plan: str | None, budget: int | str | None) -> Any:
    """A model that tells PoD's bytes: the model itself when it has a plan, else the same weights under `plan`."""
    if budget != POD_BYTES:
        return None
    if model.config.own_method == "pod":
        return model
    if plan is None:
        raise ValueError("budget=pod needs plan=PLAN.json: it says which bytes PoD would hold")
    return with_plan(model, pod.SharingPlan.load(plan)).to(model.device)


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
