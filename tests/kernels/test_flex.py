"""FlexAttention: its masks against loops, its eager forward against the reference, and the merge's gradients by emulation.

FlexAttention has no backward on the CPU, so for gradients its function is replaced by a dense one that asks the same mask.
"""

from functools import cache
from types import SimpleNamespace

import pytest
import torch
from attention_inputs import NAMES, gradients, operations, segments_of, tensors, with_lse
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import create_mask

import pod  # noqa: F401  (connects the kernels)
from pod.kernels import flex
from pod.modeling.shipped.attend import (
    AUTO_ORDER,
    CAUSAL,
    EVERYTHING,
    IMPLEMENTATIONS,
    Call,
    Lead,
    Segments,
    Tokens,
    Visibility,
    attend,
)

api, reference = map(operations, ("flex", "reference"))
CPU = torch.device("cpu")


def layouts(n):
    several = torch.stack([torch.arange(n) // (3 + n // (2 + row)) for row in range(2)])
    several[0, n // 3 : n // 2] = -1
    several[:, n - n // 9 :] = -1
    front = torch.zeros(2, n, dtype=torch.long)
    front[1, : n // 2] = -1
    returning = (torch.arange(n) // (1 + n // 7) % 2)[None]  # ids come again: new documents
    return {"unpacked": None, "several": several, "left padding": front, "shared row": returning}


def visible_by_loops(visible, n, row):
    """``[n, n]``, from the definitions."""
    return _visible_by_loops(visible, n, (0,) * n if row is None else tuple(row.tolist()))


@cache
def _visible_by_loops(visible, n, ids):
    allowed = torch.zeros(n, n, dtype=torch.bool)
    start = 0
    for i in range(n):
        start = i if i and ids[i] != ids[i - 1] else start
        for j in range(start, i + 1) if ids[i] >= 0 else ():
            window, sink = i - j < visible.num_recent, j - start < visible.num_sink
            allowed[i, j] = (window or sink) != visible.distant
    return allowed


@pytest.fixture(autouse=True)
def unfused(monkeypatch):
    """Eager FlexAttention without the compiler, which would trace every shape of these tests."""
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


def block_mask(visible, n, docs=None, batch=2):
    segments = segments_of(docs, batch) or Segments.whole(batch, n, n)
    return flex.block_mask(visible, segments, (batch, n), CPU)


@pytest.mark.parametrize("block", [4, 16])
@pytest.mark.parametrize("layout", layouts(20))
@pytest.mark.parametrize("windows", [(0, 1), (3, 9), (17, 5), (0, 200)], ids=str)
def test_blocks_say_what_the_mask_says(monkeypatch, windows, layout, block):
    """Unlisted blocks hide everything, whole blocks show everything, and none is listed in vain without documents."""
    monkeypatch.setattr(flex, "_BLOCK", block)
    for n in (1, 32, 37) if block == 4 else (37,):
        docs = layouts(n)[layout]
        for kind in ("window", "proximal", "distant"):
            visible = flex.Visible(kind == "distant", 0 if kind == "window" else windows[0], windows[1])
            mask = block_mask(visible, n, docs)
            assert mask.mask_mod is not None and mask.full_kv_num_blocks is not None
            rows = 1 if docs is None else 2
            blocks = -(-n // block)
            assert mask.kv_num_blocks.shape == (rows, 1, blocks)
            dense = create_mask(mask.mask_mod, rows, None, n, n, device="cpu")[:, 0]
            for b in range(rows):
                row = None if docs is None else docs.expand(2, n)[b]
                assert torch.equal(dense[b], visible_by_loops(visible, n, row)), (kind, n)
                padded = torch.zeros(blocks * block, blocks * block, dtype=torch.bool)
                padded[:n, :n] = dense[b]
                tiles = padded.unflatten(1, (blocks, block)).unflatten(0, (blocks, block)).transpose(1, 2)
                some, every = tiles.flatten(2).any(-1), tiles.flatten(2).all(-1)
                partial, whole = (
                    listed(count[b, 0], index[b, 0])
                    for count, index in (
                        (mask.kv_num_blocks, mask.kv_indices),
                        (mask.full_kv_num_blocks, mask.full_kv_indices),
                    )
                )
                assert not (partial & whole).any()
                assert not (whole & ~every).any()
                assert not (some & ~(partial | whole)).any()
                if docs is None:
                    # The first distant key of a block of sinks may be nearer than the block says.
                    assert (kind == "distant" and windows[0]) or torch.equal(partial | whole, some)
                    assert kind == "proximal" or torch.equal(whole, every)


def listed(count, index):
    pairs = torch.zeros(index.shape, dtype=torch.bool)
    for row in range(len(count)):
        assert index[row].sort().values.tolist() == list(range(index.shape[1]))  # all, the listed first
        pairs[row, index[row, : count[row]].long()] = True
    return pairs


def test_a_long_context_lists_what_its_windows_need():
    """128K tokens: block masks come from bounds of blocks, so this takes no ``n x n`` memory; most distant blocks are whole."""
    n = 1 << 17
    blocks = n // 128
    near = block_mask(flex.Visible(False, 16, 4080), n)
    far = block_mask(flex.Visible(True, 16, 4080), n)
    assert near.full_kv_num_blocks is not None and far.full_kv_num_blocks is not None
    listed_near = int((near.kv_num_blocks + near.full_kv_num_blocks).sum())
    assert listed_near <= blocks * (4080 // 128 + 3)
    assert int(far.full_kv_num_blocks.sum()) >= 0.99 * (blocks - 33) * (blocks - 34) / 2
    assert int(far.kv_num_blocks.sum()) <= 3 * blocks


SHAPES = [(1, 4, 8), (12, 4, 8), (13, 4, 8), (14, 0, 1), (150, 4, 30), (131, 0, 20), (64, 4, 400)]


@pytest.mark.parametrize("layout", layouts(20))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_eager_forward_equals_the_reference(shape, layout):
    n, *windows = shape
    docs = layouts(n)[layout]
    inputs = tensors(2, 2, 3, n, 16)
    for name, arguments in (
        ("pod", (*inputs, *windows)),
        ("causal", inputs[:3]),
        ("window", (*inputs[:3], windows[1])),
    ):
        function = f"{name}_attention"
        out = getattr(api, function)(*arguments, doc_ids=docs, scale=0.3)
        truth = getattr(reference, function)(*arguments, doc_ids=docs, scale=0.3)
        torch.testing.assert_close(out, truth, rtol=0, atol=1e-11)


@pytest.mark.parametrize("layout", ["unpacked", "several"])
def test_log_sum_exp(layout):
    """Natural, and -inf where a query sees nothing."""
    n = 70
    q, k, v, *_ = tensors(2, 2, 2, n, 16)
    docs = layouts(n)[layout]
    for kind in (False, True):
        visible = flex.Visible(kind, 3, 9)
        out, lse = flex._flex(q, k, v, block_mask(visible, n, docs), 0.3)
        allowed = [visible_by_loops(visible, n, None if docs is None else docs[b]) for b in range(2)]
        logits = (q @ k.repeat_interleave(2, 1).transpose(2, 3) * 0.3).masked_fill(
            ~torch.stack(allowed)[:, None], float("-inf")
        )
        torch.testing.assert_close(lse, logits.logsumexp(-1), rtol=0, atol=1e-11)
        assert not out.masked_select(lse[..., None] == float("-inf")).any()


def dense_flex(query, key, value, *, block_mask, scale, enable_gqa, return_aux):
    """FlexAttention in plain PyTorch, with gradients; a row without keys is 0 with a log-sum-exp of -inf, and has none."""
    assert return_aux.lse and enable_gqa == (query.shape[1] != key.shape[1])
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    shape = query.shape[0], query.shape[1], query.shape[2], key.shape[2]
    allowed = create_mask(block_mask.mask_mod, shape[0], None, *shape[2:], device="cpu")
    logits = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scale is None else scale)
    empty = ~allowed.any(-1, keepdim=True).expand(*shape[:3], 1)
    logits = logits.masked_fill(~allowed & ~empty, float("-inf"))
    lse = logits.logsumexp(-1).masked_fill(empty[..., 0], float("-inf"))
    return (logits.softmax(-1) @ value).masked_fill(empty, 0.0), SimpleNamespace(lse=lse)


@pytest.mark.parametrize("layout", layouts(20))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients_of_the_merge(monkeypatch, shape, layout):
    n, *windows = shape
    monkeypatch.setattr(flex, "flex_attention", dense_flex)
    monkeypatch.setitem(
        IMPLEMENTATIONS, "flex", IMPLEMENTATIONS["flex"]._replace(unsupported=lambda call: None)
    )
    inputs = tensors(2, 2, 3, n, 8)
    docs = layouts(n)[layout]
    found = gradients(api.pod_attention, inputs, *windows, doc_ids=docs)
    truth = gradients(reference.pod_attention, inputs, *windows, doc_ids=docs)
    for name, a, b in zip(NAMES, found, truth, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11, msg=lambda m, name=name: f"{name}: {m}")


def test_mixed_heads_are_composed():
    q, k, v, q_lead, k_lead = tensors(2, 3, 2, 60, 16)
    q_lead, k_lead = q_lead[:, :4], k_lead[:, :2]
    found = api.mixed_attention(q, k, v, q_lead, k_lead, [0, 2], 3, 9)
    truth = reference.mixed_attention(q, k, v, q_lead, k_lead, [0, 2], 3, 9)
    torch.testing.assert_close(found, truth, rtol=0, atol=1e-11)


def test_masks_are_made_once_per_windows_and_documents():
    docs = layouts(45)["several"]
    visible = flex.Visible(False, 3, 9)
    of_docs, whole = Segments.of_documents(docs, 2), Segments.whole(2, 45, 45)
    first = flex.block_mask(visible, of_docs, (2, 45), CPU)
    assert flex.block_mask(visible, of_docs, (2, 45), CPU) is first
    assert flex.block_mask(visible._replace(num_recent=8), of_docs, (2, 45), CPU) is not first
    assert flex.block_mask(visible, whole, (2, 45), CPU) is flex.block_mask(visible, whole, (1, 45), CPU)
    with torch.inference_mode():
        mask = flex.block_mask(
            visible._replace(num_recent=7), Segments.of_documents(docs.clone(), 2), (2, 45), CPU
        )
    assert not mask.kv_indices.is_inference()


@pytest.mark.parametrize("layout", layouts(20))
def test_log_sum_exp_of_the_merge(layout):
    n, docs = 61, layouts(61)[layout]
    q, k, v, q_lead, k_lead = tensors(2, 2, 3, n, 16)
    for lead, windows in ((None, (0, None)), (None, (3, 9)), (Lead(q_lead, k_lead), (3, 9))):
        found, truth = (with_lse(q, k, v, lead, windows, docs, backend=x) for x in ("flex", "reference"))
        for a, b in zip(found, truth, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


def test_it_says_why_it_cannot_run():
    q, k, v, q_lead, k_lead = tensors(1, 1, 1, 20, 16)
    with pytest.raises(ValueError, match="'flex' cannot run: it has no backward on the CPU"):
        api.causal_attention(q.requires_grad_(), k, v)
    with pytest.raises(ValueError, match="'flex' cannot run: it has no backward on the CPU"):
        api.pod_attention(q.detach(), k, v, q_lead, k_lead.requires_grad_(), 2, 3)
    with torch.no_grad():
        api.pod_attention(q, k, v, q_lead, k_lead, 2, 3)
    assert "flex" not in AUTO_ORDER
    q, tokens = q.detach(), Tokens(k, v)
    for see, message in (
        (EVERYTHING, "all came before"),
        (Visibility(bias=torch.zeros(1, 1, 20)), "a bias of their own"),
        (Visibility(positions=torch.arange(20)[None, None]), "positions"),
    ):
        with pytest.raises(ValueError, match=message):
            attend(q, tokens, visibility=see, backend="flex")
    with pytest.raises(ValueError, match="behind a filled cache"):
        attend(q[:, :, 5:], tokens, backend="flex")


def test_reasons_on_cuda(monkeypatch):
    def reason(dtype=torch.bfloat16, d=64, capability=(9, 0), triton=True):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(flex.importlib.util, "find_spec", lambda name: triton or None)
        q = SimpleNamespace(device=torch.device("cuda"), dtype=dtype, shape=(1, 1, 8, d))
        return flex.unsupported(Call(q, Tokens(q, q), None, CAUSAL, Segments.whole(1, 8, 8), 1.0))  # type: ignore[arg-type]

    assert reason() is None and reason(torch.float32, 16) is None
    assert "Triton is not installed" in reason(triton=False)
    assert "needs float16, bfloat16 or float32" in reason(torch.float64)
    assert "at least 16" in reason(d=8)
    assert "7.5 (needs 8.0)" in reason(capability=(7, 5))


@pytest.mark.gpu
@pytest.mark.parametrize("layout", layouts(20))
def test_on_a_gpu(monkeypatch, layout):
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", False)
    for dtype in (torch.bfloat16, torch.float32):
        for n, *windows in ((63, 4, 8), (500, 16, 100), (1025, 16, 240)):
            inputs = tensors(2, 2, 4, n, 64, dtype, "cuda")
            docs = layouts(n)[layout]
            options = {"doc_ids": docs if docs is None else docs.cuda()}
            truth = gradients(reference.pod_attention, [x.double() for x in inputs], *windows, **options)
            plain = gradients(reference.pod_attention, inputs, *windows, **options)
            found = gradients(api.pod_attention, inputs, *windows, **options)
            size = max(x.norm() for x in truth[1:])
            for name, a, b, c in zip(NAMES, found, truth, plain, strict=True):
                scale = b.norm() if b.norm() > 1e-9 else size
                error, of_reference = ((x.double() - b).norm() / scale for x in (a, c))
                # Triton multiplies fp32 as three TF32 products or plain TF32, by PyTorch's precision setting.
                bound = 2e-3 if dtype == torch.float32 else 2 * (of_reference + torch.finfo(dtype).eps)
                assert error <= bound, (name, n, dtype)
