"""Checkpoints.

Other ranks continue, asynchronous ones are whole, a running engine goes back, and kills lose nothing.
"""

import os

import pytest
import torch

from pod.training.checkpoint import checkpoint_files
from pod.training.checkpoint.checkpoint_files import host_pieces, read_pieces, whole_weights, write_pieces
from pod.training.deepspeed_bridge import MASTER, MOMENTS, Piece

pytestmark = pytest.mark.multiprocess
CHAINS = ("full", "lora", "half")


@pytest.mark.parametrize("chain", CHAINS)
def test_other_ranks_and_stages_load_the_saved_state_bit_for_bit(restart_results, chain):
    two, three, one = (restart_results[f"{chain}_on_{ranks}"] for ranks in (2, 3, 1))
    assert three["from"] == 2 and one["from"] == 4
    assert three["loaded"] == two["saved"]  # master weights and both moments
    assert one["loaded"] == three["saved"]
    assert [three["loaded_again"], one["loaded_again"]] == [three["loaded"], one["loaded"]], (
        "a rewind loads it too"
    )
    assert one["left"] == ["step-00000004", "step-00000006"]


@pytest.mark.parametrize("chain", CHAINS)
def test_adam_counts_each_step_once_and_norms_keep_their_decay(restart_results, chain):
    for ranks, steps in ((2, 2.0), (3, 4.0), (1, 6.0)):
        result = restart_results[f"{chain}_on_{ranks}"]
        assert result["adam_steps"] == [steps]
        assert result["decay"] == ([0.3] if chain == "lora" else [0.3, 0.0])


@pytest.mark.parametrize(("chain", "tolerance"), [("full", 1e-6), ("lora", 1e-6)])
def test_two_then_three_then_one_rank_equal_two_all_the_way(restart_results, chain, tolerance):
    whole, last = restart_results[f"{chain}_whole"], restart_results[f"{chain}_on_1"]
    difference = restart_results[f"{chain}_difference"]
    assert difference["error"] <= tolerance
    assert difference["moved"] > 1e-2, "the run must have gone on after the first layout"
    assert last["rows"] == whole["rows"] == (6 if chain == "full" else 36)
    assert last["losses"] == pytest.approx(whole["losses"], abs=2e-6)


def test_bfloat16_keeps_its_master_weights_across_layouts(restart_results):
    # The sums of three ranks round differently: two steps of bfloat16, of weights from 1 to 2 (norms) and of
    # the loss. The loaded state is exact (above).
    losses = [restart_results[name]["losses"] for name in ("half_whole", "half_on_1")]
    assert losses[0] == pytest.approx(losses[1], rel=2 * 2**-8)
    assert restart_results["half_difference"]["error"] <= 2 * 2**-7


@pytest.mark.parametrize("name", ["zero3", "zero1", "bfloat16", "lora_dropout"])
def test_a_running_engine_goes_back_to_its_checkpoint(restart_results, name):
    saved, later, loaded, again = restart_results["rewinds"][name]
    assert saved != later
    assert loaded == saved
    assert again == later  # dropout included, and the recipe's weight decay instead of the checkpoint's


@pytest.mark.parametrize("rank", [0, 1])
def test_an_asynchronous_checkpoint_holds_the_moment_and_is_published_whole(restart_results, rank):
    result = restart_results[f"async_rank{rank}"]
    assert result["seen"] == [False, False, "step-00000001"], "latest must wait for the slower rank"
    assert result["step"] == 1
    assert result["loaded"] == result["saved"] != result["later"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failed_asynchronous_write_reaches_every_rank_in_one_line(restart_results, rank):
    result = restart_results[f"async_rank{rank}"]
    assert result["error"].startswith("cannot write checkpoint")
    assert ("Input/output error" in result["error"]) == (rank == 1)
    assert "\n" not in result["error"]
    assert result["left"] == ["step-00000001"]
    assert result["after"] == "step-00000004"  # the next attempt


def test_sigterm_waits_for_the_asynchronous_checkpoint_and_the_run_continues_exactly(restart_results):
    stopped, resumed, whole = (
        restart_results[name] for name in ("term_stopped", "term_resumed", "full_whole")
    )
    assert stopped["step"] == 3 and resumed["from"] == 3
    assert resumed["loaded"] == stopped["saved"]
    assert resumed["saved"] == whole["saved"]  # the same run without interruption, written at once
    assert resumed["losses"] == whole["losses"]


def test_rotation_keeps_the_last_and_every_nth(restart_results):
    kept = restart_results["rotation"]["kept"]
    assert kept == ["step-00000002", "step-00000004", "step-00000005", "step-00000099"]


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("cut", "(weights-00001-000.safetensors: Error while deserializing header: incomplete"),
        ("header", "(weights-00001-000.safetensors: Error while deserializing header: invalid"),
        ("gone", " of its values are missing): "),
    ],
)
def test_a_damaged_checkpoint_is_one_line_on_every_rank(restart_results, case, says):
    """Agreed: a rank alone would leave its peers in the next collective."""
    on_two, on_one = (
        [restart_results[f"damaged_{rank}_of_{size}"][case] for rank in range(size)] for size in (2, 1)
    )
    assert says in on_two[1] and says in on_one[0]
    assert says in on_two[0] or "(another rank failed, see its message)" in on_two[0]
    assert all(one.startswith("checkpoint ") and "\n" not in one for one in on_two + on_one)


def test_killed_runs_end_with_the_weights_of_an_uninterrupted_one(kills_results):
    result = kills_results["kills"]
    wanted = int(os.environ.get("POD_KILLS", "6"))
    assert len(result["moments"]) >= wanted
    assert result["rounds"]
    for each in result["rounds"]:
        assert each["weights"] and each["optimizer"] and each["losses"], each
        # nothing abandoned is left; a kill between renaming and `latest` leaves a checkpoint that the next
        # run keeps aside
        left = [name for name in each["left"] if not name.startswith("kept-")]
        assert left == ["step-00000009", "step-00000010"]
    phases = {phase for moment in result["moments"] for phase in moment["seen"]}
    assert phases & {"save", "write", "publish"}


def piece(name, shape, start, *values) -> Piece:
    kinds = (MASTER, *MOMENTS)
    return Piece(name, shape, start, dict(zip(kinds, map(torch.tensor, values), strict=False)))


def test_host_pieces_own_their_memory():
    flat = torch.arange(6.0)
    (copy,) = host_pieces([Piece("w", (2, 3), 2, {MASTER: flat[2:4]})])
    flat.zero_()
    assert copy.values[MASTER].tolist() == [2, 3]
    assert copy.values[MASTER].untyped_storage().nbytes() == 8, "a view must not drag its whole storage along"


def test_pieces_are_cut_anew(tmp_path, monkeypatch):
    """Three ranks hold a weight of 7 as 3, 3, 1, another of 2 lies on the last; files end after a piece."""
    monkeypatch.setattr(checkpoint_files, "FILE_BYTES", 1)
    whole = {kind: torch.arange(7.0) + 10 * number for number, kind in enumerate((MASTER, *MOMENTS))}
    for rank, (start, stop) in enumerate([(0, 3), (3, 6), (6, 7)]):
        own = [Piece("a/b", (7,), start, {kind: held[start:stop] for kind, held in whole.items()})]
        if rank == 2:
            own.append(piece("c", (1, 2), 0, [8.0, 9.0]))
        count, written = len(own), []
        write_pieces(tmp_path, rank, own, lambda: written.append(1))  # noqa: B023  called at once
        assert own == [] and len(written) == count
    for start, stop in [(0, 7), (2, 4), (5, 7), (3, 3)]:
        got = Piece("a/b", (7,), start, {kind: torch.full((stop - start,), torch.nan) for kind in whole})
        read_pieces(tmp_path, [got])
        assert all(torch.equal(got.values[kind], held[start:stop]) for kind, held in whole.items())
    weights = whole_weights(tmp_path)
    assert torch.equal(weights["a/b"], whole[MASTER]) and torch.equal(
        weights["c"], torch.tensor([[8.0, 9.0]])
    )
    with pytest.raises(ValueError, match="^2 of its values are missing$"):
        read_pieces(tmp_path, [piece("d", (2,), 0, [0.0, 0.0])])
    with pytest.raises(ValueError, match="^2 of its values are missing$"):
        read_pieces(
            tmp_path, [piece("c", (2,), 0, [0.0, 0.0], [0.0, 0.0])]
        )  # written before the first update
