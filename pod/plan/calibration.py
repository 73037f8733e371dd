"""Constants that stand for the first tokens in heads that keep their windows.

A constant sink is a logit per query head, and a value and a key per KV head. Logit and value join the softmax
of a window at every position, as in serving engines. The key makes the logit depend on the query
(``pod.modeling.model.sinks``): it is the mean key of first tokens, in the channels that hardly turn within a
window (`first_keys`). Logits and values are those of the least *misfit*:
``‖W (o' - o)‖² / ‖x‖²``, the squared change of what the layer adds to the residual stream ``x``, relative
to it. (What windows with these constants cost in nats is measured in ``costs.py``.) It is the sum of three
parts:

* the mean over queries that have distant tokens;
* the mean over early queries, whose window still holds the first tokens, times their share of the sequence;
* the mean over first tokens.

The third part is there because every text has a first token, and all later tokens attend to it. What a layer
does to it decides whether later layers find their sink. On SmolLM2-135M, constants that were too heavy in
layers 1, 10 and 11 took away 98 % of the first token's large activations, for first tokens from 5 % of the
vocabulary. A first token sees nothing but itself, so any token of a text can stand for it: it is read as a
sequence of its own.

Calibration starts from what a dense model reads from the first tokens (`measured_sink`). These
constants are right for queries that have distant tokens. For early queries, which still see the first tokens,
they would count these twice. So calibration then searches for the constants of least misfit (`fitted_sink`).
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from pod.modeling.loading import load_model
from pod.modeling.model.llama import PodForCausalLM
from pod.modeling.model.sharing import SharingPlan
from pod.modeling.model.sink_constants import SinkConstants
from pod.modeling.model.sinks import Sink, add_sink
from pod.plan.costs import NOT_FINITE
from pod.plan.layer_constants import LayerConstants
from pod.plan.plan_progress import counter
from pod.plan.recording import (
    AttentionInputs,
    logits_of,
    planned_layers,
    record_attention_inputs,
    record_batch,
    sample_queries,
)
from pod.tokenizer import load_tokenizer

FIRST_TOKENS = 4
"""First tokens of a text whose attention the constants replace at the start of the calibration."""
NUM_QUERIES = 64
"""Queries with distant tokens that `calibrate_sinks` samples from each text, unless it is told otherwise."""
ANGLE = 0.3
"""Channels hardly turn if their angle changes by at most this, in radians, from end to end of a window.

An angle of 0.03 gives misfits that are alike (Qwen2.5-Coder-0.5B, windows of 256 tokens).
"""
NUM_FIRST = 32
"""Most tokens of each sequence that stand for first tokens (`first_tokens`)."""
STEPS = 60
"""Most steps of L-BFGS per layer."""


class OutputScale(NamedTuple):
    """The factors that turn errors of attention's output into relative squared errors.

    Attributes:
        residual: ``[q]``, the squared length of the residual stream at each query; squared errors are divided
            by it.
        columns: ``[H, hidden, G·d]``, from the output of a KV head's query heads to what the residual stream
            gets.
        factor: ``[H, r, G·d]``, upper triangular; products with it are as long as products with ``columns``.
    """

    residual: Tensor
    columns: Tensor
    factor: Tensor

    @classmethod
    def of(cls, layer: Any, out: Tensor, residual: Tensor) -> "OutputScale":
        """The scale of a decoder layer.

        The number by which a norm behind attention divides goes into ``residual``.

        Args:
            layer: the decoder layer.
            out: ``[H, G, q, d]``, the output of its attention.
            residual: ``[q]``, the squared length of the residual stream in front of the layer.
        """
        projection, place = layer.self_attn.o_proj, layer.norms[1]
        weight = projection.weight.to(out)
        if place is not None:
            norm = getattr(layer, f"{place}_layernorm")
            added = out.permute(2, 0, 1, 3).flatten(1) @ weight.T  # [q, hidden]
            bias = 0.0 if projection.bias is None else projection.bias.to(out)
            residual = residual * ((added + bias).square().mean(-1) + norm.eps)
            weight = weight * (norm.weight.to(out) + norm.offset)[:, None]
        weight = weight * layer.residual_multiplier
        columns = weight.unflatten(1, (out.shape[0], -1)).transpose(0, 1)
        return cls(residual, columns, torch.linalg.qr(columns, mode="r").R)  # ‖R e‖ = ‖W e‖


@dataclass(frozen=True)
class WindowQueries:
    """Sampled queries of one layer: what their windows give without a sink, and what all tokens give.

    Attributes:
        near: ``[H, G, q, d]``, attention to the window.
        lse: ``[H, G, q]``, log-sum-exp of the logits in the window.
        out: ``[H, G, q, d]``, attention to all tokens.
        residual: ``[q]``, squared length of the residual stream, see `OutputScale`.
        factor: ``[H, r, G·d]``, see `OutputScale`.
        weights: ``[q]``; the weighted sum over queries is the misfit.
    """

    near: Tensor
    lse: Tensor
    out: Tensor
    residual: Tensor
    factor: Tensor
    weights: Tensor

    @classmethod
    def join(cls, parts: Sequence["WindowQueries"]) -> "WindowQueries":
        """The queries of several sequences of one layer; their misfit is the mean misfit of the sequences."""
        return cls(
            near=torch.cat([part.near for part in parts], dim=2),
            lse=torch.cat([part.lse for part in parts], dim=2),
            out=torch.cat([part.out for part in parts], dim=2),
            residual=torch.cat([part.residual for part in parts]),
            factor=parts[0].factor,
            weights=torch.cat([part.weights for part in parts]) / len(parts),
        )

    def misfits(self, sink: Sink) -> Tensor:
        """``[H, q]``: what each query adds to the misfit of each KV head with this sink; differentiable."""
        heads, groups = self.lse.shape[:2]
        logits = sink.logits.to(self.lse).view(heads, groups, 1)
        values = sink.values.to(self.lse)[:, None, None]
        out, _ = add_sink(self.near, self.lse, logits, values)
        errors = (out - self.out).transpose(1, 2).flatten(2)  # [H, q, G·d]
        return (errors @ self.factor.mT).square().sum(-1) / self.residual * self.weights


class _Part(NamedTuple):
    """Queries of one layer, without their weights; fields as in `WindowQueries`."""

    near: Tensor
    lse: Tensor
    out: Tensor
    residual: Tensor


@torch.no_grad()
def first_keys(model: PodForCausalLM, sequences: Sequence[Tensor]) -> list[Tensor | None]:
    """The key ``[H, d]`` of the constant sink of every planned layer, fp64; None = it has none.

    It is the mean key of tokens that stand for first tokens (`first_tokens`), not rotated, and zero in
    channels that turn by more than `ANGLE` within a window. Models with norms of keys have none: these keys
    have no large biases. Engines would have to subtract the sink's key after the norm, which they cannot.

    Args:
        model: dense, with the ``num_recent_tokens`` of the windows.
        sequences: ``[n]`` tokens each.
    """
    config = model.config
    if config.qk_norm:
        return [None] * len(planned_layers(config))
    tokens = torch.cat([first_tokens(ids, config.bos_token_id) for ids in sequences]).to(model.device)
    found: list[Tensor | None] = []
    for inputs in record_batch(model, tokens[:, None]):
        rope = inputs.rope
        turns_little = rope.frequencies * (config.num_recent_tokens - 1) <= ANGLE
        # at position 0 nothing is rotated, but everything is scaled
        keys = inputs.k[:, :, 0].double().mean(0) / rope.attention_scaling
        found.append(keys * turns_little.repeat(2))
    return found


@torch.no_grad()
def window_queries(
    model: PodForCausalLM, input_ids: Tensor, num_queries: int, keys: Sequence[Tensor | None] | None = None
) -> Iterator[tuple[WindowQueries, Sink]]:
    """Yield the sampled queries of every planned layer on one sequence, and constants to start a calibration.

    Args:
        model: dense, with the ``num_recent_tokens`` of the windows.
        input_ids: ``[1, n]``.
        num_queries: number of queries with distant tokens, at most ``n - num_recent_tokens``. As many early
            queries are added (at most ``num_recent_tokens - 1``), and the first tokens.
        keys: the key of each planned layer's sink, see `first_keys`; None = sinks have none.

    Raises:
        ValueError: the model has a plan, or the sequence has fewer than num_queries positions with distant
            tokens.
    """
    config, n = model.config, input_ids.shape[1]
    window = config.num_recent_tokens
    distant = sample_queries(n, num_queries, 0, window).positions
    count = min(num_queries, window - 1)
    early = 1 + torch.arange(count) * (window - 1) // max(count, 1)
    positions = torch.cat([early, distant]).to(input_ids.device)
    tokens = first_tokens(input_ids[0], config.bos_token_id)
    kinds = [(len(tokens), 1.0), (count, (window - 1) / n), (num_queries, 1.0)]
    weights = [torch.full((size,), weight / max(size, 1), dtype=torch.float64) for size, weight in kinds]
    firsts = record_batch(model, tokens[:, None])
    inputs = record_attention_inputs(model, input_ids)
    layers = planned_layers(config)
    each = [None] * len(layers) if keys is None else keys
    for layer, own, first, key in zip(layers, inputs, firsts, each, strict=True):
        alone = _alone(first.relative_to(key))
        part, sink = _part_of(own, own.relative_to(key), positions, window)
        joined = _Part(
            near=torch.cat([alone.near, part.near], dim=2),
            lse=torch.cat([alone.lse, part.lse], dim=2),
            out=torch.cat([alone.out, part.out], dim=2),
            residual=torch.cat([alone.residual, part.residual]),
        )
        scale = OutputScale.of(model.model.layers[layer], joined.out, joined.residual)
        queries = WindowQueries(
            near=joined.near,
            lse=joined.lse,
            out=joined.out,
            residual=scale.residual,
            factor=scale.factor,
            weights=torch.cat(weights).to(joined.lse),
        )
        yield queries, sink


def first_tokens(input_ids: Tensor, bos_token_id: Any) -> Tensor:
    """Tokens ``[B]`` that stand for the tokens with which texts begin.

    Where the sequence ``[n]`` begins with the model's BOS token, all texts do: this token is the only one.
    Else there are at most `NUM_FIRST` evenly spaced tokens of the sequence, the first one among them.
    """
    if bos_token_id is not None and int(input_ids[0]) == bos_token_id:
        return input_ids[:1]
    n = len(input_ids)
    count = min(n, NUM_FIRST)
    return input_ids[torch.arange(count, device=input_ids.device) * n // count]


def _alone(inputs: AttentionInputs) -> _Part:
    """The queries of B sequences of one token each, which see only themselves.

    Args:
        inputs: from `record_batch`, with the batch as first dimension.
    """
    wide = torch.promote_types(inputs.q.dtype, torch.float32)
    q = inputs.q[:, :, 0].to(wide).transpose(0, 1)  # [Hq, B, d]
    k = inputs.k[:, :, 0].to(wide).transpose(0, 1)  # [H, B, d]
    v = inputs.v[:, :, 0].to(wide).transpose(0, 1)
    q = q.unflatten(0, (len(k), -1))  # [H, G, B, d]
    lse = (q * k[:, None]).sum(-1) * q.shape[-1] ** -0.5
    out = v[:, None].expand_as(q)
    residual = inputs.hidden_states[:, 0].to(wide).square().sum(-1)
    return _Part(out, lse, out, residual)


def _part_of(
    inputs: AttentionInputs, relative: AttentionInputs, positions: Tensor, window: int
) -> tuple[_Part, Sink]:
    """The queries at these positions, and the `measured_sink` of those that have distant tokens.

    Args:
        inputs: what attention to all tokens reads.
        relative: what windows read: the same, with the sink's key subtracted from the keys.
        positions: ``[q]``.
        window: tokens that a query sees in its window.
    """
    logits = _causal_logits(inputs, positions)  # [H, G, q, n]
    values = inputs.v.to(logits.dtype)[:, None]
    out = logits.softmax(-1) @ values
    residual = inputs.hidden_states[positions].to(logits.dtype).square().sum(-1)
    outside = positions[:, None] - torch.arange(logits.shape[-1], device=positions.device) >= window
    logits = _causal_logits(relative, positions)
    near = logits.masked_fill(outside, float("-inf"))
    part = _Part(near.softmax(-1) @ values, near.logsumexp(-1), out, residual)
    distant = positions >= window
    return part, measured_sink(logits[:, :, distant, :FIRST_TOKENS], values[:, :, :FIRST_TOKENS])


def _causal_logits(inputs: AttentionInputs, positions: Tensor) -> Tensor:
    """Logits ``[H, G, q, n]`` of the queries at these positions, at least fp32, -inf for later tokens."""
    logits = logits_of(inputs, positions)
    later = torch.arange(logits.shape[-1], device=positions.device) > positions[:, None]
    return logits.masked_fill_(later, float("-inf"))


def measured_sink(logits: Tensor, values: Tensor) -> Sink:
    """The constants that stand for what a dense model reads from the first tokens, averaged over queries.

    Args:
        logits: ``[H, G, q, FIRST_TOKENS]``, of queries with distant tokens.
        values: ``[H, 1, FIRST_TOKENS, d]``.

    Returns:
        Per query head the mean log-sum-exp of its logits, and per KV head the mean of what its query heads
        read. Both are fp64.
    """
    read = logits.softmax(-1) @ values
    return Sink(logits.logsumexp(-1).double().mean(-1).flatten(), read.double().mean((1, 2)))


def fitted_sink(queries: WindowQueries, start: Sink) -> Sink:
    """The constants of least misfit on these queries, by L-BFGS; `start` where it finds nothing better."""
    logits = start.logits.detach().to(queries.lse).clone().requires_grad_()
    values = start.values.detach().to(queries.lse).clone().requires_grad_()
    sink = Sink(logits, values)
    with torch.no_grad():
        before = queries.misfits(sink).sum()
    if not before > 0:
        return start
    optimizer = torch.optim.LBFGS([logits, values], max_iter=STEPS, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = queries.misfits(sink).sum() / before  # 1 at the start: the tolerances of L-BFGS are absolute
        loss.backward()
        return loss

    with torch.enable_grad():
        optimizer.step(closure)  # type: ignore[arg-type]
    found = Sink(logits.detach().double(), values.detach().double())
    with torch.no_grad():
        better = queries.misfits(found).sum() < before
    return found if better and all(bool(x.isfinite().all()) for x in found) else start


def find_sinks(model: PodForCausalLM, sequences: Sequence[Tensor], num_queries: int) -> list[LayerConstants]:
    """The constants of every planned layer, as if all of its heads kept their windows; fp64 on the CPU.

    Args:
        model: dense, with the ``num_recent_tokens`` of the windows.
        sequences: ``[n]`` tokens each; the sampled queries of all of them are held at the same time.
        num_queries: per sequence, see `window_queries`.

    Raises:
        ValueError: as in `window_queries`; or the model gives values that are not finite.
    """
    keys = first_keys(model, sequences)
    no_keys = [None] * len(keys)
    have_keys = any(key is not None for key in keys)
    readings = 2 if have_keys else 1
    with counter("constants", readings * (len(sequences) + len(keys))) as bar:
        with_keys = _fitted_with(model, sequences, num_queries, keys, bar)
        if not have_keys:
            return [constants for constants, _ in with_keys]
        without = _fitted_with(model, sequences, num_queries, no_keys, bar)
    best = []
    for (own, misfit), (plain, other) in zip(with_keys, without, strict=True):
        assert own.keys is not None
        # all layers have keys or none has
        best.append(own if misfit <= other else plain._replace(keys=torch.zeros_like(own.keys)))
    return best


def _fitted_with(
    model: PodForCausalLM,
    sequences: Sequence[Tensor],
    num_queries: int,
    keys: Sequence[Tensor | None],
    bar: Any,
) -> list[tuple[LayerConstants, float]]:
    """The constants of every planned layer with these keys, and their misfit; see `find_sinks`.

    ``bar`` counts every sequence that was read and every layer that was fitted.
    """
    layers: list[list[WindowQueries]] = [[] for _ in planned_layers(model.config)]
    starts: list[list[Sink]] = [[] for _ in layers]
    for ids in sequences:
        found = window_queries(model, ids.reshape(1, -1).to(model.device), num_queries, keys)
        for queries, sinks, (one, sink) in zip(layers, starts, found, strict=True):
            # the factor is the layer's, and is held once
            queries.append(replace(one, factor=queries[0].factor) if queries else one)
            sinks.append(sink)
        bar.update()
    calibrated = []
    for queries, sinks, key in zip(layers, starts, keys, strict=True):
        start = Sink(*(torch.stack(part).mean(0) for part in zip(*sinks, strict=True)))
        if not LayerConstants(*start, key).are_finite():
            raise ValueError(NOT_FINITE)
        joined = WindowQueries.join(queries)
        sink = fitted_sink(joined, start)
        with torch.no_grad():
            misfit = joined.misfits(sink).sum().item()
        calibrated.append((LayerConstants(*sink, key).cpu(), misfit))
        bar.update()
    return calibrated


def with_constants(plan: SharingPlan, sinks: Sequence[LayerConstants | None]) -> SharingPlan:
    """The plan with these constants in the layers that have heads with windows.

    Args:
        plan: of as many layers as ``sinks``.
        sinks: one per layer, with heads in their original order; the result has them in the plan's order.
            None for a layer that was trained with a window of its own.
    """
    logits: list[Any] = []
    values: list[Any] = []
    keys: list[Any] = []
    for layer, (row, sink) in enumerate(zip(plan.lead, sinks, strict=True)):
        if None not in row or sink is None:
            logits.append(None)
            values.append(None)
            keys.append(None)
            continue
        groups = len(sink.logits) // len(sink.values)
        order = list(range(len(sink.logits)) if plan.head_order is None else plan.head_order[layer])
        logits.append(sink.logits[order].tolist())
        kv_order = [head // groups for head in order[::groups]]
        values.append(sink.values[kv_order].tolist())
        keys.append(None if sink.keys is None else sink.keys[kv_order].tolist())
    constants = SinkConstants(tuple(logits), tuple(values), tuple(keys) if any(keys) else None)
    return replace(plan, sinks="constant", num_sink_tokens=0, sink_constants=constants)


def calibrate_sinks(
    model: PreTrainedModel | str | os.PathLike[str],
    plan: SharingPlan | str | os.PathLike[str],
    texts: Sequence[str | Tensor | Sequence[int]],
    num_queries: int = NUM_QUERIES,
) -> SharingPlan:
    """A plan with constant sinks, which stand for the first tokens in heads that keep their windows.

    The model is read as a dense one. About 8 texts, each as long as a few windows, are enough. Each must be
    longer than the window by ``num_queries`` tokens, and should begin as the model's inputs do.

    Args:
        model: what ``load_model`` takes.
        plan: a plan of this model, or the file of one; it says how long windows are.
        texts: strings, or token ids ``[n]``.
        num_queries: queries of each text whose attention is measured.

    Returns:
        The plan with ``sinks`` constant, no first tokens, and the constants. ``load_model(model, plan=…)``
        takes it.

    Raises:
        ValueError: there are no texts, a text is too short or has ids that the model does not know, the plan
            does not say its windows, its numbers of layers and heads are not the model's, or ``num_queries``
            is no number of queries.
    """
    if not isinstance(plan, (SharingPlan, str, os.PathLike)):
        raise ValueError(f"plan must be a SharingPlan or the file of one, got {plan!r:.80}")
    plan = plan if isinstance(plan, SharingPlan) else SharingPlan.load(plan)
    if plan.num_recent_tokens is None:
        raise ValueError(
            "this plan does not say how long its windows are: set num_recent_tokens, by dataclasses.replace"
        )
    if not isinstance(texts, (Sequence, Tensor)) or isinstance(texts, str) or not len(texts):
        raise ValueError("texts must be a list of strings or token ids with at least one text")
    if type(num_queries) is not int or num_queries < 1:
        raise ValueError(f"num_queries must be an integer >= 1, got {num_queries!r}")
    dense = load_model(model, layout="dense", num_sink_tokens=0, num_recent_tokens=plan.num_recent_tokens)
    plan.check_fits(dense.config.num_hidden_layers, dense.config.num_key_value_heads)
    sequences = [_tokens(dense, text) for text in texts]
    shortest = plan.num_recent_tokens + num_queries
    for index, ids in enumerate(sequences):
        if len(ids):
            _check_ids(ids, dense.config.vocab_size, f"texts[{index}]")
        if len(ids) < shortest:
            raise ValueError(
                f"texts[{index}] has {len(ids)} tokens, but windows of {plan.num_recent_tokens} and "
                f"{num_queries} queries behind them need {shortest}: give longer texts or lower num_queries"
            )
    sinks = dict(zip(planned_layers(dense.config), find_sinks(dense, sequences, num_queries), strict=True))
    return with_constants(plan, [sinks.get(layer) for layer in range(plan.num_layers)])


def _tokens(model: PodForCausalLM, text: str | Tensor | Sequence[int]) -> Tensor:
    """The token ids ``[n]`` of a text, cut at the longest context of the model."""
    if isinstance(text, str):
        text = load_tokenizer(model.config.name_or_path)(text)["input_ids"]
    return torch.as_tensor(text).flatten()[: model.config.max_position_embeddings]


def _check_ids(ids: Tensor, vocab_size: int, name: str) -> None:
    """Raise ``ValueError`` unless ``ids`` are integers from 0 to ``vocab_size - 1``; ``name`` is the text."""
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise ValueError(f"{name} has numbers of {ids.dtype}: token ids are integers")
    if not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise ValueError(
            f"{name} has token ids from {int(ids.min())} to {int(ids.max())}, allowed are 0 to "
            f"{vocab_size - 1}: use the model's own tokenizer"
        )
