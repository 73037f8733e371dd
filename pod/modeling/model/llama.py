"""One decoder for the families of ``pod.families``, dense or with shared distant keys (PoD)."""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import logging
from transformers.utils.generic import can_return_tuple

from .attend import Segments, check_backend, compute_dtype
from .cache import PodCache
from .config import PodConfig
from .decoder_layer import ForwardContext, Linear, PodDecoderLayer, RMSNorm, SequenceParallel, SharedQKTensors
from .flash_version import use_asked
from .generation import PodGenerationMixin, check_cache, own_cache
from .rope import Frequencies, Rope, frequencies_of, rotate
from .step import check_positions, compaction_of, document_positions

logger = logging.get_logger(__name__)
_SAID_TWICE = {"cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx", "num_items_in_batch"}
_SAID_TWICE |= {"cache_position", "tokenizer", "assistant_tokenizer"}
"""Arguments of trainers and of `generate()` that add nothing to the other arguments of `forward`."""
_STOCK_BACKENDS = {"eager": "reference", "flash_attention_2": "flash", "sdpa": None}
"""Our backend for each `attn_implementation` of stock models. None = the configuration's backend."""


class PodEmbedding(nn.Embedding):
    """Embedding whose rows are multiplied by ``multiplier``, in their dtype."""

    def __init__(self, config: PodConfig):
        super().__init__(config.vocab_size, config.hidden_size)
        self.multiplier = config.embedding_multiplier

    def forward(self, input_ids: Tensor) -> Tensor:
        rows = super().forward(input_ids)
        if self.multiplier == 1.0:
            return rows
        # the factor is rounded to the dtype, as in the training of such models
        return rows * torch.tensor(self.multiplier, dtype=rows.dtype).item()


class PodPreTrainedModel(PreTrainedModel):
    """Base class with the settings and hooks that transformers needs for the decoder."""

    config_class = PodConfig
    config: PodConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar[list[str]] = ["PodDecoderLayer"]
    _skip_keys_device_placement: ClassVar[list[str]] = ["past_key_values"]

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """See transformers.

        The environment variable ``POD_FLASH_ATTENTION`` (fa2, fa3, fa4) names the FlashAttention that runs on
        GPUs.

        Raises:
            ValueError: the named FlashAttention cannot run here.
        """
        use_asked()
        return super().from_pretrained(*args, **kwargs)

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """See transformers. The folder also gets this code: auto classes load it with ``trust_remote_code``.

        ``auto_map`` of the configuration names the classes. ``use_cache`` is saved as True, even if training
        with activation checkpointing has set it to False.
        """
        self.config.auto_map = {"AutoConfig": "config.PodConfig", "AutoModel": "llama.PodModel"}
        configs = [one for one in (self.config, getattr(self, "generation_config", None)) if one is not None]
        before = [one.use_cache for one in configs]
        for config in configs:
            config.use_cache = True
        try:
            super().save_pretrained(*args, **kwargs)
        finally:
            for config, use_cache in zip(configs, before, strict=True):
                config.use_cache = use_cache

    def _check_and_adjust_attn_implementation(self, asked: str | None, *args: Any, **kwargs: Any) -> str:
        if asked not in (None, *_STOCK_BACKENDS):
            raise ValueError(f"attn_implementation = {asked!r} is none of {', '.join(_STOCK_BACKENDS)}")
        return asked or "sdpa"


class PodModel(PodPreTrainedModel):
    """Embedding, decoder layers and final norm."""

    _auto_class = "AutoModel"

    def __init__(self, config: PodConfig):
        super().__init__(config)
        self.embed_tokens = PodEmbedding(config)
        self.layers = nn.ModuleList(PodDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm.of(config, config.hidden_size)
        check_backend(config.attention_backend)
        self.lead = config.sharing_plan.lead
        self.sequence_parallel: SequenceParallel | None = None
        self.gradient_checkpointing = False
        self.rotate = rotate
        self._frequencies: dict[torch.device, Frequencies] = {}
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: PodCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        doc_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        **others: Any,
    ) -> BaseModelOutputWithPast:
        """Hidden states after the final norm, divided by ``logits_scaling``.

        So their product with the head's weight gives the final logits, without another factor.

        Args:
            input_ids: ``[B, n]``, or ``inputs_embeds`` ``[B, n, hidden]``.
            attention_mask: ``[B, seen + n]`` padding mask, 1 = token, 0 = padding. Padding gets a zero
                output.
            past_key_values: a cache from ``make_cache``, which holds the ``seen`` columns.
            use_cache: True creates a cache when none is given. None = the configuration's ``use_cache``, but
                no cache in training, with documents, or with sequence parallelism.
            doc_ids: ``[B, n]``, the document of each token in packed rows, -1 = padding. Not with a cache.
                With sequence parallelism they are the ids of the whole row, while ``input_ids`` is this
                rank's share. None = they are derived from the next two arguments by ``packed_documents``.
            position_ids: ``[B, n]``. They may mark documents. Otherwise they are only checked, because
                positions follow from the mask, the cache and the documents.
            cu_seq_lens_q: cumulative lengths of documents, see ``packed_documents``.
            output_hidden_states: whether to also return the inputs of every layer, ``[B, n, hidden]`` each,
                and the result. They are zero on padding.
            others: arguments that stock models take too. A warning names those that are not known.

        Raises:
            ValueError: the mask is not 2-D, the inputs do not continue the cache, documents come together
                with a cache, or attention weights or router logits are requested.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        if self.config.output_attentions if output_attentions is None else output_attentions:
            raise ValueError(
                "output_attentions=True: no attention weights are formed here; "
                "the dense model of transformers has them"
            )
        if others.pop("output_router_logits", getattr(self.config, "output_router_logits", False)):
            raise ValueError("output_router_logits=True: experts have no balancing loss here: leave it out")
        if unknown := sorted(others.keys() - _SAID_TWICE):
            logger.warning_once(f"PodModel ignores arguments that it does not know: {', '.join(unknown)}")
        hidden_states: Any = inputs_embeds
        if input_ids is not None:
            hidden_states = self.embed_tokens(without_padding(input_ids, attention_mask))
        if hidden_states.dim() != 3:
            raise ValueError(f"the tokens are {list(hidden_states.shape[:-1])}, expected [rows, tokens]")
        if doc_ids is None and self.sequence_parallel is None:
            positions = position_ids if past_key_values is None else None
            doc_ids = packed_documents(hidden_states.shape[:2], positions, cu_seq_lens_q, attention_mask)
        if use_cache is None:
            alone = doc_ids is None and self.sequence_parallel is None
            use_cache = self.config.use_cache and not self.training and alone
        if use_cache and past_key_values is None:
            past_key_values = own_cache(self.config)
        asked = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        inputs = hidden_states, attention_mask, doc_ids, position_ids, past_key_values, bool(asked)
        if past_key_values is None:
            states = self._forward_plain(*inputs)
        else:
            states = self._forward_cached(*inputs, input_ids)  # type: ignore[call-arg]
            for again in past_key_values.rereadings():
                self.forward(*again)
        every = states.split(self.config.hidden_size, dim=-1)
        return BaseModelOutputWithPast(
            last_hidden_state=every[-1],  # type: ignore[arg-type]
            past_key_values=past_key_values,
            hidden_states=every if asked else None,  # type: ignore[arg-type]
        )

    def _forward_plain(
        self, hidden_states, attention_mask, doc_ids, position_ids, cache, everything
    ) -> Tensor:
        """A pass without a cache: training, scoring, packed documents, sequence parallelism."""
        _check_inputs(hidden_states, attention_mask, doc_ids, cache, self.sequence_parallel)
        compaction = None
        if attention_mask is not None:
            compaction = compaction_of(attention_mask, hidden_states.shape[1])
        if compaction is not None:
            if doc_ids is not None:
                raise ValueError("give doc_ids or a mask with padding, not both (doc_ids = -1 is padding)")
            if position_ids is not None:
                check_positions(position_ids, compaction.padded_positions(0), attention_mask)
            hidden_states, doc_ids = take_columns(hidden_states, compaction.index), compaction.doc_ids
        positions = torch.arange(hidden_states.shape[1], device=hidden_states.device)[None]
        if doc_ids is not None:
            positions = document_positions(doc_ids.to(hidden_states.device, non_blocking=True))
        if position_ids is not None and compaction is None and self.sequence_parallel is None:
            check_positions(position_ids, positions, None)
        context = self.context(hidden_states, positions, doc_ids)
        context.everything = everything
        hidden_states = self.run_layers(hidden_states, context)
        return hidden_states if compaction is None else compaction.scatter(hidden_states)

    @torch.compiler.disable  # lengths are numbers: compiled, every token would be another program
    def _forward_cached(
        self, hidden_states, attention_mask, doc_ids, position_ids, cache, everything, input_ids
    ) -> Tensor:
        """A pass with a cache.

        Padding is squeezed out first, so that layers see left-aligned rows of real tokens.
        """
        check_cache(cache)
        if self.training and self.gradient_checkpointing:
            raise ValueError("no cache is filled under activation checkpointing: call model.eval() first")
        _check_inputs(hidden_states, attention_mask, doc_ids, cache, self.sequence_parallel)
        step, compaction = cache.begin_step(
            self.config, hidden_states, attention_mask, input_ids, position_ids
        )
        repeats = 1, 1, len(self.layers) + 1 if everything else 1
        if compaction is not None:
            if not compaction.counts.any():
                cache.end_step(step)
                return torch.zeros_like(hidden_states).repeat(repeats)
            hidden_states = take_columns(hidden_states, compaction.index)
        engine = cache.engine if step.is_decode and step.all_real and not everything else None
        if engine is not None and (out := engine.decode(self, hidden_states, step)) is not None:
            cache.end_step(step)
            return out
        out = None
        for chunk in cache.prefill_chunks(step):
            columns = None if chunk.starts is None else chunk_columns(chunk.starts, chunk.num_new)
            part = hidden_states if columns is None else take_columns(hidden_states, columns)
            context = self.context(part, chunk.positions)
            context.step, chunk.ropes, chunk.backend = chunk, context.ropes, context.backend
            context.everything, step.ropes = everything, context.ropes
            part = self.run_layers(part, context)
            if columns is None:
                out = part
            else:
                out = torch.zeros_like(hidden_states).repeat(repeats) if out is None else out
                put_columns(out, columns, chunk.counts, part)
        cache.end_step(step)
        assert out is not None, "a pass without a chunk"
        return out if compaction is None else compaction.scatter(out)

    def context(
        self, hidden_states: Tensor, position_ids: Tensor, doc_ids: Tensor | None = None
    ) -> ForwardContext:
        """What the layers of one pass share: rotations, plan, backend and documents.

        Args:
            hidden_states: ``[B, n, hidden]``, which gives sizes, dtype and device.
            position_ids: ``[B or 1, n]``.
            doc_ids: ``[B, n]``, or None.
        """
        device = hidden_states.device
        if device not in self._frequencies:
            with torch.inference_mode(False):  # a later pass may train
                self._frequencies[device] = frequencies_of(self.config, device)
        parallel, (different, kind_of_layer) = self.sequence_parallel, self._frequencies[device]
        kinds = [Rope(*one, position_ids, hidden_states.dtype, self.rotate) for one in different]
        return ForwardContext(
            ropes=[kinds[kind] for kind in kind_of_layer],
            lead=self.lead if parallel is None else parallel.lead,
            backend=_STOCK_BACKENDS.get(self.config._attn_implementation or "")
            or self.config.attention_backend,
            segments=None if doc_ids is None else Segments.of_documents(doc_ids, hidden_states.shape[0]),
            sequence_parallel=parallel,
        )

    def run_layers(self, hidden_states: Tensor, context: ForwardContext) -> Tensor:
        """Run all layers and the final norm on ``[B, n, hidden]``.

        Returns:
            ``[B, n, hidden]``. With ``context.everything``, ``[B, n, (L + 1)·hidden]``: the inputs of every
            layer, then the result.
        """
        shared_qk: SharedQKTensors = (None,) * (2 * len(context.lead[0]))
        before = []
        for layer in self.layers:
            if context.everything:
                before.append(hidden_states)
            if self.gradient_checkpointing and self.training:
                hidden_states, *rest = self._checkpoint(layer, hidden_states, context, shared_qk)
            else:
                hidden_states, *rest = layer(hidden_states, context, *shared_qk)
            shared_qk = tuple(rest)
        hidden_states = self.after_layers(hidden_states)
        before = [one.to(hidden_states.device) for one in before]
        return torch.cat((*before, hidden_states), dim=-1) if before else hidden_states

    def after_layers(self, hidden_states: Tensor) -> Tensor:
        """The final norm of ``[B, n, hidden]``, divided by ``logits_scaling``."""
        hidden_states = self.norm(hidden_states)
        if self.config.logits_scaling == 1.0:
            return hidden_states
        return hidden_states / self.config.logits_scaling

    def _checkpoint(
        self, layer: nn.Module, hidden_states: Tensor, context: ForwardContext, shared_qk: SharedQKTensors
    ) -> Any:
        # training sets shared_qk_memory, which keeps shared_qk until the backward pass
        memory = getattr(self, "shared_qk_memory", None)
        saving = nullcontext() if memory is None else memory.saving(layer, hidden_states, context, shared_qk)
        stock = partial(checkpoint, use_reentrant=False)
        function = getattr(self, "_gradient_checkpointing_func", None) or stock
        with saving:
            return function(layer.__call__, hidden_states, context, *shared_qk)


class PodForCausalLM(PodPreTrainedModel, PodGenerationMixin):
    """The decoder with a language-model head. ``generate()`` works with caches from ``make_cache``."""

    _auto_class = "AutoModelForCausalLM"
    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: PodConfig):
        super().__init__(config)
        self.model = PodModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def prepare_inputs_for_generation(
        self, input_ids, next_sequence_length=None, inputs_embeds=None, **kwargs
    ):
        """As in transformers, except for assisted decoding (``feeds_all``) and padding beyond the vocabulary.

        With ``feeds_all``, all columns that the cache does not hold yet are fed: transformers would feed
        columns again that it holds. Ids of padding beyond the vocabulary are replaced by its last id.
        """
        if kwargs.pop("feeds_all", False) and next_sequence_length is None:
            next_sequence_length = input_ids.shape[1] - kwargs["past_key_values"].get_seq_length()
        kwargs["inputs_embeds"] = inputs_embeds
        if kwargs.pop("pads_beyond", False):  # rows that ended are fed padding
            input_ids = input_ids.clamp(max=self.config.vocab_size - 1)
        prepare = super().prepare_inputs_for_generation  # type: ignore[misc]
        return prepare(input_ids, next_sequence_length, **kwargs)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: PodCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        doc_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: int | Tensor | None = None,
        **others: Any,
    ) -> CausalLMOutputWithPast:
        """Logits of the columns that ``keep_columns`` keeps, and the mean next-token loss for ``labels``.

        The other arguments are those of ``PodModel.forward``.

        Args:
            labels: ``[B, n]``. They are shifted here (``labels = input_ids`` is usual). Labels of -100, the
                first column of labels and the last column of logits are ignored. With documents, no token
                predicts one of the next document.
            logits_to_keep: see ``keep_columns``.
            num_items_in_batch: a number by which the sum of losses over the labels is divided, instead of the
                mean. Trainers that accumulate gradients pass it.

        Raises:
            ValueError: as ``PodModel.forward``; or labels came with ``logits_to_keep`` or sequence
                parallelism.
        """
        if labels is not None and doc_ids is None and self.model.sequence_parallel is None:
            packed = position_ids, others.get("cu_seq_lens_q"), attention_mask
            doc_ids = packed_documents(labels.shape, *packed)
        inputs = input_ids, attention_mask, past_key_values, inputs_embeds, use_cache, doc_ids, position_ids
        outputs = self.model(*inputs, **others, return_dict=True)
        logits = self.lm_head(keep_columns(outputs.last_hidden_state, logits_to_keep))
        loss = None
        if labels is not None:
            if logits.shape[:-1] != labels.shape or self.model.sequence_parallel is not None:
                raise ValueError("labels need all logits: no logits_to_keep, no sequence parallelism")
            loss = next_token_loss(logits, labels, doc_ids, attention_mask, num_items_in_batch)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
        )


def without_padding(input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    """``input_ids`` ``[B, n]`` with 0 where the mask ``[B, seen + n]`` has padding.

    The reason: the model may have no embedding for the id of padding. No token ever sees padding.
    """
    real = None if attention_mask is None else attention_mask[:, -input_ids.shape[-1] :]
    if real is None or real.shape != input_ids.shape:  # a mask that does not fit is refused later
        return input_ids
    return input_ids.masked_fill(real == 0, 0)


def packed_documents(
    shape: Sequence[int],
    position_ids: Tensor | None,
    cu_seq_lens: Tensor | None,
    attention_mask: Tensor | None,
) -> Tensor | None:
    """The document of each token, ``[B, n]``, in rows that a trainer has packed. None = each row is one.

    Documents end at the cumulative lengths ``cu_seq_lens`` of the whole batch. Without these, a document
    begins wherever a position is 0, provided that the batch has no padding.

    Args:
        shape: ``(B, n)``.
        position_ids: ``[B or 1, n]``, or None.
        cu_seq_lens: int ``[documents + 1]``, or None.
        attention_mask: ``[B, n]``, or None.
    """
    if cu_seq_lens is not None:
        tokens = torch.arange(shape[0] * shape[1], device=cu_seq_lens.device)
        return torch.bucketize(tokens, cu_seq_lens[1:].long(), right=True).view(*shape)
    if position_ids is None or shape[1] == 1 or not (attention_mask is None or attention_mask.all()):
        return None
    starts = position_ids == 0
    return starts.cumsum(1).expand(*shape) if starts[:, 1:].any() else None


def chunk_columns(starts: Tensor, width: int) -> Tensor:
    """``[B, width]``, the columns of a chunk that begins at column ``starts[b]`` of each row."""
    return starts[:, None] + torch.arange(width, device=starts.device)


def take_columns(x: Tensor, columns: Tensor) -> Tensor:
    """The columns ``columns`` ``[B, width]`` of ``x`` ``[B, n, c]``, as ``[B, width, c]``.

    An index beyond the last column gives the last column.
    """
    return x.gather(1, columns.clamp(max=x.shape[1] - 1)[..., None].expand(-1, -1, x.shape[2]))


def keep_columns(x: Tensor, kept: int | Tensor) -> Tensor:
    """Some columns of ``[B, n, c]``.

    Args:
        kept: the number of last columns to keep (0 = all), or indices ``[m]`` or ``[B, m]`` of columns, or a
            bool mask ``[B, n]``, which gives ``[m, c]``.
    """
    if isinstance(kept, int):
        return x[:, -kept:] if kept else x
    if kept.dim() == 2:
        return x[kept] if kept.dtype == torch.bool else torch.take_along_dim(x, kept[..., None], 1)
    return x[:, kept]


def put_columns(target: Tensor, columns: Tensor, counts: Tensor, x: Tensor) -> None:
    """Write the first ``counts[b]`` columns of each row of ``x`` into ``target``, in place.

    Args:
        target: ``[B, n, c]``.
        columns: ``[B, width]``, the column of ``target`` for each column of ``x``.
        counts: ``[B]``.
        x: ``[B, width, c]``.
    """
    real = torch.arange(columns.shape[1], device=columns.device) < counts[:, None]
    rows, places = real.nonzero(as_tuple=True)
    x = x.to(target.device)  # the last layer may lie on another device than the first
    target[rows, columns[rows, places]] = x[rows, places]


def next_token_loss(
    logits: Tensor,
    labels: Tensor,
    doc_ids: Tensor | None,
    attention_mask: Tensor | None,
    num_items: int | Tensor | None,
) -> Tensor:
    """Mean cross-entropy in nats of the next tokens that have a label, computed in at least fp32.

    With ``num_items`` it is the sum divided by that number. A pair of tokens counts only if neither is
    padding and both are in the same document. Labels, documents and mask may be in host memory.

    Args:
        logits: ``[B, n, vocabulary]``.
        labels: ``[B, n]``, not shifted; -100 = no label.
        doc_ids: ``[B, n]``, -1 = padding; or None.
        attention_mask: ``[B, seen + n]``, or None.
        num_items: divisor of the sum, or None.
    """
    device = logits.device
    targets = labels[:, 1:].to(device)
    if doc_ids is not None:
        documents = doc_ids.to(device, non_blocking=True)
        ends = (documents[:, 1:] != documents[:, :-1]) | (documents[:, 1:] < 0)
        targets = targets.masked_fill(ends, -100)
    if attention_mask is not None:
        real = attention_mask[:, -labels.shape[1] :].to(device).bool()
        targets = targets.masked_fill(~(real[:, 1:] & real[:, :-1]), -100)
    wide = logits[:, :-1].to(compute_dtype(logits.dtype))
    loss = partial(nn.functional.cross_entropy, wide.flatten(0, 1), targets.flatten())
    return loss() if num_items is None else loss(reduction="sum") / num_items


def _check_inputs(hidden_states, attention_mask, doc_ids, cache, parallel) -> None:
    """Refuse inputs whose shapes, or whose combination, do not fit (``ValueError``)."""
    batch, n, _ = hidden_states.shape
    seen = 0 if cache is None else cache.get_seq_length()
    expected = [batch, seen + n]
    if n == 0:
        raise ValueError("input_ids has 0 columns: feed at least one token")
    if attention_mask is not None and list(attention_mask.shape) != expected:
        raise ValueError(
            f"attention_mask is {list(attention_mask.shape)}, but {seen} columns are in the cache and {n} "
            f"are new for {batch} rows: pass a mask of {expected} and only the new tokens "
            "(a 2-D padding mask: causal and window masks are part of the model); "
            "for another prompt call reset() of the cache"
        )
    if doc_ids is not None and cache is not None:
        raise ValueError("doc_ids are for packed training rows and cannot be combined with a cache")
    if parallel is not None and (cache is not None or doc_ids is None):
        raise ValueError("with sequence parallelism pass the doc_ids of the whole row and no cache")
    if doc_ids is not None and parallel is None and doc_ids.shape != hidden_states.shape[:2]:
        raise ValueError(f"doc_ids is {list(doc_ids.shape)}, expected {list(hidden_states.shape[:2])}")
