"""The observers that a recipe asks for."""

from collections.abc import Sequence
from typing import Any

from pod.training.args import TrainArgs
from pod.training.observe.held_out import held_out_rows
from pod.training.observe.observers import Observer, PeakMemory
from pod.training.observe.validation import Evaluation, Passkey


def make_observers(args: TrainArgs, dataset: Any, passkeys: Sequence[Passkey] = ()) -> list[Observer]:
    """Memory always, evaluation by its settings; ValueError: no held-out text, passkey prompts longer than a row."""
    observers: list[Observer] = [PeakMemory()]
    if args.eval_every_steps:
        observers.append(Evaluation(args, held_out_rows(dataset, args.eval_rows), passkeys))
    return observers
