"""Triton prefill attention without a GPU: every kernel in Triton's interpreter against the reference, output, LSE and all gradients.

The interpreter is chosen when triton is imported, so it runs in another process: this file, started as a script, with buffers that
hold NaN until they are written. ``POD_KERNEL_SWEEP=200`` runs that many random cases more. That the shipped tiles compile is
tested with those of all modules.
"""

import json
import os
import random
import sys
from typing import NamedTuple

import interpreter
import pytest
import torch
from attention_inputs import operations, with_lse
from interpreter import needs_triton

from pod.modeling.shipped.attend import CAUSAL, EVERYTHING, Call, Lead, Segments, Tokens, Visibility

NAMES = ("out", "lse", "q", "k", "v", "q_lead", "k_lead")


class Case(NamedTuple):
    """One call. ``followers`` None: no lead tensors. ``tiles``: queries, keys, masked block; None = as shipped."""

    op: str
    followers: tuple[int, ...]
    n: int
    windows: tuple[int, int]
    heads: int = 2
    groups: int = 1
    d: int = 16
    docs: str = ""
    tiles: tuple[int, int, int] | None = (16, 16, 16)
    dtype: str = "float32"
    batch: int = 1
    scale: float | None = None
    layout: str = "tokens"


CASES = [
    Case("mixed", (0,), 1, (4, 8), groups=3, batch=2),
    Case("mixed", (1,), 3, (4, 8), layout="heads"),
    Case("mixed", (0, 1), 13, (0, 3), groups=3, d=24),
    Case("mixed", (0, 2), 63, (3, 11), heads=3, tiles=(16, 32, 16), scale=-0.4),
    Case("mixed", (0,), 200, (5, 70), heads=1, groups=4, tiles=(64, 64, 32)),
    Case("mixed", (0,), 257, (0, 40), docs="packed", tiles=(32, 64, 32), batch=2, heads=1),
    Case("mixed", (1,), 90, (20, 9), docs="packed", layout="odd"),
    Case("pod", (0, 1), 70, (4, 1), docs="shared", tiles=(32, 16, 16), batch=2),
    Case("pod", (0,), 60, (70, 5), heads=1),
    Case("pod", (0,), 60, (4, 400), heads=1, docs="packed"),
    Case("pod", (0,), 129, (40, 20), heads=1, docs="long", tiles=(32, 16, 16)),
    # regions that end with a block: an off-by-one in the number of full blocks shows
    Case("pod", (0,), 130, (3, 47), heads=1),
    Case("causal", (), 77, (0, 0), groups=3, heads=1, docs="packed", scale=0.1),
    Case("window", (), 100, (0, 7), heads=1, groups=2, tiles=(32, 32, 16)),
    Case("window", (), 40, (0, 50), heads=1),
    Case("mixed", (0,), 150, (4, 33), d=64, dtype="float16", docs="long", tiles=(32, 32, 16)),
    Case("mixed", (1,), 300, (16, 60), d=64, dtype="float16", tiles=None),
    Case("mixed", (0,), 70, (3, 20), d=64, docs="long", tiles=None),
]


def documents(kind: str, batch: int, n: int, seed: int) -> torch.Tensor | None:
    """Short documents with padding in the middle of one row and at the end of all (one row for all: shared), or two long ones."""
    if not kind:
        return None
    if kind == "long":
        return (torch.arange(n) >= n // 3).long()[None].expand(batch, n)
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for b in range(1 if kind == "shared" else batch):
        cuts = torch.randperm(n - 2, generator=generator)[:3].sort().values + 1
        row = torch.bucketize(torch.arange(n), cuts, right=True)
        row[row == 1] = -1 if b == 0 else 1
        row[n - n // 8 :] = -1
        rows.append(row)
    return torch.stack(rows)


def inputs(case: Case) -> list[torch.Tensor]:
    """q, k, v, q_lead, k_lead and the gradient of the output. ``tokens``: transposed views, as a model makes them."""
    generator = torch.Generator().manual_seed(case.n)
    follow = max(len(case.followers), 1)
    counts = [case.heads * case.groups, case.heads, case.heads, follow * case.groups, follow]
    found = []
    for heads in (*counts, counts[0]):
        shape = case.batch, case.n, heads, case.d
        x = torch.randn(shape, generator=generator).mul(1.5).to(getattr(torch, case.dtype)).transpose(1, 2)
        if case.layout == "heads":
            x = x.contiguous()
        elif case.layout == "odd":  # features not contiguous, every second head
            x = x.repeat_interleave(2, 1).transpose(2, 3).contiguous().transpose(2, 3)[:, ::2]
        found.append(x)
    return found


def call_of(q, tokens=None, visibility=CAUSAL):
    tokens = q if tokens is None else tokens
    segments = Segments.whole(q.shape[0], q.shape[2], tokens.shape[2])
    return Call(q, Tokens(tokens, tokens), None, visibility, segments, 1.0)


def reference_attention(case: Case, q, k, v, q_lead, k_lead):
    """Every KV head by the plain reference."""
    reference = operations("reference")
    options = {"doc_ids": documents(case.docs, case.batch, case.n, case.n), "scale": case.scale}
    if case.op == "window":
        return reference.window_attention(q, k, v, case.windows[1], **options)
    outs = []
    for head in range(case.heads):
        own = (
            q[:, head * case.groups : (head + 1) * case.groups],
            k[:, head : head + 1],
            v[:, head : head + 1],
        )
        if head in case.followers:
            f = case.followers.index(head)
            lead = q_lead[:, f * case.groups : (f + 1) * case.groups], k_lead[:, f : f + 1]
            outs.append(reference.pod_attention(*own, *lead, *case.windows, **options))
        else:
            outs.append(reference.causal_attention(*own, **options))
    return torch.cat(outs, 1)


def reference_lse(case: Case, q, k, v, q_lead, k_lead):
    """Natural log-sum-exp from the definition: own logits where ``j < n_s`` or ``i - j < n_r``, the lead's elsewhere."""
    docs = documents(case.docs, case.batch, case.n, case.n)
    docs = torch.zeros(1, case.n).long() if docs is None else docs
    i, j = torch.arange(case.n)[:, None], torch.arange(case.n)
    change = torch.ones_like(docs)
    change[:, 1:] = docs[:, 1:] != docs[:, :-1]
    number = change.cumsum(1)
    seen = (number[:, :, None] == number[:, None]) & (docs >= 0)[:, :, None] & (j <= i)
    position = (number[:, :, None] == number[:, None]).tril(-1).sum(2)
    num_sink = 0 if case.op == "window" else case.windows[0]
    near = (position[:, None] < num_sink) | (i - j < case.windows[1])
    scale = case.d**-0.5 if case.scale is None else case.scale
    found = []
    for head in range(case.heads * case.groups):
        kv = head // case.groups
        logits, allowed = q[:, head] @ k[:, kv].mT, seen
        if kv in case.followers:
            f = case.followers.index(kv)
            distant = q_lead[:, f * case.groups + head % case.groups] @ k_lead[:, f].mT
            logits = torch.where(near, logits, distant)
        elif case.op == "window":
            allowed = seen & near
        found.append((logits * scale).masked_fill(~allowed, -torch.inf).logsumexp(-1))
    return torch.stack(found, 1)


def results(case: Case, attention, tensors) -> list[torch.Tensor]:
    """Output and the five gradients (zeros for what was not read)."""
    leaves = [x.detach().requires_grad_() for x in tensors[:5]]
    out = attention(case, *leaves)
    grads = torch.autograd.grad(out, leaves, tensors[5].to(out.dtype), allow_unused=True)
    return [
        out.detach(),
        *(torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads, strict=True)),
    ]


def triton_attention(case: Case, q, k, v, q_lead, k_lead):
    triton_prefill = operations("triton")
    options = {"doc_ids": documents(case.docs, case.batch, case.n, case.n), "scale": case.scale}
    if case.op == "causal" or (not case.followers and case.op != "window"):
        return triton_prefill.causal_attention(q, k, v, **options)
    if case.op == "window":
        return triton_prefill.window_attention(q, k, v, case.windows[1], **options)
    if case.op == "pod":
        return triton_prefill.pod_attention(q, k, v, q_lead, k_lead, *case.windows, **options)
    return triton_prefill.mixed_attention(
        q, k, v, q_lead, k_lead, list(case.followers), *case.windows, **options
    )


def triton_lse(case: Case, q, k, v, q_lead, k_lead):
    options = {"doc_ids": documents(case.docs, case.batch, case.n, case.n), "scale": case.scale}
    if case.op == "window":
        options["windows"] = 0, case.windows[1]
    elif case.followers:
        options |= {"lead": Lead(q_lead, k_lead, case.followers), "windows": case.windows}
    return with_lse(q, k, v, backend="triton", **options)[1]


def relative(a, b, size):
    """Relative error; a truth that is zero is measured against the largest gradient."""
    norm = b.norm().item()
    return (a.double() - b).norm().item() / (norm if norm > 1e-9 else size)


def check(case: Case) -> dict[str, list[float]]:
    """Name → ``[error, limit]``; the limit is twice the error of the reference in this dtype, plus rounding."""
    from pod.kernels import triton_prefill_tiles

    triton_prefill_tiles.OVERRIDE = case.tiles
    tensors = inputs(case)
    exact = [x.double() for x in tensors]
    found, truth = results(case, triton_attention, tensors), results(case, reference_attention, exact)
    plain = results(case, reference_attention, tensors)
    lse, true_lse = triton_lse(case, *tensors[:5]), reference_lse(case, *exact[:5])
    finite = true_lse.isfinite()
    assert (lse[~finite] == -torch.inf).all() and lse.dtype == torch.float32
    found.insert(1, lse[finite])
    truth.insert(1, true_lse[finite])
    plain.insert(1, lse[finite])
    docs = documents(case.docs, case.batch, case.n, case.n)
    if docs is not None:  # padding: exactly zero
        padding = (docs < 0).expand(case.batch, case.n)
        assert not any(x.transpose(1, 2)[padding].any() for i, x in enumerate(found) if i != 1)
    assert all(
        x.dtype == y.dtype for x, y in zip([found[0], *found[2:]], [tensors[0], *tensors[:5]], strict=True)
    )
    size = max(x.norm().item() for x in truth[2:])
    logit = max(1.0, float(true_lse[finite].abs().max()))
    answer = {}
    for name, a, b, c in zip(NAMES, found, truth, plain, strict=True):
        # a weight is exp(logit - lse), both rounded to fp32: its relative error is the absolute error of the logit
        rounding = torch.finfo(c.dtype).eps + torch.finfo(torch.float32).eps * logit
        ours = 0.0 if name == "lse" else relative(c, b, size)
        answer[name] = [relative(a, b, size), 2 * (ours + rounding)]
    return answer


def random_case(seed: int) -> Case:
    """A case from anywhere: sizes around the tiles' edges, windows from nothing to more than the sequence."""
    dice = random.Random(seed)
    heads = dice.choice([1, 2, 3])
    op = dice.choice(["mixed", "mixed", "mixed", "pod", "causal", "window"])
    followers = {"pod": range(heads), "mixed": [h for h in range(heads) if dice.random() < 0.6]}.get(op, ())
    n = dice.choice([dice.randint(5, 140), 16 * dice.randint(1, 8) + dice.randint(-1, 1)])
    windows = (
        dice.choice([0, 1, dice.randint(2, 30), n]),
        dice.choice([1, dice.randint(2, 70), dice.randint(1, n)]),
    )
    return Case(
        op,
        tuple(followers),
        n,
        windows,
        heads,
        dice.choice([1, 2, 3]),
        dice.choice([8, 16, 24]),
        dice.choice(["", "", "packed", "shared", "long"]),
        (dice.choice([16, 32, 64]), dice.choice([16, 32, 64]), 16),
        dice.choice(["float32", "float32", "float16"]),
        dice.choice([1, 1, 2]),
        dice.choice([None, None, 0.3, -0.2]),
        dice.choice(["tokens", "heads", "odd"]),
    )


def interpret(sweep: int) -> dict:
    """Errors and limits of every case; `broken` is why the interpreter does not run here at all."""
    if (why := interpreter.broken()) is not None:
        return why
    from pod.kernels import triton_prefill

    torch.use_deterministic_algorithms(True)  # torch.empty and torch.empty_like hold NaN
    assert (
        torch.empty(3).isnan().all() and torch.empty_like(torch.zeros(3, dtype=torch.float16)).isnan().all()
    )
    answers = [check(case) for case in CASES]
    for seed in range(sweep):
        answers.append(check(random_case(seed)))
        worst = max(error / limit for error, limit in answers[-1].values())
        print(seed, f"{worst:.2f}", random_case(seed), file=sys.stderr, flush=True)
    refused = triton_prefill.unsupported(call_of(torch.zeros(1, 1, 1, 16, dtype=torch.bfloat16)))
    return {"answers": answers, "refused": refused}


@pytest.fixture(scope="module")
def interpreted():
    return interpreter.answers(__file__)


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(CASES)), ids=[f"{i}-{c.op}-{c.n}" for i, c in enumerate(CASES)])
def test_interpreted_kernels_are_as_exact_as_the_reference(interpreted, index):
    wrong = {name: pair for name, pair in interpreted["answers"][index].items() if not pair[0] <= pair[1]}
    assert not wrong


@needs_triton
@pytest.mark.slow
def test_random_cases(interpreted):
    wrong = {
        seed: (random_case(seed), answer)
        for seed, answer in enumerate(interpreted["answers"][len(CASES) :])
        if any(not error <= limit for error, limit in answer.values())
    }
    assert not wrong


@needs_triton
@pytest.mark.slow
def test_interpreter_refuses_what_it_gets_wrong(interpreted):
    assert "bfloat16" in interpreted["refused"]


def test_document_bounds():
    from pod.kernels.dispatch import document_bounds

    starts, ends = document_bounds(torch.tensor([[5, 5, 2, -1, -1, 5, 5, -1], [1, 1, 1, 1, 0, 0, 0, 0]]))
    assert starts.tolist() == [[0, 0, 2, 8, 8, 5, 5, 8], [0, 0, 0, 0, 4, 4, 4, 4]]
    assert ends.tolist() == [[2, 2, 3, 0, 0, 7, 7, 0], [4, 4, 4, 4, 8, 8, 8, 8]]
    assert starts.dtype == ends.dtype == torch.int32


@needs_triton
def test_what_cannot_run_is_refused():
    from pod.kernels import triton_prefill

    q = torch.zeros(1, 2, 4, 16)
    for call, message in (
        (call_of(q.double()), "float64"),
        (call_of(torch.zeros(1, 1, 4, 320)), "head_dim 320"),
        (call_of(q, visibility=EVERYTHING), "all came before"),
        (call_of(q, visibility=Visibility(3, 2)), "sinks and a window without a lead"),
        (call_of(q, visibility=Visibility(bias=q[..., 0])), "a bias of their own"),
        (call_of(q[:, :, 2:], q), "behind a filled cache"),
    ):
        assert message in (triton_prefill.unsupported(call) or "")
    if not triton_prefill.interpreted():
        assert "device cpu" in (triton_prefill.unsupported(call_of(q)) or "")
    with pytest.raises(ValueError, match="give all in one dtype on one device"):
        operations("triton").causal_attention(q, q.half(), q)


@pytest.mark.gpu
@needs_triton
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("docs", ["", "packed", "long"])
def test_on_the_gpu(dtype, d, docs):
    case = Case("mixed", (0, 2), 1500, (16, 400), 4, 4, d, docs, None, dtype, 2)
    tensors = inputs(case)
    found = [x.cpu() for x in results(case, triton_attention, [x.cuda() for x in tensors])]
    exact = results(case, reference_attention, [x.double() for x in tensors])
    plain = results(case, reference_attention, tensors)
    size = max(x.norm().item() for x in exact[1:])
    for a, b, c in zip(found, exact, plain, strict=True):
        assert relative(a, b, size) <= 2 * (relative(c, b, size) + torch.finfo(c.dtype).eps)


if __name__ == "__main__":
    print(json.dumps(interpret(int(os.environ.get("POD_KERNEL_SWEEP", "0")))))
