"""The language model class that lm-eval calls, for every method.

The compressed cache is used in generation *and* in scoring.
"""

import functools
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lm_eval.api.model import LM, TemplateLM
from lm_eval.models.huggingface import HFLM

from pod.eval.answer.answer_cache import AnswerCache, AnswerFolder, key_of
from pod.eval.answer.budget import CacheSpan, MethodRunner
from pod.eval.answer.generate import generate
from pod.eval.answer.ranks import Ranks
from pod.eval.answer.score import score
from pod.eval.lm.batches import ScoredContext, forward_batches, generation_batches, unit_batches, units_of
from pod.eval.lm.index import Rule, quiet_logger
from pod.eval.lm.payload import largest
from pod.eval.lm.requests import Encoded, RequestEncoder
from pod.eval.results import fingerprint
from pod.tokenizer import pad_id, template_variables

_log = logging.getLogger(__name__)
_Stock: Any = HFLM  # lm-eval's decorator hides its type


class PodLM(LM):
    """A model under a method, for lm-eval. The model is loaded when the first missing answer is computed.

    Every rank runs lm-eval's pipeline as if it were alone (rank 0 of 1). Only the batches of requests are
    divided among the ranks, so that results are the same on any number of ranks.

    Args:
        runner: the method. Where one forward pass without a cache equals its decode path
            (`EvaluatedMethod.one_shot`), that pass scores.
        encoder: turns text into token ids; it must be the one that rendered this run's chat templates.
        batch_size: sequences that run together.
        answer_cache: keeps the answers; default: this process's memory.

    Attributes:
        records: by request key: prompt_tokens, prompt_hash, dropped_tokens, skipped, budget_tokens, bytes
            (held at the end per sequence) and held_tokens (that the cache had seen then). The last three are
            None where one forward pass without a cache scores.
    """

    def __init__(
        self,
        runner: MethodRunner,
        encoder: RequestEncoder,
        batch_size: int = 1,
        answer_cache: AnswerCache | None = None,
    ):
        super().__init__()
        self.runner, self.encoder, self.tokenizer = runner, encoder, encoder.tokenizer
        self.batch_size = batch_size
        self._answer_cache = answer_cache or AnswerFolder(None, Ranks()).answers_of(runner.method.name, {})
        self._rule: Rule | None = None
        self.records: dict[str, dict[str, Any]] = {}

    @property
    def model(self) -> Any:
        """The torch model, which is loaded when it is first needed."""
        return self.runner.model

    @property
    def one_shot(self) -> bool:
        """Whether one forward pass without a cache scores."""
        return self.runner.method.one_shot

    @functools.cached_property
    def _stock(self) -> Any:
        """lm-eval's own class around the model."""
        with quiet_logger("lm_eval.models.huggingface"):  # it warns that a loaded model is handed over
            stock: Any = _Stock(self.model, "causal", tokenizer=self.tokenizer, batch_size=self.batch_size)
        stock._max_length = self.encoder.max_length
        # HFLM takes the softmax in the model's dtype: bfloat16 rounds log-likelihoods to 3 digits
        stock.softmax_dtype = torch.promote_types(self.model.dtype, torch.float32)
        return stock

    @contextmanager
    def rules(self, rule: Rule) -> Iterator[None]:
        """Inside the block all requests belong to one task, whose prompts are treated by `rule`."""
        before, self._rule, self.records = self._rule, rule, {}
        try:
            yield
        finally:
            self._rule = before

    # -- what lm-eval calls ----------------------------------------------------------------------------------

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        return self._score(self._encode(requests), whole_texts=False)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        return [total for total, _ in self._score(self._encode(requests), whole_texts=True)]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        encoded = self._encode(requests)
        items = [item for item in encoded if item.skipped is None]
        self.runner.budgets.prepare({item.span.length for item in items})
        found = self._answer_cache.answers(
            items,
            self._generation_key,
            lambda left: generation_batches(left, self.batch_size),
            self._generate,
        )
        said = {item.key: record for item, record in zip(items, found, strict=True)}
        for item in encoded:
            self._keep(item, [(item.span, said[item.key])] if item.key in said else [])
        return [said[item.key]["answer"] if item.key in said else "" for item in encoded]

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        return self.encoder.apply_chat_template(chat_history, add_generation_prompt)

    chat_template = TemplateLM.chat_template

    @property
    def tokenizer_name(self) -> str:
        """The name under which lm-eval's `--cache_requests` keeps finished prompts.

        Other template variables make other prompts, and so another name.
        """
        name = self.tokenizer.name_or_path.replace("/", "__")
        variables = template_variables(self.tokenizer)
        return f"{name}.{fingerprint(variables)[:12]}" if variables else name

    def set_cache_hook(self, cache_hook: Any) -> None:
        """Refuse lm-eval's own cache of answers.

        Raises:
            ValueError: when lm-eval was given `--use_cache`, because the keys of that cache name the prompt
                only.
        """
        if cache_hook.dbdict is not None:
            raise ValueError(
                "--use_cache does not tell methods and budgets apart: "
                "use the model argument store=FOLDER instead"
            )
        super().set_cache_hook(cache_hook)

    # -- answers ---------------------------------------------------------------------------------------------

    def _encode(self, requests: Sequence[Any]) -> list[Encoded]:
        """The requests as token ids.

        Prompts are treated by the rule that `rules` set, else by the one in the task's configuration.
        """
        encoded = self.encoder.requests(requests, self._rule)
        skipped = Counter(item.skipped for item in encoded if item.skipped)
        for reason, number in skipped.items():
            _log.warning("%d of %d requests skipped: %s", number, len(encoded), reason)
        return encoded

    def _score(self, encoded: list[Encoded], whole_texts: bool) -> list[tuple[float, bool]]:
        """For each request its log-likelihood (nats), and whether greedy decoding would produce it.

        A text that is scored in blocks has the sum over its blocks. A skipped request has (-inf, False).
        """
        totals = [(-float("inf"), False) if item.skipped else (0.0, True) for item in encoded]
        batches: Callable[[list[ScoredContext]], list[list[ScoredContext]]]
        units = units_of(encoded, self.one_shot)
        if self.one_shot:
            compute = self._forward
            batches = functools.partial(forward_batches, batch_size=self.batch_size, in_order=whole_texts)
        else:
            compute = self._decode
            batches = functools.partial(unit_batches, batch_size=self.batch_size)
            self.runner.budgets.prepare({unit.span.length for unit in units})
        found = self._answer_cache.answers(units, self._unit_key, batches, compute)
        held: list[list[tuple[CacheSpan, dict[str, Any]]]] = [[] for _ in encoded]
        for unit, record in zip(units, found, strict=True):
            for number, (total, greedy) in zip(unit.owners, record["answers"], strict=True):
                totals[number] = (totals[number][0] + total, totals[number][1] and greedy)
                held[number].append((unit.span, record))
        for item, answers in zip(encoded, held, strict=True):
            self._keep(item, answers)
        return totals

    def _generation_key(self, item: Encoded) -> str:
        sampled = item.key if item.settings.get("do_sample") else None  # repeats of a sampled answer differ
        asked = [item.context, item.num_asked, item.new_tokens, item.settings, sampled]
        return key_of("generate", *asked, self.runner.cache_budget(item.span))

    def _unit_key(self, unit: ScoredContext) -> str:
        if self.one_shot:
            return key_of("forward", unit.context, unit.continuations)
        return key_of("decode", unit.context, unit.continuations, self.runner.cache_budget(unit.span))

    def _keep(self, item: Encoded, answers: list[tuple[CacheSpan, dict[str, Any]]]) -> None:
        """Keep the record of a request in `records`.

        A text that is scored in blocks has a cache of another size for each block; the largest counts.
        """
        held: list[dict[str, Any]] = [
            a | {"budget_tokens": self.runner.budget(span)} for span, a in answers if a["bytes"] is not None
        ]
        self.records[item.key] = {
            "prompt_tokens": item.prompt_tokens,
            "prompt_hash": item.prompt_hash,
            "dropped_tokens": item.dropped,
            "skipped": item.skipped,
            **largest(held, "budget_tokens", "bytes", "held_tokens"),
        }

    def _generate(self, items: list[Encoded]) -> list[dict[str, Any]]:
        """Answers of a batch. All its requests have the same number of new tokens and the same settings."""
        cache = self.runner.cache(*(item.span for item in items))
        first = items[0]
        return generate(
            self.model,
            self.tokenizer,
            cache,
            items,
            first.new_tokens,
            first.settings["until"],
            seed=" ".join(item.key for item in items),
            **_options(first.settings),
        )

    def _decode(self, units: list[ScoredContext]) -> list[dict[str, Any]]:
        """Log-likelihoods of the continuations of a batch, and whether greedy decoding would produce them."""
        cache = self.runner.cache(*(unit.span for unit in units))
        contexts = [unit.context for unit in units]
        continuations = [unit.continuations for unit in units]
        pad = pad_id(self.tokenizer)
        records = []
        for unit, found in zip(
            units, score(self.model, cache, contexts, continuations, pad, self.batch_size), strict=True
        ):
            answers = [
                (float(one.logprobs.sum()), one.likeliest.tolist() == list(ids))
                for one, ids in zip(found.continuations, unit.continuations, strict=True)
            ]
            records.append({"answers": answers, **found.held, **found.decided})
        return records

    def _forward(self, units: list[ScoredContext]) -> list[dict[str, Any]]:
        """HFLM's own scoring of one of its batches."""
        requests = [(None, list(unit.context), list(unit.continuations[0])) for unit in units]
        answers = self._stock._loglikelihood_tokens(requests, disable_tqdm=True)  # type: ignore[arg-type]
        return [{"answers": [list(answer)], "bytes": None, "held_tokens": None} for answer in answers]


def _options(settings: dict[str, Any]) -> dict[str, Any]:
    """Arguments of generate() in the settings of a request; greedy unless sampling is asked for."""
    of_sampling = () if settings["do_sample"] else ("temperature", "top_p", "top_k")
    left_out = ("until", "max_length", *of_sampling)
    return {name: value for name, value in settings.items() if name not in left_out}
