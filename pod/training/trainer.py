"""The training loop: ZeRO-3, sequence parallelism, token-weighted loss, exact resume.

The loss of an optimizer step is the sum over all its labels (all ranks, all micro-batches) divided by their number,
so that it equals one process whatever the split: a rank's sum is divided by the global number of labels and
multiplied by the number of ranks, over which ZeRO-3 averages gradients.
"""

import contextlib
import math
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pod.files import write_json
from pod.modeling.sharing import SharingPlan
from pod.training.args import TrainArgs
from pod.training.batches import StepBatches
from pod.training.carry import set_carry
from pod.training.checkpoint import (
    Checkpointer,
    TrainState,
    check_identity,
    identity_of,
    latest_checkpoint,
    read_state,
)
from pod.training.estimate import (
    PREFETCH_ELEMENTS,
    REDUCE_BUCKET_ELEMENTS,
    checkpoint_bytes,
    mlp_tiles,
)
from pod.training.lora import add_lora, lora_settings
from pod.training.loss import LanguageModelLoss
from pod.training.mesh import Mesh
from pod.training.metrics import Monitor
from pod.training.optim import learning_rate, make_optimizer
from pod.training.ulysses import Ulysses

IGNORED_LABEL = -100


def deepspeed_config(args: TrainArgs) -> dict[str, Any]:
    """The engine's settings. `reduce_scatter` fixes the gradient scale that `Trainer` compensates."""
    host = {"offload_optimizer": {"device": "cpu", "pin_memory": torch.cuda.is_available()}}
    return {
        "train_micro_batch_size_per_gpu": args.micro_batch_size,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "gradient_clipping": args.max_grad_norm,
        "bf16": {"enabled": args.dtype == "bfloat16"},
        "communication_data_type": "fp32",
        "seq_parallel_communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": {
            "stage": 3,
            "reduce_scatter": True,
            "overlap_comm": torch.cuda.is_available(),
            "reduce_bucket_size": REDUCE_BUCKET_ELEMENTS,
            "stage3_prefetch_bucket_size": PREFETCH_ELEMENTS,
            **(host if args.offload_optimizer else {}),
        },
        # PyTorch's own AdamW updates there too: DeepSpeed's needs a compiler on every machine
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 2**31,
        "wall_clock_breakdown": False,
    }


def drop_carry_hooks(model: Any) -> None:
    """Take ZeRO-3's hooks off the modules that hand on the carry and own no weight: decoder layers and attention.

    The hooks fire once per carried tensor. How many there are depends on the heads that a rank computes, and ZeRO-3
    stops ("disagreement on list contents") when ranks do not meet the same hooks. Their children's hooks gather all
    weights.
    """
    for layer in model.model.layers:
        for module in (layer, layer.self_attn):
            assert not list(module.parameters(recurse=False)), "this module's weights need ZeRO-3's hooks"
            module._forward_pre_hooks.clear()
            module._forward_hooks.clear()


def save_activations(model: Any, args: TrainArgs, row_length: int) -> None:
    """Set what a PodForCausalLM keeps for its backward: checkpoints, carry, feed-forward tiles.

    Args:
        row_length: tokens of the longest row over all ranks of a sequence-parallel group.
    """
    if args.gradient_checkpointing:
        # The first name is transformers' newer one; both checkpoint without re-entering autograd.
        enable = (
            getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        )
        enable()
    set_carry(model, args.carry)
    for layer in model.model.layers:
        layer.mlp.train_tiles = mlp_tiles(args, row_length)


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
    ):
        self.args, self.mesh, self.folder, self.dataset = args, mesh, Path(folder), dataset
        self.plan: SharingPlan = model.config.sharing_plan
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
        self.stop_signal: int | None = None

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
            self.cursor.load_state_dict(self.state.cursor)

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
        """Run until `max_steps`, or until SIGTERM; saves at the end either way.

        Raises:
            RuntimeError: `max_skipped_steps` steps in a row had a NaN or infinite loss or gradient.
            OSError: a checkpoint cannot be written.
        """
        tokens = self.rows_per_step * self.dataset.context_length
        enabled = self.mesh.rank == 0
        monitor = Monitor(self.folder, self.args, self.state.step, tokens, self.state.config, enabled)
        saved_at = self.state.step if self.resume_from else -1
        with self._catch_signals(), contextlib.closing(monitor), contextlib.closing(self.batches):
            while self.state.step < self.args.max_steps:
                values = self.step()
                monitor.step(self.state.step, values)
                self._check_skips(values, monitor)
                stop = self._should_stop()
                every = self.args.save_every_steps
                if stop or (every and self.state.step % every == 0):
                    self.checkpointer.save(self.state)
                    saved_at = self.state.step
                if stop:
                    monitor.note(
                        f"stopped by a signal after step {self.state.step}; the checkpoint is complete"
                    )
                    return self.state
            if saved_at != self.state.step:
                self.checkpointer.save(self.state)
        return self.state

    def step(self) -> dict[str, float]:
        """One optimizer step over the next rows; returns loss, learning rate, gradient norm and counts."""
        batches = self.batches.next()
        num_labels, data_wait = self._agree_on_data(batches)
        rate = learning_rate(self.state.step, self.args)
        for group in self.engine.optimizer.param_groups:
            group["lr"] = rate
        (total,) = self.mesh.sum([sum(self._accumulate(batch, num_labels) for batch in batches)])
        skipped = bool(getattr(self.engine.optimizer, "overflow", False))
        self.state.step += 1
        self.state.cursor = self.cursor.state_dict()
        self.state.consecutive_skips = self.state.consecutive_skips + 1 if skipped else 0
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

    def _check_skips(self, values: dict[str, float], monitor: Monitor) -> None:
        if not values["skipped"]:
            return
        monitor.note(f"step {self.state.step} skipped: the loss or a gradient was NaN or infinite")
        if self.state.consecutive_skips >= self.args.max_skipped_steps:
            raise RuntimeError(
                f"{self.state.consecutive_skips} steps in a row had a NaN or infinite loss or gradient (last step "
                f"{self.state.step}): lower train.learning_rate, check the data, or resume from an earlier checkpoint"
            )

    @contextlib.contextmanager
    def _catch_signals(self):
        """SIGTERM and SIGUSR1 (Slurm's warning) are noted; the loop saves at the next step boundary."""

        def note(number, frame):
            self.stop_signal = number

        previous = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGUSR1)}
        try:
            yield
        finally:
            if self.stop_signal is None:  # a launcher repeats SIGTERM while its ranks are leaving
                for number, handler in previous.items():
                    signal.signal(number, handler)

    def _should_stop(self) -> bool:
        """Whether any rank got a signal, the same answer on all ranks."""
        flag = torch.tensor([self.stop_signal is not None], dtype=torch.int32, device=self.mesh.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())


def _as_float(value: Any) -> float | None:
    return None if value is None else float(value)
