"""Models whose windows have constant sinks: against a naive decoder, in every way that tokens are fed,
loaded and saved."""

import dataclasses
import json
import math

import naive_layouts
import pytest
import torch
from conftest import LEAD, make_stock, naive_logits, random_ids

import pod
from pod.modeling.model.sharing import SharingPlan
from pod.modeling.model.sink_constants import SinkConstants
from pod.modeling.model.sinks import PARAMETERS

WINDOW = 11


def constants_for(stock, lead=LEAD, seed=3):
    """Sinks about as heavy as a window, with values and keys unlike any token's."""
    config, generator = stock.config, torch.Generator().manual_seed(seed)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    key_value = config.num_key_value_heads, head_dim
    shapes = (config.num_attention_heads,), key_value, key_value
    rows = [[torch.randn(shape, generator=generator) for shape in shapes] for _ in lead]
    has = [None in row for row in lead]
    return SinkConstants(
        [(2 + 2 * own[0]).tolist() if one else None for one, own in zip(has, rows, strict=True)],
        *([own[x].tolist() if one else None for one, own in zip(has, rows, strict=True)] for x in (1, 2)),
    )


def plan_for(stock, lead=LEAD, **changes):
    fields = {
        "num_sink_tokens": 0,
        "num_recent_tokens": WINDOW,
        "sinks": "constant",
        "sink_constants": constants_for(stock, lead),
    }
    return SharingPlan(lead, **(fields | changes))


@pytest.fixture(scope="module")
def stock():
    return make_stock()


@pytest.fixture(scope="module")
def plan(stock):
    return plan_for(stock)


@pytest.fixture(scope="module")
def model(stock, plan):
    model = pod.load_model(stock, plan=plan)
    model.config.use_cache = False
    return model


def naive_attention(plan):
    """What the heads of a plan with constant sinks do, n x n: for ``naive_logits``."""
    left = {}

    def attend(layer, q, k, v, turn):
        n, (groups, d) = q.shape[1], (q.shape[0] // k.shape[0], q.shape[2])
        positions = torch.arange(n)
        distance = positions[:, None] - positions
        raw, q, k, out = k, turn(q, positions), turn(k, positions), []
        for head, own in enumerate(q):
            kv = head // groups
            table = own @ k[kv].T / math.sqrt(d)
            owner, values, constants = plan.lead[layer][kv], v[kv], plan.sink_constants
            if owner is None and constants.keys is not None:
                key = torch.tensor(constants.keys[layer][kv], dtype=values.dtype)
                table = own @ turn((raw[kv] - key)[None], positions)[0].T / math.sqrt(d)
            if owner == layer:
                left[layer, head] = table
            near = torch.where(distance < WINDOW, table, float("-inf"))
            if owner is None:
                column = torch.full((n, 1), constants.logits[layer][head], dtype=table.dtype)
                table = torch.cat((near.masked_fill(distance < 0, float("-inf")), column), 1)
                u = torch.tensor(constants.values[layer][kv], dtype=values.dtype)
                out.append(table.softmax(-1) @ torch.cat((values, u[None])))
                continue
            far = left[owner, head] if owner != layer else table
            table = torch.where(distance < WINDOW, table, far).masked_fill(distance < 0, float("-inf"))
            out.append(table.softmax(-1) @ values)
        return torch.stack(out)

    return attend


def naive(model, plan, ids):
    return naive_logits(model, ids, naive_attention(plan))


# -- the same logits in every way -----------------------------------------------------------


@pytest.mark.parametrize("backend", ["reference", "flash"])
def test_without_a_cache(model, plan, backend, monkeypatch):
    monkeypatch.setattr(model.config, "attention_backend", backend)
    ids = random_ids(2, 60)
    found = model(ids).logits
    for row in range(2):
        torch.testing.assert_close(found[row], naive(model, plan, ids[row]), rtol=0, atol=1e-9)


def test_constants_of_another_model_are_refused(stock):
    constants = constants_for(stock)
    wider = SinkConstants(
        constants.logits, tuple(row and tuple((*h, 0.0) for h in row) for row in constants.values)
    )
    with pytest.raises(
        ValueError, match="the plan's constants in layer . are for .* KV heads of .* numbers, the"
    ):
        pod.load_model(stock, plan_for(stock, sink_constants=wider))


def test_sinks_without_keys(stock, plan):
    """Plans that were made before sinks had keys, and their checkpoints, stay as they are."""
    constants = dataclasses.replace(plan.sink_constants, keys=None)
    old = dataclasses.replace(plan, sink_constants=constants)
    model, ids = pod.load_model(stock, plan=old), random_ids(1, 60)
    assert not any(name.endswith("sink_keys") for name, _ in model.named_parameters())
    logits = model(ids, use_cache=False).logits
    torch.testing.assert_close(logits[0], naive(model, old, ids[0]), rtol=0, atol=1e-9)
    # the constants of a checkpoint stay, with keys or without
    for own, other in ((old, plan), (plan, old)):
        trained = pod.load_model(stock, plan=own)
        with pytest.warns(UserWarning, match="its own constants stay"):
            again = pod.load_model(trained, plan=other)
        assert torch.equal(again(ids, use_cache=False).logits, trained(ids, use_cache=False).logits)


def test_caches_are_of_sinks_with_keys_or_without(stock, model, plan):
    """Windows hold keys relative to the sink's key, and a model without it cannot go on with them."""
    bare = dataclasses.replace(plan.sink_constants, keys=None)
    other = pod.load_model(stock, plan=dataclasses.replace(plan, sink_constants=bare))
    cache, ids = pod.make_cache(model, "pod"), random_ids(1, 20)
    model(ids, past_key_values=cache)
    with pytest.raises(ValueError, match="cache"):
        other(ids, past_key_values=cache)


def test_only_constant_sinks_have_keys(model):
    assert model.config.sink_keys
    assert not pod.load_model(model, num_sink_tokens=4, sinks="tokens").config.sink_keys
    with pytest.raises(ValueError, match="sink_keys are for models without norms of keys"):
        pod.PodConfig(sinks="constant", sink_keys=True, qk_norm=True)


def test_other_windows_than_those_of_the_constants_are_said(stock, plan):
    with pytest.warns(UserWarning, match="its constant sinks were measured for its own windows too"):
        pod.load_model(stock, plan=plan, num_recent_tokens=WINDOW + 1)


def test_without_rotation_keys_change_nothing_but_the_sink():
    """All keys of a window move by the same vector: its softmax stays, where the sink has no weight."""
    lead = [[None, None]] * 2
    sizes = {"hidden_size": 24, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = pod.PodConfig(
        vocab_size=128, num_hidden_layers=2, lead=lead, sinks="constant", sink_keys=True,
        num_recent_tokens=WINDOW, no_rope_layers=[0, 0], initializer_range=0.2, **sizes,
    )  # fmt: skip
    model, ids = pod.PodForCausalLM(config).double().eval(), random_ids(1, 40)

    def logits(weight, with_keys):
        for layer in model.model.layers:
            layer.self_attn.sinks.data.fill_(weight)
            layer.self_attn.sink_keys.data.normal_(std=3.0 if with_keys else 0.0)
        return model(ids, use_cache=False).logits

    torch.testing.assert_close(logits(-1e3, True), logits(-1e3, False), rtol=0, atol=1e-9)
    assert (logits(1.0, True) - logits(1.0, False)).abs().max() > 1e-3


def test_constants_matter(stock, model, plan):
    """A model without them, and one with other values, differ by far more than any tolerance here."""
    ids = random_ids(1, 60)
    others = plan_for(stock, sink_constants=constants_for(stock, seed=4))
    with pytest.warns(UserWarning, match="sinks = 'none', the plan was made for 'constant'"):
        without = pod.load_model(stock, plan=plan, sinks="none")
    for other in (pod.load_model(stock, plan=others), without):
        assert (other(ids, use_cache=False).logits - model(ids).logits).abs().max() > 0.1


def test_packed_documents_are_as_if_alone(model, plan):
    """Every document's first token sees the sink as its last one does."""
    ids, lengths = random_ids(1, 60), (17, 1, 30, 12)
    documents = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))[None]
    found = model(ids, doc_ids=documents).logits[0]
    for own, logits in zip(ids[0].split(lengths), found.split(lengths), strict=True):
        torch.testing.assert_close(logits, naive(model, plan, own), rtol=0, atol=1e-9)


@torch.no_grad()
@pytest.mark.parametrize(
    "widths", [[50], [1] * 50, [7] * 7 + [1], [3, 1, 1, 29, 2, 14], [30] + [1] * 20], ids=len
)
@pytest.mark.parametrize("spec", ["pod", "pod+int8"])
def test_chunks_and_single_tokens(model, plan, widths, spec):
    """Rows of unlike length too: padding left, inside and right. Codes of int8 leave the windows alone; all
    else is near."""
    ids, mask = random_ids(3, 50, seed=4), torch.ones(3, 50, dtype=torch.long)
    mask[0, :9], mask[1, 31:34], mask[2, :33] = 0, 0, 0
    cache, outputs, start = pod.make_cache(model, spec), [], 0
    for width in widths:
        end = start + width
        outputs.append(model(ids[:, start:end], attention_mask=mask[:, :end], past_key_values=cache).logits)
        cache.check_integrity()
        start = end
    found = torch.cat(outputs, 1)
    for row in range(3):
        real = mask[row].bool()
        truth = naive(model, plan, ids[row, real])
        torch.testing.assert_close(found[row, real], truth, rtol=0, atol=1e-9 if spec == "pod" else 0.5)


def test_windows_hold_no_first_token(model):
    cache, ids = pod.make_cache(model, "pod"), random_ids(1, 60)
    model(ids, past_key_values=cache)
    held = cache.layers[2].near_keys  # a layer in which one head keeps its window
    assert held.stored.shape[2] == WINDOW
    sinks = pod.load_model(make_stock(), plan=SharingPlan(LEAD, num_sink_tokens=4, num_recent_tokens=WINDOW))
    more = pod.make_cache(sinks, "pod")
    sinks(ids, past_key_values=more)
    parts, others = cache.nbytes_by_part(), more.nbytes_by_part()
    assert parts["near_keys"] * (WINDOW + 4) == others["near_keys"] * WINDOW


def test_generation(model, plan):
    ids = random_ids(2, 30)
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "use_cache": True}
    found = model.generate(ids, **options)
    for row in range(2):
        tokens = ids[row]
        for _ in range(12):
            tokens = torch.cat((tokens, naive(model, plan, tokens)[-1].argmax()[None]))
        assert found[row].tolist() == tokens.tolist()


# -- gradients ------------------------------------------------------------------------------


def test_gradients_of_the_parameters(stock, plan):
    """Flash against autograd through the reference, also under activation checkpointing; each sink of a
    window gets one."""
    found = {}
    for backend, recomputes in (("reference", False), ("flash", False), ("flash", True)):
        model = pod.load_model(stock, plan=plan, attention_backend=backend).train()
        if recomputes:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        ids = random_ids(2, 40)
        model(ids, labels=ids).loss.backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters() if "sink" in name}
        found[backend, recomputes] = grads
    truth = found.pop(("reference", False))
    assert len(truth) == 3 * sum(None in row for row in LEAD)
    for grads in found.values():
        for name, grad in truth.items():
            torch.testing.assert_close(grads[name], grad, rtol=1e-7, atol=1e-12)
    for layer, row in enumerate(LEAD):
        if None not in row:
            continue
        for head, owner in enumerate(row):
            logits = truth[f"model.layers.{layer}.self_attn.sinks"].view(2, 3)[head]
            values = truth[f"model.layers.{layer}.self_attn.sink_values"][head]
            keys = truth[f"model.layers.{layer}.self_attn.sink_keys"][head]
            found = [bool(one.abs().min() > 0) for one in (logits, values, keys)]
            assert found == [owner is None] * 3


def test_gradients_against_differences(stock, plan):
    model, ids = pod.load_model(stock, plan=plan, attention_backend="flash"), random_ids(1, 40)
    attention, step = model.model.layers[2].self_attn, 1e-5
    model(ids, labels=ids, use_cache=False).loss.backward()
    places = (attention.sinks, 1), (attention.sink_values, (0, 5)), (attention.sink_keys, (0, 2))
    for parameter, place in places:
        losses = []
        for sign in (1, -1):
            with torch.no_grad():
                parameter[place] += sign * step
                losses.append(model(ids, labels=ids, use_cache=False).loss)
                parameter[place] -= sign * step
        slope = (losses[0] - losses[1]) / (2 * step)
        torch.testing.assert_close(parameter.grad[place], slope, rtol=1e-5, atol=1e-9)


# -- loading and saving ---------------------------------------------------------------------


def test_saved_and_loaded(model, tmp_path):
    model.save_pretrained(tmp_path)
    again, ids = pod.load_model(tmp_path), random_ids(1, 40)
    assert again.config.sinks == "constant" and again.config.num_sink_tokens == 0
    assert torch.equal(again(ids, use_cache=False).logits, model(ids).logits)


@pytest.mark.slow
def test_an_export_needs_transformers_only(model, tmp_path):
    """Its own code has the sinks, while it decodes too."""
    ids = random_ids(1, 30)
    logits, tokens = naive_layouts.exported_logits(model, tmp_path, ids)
    torch.testing.assert_close(logits, model(ids).logits.detach(), rtol=0, atol=1e-9)
    options = {"max_new_tokens": 8, "do_sample": False, "use_cache": True}
    assert torch.equal(tokens, model.generate(ids, **options))


def test_parameters_are_of_layers_with_windows_only(model):
    names = {name for name, _ in model.named_parameters() if "sink" in name}
    layers = [layer for layer, row in enumerate(LEAD) if None in row]
    assert names == {f"model.layers.{i}.{x}" for i in layers for x in PARAMETERS}


def test_layers_that_were_trained_with_windows_have_none():
    """Of Qwen2 with sliding layers 2 and 4: only heads that keep the plan's window have a sink."""
    stock = make_stock("qwen2-sliding")
    lead = [[0, None], [0, 1], [None, None], [0, None], [None, None]]
    constants = constants_for(stock, lead)
    rows = [
        [None if layer in (2, 4) else row for layer, row in enumerate(x)]
        for x in (constants.logits, constants.values, constants.keys)
    ]
    plan = plan_for(stock, lead, sink_constants=SinkConstants(*rows))
    model, ids = pod.load_model(stock, plan=plan), random_ids(1, 40)
    names = {name for name, _ in model.named_parameters() if "sink" in name}
    assert names == {f"model.layers.{i}.{x}" for i in (0, 3) for x in PARAMETERS}
    logits, cache = model(ids, use_cache=False).logits, pod.make_cache(model, "pod")
    parts = [model(part, past_key_values=cache).logits for part in (ids[:, :30], *ids[:, 30:].split(1, 1))]
    torch.testing.assert_close(torch.cat(parts, 1), logits, rtol=0, atol=1e-10)


def test_a_plan_of_a_converted_checkpoint(stock, model, plan, tmp_path):
    """Its weights are the constants; other sinks leave them behind."""
    ids = random_ids(1, 40)
    bare = dataclasses.replace(plan, sink_constants=None)
    assert torch.equal(pod.load_model(model, plan=bare)(ids, use_cache=False).logits, model(ids).logits)
    stored = pod.load_model(model, num_sink_tokens=4, sinks="tokens")
    truth = pod.load_model(stock, plan=SharingPlan(LEAD, num_sink_tokens=4, num_recent_tokens=WINDOW))
    assert stored.config.sinks == "tokens"
    assert pod.load_model(model, layout="window", num_recent_tokens=9).config.sinks == "none"
    assert torch.equal(stored(ids, use_cache=False).logits, truth(ids, use_cache=False).logits)


def test_the_plan_that_a_checkpoint_was_trained_under_does_not_undo_its_constants(stock, model):
    """The plan's constants are what training started from, and do not undo the checkpoint's.

    Those of another plan are taken, and after `dense` those of any.
    """
    ids = random_ids(1, 40)
    others = plan_for(stock, sink_constants=constants_for(stock, seed=4))
    with pytest.warns(UserWarning, match="its own constants stay"):
        kept = pod.load_model(model, plan=others)
    assert torch.equal(kept(ids, use_cache=False).logits, model(ids).logits)
    truth = pod.load_model(stock, plan=others)(ids, use_cache=False).logits
    again = pod.load_model(pod.load_model(model, layout="dense"), plan=others)
    assert torch.equal(again(ids, use_cache=False).logits, truth)
    lead = [*LEAD[:4], [None, None]]
    another = plan_for(stock, lead, sink_constants=constants_for(stock, lead, seed=5))
    truth = pod.load_model(stock, plan=another)(ids, use_cache=False).logits
    assert torch.equal(pod.load_model(model, plan=another)(ids, use_cache=False).logits, truth)


def test_heads_move_with_their_sinks(stock):
    """A plan that moves heads has its constants in its own order; a checkpoint's move with the weights."""
    order, ids = [[3, 5, 4, 2, 0, 1]] * len(LEAD), random_ids(1, 40)
    swapped = [[None, 0]] * len(LEAD)
    constants = constants_for(stock, [[0, None]] * len(LEAD))
    original = plan_for(stock, [[0, None]] * len(LEAD), sink_constants=constants)
    moved = SinkConstants(
        [[row[head] for head in order[0]] for row in constants.logits],
        *([[row[1], row[0]] for row in rows] for rows in (constants.values, constants.keys)),
    )
    new = plan_for(stock, swapped, sink_constants=moved, head_order=order)
    truth = pod.load_model(stock, plan=original)
    found = pod.load_model(stock, plan=new)
    logits = truth(ids, use_cache=False).logits
    torch.testing.assert_close(found(ids, use_cache=False).logits, logits, rtol=0, atol=1e-10)
    back = pod.load_model(truth, plan=dataclasses.replace(new, sink_constants=None))
    for name, weight in found.state_dict().items():
        assert torch.equal(back.state_dict()[name], weight), name


def test_plan_files(plan, tmp_path):
    file = tmp_path / "plan.json"
    plan.save(file)
    content = json.loads(file.read_text())
    assert (content["schema"], content["sinks"], content["sink_logits"][3]) == (5, "constant", None)
    again = SharingPlan.load(file)
    assert again == plan and again.sink_constants == plan.sink_constants and again.sinks == "constant"
    assert hash(again) == hash(dataclasses.replace(plan, sink_constants=None))
    for windows, kind in (((4, 11), "tokens"), ((0, 11), "none"), ((None, None), None)):
        names = ("num_sink_tokens", "num_recent_tokens")
        old = {"schema": 3, "lead": LEAD, **dict(zip(names, windows, strict=True))}
        file.write_text(json.dumps(old))
        assert SharingPlan.load(file).sinks == kind


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sinks": "learned"}, "sinks = 'learned' is unknown: choose tokens, constant, none"),
        ({"num_sink_tokens": 4}, "'constant' stores no first tokens, got num_sink_tokens = 4: set 0"),
        ({"sinks": "none"}, "sinks = 'none' have no constants"),
        ({"head_dim": 16}, "have values of 8 channels, head_dim is 16"),
        ({"sink_constants": SinkConstants([None] * 4, [None] * 4)}, "of 4 and 4 layers, the plan has 5"),
        (
            {"sink_constants": SinkConstants([None] * 5, [None] * 4 + [[[1.0], [1.0]]])},
            "logits or values only",
        ),
        ({"lead": [[0, 0]] * 5}, "of layer 0, in which no head keeps its window: give null there"),
        ({"keys": [None] * 4}, "have 5 layers, sink_keys 4"),
        ({"keys": [None] * 5}, "of layer 0 have other shapes than sink_keys"),
        ({"keys": [[[math.nan] * 8] * 2 if None in row else None for row in LEAD]}, "not all finite"),
    ],
)
def test_plans_that_contradict_themselves(stock, plan, changes, message):
    if "keys" in changes:
        changes = {"sink_constants": dataclasses.replace(plan.sink_constants, **changes)}
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(plan, **changes)


def test_values_that_are_no_numbers(stock, plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    content = json.loads((tmp_path / "plan.json").read_text())
    for row, message in (([1.0, "x"], "must be"), ([1.0] * 5, "are no"), ([math.nan] * 6, "not all finite")):
        content["sink_logits"][0] = row
        (tmp_path / "wrong.json").write_text(json.dumps(content))
        with pytest.raises(ValueError, match=f"wrong.json: sharing plan: sink_logits.*{message}"):
            SharingPlan.load(tmp_path / "wrong.json")


def test_constants_that_are_missing(stock, model, plan):
    bare = dataclasses.replace(plan, sink_constants=None)
    message = "'constant' needs constants, which neither the plan nor the checkpoint has: measure them with"
    with pytest.raises(ValueError, match=message):
        pod.load_model(stock, plan=bare)
    with pytest.raises(ValueError, match=message):
        pod.load_model(stock, plan=SharingPlan(LEAD), num_recent_tokens=11, sinks="constant")
    with pytest.raises(ValueError, match="stores no first tokens, got num_sink_tokens = 4"):
        pod.load_model(model, num_sink_tokens=4)
    with pytest.raises(ValueError, match="layout = 'window' has no plan|layout = 'window'"):
        pod.load_model(stock, layout="window", sinks="constant")


def test_old_configurations_say_it_by_their_first_tokens():
    for n_s, kind in ((4, "tokens"), (0, "none"), (None, "tokens")):
        assert pod.PodConfig(num_sink_tokens=n_s).sinks == kind
    assert pod.PodConfig(sinks="constant").num_sink_tokens == 0
    assert pod.PodConfig(layout="window").sinks == "none"
    with pytest.raises(ValueError, match="'none' stores no first tokens, got num_sink_tokens = 4"):
        pod.PodConfig(sinks="none", num_sink_tokens=4)
