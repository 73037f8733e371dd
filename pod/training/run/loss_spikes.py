"""Steps that must not count: after NaN, infinity or a loss spike, a run skips, rewinds or stops."""

import math
import statistics
from collections import deque
from typing import Any, Literal

from pod.training.args import TrainArgs

Verdict = Literal["good", "skip", "rewind"]
"""What follows a step: go on, go on without its update, or return to the last checkpoint."""


class LossSpikeDetector:
    """Judges every step by numbers that are the same on all ranks. Its state goes into checkpoints.

    Call `is_spike` before a step's update, and `judge` after it.

    A spike is a loss above `spike_factor` x the median of the last `spike_window` good steps. It is the
    median and not the mean, so that rising losses do not raise this limit along with them.

    Attributes:
        losses: of the last good steps, at most `spike_window`.
        consecutive_skips: bad steps in a row, up to the last step.
        rewinds: how often the run has returned to a checkpoint.
    """

    def __init__(self, args: TrainArgs):
        self.args = args
        self.losses: deque[float] = deque(maxlen=args.spike_window)
        self.consecutive_skips = 0
        self.rewinds = 0

    def spike_bar(self) -> float:
        """The loss above which the coming step is a spike.

        It is infinity when `spike_factor` is 0, and until a quarter of `spike_window` good steps are known.
        """
        if not self.args.spike_factor or 4 * len(self.losses) < self.args.spike_window:
            return math.inf
        return self.args.spike_factor * statistics.median(self.losses)

    def is_spike(self, loss: float) -> bool:
        """Whether `loss` is a spike, before the update of its step. NaN and infinity are no spikes."""
        return math.isfinite(loss) and loss > self.spike_bar()

    def why_bad(self, loss: float) -> str:
        """What was wrong with a step that was skipped, in words. Call it before `judge`."""
        if self.is_spike(loss):
            return (
                f"the loss was {loss:.4g}, above {self.spike_bar():.4g} = spike_factor x the running median"
            )
        return "the loss or a gradient was NaN or infinite"

    def judge(self, step: int, loss: float, skipped: bool, can_rewind: bool = True) -> Verdict:
        """Decide what follows step `step` (counted from 1), after its update was made or skipped.

        Args:
            loss: mean loss of the step over all ranks.
            skipped: whether the update was skipped, because of the loss or of a gradient.
            can_rewind: whether there is a checkpoint. Without one, a rewind becomes a skip.

        Raises:
            RuntimeError: `max_skipped_steps` bad steps in a row, or one rewind more than `max_rewinds`.
        """
        if not skipped and math.isfinite(loss):
            self.consecutive_skips = 0
            self.losses.append(loss)
            return "good"
        reason, advice = self.why_bad(loss), "or resume from an earlier checkpoint"
        if self.args.bad_step == "rewind" and can_rewind:
            if self.rewinds >= self.args.max_rewinds:
                raise RuntimeError(
                    f"step {step} is bad ({reason}) after {self.rewinds} rewinds: lower train.learning_rate, "
                    f"check the data, raise train.max_rewinds, {advice}"
                )
            self.rewinds += 1
            return "rewind"
        self.consecutive_skips += 1
        if self.consecutive_skips >= self.args.max_skipped_steps:
            raise RuntimeError(
                f"{self.consecutive_skips} bad steps in a row (at step {step} {reason}): lower "
                f"train.learning_rate, check the data, {advice}"
            )
        return "skip"

    def rewound(self, saved: dict[str, Any]) -> None:
        """Continue after the run has returned to a checkpoint, whose state of this detector is `saved`.

        The losses are those of the checkpoint again. The rewinds so far still count.
        """
        self.load_state_dict({**saved, "rewinds": self.rewinds, "consecutive_skips": 0})

    def state_dict(self) -> dict[str, Any]:
        """The state, for JSON; floats come back bit for bit."""
        counts = {"consecutive_skips": self.consecutive_skips, "rewinds": self.rewinds}
        return {**counts, "losses": list(self.losses)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken; {} is the start of a run."""
        self.losses = deque(state.get("losses", ()), maxlen=self.args.spike_window)
        self.consecutive_skips = state.get("consecutive_skips", 0)
        self.rewinds = state.get("rewinds", 0)
