"""At home in the ecosystem: arguments and answers of stock models, adapters of peft, first mistakes."""

from functools import partial

import pytest
import torch
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

import pod

TOLERANCE = 1e-9


@pytest.fixture
def tools(tools):
    """With models that are configured as users have them."""
    tools.make_pod = partial(tools.make_pod, use_cache=True)
    return tools


@torch.no_grad()
def stock_loop(model, ids, steps=12):
    """Greedy tokens as every tutorial decodes: one token and `past_key_values` of the answer before."""
    tokens, cache, fed = [], None, ids
    for _ in range(steps):
        out = model(fed, past_key_values=cache)
        cache, fed = out.past_key_values, out.logits[:, -1:].argmax(-1)
        tokens.append(fed)
    return torch.cat(tokens, dim=1)


@pytest.mark.parametrize("plan", [True, False], ids=["pod", "full"])
def test_the_usual_decoding_loop_goes_on(tools, plan):
    model, ids = tools.make_pod(plan=plan), tools.random_ids(2, 30)
    expected = model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None)[:, 30:]
    assert torch.equal(stock_loop(model, ids), expected)
    if not plan:
        assert torch.equal(stock_loop(tools.make_stock(), ids), expected)


def test_when_a_cache_comes_unasked(tools):
    """Outside of training as the configuration says; never in training, for documents, or when refused."""
    model, ids = tools.make_pod(), tools.random_ids(1, 8)
    documents = torch.tensor([[0] * 5 + [1] * 3])
    assert model(ids).past_key_values.get_seq_length() == 8
    assert model(ids, use_cache=False).past_key_values is None
    assert model(ids, doc_ids=documents).past_key_values is None
    assert model.train()(ids).past_key_values is None
    assert model(ids, use_cache=True).past_key_values.get_seq_length() == 8
    model.eval().config.use_cache = False
    assert model(ids).past_key_values is None


def test_an_unasked_cache_changes_no_gradient(tools):
    model, ids, found = tools.make_pod(), tools.random_ids(2, 30), []
    for use_cache in (None, False):
        model.zero_grad()
        model(ids, labels=ids, use_cache=use_cache).loss.backward()
        found.append([weight.grad.clone() for weight in model.parameters()])
    assert max((a - b).abs().max() for a, b in zip(*found, strict=True)) <= TOLERANCE


@pytest.mark.parametrize("family", ["llama", "qwen2-yarn", "qwen3"])
def test_from_pretrained_refuses_what_only_load_model_converts(tools, tmp_path, family):
    """Biases and norms of heads would be dropped without a word."""
    stock = tools.make_stock(family)
    stock.save_pretrained(tmp_path)
    for load in (
        pod.PodForCausalLM.from_pretrained,
        pod.PodModel.from_pretrained,
        pod.PodConfig.from_pretrained,
    ):
        with pytest.raises(ValueError, match=rf"'{stock.config.model_type}'.*load_model of pod-kv") as caught:
            load(tmp_path)
        assert "\n" not in str(caught.value)
    model = pod.load_model(tmp_path)
    model.save_pretrained(tmp_path / "own")
    again = pod.PodForCausalLM.from_pretrained(tmp_path / "own", dtype=torch.float64)
    ids = tools.random_ids(1, 20)
    logits = model(ids).logits
    assert torch.equal(again(ids).logits, logits) and (logits - stock(ids).logits).abs().max() <= 1e-4


def test_a_pod_cache_of_a_dense_model_says_that_it_is_full(tools, recwarn):
    dense, sharing = tools.make_pod(plan=False), tools.make_pod()
    with pytest.warns(UserWarning, match="'pod' keeps the same cache as 'full'.*load_model"):
        pod.make_cache(dense, "pod")
    recwarn.clear()
    (
        pod.make_cache(dense),
        pod.make_cache(dense, "full"),
        pod.make_cache(sharing, "pod"),
        pod.make_cache(sharing),
    )
    assert not recwarn.list


# -- arguments and answers ------------------------------------------------------------------


@torch.no_grad()
def test_hidden_states_are_those_of_the_stock_model(tools):
    stock, model, ids = (
        tools.make_stock("qwen3"),
        tools.make_pod("qwen3", plan=False),
        tools.random_ids(2, 20),
    )
    expected = stock(ids, output_hidden_states=True).hidden_states
    for use_cache in (True, False):
        found = model(ids, output_hidden_states=True, use_cache=use_cache).hidden_states
        assert len(found) == len(expected) == 6
        assert max((a - b).abs().max() for a, b in zip(found, expected, strict=True)) <= 1e-4
    assert model(ids).hidden_states is None
    assert torch.equal(found[-1], model.model(ids, use_cache=False).last_hidden_state)


@torch.no_grad()
@pytest.mark.parametrize("spec", ["pod", "snapkv"])
def test_hidden_states_of_padded_rows_chunks_and_tokens(tools, spec):
    """What rows have alone, whatever the cache does between; an engine steps aside."""
    model, ids, mask = tools.make_pod(plan=spec == "pod"), tools.random_ids(2, 40), torch.ones(2, 40)
    mask[0, :7] = 0
    options = {"budget": 12, "window": 4, "prefill": "streaming", "chunk_size": 5} if spec != "pod" else {}

    def states(rows, part):
        cache, found, start = pod.make_cache(model, spec, **options), [], 0
        width = rows.shape[1]
        for end in (width - 12, width - 1, width):
            given = {"attention_mask": part[:, :end], "past_key_values": cache}
            found.append(model(rows[:, start:end], output_hidden_states=True, **given).hidden_states)
            start = end
        return [torch.cat(layer, dim=1) for layer in zip(*found, strict=True)]

    together = states(ids, mask)
    assert len(together) == 6 and not any(layer[0, :7].any() for layer in together[1:])
    alone = states(ids[:1, 7:], mask[:1, 7:]), states(ids[1:], mask[1:])
    for layer, first, second in zip(together, *alone, strict=True):
        assert (layer[0, 7:] - first[0]).abs().max() <= TOLERANCE
        assert (layer[1] - second[0]).abs().max() <= TOLERANCE


@torch.no_grad()
def test_generate_gives_hidden_states(tools):
    model, ids = tools.make_pod(), tools.random_ids(1, 20)
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "return_dict_in_generate": True}
    out = model.generate(ids, output_hidden_states=True, **options)
    assert torch.equal(out.sequences, model.generate(ids, **options).sequences)
    every = model(out.sequences[:, :-1], output_hidden_states=True).hidden_states
    for layer, expected in enumerate(every):
        found = torch.cat([step[layer] for step in out.hidden_states], dim=1)
        assert (found - expected).abs().max() <= TOLERANCE


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"use_cache": False}], ids=str)
def test_generate_takes_embeddings_as_stock_models_do(tools, options):
    stock, model, ids = tools.make_stock(), tools.make_pod(), tools.random_ids(2, 20)
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    given = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "eos_token_id": None, **options}
    for one in (stock, model):
        found = one.generate(inputs_embeds=one.get_input_embeddings()(ids), **given)
        assert torch.equal(found, one.generate(ids, **given)[:, 20:])


def test_attentions_are_refused_only_when_they_are_asked_for(tools):
    model, ids = tools.make_pod(), tools.random_ids(1, 9)
    for no in (None, False):
        assert model(ids, output_attentions=no, output_hidden_states=no, return_dict=None).attentions is None
    with pytest.raises(ValueError, match="output_attentions=True.*dense model of transformers"):
        model(ids, output_attentions=True)


@torch.no_grad()
def test_the_balancing_loss_of_routers_is_refused_only_when_it_is_asked_for(tools):
    """A loss without it would look like one that has it."""
    model, ids = tools.make_pod("qwen3-moe"), tools.random_ids(1, 9)
    expected = model(ids, labels=ids, output_router_logits=False).loss
    assert torch.equal(expected, model(ids, labels=ids).loss)
    for config, asked in ((False, True), (True, None)):
        model.config.output_router_logits = config
        with pytest.raises(ValueError, match="output_router_logits=True: experts have no balancing loss"):
            model(ids, labels=ids, **({} if asked is None else {"output_router_logits": asked}))


@torch.no_grad()
def test_tuples(tools):
    stock, model, ids = tools.make_stock(), tools.make_pod(plan=False), tools.random_ids(2, 9)
    options = {"labels": ids, "output_hidden_states": True, "return_dict": False}
    expected, found = stock(ids, **options), model(ids, **options)
    assert [type(x) for x in found[:2]] == [type(x) for x in expected[:2]] and len(found) == len(expected)
    assert all((found[i] - expected[i]).abs().max() <= 1e-5 for i in range(2))
    assert isinstance(model.model(ids, return_dict=False), tuple)
    model.config.return_dict = False
    assert isinstance(model(ids), tuple)


@torch.no_grad()
@pytest.mark.parametrize(
    "kept",
    [0, 3, torch.tensor([2, 7]), torch.tensor([[1, 8], [0, 3]]), torch.arange(18).view(2, 9) % 4 == 0],
    ids=["all", "last", "places", "places of rows", "mask"],
)
def test_which_logits_are_kept(tools, kept):
    model, ids = tools.make_pod(), tools.random_ids(2, 9)
    expected = model(ids).logits
    if isinstance(kept, int):
        expected = expected[:, -kept or None :]
    elif kept.dtype == torch.bool:
        expected = expected[kept]
    elif kept.dim() == 2:
        expected = torch.stack([row[places] for row, places in zip(expected, kept, strict=True)])
    else:
        expected = expected[:, kept]
    out = model(ids, logits_to_keep=kept).logits
    assert (out - expected).abs().max() <= TOLERANCE
    if out.shape[:2] != ids.shape:
        with pytest.raises(ValueError, match="labels need all logits"):
            model(ids, labels=ids, logits_to_keep=kept)


LENGTHS = (13, 1, 20, 6)


def packed(tools):
    """Documents, and them as `transformers` packs them for a trainer."""
    rows = [tools.random_ids(1, length, seed=length)[0] for length in LENGTHS]
    examples = [{"input_ids": row.tolist()} for row in rows]
    collate = DataCollatorWithFlattening(
        return_tensors="pt", return_flash_attn_kwargs=True, return_seq_idx=True
    )
    return rows, collate(examples)


@pytest.mark.parametrize("said", ["position_ids", "cu_seq_lens_q", "both"])
@pytest.mark.parametrize("training", [True, False])
def test_packed_batches_of_trainers_are_documents(tools, said, training):
    """Logits, loss and gradients are those of the documents alone.

    Positions alone say it, and lengths alone.
    """
    model = tools.make_pod().train(training)
    rows, batch = packed(tools)
    if said == "position_ids":
        batch = {name: batch[name] for name in ("input_ids", "labels", "position_ids")}
    elif said == "cu_seq_lens_q":
        del batch["position_ids"]
    out = model(**batch)
    assert out.past_key_values is None
    expected = torch.cat([model(row[None]).logits[0] for row in rows])
    assert (out.logits[0] - expected).abs().max() <= TOLERANCE
    one_row = {"input_ids": batch["input_ids"], "labels": batch["input_ids"]}
    assert (model(**one_row).logits - out.logits).abs().max() > 1e-3
    losses = [model(row[None], labels=row[None]).loss * (len(row) - 1) for row in rows if len(row) > 1]
    mean = sum(losses) / (sum(LENGTHS) - len(LENGTHS))
    # the labels of the batch say -100 where a document starts; those that do not are read the same way
    plain = model(**{**batch, "labels": batch["input_ids"]})
    assert (out.loss - mean).abs() <= TOLERANCE and (plain.loss - mean).abs() <= TOLERANCE
    weights = list(model.parameters())
    found, wanted = torch.autograd.grad(out.loss, weights), torch.autograd.grad(mean, weights)
    assert max((a - b).abs().max() for a, b in zip(found, wanted, strict=True)) <= TOLERANCE


def test_positions_that_are_no_packing_stay_errors(tools):
    model, ids = tools.make_pod(), tools.random_ids(1, 8)
    jump = torch.tensor([[0, 1, 2, 3, 5, 6, 7, 8]])
    with pytest.raises(ValueError, match=r"position_ids\[0, 4\] = 5"):
        model(ids, position_ids=jump)
    restart = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])
    with pytest.raises(ValueError, match=r"position_ids\[0, 4\] = 0, but mask and cache make it 4"):
        model(ids, position_ids=restart, past_key_values=pod.make_cache(model))
    for packing in ({"position_ids": restart}, {"cu_seq_lens_q": torch.tensor([0, 4, 8])}):
        with pytest.raises(ValueError, match="doc_ids .*cannot be combined with a cache"):
            model(ids, use_cache=True, **packing)
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])
    padded = (mask.cumsum(1) - 1).clamp(min=0)  # zero again in the padding, which is no document
    expected = model(ids[:, 3:]).logits
    for use_cache in (True, False):
        out = model(ids, attention_mask=mask, position_ids=padded, use_cache=use_cache).logits
        assert (out[:, 3:] - expected).abs().max() <= TOLERANCE


def test_the_loss_is_over_the_items_of_the_whole_batch(tools):
    stock, model, ids = tools.make_stock(), tools.make_pod(plan=False), tools.random_ids(2, 20)
    labels = ids.clone()
    labels[0, :9] = -100
    for items in (None, 40, torch.tensor(37)):
        given = {"labels": labels, "num_items_in_batch": items}
        assert (model(ids, **given).loss - stock(ids, **given).loss).abs() <= 1e-5


def test_gradients_do_not_depend_on_how_trainer_cuts_its_batch(tools, tmp_path):
    """One batch of four rows of unlike length, and four of one: the stock trainer gives the same weights."""
    rows, found = [tools.random_ids(1, n, seed=n)[0].tolist() for n in (5, 30, 12, 21)], []

    def collate(examples):
        width = max(len(example["input_ids"]) for example in examples)
        part = [example["input_ids"] + [0] * (width - len(example["input_ids"])) for example in examples]
        lengths = torch.tensor([len(example["input_ids"]) for example in examples])
        ids, mask = torch.tensor(part), (torch.arange(width) < lengths[:, None]).long()
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}

    for size in (4, 1):
        args = TrainingArguments(
            str(tmp_path), per_device_train_batch_size=size, gradient_accumulation_steps=4 // size,
            max_steps=1, learning_rate=1e-2, optim="sgd", report_to="none", use_cpu=True, save_strategy="no",
            max_grad_norm=0.0,
        )  # fmt: skip
        model = tools.make_pod()
        Trainer(
            model, args, train_dataset=[{"input_ids": row} for row in rows], data_collator=collate
        ).train()
        found.append(list(model.parameters()))
    start = list(tools.make_pod().parameters())
    assert max((a - b).abs().max() for a, b in zip(*found, strict=True)) <= 1e-9
    assert max((a - b).abs().max() for a, b in zip(found[0], start, strict=True)) > 1e-4


def test_what_generate_hands_on_is_no_unknown_argument(tools, caplog):
    from transformers.utils import logging

    logging.get_logger("pod").propagate = True
    options = {"stop_strings": ["x"], "tokenizer": pod.load_tokenizer("package:tiny"), "max_new_tokens": 3}
    with caplog.at_level("WARNING"):
        tools.make_pod().generate(tools.random_ids(1, 9), **options)
    assert "does not know" not in caplog.text


def test_unknown_arguments_are_taken_and_named(tools, caplog):
    from transformers.utils import logging

    logging.get_logger("pod").propagate = True
    model, ids = tools.make_pod(), tools.random_ids(1, 9)
    expected = model(ids).logits
    with caplog.at_level("WARNING"):
        assert torch.equal(model(ids, attention_maks=ids, token_type_ids=None).logits, expected)
        assert torch.equal(model(ids, seq_idx=ids, max_length_q=9, max_length_k=9).logits, expected)
    named = [record.getMessage() for record in caplog.records if "does not know" in record.getMessage()]
    assert named == ["PodModel ignores arguments that it does not know: attention_maks, token_type_ids"]
