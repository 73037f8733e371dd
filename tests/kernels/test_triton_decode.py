"""Triton decode kernels in Triton's interpreter, against the oracle of test_decode.py.

The interpreter is chosen when triton is imported, so it runs in another process: this file, started as a
script. test_kernels_compile.py compiles the kernels for real chips.
"""

import ast
import itertools
import json
import os
from dataclasses import replace
from pathlib import Path

import interpreter
import pytest
import torch
from interpreter import needs_triton

ROOT = Path(__file__).resolve().parents[2]
RUNS = [  # case of test_decode.py, dtype, tau, programs per row (None = by the device)
    ("one token", "float32", 0.3, 2),
    ("up to the sinks", "float32", None, 5),
    ("first distant token", "float32", 0.3, 9),
    ("ring wrapped often", "float32", None, 3),
    ("ragged", "float32", None, None),
    ("ragged", "float32", 0.3, 7),
    ("dense", "float32", 0.3, None),
    ("mixed heads", "float32", None, 4),
    ("mixed heads, ragged", "float16", 0.3, 13),
    ("no sinks, one recent", "float32", None, None),
    ("head_dim 24", "float32", 0.7, None),
    ("leads want every program", "float32", 0.3, 9),
    ("blocks of tokens", "float16", None, 40),
    ("packed, ragged", "float32", None, 17),
    ("packed, ragged", "float16", 0.3, 9),
    ("packed, one group per token", "float32", 0.7, 5),
    ("windows alone", "float32", 0.3, None),
    ("windows alone, then all roles", "float32", None, 3),
    ("leads and windows", "float16", 0.3, 7),
    ("windows inside blocks", "float32", 0.3, 13),
    ("one recent token and windows", "float32", None, None),
    ("windows of many tiles", "float32", None, 40),
    ("windows of many tiles", "float16", 0.3, 11),
    ("packed, windows", "float32", 0.3, 17),
    ("packed, windows alone", "float32", None, None),
    ("sinks, windows alone", "float32", None, None),
    ("sinks, all roles", "float32", 0.3, 13),
    ("sinks, many tiles", "float32", None, 40),
    ("sinks, packed", "float32", 0.3, 17),
    ("sinks, head_dim 24", "float16", None, 7),
]
if os.environ.get("POD_TEST_ALL_DECODE") == "1":
    RUNS += [
        ("one token", "float32", None, None),
        ("fills the window", "float32", 0.7, None),
        ("first distant token", "float32", None, None),
        ("ring wrapped often", "float16", 0.7, None),
        ("dense", "float16", None, None),
        ("mixed heads", "float32", 0.0, None),
        ("mixed heads", "float16", None, 21),
        ("mixed heads, ragged", "float16", 1.0, None),
        ("one query head per KV head", "float32", 0.7, None),
        ("four query heads", "float16", 0.3, None),
        ("one recent token", "float32", None, None),
        ("one recent token", "float32", 0.7, None),
        ("no sinks", "float32", None, None),
        ("no sinks, one recent", "float32", 0.3, None),
        ("head_dim 64", "float16", None, None),
        ("head_dim 128", "float32", 0.3, None),
        ("no room to spare", "float32", None, None),
        ("blocks of tokens", "float32", 0.3, 11),
        ("blocks of tokens", "float16", 0.7, 40),
        ("nothing packed yet", "float32", None, None),
        ("packed, no sinks", "float32", None, None),
        ("packed, no sinks", "float16", 0.3, 30),
        ("packed, group above head_dim", "float32", None, 7),
        ("packed, dense", "float32", None, None),
        ("windows alone", "float16", None, 9),
        ("windows alone, then all roles", "float16", 0.7, 30),
        ("followers and windows", "float32", 0.3, None),
        ("followers and windows", "float16", None, 21),
        ("windows inside blocks", "float16", None, 5),
        ("one recent token and windows", "float32", 0.7, 9),
        ("windows, no room to spare", "float32", None, None),
        ("packed, windows", "float16", None, 3),
    ]
LAUNCHING = {"decode", "_launch", "_combine", "_tensors", "run"}


def interpret() -> dict:
    """Errors of the kernels and of the reference for every run.

    `broken` is why the interpreter does not run here at all.
    """
    if (why := interpreter.broken()) is not None:
        return why
    content = {"errors": [errors(*run) for run in RUNS], "unread": unread_values(), "starved": starved()}
    return content | logits_that_leads_leave()


def errors(name, dtype, tau, programs):
    """(error of the kernels, error of the reference in this dtype)."""
    import test_decode as oracle_tests

    case = replace(oracle_tests.CASES[name], dtype=dtype)
    layers = oracle_tests.build(case)
    expected = oracle_tests.oracle(case, layers, tau)[0]
    backends = ("triton", "reference")
    return [
        oracle_tests.worst(oracle_tests.decode(case, layers, x, tau, programs=programs)[0], expected)
        for x in backends
    ]


def logits_that_leads_leave() -> dict:
    """Largest differences to the grouped backend of what the first layer leaves to the next.

    Also what else was written.
    """
    import test_decode as oracle_tests

    case = replace(oracle_tests.Case([150, 9, 4], [[0, 1], [1]]), dtype="float32")
    layers = oracle_tests.build(case)
    found, expected = (
        oracle_tests.decode(case, layers[:1], backend, programs=9)[1] for backend in ("triton", "grouped")
    )
    differences, untouched = [], found.logits.isnan()
    for b, length in enumerate(case.lengths):
        distant = slice(case.n_s, max(case.n_s, length - case.n_r))
        pair = found.logits[b, 0, :, distant], expected.logits[b, 0, :, distant]
        differences.append((pair[0] - pair[1]).abs().max().item() if pair[0].numel() else 0.0)
        untouched[b, 0, :, distant] = True
    lse = torch.stack((found.distant_lse[:, 0], expected.distant_lse[:, 0]))
    return {
        "logits": max(differences),
        "only_distant_columns": bool(untouched.all()),
        "lse": (lse[0, :2] - lse[1, :2]).abs().max().item(),
        "lse_of_none": lse[0, 2].tolist(),
    }


def unread_values() -> float:
    """Error when distant values of groups that skip as a whole are NaN."""
    import test_decode as oracle_tests

    case = oracle_tests.Case(
        [80, 30, 8], [[0, 1, 2, 3], [2], []], num_heads=4, n_r=9, dtype="float32", seed=1
    )
    layers, tau = oracle_tests.build(case), 0.25
    expected, gates = oracle_tests.oracle(case, layers, tau)
    skipped = [(gate >= tau).all(-1) for gate in gates]
    assert 0 < sum(int(x.sum()) for x in skipped) < sum(int((~gate.isnan()).any(-1).sum()) for gate in gates)

    def spoil(number, buffers):
        for b, h in skipped[number].nonzero().tolist():
            buffers[2][b, h, case.n_s : max(case.n_s, case.lengths[b] - case.n_r)] = float("nan")

    return oracle_tests.worst(
        oracle_tests.decode(case, layers, "triton", tau, programs=13, change=spoil)[0], expected
    )


def starved() -> list:
    """Deals that leave a head with tiles unserved or deal out more than there is.

    They are of 8 heads of one kind, or of two or three. Each is ``(part, heads of each kind, length,
    programs, programs of each)``; 128K tokens behind the usual windows are among them.
    """
    import deal_kernel

    wrong = []
    kinds = (
        (8, 0, 0),
        (0, 8, 0),
        (0, 0, 8),
        (4, 4, 0),
        (1, 7, 0),
        (3, 0, 5),
        (0, 2, 6),
        (2, 3, 3),
        (1, 1, 6),
    )
    for part, length, heads in itertools.product((0, 1, 2), (1, 5000, 131072), kinds):
        out = torch.full((6, 512), -1, dtype=torch.int32)
        deal_kernel.deal[(1,)](out, length, *heads, part, 512)
        given, tiles = out.split(3)
        there = torch.tensor(heads)[:, None]
        few = ((there > 0) & (tiles > 0) & (given < 1)).any(0)
        many = (there * given).sum(0) > torch.arange(512) + 8
        wrong += [
            (part, heads, length, i + 8, given[:, i].tolist())
            for i in (few | many).nonzero().flatten().tolist()
        ]
    return wrong


@pytest.fixture(scope="module")
def interpreted():
    return interpreter.answers(__file__)


@pytest.mark.nightly
@needs_triton
@pytest.mark.parametrize("index", range(len(RUNS)), ids=[str(run) for run in RUNS])
def test_interpreted_kernels_are_as_exact_as_the_reference(interpreted, index):
    found, limit = interpreted["errors"][index]
    rounding = torch.finfo(getattr(torch, RUNS[index][1])).eps
    assert found <= 2 * (limit + rounding)


@pytest.mark.nightly
@needs_triton
def test_leads_leave_distant_logits_and_their_lse_and_nothing_else(interpreted):
    assert interpreted["logits"] < 1e-5 and interpreted["lse"] < 1e-5
    assert interpreted["only_distant_columns"]
    assert set(interpreted["lse_of_none"]) == {-float("inf")}


@pytest.mark.nightly
@needs_triton
def test_every_head_with_tokens_gets_a_program(interpreted):
    assert not interpreted["starved"]


@pytest.mark.nightly
@needs_triton
def test_groups_that_skip_leave_distant_values_unread(interpreted):
    assert interpreted["unread"] < 1e-6


def test_a_launch_neither_waits_for_the_device_nor_allocates():
    """A launch neither waits for the device nor allocates, by its code.

    Launching reads shapes, strides and host numbers only, and calls nothing of a tensor that could wait.
    """
    allowed = {"stride", "_asdict", "tile", "len", "_tensors", "isinstance", "device", "nullcontext"}
    allowed |= {"_launch", "_combine", "run", "kernel[grid]", "min"}
    allowed |= {"unsqueeze", "_counts", "role_table"}  # a view, numbers, a tensor that is made once
    for file in ("triton_decode.py", "triton_launch.py"):
        tree = ast.parse((ROOT / "pod" / "kernels" / file).read_text())
        for function in tree.body:
            if not isinstance(function, ast.FunctionDef) or function.name not in LAUNCHING:
                continue
            calls = [n.func for n in ast.walk(function) if isinstance(n, ast.Call)]
            names = {f.attr if isinstance(f, ast.Attribute) else ast.unparse(f) for f in calls}
            assert names <= allowed, f"{function.name} calls {sorted(names - allowed)}"


if __name__ == "__main__":
    print(json.dumps(interpret()))
