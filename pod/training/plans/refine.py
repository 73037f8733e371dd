"""A plan improved by the model's own loss: local search over roles at a fixed saving.

Costs of roles (``costs.py``) add up; what roles do to a model does not: errors of one layer change what the next ones
see. The search measures the loss of whole plans on a few sequences. Each round measures the cheapest single moves by the additive
cost: *splits* (a follower becomes a lead) and *merges* (a lead follows the block below it), *opens* (a window becomes a lead) and
*closes* (a lead keeps its window). It pairs the splits that help most with the merges that harm least, and opens with closes, and
tries all promising pairs and shifted boundaries at once, then half of them, and so on. Only a lower measured loss is kept, so the
result is never worse on those sequences.

The search is deterministic in its inputs and in the measured losses. Losses are kept in a log, and a search that was
interrupted replays it.
"""

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from pod.files import atomic_write_text
from pod.modeling.loading import with_plan
from pod.modeling.methods import make_cache
from pod.modeling.shipped.attention import Carry, ForwardContext
from pod.modeling.shipped.llama import PodForCausalLM
from pod.modeling.shipped.sharing import GROUP_SIZE, Lead, SharingPlan, is_followed, open_lead, roles_of
from pod.training.plans.similarity import from_first_rank

_LOGIT_ROWS = 512  # rows of logits in memory at once
_SINGLE_TRIES = 3  # pairs tried one by one after all joint trials of a round have failed

LEAD, FOLLOW, WINDOW = range(3)
RoleTable = NDArray[np.int8]
"""``[L, H]`` of these: a follower follows the lead that its KV head has had last."""
Turn = tuple[int, int, int]  # layer, KV head, its new role


class Move(NamedTuple):
    """Roles to turn together, and what they are expected to change: nats per token, negative = better."""

    turns: frozenset[Turn]
    gain: float


class PlanLoss:
    """Mean next-token loss of a model under any plan, in nats per token, on fixed sequences; packed layers as the cache holds them.

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
        if plan.packs:
            return _loss_through_cache(with_plan(self.model, plan), self.tokens[index])
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
        """Queries and keys of the leads that layers from `first` on follow, projected again from the held hidden states."""
        carry: list[Tensor | None] = []
        groups = self.model.config.num_key_value_groups
        for head in range(plan.num_key_value_heads):
            lead = open_lead(plan.lead, first - 1, head) if first else None
            if lead is None or not is_followed(plan.lead, first - 1, head):
                carry += [None, None]
                continue
            layer: Any = self.model.model.layers[lead]
            q, k, _ = layer.self_attn._project(layer.input_layernorm(self.hidden[index][lead]))
            q, k = context.rope(q), context.rope(k)
            carry += [q[:, head * groups : (head + 1) * groups].clone(), k[:, head : head + 1].clone()]
        return tuple(carry)


def _loss_through_cache(model: PodForCausalLM, tokens: Tensor) -> float:
    """Summed loss of ``[1, n]`` when every token reads what the model's own cache holds in its place, as in decoding: a group at a
    time, since nothing is packed between two multiples of its size."""
    cache = make_cache(model)
    parts = [
        model.model(input_ids=part, past_key_values=cache, use_cache=True).last_hidden_state
        for part in tokens.split(GROUP_SIZE, dim=1)
    ]
    return _next_token_loss(model.lm_head, torch.cat(parts, dim=1), tokens)


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
        self.losses = from_first_rank(self.losses)

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
        plan: where to begin; its saving and its order of heads are kept.
        follow: ``[L, L, H]`` costs of pairs; window: ``[L, H]``, or None when no head may keep its window. They choose what is
            tried.
        loss: measures a plan; its `keep`, if it has one, is told about every plan that is adopted.
        evaluations: plans that may be measured, those found in the log included.
        proposals: moves of each kind that are measured per round.
        log: of losses; shared by all searches on the same model and sequences.
        say: called with a line per adopted plan.
    """

    def __init__(
        self,
        plan: SharingPlan,
        follow: ArrayLike | None,
        window: ArrayLike | None,
        loss: Callable[[SharingPlan], float],
        evaluations: int,
        proposals: int = 12,
        log: LossLog | None = None,
        say: Callable[[str], None] = print,
    ):
        shape = plan.num_layers, plan.num_key_value_heads
        self.has_windows = window is not None
        self.has_followers = follow is not None
        self.follow = np.zeros((shape[0], *shape)) if follow is None else np.asarray(follow, dtype=np.float64)
        self.window = np.zeros(shape) if window is None else np.asarray(window, dtype=np.float64)
        self.measure = loss
        self.left = evaluations
        self.proposals = proposals
        self.log = log or LossLog(None, {})
        self.say = say
        self.start = plan
        self.roles = roles_of_plan(plan)

    def run(self) -> SharingPlan:
        """The plan of least loss found, with the losses before and after in its provenance."""
        evaluations = self.left
        first = best = float("nan")
        try:
            first = best = self._loss(frozenset())
            self._keep()
            while (found := self._round(best)) is not None:
                move, best = found
                self.roles = _turned(self.roles, move.turns)
                self.say(
                    f"refine: loss {best:.4f} ({best - first:+.4f}) after {evaluations - self.left} plans, "
                    f"{len(move.turns)} roles turned"
                )
                self._keep()
        except _Budget:
            pass
        refined = {"evaluations": evaluations - self.left, "loss_before": first, "loss_after": best}
        provenance = self.start.provenance | {"refined": refined}
        return replace(self.start, lead=lead_of_roles(self.roles), provenance=provenance)

    def _round(self, best: float) -> tuple[Move, float] | None:
        """The first joint move that lowers the loss below `best`; None when none of them does."""
        found = {
            kind: sorted((Move(turns, self._loss(turns) - best) for turns in group), key=_by_gain)
            for kind, group in self._cheapest().items()
        }
        pairs = [
            *self._pair(found["splits"], found["merges"]),
            *self._pair(found["opens"], found["closes"]),
        ]
        items = self._disjoint(sorted([*pairs, *found["shifts"]], key=_by_gain))
        count = len(items)
        while count:
            tried = self._try(items[:count], best)
            if tried is not None:
                return tried
            count //= 2
        for item in items[1:_SINGLE_TRIES]:
            tried = self._try([item], best)
            if tried is not None:
                return tried
        return None

    def _try(self, items: list[Move], best: float) -> tuple[Move, float] | None:
        turns = frozenset().union(*(item.turns for item in items))
        if not is_plan(_turned(self.roles, turns)):
            return None
        loss = self._loss(turns)
        return (Move(turns, loss - best), loss) if loss < best else None

    def _cheapest(self) -> dict[str, list[frozenset[Turn]]]:
        """The `proposals` moves of each kind that raise the sum of costs least."""
        groups = possible_moves(self.roles, self.has_followers, self.has_windows)
        return {
            kind: sorted(group, key=lambda turns: (self._cost(turns), sorted(turns)))[: self.proposals]
            for kind, group in groups.items()
        }

    def _cost(self, turns: frozenset[Turn]) -> float:
        roles = _turned(self.roles, turns)
        layer, head = np.nonzero(roles == FOLLOW)
        return float(
            self.follow[_leads(roles)[layer, head], layer, head].sum() + self.window[roles == WINDOW].sum()
        )

    def _pair(self, less: list[Move], more: list[Move]) -> list[Move]:
        """The best move that saves less with the best one that saves as much more, the second best with the second, …
        while a gain is expected."""
        pairs, left = [], list(more)
        for move in less:
            own = self._touched(move.turns)
            other = next((m for m in left if not own & self._touched(m.turns)), None)
            if other is None or move.gain + other.gain >= 0:
                continue
            left.remove(other)
            pairs.append(Move(move.turns | other.turns, move.gain + other.gain))
        return pairs

    def _disjoint(self, items: list[Move]) -> list[Move]:
        """Those of negative gain that touch no block twice, best first."""
        used: set[tuple[int, int]] = set()
        chosen = []
        for item in items:
            touched = self._touched(item.turns)
            if item.gain < 0 and not touched & used:
                used |= touched
                chosen.append(item)
        return chosen

    def _touched(self, turns: frozenset[Turn]) -> set[tuple[int, int]]:
        """Blocks, by (lead, head), that these turns change, before and after; -1 and less = a window of layer -1 - x."""
        before, after = (_with_windows(roles) for roles in (self.roles, _turned(self.roles, turns)))
        changed = np.argwhere(before != after)
        return {(int(lead[layer, head]), int(head)) for layer, head in changed for lead in (before, after)}

    def _loss(self, turns: frozenset[Turn]) -> float:
        plan = replace(self.start, lead=lead_of_roles(_turned(self.roles, turns)))
        key = plan_key(plan)
        if self.left == 0:
            raise _Budget
        self.left -= 1
        if key not in self.log.losses:
            self.log.add(key, self.measure(plan))
        return self.log.losses[key]

    def _keep(self) -> None:
        keep = getattr(self.measure, "keep", None)
        if keep is not None:
            keep(replace(self.start, lead=lead_of_roles(self.roles)))


def plan_key(plan: SharingPlan) -> str:
    """Names a plan in a log of losses: its leads, its bits if it packs, and its order of heads if it has one."""
    key = json.dumps(plan.lead) + (f" {json.dumps(plan.bits)}" if plan.packs else "")
    if plan.head_order is None:
        return key
    return f"{key} {hashlib.sha256(json.dumps(plan.head_order).encode()).hexdigest()[:16]}"


def roles_of_plan(plan: SharingPlan) -> RoleTable:
    """The role of every (layer, KV head) of a plan."""
    roles = np.full((plan.num_layers, plan.num_key_value_heads), LEAD, dtype=np.int8)
    for layer, row in enumerate(roles):
        own = roles_of(plan.lead, layer)
        row[list(own.followers)], row[list(own.windows)] = FOLLOW, WINDOW
    return roles


def lead_of_roles(roles: RoleTable) -> Lead:
    """What a plan with these roles says about every (layer, KV head)."""
    leads = _leads(roles)
    rows = zip(roles.tolist(), leads.tolist(), strict=True)
    return tuple(
        tuple(None if role == WINDOW else lead for role, lead in zip(*row, strict=True)) for row in rows
    )


def _leads(roles: RoleTable) -> NDArray[np.int64]:
    """The lead that each KV head has had last ``[L, H]``, -1 = none so far."""
    layers = np.where(roles == LEAD, np.arange(len(roles))[:, None], -1)
    return np.maximum.accumulate(layers, axis=0)


def _with_windows(roles: RoleTable) -> NDArray[np.int64]:
    return np.where(roles == WINDOW, -1 - np.arange(len(roles))[:, None], _leads(roles))


def is_plan(roles: RoleTable) -> bool:
    """Whether every follower has a lead."""
    return not ((roles == FOLLOW) & (_leads(roles) < 0)).any()


def possible_moves(
    roles: RoleTable, has_followers: bool = True, has_windows: bool = True
) -> dict[str, list[frozenset[Turn]]]:
    """All single moves that lead to a plan, by kind.

    Splits and merges change the saving by a follower's, opens and closes by a window's; a shift moves the boundary of two blocks
    by one layer and keeps it.
    """
    moves: dict[str, list[frozenset[Turn]]] = {
        "splits": [], "merges": [], "shifts": [], "opens": [], "closes": []
    }  # fmt: skip
    for layer, head in np.ndindex(*roles.shape):
        role = roles[layer, head]
        if role == FOLLOW:
            moves["splits"].append(frozenset({(layer, head, LEAD)}))
        elif role == WINDOW:
            moves["opens"].append(frozenset({(layer, head, LEAD)}))
        else:
            moves["merges"] += [frozenset({(layer, head, FOLLOW)})] if has_followers else []
            moves["closes"] += [frozenset({(layer, head, WINDOW)})] if has_windows else []
        above = next((x for x in range(layer + 1, len(roles)) if roles[x, head] != WINDOW), None)
        if above is not None and {int(role), int(roles[above, head])} == {LEAD, FOLLOW}:
            turned = (layer, head, int(roles[above, head])), (above, head, int(role))
            moves["shifts"].append(frozenset(turned))
    return {kind: [x for x in group if is_plan(_turned(roles, x))] for kind, group in moves.items()}


def _turned(roles: RoleTable, turns: frozenset[Turn]) -> RoleTable:
    roles = roles.copy()
    for layer, head, role in turns:
        roles[layer, head] = role
    return roles


def _by_gain(move: Move) -> tuple[float, list[Turn]]:
    return move.gain, sorted(move.turns)
