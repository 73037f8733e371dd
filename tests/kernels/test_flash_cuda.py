"""The CUDA paths of the flash backends.

Their bookkeeping with emulated ops, the ops' signatures with fake tensors, and on a GPU.
"""

from types import SimpleNamespace

import flash_emulation
import pytest
import torch
from attention_inputs import NAMES, gradients, operations, segments_of, tensors, with_lse
from torch._subclasses.fake_tensor import FakeTensorMode

from pod.modeling.model import varlen
from pod.modeling.model.attend import (
    CAUSAL,
    IMPLEMENTATIONS,
    Call,
    Segments,
    SharedQK,
    Tokens,
    Visibility,
)

TORCH_OPS = varlen.op_forward, varlen.op_backward
reference, emulated = operations("reference"), operations("emulated")


@pytest.fixture(autouse=True)
def emulate(monkeypatch):
    flash_emulation.install(monkeypatch)


def layouts(n):
    """Packed documents by name, ``[2 or 1, n]``; None is unpacked."""
    several = torch.stack([torch.arange(n) // (3 + n // (2 + row)) for row in range(2)])
    several[0, n // 3 : n // 2] = -1
    several[:, n - n // 9 :] = -1
    returning = torch.arange(n) // (1 + n // 7) % 3  # ids come again: new documents
    padded_in_front = torch.zeros(2, n, dtype=torch.long)
    padded_in_front[1, : n // 2] = -1
    nothing_but_padding = torch.full((2, n), -1)
    nothing_but_padding[0] = 5
    return {
        "unpacked": None,
        "several": several,
        "shared row": returning[None],
        "left padding": padded_in_front,
        "empty row": nothing_but_padding,
        "single tokens": torch.arange(n).expand(2, n).contiguous(),
    }


SHAPES = [(1, 4, 8), (12, 4, 8), (13, 4, 8), (14, 0, 1), (63, 4, 8), (97, 0, 20), (120, 3, 17), (64, 4, 400)]


@pytest.mark.parametrize("layout", layouts(20))
@pytest.mark.parametrize(("batch", "heads", "groups"), [(2, 2, 3), (2, 1, 1)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_packed_calls_equal_the_reference_with_all_gradients(shape, batch, heads, groups, layout):
    n, *windows = shape
    docs = layouts(n)[layout]
    inputs = tensors(batch, heads, groups, n, 8)
    found = gradients(emulated.pod_attention, inputs, *windows, doc_ids=docs, scale=0.4)
    truth = gradients(reference.pod_attention, inputs, *windows, doc_ids=docs, scale=0.4)
    for name, a, b in zip(NAMES, found, truth, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("layout", layouts(20))
@pytest.mark.parametrize(("n", "window"), [(1, 3), (40, 1), (70, 13), (70, 70), (14, 13), (33, 200)])
def test_dense_and_window_attention(n, window, layout):
    inputs = tensors(2, 2, 2, n, 8)[:3]
    docs = layouts(n)[layout]
    for fast, slow, arguments in (
        (emulated.causal_attention, reference.causal_attention, ()),
        (emulated.window_attention, reference.window_attention, (window,)),
    ):
        found = gradients(fast, inputs, *arguments, doc_ids=docs)
        truth = gradients(slow, inputs, *arguments, doc_ids=docs)
        for a, b in zip(found, truth, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


def test_one_row_is_sliced_and_never_copied(monkeypatch):
    """Batch 1 without documents: every input of every call is a view.

    So is a model's transposed layout of a whole batch.
    """
    seen = []

    def watching(q, k, v, call):
        seen.extend((q, k, v))
        return flash_emulation.forward(q, k, v, call)

    flash_emulation.replace_ops(monkeypatch, watching, flash_emulation.backward)
    inputs = tensors(1, 2, 2, 50, 8)
    emulated.pod_attention(*inputs, 3, 7)
    storages = {x.untyped_storage().data_ptr() for x in inputs}
    assert len(seen) == 12 and all(x.untyped_storage().data_ptr() in storages for x in seen)
    seen.clear()
    batch = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors(3, 2, 2, 50, 8)]
    emulated.causal_attention(*batch[:3])
    storages = {x.untyped_storage().data_ptr() for x in batch}
    assert len(seen) == 3 and all(x.untyped_storage().data_ptr() in storages for x in seen)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("strided", ["heads outside", "heads inside", "channels apart"])
def test_layouts_of_memory(strided, batch):
    inputs = tensors(batch, 2, 2, 40, 8)
    if strided == "heads inside":
        inputs = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]
    elif strided == "channels apart":
        inputs = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in inputs]
    out = emulated.pod_attention(*inputs, 3, 9)
    torch.testing.assert_close(out, reference.pod_attention(*inputs, 3, 9), rtol=0, atol=1e-11)
    assert out.transpose(1, 2).is_contiguous()  # what the output projection reads


@pytest.mark.parametrize("merge_elements", [1, 100, 1 << 24])
def test_merge_in_pieces(monkeypatch, merge_elements):
    monkeypatch.setattr(varlen, "_MERGE_ELEMENTS", merge_elements)
    inputs = tensors(2, 2, 2, 60, 8)
    docs = layouts(60)["several"]
    for ids in (docs, docs[:1, :60], None):
        truth = reference.pod_attention(*inputs, 3, 9, doc_ids=ids)
        torch.testing.assert_close(
            emulated.pod_attention(*inputs, 3, 9, doc_ids=ids), truth, rtol=0, atol=1e-11
        )


@pytest.mark.parametrize("layout", layouts(20))
@pytest.mark.parametrize("sink_rows", [1, 7, 40])
def test_copies_of_sinks(monkeypatch, sink_rows, layout):
    """Long rows get a copy of the sinks per piece; their gradients are summed."""
    monkeypatch.setattr(varlen, "_SINK_ROWS", sink_rows)
    inputs = tensors(2, 2, 2, 61, 8)
    docs = layouts(61)[layout]
    found = gradients(emulated.pod_attention, inputs, 3, 4, doc_ids=docs)
    truth = gradients(reference.pod_attention, inputs, 3, 4, doc_ids=docs)
    for name, a, b in zip(NAMES, found, truth, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11, msg=lambda m, name=name: f"{name}: {m}")


def test_bfloat16_is_as_good_as_its_rounding():
    inputs = tensors(1, 2, 3, 300, 16, torch.bfloat16)
    truth = gradients(reference.pod_attention, [x.double() for x in inputs], 4, 50)
    found = gradients(emulated.pod_attention, inputs, 4, 50)
    plain = gradients(reference.pod_attention, inputs, 4, 50)
    for name, a, b, c in zip(NAMES, found, truth, plain, strict=True):
        assert a.dtype == torch.bfloat16
        error, of_reference = ((x.double() - b).norm() / b.norm() for x in (a, c))
        assert error <= 2 * (of_reference + torch.finfo(torch.bfloat16).eps), name


def test_large_logits_do_not_overflow_the_merge():
    inputs = [x * 30 for x in tensors(1, 1, 1, 40, 8)]
    found = gradients(emulated.pod_attention, inputs, 3, 5)
    for a, b in zip(found, gradients(reference.pod_attention, inputs, 3, 5), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_plans_are_made_once_per_windows_and_documents(monkeypatch):
    plans, original = [], varlen.make_plan
    monkeypatch.setattr(varlen, "make_plan", lambda *x: plans.append(1) or original(*x))
    inputs = tensors(2, 1, 2, 30, 8)
    lead, docs = SharedQK(*inputs[3:]), layouts(30)["several"]

    def checked(segments, windows=(2, 4), lead=lead, inputs=inputs):
        options = {"lead": lead, "windows": windows, "segments": segments}
        found, truth = (with_lse(*inputs[:3], backend=x, **options) for x in ("emulated", "reference"))
        for a, b in zip(found, truth, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-11)

    segments = segments_of(docs, 2)
    for _ in range(4):
        checked(segments)
    assert len(plans) == 1
    docs[:, :7] = -1  # the same tensor with other documents
    checked(segments_of(docs, 2))
    assert len(plans) == 2
    checked(segments, (0, 4))
    checked(segments, (0, 4), None)
    checked(segments, (0, None), None)
    assert len(plans) == 5
    for rows in (1, 2, 3):  # the same shape and windows otherwise
        few = [torch.cat([x, x])[:rows] for x in inputs]
        for ids in (None, docs[:1]):
            checked(segments_of(ids, rows), lead=SharedQK(few[3], few[4]), inputs=few)
    with torch.inference_mode():
        segments = segments_of(docs.clone(), 2)
        checked(segments)
    plans.clear()
    options = {"windows": (2, 4), "lead": lead, "segments": segments}
    found, truth = (  # what was made there serves a pass that trains
        gradients(lambda *qkv, name=name: with_lse(*qkv, backend=name, **options)[0], inputs[:3])
        for name in ("emulated", "reference")
    )
    assert not plans
    for a, b in zip(found, truth, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("with_lead", [True, False])
def test_torch_ops_accept_what_they_are_given(monkeypatch, batch, with_lead):
    """Torch ops accept what they are given, as fake CUDA tensors.

    Schema, devices, dtypes and shapes are checked. Autograd itself needs a CUDA build, so both halves run by
    hand.
    """

    # Some methods of tensors enter the device before they reach fake tensors, which a CPU build cannot.
    monkeypatch.setattr(torch.Tensor, "copy_", lambda x, values: torch.ops.aten.copy_(x, values))
    monkeypatch.setattr(torch.Tensor, "contiguous", lambda x: torch.ops.aten.contiguous(x))

    query, key = (batch, 8, 300, 64), (batch, 2, 300, 64)
    with FakeTensorMode():
        inputs = [torch.empty(s, dtype=torch.bfloat16, device="cuda") for s in (query, key, key, query, key)]
        inputs[3:] = inputs[3:] if with_lead else (None, None)
        segments, see = Segments.whole(batch, 300, 300).all, Visibility(4, 60)
        plan = varlen.make_plan(segments, (300, 300), see, with_lead, 0.1, inputs[0].device)
        flash_emulation.replace_ops(monkeypatch, *TORCH_OPS)
        out, lse = varlen.forward(inputs, plan)
        assert out.shape == query and out.dtype == torch.bfloat16 and out.device.type == "cuda"
        assert lse.shape == query[:3] and lse.dtype == torch.float32 and lse.device.type == "cuda"
        grads = varlen.backward(inputs, torch.empty_like(out), out, lse, plan)
        for x, grad in zip(inputs, grads, strict=True):
            assert x is grad is None or (grad.shape, grad.dtype, grad.device) == (x.shape, x.dtype, x.device)


def as_torch_op(saw):
    """``aten._flash_attention_forward`` and ``_backward`` by emulation."""

    def unpack(bounds_and_rest, options):
        cu_q, cu_k, max_q, max_k, dropout, causal, *_ = bounds_and_rest
        left = options.get("window_size_left")
        assert dropout == 0 and (left is None) == (options.get("window_size_right") is None)
        assert left is None or options["window_size_right"] == 0
        saw.append("flash")
        window = None if left is None else left + 1
        causal = causal or window is not None
        return varlen.PackedCall((cu_q, cu_k), (max_q, max_k), causal, window, options["scale"])

    def forward(q, k, v, *rest, **options):
        nothing = torch.empty(0)
        return *flash_emulation.forward(q, k, v, unpack(rest, options)), nothing, nothing, nothing

    def backward(grad, q, k, v, out, lse, *rest, **options):
        return flash_emulation.backward(grad, q, k, v, out, lse, unpack(rest, options))

    return forward, backward


@pytest.mark.parametrize("layout", ["unpacked", "several", "left padding"])
def test_torch_ops_equal_the_reference(monkeypatch, layout):
    """The calls of ``flash`` as PyTorch's ops see them."""
    saw = []
    forward, backward = as_torch_op(saw)
    aten = SimpleNamespace(_flash_attention_forward=forward, _flash_attention_backward=backward)
    monkeypatch.setattr(varlen, "_aten", aten)
    flash_emulation.replace_ops(monkeypatch, *TORCH_OPS)
    for n, batch in ((70, 2), (70, 1), (21, 2)):  # of 21 tokens 4 are sinks and 4 have distant ones: a square
        inputs = tensors(batch, 2, 2, n, 8)
        docs = layouts(n)[layout]
        docs = docs if docs is None else docs[:batch]
        found = gradients(emulated.window_attention, inputs[:3], 13, doc_ids=docs)
        truth = gradients(reference.window_attention, inputs[:3], 13, doc_ids=docs)
        for a, b in zip(found, truth, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-11)
        saw.clear()
        found = gradients(emulated.pod_attention, inputs, 4, 13, doc_ids=docs)
        truth = gradients(reference.pod_attention, inputs, 4, 13, doc_ids=docs)
        for label, a, b in zip(NAMES, found, truth, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-11, msg=lambda m, label=label: f"{label}: {m}")
        assert len(saw) == 8 or layout == "several"  # head, window, sinks, distant; and back
        saw.clear()


def test_reasons_on_cuda(monkeypatch):
    def reason(dtype=torch.bfloat16, d=64, capability=(9, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        q = SimpleNamespace(device=torch.device("cuda"), dtype=dtype, shape=(1, 1, 8, d))
        whole = Segments.whole(1, 8, 8)
        call = Call(q, Tokens(q, q), None, CAUSAL, whole, 1.0)  # type: ignore[arg-type]
        return varlen.unsupported_on_cuda(call)

    assert reason() is None and reason(torch.float16, 256) is None
    assert "needs float16 or bfloat16" in reason(torch.float32)
    assert "multiple of 8" in reason(d=12) and "at most 256" in reason(d=264)
    assert "capability 8.0" in reason(capability=(7, 5))


GPU_SHAPES = [(1, 16, 48), (63, 4, 8), (500, 16, 100), (1025, 16, 240), (3000, 0, 700)]


@pytest.mark.gpu
@pytest.mark.parametrize("layout", layouts(20))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_on_a_gpu(monkeypatch, layout, dtype):
    flash_emulation.replace_ops(monkeypatch, *TORCH_OPS)  # the library's own, not the emulation of this file
    for n, *windows in GPU_SHAPES:
        inputs = tensors(2, 2, 4, n, 64, dtype, "cuda")
        call = Call(inputs[0], Tokens(*inputs[1:3]), None, CAUSAL, Segments.whole(2, n, n), 1.0)
        reason = IMPLEMENTATIONS["flash"].unsupported(call)
        if reason:
            pytest.skip(reason)
        docs = layouts(n)[layout]
        options = {"doc_ids": docs if docs is None else docs.cuda()}
        truth = gradients(reference.pod_attention, [x.double() for x in inputs], *windows, **options)
        plain = gradients(reference.pod_attention, inputs, *windows, **options)
        found = gradients(operations("flash").pod_attention, inputs, *windows, **options)
        size = max(x.norm() for x in truth[1:])
        for name, a, b, c in zip(NAMES, found, truth, plain, strict=True):
            scale = b.norm() if b.norm() > 1e-9 else size
            error, of_reference = ((x.double() - b).norm() / scale for x in (a, c))
            assert error <= 2 * (of_reference + torch.finfo(dtype).eps), (name, n)
