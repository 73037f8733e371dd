"""Rows of a really prepared data set go through the model.

Every document gets what it would get alone, forward and backward.
"""

import inspect
import json.decoder
import json.scanner

import pytest
import torch

import pod
from pod.data import DataArgs, prepare

CONTEXT = 96
PLAN = [[0, 0, 0], [1, 0, 0], [2, 0, 2], [3, 3, 2]]  # one head leads everywhere, the others follow in blocks
TOLERANCE = 1e-10  # fp64


@pytest.fixture(scope="module", params=["best_fit", "one_per_row"])
def rows(request, tmp_path_factory, byte_tokenizer):
    """Prepared rows of the paragraphs of one Python module and the lines and words of another.

    Documents have from 2 tokens to so many that the context cuts them.
    """
    folder = tmp_path_factory.mktemp("paragraphs")
    paragraphs = [text for text in inspect.getsource(json.decoder).split("\n\n") if text.strip()]
    source = inspect.getsource(json.scanner)
    short = [*source.split(), *(line for line in source.split("\n") if line.strip())]
    lines = [json.dumps({"text": text}) for text in [*paragraphs, *short]]
    (folder / "paragraphs.jsonl").write_text("\n".join(lines), encoding="utf-8")
    args = DataArgs(
        sources=[str(folder / "paragraphs.jsonl")],
        context_length=CONTEXT,
        shortest_interval=16,
        target_tokens=10**6,
        packing=request.param,
        workers=1,
    )
    return prepare(args, byte_tokenizer, folder / "data")


def make_model(backend):
    torch.manual_seed(0)
    config = pod.PodConfig(
        vocab_size=512, hidden_size=48, intermediate_size=64, num_hidden_layers=4,
        num_attention_heads=6, num_key_value_heads=3, head_dim=8, max_position_embeddings=CONTEXT,
        initializer_range=0.3, num_sink_tokens=2, num_recent_tokens=5, lead=PLAN,
        attention_backend=backend,
    )  # fmt: skip
    return pod.PodForCausalLM(config).double().train()


def chosen_rows(data):
    """Rows with the most documents, the most padding, the most documents that attention cuts.

    The longest row is there as well.
    """
    lengths = [[len(document) for document in data.documents(row)] for row in range(len(data))]
    long = [sum(length > 7 for length in row) for row in lengths]  # 2 sinks and a window of 5
    longest = [max(row) * min(len(row), 2) for row in lengths]  # rather one with company
    wanted = [[len(row) for row in lengths], [-sum(row) for row in lengths], long, longest]
    return list(dict.fromkeys(max(range(len(data)), key=values.__getitem__) for values in wanted))


def gradients_of(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def summed_loss(logits, labels):
    return torch.nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum")


@pytest.mark.parametrize("backend", ["flash", "reference"])
def test_packed_documents_equal_documents_alone(rows, backend):
    model, chosen = make_model(backend), chosen_rows(rows)
    batch = rows.rows(chosen)
    logits = model(input_ids=batch["input_ids"], doc_ids=batch["doc_ids"]).logits
    packed = gradients_of(model, summed_loss(logits, batch["labels"]))

    alone_loss, worst, labels = torch.zeros((), dtype=torch.float64), 0.0, 0
    for at, row in enumerate(chosen):
        start = 0
        for document in rows.documents(row):
            ids = torch.from_numpy(document.astype("int64"))[None]
            own = model(input_ids=ids).logits
            here = logits[at, start : start + len(document)]
            worst = max(worst, float((own[0] - here).abs().max().detach()))
            alone_loss = alone_loss + summed_loss(own[:, :-1], ids[:, 1:])
            start, labels = start + len(document), labels + len(document) - 1
    alone = gradients_of(model, alone_loss)
    assert float(logits.detach().std()) > 0.5, "logits of a model that says nothing are equal anyway"
    assert worst <= TOLERANCE
    assert labels == int((batch["labels"] >= 0).sum())
    assert all(gradient.abs().max() > 1e-3 for gradient in alone.values())
    errors = {name: float((packed[name] - alone[name]).abs().max()) for name in alone}
    assert max(errors.values()) <= TOLERANCE, max(errors, key=lambda name: errors[name])


def test_rows_under_test_are_worth_it(rows):
    """Documents shorter and longer than sinks and window together share rows, and there is padding."""
    lengths = [[len(document) for document in rows.documents(row)] for row in chosen_rows(rows)]
    assert any(sum(row) < CONTEXT for row in lengths) and any(max(row) > 40 for row in lengths)
    if max(map(len, lengths)) > 1:  # best_fit
        assert max(sum(length < 7 for length in row) for row in lengths) >= 4, lengths
        assert max(sum(length > 7 for length in row) for row in lengths) >= 4, lengths
        assert any(len(row) > 1 and max(row) > 40 for row in lengths), lengths


def test_positions_restart_at_every_document(rows):
    """Positions restart at every document.

    The test looks at them because RoPE knows distances only, so that logits would hide positions that run on
    across documents.
    """
    model, seen = make_model("auto"), []
    context = model.model.context
    model.model.context = lambda hidden, positions, *options: (
        seen.append(positions) or context(hidden, positions, *options)
    )
    chosen = chosen_rows(rows)
    batch = rows.rows(chosen)
    model(input_ids=batch["input_ids"], doc_ids=batch["doc_ids"])
    (positions,) = seen
    for at, row in enumerate(chosen):
        expected = [position for document in rows.documents(row) for position in range(len(document))]
        assert positions[at, : len(expected)].tolist() == expected
