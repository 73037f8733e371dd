"""How much attention stays with proximal tokens: PoD's gate (paper eq. 4), measured while a model is trained.

A token's gate is `sigmoid(lse_P - lse_D)`: the share of its attention that goes to sinks and recent tokens. Where it is
near 1, a head makes no use of the distant tokens whose logits it shares.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
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
from pod.modeling.shipped.sharing import roles_of
from pod.training.args import TrainArgs
from pod.training.observe.held_out import Rows, lengthened
from pod.training.observe.observers import Observer
from pod.training.observe.trackers import Values
from pod.training.run.reading import read, reading, row_length_for

_NAME = "noting gates"  # of an implementation of attention, while a row is measured


class Gates(Observer):
    """Every `gate_every_steps`, before the first step and at the last one, on one held-out row.

    Metrics: `gate`, the mean over followers, and `gates` [layer][KV head]: the mean over query heads of the group and tokens that
    have distant ones (null where there are none); for leads and windows too, with their own queries and keys, of which a window
    makes no use. gates.png in `folder` shows the last ones.
    """

    def __init__(self, args: TrainArgs, folder: Path, rows: Rows):
        super().__init__(args.gate_every_steps)
        self.folder = folder
        self.row = {name: value[:1] for name, value in rows.items()}

    def measure(self, trainer: Any, step: int) -> Values:
        gates, lead = measure_gates(trainer, self.row), trainer.causal_model.model.lead
        places = [
            (i, j) for i, row in enumerate(lead) for j, owner in enumerate(row) if owner not in (i, None)
        ]
        followers = [gate for i, j in places if (gate := gates[i][j]) is not None]
        if trainer.mesh.rank == 0:
            from pod.training.plans.pictures import save_picture

            save_picture(gate_picture(gates, places, step), self.folder / "gates.png")
        mean = {"gate": sum(followers) / len(followers)} if followers else {}
        return {**mean, "gates": gates}


def gate_picture(gates: list[list[float | None]], followers: list[tuple[int, int]], step: int) -> Any:
    """Mean gate of each layer and KV head; dots: followers, whose gate decides."""
    from pod.training.plans.pictures import Map, map_picture

    maps = [Map(f"after step {step}; dots: followers", gates, followers)]
    title = "Gate: share of attention\nthat stays with sinks and recent tokens"
    return map_picture(maps, title, "mean gate: 1 = distant tokens unused", "KV head")


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
    config, ulysses, decoder = trainer.causal_model.config, trainer.ulysses, trainer.causal_model.model
    lead = decoder.lead if ulysses is None else ulysses.lead
    windows = config.num_sink_tokens, config.num_recent_tokens
    totals = torch.zeros(2, config.num_hidden_layers, config.num_key_value_heads, dtype=torch.float64)
    # A layer calls once for the heads of every role that it has.
    roles = [(layer, roles_of(lead, layer)) for layer in range(len(lead))]
    calls = ((layer, heads) for layer, x in roles for heads in (x.leads, x.followers, x.windows) if heads)

    def note(call: Call) -> None:
        layer, heads = next(calls)
        keys = call.tokens.keys
        q_lead, k_lead = (call.q, keys) if call.lead is None else call.lead[:2]
        gates = proximal_share(call.q, keys, q_lead, k_lead, windows, call.segments)  # type: ignore[arg-type]
        for head, of_head in zip(heads, gates.split(call.groups, dim=1), strict=True):
            seen = of_head[of_head.isfinite()]
            place = head if ulysses is None else ulysses.heads[layer][head]
            totals[:, layer, place] += torch.tensor([float(seen.double().sum()), len(seen)])

    length = row_length_for(row["input_ids"].shape[1], trainer)
    row = lengthened(row, length)
    with reading(trainer, length), noted_calls(decoder, note):
        read(trainer, row["input_ids"], row["doc_ids"], row["labels"], lambda hidden, *_: hidden.sum())
    sums, counts = torch.tensor(trainer.mesh.sum(totals.flatten().tolist())).view(totals.shape)
    means = (sums / counts).tolist()  # nothing over nothing is NaN
    return [[None if math.isnan(mean) else mean for mean in row] for row in means]


@contextlib.contextmanager
def noted_calls(decoder: Any, note: Callable[[Call], None]) -> Iterator[None]:
    """Around one forward pass of a PodModel: `note` sees every call of its attention."""
    config = decoder.config
    backend = config.attention_backend

    def noted(call: Call) -> tuple[Tensor, Tensor]:
        note(call)
        return attend(*call, backend=backend)

    IMPLEMENTATIONS[_NAME] = Implementation(noted, lambda call: None)
    config.attention_backend = _NAME
    try:
        yield
    finally:
        config.attention_backend = backend
        del IMPLEMENTATIONS[_NAME]


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
        q, q_lead: ``[B, Hq, n, d]``, rotated; k, k_lead: ``[B, H, n, d]``. A lead's own stand for the lead's.
        windows: (n_s, n_r) in tokens.

    Returns: ``[B, Hq, n]`` in at least fp32; NaN for queries that see no distant token.
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
