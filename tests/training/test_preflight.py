"""What a run refuses before it starts: each case one line that says what came, what is allowed and what to do."""

import shutil
from types import SimpleNamespace

import pytest
import torch

import pod
from pod.modeling.shipped.sharing import SharingPlan
from pod.training.args import TrainArgs, TrainRecipe
from pod.training.predict import planner, preflight
from pod.training.predict.memory import checkpoint_disk_bytes
from pod.training.predict.preflight import agree, check, kept_checkpoints

GIB = 2**30


def config(**changes):
    sizes = {
        "vocab_size": 100, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "lead": [[0, 0], [0, 1], [2, 1], [2, 3]],
    }  # fmt: skip
    return pod.PodConfig(**sizes | changes)


MANIFEST = {"context_length": 64, "vocab_size": 100, "num_rows": 12, "tokenizer_sha256": "abc", "shards": []}
ROPE = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 16}


def run(folder, world_size=1, settings=None, model=None, manifest=None, **options):
    """`check` of a run of one step that is fine but for what is given."""
    return check(
        config(**model or {}),
        TrainRecipe(**{"max_steps": 1} | (settings or {})),
        MANIFEST | (manifest or {}),
        folder,
        planner.this_machine(world_size, world_size),
        **options,
    )


def refused(*arguments, **options) -> str:
    with pytest.raises(ValueError) as caught:
        run(*arguments, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_run_that_is_fine_is_not_refused(tmp_path):
    run(tmp_path / "train", 4, {"sequence_parallel_size": 2, "tokens_per_step": 128}, tokenizer_sha256="abc")
    assert not (tmp_path / "train").exists(), "a check leaves nothing behind"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"manifest": {"vocab_size": 101}}, "token ids up to 100, the model's vocabulary ends at 99"),
        ({"manifest": {"context_length": 65}}, "rows of 65 tokens, the model's positions end at 64"),
        ({"model": {"rope_parameters": ROPE}}, "RoPE scaling yarn of factor 2 reaches 32"),
        ({"tokenizer_sha256": "abd"}, "another tokenizer"),
        ({"plan": SharingPlan([[0, 0], [0, 1]])}, "the plan does not belong to this model"),
        ({"settings": {"sequence_parallel_size": 8}, "world_size": 8}, "every rank needs a query head"),
        ({"settings": {"sequence_parallel_size": 2}, "world_size": 3}, "3 ranks cannot form groups"),
        ({"settings": {"tokens_per_step": 16 * 64}}, "a step takes 16 rows of 64 tokens (train.tokens_per_step), the data has 12"),
        ({"settings": {"max_steps": 13}}, "13 steps of 1 rows read the data's 12 rows 1.08 times: prepare more data"),
        ({"settings": {"tokens_per_step": 65}}, "no whole rows of 64 tokens: nearest are 64, 128"),
        ({"world_size": 4, "manifest": {"context_length": 3}}, "1 rows of 3 tokens per step cannot be dealt to 4 ranks"),
    ],
)  # fmt: skip
def test_wrong_things_are_refused_by_name(tmp_path, changes, says):
    assert says in refused(tmp_path, **changes)


def test_limits_themselves_are_allowed(tmp_path):
    run(tmp_path, 2, {"tokens_per_step": 12 * 64})  # 12 rows of 12
    run(tmp_path, settings={"max_steps": 13, "allow_repeats": True})
    run(tmp_path, model={"rope_parameters": ROPE | {"factor": 4.0}})  # reaches 64 of 64
    run(tmp_path, 4, {"sequence_parallel_size": 4})


@pytest.mark.parametrize(
    ("settings", "most"),
    [
        ({"max_steps": 1000}, 3),
        ({"max_steps": 250}, 3),
        ({"max_steps": 150}, 2),
        ({"max_steps": 1000, "save_every_steps": 0}, 1),
        ({"max_steps": 1000, "save_every_steps": None, "keep_every_steps": 500}, 5),
        ({"max_steps": 1000, "keep_last": 1}, 2),
        ({"max_steps": 1000, "save_every_steps": None}, 3),  # by the clock
        ({"max_steps": 1000, "keep_every_steps": 500}, 5),
        ({"max_steps": 1000, "keep_every_steps": 100, "keep_last": 4}, 10),
    ],
)
def test_checkpoints_that_lie_on_disk_at_a_time(settings, most):
    assert kept_checkpoints(TrainArgs(**{"save_every_steps": 100, **settings})) == most


def test_disk_too_small_for_the_checkpoints_that_will_be_kept(tmp_path, monkeypatch):
    shapes = preflight.Shapes.from_config(config())
    needed = 3 * checkpoint_disk_bytes(shapes.parameters)
    free = [needed]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free[0]))
    settings = {"max_steps": 1000, "allow_repeats": True, "zero_stage": 3}
    run(tmp_path / "train", settings=settings)
    free[0] = needed - 1
    assert "3 checkpoints of 0.0 GiB will lie there (2 kept by keep_last, one being written)" in refused(
        tmp_path / "train", settings=settings
    )
    run(tmp_path / "train", settings=settings | {"keep_last": 1})
    old = tmp_path / "train" / "step-00000100" / "zero"  # what rotates counts as free
    old.mkdir(parents=True)
    (old / "state.pt").write_bytes(b"0" * 10)
    run(tmp_path / "train", settings=settings)


def test_memory_of_the_machine_is_positive_and_bounded_by_its_pages():
    assert 2**20 < planner.host_memory_bytes() <= 2**50


def test_gpus_nccl_and_bfloat16(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    h100 = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=80 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: h100)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert "no NCCL" in refused(tmp_path, 2)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    run(tmp_path, 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert "4 ranks on this machine, but 2 GPUs are visible" in refused(tmp_path, 4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: False)
    assert "no bfloat16" in refused(tmp_path)
    assert "all n x n logits would be kept" in refused(tmp_path, settings={"dtype": "float32"})
    run(tmp_path, settings={"dtype": "float32"}, model={"attention_backend": "reference"})


def test_an_output_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    assert "is not a folder; set another output_dir" in refused(tmp_path / "file" / "train")


@pytest.fixture(scope="module")
def mesh():
    """One rank; what others say is put in by the tests."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield SimpleNamespace(rank=0, world_size=1, device=torch.device("cpu"))
    torch.distributed.destroy_process_group()


RECIPE = {"seed": 0, "train": {"max_steps": 3}, "model": {"path": "a"}}


def test_one_rank_agrees_with_itself_and_leaves_no_file(mesh, tmp_path):
    agree(mesh, RECIPE, tmp_path / "train", {"the data": "x"})
    assert list((tmp_path / "train").iterdir()) == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"the version of torch": "1.0"}, "rank 2 and rank 0 disagree on the version of torch"),
        ({"the recipe's train": "0" * 64}, "rank 2 and rank 0 disagree on the recipe's train:"),
        ({"the data": "y"}, "disagree on the data (x on rank 0, y on rank 2)"),
        ({"output_dir": "not seen"}, "rank 2 cannot see what rank 0 writes"),
    ],
)
def test_ranks_that_disagree_are_named(mesh, tmp_path, monkeypatch, change, says):
    original = preflight._gather
    monkeypatch.setattr(
        preflight, "_gather", lambda mesh, mine: [*original(mesh, mine) * 2, original(mesh, mine)[0] | change]
    )
    with pytest.raises(ValueError, match="use the same|file system") as caught:
        agree(mesh, RECIPE, tmp_path, {"the data": "x"})
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.multiprocess
def test_two_processes_that_disagree_get_the_same_error(estimate_results):
    """Real ranks: facts of different lengths, a recipe that differs."""
    messages = {estimate_results[f"disagree_{rank}"]["error"] for rank in range(2)}
    assert len(messages) == 1
    assert "rank 1 and rank 0 disagree on the recipe's train: use the same recipe" in messages.pop()
