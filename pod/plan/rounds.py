"""Measure the windows of a plan where the plan has them, and exchange those that others beat there.

The costs of `costs.py` are measured near the dense model. A plan with windows in most heads is far from it:
what a head is for then depends on the heads that are left. So the divergence from the dense model is measured
again, in a model in which the heads of the plan have their windows. Its derivative for one head's step from
lead to window is the *slope* of that head. It has the same two parts as the costs: text, and answers of
prompts that ask for a number far back (``needles.py``). A head that leads gets no credit for a prompt on
which a window would help: there its slope is cut at 0.

Costs on prompts are found where every head is half a window. They rank heads, and are too large near a plan.
So the plan is first measured beside two others, whose windows are chosen as if prompts weighed a fourth and a
sixteenth of that (`LIGHTER`). The best of the three goes on. Example: Qwen2.5-Coder-0.5B, windows in 26 of 48
heads, prompts weigh 4. The costs choose a plan with 0.0453 nats on texts and 0.0133 on prompts. With lighter
costs it has 0.0224 and 0.0110.

Windows ``a`` (1 = window) cost ``a' M a + c' a``. ``M`` are the pairs of the costs on text, and the costs of
single heads on prompts, made to fit the plan (`scaled`). ``c`` is such that the slopes at the plan are the
measured ones (`corrected`). One round exchanges windows for leads by this cost, at most a third of the
windows, or of the leads where there are fewer, since the cost fits near the plan only. The new plan is
measured in its turn, and taken if it diverges less. If not, half as many exchanges are tried, and so on; then
the same without the costs on prompts in ``M``.

Only windows are measured. Heads that follow are read as dense ones, and no layer is packed. Where layers may
be packed, the costs of their leads count beside what is measured.

Example: SmolLM2-135M, windows of 128 in 51 of 90 heads, retrieval weighs 16. The first plan has 0.0371 nats
per token on text and 0.0244 per token of answers. After one round of four exchanges it has 0.0263 and 0.0158.
"""

import shutil
from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from pod.modeling.model.llama import PodForCausalLM
from pod.modeling.model.sharing import SharingPlan
from pod.plan.costs import MAX_COST, total_costs
from pod.plan.divergence import measure_under
from pod.plan.exploration import ROUND_SEQUENCES, Exploration, at_granularity
from pod.plan.layer_constants import TENSORS, measured_constants
from pod.plan.measured_costs import MeasuredCosts, measure_mean, needle_prompts_of
from pod.plan.needles import Prompt
from pod.plan.solve import Floats
from pod.plan.together import Bools, changeable, cost_of_leads, exchanged, has_windows, in_order, rechosen
from pod.training.checkpoint.run_identity import sha256_of
from pod.training.run.mesh import from_rank_0

EXCHANGED = 3
"""A round exchanges at most one of so many windows, or leads where there are fewer."""
LIGHTER = (1 / 4, 1 / 16)
"""Shares of the costs on prompts with which windows are chosen again, before the first round."""
LEAST_SHARE = 0.1
"""Costs on prompts are scaled by this at least, so that heads which retrieve keep a price in a good plan."""
LEAST_GAIN = 1e-3
"""A plan is taken if it costs less by this share: more than what rounding on another machine changes."""


class Measured(NamedTuple):
    """What was found of windows in some heads.

    Attributes:
        text: divergence from the dense model, in nats per token.
        retrieval: the same per token of the answers of prompts; None = there are no prompts.
        cost: text + explore.retrieval_weight x retrieval + the costs of leads in layers of 4 bits.
        slopes: ``[L, H]``, the derivative of the first two for each head's step to its window. On a prompt,
            that of a head that leads is cut at 0. None = not measured.
    """

    text: float
    retrieval: float | None
    cost: float
    slopes: Floats | None

    def as_json(self, exchanged: int) -> dict[str, float | None]:
        """The divergences, with the number of windows that were exchanged before, for a plan's provenance."""
        return {"text": self.text, "retrieval": self.retrieval, "exchanged": exchanged}


class Improved(NamedTuple):
    """A plan after some rounds.

    Attributes:
        plan: with as many windows as before, in other heads.
        rounds: for JSON: what was measured under the first plan, under a better start if there is one, and
            after each round that lowered it. ``exchanged`` counts windows that the plan before did not have.
    """

    plan: SharingPlan
    rounds: list[dict[str, float | None]]


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
    most = min(changeable(plan))
    if not explore.rounds or not most:
        return Improved(plan, [])
    on_text, with_prompts = (
        in_order(at_granularity(explore, total_costs(costs.tensors, weight))["windows"], kv_order)
        for weight in (0.0, 1.0)
    )
    on_prompts = explore.retrieval_weight * (with_prompts - on_text)
    bench = _Bench(exploration, costs, kv_order, lead4)
    taken = _starts(bench, plan, on_text, on_prompts)
    for _ in range(explore.rounds):
        after = _after_round(bench, taken[-1].plan, on_text, on_prompts, max(1, most // EXCHANGED))
        if after is None:
            break
        taken.append(after)
    before = [plan, *(one.plan for one in taken)]
    rounds = [one.found.as_json(exchanges(was, one.plan)) for was, one in zip(before, taken, strict=False)]
    return Improved(taken[-1].plan, rounds)


class _Taken(NamedTuple):
    """A plan that was measured."""

    plan: SharingPlan
    found: Measured

    def costs_less_than(self, other: Measured) -> bool:
        return self.found.cost < other.cost * (1 - LEAST_GAIN)


def _starts(bench: "_Bench", plan: SharingPlan, on_text: Floats, on_prompts: Floats) -> list[_Taken]:
    """The plan, measured, and behind it the best one by lighter costs on prompts, if that costs less.

    Args:
        on_text, on_prompts: costs of pairs of windows ``[L, H, L, H]``.
    """
    others: list[SharingPlan] = []
    for share in LIGHTER if on_prompts.any() else ():
        windows = on_text + share * on_prompts
        other, _ = from_rank_0(partial(rechosen, plan, 0.0, windows, bench.lead4))
        if other.lead not in [plan.lead, *(one.lead for one in others)]:
            others.append(other)
    # A plan that stands alone gets its slopes at once. Otherwise only the best plan needs them.
    first = _Taken(plan, bench.measure(plan, with_slopes=not others))
    tried = [_Taken(other, bench.measure(other, with_slopes=False)) for other in others]
    best = min(tried, key=lambda one: one.found.cost, default=first)
    return [first, best] if best.costs_less_than(first.found) else [first]


def _after_round(
    bench: "_Bench", start: SharingPlan, on_text: Floats, on_prompts: Floats, most: int
) -> _Taken | None:
    """A plan that costs less than ``start``, after at most so many exchanges. None = none was found."""
    found = bench.measure(start, with_slopes=True)
    assert found.slopes is not None, "they are wanted"
    windows = has_windows(start)
    weighed = bench.exploration.explore.retrieval_weight * (found.retrieval or 0.0)
    near = on_text + scaled(on_prompts, windows, weighed)
    for of_pairs in [near, on_text] if on_prompts.any() else [on_text]:
        cost = corrected(of_pairs, windows, found.slopes)
        after = _first_better(bench, start, found, cost, most)
        if after is not None:
            return after
    return None


def _first_better(
    bench: "_Bench", start: SharingPlan, found: Measured, cost: Floats, most: int
) -> _Taken | None:
    """The first plan that costs less: after the most exchanges, or half as many, and so on. None = none.

    Args:
        start: a plan, whose measurement is ``found``.
        cost: of windows ``[L, H, L, H]``, by which they are exchanged.
    """
    known = {start.lead}
    while most:
        # Rank 0 decides, since ranks that compute otherwise would measure another plan.
        plan = from_rank_0(partial(exchanged, start, cost, most, bench.lead4))
        if plan.lead not in known:
            known.add(plan.lead)
            tried = _Taken(plan, bench.measure(plan, with_slopes=False))
            if tried.costs_less_than(found):
                return tried
            most = exchanges(start, plan)  # it may be fewer
        most //= 2
    return None


def exchanges(before: SharingPlan, after: SharingPlan) -> int:
    """How many windows of a plan are leads in the other."""
    return int((has_windows(before) & ~has_windows(after)).sum())


def scaled(windows: Floats, chosen: Bools, measured: float) -> Floats:
    """The costs of windows on prompts, such that the chosen windows cost what was measured of them together.

    The costs of `measure_retrieval` are found where every head is half a window. They say which heads
    retrieve, but near a plan that keeps these heads they are too large. With all of them, no exchange pays.
    Without them, an exchange may take a head that is needed: while it leads, its slope is small.

    Example: SmolLM2-135M, 51 windows whose costs add up to 0.076 nats. Measured are 0.024, so the costs are
    multiplied by 0.32. Four exchanges then bring texts from 0.037 to 0.026 and prompts from 0.024 to 0.016.
    Without these costs, twelve and six exchanges bring prompts to 0.31 and 0.27.

    Args:
        windows: ``[L, H, L, H]``, cost of pairs of windows.
        chosen: ``[L, H]``, the windows of the plan.
        measured: what they cost together.

    Returns:
        ``[L, H, L, H]``, from `LEAST_SHARE` of ``windows`` to all of it.
    """
    flat = chosen.ravel().astype(float)
    together = float(flat @ windows.reshape(chosen.size, -1) @ flat)
    if together <= 0:
        return np.zeros_like(windows)
    return windows * min(1.0, max(LEAST_SHARE, measured / together))


def corrected(windows: Floats, chosen: Bools, slopes: Floats) -> Floats:
    """The cost of windows ``[L, H, L, H]`` whose derivative at the chosen windows is ``slopes``.

    A window is 1 and a lead 0, so an entry ``[a, a]`` may hold what is quadratic and what is linear.

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
    """What windows are measured on, and in which order of heads. The model is loaded when it is needed.

    Attributes:
        exploration: what is explored.
        costs: of the roles, which also have the constant sinks.
        kv_order, lead4: see `improve`.
    """

    def __init__(
        self,
        exploration: Exploration,
        costs: MeasuredCosts,
        kv_order: Sequence[Sequence[int]] | None = None,
        lead4: Floats | None = None,
    ):
        self.exploration, self.costs, self.kv_order, self.lead4 = exploration, costs, kv_order, lead4
        self.sinks = measured_constants(costs.tensors)

    @cached_property
    def model(self) -> PodForCausalLM:
        """Dense, in its own order of heads."""
        return self.exploration.load_model()

    @cached_property
    def texts(self) -> dict[str, Sequence[Tensor | Prompt]]:
        """Texts and prompts, by what they measure."""
        sequences = self.exploration.read()
        prompts = needle_prompts_of(self.exploration, self.model.config, sequences)
        if not self.exploration.explore.retrieval_weight:
            prompts = []
        return {"text": sequences[:ROUND_SEQUENCES], "retrieval": prompts}

    def measure(self, plan: SharingPlan, with_slopes: bool) -> Measured:
        """Measure the windows of a plan, or read what was measured of them before.

        What is found is kept in a file of its own, so the same command gives the same plan again.
        """
        windows = self._of_model(has_windows(plan))
        path = self._path(windows, with_slopes)
        kept = [path, self._path(windows, with_slopes=True)]  # with slopes, the divergence comes first too
        found = from_rank_0(lambda: next((MeasuredCosts.load(one) for one in kept if one.exists()), None))
        if found is None:
            found = self._measured(windows, with_slopes, path.with_suffix(".partial"))
            if not dist.is_initialized() or dist.get_rank() == 0:
                found.save(path)
                shutil.rmtree(path.with_suffix(".partial"), ignore_errors=True)
        text, retrieval = found.tensors["text"], found.tensors.get("retrieval")
        cost = text.clone()
        if retrieval is not None:
            cost += self.exploration.explore.retrieval_weight * retrieval
        slopes = None
        if with_slopes:
            slopes = self._of_plan(cost[1:].view(*windows.shape).numpy(), plan)
        of_answers = None if retrieval is None else retrieval[0].item()
        total = cost[0].item() + cost_of_leads(plan, self.lead4)
        return Measured(text[0].item(), of_answers, total, slopes)

    def _path(self, windows: Bools, with_slopes: bool) -> Path:
        """The file of what is measured of these windows: another one for another model, text or sinks."""
        explore = self.exploration.explore
        names = [name for name in TENSORS if name in self.costs.tensors]
        made = sha256_of(
            [
                self.costs.provenance,
                [self.costs.tensors[name].tolist() for name in names],
                [explore.retrieval_sequences, bool(explore.retrieval_weight), ROUND_SEQUENCES],
                [windows.tolist(), with_slopes],
            ]
        )
        return self.exploration.folder / "rounds" / f"{made[:16]}.safetensors"

    def _measured(self, windows: Bools, with_slopes: bool, partial_folder: Path) -> MeasuredCosts:
        """Measure windows ``[L, H]`` in the model's order: the divergence, then the slopes, by kind of text.

        Args:
            partial_folder: for what is measured of single texts.
        """
        measure = partial(self._measure_one, torch.from_numpy(windows).float(), with_slopes)
        size = 1 + with_slopes * windows.size
        tensors = {
            kind: measure_mean(measure, (size,), texts, partial_folder / f"round, {kind}")
            for kind, texts in self.texts.items()
            if texts
        }
        return MeasuredCosts(tensors, self.costs.provenance)

    def _measure_one(self, windows: Tensor, with_slopes: bool, text: Tensor | Prompt) -> Tensor:
        """The divergence of one text or prompt ``[1]``, with the slopes behind it where they are wanted."""
        is_prompt = isinstance(text, Prompt)
        input_ids, at = text if isinstance(text, Prompt) else (text, torch.arange(len(text)))
        dense = self.exploration.dense.of(self.model, input_ids, at)
        found, slopes = measure_under(self.model, input_ids, at, windows, self.sinks, with_slopes, dense)
        value = torch.tensor([found], dtype=torch.float64)
        if slopes is None:
            return value
        slopes = slopes.clamp(-MAX_COST, MAX_COST)
        if is_prompt:  # where a window would help on one prompt, it does not pay for another prompt
            slopes = torch.where(windows > 0, slopes, slopes.clamp_min(0.0))
        return torch.cat([value, slopes.flatten()])

    def _of_model(self, windows: Bools) -> Bools:
        """Windows ``[L, H]`` in the model's order of heads, from those of the plan."""
        heads = self.costs.tensors["lead4"].shape[-1]
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
