"""Which steps are bad, and what follows: NaN, infinity and loss spikes; skip, rewind or stop."""

from typing import Any, Literal

from pod.training.args import TrainArgs

Verdict = Literal["good", "skip", "rewind"]


class Guard:
    """Judges every step by numbers that are the same on all ranks. Its state goes into checkpoints."""

    def __init__(self, args: TrainArgs):
        self.args = args
        self.consecutive_skips = 0
        self.rewinds = 0

    def is_spike(self, loss: float) -> bool:
        """Whether `loss` (of the step whose update is still to come) is a spike."""
        return False

    def judge(self, step: int, loss: float, skipped: bool) -> Verdict:
        """What follows step `step` (counted from 1), after its update was made or skipped.

        Raises:
            RuntimeError: `max_skipped_steps` bad steps in a row, or one more than `max_rewinds` rewinds.
        """
        self.consecutive_skips = self.consecutive_skips + 1 if skipped else 0
        if self.consecutive_skips >= self.args.max_skipped_steps:
            raise RuntimeError(
                f"{self.consecutive_skips} steps in a row had a NaN or infinite loss or gradient (last step {step}): lower "
                "train.learning_rate, check the data, or resume from an earlier checkpoint"
            )
        return "skip" if skipped else "good"

    def state_dict(self) -> dict[str, Any]:
        return {"consecutive_skips": self.consecutive_skips, "rewinds": self.rewinds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.consecutive_skips, self.rewinds = state["consecutive_skips"], state["rewinds"]
