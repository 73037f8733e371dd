"""The observers that a recipe asks for."""

from pathlib import Path
from typing import Any

from pod.training.args import TrainArgs
from pod.training.observe.gates import Gates, check_gates
from pod.training.observe.gradients import GradientNorms
from pod.training.observe.held_out import held_out_rows
from pod.training.observe.observers import Observer, PeakMemory
from pod.training.observe.probes import Probes
from pod.training.observe.samples import Samples, check_samples
from pod.training.observe.validation import Evaluation


def make_observers(
    args: TrainArgs, dataset: Any, folder: Path, config: Any, probes: Probes | None = None
) -> list[Observer]:
    """What a recipe asks for: gradient norms and memory always, gates, evaluation and samples by their settings.

    Args:
        folder: <output_dir>/train.
        config: the model's.
        probes: passkeys and texts, for `eval_passkeys` and `sample_prompts`.

    Raises:
        ValueError: no held-out text, a layout without gates, prompts longer than a row.
    """
    observers: list[Observer] = [GradientNorms(), PeakMemory()]
    if args.gate_every_steps:
        check_gates(config)
    if not (args.gate_every_steps or args.eval_every_steps):
        return observers
    rows = held_out_rows(dataset, args.eval_rows if args.eval_every_steps else 1)
    if args.gate_every_steps:
        observers.append(Gates(args, folder, rows))
    if args.eval_every_steps:
        passkeys = () if probes is None else probes.passkeys
        observers.append(Evaluation(args, folder, rows, passkeys))
        if probes is not None and probes.prompts:
            check_samples(args, probes, dataset.context_length)
            observers.append(Samples(args, folder, probes))
    return observers
