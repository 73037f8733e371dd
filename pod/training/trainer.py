"""The training loop: ZeRO, sequence parallelism, token-weighted loss, exact resume.

The loss of an optimizer step is the sum over all its labels (all ranks, all micro-batches) divided by their number,
so that it equals one process whatever the split: a rank's sum is divided by the global number of labels and
multiplied by the number of ranks, over which ZeRO averages gradients.
"""

import contextlib
import math
from pathlib import Path
from typing import Any

import torch

from pod.files import write_json
from pod.modeling.sharing import SharingPlan
from pod.training.args import TrainArgs
from pod.training.batches import StepBatches
from pod.training.checkpoint import (
    Checkpointer,
    TrainState,
    check_identity,
    identity_of,
    latest_checkpoint,
    read_state,
)
from pod.training.engine import deepspeed_config, drop_carry_hooks, save_activations
from pod.training.estimate import checkpoint_bytes
from pod.training.guard import Guard
from pod.training.lora import add_lora, lora_settings
from pod.training.loss import LanguageModelLoss
from pod.training.mesh import Mesh
from pod.training.metrics import Monitor
from pod.training.observers import Observer
from pod.training.optim import learning_rate, make_optimizer
from pod.training.progressive import PlanSchedule
from pod.training.run_control import RunControl
from pod.training.ulysses import Ulysses

IGNORED_LABEL = -100


class Trainer:
    """One training run on all ranks of a mesh.

    Args:
        args: section `train` of the recipe.
        model: a PodForCausalLM with its plan, fp32, the same on every rank.
        dataset: packed rows.
        mesh: the ranks.
        folder: <output_dir>/train.
        seed: of the row order and of dropout.
        config: the resolved recipe, stored in checkpoints.
        schedule: the plan of every step; None = the model's own plan in all of them.
        observers: what looks at the model between steps (gates, evaluation, samples).

    Raises:
        ValueError: anything that cannot work, before the first step.
    """

    def __init__(
        self,
        args: TrainArgs,
        model: Any,
        dataset: Any,
        mesh: Mesh,
        folder: Path,
        seed: int = 0,
        config: dict[str, Any] | None = None,
        schedule: PlanSchedule | None = None,
        observers: list[Observer] | None = None,
    ):
        self.args, self.mesh, self.folder, self.dataset = args, mesh, Path(folder), dataset
        self.plan: SharingPlan = model.config.sharing_plan
        self.schedule = schedule or PlanSchedule([(0, self.plan)])
        self.observers = observers or []
        self.guard = Guard(args)
        self.control = RunControl(args, mesh, self.folder)
        self.lora = lora_settings(args) if args.method == "lora" else None
        method = {"method": args.method, **(self.lora or {})}
        self.identity = identity_of(model, self.plan, dataset.manifest, method, args.dtype)
        self.state = TrainState(
            world_size=mesh.world_size,
            identity=self.identity,
            config=config or {},
            lora=self.lora,
            tied_embeddings=bool(model.config.tie_word_embeddings),
        )
        self.resume_from = self._checkpoint_to_resume()
        self.cursor = dataset.cursor(seed)
        torch.manual_seed(seed + mesh.rank)
        self.causal_model: Any = model
        self.ulysses = self._attach_ulysses(model)
        self._start_engine(model)
        mine = self.ulysses.slice if self.ulysses else slice(None)
        self.batches = StepBatches(args, dataset, self.cursor, mesh, mine)

    def _checkpoint_to_resume(self) -> Path | None:
        checkpoint = latest_checkpoint(self.folder)
        if checkpoint is None:
            return None
        if self.args.resume == "never":
            raise ValueError(
                f"{self.folder} already holds checkpoints: set train.resume=auto to continue, or another output_dir"
            )
        check_identity(read_state(checkpoint), self.identity, self.mesh.world_size, checkpoint)
        return checkpoint

    def _attach_ulysses(self, model: Any) -> Ulysses | None:
        if self.mesh.sp_group is None:
            return None
        config = model.config
        ulysses = Ulysses(
            self.plan.lead,
            config.num_attention_heads,
            config.num_key_value_heads,
            self.mesh.sp_group,
            self.dataset.context_length,
        )
        model.model.sequence_parallel = ulysses
        return ulysses

    def _start_engine(self, model: Any) -> None:
        import deepspeed

        save_activations(model, self.args, self.dataset.context_length)
        trained = add_lora(model, self.lora) if self.lora else model.requires_grad_(True)
        module = LanguageModelLoss(trained, self.args.loss_chunk_mib).train()
        needed = checkpoint_bytes(module, self.args.dtype)
        settings = deepspeed_config(self.args)
        assert settings["zero_optimization"]["reduce_scatter"], (
            "without it gradients are averaged over world / sp"
        )
        self.engine: Any
        self.engine, *_ = deepspeed.initialize(
            model=module, optimizer=make_optimizer(module, self.args), config=settings, mpu=self.mesh.mpu
        )
        drop_carry_hooks(model)
        self.checkpointer = Checkpointer(
            self.folder, self.engine, self.args.keep_last, needed, self._describe, self.mesh.device
        )
        if self.resume_from is not None:
            self.state = read_state(self.resume_from)
            self.checkpointer.load(self.resume_from, self.state)
            self._restore_position()

    def _restore_position(self) -> None:
        """Data and guard stand where the state says."""
        self.cursor.load_state_dict(self.state.cursor)
        if self.state.guard:
            self.guard.load_state_dict(self.state.guard)

    def _describe(self, folder: Path) -> None:
        """What export needs besides weights: configurations and plan."""
        self.causal_model.config.save_pretrained(folder)
        generation_config = getattr(self.causal_model, "generation_config", None)
        if generation_config is not None:
            write_json(folder / "generation_config.json", generation_config.to_dict())
        self.plan.save(folder / "plan.json")

    @property
    def rows_per_step(self) -> int:
        """Rows of all ranks in one optimizer step."""
        return self.batches.rows_per_step

    def train(self) -> TrainState:
        """Run until `max_steps`, `max_hours` or a signal; saves at the end either way.

        Raises:
            RuntimeError: too many bad steps (`Guard.judge`).
            OSError: a checkpoint cannot be written.
        """
        tokens = self.rows_per_step * self.dataset.context_length
        enabled = self.mesh.rank == 0
        monitor = Monitor(self.folder, self.args, self.state.step, tokens, self.state.config, enabled)
        self.saved_at = self.state.step if self.resume_from else -1
        closing = [contextlib.closing(thing) for thing in (monitor, self.batches, self.checkpointer)]
        with self.control.watching(), closing[0], closing[1], closing[2]:
            while self.state.step < self.args.max_steps:
                self._use_plan(self.schedule.plan_at(self.state.step))
                values = self.step()
                verdict = self._judge(values, monitor)
                for observer in self.observers:
                    values |= observer.observe(self, self.state.step)
                monitor.step(self.state.step, values)
                reason = self.control.should_stop(self.state.step)
                every = self.args.save_every_steps
                if verdict == "rewind":
                    self._rewind(monitor)
                elif reason or (every and self.state.step % every == 0):
                    self._save()
                if reason:
                    self.checkpointer.wait()
                    monitor.note(f"{reason} after step {self.state.step}; the checkpoint is complete")
                    return self.state
            if self.saved_at != self.state.step:
                self._save()
            self.checkpointer.wait()
        return self.state

    def _save(self) -> None:
        self.control.alive("save")
        self.checkpointer.save(self.state)
        self.saved_at = self.state.step

    def _rewind(self, monitor: Monitor) -> None:
        """Weights, optimizer and step of the last checkpoint; data goes on behind the bad step."""
        raise NotImplementedError

    def _use_plan(self, plan: SharingPlan) -> None:
        """Share as `plan` says from the next step on."""
        if plan.lead != self.causal_model.model.lead:
            raise NotImplementedError

    def step(self) -> dict[str, float]:
        """One optimizer step over the next rows; returns loss, learning rate, gradient norm and counts."""
        self.control.alive("data")
        batches = self.batches.next()
        num_labels, data_wait = self._agree_on_data(batches)
        rate = learning_rate(self.state.step, self.args)
        for group in self.engine.optimizer.param_groups:
            group["lr"] = rate
        (total,) = self.mesh.sum([sum(self._accumulate(batch, num_labels) for batch in batches)])
        skipped = bool(getattr(self.engine.optimizer, "overflow", False))
        self.state.step += 1
        self.state.cursor = self.cursor.state_dict()
        values = {"learning_rate": rate, "labels": num_labels, "skipped": float(skipped)}
        values["data_wait_s"] = data_wait
        loss, norm = total / max(num_labels, 1.0), _as_float(self.engine.get_global_grad_norm())
        if math.isfinite(loss):
            values["loss"] = loss
        if not skipped and norm is not None:
            values["grad_norm"] = norm
        return values

    def _accumulate(self, batch: dict[str, torch.Tensor], num_labels: float) -> float:
        """Forward, backward and (on the last micro-batch) update; returns this rank's sum of losses."""
        self.engine.train()
        summed = self.engine(**batch)
        # ZeRO-3 with reduce_scatter averages over all ranks; accumulation sums here, so its division is off.
        scaled = summed * (self.mesh.world_size / max(num_labels, 1.0))
        if not torch.isfinite(scaled):
            scaled = (
                scaled * math.nan
            )  # an infinite loss can have finite gradients: make the engine skip this step
        self.engine.backward(scaled, scale_wrt_gas=False)
        self.engine.step()
        return float(summed.detach())

    def _agree_on_data(self, batches: list[dict[str, torch.Tensor]]) -> tuple[float, float]:
        """Labels of the step over all ranks, and the seconds that the slowest of them waited for its rows."""
        labels = float(sum((batch["labels"] != IGNORED_LABEL).sum() for batch in batches))
        waits = [0.0] * self.mesh.world_size
        waits[self.mesh.rank] = self.batches.waited_s  # one sum brings both: all others leave this place at 0
        total, *waits = self.mesh.sum([labels, *waits])
        return total, max(waits)

    def _judge(self, values: dict[str, float], monitor: Monitor) -> str:
        """The guard's verdict on the step that was just made; noted on the screen when it is bad."""
        if values["skipped"]:
            monitor.note(f"step {self.state.step} skipped: the loss or a gradient was NaN or infinite")
        verdict = self.guard.judge(self.state.step, values.get("loss", math.nan), bool(values["skipped"]))
        self.state.guard = self.guard.state_dict()
        return verdict


def _as_float(value: Any) -> float | None:
    return None if value is None else float(value)
