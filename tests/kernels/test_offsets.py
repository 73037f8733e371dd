"""Triton kernels on memory of more than 2**31 elements, in Triton's interpreter.

They give the same bits as on compact memory. Pages that nothing touches cost nothing, so tensors are laid out
with one stride so large that the last steps along it lie beyond what 32 bits can say. The interpreter is
chosen when triton is imported: this file, started as a script.
"""

import json
import mmap
from dataclasses import replace

import interpreter
import pytest
import torch
from interpreter import needs_triton

from pod.modeling.model.attend import SharedQK, Tokens, Visibility, attend

MAP_NORESERVE = 0x4000  # Linux; Python names it from 3.13 on
BEYOND = 2**31
RUNS = ["batch", "heads", "tokens"]


def memory(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros that take memory page by page, when they are written."""
    pages = mmap.mmap(-1, numel * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    pages.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype)


def like(x: torch.Tensor) -> torch.Tensor:
    """``torch.empty_like`` that keeps strides with gaps."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    assert last < 40 * BEYOND
    return memory(last + 1, x.dtype).as_strided(x.shape, x.stride())


def vast(x: torch.Tensor, dimension: int) -> torch.Tensor:
    """``x`` where the last third along ``dimension`` lies beyond 2**31 elements.

    The stride itself is below.
    """
    order = [i for i in range(x.dim()) if i != dimension]
    strides = [0] * x.dim()
    step = 1
    for i in reversed(order):
        strides[i], step = step, step * x.shape[i]
    strides[dimension] = (3 * BEYOND // 2 // (x.shape[dimension] - 1) // 16 + 1) * 16
    assert step <= strides[dimension] < 1.5 * BEYOND <= (x.shape[dimension] - 1) * strides[dimension]
    shaped = torch.empty(0, dtype=x.dtype, device="meta").as_strided(x.shape, strides)
    return like(shaped).copy_(x)


def decoded(case, place=lambda x: x, change=lambda buffers: buffers) -> torch.Tensor:
    """Outputs of all layers, from queries, buffers and outputs as ``place`` lays them out.

    With a threshold, so that every line runs.
    """
    import test_decode as tests

    buffers = change(tests.poisoned_buffers(case, programs=13))
    outputs = []
    for number, layer in enumerate(tests.build(case)):
        kv_buffers = tests.packed_buffers(case, layer) if case.group_size else tests.stored(case, layer)
        near = kv_buffers[3] and Tokens(*map(place, kv_buffers[3]))
        kv_buffers = [*(x if x is None else place(x) for x in kv_buffers[:3]), near]
        arguments = tests.arguments_of(case, number, layer, kv_buffers, buffers)
        arguments |= {"q": place(arguments["q"]), "out": place(torch.zeros_like(arguments["q"]))}
        outputs.append(tests.pod_decode(**arguments, tau=0.3, backend="triton"))
    return torch.stack([x.contiguous() for x in outputs])


def decoding() -> dict[str, bool]:
    """What was far away → whether the outputs have the same bits."""
    import test_decode as tests

    case = tests.Case([200, 9, 40], [[0, 1, 2, 3, 4, 5], [0, 1, 2]], num_heads=6, spare=0, dtype="float32")
    expected = decoded(case)
    answer = {"logits": torch.equal(decoded(case, change=lambda x: wide_logits(x, 2**26)), expected)}
    for dimension, name in enumerate(RUNS):
        # queries and outputs [B, Hq, d] have no tokens
        found = decoded(case, lambda x, i=dimension: vast(x, i) if i < x.dim() - 1 else x)
        answer[name] = torch.equal(found, expected)
    return answer


def wide_logits(buffers, room: int):
    rows = buffers.logits.shape[:3]
    return replace(buffers, logits=memory(rows.numel() * room, torch.float32).view(*rows, room))


def packed_decoding() -> dict[str, bool]:
    """Stores of 4 bits with room for 2**25 tokens: codes, zeros and scales all exceed 2**31 elements."""
    import test_decode as tests

    layers = [[0, 1, 2, 3, 4, 5], [0, 1, 2]]
    sizes = {"num_heads": 6, "groups": 1, "head_dim": 64, "n_r": 21, "group_size": 16}
    case = tests.Case([90, 36, 60], layers, **sizes, dtype="float32")
    capacity = 2**25

    def place(x):
        if not isinstance(x, tests.Packed):
            return x
        grown = {}
        for name in ("codes", "zero", "scale"):
            old = getattr(x, name)
            shape = *old.shape[:2], old.shape[2] * capacity // x.codes.shape[2], old.shape[3]
            grown[name] = memory(torch.Size(shape).numel(), old.dtype).view(shape)
            grown[name][:, :, : old.shape[2]] = old
            assert x.shape[1] < 6 or grown[name].numel() > BEYOND
        return x._replace(**grown)

    found = decoded(case, place, lambda buffers: wide_logits(buffers, capacity + 64))
    return {"capacity": torch.equal(found, decoded(case))}


def storing() -> dict[str, bool]:
    """A decoded token's keys and values in buffers that lie far apart."""
    from pod.kernels.fused import NewToken
    from pod.kernels.triton_fused import OPERATIONS
    from pod.modeling.model.sharing import Roles

    generator = torch.Generator().manual_seed(0)
    q, k, v, cos, sin = (torch.randn(3, n, 16, generator=generator) for n in (12, 6, 6, 1, 1))
    roles, past = Roles((0, 2, 4), (1, 3, 5)), torch.tensor([1, 39, 38])
    answer = {}
    for dimension, name in enumerate(RUNS):
        found = []
        for place in (lambda x: x, lambda x, i=dimension: vast(x, i)):
            kv_buffers = [place(torch.zeros(3, *shape, 16)) for shape in ((3, 40), (3, 9), (6, 40))]
            OPERATIONS.rotate_and_store(
                q, k, v, (cos[:, 0], sin[:, 0]), None, roles, NewToken(past, *kv_buffers, 2)
            )
            found.append([buffer.contiguous() for buffer in kv_buffers])
        answer[name] = all(torch.equal(x, y) and x.any() for x, y in zip(*found, strict=True))
    return answer


def training() -> dict[str, bool]:
    """Fused attention, forward and backward: queries, keys and values, and a lead's, lie far apart."""
    from pod.kernels import triton_prefill

    tile = triton_prefill.Tile(16, 16, 16, 4, 1)
    triton_prefill.tiles = lambda *of: triton_prefill.Tiles(tile, tile, tile)
    answer = {}
    for dimension, name in enumerate(RUNS):
        # Inside a tile 32 bits are enough, where tokens lie as in a model: many of them, each less far away.
        shape = [1, 1, 200 if name == "tokens" else 20, 16]
        if name != "tokens":
            shape[dimension] = 3
        generator = torch.Generator().manual_seed(0)
        inputs = [torch.randn(shape, generator=generator) for _ in range(5)]
        found = []
        for place in (lambda x: x, lambda x, i=dimension: vast(x, i)):
            q, k, v, *lead = leaves = [place(x.clone()).requires_grad_() for x in inputs]
            out, lse = attend(q, Tokens(k, v), SharedQK(*lead), Visibility(2, 9), backend="triton")
            grads = torch.autograd.grad((out * inputs[0]).sum(), leaves)
            found.append([x.contiguous() for x in (out.detach(), lse, *grads)])
        answer[name] = all(torch.equal(x, y) and x.any() for x, y in zip(*found, strict=True))
    return answer


def interpret() -> dict:
    if (why := interpreter.broken()) is not None:
        return why
    parts = decoding, packed_decoding, storing, training
    return {part.__name__: part() for part in parts}


@pytest.mark.slow
@pytest.mark.nightly
@needs_triton
def test_offsets_are_computed_in_64_bits():
    found = interpreter.answers(__file__)
    assert {name: len(part) for name, part in found.items()} == {
        "decoding": 4,
        "packed_decoding": 1,
        "storing": 3,
        "training": 3,
    }
    assert not {(name, what) for name, part in found.items() for what, same in part.items() if not same}


if __name__ == "__main__":
    print(json.dumps(interpret()))
