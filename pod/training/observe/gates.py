"""How much attention stays with proximal tokens: PoD's gate (paper eq. 4), measured while a model is trained.

A token's gate is `sigmoid(lse_P - lse_D)`: the share of its attention that goes to sinks and recent tokens. Where it is
near 1, a head makes no use of the distant tokens whose logits it shares.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pod.modeling.shipped.attend import (
    IMPLEMENTATIONS,
    Call,
    Implementation,
    Lead,
    Segments,
    Tokens,
    Visibility,
    attend,
)
from pod.modeling.shipped.sharing import Lead as PlanLead
from pod.modeling.shipped.sharing import roles_of
from pod.training.args import TrainArgs
from pod.training.observe.held_out import Rows, lengthened
from pod.training.observe.observers import Periodic
from pod.training.observe.trackers import append_records
from pod.training.run.reading import read, reading, row_length_for

FILE_NAME, PICTURE_NAME = "gates.jsonl", "gates.png"
_NAME = "noting gates"  # of an implementation of attention, while a row is measured


class Gates(Periodic):
    """Every `gate_every_steps`, before the first step and at the last one, on one held-out row.

    Metric: `gate`, the mean over followers. gates.jsonl has `lead` (the plan in force) and `gate`, both [layer][KV head]:
    the mean over query heads of the group and tokens that have distant ones (null where there are none); for leads and
    windows too, with their own queries and keys, of which a window makes no use. gates.png shows the last measurement
    and the way there.
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
            if gate is not None and lead[layer][head] not in (layer, None)
        ]
        if trainer.mesh.rank == 0:
            from pod.training.observe.gate_pictures import save_gate_picture

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
    totals = torch.zeros(2, config.num_hidden_layers, config.num_key_value_heads, dtype=torch.float64)
    with reading(trainer, length):
        lead = decoder.lead if ulysses is None else ulysses.lead
        recorder = _Recorder(lead, (config.num_sink_tokens, config.num_recent_tokens))
        with recorder.listening(decoder):
            read(trainer, row["input_ids"], row["doc_ids"], row["labels"], lambda hidden, *_: hidden.sum())
    for layer, heads in enumerate(recorder.layers):
        for head, (total, count) in heads.items():
            place = head if ulysses is None else ulysses.heads[layer][head]
            totals[0, layer, place] += total
            totals[1, layer, place] += count
    sums, counts = torch.tensor(mesh.sum(totals.flatten().tolist())).view(totals.shape)
    means = (sums / counts).tolist()  # nothing over nothing is NaN
    return [[None if mean != mean else mean for mean in row] for row in means]


class _Recorder:
    """Stands before a model's attention for one pass and notes every head's gates.

    Args:
        lead: plan of the heads that this rank computes.
        windows: (n_s, n_r) in tokens.

    Attributes:
        layers: per layer, {head: (sum of gates, how many)}.
    """

    def __init__(self, lead: PlanLead, windows: tuple[int, int]):
        self.windows = windows
        self.layers: list[dict[int, tuple[float, int]]] = [{} for _ in lead]
        # A layer calls once for the heads of every role that it has.
        roles = (roles_of(lead, layer) for layer in range(len(lead)))
        calls = ((x.leads, x.followers, x.windows) for x in roles)
        self.calls = iter([(layer, heads) for layer, call in enumerate(calls) for heads in call if heads])

    @contextlib.contextmanager
    def listening(self, decoder: Any) -> Iterator[None]:
        """Around one forward pass of a PodModel."""
        config = decoder.config
        backend = config.attention_backend

        def noted(call: Call) -> tuple[Tensor, Tensor]:
            self._note(call)
            return attend(*call, backend=backend)

        IMPLEMENTATIONS[_NAME] = Implementation(noted, lambda call: None)
        config.attention_backend = _NAME
        try:
            yield
        finally:
            config.attention_backend = backend
            del IMPLEMENTATIONS[_NAME]

    def _note(self, call: Call) -> None:
        layer, heads = next(self.calls)
        q, keys = call.q, call.tokens.keys
        q_lead, k_lead = (q, keys) if call.lead is None else call.lead[:2]
        gates = proximal_share(q, keys, q_lead, k_lead, self.windows, call.segments)  # type: ignore[arg-type]
        for at, head in enumerate(heads):
            of_head = gates[:, at * call.groups : (at + 1) * call.groups]
            seen = of_head.isfinite()
            self.layers[layer][head] = (float(of_head[seen].double().sum()), int(seen.sum()))


@torch.no_grad()
def proximal_share(
    q: Tensor,
    k: Tensor,
    q_lead: Tensor,
    k_lead: Tensor,
    windows: tuple[int, int],
    segments: Segments,
    backend: str = "auto",
) -> Tensor:
    """The gate of every query: `exp(lse_P) / (exp(lse_P) + exp(lse_D))`, in memory linear in n.

    Args:
        q, q_lead: ``[B, Hq, n, d]``, rotated; k, k_lead: ``[B, H, n, d]``. A lead's own queries and keys stand for the
            lead's.
        windows: (n_s, n_r) in tokens.

    Returns:
        ``[B, Hq, n]`` in at least fp32; NaN for queries that see no distant token.
    """
    see = Visibility(*windows)
    if q.device.type == "cpu":  # whose exponentials of 16-bit logits are rounded to five digits
        compute = torch.promote_types(q.dtype, torch.float32)
        q, k, q_lead, k_lead = (x.to(compute) for x in (q, k, q_lead, k_lead))
    leads = None, Lead(q_lead, k_lead)
    near, both = (attend(q, Tokens(k, k), lead, see, segments, backend=backend)[1] for lead in leads)
    share, gates = (near - both).exp().clamp(max=1), torch.full_like(near, float("nan"))
    for segment in segments.all:  # its first n_s + n_r tokens see no distant one
        part = slice(*segment.rows), slice(None), slice(segment.queries[0] + sum(windows), segment.queries[1])
        gates[part] = share[part]
    return gates
