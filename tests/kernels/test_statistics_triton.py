"""Triton statistics without a GPU: run in Triton's interpreter. `test_kernels_compile.py` compiles them for real chips.

The interpreter is chosen when triton is imported, so it runs in another process: this file, started as a script.
"""

import json

import interpreter
import pytest
import torch
from interpreter import needs_triton

CASES = [  # dtype, B, H, G, m, n, d
    ("float32", 2, 1, 1, 63, 63, 16),
    ("float32", 1, 1, 3, 70, 131, 24),
    ("float16", 1, 2, 4, 20, 140, 8),
    ("float16", 1, 1, 3, 1, 129, 64),
    ("float32", 1, 1, 2, 0, 5, 16),
    ("float32", 1, 1, 1, 1, 1, 16),
]


def inputs(case):
    """Heads as transposed views, as a model makes them."""
    dtype, batch, heads, groups, m, n, d = case
    generator = torch.Generator().manual_seed(m + n)
    shapes = (batch, m, heads * groups, d), (batch, n, heads, d)
    return [
        torch.randn(s, generator=generator).mul(1.5).to(getattr(torch, dtype)).transpose(1, 2) for s in shapes
    ]


def relative(a, b):
    return ((a.double() - b).norm() / b.norm()).item() if b.numel() else float(a.numel())


def errors(case, backend):
    """Relative errors against the fp64 reference: sums, squares, sums with a given lse, rows."""
    from pod.kernels import statistics_reference
    from pod.kernels.statistics import attention_column_sums, attention_rows

    q, k = inputs(case)
    exact = q.double(), k.double()
    lse = statistics_reference._logits(*exact, case[-1] ** -0.5).logsumexp(-1)
    truth = attention_column_sums(*exact, squares=True, backend="reference")
    found = attention_column_sums(q, k, squares=True, backend=backend)
    given = attention_column_sums(q, k, lse=lse, backend=backend)
    rows, true_rows = attention_rows(q, k, backend=backend), attention_rows(*exact, backend="reference")
    assert all(x.dtype == torch.float32 for x in (*found, given, rows))
    assert not rows[true_rows == 0].any()
    pairs = zip((*found, given, rows), (*truth, truth[0], true_rows), strict=True)
    return [relative(a, b) if b.any() else float(a.any()) for a, b in pairs]


def interpret() -> dict:
    """What the interpreter gives for every case; `broken` is why it does not run here at all."""
    if (why := interpreter.broken()) is not None:
        return why
    from pod.kernels import statistics

    torch.use_deterministic_algorithms(True)  # torch.empty holds NaN
    refused = statistics.BACKENDS["triton"].unsupported(torch.zeros(1, 1, 1, 16, dtype=torch.bfloat16))
    by_auto = statistics.choose(torch.zeros(1, 1, 1, 16)) is statistics.BACKENDS["blocked"]
    return {"errors": [errors(c, "triton") for c in CASES], "refused": refused, "auto_is_blocked": by_auto}


@pytest.fixture(scope="module")
def interpreted():
    return interpreter.answers(__file__)


@needs_triton
@pytest.mark.parametrize("index", range(len(CASES)), ids=[str(c) for c in CASES])
def test_interpreted_kernels_are_as_exact_as_the_reference(interpreted, index):
    case = CASES[index]
    q, k = (x.double() for x in inputs(case))
    largest = (q.flatten(1, 2) @ k.flatten(1, 2).mT).abs().max() if q.numel() else 0.0
    # a weight is exp(logit - lse), both rounded to fp32: relative error of a weight = absolute error of its logit
    rounding = torch.finfo(torch.float32).eps * max(1.0, float(largest) * case[-1] ** -0.5)
    for found, limit in zip(interpreted["errors"][index], errors(case, "reference"), strict=True):
        assert found <= 2 * (limit + rounding)


@needs_triton
def test_interpreter_refuses_what_it_gets_wrong(interpreted):
    assert "bfloat16" in interpreted["refused"]
    assert interpreted["auto_is_blocked"]  # the interpreter is for tests: never chosen by itself


@pytest.mark.gpu
@needs_triton
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_on_the_gpu(dtype):
    from pod.kernels import statistics

    q, k = (x.cuda() for x in inputs((dtype, 2, 2, 3, 300, 1000, 64)))
    assert statistics.choose(q) is statistics.BACKENDS["triton"]
    exact = q.double(), k.double()
    truth = statistics.attention_column_sums(*exact, squares=True, backend="reference")
    found = statistics.attention_column_sums(q, k, squares=True)
    assert all(relative(a, b) < 5e-6 for a, b in zip(found, truth, strict=True))
    rows = statistics.attention_rows(q, k)
    assert relative(rows, statistics.attention_rows(*exact, backend="reference")) < 5e-6


if __name__ == "__main__":
    print(json.dumps(interpret()))
