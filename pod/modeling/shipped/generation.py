"""`generate()` with our caches: supplies the default cache and refuses every use that would go wrong silently."""

import inspect
from functools import cache
from typing import Any

import transformers
from torch import Tensor
from transformers import GenerationMixin

from .cache import PodCache
from .config import PodConfig

SUPPORTED = ">=5.17,<6"
"""Versions of transformers."""
_HOOKS = {
    "_prefill": ["input_ids", "generation_config", "model_kwargs"],
    "_prepare_cache_for_generation": ["generation_config", "model_kwargs"],
    "_get_candidate_generator": [],
}


class PodGenerationMixin(GenerationMixin):
    """Stock generation (greedy, sampling, beams, left padding, chunked prefill) over a ``PodCache``."""

    config: PodConfig

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """See transformers; ``ImportError`` when the installed version does not call what is supplied here."""
        check_hooks()
        return super().generate(*args, **kwargs)  # type: ignore[misc]

    def generate_batch(self, *args: Any, **kwargs: Any):
        raise ValueError(
            "generate_batch (continuous batching) is not supported: it ignores the cache; use generate()"
        )

    def _get_candidate_generator(self, *args: Any, **kwargs: Any):
        raise ValueError(
            "assisted decoding is not supported: a window that moved on cannot be rolled back; leave it out"
        )

    def _prepare_cache_for_generation(
        self, generation_config, model_kwargs: dict, *args: Any, **kwargs: Any
    ) -> None:
        if generation_config.cache_implementation is not None:
            raise ValueError(
                f"cache_implementation={generation_config.cache_implementation!r} is not supported: pass "
                "past_key_values=pod.make_cache(model, …), or nothing for the model's own layout"
            )
        cache = model_kwargs.get("past_key_values")
        if cache is None:
            if generation_config.use_cache is not False:
                cache = model_kwargs["past_key_values"] = PodCache(self.config)
                cache.made_by_generate = True
        elif not hasattr(cache, "begin_step"):
            raise ValueError(
                f"a {type(cache).__name__} cannot serve a PoD model: make one with pod.make_cache(model, …)"
            )
        else:
            cache._is_user_defined = True

    def _prefill(self, input_ids: Tensor, generation_config, model_kwargs: dict, *args: Any, **kwargs: Any):
        cache, mask = model_kwargs.get("past_key_values"), model_kwargs.get("attention_mask")
        if cache is not None:
            embeds = model_kwargs.get("inputs_embeds")
            given = (input_ids if embeds is None else embeds).shape[1]
            # stock generate() drops a mask of ones and remembers its width
            columns = getattr(generation_config, "_mask_length", given) if mask is None else mask.shape[1]
            if cache.get_seq_length():
                cache.check_continues(input_ids, columns, embeds is not None)
            cache.begin_prompt(columns - cache.get_seq_length())
            has_beams = (
                generation_config.num_beams or 1
            ) > 1  # rows move at every step: nothing for an engine
            if cache.made_by_generate and not has_beams and PodCache.attach_engine is not None:
                PodCache.attach_engine(cache, columns, max(columns + 1, generation_config.max_length or 0))
        return super()._prefill(input_ids, generation_config, model_kwargs, *args, **kwargs)  # type: ignore[misc]


@cache
def check_hooks() -> None:
    """Raise ``ImportError`` unless transformers has the private methods that this class replaces, with their arguments.

    One of another name would never be called: methods that announce their prompt would then select other tokens.
    """
    for name, expected in _HOOKS.items():
        hook = getattr(GenerationMixin, name, None)
        found = [] if hook is None else list(inspect.signature(hook).parameters)[1 : 1 + len(expected)]
        if hook is None or found != expected:
            raise ImportError(
                f"generate() replaces GenerationMixin.{name}({', '.join(['self', *expected, '…'])}), which transformers "
                f"{transformers.__version__} does not have: install transformers{SUPPORTED}"
            )
