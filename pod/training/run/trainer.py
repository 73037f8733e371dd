"""The training loop: what a rank reads, ZeRO, sequence parallelism, token-weighted loss, exact resume.

The loss of an optimizer step is the sum over all its labels (all ranks, all micro-batches), divided by their
number. It therefore equals the loss of one process, however the rows are split. To this end, a rank's sum is
divided by the global number of labels, and multiplied by the number of ranks over which ZeRO averages
gradients (`optimization.gradient_scale`).
"""

import contextlib
import math
import uuid
from pathlib import Path
from typing import Any

import torch

from pod.files import write_json
from pod.modeling.shipped.sharing import SharingPlan
from pod.training import deepspeed_bridge as bridge
from pod.training.args import TrainArgs
from pod.training.checkpoint.checkpoint_files import Checkpointer, random_states, set_random_states
from pod.training.checkpoint.newest import checkpoint_to_resume
from pod.training.checkpoint.run_identity import TrainState, changed_settings, identity_of
from pod.training.observe.metrics import Monitor, Values, peak_bytes
from pod.training.observe.validation import HeldOutEvaluation
from pod.training.run.activations import save_activations
from pod.training.run.fused_layers import fuse_layers
from pod.training.run.lora import add_lora, lora_settings
from pod.training.run.loss import LanguageModelLoss
from pod.training.run.loss_spikes import LossSpikeDetector
from pod.training.run.mesh import Mesh, from_rank_0
from pod.training.run.optimization import deepspeed_config, gradient_scale, learning_rate, make_optimizer
from pod.training.run.run_control import Interrupted, RunControl
from pod.training.run.start_weights import StartWeights
from pod.training.run.step_batches import StepBatches, rows_per_step
from pod.training.run.ulysses import Ulysses


class Trainer:
    """One training run on all ranks of a mesh.

    Args:
        args: section `train` of the recipe.
        model: a PodForCausalLM with its plan, the same on every rank. Its values are those of rank 0.
        dataset: packed rows.
        folder: <output_dir>/train.
        seed: of the row order and of dropout.
        config: the resolved recipe, which is stored in checkpoints.
        evaluation: is made every `eval_every_steps`, before the first step and at the last one.
        weights: values of a hollow model, opened; None = the model has its own.

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
        evaluation: HeldOutEvaluation | None = None,
        weights: StartWeights | None = None,
    ):
        self.args, self.mesh, self.folder, self.dataset = args, mesh, Path(folder), dataset
        self.plan: SharingPlan = model.config.sharing_plan
        self.evaluation, self.guard = evaluation, LossSpikeDetector(args)
        self.control = RunControl(args, mesh, self.folder)
        self.lora = lora_settings(args) if args.method == "lora" else None
        self.cursor = dataset.cursor(seed)
        torch.manual_seed(seed + mesh.rank)
        self.causal_model: Any = model
        self.ulysses: Ulysses | None = None
        if mesh.sp_group is not None:
            self.ulysses = Ulysses(model.config, mesh.sp_group, dataset.context_length)
            model.model.sequence_parallel = self.ulysses
        self.changed: list[str] = []
        self._start_engine(model, weights or StartWeights(model), config or {})
        mine = self.ulysses.slice if self.ulysses else slice(None)
        self.batches = StepBatches(args, dataset, self.cursor, mesh, mine)

    def _start_engine(self, model: Any, weights: StartWeights, config: dict[str, Any]) -> None:
        save_activations(model, self.args, self.dataset.context_length)
        fuses = {"auto": torch.cuda.is_available(), "compile": True, "none": False}
        if fuses[self.args.fused_layers]:
            fuse_layers(model)
        trained = add_lora(model, self.lora) if self.lora else model.requires_grad_(True)
        module = LanguageModelLoss(trained, self.args.loss_chunk_mib).train()
        settings = deepspeed_config(self.args)
        bridge.place_weights(module, weights, settings, getattr(torch, self.args.dtype), self.mesh.device)
        identity, self.resume_from = from_rank_0(lambda: self._look(weights))
        weights.close()
        tied = bool(model.config.tie_word_embeddings)
        run = uuid.uuid4().hex[:8]  # that of rank 0 is written
        self.state = TrainState(
            run=run, identity=identity, config=config, lora=self.lora, tied_embeddings=tied
        )
        optimizer = make_optimizer(module, self.args)
        self.engine: Any = bridge.start_engine(module, optimizer, settings, self.mesh.mpu)
        bridge.drop_carry_hooks(model)
        self.checkpointer = Checkpointer(self)
        if self.resume_from is not None:
            self.state = self.checkpointer.load(self.resume_from)
            self.changed, self.state.config = changed_settings(self.state.config, config), config
            self.cursor.load_state_dict(self.state.cursor)
            self.guard.load_state_dict(self.state.guard)

    def _look(self, weights: StartWeights) -> tuple[dict[str, Any], Path | None]:
        """The identity of the run's checkpoints, and the checkpoint that the run continues from."""
        args = self.args
        method = {"method": args.method, **(self.lora or {})}
        rows = (self.cursor.seed, rows_per_step(args, self.mesh))
        config, manifest = self.causal_model.config, self.dataset.manifest
        identity = identity_of(config, weights.samples, self.plan, manifest, method, args.dtype, rows)
        return identity, checkpoint_to_resume(self.folder, args.resume, identity)

    def describe(self, folder: Path) -> None:
        """Write what export needs besides weights: configurations and plan."""
        self.causal_model.config.save_pretrained(folder)
        write_json(folder / "generation_config.json", self.causal_model.generation_config.to_dict())
        self.plan.save(folder / "plan.json")

    def train(self) -> TrainState:
        """Run until `max_steps`, `max_hours` or a signal, and save at the end in each case.

        Raises:
            RuntimeError: too many bad steps (`LossSpikeDetector.judge`).
            OSError: a checkpoint cannot be written.
        """
        self.monitor = Monitor.of(self)
        self.saved_at = self.started_at = self.state.step if self.resume_from else -1
        closing = [contextlib.closing(thing) for thing in (self.monitor, self.batches, self.checkpointer)]
        with self.control.watching(), closing[0], closing[1], closing[2]:
            if self.state.step == 0 or self.state.owes_evaluation:
                self.monitor.values(self.state.step, self.observe())
            if self.changed:
                self.monitor.note(f"continues at step {self.state.step} with {', '.join(self.changed)}")
            reason = "stopped by a signal" if self.control.interrupted() else None
            while reason is None and self.state.step < self.args.max_steps:
                reason = self._train_step()
            self._save()
            self.checkpointer.wait()
            if reason is not None:
                self.monitor.note(reason)
        return self.state

    def _train_step(self) -> str | None:
        """Make a step and what follows it. Returns why the run ends before `max_steps`; None = it goes on."""
        try:
            values = self.step()
        except Interrupted:
            # The step before is kept. This one begins again when the run is resumed.
            set_random_states(self.random_states)
            return f"stopped by a signal in step {self.state.step + 1}, which is undone"
        verdict = self._judge(values)
        self.monitor.step(self.state.step, values | self.observe())
        if verdict == "rewind":
            self._rewind()
        self.checkpointer.poll()
        reason = self.control.should_stop(self.state.step)
        every = self.args.save_every_steps
        if self.control.save_due or (every and self.state.step % every == 0):
            self._save()
        return reason and f"{reason} after step {self.state.step}; the checkpoint is complete"

    def observe(self) -> Values:
        """More metrics of this step: memory of the fullest rank, and the evaluation."""
        values, step = {}, self.state.step
        self.state.owes_evaluation = False
        if step and self.monitor.logs(step):
            values["peak_memory_gib"] = self.mesh.largest(peak_bytes(self.mesh.device)) / 2**30
        if self.evaluation and (step % self.args.eval_every_steps == 0 or step == self.args.max_steps):
            with self.monitor.part("evaluate"), self.control.evaluating():
                try:
                    values |= self.evaluation.measure(self)
                except Interrupted:
                    self.state.owes_evaluation = True
        return values

    def _save(self) -> None:
        """Write a checkpoint of this step, unless there is one."""
        if self.state.step in (0, self.saved_at):
            return
        with self.control.saving(), self.monitor.part("save"):
            self.checkpointer.save(self.state)
        if self.saved_at == self.started_at:
            self.monitor.note(self.control.time_at_risk())
        self.saved_at = self.state.step

    def _rewind(self) -> None:
        """Return to weights, optimizer and step of the last checkpoint; data goes on after the bad step.

        If the run is killed before the next checkpoint, it comes to the same bad step again, and does the
        same from there on.
        """
        checkpoint = self.checkpointer.latest
        assert checkpoint is not None, "the guard judged without a checkpoint"
        bad_step, cursor = self.state.step, self.state.cursor
        # Only weights, optimizer and step return: data and guard stay where they are.
        self.state = self.checkpointer.load(checkpoint)
        self.guard.rewound(self.state.guard)
        self.state.cursor, self.state.guard = cursor, self.guard.state_dict()
        self.saved_at = self.state.step
        self.monitor.rewind(self.state.step)
        self.monitor.note(f"back to step {self.state.step}; data continues after the rows of step {bad_step}")

    def step(self) -> dict[str, float]:
        """One optimizer step over the next rows.

        Returns:
            `loss` (mean cross entropy), `learning_rate`, `grad_norm`, `labels`, `data_wait_s`, and `skipped`
            and `spike` (0 or 1). A loss that is not finite is left out, and so is the norm of a skipped step.
        """
        self.random_states = random_states()
        self.control.alive("data")
        batches = self.batches.next()
        num_labels, data_wait = self._agree_on_data()
        rate = learning_rate(self.state.step, self.args)
        self.engine.optimizer.set_lr(rate)
        loss = self._accumulate(batches, max(num_labels, 1.0))
        skipped = not self.engine.was_step_applied()
        self.state.step += 1
        self.state.updates += not skipped
        self.state.cursor = self.cursor.state_dict()
        values = {"loss": loss} if math.isfinite(loss) else {}
        values |= {"learning_rate": rate, "labels": num_labels, "data_wait_s": data_wait}
        values |= {"skipped": float(skipped), "spike": float(self.guard.is_spike(loss))}
        norm = self.engine.get_global_grad_norm()
        if not skipped and norm is not None:
            values["grad_norm"] = float(norm)
        return values

    def _accumulate(self, batches: list[dict[str, torch.Tensor]], num_labels: float) -> float:
        """Forward and backward of every micro-batch, and the update.

        Returns:
            The mean loss over the step's labels. All ranks know it before the last backward, so that the
            update of a bad step can be left out.
        """
        factor = gradient_scale(self.args, self.mesh) / num_labels
        total = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        mean = math.nan
        self.engine.train()
        for index, batch in enumerate(batches):
            last = index == len(batches) - 1
            if index and self.control.interrupted():
                raise Interrupted
            self.control.alive("forward")
            loss = self.engine(**batch)
            total += loss.detach()
            if last:
                mean = self.mesh.sum([float(total)])[0] / num_labels
                # An infinite loss can have finite gradients, and a spike has them. NaN makes the engine skip
                # this step.
                if self.guard.is_spike(mean) or not math.isfinite(mean):
                    factor = math.nan
            self.control.alive("backward")
            self.engine.backward(loss * factor, scale_wrt_gas=False)
            self.control.alive("update")
            self.engine.step()
        return mean

    def _agree_on_data(self) -> tuple[float, float]:
        """Labels of the step over all ranks, and the seconds that the slowest of them waited for its rows."""
        waits = [0.0] * self.mesh.world_size
        waits[self.mesh.rank] = self.batches.prefetcher.waited_s  # the other ranks leave this place at 0
        total, *waits = self.mesh.sum([self.batches.num_labels, *waits])
        return total, max(waits)

    def _judge(self, values: dict[str, float]) -> str:
        """The guard's verdict on the step that was just made. A bad step is noted on the screen."""
        loss, skipped = values.get("loss", math.nan), bool(values["skipped"])
        if skipped:
            self.monitor.note(f"step {self.state.step} skipped: {self.guard.why_bad(loss)}")
        if skipped and self.args.bad_step == "rewind":
            self.checkpointer.wait()
        can_rewind = self.checkpointer.latest is not None
        verdict = self.guard.judge(self.state.step, loss, skipped, can_rewind)
        self.state.guard = self.guard.state_dict()
        return verdict
