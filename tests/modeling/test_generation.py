"""Step by step = all at once, padded = alone, chunked = one shot.

Every misuse of a filled cache is an error.
"""

import math

import pytest
import torch

import pod

FAMILIES = ["llama", "llama-tied-biased-llama3", "llama-linear-mha", "mistral", "qwen2-yarn", "qwen3-g3"]
TOLERANCE = 1e-9


def feed(model, cache, ids, widths, mask=None):
    """Feed ``[B, n]`` in chunks of the given widths; the logits of all columns."""
    outputs, start = [], 0
    for width in widths:
        end = start + width
        part = None if mask is None else mask[:, :end]
        outputs.append(model(ids[:, start:end], attention_mask=part, past_key_values=cache).logits)
        start = end
    assert start == ids.shape[1]
    return torch.cat(outputs, dim=1)


def pod_oracle(model, windows):
    """Equations 3 and 4 with loops over heads and queries.

    Leads come from the plan; None = sees proximal tokens only.
    """
    sinks, recent = windows
    queries, keys = {}, {}

    def attend(layer, q, k, v, turn):
        n, positions = q.shape[1], torch.arange(q.shape[1])
        queries[layer], keys[layer] = turn(q, positions), turn(k, positions)
        out = torch.zeros_like(q)
        for head in range(q.shape[0]):
            kv = head // (q.shape[0] // k.shape[0])
            lead = model.config.sharing_plan.lead[layer][kv]
            for i in range(n):
                pairs = [(j, layer if j < sinks or i - j < recent else lead) for j in range(i + 1)]
                pairs = [(j, source) for j, source in pairs if source is not None]
                logits = [keys[source][kv, j] @ queries[source][head, i] for j, source in pairs]
                weights = (torch.stack(logits) / math.sqrt(q.shape[2])).softmax(0)
                out[head, i] = weights @ v[kv, [j for j, _ in pairs]]
        return out

    return attend


@pytest.mark.parametrize("family", ["llama", "qwen3-g3"])
@torch.no_grad()
def test_model_follows_the_paper(tools, family):
    model = tools.make_pod(family, windows=(2, 5))
    ids = tools.random_ids(1, 19)
    expected = tools.naive_logits(model, ids[0], pod_oracle(model, (2, 5)))
    dense = pod.load_model(tools.make_stock(family))(ids).logits[0]
    assert (model(ids).logits[0] - expected).abs().max() <= TOLERANCE
    assert (dense - expected).abs().max() > 1e-3, "the plan must matter in this test"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("backend", ["flash", "reference"])
@pytest.mark.parametrize("prompt", [3, 15, 40])
@torch.no_grad()
def test_decode_equals_full_forward(tools, family, backend, prompt):
    model = tools.make_pod(family, backend=backend)
    ids = tools.random_ids(2, 70)
    expected = model(ids).logits
    logits = feed(model, pod.make_cache(model), ids, [prompt] + [1] * (70 - prompt))
    assert (logits - expected).abs().max() <= TOLERANCE


@torch.no_grad()
def test_decode_equals_full_forward_in_single_precision(tools):
    model = tools.make_pod("llama", torch.float32)
    ids = tools.random_ids(2, 90)
    expected = model(ids).logits
    logits = feed(model, pod.make_cache(model), ids, [20] + [1] * 70)
    assert (logits - expected).abs().max() <= 2e-5 * expected.abs().max()


@pytest.mark.parametrize("lead", [[2, 1, 0], [3, 1, 3], [2, 3, 0], [3, 1, 0]], ids=str)
@torch.no_grad()
def test_bfloat16_decodes_with_any_head_pattern(tools, lead):
    """Leads and followers that are not neighbours are written by index, in the dtype of the logits."""
    sizes = {"num_hidden_layers": 4, "num_key_value_heads": 3, "initializer_range": 0.1}
    plan = pod.SharingPlan([[0, 0, 0], [0, 1, 0], [2, 1, 0], lead])
    windows = {"plan": plan, "num_sink_tokens": 2, "num_recent_tokens": 7}
    model = pod.load_model(tools.make_stock("llama", torch.bfloat16, **sizes), **windows)
    ids = tools.random_ids(2, 40)
    logits = feed(model, pod.make_cache(model), ids, [20] + [1] * 20).double()
    one_shot = model(ids).logits.double()
    exact = pod.load_model(tools.make_stock("llama", torch.bfloat16, **sizes).double(), **windows)(ids).logits
    assert (logits - exact).norm() <= 2 * (one_shot - exact).norm()


@pytest.mark.parametrize(
    "widths", [[70], [1] * 70, [7] * 10, [13, 1, 1, 30, 2, 23], [15, 55], [16, 54]], ids=str
)
@torch.no_grad()
def test_any_chunking_is_one_shot(tools, widths):
    model = tools.make_pod("qwen3-g3")
    ids = tools.random_ids(2, 70)
    logits = feed(model, pod.make_cache(model), ids, widths)
    assert (logits - model(ids).logits).abs().max() <= TOLERANCE


@pytest.mark.parametrize("backend", ["flash", "reference"])
@pytest.mark.parametrize("widths", [[60] + [1] * 10, [5] * 14, [1] * 70, [40, 1, 1, 28]], ids=str)
@pytest.mark.parametrize("pads", [(9, 0, 33), (0, 8, 1)], ids=str)
@torch.no_grad()
def test_padded_rows_equal_rows_alone(tools, widths, pads, backend):
    """Left padding, and also padding inside a conversation (rows 1 and 2)."""
    model = tools.make_pod("llama", backend=backend)
    ids, mask = tools.random_ids(3, 70), torch.ones(3, 70, dtype=torch.long)
    for row, pad in enumerate(pads):
        mask[row, :pad] = 0
    mask[1, 41:44] = 0
    logits = feed(model, pod.make_cache(model), ids, widths, mask)
    for row in range(3):
        real = mask[row].bool()
        alone = model(ids[row][real][None]).logits[0]
        assert (logits[row][real] - alone).abs().max() <= TOLERANCE


@torch.no_grad()
def test_padding_without_cache(tools):
    model = tools.make_pod("llama")
    ids, mask = tools.random_ids(2, 50), torch.ones(2, 50, dtype=torch.long)
    mask[0, :11], mask[1, 45:] = 0, 0
    logits = model(ids, attention_mask=mask).logits
    for row in range(2):
        real = mask[row].bool()
        assert (logits[row][real] - model(ids[row][real][None]).logits[0]).abs().max() <= TOLERANCE


@torch.no_grad()
def test_packed_documents_equal_documents_alone(tools):
    model = tools.make_pod("llama")
    ids = tools.random_ids(1, 80)
    doc_ids = torch.tensor([0] * 33 + [1] * 3 + [2] * 40 + [-1] * 4)[None]
    logits = model(ids, doc_ids=doc_ids).logits
    for start, end in [(0, 33), (33, 36), (36, 76)]:
        alone = model(ids[:, start:end]).logits
        assert (logits[:, start:end] - alone).abs().max() <= TOLERANCE


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"prefill_chunk_size": 7}], ids=str)
def test_generate_equals_uncached_decoding(tools, options):
    model = tools.make_pod("llama")
    ids, mask = tools.random_ids(2, 37), torch.ones(2, 37, dtype=torch.long)
    mask[0, :6] = 0
    arguments = {"attention_mask": mask, "max_new_tokens": 25, "do_sample": False, "eos_token_id": None}
    cached = model.generate(ids, **arguments, **options)
    options.pop("prefill_chunk_size", None)
    assert torch.equal(cached, model.generate(ids, use_cache=False, **arguments, **options))


def test_conversation_continues(tools):
    """Second turn with the whole conversation, or with new tokens and the whole mask: the same answer."""
    model = tools.make_pod("llama")
    arguments = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    first = model.generate(tools.random_ids(1, 30), **arguments)
    turn = torch.cat((first, tools.random_ids(1, 5, seed=1)), dim=1)
    expected = model.generate(turn, **arguments)
    for whole in (True, False):
        cache = pod.make_cache(model)
        model.generate(tools.random_ids(1, 30), past_key_values=cache, **arguments)
        seen = cache.get_seq_length()
        assert seen == 35
        given = turn if whole else turn[:, seen:]
        mask = torch.ones_like(turn)
        out = model.generate(given, attention_mask=mask, past_key_values=cache, **arguments)
        assert torch.equal(out[:, -6:], expected[:, -6:])


def filled(tools, batch=1, n=20):
    model = tools.make_pod("llama")
    cache, ids = pod.make_cache(model), tools.random_ids(batch, n)
    model(ids, past_key_values=cache)
    return model, cache, ids


def test_refeeding_a_cached_prompt_is_an_error(tools):
    model, cache, ids = filled(tools)
    with pytest.raises(ValueError, match="already holds 20 columns"):
        model.generate(ids, past_key_values=cache, max_new_tokens=2)


def test_new_tokens_without_the_whole_mask_are_an_error(tools):
    model, cache, _ = filled(tools)
    with pytest.raises(ValueError, match="do not start with the 20 columns"):
        model.generate(tools.random_ids(1, 30, seed=5), past_key_values=cache, max_new_tokens=2)
    with pytest.raises(ValueError, match="already holds"):
        model.generate(tools.random_ids(1, 10, seed=5), past_key_values=cache, max_new_tokens=2)


def test_beams_over_a_filled_cache_are_an_error(tools):
    model, cache, ids = filled(tools)
    longer = torch.cat((ids, ids[:, :3]), dim=1)
    with pytest.raises(ValueError, match="cannot be used with num_beams"):
        model.generate(longer, past_key_values=cache, num_beams=2, max_new_tokens=2)


def test_another_mask_over_seen_tokens_is_an_error(tools):
    model, cache, ids = filled(tools, batch=2)
    mask = torch.ones(2, 23, dtype=torch.long)
    mask[1, 18:20] = 0
    with pytest.raises(ValueError, match="already in the cache differently"):
        model(ids[:, :3], attention_mask=mask, past_key_values=cache)
    with pytest.raises(ValueError, match=r"pass a mask of \[2, 23\]"):
        model(ids[:, :3], attention_mask=mask[:, :3], past_key_values=cache)


def test_padded_cache_needs_its_mask(tools):
    model = tools.make_pod("llama")
    cache, ids, mask = pod.make_cache(model), tools.random_ids(2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[0, 0] = 0
    model(ids, attention_mask=mask, past_key_values=cache)
    with pytest.raises(ValueError, match="holds padding"):
        model(ids[:, :1], past_key_values=cache)


def test_wrong_positions_are_an_error(tools):
    model, cache, ids = filled(tools)
    with pytest.raises(ValueError, match=r"position_ids\[0, 0\] = 0, but mask and cache make it 20"):
        model(ids[:, :1], position_ids=torch.zeros(1, 1, dtype=torch.long), past_key_values=cache)


def test_unsupported_generation_is_refused_by_name(tools):
    model = tools.make_pod("llama")
    ids = tools.random_ids(1, 12)
    dense = tools.make_pod("llama", plan=False)
    for spec, options in {"snapkv": {"window": 2}, "streamingllm": {}, "quest": {}}.items():
        cache = pod.make_cache(dense, spec, budget=8, **options)
        with pytest.raises(ValueError, match=f"assisted decoding is not supported by the {spec} cache"):
            dense.generate(ids, prompt_lookup_num_tokens=3, max_new_tokens=3, past_key_values=cache)
    with pytest.raises(ValueError, match="cache_implementation='static' is not supported"):
        model.generate(ids, cache_implementation="static", max_new_tokens=3)
    with pytest.raises(ValueError, match="continuous batching"):
        model.generate_batch([ids[0].tolist()])
    from transformers import DynamicCache

    with pytest.raises(ValueError, match="DynamicCache cannot serve"):
        model.generate(ids, past_key_values=DynamicCache(), max_new_tokens=3)
    with pytest.raises(ValueError, match="2-D padding mask"):
        model(ids, attention_mask=torch.ones(1, 1, 12, 12))
    with pytest.raises(ValueError, match=r"crop\(1\).*negative number of columns: crop\(-1\)"):
        pod.make_cache(model).crop(1)


def test_refused_input_leaves_the_cache_usable(tools):
    model, cache, ids = filled(tools)
    with pytest.raises(ValueError, match="mask"):
        model(ids[:, :2], attention_mask=torch.ones(1, 2), past_key_values=cache)
    longer = torch.cat((ids, ids[:, :2]), dim=1)
    out = model(ids[:, :2], past_key_values=cache).logits
    assert (out - model(longer).logits[:, -2:]).abs().max() <= TOLERANCE
