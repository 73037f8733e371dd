"""What must not go wrong silently: failed passes, foreign caches, chunks of padding, labels on padding."""

import pytest
import torch
from attention_inputs import operations
from torch._subclasses.fake_tensor import FakeTensorMode

import pod
from pod.modeling.model.llama import next_token_loss


@torch.no_grad()
def test_a_refused_pass_leaves_the_cache_as_it_was(tools):
    model = tools.make_pod("llama")
    ids, cache = tools.random_ids(1, 30), pod.make_cache(model)
    model(ids[:, :20], past_key_values=cache)
    with pytest.raises(ValueError, match="leave position_ids out"):
        model(ids[:, 20:], position_ids=torch.zeros(1, 10, dtype=torch.long), past_key_values=cache)
    assert cache.get_seq_length() == 20
    out = model(ids[:, 20:], past_key_values=cache).logits
    assert (out - model(ids).logits[:, 20:]).abs().max() <= 1e-9


@torch.no_grad()
def test_a_pass_that_failed_half_way_is_not_continued(tools, monkeypatch):
    model = tools.make_pod("llama")
    ids, cache = tools.random_ids(1, 30), pod.make_cache(model)
    model(ids[:, :20], past_key_values=cache)
    with monkeypatch.context() as patch:
        patch.setattr(model.model.layers[3].mlp, "forward", lambda x: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(ids[:, 20:], past_key_values=cache)
    with pytest.raises(ValueError, match=r"failed half-way: call reset\(\)"):
        model(ids[:, 20:], past_key_values=cache)
    cache.reset()
    assert (model(ids, past_key_values=cache).logits - model(ids).logits).abs().max() <= 1e-9


@torch.no_grad()
def test_caches_of_another_model_are_refused(tools):
    model, dense = tools.make_pod("llama"), tools.make_pod("llama", plan=False)
    wider = tools.make_pod("llama", windows=(4, 30))
    ids = tools.random_ids(1, 20)
    for cache in (pod.make_cache(dense), pod.make_cache(wider)):
        with pytest.raises(ValueError, match="another shape, plan or windows"):
            model(ids, past_key_values=cache)
    dense(ids, past_key_values=pod.make_cache(tools.make_pod("llama", windows=(9, 9), plan=False)))


METHODS = [("pod", {}), ("streamingllm", {"budget": 12}), ("snapkv", {"budget": 12, "window": 4})]


@pytest.mark.parametrize(("spec", "options"), METHODS, ids=[m[0] for m in METHODS])
@pytest.mark.parametrize("backend", ["flash", "reference"])
@torch.no_grad()
def test_chunks_of_padding_only(tools, spec, options, backend):
    model = tools.make_pod("llama", plan=spec == "pod", backend=backend)
    ids, mask = tools.random_ids(2, 40), torch.ones(2, 40, dtype=torch.long)
    mask[:, :9], mask[0, 9:20] = 0, 0
    arguments = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    results = [
        model.generate(
            ids,
            attention_mask=mask,
            past_key_values=pod.make_cache(model, spec, **options),
            prefill_chunk_size=size,
            **arguments,
        )
        for size in (4, None)
    ]
    assert torch.equal(*results)


@torch.no_grad()
def test_snapkv_leaves_rows_without_a_new_prompt_alone(tools):
    model = tools.make_pod("llama", plan=False)
    ids, mask = tools.random_ids(2, 30), torch.ones(2, 30, dtype=torch.long)
    mask[1, 23:26] = 0
    caches = [pod.make_cache(model, "snapkv", budget=8, window=4) for _ in range(2)]
    start = 0
    for width in [20, 1, 1, 1, 3, 1, 1, 1, 1]:
        part = mask[:, : start + width]
        out = model(ids[:, start : start + width], attention_mask=part, past_key_values=caches[0]).logits
        if not 23 <= start < 26:
            alone = model(ids[1:, start : start + width], past_key_values=caches[1]).logits
            assert (out[1] - alone[0]).abs().max() <= 1e-9
        start += width


def test_padding_is_never_a_label(tools):
    model = tools.make_pod("llama")
    ids = tools.random_ids(1, 20)
    expected = model(ids[:, :14], labels=ids[:, :14]).loss
    doc_ids = torch.tensor([[0] * 14 + [-1] * 6])
    assert (model(ids, labels=ids, doc_ids=doc_ids).loss - expected).abs() <= 1e-12
    rolled, mask = ids.roll(6, dims=1), torch.tensor([[0] * 6 + [1] * 14])
    assert (model(rolled, labels=rolled, attention_mask=mask).loss - expected).abs() <= 1e-12


@torch.no_grad()
def test_labels_documents_and_mask_may_be_in_host_memory():
    """Where training keeps documents, so that no pass waits for them.

    Fake tensors refuse to mix devices, as CUDA does; `meta` stands for a GPU.
    """
    with FakeTensorMode():
        logits, on_host = torch.empty(2, 9, 5, device="meta"), torch.zeros(2, 9, dtype=torch.long)
        for labels in (on_host, on_host.to("meta")):
            for documents, mask in ((on_host, None), (None, on_host), (on_host, on_host)):
                loss = next_token_loss(logits, labels, documents, mask, num_items=None)
                assert (loss.device.type, loss.shape) == ("meta", ())


def test_an_id_that_returns_is_a_new_document_in_every_backend():
    generator = torch.Generator().manual_seed(0)
    q, q_lead = (torch.randn(1, 2, 12, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    k, v, k_lead = (torch.randn(1, 1, 12, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    doc_ids = torch.tensor([[0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, -1]])
    outputs = [
        operations(b).pod_attention(q, k, v, q_lead, k_lead, 1, 2, doc_ids=doc_ids)
        for b in ("flash", "reference")
    ]
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-12)


def test_loading_with_another_dtype_leaves_the_source_alone(tools):
    stock = tools.make_stock("llama", torch.float32)
    assert pod.load_model(stock, dtype=torch.bfloat16).dtype == torch.bfloat16
    assert stock.dtype == torch.float32
