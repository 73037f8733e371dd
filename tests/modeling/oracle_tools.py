"""A naive cached decoder, the base of every oracle.

It has Python lists of entries per layer and KV head, and n×n attention.

An oracle is a subclass of ``NaiveDecoder`` that overrides the few methods in which it differs from full
attention:

* ``weights``: which entries a query sees and at which positions (masks, re-indexed positions, log-weights);
* ``after_prompt`` / ``after_decode``: what one KV head of one layer keeps; ``after_layers``: decisions across
  layers;
* ``attend_head`` / ``attend_layer``: everything about one head or one layer (values, heads that use others'
  keys);
* ``chunks``: how a prompt is cut into passes, each of which ends with ``after_prompt``.

    class Recent(NaiveDecoder):
        def after_prompt(self, layer, head, weights):
            self.entries[layer][head] = self.entries[layer][head][-8:]

    logits = Recent(model).run(ids, [("prompt", 30), ("decode", 5), ("prompt", 7)])   # ids [n] -> [n, vocab]

Everything is computed from the weights of the model's public submodules; no cache code of the package is
used.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pod.modeling.model.rope import inverse_frequencies

TURNS = [("prompt", 30), ("decode", 5), ("prompt", 7), ("decode", 8)]
"""The usual conversation of the tests: 50 tokens."""


def length_of(turns) -> int:
    return sum(count for _, count in turns)


@dataclass(eq=False)
class Entry:
    """One held key-value pair of one KV head.

    Attributes:
        position: of the token in the row, counted over all tokens seen; -1 for what is no token
            (compensation).
        k_raw, k, v: ``[d]`` key before RoPE, key rotated at ``position``, value.
        log_weight: added to the logit of this entry (log of the number of tokens it stands for).
        stats: what the method remembers about the entry, by name.
    """

    position: int
    k_raw: Tensor
    k: Tensor
    v: Tensor
    log_weight: float = 0.0
    stats: dict = field(default_factory=dict)


class NaiveDecoder:
    """One row through the decoder, pass by pass.

    ``entries[layer][head]`` is what is held, in position order.

    Attributes:
        seen: tokens seen before the pass in progress.
        num_new: tokens of the pass in progress.
        is_decode: whether the pass in progress is one decoded token.
        queries: per layer ``[Hq, m, d]`` un-rotated queries of the pass in progress (for methods across
            layers).
    """

    def __init__(self, model, **params):
        config = model.config
        self.model, self.params = model, params
        self.num_layers = config.num_hidden_layers
        self.num_heads = config.num_key_value_heads
        self.groups = config.num_attention_heads // config.num_key_value_heads
        self.head_dim = config.head_dim
        frequencies, self.rope_factor = inverse_frequencies(
            config, torch.device("cpu"), config.rope_parameters
        )
        self.frequencies = frequencies.double()
        self.entries: list[list[list[Entry]]] = [
            [[] for _ in range(self.num_heads)] for _ in range(self.num_layers)
        ]
        self.seen, self.num_new, self.is_decode = 0, 0, False
        self.queries: list[Tensor] = []
        self.setup(**params)

    # -- what an oracle overrides ----------------------------------------------------------------------------

    def setup(self) -> None:
        """Take the method's parameters."""

    def chunks(self, length: int) -> list[int]:
        """Widths of the passes of one prompt; the end of each counts as the end of a prompt."""
        return [length]

    def query_positions(self) -> list[int]:
        """Positions of the new tokens of this pass."""
        return list(range(self.seen, self.seen + self.num_new))

    def weights(self, layer: int, head: int, q: Tensor, entries: list[Entry]) -> Tensor:
        """Softmax rows ``[G, m, len(entries)]`` of un-rotated queries ``q`` ``[G, m, d]``.

        The last m entries are new.
        """
        q = self.turn(q, self.query_positions())
        keys = torch.stack([entry.k for entry in entries])
        logits = q @ keys.T / math.sqrt(self.head_dim) + self.log_weights(entries)
        return logits.masked_fill(~self.causal(len(entries)), -math.inf).softmax(-1)

    def attend_head(self, layer: int, head: int, q: Tensor, entries: list[Entry]) -> tuple[Tensor, Tensor]:
        """Output ``[G, m, d]`` and the weights that the hooks get."""
        weights = self.weights(layer, head, q, entries)
        return weights @ torch.stack([entry.v for entry in entries]), weights

    def attend_layer(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """``[Hq, m, d]`` from un-rotated ``q`` ``[Hq, m, d]``, ``k``, ``v`` ``[H, m, d]``.

        Calls the hooks of each head.
        """
        outputs, rows = [], []
        for head in range(self.num_heads):
            self.entries[layer][head] = self.entries[layer][head] + self.new_entries(k[head], v[head])
            group = q[head * self.groups : (head + 1) * self.groups]
            out, weights = self.attend_head(layer, head, group, self.entries[layer][head])
            outputs.append(out)
            rows.append(weights)
        for head, weights in enumerate(rows):
            (self.after_decode if self.is_decode else self.after_prompt)(layer, head, weights)
        return torch.cat(outputs)

    def after_prompt(self, layer: int, head: int, weights: Tensor) -> None:
        """Change ``self.entries[layer][head]`` (new tokens included).

        It is called when a prompt (or a streaming chunk) has ended.
        """

    def after_decode(self, layer: int, head: int, weights: Tensor) -> None:
        """A decoded token has attended (``weights`` ``[G, 1, held]``, itself included)."""

    def after_layers(self) -> None:
        """The pass is through all layers (``self.is_decode`` says which kind it was)."""

    # -- tools -----------------------------------------------------------------------------------------------

    def turn(self, x: Tensor, positions) -> Tensor:
        """RoPE as complex multiplication: ``x`` ``[..., m, d]`` at ``m`` positions; pairs (i, i + d/2)."""
        half = x.shape[-1] // 2
        angle = torch.as_tensor(positions, dtype=torch.float64)[:, None] * self.frequencies
        spin = torch.polar(torch.full_like(angle, self.rope_factor), angle)
        z = torch.complex(x[..., :half].double(), x[..., half:].double()) * spin
        return torch.cat((z.real, z.imag), dim=-1)

    def causal(self, length: int) -> Tensor:
        """Bool ``[m, length]``: what each query sees.

        That is everything held before the pass, and the pass's own tokens up to the query.
        """
        return torch.arange(length) <= torch.arange(length - self.num_new, length)[:, None]

    def log_weights(self, entries: list[Entry]) -> Tensor:
        return torch.tensor([entry.log_weight for entry in entries], dtype=torch.float64)

    def new_entries(self, k: Tensor, v: Tensor) -> list[Entry]:
        """Entries of the pass's tokens from one head's ``[m, d]`` un-rotated keys and values."""
        positions = self.query_positions()
        turned = self.turn(k, positions)
        return [Entry(positions[i], k[i], turned[i], v[i]) for i in range(self.num_new)]

    def held(self) -> list[list[int]]:
        """Entries held, per layer and KV head."""
        return [[len(entries) for entries in layer] for layer in self.entries]

    # -- the decoder -----------------------------------------------------------------------------------------

    @torch.no_grad()
    def run(self, ids: Tensor, turns) -> Tensor:
        """Logits ``[n, vocab]`` of ``ids`` ``[n]`` fed as ``turns``.

        A turn is ``("prompt", tokens)`` or ``("decode", tokens)``.
        """
        assert length_of(turns) == ids.shape[0]
        logits = []
        for kind, count in turns:
            for width in [1] * count if kind == "decode" else self.chunks(count):
                if width:
                    logits.append(self.feed(ids[self.seen : self.seen + width], kind == "decode"))
        return torch.cat(logits)

    def feed(self, ids: Tensor, is_decode: bool) -> Tensor:
        """One pass: logits ``[m, vocab]``."""
        self.num_new, self.is_decode, self.queries = ids.shape[0], is_decode, []
        decoder = self.model.model
        hidden = decoder.embed_tokens(ids)
        for index, layer in enumerate(decoder.layers):
            q, k, v = self.project(layer.self_attn, layer.input_layernorm(hidden))
            self.queries.append(q)
            out = self.attend_layer(index, q, k, v)
            hidden = hidden + layer.self_attn.o_proj(out.transpose(0, 1).flatten(1))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        self.after_layers()
        self.seen += self.num_new
        return self.model.lm_head(decoder.norm(hidden))

    def project(self, attention, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Un-rotated ``[heads, m, d]`` queries, keys and values."""
        shape = (hidden.shape[0], -1, self.head_dim)
        q, k, v = (p(hidden).view(shape) for p in (attention.q_proj, attention.k_proj, attention.v_proj))
        if attention.q_norm is not None:
            q, k = attention.q_norm(q), attention.k_norm(k)
        return q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)


class Streaming:
    """Mix-in: ``chunk_size`` tokens of a prompt at a time, each chunk the end of a prompt."""

    chunk_size = 0

    def chunks(self, length: int) -> list[int]:
        if not self.chunk_size:
            return [length]
        whole, rest = divmod(length, self.chunk_size)
        return [self.chunk_size] * whole + [rest] * bool(rest)


@torch.no_grad()
def run_cache(model, cache, ids: Tensor, turns, widths=()) -> Tensor:
    """The same turns through a real cache: ``[B, n]`` ids to ``[B, n, vocab]`` logits.

    ``("crop", n)`` takes n tokens back.

    Args:
        widths: forward passes inside each announced prompt, repeated until it ends; () = one pass.
    """
    start, outputs = 0, []
    for kind, count in turns:
        if kind == "crop":
            cache.crop(-count)
            continue
        if kind == "decode":
            passes = [1] * count
        else:
            cache.begin_prompt(count)
            passes = split(count, widths)
        for width in passes:
            outputs.append(model(ids[:, start : start + width], past_key_values=cache).logits)
            start += width
    return torch.cat(outputs, 1)


def split(count: int, widths) -> list[int]:
    """``widths`` over and over until they sum to ``count``."""
    passes, index = [], 0
    while sum(passes) < count:
        width = widths[index % len(widths)] if widths else count
        passes.append(min(width, count - sum(passes)))
        index += 1
    return passes
