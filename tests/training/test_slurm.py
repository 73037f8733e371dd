"""The Slurm script with stand-ins for `srun` and `scontrol`.

What ranks see, and when a job goes back into the queue.
"""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "launch" / "slurm" / "train.sbatch"

SRUN = """#!/bin/bash
# two tasks; signals are handed on to them, as srun does; the highest code is its own
while [ "${1#--}" != "$1" ]; do shift; done
for task in 0 1; do
    SLURM_PROCID=$task SLURM_LOCALID=$task SLURM_NTASKS=2 "$@" &
    tasks="${tasks:-} $!"
done
hand_on() { kill -USR1 $tasks; }
trap hand_on USR1
code=0
for task in $tasks; do
    wait $task; own=$?
    while kill -0 $task 2>/dev/null; do wait $task; own=$?; done
    [ $own -gt $code ] && code=$own
done
exit $code
"""
SCONTROL = """#!/bin/bash
if [ "$1" = show ]; then echo node-0; echo node-1; else echo "$@" >> "$OUT/queue"; fi
"""
PYTHON = """#!/bin/bash
trap 'echo saved >> "$OUT/signals"; exit 0' USR1
echo "$RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR $MASTER_PORT $@" > "$OUT/rank-$RANK"
[ -n "${CODE:-}" ] && exit $CODE
[ -n "${WAIT:-}" ] && while true; do sleep 0.05; done
exit 0
"""


@pytest.fixture
def slurm(tmp_path):
    """(start, folder): `start(**variables)` begins a job with two tasks."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("python-stand-in", PYTHON)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)

    def start(*arguments, **variables):
        environment = os.environ | {
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "POD_PYTHON": str(tmp_path / "python-stand-in"),
            "OUT": str(tmp_path),
            "SLURM_JOB_ID": "41001",
            "SLURM_JOB_NODELIST": "node-[0-1]",
            "SLURM_NTASKS_PER_NODE": "2",
            "SLURM_SUBMIT_DIR": str(ROOT),
        }
        command = ["bash", str(SCRIPT), *arguments]
        return subprocess.Popen(
            command, env=environment | variables, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )

    return start, tmp_path


def requeued(folder) -> list[str]:
    file = folder / "queue"
    return file.read_text().splitlines() if file.exists() else []


def test_ranks_get_their_places_and_the_recipe(slurm):
    start, folder = slurm
    assert start("recipe.yaml", "--set", "train.max_steps=3").wait(60) == 0
    seen = [(folder / f"rank-{rank}").read_text().split() for rank in range(2)]
    for rank in range(2):
        place = [str(rank), str(rank), "2", "2", "node-0", "21001"]
        assert seen[rank][:6] == place
        assert seen[rank][6].endswith("launch/train_pod.py")
        assert seen[rank][7:] == ["--config", "recipe.yaml", "--set", "train.max_steps=3"]
    assert requeued(folder) == []


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_warning_reaches_every_rank_and_the_job_goes_back_into_the_queue(slurm, number):
    start, folder = slurm
    job = start("recipe.yaml", WAIT="1")
    deadline = time.monotonic() + 60
    while len(list(folder.glob("rank-*"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    job.send_signal(number)
    assert job.wait(60) == 0
    assert (folder / "signals").read_text().splitlines() == ["saved", "saved"]
    assert requeued(folder) == ["requeue 41001"]


@pytest.mark.parametrize(
    ("variables", "code", "queue"),
    [
        ({"CODE": "75"}, 0, ["requeue 41001"]),
        ({"CODE": "75", "SLURM_RESTART_COUNT": "20"}, 75, []),
        ({"CODE": "75", "SLURM_RESTART_COUNT": "1", "POD_MAX_RESTARTS": "2"}, 0, ["requeue 41001"]),
        ({"CODE": "2"}, 2, []),
        ({"CODE": "1"}, 1, []),
    ],
)
def test_only_a_hang_starts_a_failed_job_again(slurm, variables, code, queue):
    start, folder = slurm
    assert start("recipe.yaml", **variables).wait(60) == code
    assert requeued(folder) == queue


def test_no_recipe_is_one_line(slurm):
    start, _ = slurm
    job = start()
    _, error = job.communicate(timeout=3600)
    assert job.returncode == 2
    assert error.decode().startswith("error: no recipe given: sbatch launch/slurm/train.sbatch RECIPE.yaml")
