"""What a run shows of itself: a progress bar, and the numbers of every step for metrics.jsonl, wandb or tensorboard."""

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pod.training.args import TrainArgs
from pod.training.observe.throughput import Throughput
from pod.training.observe.trackers import Tracker, make_trackers

_REDRAW_S = 1.0  # on a terminal
_REDRAW_LOG_S = 30.0  # where every drawing is one more line of a log file


class Monitor:
    """Progress bar and trackers of one run, and the time of its parts.

    Args:
        folder: <output_dir>/train.
        first_step: steps already done (a resumed run).
        tokens_per_step: tokens of all ranks in one optimizer step, padding included.
        enabled: False on every rank but 0: all calls do nothing.
        throughput: arithmetic per token and peak of the devices, for `mfu`.
    """

    def __init__(
        self,
        folder: Path,
        args: TrainArgs,
        first_step: int,
        tokens_per_step: int,
        config: dict[str, Any],
        enabled: bool,
        throughput: Throughput | None = None,
    ):
        self.args, self.tokens_per_step, self.enabled = args, tokens_per_step, enabled
        self.throughput = throughput
        self.parts: dict[str, float] = {}
        self.totals: dict[str, float] = {}
        self.trackers: list[Tracker] = []
        self._start_record(first_step, time.perf_counter())
        if not enabled:
            return
        from tqdm import tqdm

        self.trackers = make_trackers(Path(folder), args, first_step, config)
        redraw = _REDRAW_S if sys.stderr.isatty() else _REDRAW_LOG_S
        self.bar = tqdm(
            total=args.max_steps,
            initial=first_step,
            desc="train",
            unit="step",
            mininterval=redraw,
            smoothing=0.1,
        )

    @classmethod
    def of(cls, trainer: Any) -> "Monitor":
        """The monitor of a `Trainer` that is about to train; reads documents of some rows for `mfu` on rank 0."""
        args, mesh, dataset = trainer.args, trainer.mesh, trainer.dataset
        throughput = (
            Throughput.of(trainer.causal_model.config, args, dataset, mesh) if mesh.rank == 0 else None
        )
        return cls(
            trainer.folder,
            args,
            trainer.state.step,
            trainer.rows_per_step * dataset.context_length,
            trainer.state.config,
            mesh.rank == 0,
            throughput,
        )

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

    def step(self, step: int, values: dict[str, float]) -> None:
        """Record optimizer step `step` (counted from 1).

        Adds, over the steps since the last record: `tokens_per_second` of all ranks and `mfu` without the seconds of
        saving and evaluating, which are `save_s` and `evaluate_s` (sums, only where there were any); `data_wait_s` and
        `compute_s`, the rest (seconds per step).
        """
        if not self.enabled:
            return
        self.waited_s += values.get("data_wait_s", 0.0)
        if self.logs(step):
            self._record(step, values)
        self.bar.update(1)

    def _record(self, step: int, values: dict[str, float]) -> None:
        now = time.perf_counter()
        steps, waited = step - self.last_step, self.waited_s
        seconds = max(now - self.last_time - sum(self.parts.values()), 1e-9)
        rate = self.tokens_per_step * steps / seconds
        record = {**values, "tokens_per_second": rate}
        if "data_wait_s" in values:
            record |= {"data_wait_s": waited / steps, "compute_s": max(seconds - waited, 0.0) / steps}
        record |= {f"{name}_s": part for name, part in self.parts.items()}
        mfu = self.throughput.mfu(rate) if self.throughput else None
        if mfu is not None:
            record["mfu"] = mfu
        self._count("data", waited)
        self._count("compute", seconds - waited)
        self._start_record(step, now)
        self.bar.set_postfix_str(_summary(record, waited / seconds), refresh=False)  # drawn by update
        for tracker in self.trackers:
            tracker.log(step, record)

    def _start_record(self, step: int, now: float) -> None:
        for name, part in self.parts.items():
            self._count(name, part)
        self.last_step, self.last_time, self.waited_s, self.parts = step, now, 0.0, {}

    def _count(self, name: str, seconds: float) -> None:
        self.totals[name] = self.totals.get(name, 0.0) + max(seconds, 0.0)

    def values(self, step: int, values: dict[str, float]) -> None:
        """A record that belongs to no step's training, such as the evaluation before the first step; none when empty."""
        if values:
            for tracker in self.trackers:
                tracker.log(step, values)

    def text(self, step: int, name: str, text: str) -> None:
        """A text for the trackers that show texts."""
        for tracker in self.trackers:
            tracker.text(step, name, text)

    def rewind(self, step: int) -> None:
        """Forget the steps after `step`: they come again."""
        self._start_record(step, time.perf_counter())
        if not self.enabled:
            return
        self.bar.n = self.bar.last_print_n = step
        self.bar.refresh()
        for tracker in self.trackers:
            tracker.rewind(step)

    def note(self, text: str) -> None:
        """One line above the progress bar."""
        if self.enabled:
            self.bar.write(text)

    def close(self) -> None:
        """End bar and trackers; a last line tells where the time went."""
        if not self.enabled:
            return
        self._start_record(self.last_step, self.last_time)
        self.bar.close()
        total = sum(self.totals.values())
        if total > 0 and len(self.totals) > 2:
            shares = sorted(self.totals.items(), key=lambda item: -item[1])
            print("time: " + ", ".join(f"{name} {part / total:.1%}" for name, part in shares), flush=True)
        for tracker in self.trackers:
            tracker.close()


def _summary(record: dict[str, float], waiting: float) -> str:
    """What the bar shows beside steps and time to go."""
    text = f"loss {record.get('loss', float('nan')):.4f}, {record['tokens_per_second']:,.0f} tokens/s"
    if "mfu" in record:
        text += f", MFU {record['mfu']:.1%}"
    if "eval_loss" in record:
        text += f", held-out loss {record['eval_loss']:.4f}"
    if waiting > 0.01:
        text += f", {waiting:.0%} of it waiting for data"
    return text
