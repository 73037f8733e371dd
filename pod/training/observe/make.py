"""The observers that a recipe asks for."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pod.training.args import TrainArgs
from pod.training.observe.gates import Gates, check_gates
from pod.training.observe.held_out import held_out_rows
from pod.training.observe.observers import Observer, PeakMemory
from pod.training.observe.validation import Evaluation, Passkey


def make_observers(
    args: TrainArgs, dataset: Any, folder: Path, config: Any, passkeys: Sequence[Passkey] = ()
) -> list[Observer]:
    """What a recipe asks for of a model of this config: memory always, gates (drawn in `folder`) and evaluation by their settings.

    Raises:
        ValueError: no held-out text, a layout without gates, passkey prompts longer than a row.
    """
    observers: list[Observer] = [PeakMemory()]
    if args.gate_every_steps:
        check_gates(config)
        observers.append(Gates(args, folder, held_out_rows(dataset, 1)))
    if args.eval_every_steps:
        rows = held_out_rows(dataset, args.eval_rows)
        observers.append(Evaluation(args, rows, passkeys))
    return observers
