"""What a run shows of itself: a progress bar, and the numbers of every step for metrics.jsonl and wandb."""

import contextlib
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from pod.training.args import TrainArgs
from pod.training.observe.throughput import peak_tokens_per_second
from pod.training.observe.trackers import JsonLines, Values, Wandb

_REDRAW_S = 1.0  # on a terminal
_REDRAW_LOG_S = 30.0  # where every drawing is one more line of a log file


class Monitor:
    """Progress bar and trackers of one run, and the time of its parts.

    Args:
        folder: <output_dir>/train; first_step: steps already done (a resumed run).
        tokens_per_step: of all ranks in one optimizer step, padding included.
        enabled: False on every rank but 0: all calls do nothing.
        peak: tokens per second that the devices could train at their peak, for `mfu`; None = not known.
    """

    def __init__(
        self,
        folder: Path,
        args: TrainArgs,
        first_step: int,
        tokens_per_step: int,
        config: dict[str, Any],
        enabled: bool,
        peak: float | None = None,
    ):
        self.args, self.tokens_per_step, self.enabled, self.peak = args, tokens_per_step, enabled, peak
        self.trackers: list[JsonLines | Wandb] = []
        self._start_record(first_step)
        if enabled:
            from tqdm import tqdm

            self.trackers = [JsonLines(folder / "metrics.jsonl", first_step)]
            self.trackers += [Wandb(folder, args, config)] if args.tracker == "wandb" else []
            redraw = _REDRAW_S if sys.stderr.isatty() else _REDRAW_LOG_S
            self.bar = tqdm(
                desc="train", unit="step", total=args.max_steps, initial=first_step, mininterval=redraw
            )

    @classmethod
    def of(cls, trainer: Any) -> "Monitor":
        """The monitor of a `Trainer` that is about to train; reads documents of some rows for `mfu` on rank 0."""
        args, mesh, dataset, first = trainer.args, trainer.mesh, trainer.dataset, trainer.mesh.rank == 0
        config = trainer.causal_model.config
        peak = peak_tokens_per_second(config, args, dataset, mesh) if first else None
        tokens = trainer.batches.rows_per_step * dataset.context_length
        return cls(trainer.folder, args, trainer.state.step, tokens, trainer.state.config, first, peak)

    def logs(self, step: int) -> bool:
        """Whether step `step` (counted from 1) gets a record; the same on all ranks."""
        return step % self.args.log_every_steps == 0 or step == self.args.max_steps

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Around `save` and `evaluate`: their seconds get fields of their own and count in no rate."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.parts[name] = self.parts.get(name, 0.0) + time.perf_counter() - started

    def step(self, step: int, values: Values) -> None:
        """Record optimizer step `step` (counted from 1), with, over the steps since the last record, `tokens_per_second` of all ranks
        and `mfu` without saving and evaluating, `save_s` and `evaluate_s` (sums), `data_wait_s` and `compute_s` (per step)."""
        if not self.enabled:
            return
        self.waited_s += values.get("data_wait_s", 0.0)
        if self.logs(step):
            self._record(step, values)
        self.bar.update(1)

    def _record(self, step: int, values: Values) -> None:
        steps, waited = step - self.last_step, self.waited_s
        seconds = max(time.perf_counter() - self.last_time - sum(self.parts.values()), 1e-9)
        rate = self.tokens_per_step * steps / seconds
        record = {**values, "tokens_per_second": rate}
        if "data_wait_s" in values:
            record |= {"data_wait_s": waited / steps, "compute_s": max(seconds - waited, 0.0) / steps}
        record |= {f"{name}_s": part for name, part in self.parts.items()}
        if self.peak:
            record["mfu"] = rate / self.peak
        self._start_record(step)
        self.bar.set_postfix_str(_summary(record, waited / seconds), refresh=False)  # drawn by update
        self.values(step, record)

    def _start_record(self, step: int) -> None:
        self.last_step, self.last_time, self.waited_s = step, time.perf_counter(), 0.0
        self.parts: dict[str, float] = {}

    def values(self, step: int, values: Values) -> None:
        """A record as it is, such as the evaluation before the first step; none when empty."""
        for tracker in self.trackers if values else ():
            tracker.log(step, values)

    def rewind(self, step: int) -> None:
        """Forget the steps after `step`: they come again."""
        self._start_record(step)
        if self.enabled:
            self.bar.n = self.bar.last_print_n = step
            self.bar.refresh()
        for tracker in self.trackers:
            tracker.rewind(step)

    def note(self, text: str) -> None:
        """One line above the progress bar."""
        if self.enabled:
            self.bar.write(text)

    def close(self) -> None:
        """End bar and trackers."""
        if self.enabled:
            self.bar.close()
        for tracker in self.trackers:
            tracker.close()


def _summary(record: Values, waiting: float) -> str:
    """What the bar shows beside steps and time to go."""
    text = f"loss {record.get('loss', float('nan')):.4f}, {record['tokens_per_second']:,.0f} tokens/s"
    if "mfu" in record:
        text += f", MFU {record['mfu']:.1%}"
    if "eval_loss" in record:
        text += f", held-out loss {record['eval_loss']:.4f}"
    return text if waiting <= 0.01 else f"{text}, {waiting:.0%} of it waiting for data"


def peak_bytes(device: torch.device) -> int:
    """Most bytes that PyTorch had allocated on a GPU; without one, the process's largest resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
