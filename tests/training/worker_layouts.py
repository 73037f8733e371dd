"""Output and gradients of trainable layouts on three sequence-parallel ranks against one process.

`worker_layouts.py OUT`.
"""

import json
import sys
from pathlib import Path

import tiny
import torch
import torch.distributed as dist

import pod
from pod.training.run.ulysses import Ulysses

N = 29
ROLES = [[0, None, 0], [None, 1, None], [2, None, 0], [None, 1, 3], [None, 4, None]]
"""Blocks with windows between their layers; in some layers one head of three sees everything."""


def rows_of(heads):
    return [row[:heads] for row in ROLES]


def make_model(layout, heads):
    torch.manual_seed(0)
    fields = {"layout": layout}
    if layout in ("roles", "sinks"):
        kind = {"num_sink_tokens": 2} if layout == "roles" else {"sinks": "constant", "sink_keys": True}
        fields = {"lead": rows_of(heads[1]), **kind}
    config = pod.PodConfig(
        vocab_size=61,
        hidden_size=48,
        intermediate_size=32,
        num_hidden_layers=5,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        head_dim=8,
        initializer_range=0.3,
        num_recent_tokens=6,
        **fields,
    )
    model = pod.PodForCausalLM(config).double()
    tiny.draw_constants(model)
    return model


def gradients(model, out):
    direction = torch.randn(1, N, 48, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    rows = slice(0, N) if model.model.sequence_parallel is None else model.model.sequence_parallel.slice
    (out * direction[:, rows]).sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def compare(rank, size, layout, heads):
    """Worst relative error of this rank's output and of all gradients, and the bytes that it sent."""
    ids = torch.randint(0, 61, (1, N), generator=torch.Generator().manual_seed(2))
    docs = torch.tensor([[0] * 12 + [1] * 15 + [-1] * 2])
    serial, split = make_model(layout, heads), make_model(layout, heads)
    serial_out = serial.model(ids, doc_ids=docs).last_hidden_state
    expected = gradients(serial, serial_out)
    ulysses = Ulysses(split.config, dist.group.WORLD, N)
    split.model.sequence_parallel = ulysses
    split.model.gradient_checkpointing_enable()
    split.train()
    out = split.model(ids[:, ulysses.slice], doc_ids=docs).last_hidden_state
    got = gradients(split, out)
    assert set(got) == set(expected), set(got) ^ set(expected)
    worst = (out - serial_out[:, ulysses.slice]).abs().max().item()
    for name, gradient in got.items():
        dist.all_reduce(gradient)
        worst = max(worst, ((gradient - expected[name]).norm() / expected[name].norm()).item())
    moved = ulysses.orders != (tuple(range(len(ulysses.orders[0]))),) * 5
    return {"worst": worst, "sent": ulysses.sent_bytes["to_heads"], "moved": moved}


def run(folder):
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    cases = {"cla": ("cla", (6, 3)), "cla_replicated": ("cla", (6, 2)), "window": ("window", (6, 3))}
    cases |= {
        "roles": ("roles", (6, 3)),
        "roles_replicated": ("roles", (8, 2)),
        "roles_odd": ("roles", (9, 3)),
        "sinks": ("sinks", (6, 3)),
        "sinks_replicated": ("sinks", (8, 2)),
    }
    results = {name: compare(rank, size, *case) for name, case in cases.items()}
    Path(folder, f"rank{rank}.json").write_text(json.dumps(results), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    tiny.run_ranks(3, run, sys.argv[1])
