"""How much attention stays with proximal tokens: PoD's gate (paper eq. 4), measured while a model is trained.

A token's gate is `sigmoid(lse_P - lse_D)`: the share of its attention that goes to sinks and recent tokens. Where it is
near 1, a head makes no use of the distant tokens whose logits it shares.
"""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pod.kernels.documents import document_segments
from pod.modeling.shipped.attention import Backend, split_heads
from pod.training.args import TrainArgs
from pod.training.held_out import Rows, lengthened
from pod.training.observers import Periodic
from pod.training.reading import read, reading, row_length_for
from pod.training.trackers import append_records

FILE_NAME, PICTURE_NAME = "gates.jsonl", "gates.png"
_BLOCK_ELEMENTS = 1 << 24


class Gates(Periodic):
    """Every `gate_every_steps`, before the first step and at the last one, on one held-out row.

    Metric: `gate`, the mean over followers. gates.jsonl has `lead` (the plan in force) and `gate`, both [layer][KV head]:
    the mean over query heads of the group and tokens that see distant ones, for leads too (null where there are no such
    tokens); gates.png shows the last measurement and the way there.
    """

    def __init__(self, args: TrainArgs, folder: Path, rows: Rows):
        super().__init__(args.gate_every_steps)
        self.folder = Path(folder)
        self.row = {name: value[:1] for name, value in rows.items()}

    def measure(self, trainer: Any, step: int) -> dict[str, float]:
        gates = measure_gates(trainer, self.row)
        lead = trainer.causal_model.model.lead
        followers = [
            gate
            for layer, row in enumerate(gates)
            for head, gate in enumerate(row)
            if gate is not None and lead[layer][head] != layer
        ]
        if trainer.mesh.rank == 0:
            from pod.training.gate_pictures import save_gate_picture

            record = {"gate": gates, "lead": [list(row) for row in lead]}
            append_records(self.folder / FILE_NAME, step, [record])
            save_gate_picture(self.folder / FILE_NAME, self.folder / PICTURE_NAME)
        return {"gate": sum(followers) / len(followers)} if followers else {}


def check_gates(config: Any) -> None:
    """Raise ValueError for a model that has no gate."""
    if config.layout != "pod":
        raise ValueError(
            f"train.gate_every_steps measures proximal against distant tokens, which layout {config.layout} does not tell "
            "apart: set it to 0"
        )


def measure_gates(trainer: Any, row: Rows) -> list[list[float | None]]:
    """Mean gate [layer][KV head] over one row [1, n], the same on all ranks; None without a token that sees distant ones.

    Heads are measured where Ulysses computes them; all data-parallel groups read the same row.
    """
    config, mesh, ulysses = trainer.causal_model.config, trainer.mesh, trainer.ulysses
    decoder = trainer.causal_model.model
    length = row_length_for(row["input_ids"].shape[1], trainer)
    row = lengthened(row, length)
    first = 0 if ulysses is None else ulysses.kv_starts[ulysses.rank]
    repeats = 1 if ulysses is None else ulysses.repeats
    totals = torch.zeros(2, config.num_hidden_layers, config.num_key_value_heads, dtype=torch.float64)
    with reading(trainer, length):
        lead = decoder.lead if ulysses is None else ulysses.lead
        recorder = _Recorder(lead, (config.num_sink_tokens, config.num_recent_tokens))
        with recorder.listening(decoder):
            read(trainer, row["input_ids"], row["doc_ids"], row["labels"], lambda hidden, *_: hidden.sum())
    for layer, heads in enumerate(recorder.layers):
        for head, (total, count) in heads.items():
            place = (first + head) // repeats
            totals[0, layer, place] += total
            totals[1, layer, place] += count
    sums, counts = torch.tensor(mesh.sum(totals.flatten().tolist())).view(totals.shape)
    means = (sums / counts).tolist()  # nothing over nothing is NaN
    return [[None if mean != mean else mean for mean in row] for row in means]


class _Recorder:
    """Stands before a model's attention backend for one pass and notes every head's gates.

    Args:
        lead: plan of the heads that this rank computes.
        windows: (n_s, n_r) in tokens.

    Attributes:
        layers: per layer, {head: (sum of gates, how many)}.
    """

    def __init__(self, lead: Sequence[Sequence[int]], windows: tuple[int, int]):
        self.windows = windows
        self.layers: list[dict[int, tuple[float, int]]] = [{} for _ in lead]
        # A layer calls once for its leads and once for its followers, without those that it does not have.
        roles = [
            (layer, heads) for layer, row in enumerate(lead) for heads in split_heads(row, layer) if heads
        ]
        self.calls = iter(roles)

    @contextlib.contextmanager
    def listening(self, decoder: Any) -> Iterator[None]:
        """Around one forward pass of a PodModel."""
        make = decoder.context

        def context(*arguments: Any, **options: Any) -> Any:
            made = make(*arguments, **options)
            made.backend = self._before(made.backend)
            return made

        decoder.context = context
        try:
            yield
        finally:
            del decoder.context

    def _before(self, backend: Backend) -> Backend:
        """The same operations, which note first."""

        def causal(q: Tensor, k: Tensor, v: Tensor, doc_ids: Tensor | None = None) -> Tensor:
            self._note(q, k, q, k, doc_ids)
            return backend.causal_attention(q, k, v, doc_ids=doc_ids)

        def pod(q, k, v, q_lead, k_lead, *windows: int, doc_ids: Tensor | None = None) -> Tensor:
            self._note(q, k, q_lead, k_lead, doc_ids)
            return backend.pod_attention(q, k, v, q_lead, k_lead, *windows, doc_ids=doc_ids)

        return Backend(causal, pod, backend.window_attention)

    def _note(self, q: Tensor, k: Tensor, q_lead: Tensor, k_lead: Tensor, doc_ids: Tensor | None) -> None:
        layer, heads = next(self.calls)
        gates = proximal_share(q, k, q_lead, k_lead, *self.windows, doc_ids=doc_ids)
        groups = q.shape[1] // k.shape[1]
        for at, head in enumerate(heads):
            own = gates[:, at * groups : (at + 1) * groups]
            seen = own.isfinite()
            self.layers[layer][head] = (float(own[seen].double().sum()), int(seen.sum()))


@torch.no_grad()
def proximal_share(
    q: Tensor,
    k: Tensor,
    q_lead: Tensor,
    k_lead: Tensor,
    num_sink_tokens: int,
    num_recent_tokens: int,
    doc_ids: Tensor | None = None,
) -> Tensor:
    """The gate of every query: `exp(lse_P) / (exp(lse_P) + exp(lse_D))`, in memory linear in n.

    Args:
        q, q_lead: ``[B, Hq, n, d]``, rotated; k, k_lead: ``[B, H, n, d]``. A lead's own queries and keys stand for the
            lead's.
        doc_ids: ``[B, n]`` as in ``pod_attention``.

    Returns:
        ``[B, Hq, n]`` in at least fp32; NaN for queries that see no distant token.
    """
    batch, query_heads, n, _ = q.shape
    compute = torch.promote_types(q.dtype, torch.float32)
    gates = torch.full((batch, query_heads, n), float("nan"), dtype=compute, device=q.device)
    windows = num_sink_tokens, num_recent_tokens
    first = sum(windows)  # the first token of a document that sees a distant one
    for row, spans in enumerate(document_segments(doc_ids, batch, n)):
        for start, end in spans:
            if end - start <= first:
                continue
            parts = [x[row, :, start:end].to(compute) for x in (q, k, q_lead, k_lead)]
            size = max(1, min(end - start - first, _BLOCK_ELEMENTS // (query_heads * (end - start))))
            for begin in range(first, end - start, size):
                block = slice(begin, min(begin + size, end - start))
                gates[row, :, start + block.start : start + block.stop] = _block_gates(parts, windows, block)
    return gates


def _block_gates(parts: list[Tensor], windows: tuple[int, int], rows: slice) -> Tensor:
    """Gates ``[Hq, rows]`` of some queries of one document, all of which see distant tokens.

    parts: q, k, q_lead, k_lead of the document, ``[Hq or H, n, d]``.
    """
    q, k, q_lead, k_lead = parts
    num_sink_tokens, num_recent_tokens = windows
    window = slice(rows.start - num_recent_tokens + 1, rows.stop)
    distant = slice(num_sink_tokens, rows.stop - num_recent_tokens)
    query = torch.arange(rows.start, rows.stop, device=q.device)[:, None]

    def logits(queries: Tensor, keys: Tensor, columns: slice) -> Tensor:
        groups = queries.shape[0] // keys.shape[0]
        scaled = queries[:, rows].unflatten(0, (-1, groups)).flatten(1, 2) * queries.shape[-1] ** -0.5
        out = scaled @ keys[:, columns].transpose(1, 2)
        return out.view(queries.shape[0], rows.stop - rows.start, columns.stop - columns.start)

    def columns_of(columns: slice) -> Tensor:
        return torch.arange(columns.start, columns.stop, device=q.device)

    distance = query - columns_of(window)
    recent = logits(q, k, window).masked_fill((distance < 0) | (distance >= num_recent_tokens), float("-inf"))
    near = torch.cat([logits(q, k, slice(0, num_sink_tokens)), recent], dim=-1).logsumexp(-1)
    too_near = query - columns_of(distant) < num_recent_tokens
    far = logits(q_lead, k_lead, distant).masked_fill(too_near, float("-inf")).logsumexp(-1)
    return torch.sigmoid(near - far)
