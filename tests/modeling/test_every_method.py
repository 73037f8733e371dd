"""What every method and composition must do, over the rows of ``method_table``."""

import copy
import functools
import re

import pytest
import torch
from method_table import CODEC, LAYOUTS, MINICACHE, ROWS, SELECTIONS, UNPACKED, Row
from oracle_tools import run_cache
from rule_bytes import rule_nbytes

import pod

each = pytest.mark.parametrize("row", ROWS, ids=[row.id for row in ROWS])
BUDGETED = [row for row in ROWS if "budget" in row.options]
TURNS = [("prompt", 27), ("decode", 3), ("prompt", 8), ("decode", 3)]


def make(model, row: Row, **changes):
    return pod.make_cache(model, row.spec, **(row.options | changes))


def test_every_registered_method_has_a_row():
    named = {part for row in ROWS for part in re.split(r"[+()]", row.spec) if part}
    assert set(pod.methods()) - named == set()
    assert all(row.whole is not None or row.why for row in ROWS)
    assert len({row.id for row in ROWS}) == len(ROWS)


# -- rows of a batch -----------------------------------------------------------------------------------------


def ragged(ids, lengths):
    """Mask ``[B, n]`` of rows with ``lengths`` real tokens at the right end."""
    return (torch.arange(ids.shape[1]) >= ids.shape[1] - torch.tensor(lengths)[:, None]).long()


def generate(model, cache, ids, mask, tokens, **arguments):
    """Greedy: all ids ``[B, n + tokens]`` and the logits ``[B, tokens, vocab]`` of the generated ones.

    The logits are taken from the model, because ``generate()`` itself rounds them to fp32.
    """
    logits = []
    hook = model.register_forward_hook(lambda module, inputs, out: logits.append(out.logits[:, -1]))
    fixed = {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": None}
    try:
        ids = model.generate(ids, attention_mask=mask, past_key_values=cache, **fixed, **arguments)
    finally:
        hook.remove()
    return ids, torch.stack(logits[-tokens:], 1)


def two_turns(model, row, ids, mask, second, second_mask, cache=None, **arguments):
    """Two rounds of ``generate()`` over one cache: logits of both, all tokens."""
    cache = cache or make(model, row)
    ids, first = generate(model, cache, ids, mask, 4, **arguments)
    mask = torch.cat((mask, torch.ones_like(ids[:, -4:]), second_mask), 1)
    ids, last = generate(model, cache, torch.cat((ids, second), 1), mask, 4, **arguments)
    return torch.cat((first, last), 1), ids, cache


@each
def test_padded_rows_equal_rows_alone_in_two_rounds_of_generate(tools, model_of, row):
    """Rows of 34, 21 and 3 tokens; then 7, 6 and 2 more."""
    model = model_of(row.model)
    ids, second = tools.random_ids(3, 34), tools.random_ids(3, 7, seed=1)
    mask, second_mask = ragged(ids, [34, 21, 3]), ragged(second, [7, 6, 2])
    alone = []
    for i in range(3):
        own, more = ids[i][mask[i].bool()][None], second[i][second_mask[i].bool()][None]
        logits, _, _ = two_turns(model, row, own, torch.ones_like(own), more, torch.ones_like(more))
        alone.append(logits)
    for chunk in (None, 6) if row in (*LAYOUTS, *SELECTIONS) else (6,):
        logits, _, cache = two_turns(model, row, ids, mask, second, second_mask, prefill_chunk_size=chunk)
        assert (logits - torch.cat(alone)).abs().max() <= 1e-9
        assert cache.lengths.tolist() == [34 + 7 + 7, 21 + 6 + 7, 3 + 2 + 7]


def held_by(cache, row):
    """Bytes by tensor that the group of a row alone holds."""
    (layers,) = [group.layers for group in cache.groups if group.rows == [row]]
    return [(name, tensor.untyped_storage().nbytes()) for layer in layers for name, tensor in layer.parts()]


@pytest.mark.parametrize("row", BUDGETED, ids=[row.id for row in BUDGETED])
@torch.no_grad()
def test_rows_of_unlike_budgets_equal_rows_alone(tools, model_of, row):
    """Each row holds the bytes that it holds alone.

    Rows of 34, 21, 30 and 3 tokens, the first and the last of one budget.
    """
    model, least = model_of(row.model), row.options["budget"]
    budgets = [least, least + 9, least + 2, least]
    ids, second = tools.random_ids(4, 34), tools.random_ids(4, 7, seed=1)
    mask, second_mask = ragged(ids, [34, 21, 30, 3]), ragged(second, [7, 6, 7, 2])
    mixed = make(model, row, budget=budgets)
    logits, _, _ = two_turns(model, row, ids, mask, second, second_mask, mixed)
    mixed.check_integrity()
    for i, budget in enumerate(budgets):
        own, more = ids[i][mask[i].bool()][None], second[i][second_mask[i].bool()][None]
        ones, cache = (torch.ones_like(own), torch.ones_like(more)), make(model, row, budget=budget)
        alone, _, _ = two_turns(model, row, own, ones[0], more, ones[1], cache)
        assert (logits[i] - alone[0]).abs().max() <= 1e-9
        if hasattr(cache, "groups"):
            assert held_by(mixed, i) == held_by(cache, 0)
            assert abs(mixed.nbytes_by_row()[i] - cache.nbytes) < 2000  # of bookkeeping
    again = make(model, row, budget=budgets)
    again.from_state(copy.deepcopy(mixed.state()))
    mixed.reorder_cache(torch.tensor([1, 0]))
    again.batch_select_indices(torch.tensor([1, 0]))
    fed, said = tools.random_ids(2, 1, seed=3), torch.ones_like(mask[:, :4])
    grown = torch.cat((mask, said, second_mask, said), 1)
    outputs = [model(fed, attention_mask=grown[[1, 0]], past_key_values=c).logits for c in (mixed, again)]
    assert (outputs[0] - outputs[1]).abs().max() <= 1e-12


def test_budgets_of_rows_are_checked(tools, model_of):
    model = model_of("dense")
    cache = pod.make_cache(model, "h2o", budget=[8, 12])
    with pytest.raises(ValueError, match="budgets of 2 rows, the batch has 3: give each row its budget"):
        model(tools.random_ids(3, 20), past_key_values=cache)
    model(tools.random_ids(2, 20), past_key_values=cache)  # nothing was fed
    assert [layer.held for group in cache.groups for layer in group.layers[:1]] == [8, 12]
    for budget in ([], [8, 0], [8, 2.5], [8, "25%"]):
        with pytest.raises(
            ValueError, match="needs a budget, .* a list of tokens for the rows of a batch; got"
        ):
            pod.make_cache(model, "h2o", budget=budget)
    with pytest.raises(ValueError, match="takes no budget"):
        pod.make_cache(model, "full", budget=[8, 9])


@each
@torch.no_grad()
def test_generate_feeds_what_a_loop_feeds(tools, model_of, row):
    model = model_of(row.model)
    ids, second = tools.random_ids(1, 27), tools.random_ids(1, 7, seed=1)
    logits, fed, _ = two_turns(model, row, ids, torch.ones_like(ids), second, torch.ones_like(second))
    looped = run_cache(model, make(model, row), fed[:, :-1], TURNS)
    assert (logits - looped[:, [*range(26, 30), *range(37, 41)]]).abs().max() <= 1e-9


@each
@torch.no_grad()
def test_rows_are_selected_repeated_and_reordered(tools, model_of, row):
    model = model_of(row.model)
    ids, mask = tools.random_ids(3, 30), torch.ones(3, 30, dtype=torch.long)
    mask[2, :19] = 0
    cache = make(model, row)
    cache.begin_prompt(25)
    for start, end in [(0, 25), (25, 26)]:
        model(ids[:, start:end], attention_mask=mask[:, :end], past_key_values=cache)
    cache.batch_select_indices(torch.tensor([2, 0]))
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([3, 0, 1]))
    rows, more = [0, 2, 2], tools.random_ids(3, 4, seed=2)
    assert cache.batch_size == 3 and cache.lengths.tolist() == [26, 7, 7]
    grown = torch.cat((mask[rows, :26], torch.ones_like(more)), 1)
    outputs = [
        model(more[:, t : t + 1], attention_mask=grown[:, : 27 + t], past_key_values=cache).logits
        for t in range(4)
    ]
    for place, source in enumerate(rows):
        own = torch.cat((ids[source, :26][mask[source, :26].bool()], more[place]))[None]
        turns = [("prompt", own.shape[1] - 5), ("decode", 5)]
        alone = run_cache(model, make(model, row), own, turns)
        assert (torch.cat(outputs, 1)[place] - alone[0, -4:]).abs().max() <= 1e-9


@each
@torch.no_grad()
def test_a_row_that_starts_while_the_others_decode_equals_the_row_alone(tools, model_of, row):
    """Nothing but padding in the prompt of the batch: the row's first token is a prompt of one token."""
    model, ids, outputs = model_of(row.model), tools.random_ids(2, 34), []
    mask = torch.ones_like(ids)
    mask[1, :14] = 0
    cache, start = make(model, row), 0
    for width in (13, *[1] * 12, 5, *[1] * 4):
        end = start + width
        outputs.append(model(ids[:, start:end], attention_mask=mask[:, :end], past_key_values=cache).logits)
        start = end
    turns = [("prompt", 1), ("decode", 10), ("prompt", 5), ("decode", 4)]
    alone = run_cache(model, make(model, row), ids[1:, 14:], turns)
    assert (torch.cat(outputs, 1)[1, 14:] - alone[0]).abs().max() <= 1e-9


# -- nothing dropped, nothing hidden -------------------------------------------------------------------------


@pytest.mark.parametrize("row", [row for row in ROWS if row.whole is not None], ids=lambda row: row.id)
@torch.no_grad()
def test_budget_beyond_the_sequence_is_full_attention(tools, model_of, row):
    model = model_of(row.model)
    ids = tools.random_ids(2, sum(count for _, count in TURNS))
    expected = model(ids).logits
    for widths in ((), (5, 9)):
        logits = run_cache(model, make(model, row, **row.whole), ids, TURNS, widths)
        assert (logits - expected).abs().max() <= 1e-12
    if row.whole:
        logits = run_cache(model, make(model, row), ids, TURNS)
        assert (logits - expected).abs().max() > 1e-3  # the small options do change something


def storages(cache) -> int:
    """Bytes of every tensor reachable from the cache by walking attributes, once per storage."""
    found, visited, stack = {}, set(), [cache]
    while stack:
        item = stack.pop()
        if id(item) in visited or isinstance(item, torch.nn.Module | pod.PodConfig | type):
            continue
        visited.add(id(item))
        if isinstance(item, torch.Tensor):
            found[item.untyped_storage().data_ptr()] = item.untyped_storage().nbytes()
        elif isinstance(item, dict):
            stack.extend(item.values())
        elif isinstance(item, list | tuple | set):
            stack.extend(item)
        elif isinstance(item, functools.partial):
            stack.extend((*item.args, *item.keywords.values()))
        elif hasattr(item, "__dict__"):
            stack.extend(vars(item).values())
    return sum(found.values())


@each
@torch.no_grad()
def test_bytes_are_those_predicted_and_nothing_else_is_held(tools, model_of, row):
    """2,100 tokens in two passes, then 10 decoded."""
    model = model_of(row.model, torch.float32)
    cache = make(model, row, **row.large)
    run_cache(model, cache, tools.random_ids(1, 2110), [("prompt", 2100), ("decode", 10)], (1400, 700))
    config, by_part = model.config, cache.nbytes_by_part()
    held = cache.nbytes - by_part["bookkeeping"]
    assert abs(held / rule_nbytes(cache) - 1) <= 0.01
    assert abs(storages(cache) / cache.nbytes - 1) <= 0.002
    dense = 2 * 2110 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    assert held <= (1 - row.saves) * dense * 1.01
    cache.reset()
    assert cache.nbytes == 0


# -- what is refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda row: row.id)
@torch.no_grad()
def test_every_combination_is_exact_or_refused_with_its_reason(tools, model_of, layout):
    """Every combination is the model itself, or is refused with a sentence.

    All selections and codecs are tried over a layout, with nothing dropped or packed.
    """
    model, ids, works = model_of(layout.model), tools.random_ids(2, 12), []
    expected = model(ids).logits
    for row in (Row("", whole={}), *SELECTIONS, MINICACHE):
        for codec in ("", "int4"):
            spec = "+".join(part for part in (layout.spec, row.spec, codec) if part)
            options = row.options | row.whole | (CODEC | UNPACKED if codec else {})
            try:
                cache = pod.make_cache(model, spec, **options)
            except ValueError as error:
                assert re.fullmatch(rf"'{re.escape(spec)}' is not possible: .{{30,}}", str(error))
                continue
            logits = run_cache(model, cache, ids, [("prompt", 9), ("decode", 1), ("prompt", 2)], (5,))
            assert (logits - expected).abs().max() <= 1e-12, spec
            works.append(spec)
    assert {layout.spec, f"{layout.spec}+int4"} <= set(works)
    if layout.spec == "full":
        assert len(works) == 2 * (len(SELECTIONS) + 2)


@each
@torch.no_grad()
def test_crop_is_exact_or_refused_and_harmless(tools, model_of, row):
    model = model_of(row.model)
    ids = tools.random_ids(1, 31)
    cache, fresh = make(model, row), make(model, row)
    turns = [("prompt", 26), ("decode", 2)]
    for c in (cache, fresh):
        run_cache(model, c, ids[:, :28], turns)
    with pytest.raises(ValueError, match=r"crop.*" + re.escape(row.spec)):
        cache.crop(2)
    most = cache.num_croppable
    with pytest.raises(
        ValueError, match=rf"crop.*{re.escape(row.spec)} cache can take back {most} of its 28"
    ):
        cache.crop(-most - 1)
    if most > 2 and "+" not in row.spec and "int" not in row.spec:  # packed tokens stay packed
        run_cache(model, cache, ids[:, 3:5], [("decode", 2)])
        cache.crop(-2)
    outputs = [run_cache(model, c, ids[:, 28:], [("decode", 3)]) for c in (cache, fresh)]
    assert torch.equal(*outputs)
