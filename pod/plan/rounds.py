"""Measure the windows of a plan under the plan itself, and exchange those that others beat there.

The costs of `costs.py` are measured near the dense model. A plan with windows in most heads is far from it:
what a head is for then depends on the heads that are left. So the divergence from the dense model is measured
again, where the heads of the plan have their windows. Its derivative for one head's step from lead to window
is the *slope* of that head. It has the same two parts as the costs: text, and answers of prompts that ask for
a number far back (``needles.py``).

The cost ``a' M a + c' a`` of windows a (1 = window) keeps the pairs ``M`` of the costs, and gets the ``c``
with which its slopes at the plan are the measured ones (`corrected`). One round exchanges windows for leads
by this cost, at most a third of them, since it fits near the plan only. The new plan is measured in its turn,
and taken if it diverges less. If not, half as many exchanges are tried, and so on.

Example: SmolLM2-135M, windows of 16 + 240 in 68 of 90 heads. The first plan has 0.0274 nats per token on text
and 0.043 per token of answers. After one round of seven exchanges it has 0.0193 and 0.016. On other texts
0.0345 became 0.0219.
"""

import shutil
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from pod.modeling.model.llama import PodForCausalLM
from pod.modeling.model.sharing import SharingPlan
from pod.modeling.model.sinks import Sink
from pod.plan.costs import MAX_COST, total_costs
from pod.plan.divergence import dense_states, measure_under
from pod.plan.exploration import Exploration, at_granularity
from pod.plan.measured_costs import MeasuredCosts, measure_mean, needle_prompts_of
from pod.plan.needles import Prompt
from pod.plan.solve import Floats
from pod.plan.together import Bools, exchanged, has_windows, in_order
from pod.training.checkpoint.run_identity import sha256_of

MOST_TEXTS = 8
"""Most texts of a round. The divergence is a sum over whole distributions, so few texts are enough."""
EXCHANGED = 3
"""A round exchanges at most one of so many windows, or leads where there are fewer."""


class Measured(NamedTuple):
    """What was found of windows in some heads.

    Attributes:
        text: divergence from the dense model, in nats per token.
        retrieval: the same per token of the answers of prompts.
        cost: text + explore.retrieval_weight x retrieval.
        slopes: ``[L, H]``, the derivative of ``cost`` for each head's step to its window; None = not
            measured.
    """

    text: float
    retrieval: float
    cost: float
    slopes: Floats | None

    def as_json(self, exchanged: int) -> dict[str, float]:
        """The divergences, with the number of windows that were exchanged before, for a plan's provenance."""
        return {"text": self.text, "retrieval": self.retrieval, "exchanged": exchanged}


class Improved(NamedTuple):
    """A plan after some rounds.

    Attributes:
        plan: with as many windows as before, in other heads.
        rounds: for JSON: what was measured under the first plan, and after each round that lowered it.
    """

    plan: SharingPlan
    rounds: list[dict[str, float]]


def improve(
    exploration: Exploration,
    costs: MeasuredCosts,
    plan: SharingPlan,
    kv_order: Sequence[Sequence[int]] | None = None,
    lead4: Floats | None = None,
) -> Improved:
    """Exchange windows of a plan for leads, in explore.rounds rounds. All ranks call this together.

    Args:
        plan: at explore.granularity; a plan of whole layers has one role per row.
        kv_order: ``[L][H]``, the head of the model that stands at each place of the plan; None = the same.
        lead4: ``[L, H]``, cost of a lead in a layer of 4 bits; None = no layer has 4 bits.

    Raises:
        ValueError: the texts do not fit, or the model gives NaN or infinite values.
    """
    explore = exploration.explore
    most = max(1, min(plan.num_windows, plan.num_leads) // EXCHANGED)
    if not explore.rounds or not plan.num_windows or not plan.num_leads:
        return Improved(plan, [])
    pairs = total_costs(costs.tensors, retrieval_weight=0.0)
    windows = in_order(at_granularity(explore, pairs)["windows"], kv_order)
    bench = _Bench.of(exploration, costs, kv_order)
    best, found = plan, bench.measure(plan, with_slopes=True)
    rounds = [found.as_json(exchanged=0)]
    for number in range(explore.rounds):
        if number:
            found = bench.measure(best, with_slopes=True)
        assert found.slopes is not None, "slopes of the best plan so far"
        cost = corrected(windows, has_windows(best), found.slopes)
        after = _best_step(bench, best, found, partial(exchanged, best, cost, lead4=lead4), most)
        if after is None:
            break
        rounds.append(after.found.as_json(exchanges(best, after.plan)))
        best = after.plan
    bench.forget()
    return Improved(best, rounds)


class _Step(NamedTuple):
    """A plan that was measured."""

    plan: SharingPlan
    found: Measured


def _best_step(bench: "_Bench", start: SharingPlan, found: Measured, step: Any, most: int) -> _Step | None:
    """The first plan that diverges less: after the most exchanges, or half as many, and so on. None = none.

    Args:
        start: a plan, whose measurement is ``found``.
        step: a function of the most exchanges → the plan after them.
    """
    known = {start.lead}
    while most:
        plan = step(most=most)
        if plan.lead not in known:
            known.add(plan.lead)
            measured = bench.measure(plan, with_slopes=False)
            if measured.cost < found.cost:
                return _Step(plan, measured)
            most = exchanges(start, plan)  # it may be fewer
        most //= 2
    return None


def exchanges(before: SharingPlan, after: SharingPlan) -> int:
    """How many windows of a plan are leads in the other."""
    return int((has_windows(before) & ~has_windows(after)).sum())


def corrected(windows: Floats, chosen: Bools, slopes: Floats) -> Floats:
    """The cost of windows ``[L, H, L, H]`` whose derivative at the chosen windows is ``slopes``.

    Only the entries of single heads change. Example: one head, whose window costs 0.2. The cost is
    ``0.2 a²``, with the slope 0.4 at a = 1. If 0.5 is measured, the new entry is 0.2 + 0.1.

    Args:
        windows: ``[L, H, L, H]``, cost of pairs of windows.
        chosen: ``[L, H]``, where the slopes were measured.
        slopes: ``[L, H]``.
    """
    flat = windows.reshape(chosen.size, -1)
    linear = slopes.ravel() - 2 * flat @ chosen.ravel().astype(float)
    return (flat + np.diag(linear)).reshape(windows.shape)


class _Bench:
    """What windows are measured on, and in which order of heads.

    Attributes:
        exploration: what is explored.
        model: dense, in its own order of heads.
        texts, prompts: what is read.
        sinks: constants that join each planned layer's windows; None = windows have none.
        kv_order: see `improve`.
        dense: final hidden states of the dense model, by the identity of a text or prompt; they are kept for
            the next measurement.
    """

    def __init__(
        self,
        exploration: Exploration,
        model: PodForCausalLM,
        sinks: Sequence[Sink] | None,
        kv_order: Sequence[Sequence[int]] | None,
    ):
        self.exploration, self.model, self.sinks, self.kv_order = exploration, model, sinks, kv_order
        sequences = exploration.read()
        self.texts = sequences[:MOST_TEXTS]
        self.prompts = needle_prompts_of(exploration, model.config, sequences)
        self.dense: dict[int, Tensor] = {}

    @classmethod
    def of(
        cls, exploration: Exploration, costs: MeasuredCosts, kv_order: Sequence[Sequence[int]] | None
    ) -> "_Bench":
        """The bench of an exploration with these costs."""
        sinks = None
        if "sink_logits" in costs.tensors:
            pairs = zip(costs.tensors["sink_logits"], costs.tensors["sink_values"], strict=True)
            sinks = [Sink(*pair) for pair in pairs]
        return cls(exploration, exploration.load_model(), sinks, kv_order)

    def measure(self, plan: SharingPlan, with_slopes: bool) -> Measured:
        """Measure the windows of a plan; heads that follow are read as dense ones."""
        windows = self._of_model(has_windows(plan))
        measure = partial(self._measure_one, torch.from_numpy(windows).float(), with_slopes)
        size = 1 + with_slopes * windows.size
        found = {
            kind: measure_mean(measure, (size,), texts, self._folder(windows, with_slopes) / f"round, {kind}")
            for kind, texts in (("text", self.texts), ("retrieval", self.prompts))
            if texts
        }
        zero = torch.zeros(size, dtype=torch.float64)
        text, retrieval = found["text"], found.get("retrieval", zero)
        cost = (text + self.exploration.explore.retrieval_weight * retrieval).numpy()
        slopes = self._of_plan(cost[1:].reshape(windows.shape), plan) if with_slopes else None
        return Measured(text[0].item(), retrieval[0].item(), float(cost[0]), slopes)

    def forget(self) -> None:
        """Delete what was kept in case of an interruption."""
        if not dist.is_initialized() or dist.get_rank() == 0:
            for folder in self.exploration.folder.glob("rounds.partial-*"):
                shutil.rmtree(folder, ignore_errors=True)

    def _measure_one(self, windows: Tensor, with_slopes: bool, text: Tensor | Prompt) -> Tensor:
        """The divergence of one text or prompt ``[1]``, with the slopes behind it where they are wanted."""
        is_prompt = isinstance(text, Prompt)
        input_ids, at = text if isinstance(text, Prompt) else (text, torch.arange(len(text)))
        if id(text) not in self.dense:
            self.dense[id(text)] = dense_states(self.model, input_ids, at)
        dense = self.dense[id(text)]
        found, slopes = measure_under(self.model, input_ids, at, windows, self.sinks, with_slopes, dense)
        if slopes is None:
            return torch.tensor([found], dtype=torch.float64)
        slopes = slopes.clamp(-MAX_COST, MAX_COST)
        if is_prompt:  # where a window would help on one prompt, it does not pay for another prompt
            slopes = torch.where(windows > 0, slopes, slopes.clamp_min(0.0))
        return torch.cat([torch.tensor([found], dtype=torch.float64), slopes.flatten()])

    def _folder(self, windows: Bools, with_slopes: bool) -> Any:
        """Where measurements of these windows are kept in case of an interruption."""
        settings = [self.exploration.settings, self.exploration.windows, self.exploration.sinks]
        counts = [len(self.texts), len(self.prompts)]
        made = sha256_of([windows.tolist(), with_slopes, settings, counts])
        return self.exploration.folder / f"rounds.partial-{made[:8]}"

    def _of_model(self, windows: Bools) -> Bools:
        """Windows ``[L, H]`` in the model's order of heads, from those of the plan."""
        heads = self.model.config.num_key_value_heads
        if windows.shape[1] != heads:
            return np.repeat(windows, heads, axis=1)  # whole layers
        found = windows.copy()
        for layer, order in enumerate(self.kv_order or ()):
            found[layer, list(order)] = windows[layer]
        return found

    def _of_plan(self, slopes: Floats, plan: SharingPlan) -> Floats:
        """Slopes of the model's heads in the plan's order of heads, or of its layers."""
        if plan.num_key_value_heads != slopes.shape[1]:
            return slopes.sum(1, keepdims=True)
        found = slopes.copy()
        for layer, order in enumerate(self.kv_order or ()):
            found[layer] = slopes[layer, list(order)]
        return found
