"""A plan improved by the model's own loss: local search over block boundaries at a fixed saving.

Costs of pairs (``planning.py``, ``plan_costs.py``) add up; what sharing does to a model does not: errors of one block change what
the next ones see. The search measures the loss of whole plans on a few sequences. Each round measures the cheapest single
*splits* (a follower becomes a lead) and *merges* (a lead follows the block below it) by the additive cost, pairs the splits
that help most with the merges that harm least, and tries all promising pairs and shifted boundaries at once, then half of
them, and so on. Only a lower measured loss is kept, so the result is never worse on those sequences.

The search is deterministic in its inputs and in the measured losses. Losses are kept in a log, and a search that was
interrupted replays it.
"""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from pod.files import atomic_write_text
from pod.modeling.shipped.attention import Carry, ForwardContext
from pod.modeling.shipped.llama import PodForCausalLM
from pod.modeling.shipped.sharing import SharingPlan
from pod.training.planning import sum_of_costs

_LOGIT_ROWS = 512  # rows of logits in memory at once
_SINGLE_TRIES = 3  # pairs tried one by one after all joint trials of a round have failed

Flag = tuple[int, int]  # (layer, KV head) whose role is turned: lead or follower


class Move(NamedTuple):
    """Roles to turn together, and what they are expected to change: nats per token, negative = better."""

    flags: frozenset[Flag]
    gain: float


class PlanLoss:
    """Mean next-token loss of a model under any plan, in nats per token, on fixed sequences.

    Layers below the first change against the last `keep` are not computed again: their hidden states are held,
    ``layers · n · hidden`` elements per sequence. With torch.distributed initialised ranks divide the sequences.

    Args:
        model: dense weights with the windows that the plan will have; its plan in force is left as it was.
        sequences: N tensors ``[n]`` of token ids, the same on every rank.
    """

    def __init__(self, model: PodForCausalLM, sequences: Sequence[Tensor]):
        self.model = model
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.tokens = [row.reshape(1, -1).to(model.device) for row in sequences[self.rank :: self.world]]
        self.num_targets = sum(len(row) - 1 for row in sequences)
        self.num_sequences = len(sequences)
        self.kept: SharingPlan | None = None
        self.hidden: list[list[Tensor]] = [[] for _ in self.tokens]  # inputs of every layer under `kept`

    def __call__(self, plan: SharingPlan) -> float:
        return sum(self.losses(plan)) / self.num_targets

    @torch.no_grad()
    def losses(self, plan: SharingPlan) -> list[float]:
        """Summed loss of every sequence, in their order on every rank: the same bits for any number of ranks."""
        first = self._first_change(plan)
        own = [self._run(index, plan, first, None) for index in range(len(self.tokens))]
        every: list[list[float]] = [own]
        if dist.is_initialized():
            every = [[] for _ in range(self.world)]
            dist.all_gather_object(every, own)
        return [every[i % self.world][i // self.world] for i in range(self.num_sequences)]

    @torch.no_grad()
    def keep(self, plan: SharingPlan) -> None:
        """Hold the hidden states of this plan: later plans are computed from their first difference to it."""
        first = self._first_change(plan)
        for index, own in enumerate(self.hidden):
            fresh: list[Tensor] = []
            self._run(index, plan, first, fresh)
            self.hidden[index] = own[:first] + fresh
        self.kept = plan

    def _first_change(self, plan: SharingPlan) -> int:
        if self.kept is None:
            return 0
        pairs = zip(self.kept.lead, plan.lead, strict=True)
        return next((layer for layer, (a, b) in enumerate(pairs) if a != b), len(plan.lead) - 1)

    def _run(self, index: int, plan: SharingPlan, first: int, kept: list[Tensor] | None) -> float:
        """Summed loss of one sequence, from layer `first` on; appends the inputs of these layers to `kept`."""
        decoder, tokens = self.model.model, self.tokens[index]
        hidden = self.hidden[index][first] if first else decoder.embed_tokens(tokens)
        context = decoder.context(hidden, torch.arange(tokens.shape[1], device=tokens.device)[None])
        context.lead = plan.lead
        carry = self._carry_into(first, index, plan, context)
        for layer in list(decoder.layers)[first:]:
            if kept is not None:
                kept.append(hidden)
            hidden, *rest = layer(hidden, context, *carry)
            carry = tuple(rest)
        return _next_token_loss(self.model.lm_head, decoder.norm(hidden), tokens)

    def _carry_into(self, first: int, index: int, plan: SharingPlan, context: ForwardContext) -> Carry:
        """Queries and keys of the leads that layer `first` follows, projected again from the held hidden states."""
        carry: list[Tensor | None] = []
        groups = self.model.config.num_key_value_groups
        for head, lead in enumerate(plan.lead[first]):
            if lead == first:
                carry += [None, None]
                continue
            layer: Any = self.model.model.layers[lead]
            q, k, _ = layer.self_attn._project(layer.input_layernorm(self.hidden[index][lead]))
            q, k = context.rope(q), context.rope(k)
            carry += [q[:, head * groups : (head + 1) * groups].clone(), k[:, head : head + 1].clone()]
        return tuple(carry)


def _next_token_loss(lm_head: Any, hidden: Tensor, tokens: Tensor) -> float:
    total = 0.0
    for start in range(0, tokens.shape[1] - 1, _LOGIT_ROWS):
        end = min(start + _LOGIT_ROWS, tokens.shape[1] - 1)
        logits = lm_head(hidden[0, start:end])
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        total += F.cross_entropy(wide, tokens[0, start + 1 : end + 1], reduction="sum").item()
    return total


class LossLog:
    """Losses of plans that were measured, one JSON line each behind a line of what they depend on.

    Args:
        path: written by the first rank, whose losses all ranks get; None keeps nothing on disk.
        fingerprint: JSON of model, sequences and windows; a file of another one is started anew.
    """

    def __init__(self, path: str | os.PathLike[str] | None, fingerprint: dict[str, Any]):
        is_first = not dist.is_initialized() or dist.get_rank() == 0
        self.path = Path(path) if path is not None and is_first else None
        self.losses: dict[str, float] = {}
        if self.path is not None:
            self._read(self.path, json.dumps({"fingerprint": fingerprint}, sort_keys=True))
        if dist.is_initialized():
            box = [self.losses]
            dist.broadcast_object_list(box, src=0)
            self.losses = box[0]

    def _read(self, path: Path, head: str) -> None:
        lines = path.read_text(encoding="utf-8").split("\n") if path.exists() else [""]
        if lines[0] != head:
            atomic_write_text(path, head + "\n")
            return
        for line in lines[1:-1]:
            found = json.loads(line)
            self.losses[found["plan"]] = found["loss"]
        # What follows the last line break was cut off when the process died.
        atomic_write_text(path, "\n".join([*lines[:-1], ""]))

    def add(self, key: str, loss: float) -> None:
        """Keep one loss, on disk too when this is the first rank."""
        self.losses[key] = loss
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"plan": key, "loss": loss}) + "\n")


class _Budget(Exception):
    """All evaluations are spent."""


class Refinement:
    """One search; `run` returns the best plan that it found.

    Args:
        plan: where to begin; its saving is kept.
        costs: ``[L, L, H]`` costs of pairs, which choose what is tried.
        loss: measures a plan; its `keep`, if it has one, is told about every plan that is adopted.
        evaluations: plans that may be measured, those found in the log included.
        proposals: splits, merges and shifts measured per round, each.
        log: of losses; shared by all searches on the same model and sequences.
        say: called with a line per adopted plan.
    """

    def __init__(
        self,
        plan: SharingPlan,
        costs: ArrayLike,
        loss: Callable[[SharingPlan], float],
        evaluations: int,
        proposals: int = 12,
        log: LossLog | None = None,
        say: Callable[[str], None] = print,
    ):
        self.costs = np.asarray(costs, dtype=np.float64)
        self.measure = loss
        self.left = evaluations
        self.proposals = proposals
        self.log = log or LossLog(None, {})
        self.say = say
        self.start = plan
        self.flags = lead_flags(plan)

    def run(self) -> SharingPlan:
        """The plan of least loss found, with the losses before and after in its provenance."""
        evaluations = self.left
        first = best = float("nan")
        try:
            first = best = self._loss(frozenset())
            self._keep()
            while (found := self._round(best)) is not None:
                move, best = found
                self.flags = _turned(self.flags, move.flags)
                self.say(
                    f"refine: loss {best:.4f} ({best - first:+.4f}) after {evaluations - self.left} plans, "
                    f"{len(move.flags)} roles turned"
                )
                self._keep()
        except _Budget:
            pass
        refined = {"evaluations": evaluations - self.left, "loss_before": first, "loss_after": best}
        return SharingPlan(
            lead=plan_of(self.flags).lead, provenance=self.start.provenance | {"refined": refined}
        )

    def _round(self, best: float) -> tuple[Move, float] | None:
        """The first joint move that lowers the loss below `best`; None when none of them does."""
        splits, merges, shifts = (
            [Move(flags, self._loss(flags) - best) for flags in group] for group in self._cheapest()
        )
        pairs = self._pair(sorted(splits, key=_by_gain), sorted(merges, key=_by_gain))
        items = self._disjoint(sorted([*pairs, *shifts], key=_by_gain))
        count = len(items)
        while count:
            found = self._try(items[:count], best)
            if found is not None:
                return found
            count //= 2
        for item in items[1:_SINGLE_TRIES]:
            found = self._try([item], best)
            if found is not None:
                return found
        return None

    def _try(self, items: list[Move], best: float) -> tuple[Move, float] | None:
        flags = frozenset().union(*(item.flags for item in items))
        loss = self._loss(flags)
        return (Move(flags, loss - best), loss) if loss < best else None

    def _cheapest(self) -> list[list[frozenset[Flag]]]:
        """The `proposals` splits, merges and shifts that raise the sum of costs least."""
        groups = possible_moves(self.flags)
        return [
            sorted(group, key=lambda flags: (self._cost(flags), sorted(flags)))[: self.proposals]
            for group in groups
        ]

    def _cost(self, flags: frozenset[Flag]) -> float:
        return sum_of_costs(self.costs, plan_of(_turned(self.flags, flags)))

    def _pair(self, splits: list[Move], merges: list[Move]) -> list[Move]:
        """The best split with the best merge, the second best with the second, … while a gain is expected."""
        pairs, left = [], list(merges)
        for split in splits:
            own = self._blocks(split.flags)
            merge = next((m for m in left if not own & self._blocks(m.flags)), None)
            if merge is None or split.gain + merge.gain >= 0:
                continue
            left.remove(merge)
            pairs.append(Move(split.flags | merge.flags, split.gain + merge.gain))
        return pairs

    def _disjoint(self, items: list[Move]) -> list[Move]:
        """Those of negative gain that touch no block twice, best first."""
        used: set[Flag] = set()
        chosen = []
        for item in items:
            blocks = self._blocks(item.flags)
            if item.gain < 0 and not blocks & used:
                used |= blocks
                chosen.append(item)
        return chosen

    def _blocks(self, flags: frozenset[Flag]) -> set[Flag]:
        """Blocks, by (lead, head), that turning these roles changes."""
        lead = plan_of(self.flags).lead
        touched = {(lead[layer][head], head) for layer, head in flags}
        return touched | {(lead[layer - 1][head], head) for layer, head in flags if self.flags[layer, head]}

    def _loss(self, flags: frozenset[Flag]) -> float:
        plan = plan_of(_turned(self.flags, flags))
        key = json.dumps(plan.lead)
        if self.left == 0:
            raise _Budget
        self.left -= 1
        if key not in self.log.losses:
            self.log.add(key, self.measure(plan))
        return self.log.losses[key]

    def _keep(self) -> None:
        keep = getattr(self.measure, "keep", None)
        if keep is not None:
            keep(plan_of(self.flags))


def refine_plan(*args: Any, **settings: Any) -> SharingPlan:
    """`Refinement` with the same arguments, run to its end."""
    return Refinement(*args, **settings).run()


def lead_flags(plan: SharingPlan) -> NDArray[np.bool_]:
    """``[L, H]``: which pairs lead."""
    return np.asarray(plan.lead) == np.arange(plan.num_layers)[:, None]


def plan_of(flags: NDArray[np.bool_]) -> SharingPlan:
    """The plan with these leads: every other pair follows the nearest lead below it."""
    layers = np.where(flags, np.arange(len(flags))[:, None], 0)
    return SharingPlan(lead=tuple(map(tuple, np.maximum.accumulate(layers, axis=0).tolist())))


def possible_moves(flags: NDArray[np.bool_]) -> tuple[list[frozenset[Flag]], ...]:
    """All splits, merges and shifts of a plan. Layer 0 always leads.

    A shift moves the boundary of two blocks by one layer and keeps the number of leads.
    """
    splits, merges, shifts = [], [], []
    for layer, head in np.ndindex(*flags.shape):
        if layer == 0:
            continue
        (merges if flags[layer, head] else splits).append(frozenset({(layer, head)}))
        above = layer + 1
        if above < len(flags) and flags[layer, head] != flags[above, head]:
            shifts.append(frozenset({(layer, head), (above, head)}))
    return splits, merges, shifts


def _turned(flags: NDArray[np.bool_], turned: frozenset[Flag]) -> NDArray[np.bool_]:
    flags = flags.copy()
    for flag in turned:
        flags[flag] ^= True
    return flags


def _by_gain(move: Move) -> tuple[float, list[Flag]]:
    return move.gain, sorted(move.flags)
