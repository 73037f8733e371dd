"""What evaluation sees on several ranks against plain PyTorch on one, and that training does not notice them.
`worker_seeing.py OUT`."""

import json
import os
import signal
import sys
from pathlib import Path

import numpy as np
import tiny
import torch
from worker_runs import optimizer_hash

CONTEXT = 141
LENGTHS = [9, 150, 57, 80, 141, 12, 8]  # two documents fill a row, then 9 + 57 + 75 of 80 tokens
SETTINGS = {
    "dtype": "float32",
    "loss_chunk_mib": 1,
    "learning_rate": 1e-2,
    "max_grad_norm": 1e-3,
    "save_every_steps": 0,
    "eval_every_steps": 2,
    "eval_rows": 3,
    "eval_passkeys": 2,
    "max_steps": 3,
}
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
PROMPTS = ((3, 1, 4), (1, 5, 9, 2, 6, 5, 3, 5, 8), tuple(range(20)))


def add_held_out(folder: Path, seed: int = 5) -> Path:
    """Held-out documents beside packed rows, as preparation leaves them."""
    from pod.data.rows.held_out import HELD_OUT_LENGTHS, HELD_OUT_TOKENS

    generator = np.random.default_rng(seed)
    generator.integers(0, tiny.VOCAB // 4, sum(LENGTHS)).astype("<u2").tofile(folder / HELD_OUT_TOKENS)
    np.save(folder / HELD_OUT_LENGTHS, np.array(LENGTHS, dtype="<i8"))
    file = folder / "manifest.json"
    manifest = json.loads(file.read_text(encoding="utf-8"))
    manifest["held_out"] = {"documents": len(LENGTHS), "tokens": sum(LENGTHS), "token_dtype": "uint16"}
    file.write_text(json.dumps(manifest), encoding="utf-8")
    return folder


def make_passkeys(model):
    """Passkeys of which the untrained model says the first and the third, not the second."""
    from pod.training.observe.validation import PasskeyProbe

    said = [plain_continuation(model, prompt, 3) for prompt in PROMPTS]
    wrong = (said[1][0], (said[1][1] + 1) % tiny.VOCAB, said[1][2])
    answers = (said[0], wrong, said[2])
    return [
        PasskeyProbe(prompt=prompt, answer=tuple(answer), depth=depth)
        for prompt, answer, depth in zip(PROMPTS, answers, (0.0, 0.5, 1.0), strict=True)
    ]


@torch.no_grad()
def plain_continuation(model, prompt, new_tokens: int) -> list[int]:
    ids = list(prompt)
    for _ in range(new_tokens):
        ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@torch.no_grad()
def naive_losses(model, rows) -> list[list[float]]:
    """[position of the predicted token in its document, loss] of every label."""
    from pod.modeling.model.step import document_positions

    logits = model(input_ids=rows["input_ids"], doc_ids=rows["doc_ids"]).logits
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), rows["labels"], reduction="none")
    positions = document_positions(rows["doc_ids"]) + 1
    labelled = rows["labels"] >= 0
    return torch.stack([positions[labelled].double(), losses[labelled].double()], dim=1).tolist()


def plain(out, data) -> None:
    """The same numbers from plain PyTorch in fp64."""
    from pod.data import PackedDataset
    from pod.training.observe.validation import held_out_rows

    dataset, model = PackedDataset(data), tiny.make_model(dtype=torch.float64)
    rows = held_out_rows(dataset, 3)
    result: dict = {"losses": naive_losses(model, rows)}
    result["passkey_losses"] = []
    for key in make_passkeys(model):
        ids = torch.tensor([[*key.prompt, *key.answer]])
        logits = model(input_ids=ids).logits[0, len(key.prompt) - 1 : -1].detach()
        loss = torch.nn.functional.cross_entropy(logits, torch.tensor(key.answer))
        result["passkey_losses"].append(float(loss))
    tiny.write_result(out, "plain", result)


def make_trainer(folder, settings, data, mesh=None):
    """A trainer of the tiny model that evaluates."""
    from pod.data import PackedDataset
    from pod.training.args import TrainArgs
    from pod.training.observe.validation import HeldOutEvaluation
    from pod.training.run.mesh import Mesh
    from pod.training.run.trainer import Trainer

    args, dataset = TrainArgs(**SETTINGS | settings), PackedDataset(data)
    mesh, model = mesh or Mesh(args.sequence_parallel_size), tiny.make_model()
    evaluation = HeldOutEvaluation.of(args, dataset, make_passkeys(model))
    return Trainer(args, model, dataset, mesh, folder, evaluation=evaluation)


def metrics(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def observed(name, out, settings, data, heads=(6, 3)) -> None:
    """Two steps: the evaluation before them, the memory of the first, and what evaluations leave behind."""
    from pod.training.run.mesh import stop_processes

    trainer = make_trainer(out / name, {**settings, "max_steps": 2}, data)
    owed: list[bool] = []

    def owe_evaluation(module, inputs):
        """Before a step, owe an evaluation, as a rewind to an older checkpoint would."""
        if module.training:
            owed.append(trainer.state.owes_evaluation)
            trainer.state.owes_evaluation = True

    trainer.engine.module.loss_head.register_forward_pre_hook(owe_evaluation)
    trainer.train()
    if trainer.mesh.rank == 0:
        before, first, _ = metrics(out / name)
        result: dict = {"before": before, "memory": first, "owes": owed[1]}
        result["modes"] = sorted({module.training for module in trainer.engine.module.modules()})
        result["row_length"] = trainer.ulysses.row_length if trainer.ulysses else CONTEXT
        result["traces"] = [
            "context" in trainer.model.model.__dict__,
            "forward" in trainer.engine.module.loss_head.__dict__,
        ]
        tiny.write_result(out, name, result)
    stop_processes()


def trained(name, out, settings, data) -> None:
    """A whole run; its weights and moments at the end."""
    from pod.training.run.mesh import stop_processes

    trainer = make_trainer(out / name, settings, data)
    trainer.train()
    fingerprint = optimizer_hash(trainer)
    if trainer.mesh.rank == 0:
        tiny.write_result(out, name, {"hash": fingerprint, "metrics": metrics(out / name)})
    stop_processes()


def signalled(name, out, settings, data) -> None:
    """Rank 1 gets SIGTERM in a row of the evaluation behind step 2; the same run goes on then."""
    from pod.training.run.mesh import stop_processes

    mesh, phases, result = None, [], {}
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    for part in ("stopped", "whole"):
        trainer = make_trainer(out / name, settings, data, mesh)
        mesh, alive = trainer.mesh, trainer.control.alive

        def note(phase, trainer=trainer, alive=alive):
            phases.append(phase)
            if trainer.mesh.rank == 1 and trainer.state.step == 2 and phases[-2:] == ["evaluate"] * 2:
                os.kill(os.getpid(), signal.SIGTERM)
            alive(phase)

        if part == "stopped":
            trainer.control.alive = note
        state = trainer.train()
        for number, handler in handlers.items():  # those of a run that was stopped stay
            signal.signal(number, handler)
        if mesh.rank == 0:
            rows = phases.count("evaluate")
            result[part] = {"step": state.step, "metrics": metrics(out / name), "rows": rows}
    if mesh.rank == 0:
        tiny.write_result(out, name, result)
    stop_processes()


def main(out: Path, *names: str) -> None:
    import peft  # noqa: F401  imported once, before the ranks are forked

    data = add_held_out(tiny.make_data(out / "data", CONTEXT))
    off = {"eval_every_steps": 0, "eval_passkeys": 0}
    dropout = {"sequence_parallel_size": 2, "method": "lora", "lora_rank": 2, "lora_dropout": 0.2}
    full = {"sequence_parallel_size": 2}
    runs = {
        "alone": (1, observed, {}),
        "sp4": (4, observed, {"sequence_parallel_size": 4}),
        "sp2_dp2": (4, observed, {"sequence_parallel_size": 2, "zero_stage": 1}),
        "sp2_offload": (2, observed, {"sequence_parallel_size": 2, "offload_optimizer": "cpu"}),
        "seen": (2, trained, full),
        "unseen": (2, trained, full | off),
        "signalled": (2, signalled, full),
        "seen_lora": (2, trained, dropout),
        "unseen_lora": (2, trained, dropout | off),
    }
    plain(out, data)
    for name, (ranks, stage, settings) in runs.items():
        if not names or name in names:
            tiny.run_ranks(ranks, stage, name, out, settings, data)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])  # names choose some runs
