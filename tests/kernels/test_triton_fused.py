"""The fused operations of a decoded token against definitions written here in fp64.

The Triton kernels run in the interpreter. It is chosen when triton is imported, so it runs in another
process: this file, started as a script. test_kernels_compile.py compiles the kernels for real chips.
"""

import json
import math
from dataclasses import dataclass

import interpreter
import pytest
import torch
from interpreter import needs_triton

from pod.kernels import fused as step
from pod.modeling.model.attend import Tokens
from pod.modeling.model.sharing import Roles


@dataclass
class Case:
    past: list[int]
    leads: list[int]
    """Of the KV heads 0 … kv_heads-1."""
    near: tuple[int, ...] = ()
    """Those that keep their windows."""
    kv_heads: int = 2
    groups: int = 4
    head_dim: int = 64
    windows: tuple[int, int] = (4, 11)
    slots: int = 40
    """Of keys and values; fewer than the tokens: a ring, as the native slots of packed buffers."""
    norms: bool = False
    dtype: str = "float32"


HEADS = [
    Case([0, 14, 15], [0], groups=1, head_dim=80),
    Case([3, 26, 39], [1], groups=3, head_dim=128, norms=True),
    Case([39], [0, 1, 2], kv_heads=3, groups=4),
    Case([16, 4, 5, 38, 27], [], kv_heads=1, groups=8, head_dim=128, windows=(0, 1)),
    Case([100, 95, 96], [0, 2], kv_heads=4, slots=24, norms=True),
    Case([7, 70_000, 131_071], [1], slots=36, windows=(3, 5), head_dim=24),
    Case([2, 30], [0], norms=True, head_dim=80, dtype="float16"),
    Case([3, 14, 15, 39], [1], near=(0, 3), kv_heads=4, groups=2),
    Case([0, 12, 100], [], near=(0, 1, 2), kv_heads=3, groups=1, windows=(0, 1), norms=True),
    Case([100, 3], [0, 3], near=(1, 4), kv_heads=6, slots=24, head_dim=24),
    Case([21, 33], [0, 2], near=(1,), kv_heads=3, groups=3),
]
SIZES = [(3, 48), (1, 576), (5, 1000), (2, 4096)]  # rows, numbers of a row
DTYPES = ["float32", "float16"]  # the interpreter cuts bfloat16 off where a GPU rounds


def random(*shape, dtype="float32", seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(getattr(torch, dtype))


def worst(found, expected):
    error = (found.double() - expected).abs().max() / expected.abs().max()
    return math.inf if error.isnan() else error.item()


def rms(x, weight, eps):
    return x / math.sqrt(sum(v * v for v in x.tolist()) / len(x) + eps) * weight


def turned(x, angles):
    """RoPE as complex multiplication: pairs (i, i + d/2)."""
    half = x.shape[0] // 2
    z = torch.complex(x[:half], x[half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((z.real, z.imag))


def slot_of(position, first, slots):
    while position >= slots:
        position -= slots - first
    return position


def run_heads(case: Case, operations: step.Operations) -> dict[str, list[float]]:
    """Worst errors of the rotated queries and of the buffers.

    `touched`: how many other numbers of the buffers changed.
    """
    batch, heads, d = len(case.past), case.kv_heads, case.head_dim
    held = [head for head in range(heads) if head not in case.near]
    followers = [head for head in held if head not in case.leads]
    q = random(batch, heads * case.groups, d, dtype=case.dtype)
    k, v = (random(batch, heads, d, dtype=case.dtype, seed=seed) for seed in (1, 2))
    weights = [random(d, dtype=case.dtype, seed=seed) for seed in (3, 4)]
    angles = torch.rand(batch, d // 2, generator=torch.Generator().manual_seed(0)) * 6
    like = {"dtype": q.dtype}
    window = sum(case.windows)
    token_of = {"leads": case.slots, "followers": window, "near keys": window, "near values": window}
    of = {"leads": case.leads, "followers": followers, "near keys": case.near, "near values": case.near}
    buffers = {
        name: torch.full((batch, len(of[name]), slots, d), math.nan, **like)
        for name, slots in token_of.items()
        if of[name]
    }
    if held:
        buffers["values"] = torch.full((batch, len(held), case.slots + 3, d), math.nan, **like)[
            :, :, : case.slots
        ]
    near = Tokens(buffers["near keys"], buffers["near values"]) if case.near else None
    written = (buffers.get(name) for name in ("leads", "followers", "values"))
    token = step.NewToken(torch.tensor(case.past), *written, case.windows[0], near)
    norms = step.HeadNorms(*weights, 1e-5) if case.norms else None
    roles = Roles(tuple(case.leads), tuple(followers), windows=tuple(case.near))
    found = operations.rotate_and_store(q, k, v, (angles.cos(), angles.sin()), norms, roles, token)

    def expected(x, weight, row):
        x = x.double()
        return turned(rms(x, weight.double(), 1e-5) if case.norms else x, angles[row].double())

    errors = {"q": 0.0, "buffers": 0.0}
    for row in range(batch):
        for head in range(heads * case.groups):
            errors["q"] = max(errors["q"], worst(found[row, head], expected(q[row, head], weights[0], row)))
        for head in range(heads):
            key, value = expected(k[row, head], weights[1], row), v[row, head].double()
            for name, heads_of, first, x in (
                ("leads", case.leads, 0, key),
                ("followers", followers, case.windows[0], key),
                ("near keys", case.near, case.windows[0], key),
                ("near values", case.near, case.windows[0], value),
                ("values", held, 0, value),
            ):
                if head in heads_of:
                    target = buffers[name][row, heads_of.index(head)]
                    slot = slot_of(case.past[row], first, target.shape[0])
                    errors["buffers"] = max(errors["buffers"], worst(target[slot], x))
                    target[slot] = math.nan
    errors["touched"] = sum(int((~buffer.isnan()).sum()) for buffer in buffers.values())
    return errors


def run_rows(rows: int, size: int, dtype: str, operations: step.Operations) -> dict[str, float]:
    """Worst errors of the norm, of the norm of a sum, of the sum, and of the gate.

    They are relative to the largest number.
    """
    x, delta = (random(rows, 1, size, dtype=dtype, seed=seed) for seed in (0, 1))
    weight = random(size, dtype=dtype, seed=2)
    found = {}
    for name, second in (("norm", None), ("norm of a sum", delta)):
        total, out = operations.add_norm(x, second, weight, 1e-5)
        wide = x.double() if second is None else x.double() + second.double()
        assert total.shape == out.shape == x.shape
        expected = torch.stack([rms(row[0], weight.double(), 1e-5) for row in wide])[:, None]
        found[name], found[f"sum {name}"] = worst(out, expected), worst(total, wide)
    big = x * 20
    expected = big.double() / (1 + torch.exp(-big.double())) * delta.double()
    found["gate"] = worst(operations.gate(big, delta), expected)
    return found


def answers(operations: step.Operations) -> dict:
    return {
        "heads": [run_heads(case, operations) for case in HEADS],
        "rows": [run_rows(*size, dtype, operations) for size in SIZES for dtype in DTYPES],
    }


def interpret() -> dict:
    from pod.kernels.triton_fused import OPERATIONS

    return interpreter.broken() or answers(OPERATIONS)


@pytest.fixture(scope="module")
def reference():
    return answers(step.REFERENCE)


@pytest.fixture(scope="module")
def interpreted():
    return interpreter.answers(__file__)


LIMITS = {"float32": 1e-6, "float16": 3e-3}  # a few roundings


@pytest.mark.parametrize("index", range(len(HEADS)), ids=[str(case) for case in HEADS])
def test_heads_in_torch(reference, index):
    found = reference["heads"][index]
    assert max(found["q"], found["buffers"]) < LIMITS[HEADS[index].dtype] and found["touched"] == 0


@pytest.mark.parametrize("index", range(len(SIZES) * 2))
def test_rows_in_torch(reference, index):
    limit = LIMITS[DTYPES[index % 2]]
    assert max(reference["rows"][index].values()) < limit


@needs_triton
@pytest.mark.parametrize("index", range(len(HEADS)), ids=[str(case) for case in HEADS])
def test_heads_in_triton(interpreted, reference, index):
    found, limit = interpreted["heads"][index], reference["heads"][index]
    rounding = torch.finfo(getattr(torch, HEADS[index].dtype)).eps
    for name in ("q", "buffers"):
        assert found[name] <= 2 * (limit[name] + rounding)
    assert found["touched"] == 0


@needs_triton
@pytest.mark.parametrize("index", range(len(SIZES) * 2))
def test_rows_in_triton(interpreted, reference, index):
    found, limit = interpreted["rows"][index], reference["rows"][index]
    rounding = torch.finfo(getattr(torch, DTYPES[index % 2])).eps
    for name in found:
        assert found[name] <= 2 * (limit[name] + rounding), name


def test_which_backend_runs():
    x = torch.zeros(1, 4)
    for backend in ("auto", "grouped", "reference"):
        assert step.choose(x, backend) is step.REFERENCE
    with pytest.raises(ValueError, match="'triton' cannot run: .*device cpu|Triton cannot be imported"):
        step.choose(x, "triton")


if __name__ == "__main__":
    print(json.dumps(interpret()))
