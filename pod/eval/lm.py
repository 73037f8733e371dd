"""The language model class of lm-eval for every method: the compressed cache is used in generation *and* in scoring.

`PodLM` is registered with lm-eval as the model `pod`; importing this module is what registers it (`launch/run_eval.py lm-eval …` does).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

from pod.eval.journal import Journal
from pod.eval.lm_requests import Encoded, Encoder, Rule, hash_of, request_keys, size_of
from pod.eval.lm_scoring import score_by_decode

CacheFactory = Callable[[int, int], tuple[Any, int | None]]
"""(tokens at the end, tokens fed after the prompt) -> (a new cache, its budget in tokens or None)"""


@register_model("pod")
class PodLM(HFLM):
    """A PoD or dense model under a method, for lm-eval.

    In process: `PodLM.around(model, tokenizer, make_cache, …)`.

    Attributes:
        records: by request key: prompt_tokens, prompt_hash, dropped_tokens, budget_tokens, bytes, skipped.
    """

    encoder: Encoder
    records: dict[str, dict[str, Any]]

    @classmethod
    def around(
        cls,
        model: Any,
        tokenizer: Any,
        make_cache: CacheFactory,
        *,
        one_shot: bool = False,
        batch_size: int = 1,
        max_length: int | None = None,
        too_long: str = "truncate",
        encoder: Encoder | None = None,
    ) -> "PodLM":
        """A PodLM around a loaded model.

        make_cache: `(length, fed) -> (cache, budget)`; one_shot: score by one forward (`pod.eval.methods.Method.one_shot`);
        encoder: one that has rendered this run's chat templates; None makes one from max_length (None = the model's) and too_long.
        """
        self = cls.__new__(cls)
        HFLM.__init__(self, pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=batch_size)
        self._connect(
            make_cache, one_shot, encoder or Encoder(tokenizer, max_length or self.max_length, too_long)
        )
        return self

    def _connect(self, make_cache: CacheFactory, one_shot: bool, encoder: Encoder) -> None:
        self.make_cache, self.one_shot, self.encoder = make_cache, one_shot, encoder
        self._max_length = encoder.max_length
        self.softmax_dtype = torch.promote_types(self.model.dtype, torch.float32)
        self._rule, self._journal, self.records = Rule(), None, {}

    @contextmanager
    def rules(self, rule: Rule, journal: Journal | None = None) -> Iterator[None]:
        """Requests within belong to one task: its truncation and chat rule, and the journal that keeps its answers."""
        before = self._rule, self._journal
        self._rule, self._journal, self.records = rule, journal, {}
        try:
            yield
        finally:
            self._rule, self._journal = before

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        return self.encoder.apply_chat_template(chat_history, add_generation_prompt)

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        encoded = self.encoder.requests(requests, self._rule)
        answers = []
        for item in encoded:
            size = size_of(item)
            cache, budget = self.make_cache(size.length, size.fed)
            scores, held = score_by_decode(
                self.model, cache, [item.context], [[item.continuation]], self._pad, 1
            )
            self._record(item, budget, held)
            answers.append((scores[0][0].logprob, scores[0][0].is_greedy))
        return answers

    @property
    def _pad(self) -> int:
        return int(self.tokenizer.pad_token_id or 0)

    def _record(self, item: Encoded, budget: int | None, held: int) -> None:
        self.records[item.key] = {
            "prompt_tokens": len(item.context),
            "prompt_hash": hash_of(item),
            "dropped_tokens": item.dropped,
            "budget_tokens": budget,
            "bytes": held,
            "skipped": item.skipped,
        }

    def records_of(self, requests: Sequence[Any]) -> list[dict[str, Any]]:
        """The records of requests, in order."""
        return [self.records[key] for key in request_keys(requests)]
