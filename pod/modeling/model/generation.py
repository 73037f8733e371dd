"""`generate()` of transformers over a ``PodCache``.

This file makes the default cache, and refuses every use that would give wrong results without an error.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import transformers
from torch import Tensor
from transformers import GenerationMixin
from transformers.generation.candidate_generator import CandidateGenerator
from transformers.generation.configuration_utils import GenerationMode

from .cache import PodCache
from .config import PodConfig
from .group_quantizer import make_quantizer
from .kv_quantizer import NATIVE, KVQuantizer
from .layout import LAYOUT_LAYERS
from .packed_bytes import GROUP_SIZE
from .rows import GroupedCache

# options of the cache that generate() makes for assisted decoding, where 20 candidates are usual
_ASSISTED: dict[str, Any] = {"extra_slots": 32}

SUPPORTED = ">=5.17,<6"
"""The supported versions of transformers."""
# private methods of GenerationMixin that are replaced here, with the first arguments that each must have
_HOOKS = {
    "_prefill": ["input_ids", "generation_config", "model_kwargs"],
    "_prepare_cache_for_generation": ["generation_config", "model_kwargs", "generation_mode"],
    "_get_candidate_generator": ["generation_config", "input_ids"],
}


class PodGenerationMixin(GenerationMixin):
    """Stock generation (greedy, sampling, beams, left padding, chunked prefill) over a ``PodCache``."""

    config: PodConfig

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """See transformers. A cache that is given is used, whatever ``use_cache`` of a configuration says.

        Raises:
            ImportError: the installed version of transformers lacks private methods that are replaced here.
            ValueError: ``use_cache=False`` came with a cache, the inputs do not continue the cache, or an
                option of transformers is not supported.
        """
        check_hooks()
        if kwargs.get("past_key_values") is not None:
            if kwargs.get("use_cache") is False:
                raise ValueError(
                    "generate() got past_key_values and use_cache=False: "
                    "leave one of both out (a cache in hand is used)"
                )
            kwargs["use_cache"] = True
        return super().generate(*args, **kwargs)  # type: ignore[misc]

    def generate_batch(self, *args: Any, **kwargs: Any):
        """Not supported: it always raises ``ValueError``."""
        raise ValueError("continuous batching (generate_batch) is not supported: use generate()")

    def _get_candidate_generator(
        self, generation_config, input_ids: Tensor, model_kwargs: dict, *args: Any, **kwargs: Any
    ) -> CandidateGenerator:
        cache = model_kwargs["past_key_values"]
        cache.check_assisted(generation_config.max_length)
        columns = self._begin_prompt(input_ids, generation_config, model_kwargs)
        if columns != input_ids.shape[1]:
            raise ValueError(
                "assisted decoding over a filled cache takes the whole conversation: "
                f"pass all {columns} columns as input_ids"
            )
        own = {"generation_config": generation_config, "input_ids": input_ids, "model_kwargs": model_kwargs}
        generator = super()._get_candidate_generator(*args, **own, **kwargs)  # type: ignore[misc]
        if generator.requires_model_outputs:
            raise ValueError(
                f"a {type(generator).__name__} is not supported: it reads hidden states; "
                "use an assistant_model or prompt_lookup_num_tokens"
            )
        model_kwargs["feeds_all"] = True
        generator.get_candidates = partial(bounded_candidates, cache, generator.get_candidates)
        return generator

    def _prepare_cache_for_generation(
        self, generation_config, model_kwargs: dict, generation_mode: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        if (asked := generation_config.cache_implementation) is not None:
            raise ValueError(f"cache_implementation={asked!r} is not supported: a model makes its own cache")
        cache = model_kwargs.get("past_key_values")
        mask = model_kwargs.get("attention_mask")
        if mask is not None and not mask[:, -1].all():
            raise ValueError(
                "attention_mask ends with padding, behind which generate() would go on: "
                "tokenize with padding_side='left'"
            )
        pad = generation_config.pad_token_id
        if pad is not None and pad >= self.config.vocab_size:
            model_kwargs["pads_beyond"] = True
        if cache is not None:
            check_cache(cache)
            cache._is_user_defined = True
        elif generation_config.use_cache is not False:
            assisted = generation_config.is_assistant or generation_mode == GenerationMode.ASSISTED_GENERATION
            extra = _ASSISTED if assisted and self.config.layout == "pod" else {}
            cache = own_cache(self.config, **extra)
            cache.made_by_generate = True
            model_kwargs["past_key_values"] = cache

    def _begin_prompt(self, input_ids: Tensor, generation_config, model_kwargs: dict) -> int:
        """Check that the inputs continue the cache, and announce the prompt to it.

        Returns:
            The number of columns of the whole conversation, those in the cache included.
        """
        cache = model_kwargs["past_key_values"]
        mask = model_kwargs.get("attention_mask")
        embeds = model_kwargs.get("inputs_embeds")
        given = (input_ids if embeds is None else embeds).shape[1]
        # stock generate() drops a mask of ones and remembers its width
        columns = getattr(generation_config, "_mask_length", given) if mask is None else mask.shape[1]
        if cache.get_seq_length():
            cache.check_continues(input_ids, columns, embeds is not None)
        cache.begin_prompt(columns - cache.get_seq_length())
        return columns

    def _prefill(self, input_ids: Tensor, generation_config, model_kwargs: dict, *args: Any, **kwargs: Any):
        cache = model_kwargs.get("past_key_values")
        if cache is not None:
            columns = self._begin_prompt(input_ids, generation_config, model_kwargs)
            has_beams = (generation_config.num_beams or 1) > 1  # the rows of beams move at every step
            if cache.made_by_generate and not has_beams and PodCache.attach_engine is not None:
                PodCache.attach_engine(cache, columns, max(columns + 1, generation_config.max_length or 0))
        prefill = super()._prefill  # type: ignore[misc]
        return prefill(input_ids, generation_config, model_kwargs, *args, **kwargs)


def check_cache(cache: Any) -> None:
    """Raise ``ValueError`` for a cache that is no ``PodCache``."""
    if not hasattr(cache, "begin_step"):
        kind = type(cache).__name__
        raise ValueError(f"a {kind} cannot serve a PoD model: pass none, or one of pod-kv's make_cache")


@cache
def check_hooks() -> None:
    """Check that transformers has the private methods that ``PodGenerationMixin`` replaces.

    If transformers renamed one, ours would never be called. The cache would then not learn where a prompt
    ends, and compression methods would choose other tokens.

    Raises:
        ImportError: one of them is missing, or has other arguments.
    """
    for name, expected in _HOOKS.items():
        hook = getattr(GenerationMixin, name, None)
        found = [] if hook is None else list(inspect.signature(hook).parameters)[1 : 1 + len(expected)]
        if hook is None or found != expected:
            raise ImportError(
                f"generate() replaces GenerationMixin.{name}({', '.join(['self', *expected, '…'])}), "
                f"which transformers {transformers.__version__} does not have: "
                f"install transformers{SUPPORTED}"
            )


def bounded_candidates(
    cache: PodCache, get_candidates: Callable, input_ids: Tensor, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """A candidate generator's tokens, but no more than the cache can take back without a trace.

    While the prompt is not in the cache there are none, because a method must see where a prompt ends.

    Args:
        cache: the cache of the model that checks the candidates.
        get_candidates: the method of transformers' generator.
        input_ids: ``[1, n]``, the prompt and the tokens generated so far.

    Returns:
        The ids with the candidates behind them, ``[1, n + candidates]``. Then the logits of the candidates,
        or None if the generator gives none.
    """
    ids, logits = get_candidates(input_ids, **kwargs)
    n = input_ids.shape[1]
    most = cache.num_ahead if cache.get_seq_length() == n - 1 and n > 1 else 0
    return ids[:, : n + most], None if logits is None or not most else logits[:, :most]


class LayerQuantizers(KVQuantizer):
    """A quantizer that uses another one, ``quantizers[layer_idx]``, for each layer."""

    def __init__(self, quantizers: Sequence[KVQuantizer]):
        self.quantizers = tuple(quantizers)
        self.is_in_place = all(quantizer.is_in_place for quantizer in self.quantizers)

    def of_layer(self, layer_idx: int) -> KVQuantizer:
        return self.quantizers[layer_idx]

    def in_place(self, capacity: int) -> KVQuantizer:
        return LayerQuantizers([quantizer.in_place(capacity) for quantizer in self.quantizers])


def planned_quantizer(config: PodConfig) -> KVQuantizer:
    """The quantizer for ``kv_bits`` and ``kv_residual`` of a model's plan; ``NATIVE`` if all bits are 16."""
    bits = config.kv_bits or ()
    made = {
        one: make_quantizer(f"int{one}", one, config, GROUP_SIZE, config.kv_residual)
        for one in set(bits) - {16}
    }
    return LayerQuantizers([made.get(one, NATIVE) for one in bits]) if made else NATIVE


def own_cache(
    config: PodConfig, quantizer: KVQuantizer | None = None, spec: str | None = None, **options: Any
) -> PodCache:
    """An empty cache of the model's own method, which follows its layout, plan and bits.

    Args:
        config: the model's configuration.
        quantizer: how tokens are stored. None = in the plan's bits.
        spec: name of the cache's method. None = the model's own.
        options: ``extra_slots`` and ``tau`` of ``PodCacheLayer``.
    """
    quantizer = planned_quantizer(config) if quantizer is None else quantizer
    make_layer = partial(LAYOUT_LAYERS[config.layout], quantizer=quantizer, **options)
    return (PodCache if quantizer.is_in_place else GroupedCache)(
        config, make_layer, spec or config.own_method
    )
