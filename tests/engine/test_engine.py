"""The decode engine equals the ordinary pass, whatever happens to the cache in between."""

import copy
import gc
import weakref

import pytest
import torch
from engine_tools import KINDS, PLANS, WINDOWS, decode, feed, make, make_cache
from torch.fx.experimental.proxy_tensor import make_fx

import pod
from pod import engine
from pod.engine.decode_engine import StaticEngine
from pod.modeling.model.attend import Implementation
from pod.modeling.model.decode import DECODE_ORDER, DECODERS

TOLERANCE = 1e-11


def poison(cache):
    """NaN into every reserved slot that no token has, so that reading one shows."""
    for layer in cache.layers:
        for buffer in layer.kv_buffers().values():
            if not buffer.is_empty:
                used = buffer.used_slots(int(cache.lengths.max()))
                buffer.data[:, :, used:] = float("nan")


@pytest.mark.parametrize("spec", KINDS)
@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("prompt", [1, 7, 15, 16, 40])
def test_engine_equals_one_pass(tools, spec, windows, prompt):
    model = make(tools, spec, windows)
    ids = tools.random_ids(2, prompt + 30)
    cache = make_cache(model, spec, capacity=prompt + 30)
    feed(model, cache, ids[:, :prompt])
    poison(cache)
    with torch.no_grad():
        expected = model(ids).logits
    assert (decode(model, cache, ids[:, prompt:]) - expected[:, prompt:]).abs().max() < TOLERANCE
    assert cache.engine.steps == 30
    assert cache.get_seq_length() == prompt + 30


@pytest.mark.parametrize("spec", KINDS)
def test_rows_of_different_length(tools, spec):
    model = make(tools, spec)
    ids, mask = tools.random_ids(3, 45), torch.ones(3, 25, dtype=torch.long)
    mask[0, :20] = mask[1, :3] = 0
    caches = [make_cache(model, spec, capacity=64), make_cache(model, spec)]
    for cache in caches:
        feed(model, cache, ids[:, :25], mask)
    ours, expected = (decode(model, cache, ids[:, 25:], mask) for cache in caches)
    assert caches[0].engine.steps == 20 and caches[1].engine is None
    assert (ours - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize("what", ["second prompt", "reorder", "growth", "padding", "reset"])
@pytest.mark.parametrize("spec", KINDS)
def test_engine_goes_on_after_the_cache_changed(tools, spec, what):
    model = make(tools, spec)
    ids = tools.random_ids(3, 90)
    logits = []
    for capacity in (32 if what == "growth" else 128, None):
        cache = make_cache(model, spec, capacity=capacity) if capacity else make_cache(model, spec)
        feed(model, cache, ids[:, :20])
        found = [decode(model, cache, ids[:, 20:35])]
        mask = None
        if what == "second prompt":
            found.append(feed(model, cache, ids[:, 35:50]))
        elif what == "reorder":
            cache.reorder_cache(torch.tensor([2, 0, 0]))
        elif what == "padding":
            mask = torch.ones(3, 36, dtype=torch.long)
            mask[1, 35] = 0
            found.append(feed(model, cache, ids[:, 35:36], mask)[[0, 2]])
        elif what == "reset":
            cache.reset()
            found.append(feed(model, cache, ids[:2, 35:50]))
        rows = 2 if what == "reset" else 3
        found.append(decode(model, cache, ids[:rows, 50:85], mask))
        logits.append(found)
        if capacity:
            assert cache.engine.steps >= 15 + 34
    for ours, expected in zip(*logits, strict=True):
        assert (ours - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"do_sample": True, "top_k": 5}])
def test_generate_gives_the_same_tokens(tools, options):
    model = make(tools, "pod")
    ids, mask = tools.random_ids(2, 20), torch.ones(2, 20, dtype=torch.long)
    mask[1, :6] = 0
    found = []
    for capacity in ({}, {"capacity": 30}):
        cache = pod.make_cache(model, "pod", **capacity)
        torch.manual_seed(0)
        out = model.generate(
            ids, attention_mask=mask, past_key_values=cache, max_new_tokens=25, eos_token_id=None, **options
        )
        found.append(out)
    assert torch.equal(*found)
    assert options.get("num_beams") or cache.engine.steps > 20


def test_window_layout(tools):
    """A trained window is the plan of windows, and decodes as one."""
    model = pod.load_model(tools.make_stock("qwen3-g3"), layout="window", num_recent_tokens=6)
    ids, mask = tools.random_ids(2, 40), torch.ones(2, 20, dtype=torch.long)
    mask[0, :9] = 0
    caches = [pod.make_cache(model, "window", capacity=40), pod.make_cache(model, "window")]
    for cache in caches:
        feed(model, cache, ids[:, :20], mask)
    ours, expected = (decode(model, cache, ids[:, 20:], mask) for cache in caches)
    assert (ours - expected).abs().max() < TOLERANCE and caches[0].engine.steps == 20
    with torch.no_grad():
        assert (ours[1] - model(ids[1:]).logits[0, 20:]).abs().max() < TOLERANCE
    cache = model.generate(
        ids, max_new_tokens=5, eos_token_id=None, return_dict_in_generate=True
    ).past_key_values
    assert cache.engine.steps == 4


@pytest.mark.parametrize("spec", KINDS)
def test_greedy_is_generate_and_leaves_the_cache_in_order(tools, spec):
    model = make(tools, spec)
    ids = tools.random_ids(2, 20)
    expected = model.generate(ids, max_new_tokens=30, eos_token_id=None, do_sample=False)[:, 20:]
    cache = make_cache(model, spec, capacity=24)  # too small: room is made on the way
    token = feed(model, cache, ids)[:, -1].argmax(-1, keepdim=True)
    found = [token]
    for count in (1, 10, 18):
        found.append(cache.engine.greedy(model, found[-1][:, -1:], count))
    assert torch.equal(torch.cat(found, dim=1), expected)
    assert cache.get_seq_length() == 49 and cache.lengths.tolist() == [49, 49]
    ids = torch.cat((ids, expected[:, :-1]), dim=1)
    cache.check_continues(torch.cat((ids, expected[:, -1:]), dim=1), 50, False)
    with torch.no_grad():
        last = model(torch.cat((ids, expected[:, -1:]), dim=1)).logits[:, -1:]
    assert (feed(model, cache, expected[:, -1:]) - last).abs().max() < TOLERANCE


@pytest.mark.parametrize("kind", ["pod", "roles"])
@pytest.mark.parametrize("tau", [0.0, 0.1, 0.3, 0.6, 1.0])
def test_gate_skip_in_the_engine_and_without(tools, tau, kind):
    """Both ways apply the rule; a gate of 1 needs no distant token, and 0 leaves all of them out."""
    model = make(tools, kind, (2, 5))
    ids = tools.random_ids(2, 60)
    found = []
    for options in ({}, {"capacity": 60}, {"tau": tau}, {"tau": tau, "capacity": 60}):
        cache = pod.make_cache(model, "pod", **options)
        feed(model, cache, ids[:, :30])
        found.append(decode(model, cache, ids[:, 30:]))
    exact, engine_exact, skipped, engine_skipped = found
    assert (exact - engine_exact).abs().max() < TOLERANCE
    assert (skipped - engine_skipped).abs().max() < TOLERANCE
    if tau < 0.5:
        assert (skipped - exact).abs().max() > 1e-3


def masked(call):
    """A decode backend that asks nothing of the device: masks over the whole capacity, as kernels do it."""
    roles, lengths, sinks = call.roles, call.lengths[:, None], call.num_sink_tokens
    column = torch.arange(call.num_slots)
    distant = (column >= sinks) & (column < lengths - call.num_recent_tokens)
    slot = torch.where(
        column < sinks + call.num_recent_tokens, column, sinks + (column - sinks) % call.num_recent_tokens
    )
    q = call.q.unflatten(1, (roles.num_heads, -1)) * call.scale
    out = call.out.unflatten(1, (roles.num_heads, -1))
    for place, head in enumerate(roles.windows):
        keys, values = (x[:, place] for x in call.near)
        unused = torch.arange(keys.shape[1]) >= lengths
        logits = (q[:, head] @ keys.mT).masked_fill(unused[:, None], -torch.inf)
        out[:, head] = logits.softmax(-1) @ values
    for place, head in enumerate(roles.held):
        shared = call.buffers.logits[:, head, :, : column.shape[0]]
        if head in roles.leads:
            logits = q[:, head] @ call.keys[:, roles.leads.index(head)].mT
            shared.copy_(logits)
        else:
            window = call.window_keys[:, roles.followers.index(head)][:, slot]
            logits = torch.where(distant[:, None], shared, q[:, head] @ window.mT)
        weights = logits.masked_fill((column >= lengths)[:, None], -torch.inf).softmax(-1)
        out[:, head] = weights @ call.values[:, place]


@pytest.mark.parametrize("kind", ["pod", *PLANS, "mixtral", "qwen3-moe"])
def test_the_step_is_static(tools, monkeypatch, kind):
    """What a CUDA graph records holds for later tokens, which go to other experts.

    Here the step is recorded once as a list of operations.
    """
    model = make(tools, kind) if kind in KINDS else tools.make_pod(kind)
    ids = tools.random_ids(5 if kind == "mixtral" else 2, 50)
    cache = pod.make_cache(model, "pod", capacity=64)
    reference = pod.make_cache(model, "pod", capacity=64)
    for one in (cache, reference):
        feed(model, one, ids[:, :12])
    cache.engine.backend = "masked"
    monkeypatch.setitem(DECODERS, "masked", Implementation(masked, lambda call: None))
    recorded = []

    def prepare(self, run, restart=lambda: None):
        program = make_fx(run)()
        recorded.append(program)
        return program

    monkeypatch.setattr(StaticEngine, "_prepare", prepare)
    ours = decode(model, cache, ids[:, 12:])
    monkeypatch.undo()
    assert len(recorded) == 1, "one recording serves all steps"
    assert (ours - decode(model, reference, ids[:, 12:])).abs().max() < TOLERANCE


@pytest.mark.parametrize("kind", ["pod", *PLANS])
def test_bytes_are_those_that_are_held(tools, kind):
    model = make(tools, kind)
    cache = pod.make_cache(model, "pod", capacity=100)
    feed(model, cache, tools.random_ids(2, 20))
    decode(model, cache, tools.random_ids(2, 3))
    parts, plan = cache.nbytes_by_part(), model.config.sharing_plan
    token = 2 * model.config.head_dim * 8
    expected = {
        "keys": plan.num_leads * 100 * token,
        "values": (plan.num_leads + plan.num_followers) * 100 * token,
        "window_keys": plan.num_followers * 15 * token,
        "near_keys": plan.num_windows * 15 * token,
        "near_values": plan.num_windows * 15 * token,
    }
    found = {name: parts.get(name, 0) for name in expected}
    assert found == expected
    logits = 2 * 6 * 100 * 4  # that leads leave, fp32
    assert parts["decode_buffers"] >= logits or (kind == "windows" and parts["decode_buffers"] < 4 * logits)
    cache.reset()
    assert "decode_buffers" not in cache.nbytes_by_part()


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        ("pod", {"capacity": 0}, "capacity = 0 must be a whole number"),
        ("pod", {"capacity": True}, "capacity = True must be"),
        ("pod", {"tau": 1.5}, "tau = 1.5 must lie between 0 and 1"),
        ("pod", {"tau": "high"}, "tau = 'high' must be a number"),
        ("pod+int8", {"capacity": 64, "group_size": 4}, "no decode engine here.*in 4 bits"),
        ("pod+snapkv", {"budget": 20, "tau": 0.5}, "has no parameter 'tau'"),
        ("full", {"tau": 0.5}, "has no parameter 'tau'"),
    ],
)
def test_what_cannot_be_is_refused(tools, spec, options, message):
    model = make(tools, spec.split("+")[0])
    with pytest.raises(ValueError, match=message):
        make_cache(model, spec, **options)


def test_an_engine_after_the_prompt(tools):
    """It can come later, but not with less room than there are tokens."""
    model = make(tools, "full")
    ids = tools.random_ids(1, 40)
    cache = pod.make_cache(model, "full")
    feed(model, cache, ids[:, :20])
    with pytest.raises(ValueError, match="at least 20"):
        engine.attach(cache, 10)
    engine.attach(cache, 64)
    with torch.no_grad():
        expected = model(ids).logits[:, 20:]
    assert (decode(model, cache, ids[:, 20:]) - expected).abs().max() < TOLERANCE
    assert cache.engine.steps == 20


@pytest.mark.parametrize("spec", ["full+int4", "pod+int4", "roles+int4"])
@pytest.mark.parametrize("residual", [1, 5])
def test_packed_engine_equals_the_ordinary_packed_cache(tools, spec, residual):
    """The packed engine packs the same tokens at the same time as the ordinary packed cache.

    Prompts, decoded tokens, a second prompt, a reset, and reordered rows.
    """
    model = make(tools, spec.split("+")[0], (2, 5))  # windows this small are native in both
    ids = tools.random_ids(2, 100)
    found = []
    for capacity in ({}, {"capacity": 72}):
        cache = make_cache(model, spec, group_size=4, residual=residual, **capacity)
        logits = [feed(model, cache, ids[:, :21]), decode(model, cache, ids[:, 21:50])]
        logits += [feed(model, cache, ids[:, 50:63]), decode(model, cache, ids[:, 63:85])]
        cache.reorder_cache(torch.tensor([1, 1]))
        logits.append(decode(model, cache, ids[:, 85:]))
        cache.reset()
        logits += [feed(model, cache, ids[:, :3]), decode(model, cache, ids[:, 3:30])]
        found.append(torch.cat(logits, dim=1))
        if capacity:
            assert cache.engine.steps >= 29 + 21 + 13 + 26
    with torch.no_grad():
        exact = model(ids).logits
    assert (found[0] - found[1]).abs().max() < TOLERANCE
    assert (found[1][:, :85] - exact[:, :85]).abs().max() > 1e-3, "four bits must show"


def test_packed_bytes(tools):
    model = make(tools, "pod", (2, 5), dtype=torch.float32)
    cache = pod.make_cache(model, "pod+int4", group_size=4, residual=8, capacity=80)
    feed(model, cache, tools.random_ids(2, 50))
    decode(model, cache, tools.random_ids(2, 2))
    d, ring = model.config.head_dim, 12
    per_token = d / 2 + 4 * d / 4  # codes, then zero and scale in fp16 per group of 4
    heads = sum(lead is not None for row in tools.lead for lead in row)
    assert cache.nbytes_by_part()["values"] == 2 * heads * (80 * per_token + ring * d * 4) + 5 * 2 * 4


def test_packed_rows_must_be_alike(tools):
    model = make(tools, "pod", (2, 5))
    cache = pod.make_cache(model, "pod+int4", group_size=4, residual=8, capacity=80)
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[0, :3] = 0
    with pytest.raises(ValueError, match="rows of one length"):
        feed(model, cache, tools.random_ids(2, 20), mask)


@pytest.mark.parametrize("max_new_tokens", [1, 30])
def test_generate_uses_an_engine_for_a_cache_of_its_own(tools, max_new_tokens):
    model = make(tools, "pod")
    out = model.generate(
        tools.random_ids(2, 20),
        max_new_tokens=max_new_tokens,
        eos_token_id=None,
        return_dict_in_generate=True,
    )
    cache = out.past_key_values
    assert cache.engine.steps == max_new_tokens - 1
    assert cache.layers[0].capacity in (20 + max_new_tokens, 21)


def used(tools, spec="pod", **options):
    """A model, a cache in which the engine has decoded the tokens 20 … 23 of ids, and ids."""
    model, ids = make(tools, spec.split("+")[0], (2, 5)), tools.random_ids(2, 40)
    cache = make_cache(model, spec, **{"capacity": 64, **options})
    feed(model, cache, ids[:, :20])
    decode(model, cache, ids[:, 20:24])
    return model, cache, ids


@pytest.mark.parametrize("how", ["decode", "greedy", "generate"])
def test_memory_is_free_when_the_cache_is_gone(tools, how):
    """At once, not when Python looks for cycles: a cache may be most of a GPU's memory."""
    model, cache, ids = used(tools)
    if how == "greedy":
        cache.engine.greedy(model, ids[:, :1], 3)
    elif how == "generate":
        options = {"max_new_tokens": 4, "eos_token_id": None, "return_dict_in_generate": True}
        cache = model.generate(ids, **options).past_key_values
    gc.collect()
    gc.disable()
    try:
        held = [tensor for _, tensor, _ in cache._all_parts()]
        held = [weakref.ref(tensor) for tensor in held]
        assert len(held) > 10
        del cache
        assert not [one for one in held if one() is not None]
    finally:
        gc.enable()


@pytest.mark.parametrize("spec", ["pod", "roles", "pod+int4", "roles+int4"])
def test_copies_of_a_cache_decode_for_themselves(tools, spec):
    model, cache, ids = used(tools, spec, **({"group_size": 4, "residual": 1} if "+" in spec else {}))
    state = cache.engine.__getstate__()
    assert not state["_programs"] and state["_bound"] is None, "functions and graphs are no part of a file"
    other = copy.deepcopy(cache)
    assert other.engine.cache is other and not list(other.engine.tensors())
    ours, expected = (decode(model, one, ids[:, 24:]) for one in (other, cache))
    assert (ours - expected).abs().max() < TOLERANCE
    assert other.engine.steps == cache.engine.steps == 20


def test_another_model_on_the_same_cache(tools):
    """As a base model and its fine-tuned version."""
    model, cache, ids = used(tools)
    other = make(tools, "pod", (2, 5))
    with torch.no_grad():
        other.lm_head.weight.add_(0.1)
        other.model.layers[1].mlp.up_proj.weight.add_(0.1)
    plain = pod.make_cache(model, "pod")
    feed(model, plain, ids[:, :20])
    decode(model, plain, ids[:, 20:24])
    for one in (other, model):
        ours, expected = (decode(one, each, ids[:, 24:27]) for each in (cache, plain))
        assert (ours - expected).abs().max() < TOLERANCE
    ours, expected = (decode(other, each, ids[:, 27:28])[:, -1].argmax(-1, True) for each in (cache, plain))
    found = cache.engine.greedy(other, ours, 3), cache.engine.greedy(model, ours, 3)
    for one, tokens in zip((other, model), found, strict=True):
        fed = torch.cat((ours, tokens[:, :-1]), dim=1)
        assert torch.equal(decode(one, plain, fed).argmax(-1), tokens)


def test_a_step_is_prepared_again_when_weights_move(tools, monkeypatch):
    """A graph reads them where they were when it was recorded."""
    model, cache, ids = used(tools)
    prepared, prepare = [], StaticEngine._prepare
    monkeypatch.setattr(StaticEngine, "_prepare", lambda *args: prepared.append(1) or prepare(*args))
    decode(model, cache, ids[:, 24:26])
    assert not prepared
    model.model.layers[2].mlp.up_proj.weight.data = model.model.layers[2].mlp.up_proj.weight.data.clone()
    decode(model, cache, ids[:, 26:28])
    assert len(prepared) == 1


def stop_at(module, call):
    """KeyboardInterrupt when this module has been called so many times; undo with ``remove()``."""
    calls = iter(range(call))

    def stop(*args):
        if next(calls, None) is None:
            raise KeyboardInterrupt

    return module.register_forward_hook(stop)


@pytest.mark.parametrize("spec", ["pod", "roles", "pod+int4", "roles+int4"])
@pytest.mark.parametrize("how", ["decode", "greedy"])
def test_a_cache_that_failed_half_way_is_refused(tools, spec, how):
    """Slots of the window and codes may be those of later tokens by then."""
    model, cache, ids = used(tools, spec, **({"group_size": 4, "residual": 1} if "+" in spec else {}))
    if how == "greedy":
        handle = stop_at(model.model.layers[3], 7)
        with pytest.raises(KeyboardInterrupt):
            cache.engine.greedy(model, ids[:, :1], 12)
    else:
        handle = stop_at(model.model.layers[3], 0)
        with pytest.raises(KeyboardInterrupt):
            feed(model, cache, ids[:, :1])
    handle.remove()
    for again in (
        lambda: feed(model, cache, ids[:, :1]),
        lambda: cache.engine.greedy(model, ids[:, :1], 2),
    ):
        with pytest.raises(ValueError, match="failed half-way"):
            again()
    cache.reset()
    feed(model, cache, ids[:, :20])
    plain = make_cache(model, spec, **({"group_size": 4, "residual": 1} if "+" in spec else {}))
    feed(model, plain, ids[:, :20])
    ours, expected = (decode(model, one, ids[:, 20:]) for one in (cache, plain))
    assert (ours - expected).abs().max() < TOLERANCE


def test_what_greedy_refuses(tools):
    model, cache, ids = used(tools)
    greedy, token = cache.engine.greedy, ids[:, :1]
    other = tools.make_pod("qwen3-g3", windows=(3, 9))
    for call, message in (
        (lambda: greedy(model, token, 0), "num_tokens = 0 must be"),
        (lambda: greedy(model, token[:1], 1), "holds 2 rows, the batch has 1"),
        (lambda: greedy(model, ids[:, :2], 1), r"token is \[2, 2\]"),
        (lambda: greedy(other, token, 1), "made for a model of another shape"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    assert greedy(model, token, 1).shape == (2, 1), "a refusal leaves the cache as it was"
    cache.begin_prompt(5)
    with pytest.raises(ValueError, match="behind a complete prompt"):
        greedy(model, token, 1)
    cache.reset()
    with pytest.raises(ValueError, match="behind a complete prompt"):
        greedy(model, token, 1)


def compare(tools, act, spec="pod+int4"):
    """What ``act(model, cache)`` returns, logits, is the same with an engine and without."""
    model = make(tools, spec.split("+")[0], (2, 5))
    options = {"group_size": 4, "residual": 1} if "+" in spec else {}
    caches = [make_cache(model, spec, capacity=64, **options), make_cache(model, spec, **options)]
    ours, expected = (act(model, cache) for cache in caches)
    assert (ours - expected).abs().max() < TOLERANCE
    return caches[0]


@pytest.mark.parametrize("spec", ["pod", "roles", "pod+int4", "roles+int4"])
def test_passes_of_padding_alone(tools, spec):
    """Passes of padding alone add columns but no token.

    Before the first one there is nothing to bind to, and lengths are not columns.
    """
    ids = tools.random_ids(2, 40)

    def act(model, cache):
        mask, logits = torch.zeros(2, 3, dtype=torch.long), []
        feed(model, cache, ids[:, :3], mask)
        for width, real in ((1, 1), (8, 1), (1, 1), (2, 0)):
            mask = torch.cat((mask, torch.full((2, width), real)), dim=1)
            logits.append(feed(model, cache, ids[:, mask.shape[1] - width : mask.shape[1]], mask))
        logits.append(decode(model, cache, ids[:, 15:30], mask))
        return torch.cat(logits, dim=1)

    assert compare(tools, act, spec).engine.steps >= 15


@pytest.mark.parametrize("spec", ["pod", "roles", "pod+int4", "roles+int4"])
def test_prompts_in_pieces_and_of_one_token(tools, spec):
    ids = tools.random_ids(2, 60)

    def act(model, cache):
        logits = []
        for announced, widths in ((12, (5, 1, 6)), (9, (1,) * 9), (1, (1,)), (9, (4,)), (0, ())):
            cache.begin_prompt(announced)
            for width in widths:
                past = cache.get_seq_length()
                logits.append(feed(model, cache, ids[:, past : past + width]))
            if cache._prompt_columns_left:
                continue  # given up: what follows is decoded
            past = cache.get_seq_length()
            logits.append(decode(model, cache, ids[:, past : past + 6]))
        return torch.cat(logits, dim=1)

    assert compare(tools, act, spec).engine.steps >= 20


def test_modes_of_autograd_may_change(tools):
    model, ids = make(tools, "pod", (2, 5)), tools.random_ids(2, 40)
    cache = pod.make_cache(model, "pod", capacity=24)
    feed(model, cache, ids[:, :20])
    with torch.inference_mode():
        logits = [decode(model, cache, ids[:, 20:27])]  # makes room, too
    logits.append(decode(model, cache, ids[:, 27:]))
    with torch.no_grad():
        assert (torch.cat(logits, dim=1) - model(ids).logits[:, 20:]).abs().max() < TOLERANCE


def test_gradients_go_the_ordinary_way(tools):
    model, ids = make(tools, "pod", (2, 5)), tools.random_ids(2, 9)
    weight = model.model.layers[1].mlp.up_proj.weight
    found = []
    for options in ({"capacity": 64}, {}):
        cache = pod.make_cache(model, "pod", **options)
        feed(model, cache, ids[:, :8])
        logits = model(ids[:, 8:], past_key_values=cache).logits
        found.append(torch.autograd.grad(logits.square().sum(), weight)[0])
    assert (found[0] - found[1]).abs().max() < 1e-9 * found[1].abs().max()


@pytest.mark.parametrize("spec", ["full", "pod", "roles", "windows", "pod+int4", "roles+int4"])
def test_only_steps_that_ask_the_device_nothing_are_recorded(tools, spec, monkeypatch):
    """Where Triton cannot run (dtype, head_dim, GPU), ``auto`` is ``grouped``, which a graph cannot hold."""
    _, cache, _ = used(tools, spec, **({"group_size": 4, "residual": 1} if "+" in spec else {}))
    layers = cache.engine._bound.step.layers
    assert not any(layer.can_be_recorded() for layer in layers)
    monkeypatch.setitem(DECODERS, "triton", Implementation(masked, lambda call: None))
    monkeypatch.setitem(DECODE_ORDER, "cpu", ["triton", "grouped"])
    assert all(layer.can_be_recorded() for layer in layers)
    assert not cache.engine._bound.can_be_recorded(), "no CUDA here"
    for layer in layers:
        layer.backend = "grouped"
    assert not any(layer.can_be_recorded() for layer in layers)


def test_generate_keeps_the_engine_of_its_cache(tools):
    """A conversation goes on with what has been prepared for it."""
    model, ids = make(tools, "pod"), tools.random_ids(2, 30)
    options = {"eos_token_id": None, "return_dict_in_generate": True}
    out = model.generate(ids[:, :20], max_new_tokens=5, **options)
    cache, own = out.past_key_values, out.past_key_values.engine
    ids = torch.cat((out.sequences, ids[:, 20:]), dim=1)
    found = model.generate(ids, past_key_values=cache, max_new_tokens=9, **options).sequences
    assert cache.engine is own and own.steps >= 4 + 7
    assert torch.equal(found, model.generate(ids, max_new_tokens=9, eos_token_id=None))


def test_generate_with_beams_reserves_nothing(tools):
    """Rows move at every step: no step could be prepared, and the room would be copied along."""
    model = make(tools, "pod")
    options = {"max_new_tokens": 4, "num_beams": 2, "return_dict_in_generate": True}
    cache = model.generate(tools.random_ids(2, 20), **options).past_key_values
    assert cache.engine is None and cache.layers[0].capacity == 0


def test_greedy_over_packed_buffers(tools):
    options = {"group_size": 4, "residual": 1}
    model, cache, ids = used(tools, "pod+int4", capacity=26, **options)
    plain = pod.make_cache(model, "pod+int4", **options)
    feed(model, plain, ids[:, :20])
    decode(model, plain, ids[:, 20:24])
    tokens = cache.engine.greedy(model, ids[:, 24:25], 11)
    fed = torch.cat((ids[:, 24:25], tokens), dim=1)
    assert torch.equal(decode(model, plain, fed[:, :11]).argmax(-1), tokens)
    ours, expected = (decode(model, one, fed[:, 11:]) for one in (cache, plain))
    assert (ours - expected).abs().max() < TOLERANCE


def test_packed_rows_are_reordered_inside_a_prompt(tools):
    """Between two chunks of an announced prompt its tokens wait unpacked: they move with their rows."""
    model, ids, found = make(tools, "pod", (2, 5)), tools.random_ids(2, 60), []
    for capacity in ({}, {"capacity": 72}):
        cache = pod.make_cache(model, "pod+int4", group_size=4, residual=1, **capacity)
        cache.begin_prompt(40)
        feed(model, cache, ids[:, :21])
        cache.reorder_cache(torch.tensor([1, 0]))
        logits = [feed(model, cache, ids[:, 21:40]), decode(model, cache, ids[:, 40:])]
        found.append(torch.cat(logits, dim=1))
    assert (found[0] - found[1]).abs().max() < TOLERANCE
