"""The training loop: `Trainer.train` makes all steps of a run, `Trainer.step` makes one.

The loss of an optimizer step is the sum over all its labels (all ranks, all micro-batches), divided by their
number. It therefore equals the loss of one process, however the rows are split. `loss.loss_scale` is the
factor of a rank's sum.
"""

import math
import uuid
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from pod.data.rows.order import RowCursor
from pod.training import deepspeed_bridge as bridge
from pod.training.args import TrainArgs
from pod.training.checkpoint.checkpoint_files import Checkpointer, random_states, set_random_states
from pod.training.checkpoint.newest import checkpoint_to_resume
from pod.training.checkpoint.run_identity import Samples, TrainState, changed_settings, identity_of
from pod.training.observe.metrics import Monitor, Values, peak_bytes, peak_tokens_per_second
from pod.training.observe.validation import HeldOutEvaluation
from pod.training.run.activations import save_activations
from pod.training.run.fused_layers import fuse_layers
from pod.training.run.lora import add_lora, lora_settings
from pod.training.run.loss import LanguageModelLoss, loss_scale
from pod.training.run.loss_spikes import LossSpikeDetector
from pod.training.run.mesh import Mesh, from_rank_0
from pod.training.run.optimization import deepspeed_config, learning_rate, make_optimizer
from pod.training.run.run_control import Interrupted, RunControl
from pod.training.run.start_weights import StartWeights
from pod.training.run.step_batches import StepBatches, rows_per_step
from pod.training.run.ulysses import Ulysses
from pod.units import GIB


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

    Attributes:
        state: what checkpoints store besides weights, moments and random states.
        changed_settings: settings that differ from those of the checkpoint that the run continues from.

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
        self.model, self.evaluation = model, evaluation
        self.control = RunControl(args, mesh, self.folder)
        self.loss_spikes = LossSpikeDetector(args)
        self.cursor: RowCursor = dataset.cursor(seed)
        torch.manual_seed(seed + mesh.rank)
        self.ulysses: Ulysses | None = None
        if mesh.sp_group is not None:
            self.ulysses = Ulysses(model.config, mesh.sp_group, dataset.context_length)
            model.model.sequence_parallel = self.ulysses
        lora = lora_settings(args) if args.method == "lora" else None
        start_weights = weights or StartWeights(model)
        settings = deepspeed_config(args)
        module = trained_module(model, args, lora, dataset.context_length)
        bridge.place_weights(module, start_weights, settings, getattr(torch, args.dtype), mesh.device)
        identity, checkpoint = from_rank_0(lambda: self._choose_checkpoint(start_weights.samples, lora))
        start_weights.close()
        self.engine: Any = bridge.start_engine(module, make_optimizer(module, args), settings, mesh.mpu)
        bridge.drop_shared_qk_hooks(model)
        self.checkpointer = Checkpointer(self.folder, args, mesh, self.engine, model, self.control)
        self.state = TrainState(
            run=uuid.uuid4().hex[:8],  # that of rank 0 is written
            identity=identity,
            config=config or {},
            lora=lora,
            tied_embeddings=bool(model.config.tie_word_embeddings),
        )
        self.changed_settings: list[str] = []
        if checkpoint is not None:
            self._continue_from(checkpoint)
        own_tokens = self.ulysses.slice if self.ulysses else slice(None)
        self.batches = StepBatches(args, dataset, self.cursor, mesh, own_tokens)

    def _choose_checkpoint(
        self, samples: Samples, lora: dict[str, Any] | None
    ) -> tuple[dict[str, Any], Path | None]:
        """The identity of the run's checkpoints, and the checkpoint that the run continues from."""
        args, config = self.args, self.model.config
        method = {"method": args.method, **(lora or {})}
        rows = (self.cursor.seed, rows_per_step(args, self.mesh))
        manifest = self.dataset.manifest
        identity = identity_of(config, samples, config.sharing_plan, manifest, method, args.dtype, rows)
        return identity, checkpoint_to_resume(self.folder, args.resume, identity)

    def _continue_from(self, checkpoint: Path) -> None:
        """Take everything from a checkpoint, but the recipe."""
        config = self.state.config
        self.state = self.checkpointer.load(checkpoint)
        self.changed_settings = changed_settings(self.state.config, config)
        self.state.config = config
        self.cursor.load_state_dict(self.state.cursor)
        self.loss_spikes.load_state_dict(self.state.guard)

    def train(self) -> TrainState:
        """Run until `max_steps`, `max_hours` or a signal, and save at the end in each case.

        Raises:
            RuntimeError: too many bad steps (`LossSpikeDetector.judge`).
            OSError: a checkpoint cannot be written.
        """
        args, control, checkpointer = self.args, self.control, self.checkpointer
        monitor = self._start_monitor()
        with control.watching(), closing(monitor), closing(self.batches), closing(checkpointer):
            if self.state.step == 0 or self.state.owes_evaluation:
                monitor.values(self.state.step, self._observe(monitor))
            if self.changed_settings:
                monitor.note(f"continues at step {self.state.step} with {', '.join(self.changed_settings)}")
            stop = "stopped by a signal" if control.interrupted() else None
            while stop is None and self.state.step < args.max_steps:
                before = random_states()
                try:
                    values = self.step()  # reads the rows; forward, backward and update
                except Interrupted:
                    # The step before is kept. This one begins again when the run is resumed.
                    set_random_states(before)
                    stop = f"stopped by a signal in step {self.state.step + 1}, which is undone"
                    break

                loss = values.get("loss", math.nan)
                skipped = bool(values["skipped"])
                if skipped:
                    monitor.note(f"step {self.state.step} skipped: {self.loss_spikes.why_bad(loss)}")
                if skipped and args.bad_step == "rewind":
                    checkpointer.wait()
                can_rewind = checkpointer.latest is not None
                verdict = self.loss_spikes.judge(self.state.step, loss, skipped, can_rewind)
                self.state.guard = self.loss_spikes.state_dict()

                monitor.step(self.state.step, values | self._observe(monitor))
                if verdict == "rewind":
                    self._rewind(monitor)
                checkpointer.poll()
                reason = control.should_stop(self.state.step)
                if reason is not None:
                    stop = f"{reason} after step {self.state.step}; the checkpoint is complete"
                every = args.save_every_steps
                if control.save_due or (every and self.state.step % every == 0):
                    self._save(monitor)
            self._save(monitor)
            checkpointer.wait()
            if stop is not None:
                monitor.note(stop)
        return self.state

    def step(self) -> Values:
        """One optimizer step over the next rows: forward and backward of its micro-batches, and the update.

        All ranks know the loss of the step before the last backward. The update of a bad step is left out.

        Returns:
            `loss` (mean cross entropy), `learning_rate`, `grad_norm`, `labels`, `data_wait_s`, and `skipped`
            and `spike` (0 or 1); with distillation also `objective` and `divergence`, and `attention_error`
            if it is trained. A loss that is not finite is left out, and so is the norm of a skipped step.

        Raises:
            Interrupted: a signal came between two micro-batches.
        """
        self.control.alive("data")
        batches = self.batches.next()
        num_labels, data_wait = self.batches.agree_on_labels()
        rate = learning_rate(self.state.step, self.args)
        self.engine.optimizer.set_lr(rate)

        self.engine.train()
        divisor = max(num_labels, 1.0)  # a step without labels has a loss of 0
        scale = loss_scale(self.args, self.mesh, divisor)
        names = self.engine.module.parts
        total = torch.zeros(len(names), dtype=torch.float64, device=self.mesh.device)
        means: Values = {}
        loss = math.nan
        for index, batch in enumerate(batches):
            if index and self.control.interrupted():
                raise Interrupted
            self.control.alive("forward")
            sums = self.engine(**batch)
            total += sums.detach()
            if index == len(batches) - 1:
                found = [one / divisor for one in self.mesh.sum(total.tolist())]
                means = dict(zip(names, found, strict=True))
                # An infinite loss can have finite gradients, and a spike has them. NaN makes the engine skip
                # this step.
                loss = means["loss"] if all(map(math.isfinite, found)) else math.nan
                if self.loss_spikes.is_spike(loss) or not math.isfinite(loss):
                    scale = math.nan
            self.control.alive("backward")
            self.engine.backward(sums[0] * scale, scale_wrt_gas=False)
            self.control.alive("update")
            self.engine.step()

        skipped = not self.engine.was_step_applied()
        self.state.step += 1
        if not skipped:
            self.state.updates += 1
        self.state.cursor = self.cursor.state_dict()
        values: Values = {name: mean for name, mean in means.items() if math.isfinite(mean)}
        values |= {"learning_rate": rate, "labels": num_labels, "data_wait_s": data_wait}
        values |= {"skipped": float(skipped), "spike": float(self.loss_spikes.is_spike(loss))}
        norm = self.engine.get_global_grad_norm()
        if not skipped and norm is not None:
            values["grad_norm"] = float(norm)
        return values

    def _start_monitor(self) -> Monitor:
        """Begin the bar and the record of a run. Rank 0 reads the documents of some rows, for `mfu`."""
        peak = None
        if self.mesh.rank == 0:
            peak = peak_tokens_per_second(self.model.config, self.args, self.dataset, self.mesh)
        tokens_per_step = self.batches.rows_per_step * self.dataset.context_length
        return Monitor(
            self.folder,
            self.args,
            first_step=self.state.step,
            tokens_per_step=tokens_per_step,
            config=self.state.config,
            enabled=self.mesh.rank == 0,
            peak=peak,
        )

    def _observe(self, monitor: Monitor) -> Values:
        """More metrics of this step: memory of the fullest rank, and the evaluation where it is due."""
        step = self.state.step
        values: Values = {}
        self.state.owes_evaluation = False
        if step and monitor.logs(step):
            values["peak_memory_gib"] = self.mesh.largest(peak_bytes(self.mesh.device)) / GIB
        if self.evaluation is None:
            return values
        if step % self.args.eval_every_steps == 0 or step == self.args.max_steps:
            with monitor.part("evaluate"), self.control.evaluating():
                try:
                    module = self.engine.module
                    values |= self.evaluation.measure(module, self.mesh, self.ulysses, self.control)
                except Interrupted:
                    self.state.owes_evaluation = True
        return values

    def _save(self, monitor: Monitor) -> None:
        """Write a checkpoint of this step, unless there is one."""
        if self.state.step in (0, self.checkpointer.saved_step):
            return
        with self.control.saving(), monitor.part("save"):
            self.checkpointer.save(self.state)
        if self.checkpointer.num_begun == 1:
            monitor.note(self.control.time_at_risk())

    def _rewind(self, monitor: Monitor) -> None:
        """Return to weights, optimizer and step of the last checkpoint; data goes on after the bad step.

        If the run is killed before the next checkpoint, it comes to the same bad step again, and does the
        same from there on.
        """
        checkpoint = self.checkpointer.latest
        assert checkpoint is not None, "a step was judged without a checkpoint"
        bad_step, cursor = self.state.step, self.state.cursor
        # Only weights, optimizer and step return: the rows go on, and rewinds are counted.
        self.state = self.checkpointer.load(checkpoint)
        self.loss_spikes.rewound(self.state.guard)
        self.state.cursor, self.state.guard = cursor, self.loss_spikes.state_dict()
        monitor.rewind(self.state.step)
        monitor.note(f"back to step {self.state.step}; data continues after the rows of step {bad_step}")


def trained_module(
    model: Any, args: TrainArgs, lora: dict[str, Any] | None, row_length: int
) -> LanguageModelLoss:
    """A model with its loss, ready to be trained: with adapters, checkpointed and fused as the recipe says.

    Args:
        lora: settings of the adapters; None = all weights are trained.
        row_length: tokens of the longest row, over all ranks of a sequence-parallel group.
    """
    save_activations(model, args, row_length)
    fuses = {"auto": torch.cuda.is_available(), "compile": True, "none": False}
    if fuses[args.fused_layers]:
        fuse_layers(model)
    trained = add_lora(model, lora) if lora else model.requires_grad_(True)
    loss = LanguageModelLoss(trained, args.loss_chunk_mib, args.distill, args.distill_attention)
    return loss.train()
