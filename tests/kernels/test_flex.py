"""FlexAttention, unfused, against the reference in fp64: output, log-sum-exp and every gradient."""

import flex_eager
import pytest
import torch
from attention_inputs import NAMES
from test_chunks import made

import pod  # noqa: F401  (registers the implementations)
from pod.modeling.model.attend import Segments, SharedQK, Tokens, Visibility, attend

LIMIT = 1e-12
FRESH = [0, 0]
CASES = {  # past and new tokens of every row, sizes of `made`, n_s, n_r
    "three blocks": (([0], [300]), {"heads": 1}, 3, 40),
    "rows that share blocks": ((FRESH, [150, 150]), {}, 4, 30),
    "ragged rows": (([0, 0, 0], [17, 63, 1]), {}, 3, 9),
    "chunks behind a past": (([9, 0, 41, 140], [5, 2, 5, 1]), {}, 3, 9),
    "a chunk behind a past": (([130, 130], [40, 40]), {"groups": 1}, 0, 33),
    "a row without new tokens": (([5, 20, 3], [4, 0, 9]), {}, 3, 4),
    "odd head counts": (([0], [70]), {"heads": 5, "groups": 3}, 5, 13),
    "one head": (([0], [41]), {"heads": 1, "groups": 1, "d": 16}, 0, 1),
    "head dimension 80": (([3], [50]), {"d": 80}, 2, 20),
    "windows larger than the sequence": (([0], [64]), {}, 4, 400),
    "sinks larger than the sequence": (([7], [64]), {}, 400, 9),
    "windows that touch": (([0], [45]), {}, 40, 5),
    "one token": (([0], [1]), {}, 4, 8),
}


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    flex_eager.install(monkeypatch)


def results(backend, inputs, see, segments, scale=0.3):
    """Output, log-sum-exp, and the gradients of the inputs; the lead's are the fourth and fifth."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    q, k, v, *lead = leaves
    out, lse = attend(q, Tokens(k, v), SharedQK(*lead) if lead else None, see, segments, scale, backend)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    grads = torch.autograd.grad((out * weights.to(out)).sum(), leaves)
    assert backend != "flex" or not lse.requires_grad
    return [out.detach(), lse.detach(), *grads]


def check(inputs, see, segments, limit=LIMIT):
    found, truth = (results(name, inputs, see, segments) for name in ("flex", "reference"))
    names = NAMES[0], "lse", *NAMES[1:]
    for name, a, b in zip(names, found, truth, strict=False):
        torch.testing.assert_close(a, b, rtol=0, atol=limit, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("case", CASES)
def test_output_and_every_gradient(case):
    """Of heads that follow, see a window, sinks and a window, or everything; unused columns hold NaN."""
    rows, sizes, n_s, n_r = CASES[case]
    inputs, segments = made(rows, **sizes), Segments.of_rows(*rows)
    check(inputs, Visibility(n_s, n_r), segments)
    for see in (Visibility(0, n_r), Visibility(n_s, n_r), Visibility()):
        check(inputs[:3], see, segments)


def documents(n, batch):
    """Random ones, with padding within and behind; ``batch`` = 1: shared by all rows."""
    generator = torch.Generator().manual_seed(n)
    rows = []
    for _ in range(batch):
        cuts = torch.randint(1, n, (4,), generator=generator).sort().values
        row = torch.bucketize(torch.arange(n), cuts, right=True)
        row[row == 1] = -1
        row[n - n // 9 :] = -1
        rows.append(row)
    return torch.stack(rows)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("windows", [(3, 20), (0, 1), (16, 500)], ids=str)
def test_packed_documents(windows, shared):
    """Padding holds NaN."""
    ids = documents(270, 1 if shared else 2)
    inputs = made((FRESH, [270, 270]), heads=2)
    for x in inputs:
        x.masked_fill_((ids < 0)[:, None, :, None], float("nan"))
    segments = Segments.of_documents(ids, 2)
    check(inputs, Visibility(*windows), segments)
    check(inputs[:3], Visibility(*windows), segments)


def test_tokens_that_all_came_before():
    """More queries than tokens, and fewer."""
    q, k, v, *_ = made(([0, 0], [40, 40]))
    for cut in (1, 17, 40):
        tokens = k[:, :, :cut], v[:, :, :cut]
        check([q, *tokens], Visibility(causal=False), Segments.whole(2, 40, cut))


def test_only_padding():
    q, k, v, *_ = made((FRESH, [5, 5]))
    segments = Segments.of_documents(torch.full((2, 5), -1), 2)
    out, lse = attend(q, Tokens(k, v), None, Visibility(2, 2), segments, backend="flex")
    assert not out.any() and (lse == -torch.inf).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_lower_precision_is_as_good_as_its_rounding(dtype):
    segments, see = Segments.of_documents(documents(200, 1), 1), Visibility(4, 50)
    inputs = [x.to(dtype) for x in made(([0], [200]), d=16)]
    truth = results("reference", [x.double() for x in inputs], see, segments)
    plain, found = (results(name, inputs, see, segments) for name in ("reference", "flex"))
    assert found[0].dtype == dtype and found[1].dtype == torch.float32
    for exact, a, b in zip(truth, found, plain, strict=True):
        used = exact.isfinite()
        size = exact[used].norm()
        error, of_reference = ((x.double() - exact)[used].norm() / size for x in (a, b))
        assert error <= 2 * (of_reference + torch.finfo(dtype).eps)


def test_a_wrong_window_is_seen(monkeypatch):
    """The comparison above can fail: a window that is one token wider, or narrower."""
    from pod.kernels import flex

    run, inputs = flex.runs_of, made(([0], [60]))
    for n_r, is_wrong in ((9, False), (10, True), (8, True)):
        wrong = Visibility(3, n_r)
        monkeypatch.setattr(flex, "runs_of", lambda layout, see, far, wrong=wrong: run(layout, wrong, far))
        segments = Segments.whole(1, 60, 60)
        if not is_wrong:
            check(inputs, Visibility(3, 9), segments)
            continue
        with pytest.raises(AssertionError, match="out:"):
            check(inputs, Visibility(3, 9), segments)
