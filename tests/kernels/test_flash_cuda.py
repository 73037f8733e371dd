"""The CUDA paths of the flash backends: their bookkeeping with emulated ops, the ops' signatures with fake tensors, and on a GPU."""

import inspect
from types import SimpleNamespace

import flash_emulation
import pytest
import torch
from attention_inputs import NAMES, gradients, tensors
from torch._subclasses.fake_tensor import FakeTensorMode

import pod  # noqa: F401  (connects the reference to the kernels)
from pod.kernels import api, cudnn, documents, flash_attn, flash_ops, flash_varlen
from pod.modeling.shipped import reference

CAUSAL, POD, WINDOW = flash_varlen.operations(lambda q: flash_emulation.OPS)


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
    found = gradients(POD, inputs, *windows, doc_ids=docs, scale=0.4)
    truth = gradients(reference.pod_attention, inputs, *windows, doc_ids=docs, scale=0.4)
    for name, a, b in zip(NAMES, found, truth, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("layout", layouts(20))
@pytest.mark.parametrize(("n", "window"), [(1, 3), (40, 1), (70, 13), (70, 70), (14, 13), (33, 200)])
def test_dense_and_window_attention(n, window, layout):
    inputs = tensors(2, 2, 2, n, 8)[:3]
    docs = layouts(n)[layout]
    for fast, slow, arguments in (
        (CAUSAL, reference.causal_attention, ()),
        (WINDOW, reference.window_attention, (window,)),
    ):
        found = gradients(fast, inputs, *arguments, doc_ids=docs)
        truth = gradients(slow, inputs, *arguments, doc_ids=docs)
        for a, b in zip(found, truth, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


def test_one_row_is_sliced_and_never_copied():
    """Batch 1 without documents: every input of every call is a view, and so is a model's transposed layout of a whole batch."""
    seen = []

    def watching(q, k, v, call):
        seen.extend((q, k, v))
        return flash_emulation.forward(q, k, v, call)

    pod_attention = flash_varlen.operations(lambda q: flash_varlen.Ops(watching, flash_emulation.backward))[1]
    inputs = tensors(1, 2, 2, 50, 8)
    pod_attention(*inputs, 3, 7)
    storages = {x.untyped_storage().data_ptr() for x in inputs}
    assert len(seen) == 12 and all(x.untyped_storage().data_ptr() in storages for x in seen)
    seen.clear()
    batch = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors(3, 2, 2, 50, 8)]
    flash_varlen.operations(lambda q: flash_varlen.Ops(watching, flash_emulation.backward))[0](*batch[:3])
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
    out = POD(*inputs, 3, 9)
    torch.testing.assert_close(out, reference.pod_attention(*inputs, 3, 9), rtol=0, atol=1e-11)
    assert out.transpose(1, 2).is_contiguous()  # what the output projection reads


@pytest.mark.parametrize("merge_elements", [1, 100, 1 << 24])
def test_merge_in_pieces(monkeypatch, merge_elements):
    monkeypatch.setattr(flash_varlen, "_MERGE_ELEMENTS", merge_elements)
    inputs = tensors(2, 2, 2, 60, 8)
    docs = layouts(60)["several"]
    for ids in (docs, docs[:1, :60], None):
        truth = reference.pod_attention(*inputs, 3, 9, doc_ids=ids)
        torch.testing.assert_close(POD(*inputs, 3, 9, doc_ids=ids), truth, rtol=0, atol=1e-11)


@pytest.mark.parametrize("layout", layouts(20))
@pytest.mark.parametrize("sink_rows", [1, 7, 40])
def test_copies_of_sinks(monkeypatch, sink_rows, layout):
    """Long rows get a copy of the sinks per piece; their gradients are summed."""
    monkeypatch.setattr(flash_varlen, "_SINK_ROWS", sink_rows)
    monkeypatch.setattr(flash_varlen, "_PLANS", documents.DocumentCache(size=1))
    inputs = tensors(2, 2, 2, 61, 8)
    docs = layouts(61)[layout]
    found = gradients(POD, inputs, 3, 4, doc_ids=docs)
    truth = gradients(reference.pod_attention, inputs, 3, 4, doc_ids=docs)
    for name, a, b in zip(NAMES, found, truth, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11, msg=lambda m, name=name: f"{name}: {m}")


def test_bfloat16_is_as_good_as_its_rounding():
    inputs = tensors(1, 2, 3, 300, 16, torch.bfloat16)
    truth = gradients(reference.pod_attention, [x.double() for x in inputs], 4, 50)
    found = gradients(POD, inputs, 4, 50)
    plain = gradients(reference.pod_attention, inputs, 4, 50)
    for name, a, b, c in zip(NAMES, found, truth, plain, strict=True):
        assert a.dtype == torch.bfloat16
        error, of_reference = ((x.double() - b).norm() / b.norm() for x in (a, c))
        assert error <= 2 * (of_reference + torch.finfo(torch.bfloat16).eps), name


def test_large_logits_do_not_overflow_the_merge():
    inputs = [x * 30 for x in tensors(1, 1, 1, 40, 8)]
    found = gradients(POD, inputs, 3, 5)
    for a, b in zip(found, gradients(reference.pod_attention, inputs, 3, 5), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_documents_are_read_once_until_they_change(monkeypatch):
    calls = []
    original = documents.document_segments
    monkeypatch.setattr(
        flash_varlen, "document_segments", lambda *arguments: calls.append(1) or original(*arguments)
    )
    monkeypatch.setattr(flash_varlen, "_PLANS", documents.DocumentCache(size=3))
    inputs = tensors(2, 1, 2, 30, 8)
    docs = layouts(30)["several"]

    def checked(ids):
        truth = reference.pod_attention(*inputs, 2, 4, doc_ids=ids)
        torch.testing.assert_close(POD(*inputs, 2, 4, doc_ids=ids), truth, rtol=0, atol=1e-11)

    for _ in range(4):
        checked(docs)
    assert len(calls) == 1
    docs[:, :7] = -1  # the same tensor with other documents
    checked(docs)
    assert len(calls) == 2
    for rows in (1, 2, 3):  # the same shape and windows otherwise
        few = [torch.cat([x, x])[:rows] for x in inputs]
        for ids in (None, docs[:1]):
            truth = reference.pod_attention(*few, 2, 4, doc_ids=ids)
            torch.testing.assert_close(POD(*few, 2, 4, doc_ids=ids), truth, rtol=0, atol=1e-11)
    q, k, v, *_ = inputs
    window = WINDOW(q, k, v, 4)
    torch.testing.assert_close(window, reference.window_attention(q, k, v, 4), rtol=0, atol=1e-11)
    torch.testing.assert_close(POD(*inputs, 0, 4), reference.pod_attention(*inputs, 0, 4), rtol=0, atol=1e-11)
    calls.clear()
    for seed in range(20):  # objects that die and leave their id to the next
        checked(torch.randint(0, 2, (2, 30), generator=torch.Generator().manual_seed(seed)).sort().values)
    assert len(calls) == 20 and len(flash_varlen._PLANS._entries) == 3
    with torch.inference_mode():
        ids = torch.zeros(2, 30, dtype=torch.long)
        checked(ids)
        ids[:, 15:] = 1
        checked(ids)


@pytest.mark.parametrize("ops", [flash_ops.PACKED, cudnn.OPS], ids=["flash", "cudnn"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("with_lead", [True, False])
def test_torch_ops_accept_what_they_are_given(monkeypatch, ops, batch, with_lead):
    """Fake CUDA tensors: schema, devices, dtypes and shapes. Autograd itself needs a CUDA build, so both halves run by hand."""

    # Some methods of tensors enter the device before they reach fake tensors, which a CPU build cannot.
    monkeypatch.setattr(torch.Tensor, "copy_", lambda x, values: torch.ops.aten.copy_(x, values))
    monkeypatch.setattr(torch.Tensor, "contiguous", lambda x: torch.ops.aten.contiguous(x))

    class Context:
        def save_for_backward(self, *tensors):
            self.saved_tensors = tensors

    query, key = (batch, 8, 300, 64), (batch, 2, 300, 64)
    with FakeTensorMode():
        inputs = [torch.empty(s, dtype=torch.bfloat16, device="cuda") for s in (query, key, key, query, key)]
        inputs[3:] = inputs[3:] if with_lead else (None, None)
        spans = [(row * 300, row * 300 + 300) for row in range(batch)]
        plan = flash_varlen.make_plan(spans, (4, 60), with_lead, inputs[0].device)
        context = Context()
        out = flash_varlen._Varlen.forward(context, *inputs, plan, 0.1, ops)
        assert out.shape == query and out.dtype == torch.bfloat16 and out.device.type == "cuda"
        grads = flash_varlen._Varlen.backward(context, torch.empty_like(out))
        for x, grad in zip(inputs, grads, strict=False):
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
        equal = all(len(x.diff().unique()) == 1 for x in (cu_q, cu_k))
        causal = causal or window is not None
        return flash_varlen.Call((cu_q, cu_k), (max_q, max_k), equal, causal, window, options["scale"])

    def forward(q, k, v, *rest, **options):
        nothing = torch.empty(0)
        return *flash_emulation.forward(q, k, v, unpack(rest, options)), nothing, nothing, nothing

    def backward(grad, q, k, v, out, lse, *rest, **options):
        return flash_emulation.backward(grad, q, k, v, out, lse, unpack(rest, options))

    return forward, backward


def as_cudnn_op(saw, lse_dims):
    """``aten._scaled_dot_product_cudnn_attention`` and its backward by emulation: heads first, top-left causal."""

    def call(q, k, causal, scale):
        assert causal and q.shape[2] == k.shape[2]
        saw.append("cudnn")
        bounds = torch.arange(q.shape[0] + 1, dtype=torch.int32) * q.shape[2]
        return flash_varlen.Call((bounds, bounds), (q.shape[2],) * 2, True, True, None, scale)

    def pack(x):
        assert x.dim() == 4 and x.transpose(1, 2).is_contiguous()
        return x.transpose(1, 2).flatten(0, 1)

    def unpack(x, like):
        return x.unflatten(0, (like.shape[0], -1)).transpose(1, 2).contiguous()

    def forward(q, k, v, bias, compute_lse, dropout, causal, debug, *, scale):
        assert bias is None and compute_lse and dropout == 0 and not debug
        out, lse = flash_emulation.forward(pack(q), pack(k), pack(v), call(q, k, causal, scale))
        lse = lse.unflatten(1, (q.shape[0], -1)).transpose(0, 1).contiguous()
        return unpack(out, q), lse[..., None] if lse_dims == 4 else lse, None, None

    def backward(
        grad, q, k, v, out, lse, seed, offset, bias, cu_q, cu_k, max_q, max_k, dropout, causal, *, scale
    ):
        assert bias is None and cu_q is None and cu_k is None and dropout == 0
        assert (max_q, max_k) == (q.shape[2], k.shape[2]) and lse.dim() == lse_dims and lse.is_contiguous()
        lse = lse.reshape(q.shape[:3]).transpose(0, 1).flatten(1)
        tensors = [pack(x) for x in (grad, q, k, v, out)]
        grads = flash_emulation.backward(*tensors, lse, call(q, k, causal, scale))
        return [unpack(g, x) for g, x in zip(grads, (q, k, v), strict=True)]

    return forward, backward


@pytest.mark.parametrize("lse_dims", [3, 4])
@pytest.mark.parametrize("name", ["flash", "cudnn"])
@pytest.mark.parametrize("layout", ["unpacked", "several", "left padding"])
def test_torch_backends_equal_the_reference(monkeypatch, name, layout, lse_dims):
    """The calls of ``flash`` and ``cudnn`` as PyTorch's ops see them."""
    saw = []
    forward, backward = as_torch_op(saw)
    dense_forward, dense_backward = as_cudnn_op(saw, lse_dims)
    aten = SimpleNamespace(
        _flash_attention_forward=forward,
        _flash_attention_backward=backward,
        _scaled_dot_product_cudnn_attention=dense_forward,
        _scaled_dot_product_cudnn_attention_backward=dense_backward,
    )
    monkeypatch.setattr(flash_ops, "_aten", aten)
    monkeypatch.setattr(cudnn, "_aten", aten)
    ops = {"flash": flash_ops.PACKED, "cudnn": cudnn.OPS}[name]
    _, pod_attention, window_attention = flash_varlen.operations(lambda q: ops)
    for n, batch in ((70, 2), (70, 1), (21, 2)):  # of 21 tokens 4 are sinks and 4 have distant ones: a square
        inputs = tensors(batch, 2, 2, n, 8)
        docs = layouts(n)[layout]
        docs = docs if docs is None else docs[:batch]
        found = gradients(window_attention, inputs[:3], 13, doc_ids=docs)
        truth = gradients(reference.window_attention, inputs[:3], 13, doc_ids=docs)
        for a, b in zip(found, truth, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-11)
        assert "cudnn" not in saw or n == 21  # it has no window; documents of less are causal
        saw.clear()
        found = gradients(pod_attention, inputs, 4, 13, doc_ids=docs)
        truth = gradients(reference.pod_attention, inputs, 4, 13, doc_ids=docs)
        for label, a, b in zip(NAMES, found, truth, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-11, msg=lambda m, label=label: f"{label}: {m}")
        if name == "cudnn" and layout == "unpacked":
            assert saw == ["cudnn", "flash", "flash", "cudnn"] * 2  # head, window, sinks, distant; and back
        else:
            assert "cudnn" not in saw or layout != "several"
        saw.clear()


def flash_attn_call(given):
    assert given["dropout_p"] in (0.0, None)
    left, right = given["window"]
    assert (left, right) == (-1, -1) or (right == 0 and not given["causal"])
    window = None if left < 0 else left + 1
    bounds = given["cu_seqlens_q"], given["cu_seqlens_k"]
    equal = all(len(x.diff().unique()) == 1 for x in bounds)
    longest = given["max_seqlen_q"], given["max_seqlen_k"]
    causal = given["causal"] or window is not None
    return flash_varlen.Call(bounds, longest, equal, causal, window, given["softmax_scale"])


def version_2_interface():
    """The functions of flash-attn 2.8 by emulation, with its signatures."""

    # fmt: off
    def forward(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
                window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False,
                block_table=None, leftpad_k=None, seqused_k=None, zero_tensors=False):
        given = locals() | {"window": (window_size_left, window_size_right)}
        return *flash_emulation.forward(q, k, v, flash_attn_call(given)), None, None

    def backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                 dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
                 deterministic, rng_state=None, zero_tensors=False):
        assert softcap == 0 and alibi_slopes is None and deterministic is False
        given = locals() | {"window": (window_size_left, window_size_right)}
        grads = flash_emulation.backward(dout, q, k, v, out, softmax_lse, flash_attn_call(given))
        for target, grad in zip((dq, dk, dv), grads, strict=True):
            target.copy_(grad)
        return softmax_lse

    # fmt: on
    return SimpleNamespace(_flash_attn_varlen_forward=forward, _flash_attn_varlen_backward=backward)


def version_3_interface(newest: bool):
    """The functions of version 3 by emulation: the newest signatures (custom ops, all by default), or the first ones."""

    # fmt: off
    def new_forward(q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_seqlens_q=None, cu_seqlens_k=None,
                    max_seqlen_q=None, max_seqlen_k=None, softmax_scale=None, causal=False, window_size_left=-1,
                    window_size_right=-1, attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None):
        given = locals() | {"window": (window_size_left, window_size_right), "dropout_p": None}
        return *flash_emulation.forward(q, k, v, flash_attn_call(given)), None, None

    def new_backward(dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None, sequed_k=None,
                     max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None, softmax_scale=None, is_causal=False,
                     window_size_left=-1, window_size_right=-1, softcap=0.0, deterministic=False, sm_margin=0):
        given = locals() | {"window": (window_size_left, window_size_right), "causal": is_causal, "dropout_p": None}
        grads = flash_emulation.backward(dout, q, k, v, out, softmax_lse, flash_attn_call(given))
        for target, grad in zip((dq, dk, dv), grads, strict=True):
            target.copy_(grad)

    def old_forward(q, k, v, k_new, v_new, qv, out, cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new, seqused_q, seqused_k,
                    max_seqlen_q, max_seqlen_k, page_table, kv_batch_idx, leftpad_k, rotary_cos, rotary_sin, q_descale,
                    k_descale, v_descale, softmax_scale, causal, window_size=(-1, -1), softcap=0.0, num_splits=1):
        assert k_new is None and page_table is None and out is None and q_descale is None
        given = locals() | {"window": window_size, "dropout_p": None}
        return *flash_emulation.forward(q, k, v, flash_attn_call(given)), None

    def old_backward(dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, sequed_q, sequed_k, max_seqlen_q,
                     max_seqlen_k, dq, dk, dv, softmax_scale, causal, window_size=(-1, -1), softcap=0.0,
                     deterministic=False, sm_margin=0):
        assert sequed_q is None and sequed_k is None
        left, right = window_size
        new_backward(dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, None, None, max_seqlen_q, max_seqlen_k,
                     dq, dk, dv, softmax_scale, causal, left, right)

    # fmt: on
    class CustomOp:
        def __init__(self, function):
            self._init_fn = function

        def __call__(self, *arguments, **options):
            return self._init_fn(*arguments, **options)

    functions = (CustomOp(new_forward), CustomOp(new_backward)) if newest else (old_forward, old_backward)
    return SimpleNamespace(_flash_attn_forward=functions[0], _flash_attn_backward=functions[1])


@pytest.mark.parametrize("version", ["2", "3", "first 3"])
@pytest.mark.parametrize("layout", ["unpacked", "several"])
def test_flash_attn_packages_equal_the_reference(version, layout):
    if version == "2":
        ops = flash_attn.version_2(version_2_interface())
    else:
        ops = flash_attn.version_3(version_3_interface(newest=version == "3"))
    pod_attention = flash_varlen.operations(lambda q: ops)[1]
    inputs = tensors(2, 2, 2, 50, 8)
    docs = layouts(50)[layout]
    found = gradients(pod_attention, inputs, 4, 13, doc_ids=docs)
    truth = gradients(reference.pod_attention, inputs, 4, 13, doc_ids=docs)
    for name, a, b in zip(NAMES, found, truth, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11, msg=lambda m, name=name: f"{name}: {m}")


def test_flash_attn_prefers_version_3_on_hopper(monkeypatch):
    modules = {}

    def find(name):
        if name in modules:
            return modules[name]
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(flash_attn.importlib, "import_module", find)
    find_ops = inspect.unwrap(flash_attn._ops)
    reason = find_ops(9, 0)
    assert "flash_attn_interface" in reason and "pip install flash-attn" in reason
    modules["flash_attn.flash_attn_interface"] = SimpleNamespace(_flash_attn_varlen_forward=lambda q, k: None)
    assert "older than 2.7" in find_ops(8, 0)
    modules["flash_attn.flash_attn_interface"] = version_2_interface()
    modules["flash_attn_interface"] = version_3_interface(newest=True)
    monkeypatch.setattr(flash_attn, "version_2", lambda interface: 2)
    monkeypatch.setattr(flash_attn, "version_3", lambda interface: 3)
    assert [find_ops(*capability) for capability in ((8, 0), (9, 0), (10, 0))] == [2, 3, 2]


@pytest.mark.parametrize(
    ("backend", "reason"),
    [("cudnn", "device cpu has no flash op"), ("flash-attn", "device cpu has no flash op")],
)
def test_cuda_backends_say_why_they_cannot_run(backend, reason):
    with pytest.raises(ValueError, match=f"'{backend}' cannot run: {reason}"):
        api.pod_attention(*tensors(1, 1, 1, 8, 8), 1, 2, backend=backend)
    assert backend not in api.AUTO_ORDER


def test_reasons_on_cuda(monkeypatch):
    def reason(dtype=torch.bfloat16, d=64, capability=(9, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        q = SimpleNamespace(device=torch.device("cuda"), dtype=dtype, shape=(1, 1, 8, d))
        return flash_ops.unsupported(q)

    assert reason() is None and reason(torch.float16, 256) is None
    assert "needs float16 or bfloat16" in reason(torch.float32)
    assert "multiple of 8" in reason(d=12) and "at most 256" in reason(d=264)
    assert "7.5 (needs 8.0)" in reason(capability=(7, 5))


GPU_SHAPES = [(1, 16, 48), (63, 4, 8), (500, 16, 100), (1025, 16, 240), (3000, 0, 700)]


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["flash", "cudnn", "flash-attn"])
@pytest.mark.parametrize("layout", layouts(20))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_on_a_gpu(backend, layout, dtype):
    for n, *windows in GPU_SHAPES:
        inputs = tensors(2, 2, 4, n, 64, dtype, "cuda")
        reason = api.BACKENDS[backend].unsupported(inputs[0])
        if reason:
            pytest.skip(reason)
        docs = layouts(n)[layout]
        options = {"doc_ids": docs if docs is None else docs.cuda()}
        truth = gradients(reference.pod_attention, [x.double() for x in inputs], *windows, **options)
        plain = gradients(reference.pod_attention, inputs, *windows, **options)
        found = gradients(api.pod_attention, inputs, *windows, backend=backend, **options)
        size = max(x.norm() for x in truth[1:])
        for name, a, b, c in zip(NAMES, found, truth, plain, strict=True):
            scale = b.norm() if b.norm() > 1e-9 else size
            error, of_reference = ((x.double() - b).norm() / scale for x in (a, c))
            assert error <= 2 * (of_reference + torch.finfo(dtype).eps), (name, n)
