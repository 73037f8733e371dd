"""Window attention as a trainable layout: what a query sees, in training and from a ring of recent tokens."""

import naive_layouts
import pytest
import torch
from rule_bytes import rule_nbytes

import pod
from pod.plan.recording import record_attention_rows

DOCS = torch.tensor([0] * 13 + [1] * 1 + [2] * 20 + [-1] * 3)


def make_window(tools, family="llama", backend="auto", window=7, dtype=torch.float64, **changes):
    stock = tools.make_stock(family, dtype, **changes)
    return pod.load_model(stock, layout="window", num_recent_tokens=window, attention_backend=backend)


def within(window):
    return lambda i, j: i - j < window


def test_configuration(tools):
    config = make_window(tools).config
    assert (config.layout, config.num_sink_tokens, config.num_recent_tokens) == ("window", 0, 7)
    assert config.own_method == "window" and config.sharing_plan == pod.SharingPlan.windows(5, 2)
    assert pod.PodConfig(layout="window").num_recent_tokens == 4096
    assert (pod.PodConfig().num_sink_tokens, pod.PodConfig().num_recent_tokens) == (16, 4080)
    with pytest.raises(ValueError, match="no sinks, got num_sink_tokens = 4"):
        pod.load_model(tools.make_stock(), layout="window", num_sink_tokens=4)
    with pytest.raises(ValueError, match="a plan of its own"):
        pod.load_model(tools.make_stock(), layout="window", plan=pod.SharingPlan(tools.lead))


# -- training ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["flash", "reference"])
@pytest.mark.parametrize(
    ("family", "changes", "window"),
    [
        ("llama", {}, 1),  # G = 3
        ("llama", {"num_attention_heads": 8, "head_dim": 8}, 5),  # G = 4
        ("llama", {"num_key_value_heads": 6, "attention_bias": True}, 16),  # G = 1
        ("qwen3", {}, 40),
    ],
    ids=str,
)
@pytest.mark.parametrize("packed", [False, True])
def test_logits_and_all_gradients_equal_the_naive_decoder(tools, family, changes, window, backend, packed):
    model = make_window(tools, family, backend, window, **changes).train()
    ids, docs = tools.random_ids(1, len(DOCS)), DOCS if packed else None
    real = torch.ones_like(DOCS, dtype=torch.bool) if docs is None else docs >= 0
    expected = naive_layouts.naive_logits(model, ids[0], within(window), doc_ids=docs)[real]
    _, true_gradients = naive_layouts.loss_and_gradients(model, expected)
    logits = model(ids, doc_ids=None if docs is None else docs[None]).logits[0, real]
    loss, gradients = naive_layouts.loss_and_gradients(model, logits)
    assert (logits - expected).abs().max() <= 1e-9 * expected.abs().max()
    assert gradients.keys() == true_gradients.keys() == dict(model.named_parameters()).keys()
    for name, gradient in gradients.items():
        # window 1: one token has all the weight, so queries and keys get no gradient at all
        scale = true_gradients[name].norm() + 1e-3 * loss.abs()
        assert (gradient - true_gradients[name]).norm() <= 1e-9 * scale, name


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_is_exact(tools, reentrant):
    model = make_window(tools, "qwen3-g3").train()
    ids, docs = tools.random_ids(2, len(DOCS)), DOCS.expand(2, -1)
    _, gradients = naive_layouts.loss_and_gradients(model, model(ids, doc_ids=docs).logits)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    _, checkpointed = naive_layouts.loss_and_gradients(model, model(ids, doc_ids=docs).logits)
    for name, gradient in gradients.items():
        torch.testing.assert_close(checkpointed[name], gradient, rtol=1e-9, atol=1e-12, msg=name)


@torch.no_grad()
def test_window_of_the_whole_row_is_the_dense_model(tools):
    stock, ids = tools.make_stock("qwen3", torch.float32), tools.random_ids(2, 60)
    dense = pod.load_model(stock)(ids).logits
    assert torch.equal(pod.load_model(stock, layout="window", num_recent_tokens=60)(ids).logits, dense)
    assert (
        pod.load_model(stock, layout="window", num_recent_tokens=59)(ids).logits - dense
    ).abs().max() > 1e-3


# -- with a cache --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["flash", "reference"])
@pytest.mark.parametrize("window", [1, 7, 64])
@pytest.mark.parametrize("widths", naive_layouts.CHUNKINGS, ids=str)
@torch.no_grad()
def test_any_chunking_and_decoding_is_the_naive_decoder(tools, widths, window, backend):
    model = make_window(tools, "qwen3", backend, window)
    ids = tools.random_ids(2, 50)
    logits = naive_layouts.feed(model, pod.make_cache(model), ids, widths)
    for row in range(2):
        expected = naive_layouts.naive_logits(model, ids[row], within(window))
        assert (logits[row] - expected).abs().max() <= 1e-9


@pytest.mark.parametrize("backend", ["flash", "reference"])
@pytest.mark.parametrize("widths", naive_layouts.CHUNKINGS, ids=str)
@torch.no_grad()
def test_padded_rows_equal_rows_alone(tools, widths, backend):
    model = make_window(tools, "llama", backend)

    def naive(ids):
        return naive_layouts.naive_logits(model, ids, within(7))

    naive_layouts.check_padded_rows(model, naive, widths, lambda: pod.make_cache(model, "window"))


@torch.no_grad()
def test_long_chunks_go_through_the_ring_in_parts(tools):
    """A chunk behind a past that is longer than the part in which it is attended to."""
    model = make_window(tools, window=70)
    ids = tools.random_ids(1, 400)
    for widths in ([1, 399], [90, 1, 200, 109]):
        logits = naive_layouts.feed(model, pod.make_cache(model), ids, widths)
        assert (logits - model(ids).logits).abs().max() <= 1e-9


@torch.no_grad()
def test_what_left_the_window_is_freed(tools):
    model = make_window(tools, dtype=torch.float32, window=64)
    cache = pod.make_cache(model)
    ids = tools.random_ids(2, 700)
    for widths in ([20], [480], [1] * 200):
        start = cache.get_seq_length()
        naive_layouts.feed(model, cache, ids[:, start : start + sum(widths)], widths)
        held = 2 * 2 * min(cache.get_seq_length(), 64) * 5 * 2 * 8 * 4
        parts = cache.nbytes_by_part()
        assert rule_nbytes(cache) == held
        assert held <= parts["near_keys"] + parts["near_values"] <= held * (1.06 if start == 0 else 1)


@torch.no_grad()
def test_rows_can_be_reordered(tools):
    model = make_window(tools, "qwen3-g3")
    ids = tools.random_ids(3, 40)
    cache = pod.make_cache(model)
    naive_layouts.feed(model, cache, ids[:, :30], [30])
    order = torch.tensor([2, 0])
    cache.reorder_cache(order)
    logits = naive_layouts.feed(model, cache, ids[order, 30:], [1] * 10)
    assert (logits - model(ids[order]).logits[:, 30:]).abs().max() <= 1e-9


@torch.no_grad()
def test_generate_equals_a_loop_without_cache(tools):
    model = make_window(tools, "qwen3-g3")
    ids, mask = tools.random_ids(2, 20), torch.ones(2, 20, dtype=torch.long)
    mask[0, :6] = 0
    options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "eos_token_id": -1}
    assert torch.equal(model.generate(ids, **options), model.generate(ids, **options, use_cache=False))


def test_caches_of_other_layouts_are_refused(tools):
    model = make_window(tools)
    for spec in ("full", "pod", "snapkv", "cla", "streamingllm"):
        with pytest.raises(ValueError, match=f"'{spec}' does not fit this model.*use 'window'"):
            pod.make_cache(model, spec, budget=100)
    with pytest.raises(ValueError, match="measured on the dense model: load it with layout = 'pod'"):
        next(record_attention_rows(model, torch.ones(1, 3, dtype=torch.long), 2))
    other = make_window(tools, window=8)
    for cache in (pod.make_cache(other), pod.make_cache(pod.load_model(tools.make_stock()))):
        with pytest.raises(ValueError, match="another shape, plan or windows"):
            model(torch.ones(1, 3, dtype=torch.long), past_key_values=cache)


# -- files ---------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_save_and_load_keep_layout_and_logits(tools, tmp_path):
    model = make_window(tools, "qwen3", dtype=torch.float32)
    model.save_pretrained(tmp_path)
    again, ids = pod.load_model(tmp_path), tools.random_ids(1, 50)
    assert (again.config.layout, again.config.num_recent_tokens) == ("window", 7)
    assert torch.equal(again(ids).logits, model(ids).logits)
    stock = tools.make_stock("qwen3", torch.float32)
    for layout in ("cla", "pod"):
        expected = pod.load_model(stock, layout=layout)
        changed = pod.load_model(tmp_path, layout=layout)
        assert changed.config.num_recent_tokens == 4080 and changed.config.num_sink_tokens == 16
        assert torch.equal(changed(ids).logits, expected(ids).logits)


@pytest.mark.slow
@torch.no_grad()
def test_export_runs_without_this_package(tools, tmp_path):
    model = make_window(tools, "qwen3", dtype=torch.float32)
    ids = tools.random_ids(1, 12)
    logits, tokens = naive_layouts.exported_logits(model, tmp_path, ids)
    assert (logits - model(ids).logits).abs().max() <= 1e-5
    assert torch.equal(tokens, model.generate(ids, max_new_tokens=8, do_sample=False))
