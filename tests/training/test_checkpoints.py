"""Checkpoints: another layout continues, asynchronous ones are whole, a running engine goes back, kills lose nothing."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from pod.training.checkpoint import snapshot
from pod.training.checkpoint.files import Checkpointer, same_shards
from pod.training.checkpoint.snapshot import FileWriter, to_host

pytestmark = pytest.mark.multiprocess
CHAINS = ("full", "lora", "half")


@pytest.mark.parametrize("chain", CHAINS)
def test_a_converted_checkpoint_is_the_saved_state_bit_for_bit(restart_results, chain):
    two, three, one = (restart_results[f"{chain}_on_{ranks}"] for ranks in (2, 3, 1))
    assert three["from"] == 2 and one["from"] == 4
    assert three["loaded"] == two["saved"]  # master weights and both moments
    assert one["loaded"] == three["saved"]
    assert three["universal"] == ["universal-00000002"]
    assert [three["loaded_again"], one["loaded_again"]] == [three["loaded"], one["loaded"]], (
        "a rewind loads it too"
    )
    assert one["left"] == ["step-00000004", "step-00000006"], (
        "universal copies must go when a checkpoint is published"
    )


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
    # the sums of three ranks round differently: two steps of bfloat16, of weights from 1 to 2 (norms) and of the loss; the loaded state
    # is exact (above)
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
        ("damaged", "was written by another layout of ranks and cannot be converted ("),
        ("space", "disk full: "),
    ],
)
def test_what_cannot_be_converted_is_one_line(restart_results, case, says):
    message = restart_results["conversion"][case]
    assert says in message
    assert "\n" not in message


def test_a_failed_conversion_leaves_nothing(restart_results):
    assert restart_results["conversion"]["left"] == []


def test_a_conversion_ends_with_its_parent(restart_results):
    result = restart_results["conversion"]
    assert result["child_alive"] == [True, False]


def test_killed_runs_end_with_the_weights_of_an_uninterrupted_one(kills_results):
    result = kills_results["kills"]
    wanted = int(os.environ.get("POD_KILLS", "6"))
    assert len(result["moments"]) >= wanted
    assert result["rounds"]
    for each in result["rounds"]:
        assert each["weights"] and each["optimizer"] and each["losses"], each
        assert each["left"] == ["step-00000009", "step-00000010"]  # nothing abandoned is left
    phases = {phase for moment in result["moments"] for phase in moment["seen"]}
    assert "convert" in phases
    assert phases & {"save", "write", "publish"}


def test_a_host_copy_owns_its_memory_and_keeps_what_is_shared():
    weight = torch.arange(6.0)
    content = {
        "a": weight,
        "view": weight[2:4],
        "tied": [weight, (weight, 3)],
        "shape": weight.shape,
        "none": None,
    }
    copy = to_host(content)
    weight.zero_()
    assert copy["a"].tolist() == [0, 1, 2, 3, 4, 5]
    assert copy["view"].tolist() == [2, 3]
    assert copy["view"].untyped_storage().nbytes() == 8, "a view must not drag its whole storage along"
    assert copy["tied"][0] is copy["a"] and copy["tied"][1][0] is copy["a"]
    assert copy["tied"][1][1] == 3 and copy["none"] is None
    assert copy["shape"] == torch.Size([6]) and isinstance(copy["shape"], torch.Size)


class _Engine:
    def __init__(self, fails: bool = False):
        self.saved: list[str] = []
        self.fails = fails

    def save(self, state_dict, path):
        if self.fails:
            raise RuntimeError("unexpected pos 64 vs 0")
        Path(path).write_text(str(state_dict))
        self.saved.append(path)


def test_a_deferred_writer_writes_only_when_started(tmp_path):
    engine, files = _Engine(), []
    writer = FileWriter(engine, lambda: files.append(1))
    writer.begin(deferred=True)
    writer.save({"x": 1}, str(tmp_path / "a"))
    assert engine.saved == [] and writer.finished
    writer.start()
    writer.join()
    assert engine.saved == [str(tmp_path / "a")] and files == [1]
    assert writer.error is None and writer.finished


def test_a_writer_notes_errors_and_forgets_them_at_the_next_checkpoint(tmp_path, monkeypatch):
    writer = FileWriter(_Engine(fails=True), lambda: None)
    for deferred in (False, True):
        writer.begin(deferred)
        writer.save({}, str(tmp_path / "a"))
        writer.start()
        writer.join()
        assert "unexpected pos" in str(writer.error)

    def full(content):
        raise MemoryError("no host memory")

    monkeypatch.setattr(snapshot, "to_host", full)
    writer.begin(deferred=True)
    assert writer.error is None
    writer.save({}, str(tmp_path / "a"))
    assert "no host memory" in str(writer.error)


LAYOUT = {"world_size": 2, "sequence_parallel_size": 2, "zero_stage": 3, "offload_optimizer": "none"}


def test_only_what_shards_depend_on_makes_another_layout():
    assert same_shards(LAYOUT, {**LAYOUT, "sequence_parallel_size": 1})
    for key, value in {"world_size": 3, "zero_stage": 1, "offload_optimizer": "cpu"}.items():
        assert not same_shards(LAYOUT, {**LAYOUT, key: value})


@pytest.mark.parametrize(("content", "says"), [(b"", "header too small"), (None, "No such file")])
def test_a_damaged_file_of_one_rank_is_one_line_on_every_rank(tmp_path, content, says):
    """Read before the engine changes anything, and agreed: a rank alone would leave its peers in the first step."""
    failed = []
    checkpointer = Checkpointer.__new__(Checkpointer)
    checkpointer.mesh = SimpleNamespace(rank=1, largest=lambda value: failed.append(value) or value)
    if content is not None:
        (tmp_path / "random-00001.safetensors").write_bytes(content)
    with pytest.raises(
        ValueError, match=rf"^checkpoint .* cannot be read \(random-00001.safetensors: .*{says}.*: remove it$"
    ):
        checkpointer._read_own_files(tmp_path)
    assert failed == [1]

    save_file({"cpu": torch.get_rng_state()}, tmp_path / "random-00001.safetensors")
    assert torch.equal(checkpointer._read_own_files(tmp_path)["cpu"], torch.get_rng_state())
    shard = tmp_path / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    torch.save({"moments": torch.zeros(1000)}, shard)
    (tmp_path / "zero_pp_rank_11_mp_rank_00_optim_states.pt").touch()  # another rank's to complain about
    checkpointer._read_own_files(tmp_path)
    os.truncate(shard, 3000)
    with pytest.raises(ValueError, match=r"cannot be read \(zero_pp_rank_1_mp.* is cut off\): remove it$"):
        checkpointer._read_own_files(tmp_path)
    shard.unlink()
    checkpointer.mesh.largest = lambda value: 1  # the other rank's
    with pytest.raises(
        ValueError, match=r"cannot be read \(another rank failed, see its message\): remove it$"
    ):
        checkpointer._read_own_files(tmp_path)
