"""Cross-layer attention as a trainable layout: own queries, the keys and values of the block's lead."""

import naive_layouts
import pytest
import torch
from rule_bytes import rule_nbytes

import pod

DOCS = torch.tensor([0] * 13 + [1] * 1 + [2] * 20 + [-1] * 3)


def make_cla(tools, family="llama", backend="auto", factor=2, dtype=torch.float64, **changes):
    stock = tools.make_stock(family, dtype, **changes)
    plan = pod.SharingPlan.cla(stock.config.num_hidden_layers, stock.config.num_key_value_heads, factor)
    return pod.load_model(stock, layout="cla", plan=plan, attention_backend=backend)


def sees_all(i, j):
    return True


# -- the layout ----------------------------------------------------------------------------------------------


def test_followers_have_no_key_and_value_weights(tools):
    model = make_cla(tools, "qwen3-g3")
    assert model.config.lead == [[0, 0], [0, 0], [2, 2], [2, 2], [4, 4]]
    names = set(model.state_dict())
    for layer in range(5):
        for name in ("k_proj.weight", "v_proj.weight", "k_norm.weight"):
            assert (f"model.layers.{layer}.self_attn.{name}" in names) == (layer in (0, 2, 4))
        assert f"model.layers.{layer}.self_attn.q_norm.weight" in names


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen2-tied", "phi3"])
def test_leads_start_from_the_mean_of_their_block(tools, family):
    stock = tools.make_stock(family)
    with torch.no_grad():
        for name, parameter in stock.named_parameters():
            if name.endswith("k_norm.weight"):
                parameter.normal_()
    dense = pod.load_model(stock).state_dict()  # fused weights of Phi-3 apart
    for factor in (2, 3):
        plan = pod.SharingPlan.cla(5, stock.config.num_key_value_heads, factor)
        state = pod.load_model(stock, layout="cla", plan=plan).state_dict()
        for name, weight in state.items():
            kind = name.split(".")[-2]
            if kind in ("k_proj", "v_proj", "k_norm"):
                layer = int(name.split(".")[2])
                block = range(layer, min(layer + factor, 5))
                members = [dense[name.replace(f".{layer}.", f".{i}.", 1)] for i in block]
                torch.testing.assert_close(weight, sum(members) / len(members), rtol=0, atol=1e-15)
            else:
                assert torch.equal(weight, dense[name])


def test_plans_of_whole_layers(tools):
    plan = pod.SharingPlan.cla(5, 2, factor=3)
    assert plan.lead == ((0, 0), (0, 0), (0, 0), (3, 3), (3, 3))
    assert pod.SharingPlan.cla(3, 1, factor=1).is_dense
    with pytest.raises(ValueError, match="factor >= 1"):
        pod.SharingPlan.cla(4, 2, factor=0)
    with pytest.raises(ValueError, match=r"layout = 'cla' shares whole layers.*SharingPlan\.cla"):
        pod.load_model(tools.make_stock(), layout="cla", plan=pod.SharingPlan(tools.lead))
    with pytest.raises(ValueError, match="layout = 'clap' is not supported; choose one of pod, cla, window"):
        pod.load_model(tools.make_stock(), layout="clap")


@torch.no_grad()
def test_blocks_of_one_layer_are_the_dense_model(tools):
    stock = tools.make_stock("qwen3", torch.float32)
    ids = tools.random_ids(2, 60)
    plan = pod.SharingPlan.cla(5, stock.config.num_key_value_heads, factor=1)
    shared = pod.load_model(stock, layout="cla", plan=plan)
    assert torch.equal(shared(ids).logits, pod.load_model(stock)(ids).logits)


# -- training ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["flash", "reference"])
@pytest.mark.parametrize(
    ("family", "changes", "factor"),
    [
        ("llama", {}, 2),  # G = 3
        ("llama", {"num_attention_heads": 8, "head_dim": 8}, 3),  # G = 4
        ("llama", {"num_key_value_heads": 6, "attention_bias": True}, 2),  # G = 1
        ("qwen3", {}, 2),
    ],
    ids=str,
)
@pytest.mark.parametrize("packed", [False, True])
def test_logits_and_all_gradients_equal_the_naive_decoder(tools, family, changes, factor, backend, packed):
    model = make_cla(tools, family, backend, factor, **changes).train()
    ids, docs = tools.random_ids(1, len(DOCS)), DOCS if packed else None
    real = torch.ones_like(DOCS, dtype=torch.bool) if docs is None else docs >= 0
    expected = naive_layouts.naive_logits(model, ids[0], sees_all, lambda i: i - i % factor, docs)[real]
    _, true_gradients = naive_layouts.loss_and_gradients(model, expected)
    logits = model(ids, doc_ids=None if docs is None else docs[None]).logits[0, real]
    _, gradients = naive_layouts.loss_and_gradients(model, logits)
    assert (logits - expected).abs().max() <= 1e-9 * expected.abs().max()
    assert gradients.keys() == true_gradients.keys() == dict(model.named_parameters()).keys()
    for name, gradient in gradients.items():
        assert (gradient - true_gradients[name]).norm() <= 1e-9 * true_gradients[name].norm(), name


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_is_exact(tools, reentrant):
    model = make_cla(tools, "qwen3-g3").train()
    ids, docs = tools.random_ids(2, len(DOCS)), DOCS.expand(2, -1)
    _, gradients = naive_layouts.loss_and_gradients(model, model(ids, doc_ids=docs).logits)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    _, checkpointed = naive_layouts.loss_and_gradients(model, model(ids, doc_ids=docs).logits)
    for name, gradient in gradients.items():
        torch.testing.assert_close(checkpointed[name], gradient, rtol=1e-9, atol=1e-12, msg=name)


def test_shared_qk_holds_keys_and_values_of_a_block_until_its_last_layer(tools):
    """One layer's keys and values, never a second copy, and nothing after the last follower."""
    model = make_cla(tools)
    handed_on = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda module, inputs, output: handed_on.append(output[1:]))
    model(tools.random_ids(1, 32), use_cache=False)
    size = 2 * 2 * 32 * 8 * 8  # keys and values, 2 KV heads, 32 tokens, d = 8, 8 B
    held = [[x for x in shared_qk if x is not None] for shared_qk in handed_on]
    assert [sum(x.untyped_storage().nbytes() for x in tensors) for tensors in held] == [size, 0, size, 0, 0]


@pytest.mark.slow
def test_compiles_without_graph_breaks(tools):
    model = make_cla(tools, backend="reference")
    ids = tools.random_ids(1, 50)
    with torch.no_grad():
        compiled = torch.compile(model.model, fullgraph=True, backend="eager")
        out = compiled(input_ids=ids, use_cache=False).last_hidden_state
        assert (out - model.model(input_ids=ids).last_hidden_state).abs().max() <= 1e-12


# -- with a cache --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["flash", "reference"])
@pytest.mark.parametrize("widths", naive_layouts.CHUNKINGS, ids=str)
@torch.no_grad()
def test_any_chunking_and_decoding_is_the_naive_decoder(tools, widths, backend):
    model = make_cla(tools, "qwen3", backend)
    ids = tools.random_ids(2, 50)
    logits = naive_layouts.feed(model, pod.make_cache(model), ids, widths)
    for row in range(2):
        expected = naive_layouts.naive_logits(model, ids[row], sees_all, lambda i: i - i % 2)
        assert (logits[row] - expected).abs().max() <= 1e-9


@pytest.mark.parametrize("backend", ["flash", "reference"])
@pytest.mark.parametrize("widths", naive_layouts.CHUNKINGS, ids=str)
@torch.no_grad()
def test_padded_rows_equal_rows_alone(tools, widths, backend):
    model = make_cla(tools, "llama", backend, factor=3)

    def naive(ids):
        return naive_layouts.naive_logits(model, ids, sees_all, lambda i: i - i % 3)

    naive_layouts.check_padded_rows(model, naive, widths, lambda: pod.make_cache(model, "cla"))


@pytest.mark.parametrize(("factor", "share"), [(2, 3 / 5), (3, 2 / 5), (5, 1 / 5)])
@torch.no_grad()
def test_followers_hold_nothing(tools, factor, share):
    model = make_cla(tools, dtype=torch.float32, factor=factor)
    cache, ids = model(tools.random_ids(2, 300), use_cache=True).past_key_values, tools.random_ids(2, 20)
    assert cache.spec == "cla"
    naive_layouts.feed(model, cache, ids, [1] * 20)
    parts = cache.nbytes_by_part()
    dense = 2 * 2 * 320 * 5 * 2 * 8 * 4  # K and V, 2 rows, 320 tokens, 5 layers, 2 KV heads, d = 8, 4 B
    assert rule_nbytes(cache) == share * dense
    assert abs((parts["keys"] + parts["values"]) / rule_nbytes(cache) - 1) <= 0.01
    assert set(parts) == {"keys", "values", "bookkeeping"}
    followers = [i for i in range(5) if i % factor]
    assert not any(list(cache.layers[i].parts()) for i in followers)


@torch.no_grad()
def test_generate_equals_a_loop_without_cache(tools):
    model = make_cla(tools, "qwen3-g3")
    ids, mask = tools.random_ids(2, 20), torch.ones(2, 20, dtype=torch.long)
    mask[0, :6] = 0
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=12, do_sample=False, num_beams=2, eos_token_id=-1
    )
    assert torch.equal(
        out,
        model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=12,
            do_sample=False,
            num_beams=2,
            eos_token_id=-1,
            use_cache=False,
        ),
    )


@torch.no_grad()
def test_packing_waits_until_the_followers_have_read(tools):
    """A prompt attends to native keys and values in every layer; packed, they are the lead's alone."""
    model = make_cla(tools, "qwen3")
    ids, options = tools.random_ids(2, 60), {"group_size": 8, "residual": 8}
    cache = pod.make_cache(model, "cla+int4", **options)
    cache.begin_prompt(50)
    logits = naive_layouts.feed(model, cache, ids, [30, 20] + [1] * 10)
    expected = model(ids).logits
    assert (logits - expected)[:, :50].abs().max() <= 1e-9
    assert (logits - expected)[:, 50:].abs().max() > 1e-3, "decoding reads four bits"
    native = naive_layouts.feed(model, native_cache := pod.make_cache(model), ids, [60])
    assert (native - expected).abs().max() <= 1e-9
    assert cache.nbytes < 0.6 * native_cache.nbytes


def test_caches_of_other_layouts_are_refused(tools):
    model, dense = make_cla(tools), pod.load_model(tools.make_stock())
    for spec in ("full", "pod", "snapkv", "window"):
        with pytest.raises(ValueError, match=f"'{spec}' does not fit this model.*use 'cla'"):
            pod.make_cache(model, spec, budget=100)
    for spec in ("cla", "window"):
        with pytest.raises(ValueError, match=rf"'{spec}' needs a model of that layout.*layout='{spec}'"):
            pod.make_cache(dense, spec)
    with pytest.raises(ValueError, match="another shape, plan or windows"):
        model(torch.ones(1, 3, dtype=torch.long), past_key_values=pod.make_cache(dense))
    three = make_cla(tools, factor=3)
    with pytest.raises(ValueError, match="another shape, plan or windows"):
        model(torch.ones(1, 3, dtype=torch.long), past_key_values=pod.make_cache(three))


# -- files ---------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_save_and_load_keep_layout_and_logits(tools, tmp_path):
    model = make_cla(tools, "qwen3", dtype=torch.float32, factor=3)
    model.save_pretrained(tmp_path)
    again, ids = pod.load_model(tmp_path), tools.random_ids(1, 50)
    assert again.config.layout == "cla" and again.config.sharing_plan == model.config.sharing_plan
    assert torch.equal(again(ids).logits, model(ids).logits)
    assert (
        pod.load_model(tmp_path, layout="cla", plan=model.config.sharing_plan).config.lead
        == model.config.lead
    )
    for layout in ("pod", "window"):
        with pytest.raises(ValueError, match="for its own blocks of layers only: leave plan and layout"):
            pod.load_model(tmp_path, layout=layout)
    with pytest.raises(ValueError, match="for its own blocks of layers only"):
        pod.load_model(tmp_path, plan=pod.SharingPlan.cla(5, 2))


@torch.no_grad()
def test_a_dense_export_becomes_cla_as_the_stock_model_does(tools, tmp_path):
    stock = tools.make_stock("qwen3", torch.float32)
    pod.load_model(stock, num_sink_tokens=3, num_recent_tokens=9).save_pretrained(tmp_path)
    ids = tools.random_ids(1, 30)
    expected = pod.load_model(stock, layout="cla")(ids).logits
    assert torch.equal(pod.load_model(tmp_path, layout="cla")(ids).logits, expected)


@pytest.mark.slow
@torch.no_grad()
def test_export_runs_without_this_package(tools, tmp_path):
    model = make_cla(tools, "qwen3", dtype=torch.float32)
    ids = tools.random_ids(1, 12)
    logits, tokens = naive_layouts.exported_logits(model, tmp_path, ids)
    assert (logits - model(ids).logits).abs().max() <= 1e-5
    assert torch.equal(tokens, model.generate(ids, max_new_tokens=8, do_sample=False))
