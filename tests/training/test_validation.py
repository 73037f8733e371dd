"""Evaluation and memory: equal to plain PyTorch on any ranks, and unseen by training."""

import numpy as np
import pytest

from pod.training.args import TrainArgs
from pod.training.observe.validation import (
    HeldOutEvaluation,
    PasskeyProbe,
    held_out_rows,
    lengthened,
    padded_row,
    position_ranges,
)

LAYOUTS = ["alone", "sp4", "sp2_dp2", "sp2_offload"]


class Prepared:
    """A data set with held-out documents of these lengths; token t of all of them together is t."""

    def __init__(self, folder, lengths, context_length=10):
        self.path, self.context_length = folder, context_length
        self.manifest = {"pad_token_id": 7}
        if lengths is not None:
            held_out = {"documents": len(lengths), "tokens": sum(lengths), "token_dtype": "uint16"}
            self.manifest["held_out"] = held_out
            np.arange(sum(lengths)).astype("<u2").tofile(folder / "held_out.tokens.bin")
            np.save(folder / "held_out.lengths.npy", np.array(lengths, dtype="<i8"))


def test_long_documents_come_first_and_short_ones_are_packed(tmp_path):
    rows = held_out_rows(Prepared(tmp_path, [4, 12, 3, 5, 10, 2, 6]), 5)
    assert rows["input_ids"].tolist() == [
        list(range(4, 14)),  # the beginning of the document of 12
        list(range(24, 34)),  # the one of 10
        [0, 1, 2, 3, 16, 17, 18, 19, 20, 21],  # 4 and 3, and 3 of 5
        [34, 35, 36, 37, 38, 39, 40, 41, 7, 7],  # what is left
    ]
    assert rows["doc_ids"][2].tolist() == [0, 0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert rows["labels"][2].tolist() == [1, 2, 3, -100, 17, 18, -100, 20, 21, -100]
    assert len(held_out_rows(Prepared(tmp_path, [4, 12, 3, 5, 10, 2, 6]), 1)["labels"]) == 1


def test_little_held_out_text_makes_one_row_with_padding(tmp_path):
    rows = held_out_rows(Prepared(tmp_path, [3, 2]), 4)
    assert rows["input_ids"].tolist() == [[0, 1, 2, 3, 4, 7, 7, 7, 7, 7]]
    assert rows["doc_ids"].tolist() == [[0, 0, 0, 1, 1, -1, -1, -1, -1, -1]]


@pytest.mark.parametrize("lengths", [None, []])
def test_data_without_held_out_text_is_refused(tmp_path, lengths):
    args = TrainArgs(eval_every_steps=5)
    with pytest.raises(ValueError, match="data.held_out_tokens empty or above 0"):
        HeldOutEvaluation.of(args, Prepared(tmp_path, lengths))


def test_without_settings_nothing_is_evaluated(tmp_path):
    assert HeldOutEvaluation.of(TrainArgs(), Prepared(tmp_path, None)) is None


@pytest.mark.parametrize(
    ("length", "buckets"),
    [
        (41, [(0, 41)]),
        (64, [(0, 64)]),
        (141, [(0, 64), (64, 128), (128, 141)]),
        (8192, [(0, 64)] + [(64 << at, 128 << at) for at in range(7)]),
        (131072, [(0, 1024)] + [(1024 << at, 2048 << at) for at in range(7)]),
    ],
)
def test_buckets_double_and_are_few(length, buckets):
    assert position_ranges(length) == buckets


def test_answer_tokens_are_the_labels_of_the_tokens_before_them():
    row = padded_row([5, 6, 7, 8], answer=2, length=6)
    assert row["labels"].tolist() == [[-100, 7, 8, -100, -100, -100]]
    assert row["doc_ids"].tolist() == [[0, 0, 0, 0, -1, -1]]
    assert lengthened(row, 8)["labels"].tolist() == [[-100, 7, 8] + [-100] * 5]


class Spelling:
    """A tokenizer of characters that joins a space and the digit behind it.

    It puts a token before every text.
    """

    def __call__(self, text):
        ids = [0]
        for char in text:
            if char.isdigit() and ids[-1] == ord(" "):
                ids[-1] = 1000 + int(char)
            else:
                ids.append(ord(char))
        return {"input_ids": ids}


def test_passkeys_are_split_where_prompt_and_number_part():
    expected = PasskeyProbe(prompt=(0, *map(ord, "key is")), answer=(1004, ord("2")), depth=0.25)
    assert PasskeyProbe.of(Spelling(), "key is", "42", 0.25) == expected
    assert PasskeyProbe.of(Spelling(), "key is ", "42", 0.5).prompt == (0, *map(ord, "key is "))


def test_prompts_that_do_not_fit_are_refused(tmp_path):
    rows = held_out_rows(Prepared(tmp_path, [12]), 1)
    long = PasskeyProbe(prompt=tuple(range(8)), answer=(1, 2, 3), depth=0.0)
    with pytest.raises(ValueError, match="a passkey prompt has 11 tokens, but rows have 10"):
        HeldOutEvaluation(rows, [long])


def mean(values):
    return sum(values) / len(values)


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", LAYOUTS)
def test_evaluation_on_ranks_equals_plain_pytorch(seeing_results, name):
    plain, seen = seeing_results["plain"], seeing_results[name]
    record = seen["before"]
    losses = plain["losses"]
    assert record["eval_loss"] == pytest.approx(mean([loss for _, loss in losses]), rel=1e-6)
    assert record["eval_perplexity"] == pytest.approx(np.exp(record["eval_loss"]), rel=1e-12)
    for start, end in position_ranges(141):
        own = [loss for position, loss in losses if start <= position < end]
        assert record[f"eval_loss_{start}_{end}"] == pytest.approx(mean(own), rel=1e-6)
    assert [key["correct"] for key in record["eval_passkeys"]] == [True, False, True]
    assert [key["depth"] for key in record["eval_passkeys"]] == [0.0, 0.5, 1.0]
    assert record["eval_passkey"] == 2 / 3
    got = [key["loss"] for key in record["eval_passkeys"]]
    assert got == pytest.approx(plain["passkey_losses"], rel=1e-6)
    assert record["eval_passkey_loss"] == pytest.approx(mean(plain["passkey_losses"]), rel=1e-6)


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", LAYOUTS)
def test_evaluation_leaves_the_model_as_it_was(seeing_results, name):
    seen = seeing_results[name]
    assert (seen["modes"], seen["row_length"], seen["traces"]) == ([True], 141, [False, False])
    assert 0.1 < seen["memory"]["peak_memory_gib"] < 8
    assert "eval_loss" not in seen["memory"] and not seen["owes"], "no evaluation belongs to step 1"


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", ["", "_lora"])
def test_training_does_not_notice_that_it_is_watched(seeing_results, name):
    """Weights and moments bit for bit, dropout's random numbers included."""
    seen, unseen = seeing_results[f"seen{name}"], seeing_results[f"unseen{name}"]
    assert seen["hash"] == unseen["hash"]
    watched = [line for line in seen["metrics"] if "eval_loss" in line]
    assert [line["step"] for line in watched] == [0, 2, 3]
    assert not any("eval_loss" in line for line in unseen["metrics"])
    losses = [[line["loss"] for line in run["metrics"] if line["step"]] for run in (seen, unseen)]
    assert losses[0] == losses[1]
    assert watched[0]["eval_loss"] > watched[-1]["eval_loss"]


@pytest.mark.multiprocess
def test_a_signal_ends_an_evaluation_which_the_continued_run_makes(seeing_results):
    stopped, whole = (seeing_results["signalled"][part] for part in ("stopped", "whole"))
    assert (stopped["step"], stopped["rows"]) == (2, (1 + 6) + (1 + 1))  # six rows, then one
    assert [line["step"] for line in stopped["metrics"] if "eval_loss" in line] == [0]
    found, expected = (
        {line["step"]: line["eval_loss"] for line in run["metrics"] if "eval_loss" in line}
        for run in (whole, seeing_results["seen"])
    )
    assert found == expected and list(found) == [0, 2, 3]
