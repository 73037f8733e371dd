"""datatrove runs the same steps: the bytes of `prepare`, whatever executes them and wherever they were interrupted."""

import hashlib
import importlib.util
import json
import multiprocessing
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pod.data import DataArgs, cluster, prepare
from pod.data.cluster import Step, Submitted, run_cluster
from pod.data.job import Job
from pod.data.shards import DEFAULT_SHARD_BYTES

pytest.importorskip("datatrove")


@pytest.fixture(scope="module")
def shared(tmp_path_factory, make_text, tokenizer):
    """Six jsonl files, so six units; some documents occur in all of them, exactly or nearly. And a tokenizer's folder."""
    folder = tmp_path_factory.mktemp("shared")
    for number in range(6):
        lengths = range(40, 200, 12)
        texts = [make_text(length, seed=100 * number + place) for place, length in enumerate(lengths)]
        texts += [make_text(150, seed=7), f"w{number} {make_text(150, seed=8)}"]
        lines = [json.dumps({"text": text}) + "\n" for text in texts]
        (folder / f"texts-{number}.jsonl").write_text("".join(lines))
    tokenizer.save_pretrained(folder / "tokenizer")
    return folder


@pytest.fixture
def sources(shared, tmp_path):
    """Files of the test's own, which it may change."""
    return [shutil.copy2(file, tmp_path) for file in sorted(shared.glob("*.jsonl"))]


@pytest.fixture(autouse=True)
def toy_scale(monkeypatch):
    """Several shards from a toy corpus, and no picture: drawing takes longer than all the rest."""
    monkeypatch.setattr("pod.data.job.DEFAULT_SHARD_BYTES", 3000)
    monkeypatch.setattr("pod.data.publish.draw_all", lambda *_: [])


@pytest.fixture
def settings(shared):
    def make(**more):
        basic = {
            "context_length": 256,
            "shortest_interval": 64,
            "held_out_fraction": 0.1,
            "tasks": 4,
            "workers": 2,
        }
        basic["sources"] = [str(file) for file in sorted(shared.glob("*.jsonl"))]
        return DataArgs(**{**basic, **more})

    return make


def checksums(folder):
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


KNOWN = {}


@pytest.fixture
def expected(settings, shared, tmp_path):
    """Checksums of the files that one process makes; made once for the same settings and unchanged files."""

    def make(**more):
        key = repr(more)
        if key not in KNOWN or "sources" in more:
            args = settings(**{**more, "executor": "processes", "workers": 1})
            prepare(args, str(shared / "tokenizer"), tmp_path / "one")
            KNOWN[key] = checksums(tmp_path / "one")
        return KNOWN[key]

    return make


@pytest.fixture
def job(settings, shared, tmp_path):
    def make(**more):
        args = settings(**{"executor": "datatrove", **more})
        return Job(args, str(shared / "tokenizer"), tmp_path / "out" / "data", 0)

    return make


# On this machine


def test_local_executor_gives_the_same_bytes(job, expected, tmp_path):
    one = job()
    data = run_cluster(one)
    found = checksums(tmp_path / "out" / "data")
    assert found == expected()
    assert sum("tokens.npy" in name for name in found) > 4  # more shards than tasks
    assert len(data) == data.manifest["num_rows"] > 0
    assert os.listdir(tmp_path / "out") == ["data"]  # work, marks and logs are gone


@pytest.mark.parametrize(
    "more", [{"near_duplicates": True, "tasks": 3}, {"max_documents": 9, "tasks": 100, "workers": 1}]
)
def test_the_same_bytes_with_near_duplicates_and_with_a_limit(job, expected, tmp_path, more):
    data = run_cluster(job(**more))
    assert checksums(tmp_path / "out" / "data") == expected(**more)
    if "near_duplicates" in more:
        assert data.manifest["read"]["near_duplicates"] >= 5


def test_what_is_ready_is_not_made_again(job, monkeypatch, tmp_path):
    run_cluster(job())
    before = checksums(tmp_path / "out" / "data")
    monkeypatch.setattr(Job, "tokenise", lambda *_: pytest.fail("tokenised again"))
    left = cluster._folder(job())  # by Slurm's last task, which cannot remove the folder it writes to
    left.mkdir(parents=True)
    assert run_cluster(job()).manifest["num_rows"] > 0
    assert checksums(tmp_path / "out" / "data") == before and not left.exists()


def run_until(job, monkeypatch, method):
    """Run the pipelines until `method` of Job fails; what came before stays."""

    def broken(self, *arguments):
        raise ValueError(f"{method} stopped here")

    with monkeypatch.context() as patch:
        patch.setattr(Job, method, broken)
        with pytest.raises(ValueError, match=f"^{method} stopped here$"):
            run_cluster(job)


def marks(job, name):
    (folder,) = cluster._folder(job).glob(f"*-{name}-*")
    return {int(mark.name) for mark in (folder / "completions").iterdir()}


def test_a_mark_without_its_part_does_not_lose_data(job, expected, monkeypatch, tmp_path):
    one = job()
    run_until(one, monkeypatch, "plan")
    assert marks(one, "tokenise") == {0, 1, 2, 3}
    shutil.rmtree(one.part_dir(5))  # of task 1
    stages = list(cluster._stages(job()))
    assert not stages[0].forget_what_is_not_there()
    assert marks(one, "tokenise") == {0, 2, 3}
    run_cluster(job())
    assert checksums(tmp_path / "out" / "data") == expected()


def test_only_missing_tasks_run_again(job, expected, monkeypatch, tmp_path):
    one = job()
    run_until(one, monkeypatch, "publish")
    folder = cluster._folder(one)
    (shard,) = one.staging_dir.glob("shard-00001.tokens.npy")
    shard.write_bytes(shard.read_bytes()[:50])
    logs = {path: path.stat().st_mtime_ns for path in folder.glob("*/logs/*.log")}
    run_until(job(), monkeypatch, "publish")
    again = {
        f"{path.parent.parent.name}/{path.stem}" for path in logs if path.stat().st_mtime_ns != logs[path]
    }
    assert again == {"3-write-4/task_00001", "4-publish-1/task_00000"}
    run_cluster(job())
    assert checksums(tmp_path / "out" / "data") == expected()


def test_sources_that_changed_are_read_again(job, expected, monkeypatch, sources, tmp_path, make_text):
    run_until(job(sources=sources), monkeypatch, "plan")
    with open(sources[2], "a") as file:
        file.write(json.dumps({"text": make_text(99, seed=12345)}) + "\n")
    run_cluster(job(sources=sources))
    assert checksums(tmp_path / "out" / "data") == expected(sources=sources)


def test_one_process_shows_its_progress_and_gives_the_console_back(job, capfd):
    from datatrove.utils.logging import logger

    run_cluster(job(workers=1))
    logger.warning("still heard")
    err = capfd.readouterr().err
    assert "still heard" in err and "Logging error" not in err
    assert "tokenise: 100%" in err and "Launching" not in err


def test_an_error_is_one_line_and_its_traceback_is_in_the_log(job, sources, capfd):
    with open(sources[3], "a") as file:
        file.write("not json\n")
    one = job(sources=sources)
    with pytest.raises(ValueError, match=re.escape(sources[3])) as caught:
        run_cluster(one)
    assert "\n" not in str(caught.value)
    out, err = capfd.readouterr()
    assert "Traceback" not in err and "datatrove" not in err and out == ""
    (log,) = cluster._folder(one).glob("*/logs/task_00003.log")
    text = log.read_text()
    assert "Traceback" in text and sources[3] in text and "\x1b[" not in text


def test_a_killed_process_is_an_error_and_not_an_endless_wait(job, expected, monkeypatch, tmp_path):
    tokenise, parent = Job.tokenise, os.getpid()

    def killed(self, number):
        if number == 2 and os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
        tokenise(self, number)

    with monkeypatch.context() as patch:
        patch.setattr(Job, "tokenise", killed)
        with pytest.raises(ValueError, match="worker process was killed"):
            run_cluster(job())
    run_cluster(job())
    assert checksums(tmp_path / "out" / "data") == expected()


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_killed_with_all_its_processes_and_run_again(job, expected, monkeypatch, tmp_path):
    tokenise, started = Job.tokenise, tmp_path / "started"

    def slow(self, number):
        tokenise(self, number)
        if number:
            started.touch()
            time.sleep(60)

    out = tmp_path / "out" / "data"
    with monkeypatch.context() as patch:
        patch.setattr(Job, "tokenise", slow)
        process = multiprocessing.get_context("fork").Process(target=run_cluster, args=(job(),))
        process.start()
    wait_until(started.exists)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()
    process.join(30)
    assert not out.exists() and children
    wait_until(lambda: not any(is_running(child) for child in children))
    run_cluster(job())
    assert checksums(out) == expected()


def wait_until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_running(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


# Slurm


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """A Slurm made of shell scripts: `sbatch` keeps its script and arguments, `squeue` says what the file `queue` says."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    scripts = {
        "sbatch": "n=$(cat count 2>/dev/null || echo 100); n=$((n+1)); echo $n > count; [ -e refuse-$n ] && exit 1\n"
        'cp "${@: -1}" $n.slurm; printf "%s\\n" "$@" > $n.args; echo "Submitted batch job $n"',
        "squeue": "[ -e queue ] && cat queue || { echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1; }",
        "scontrol": 'echo "$3"',
        "srun": 'cd - >/dev/null; while [[ $1 == -* ]]; do [[ $1 == -n ]] && shift; shift; done; exec "$@"',
    }
    for name, text in scripts.items():
        file = folder / "bin" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"#!/bin/bash\ncd {folder}\n{text}\n")
        file.chmod(file.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
    monkeypatch.delenv("SLURM_ARRAY_TASK_ID", raising=False)
    return folder


@pytest.fixture
def slurm_job(job, slurm):
    def make(**more):
        return job(executor="slurm", slurm_partition="cpu", **more)

    return make


def submitted(folder):
    """(job id, directives, dependency, script) of what was submitted, in order."""
    found = []
    for script in sorted(folder.glob("*.slurm")):
        arguments = (folder / f"{script.stem}.args").read_text().splitlines()
        waits = [one.removeprefix("--dependency=") for one in arguments if one.startswith("--dependency=")]
        lines = [
            line.removeprefix("#SBATCH --") for line in script.read_text().splitlines() if "#SBATCH" in line
        ]
        directives = dict(line.partition("=")[::2] for line in lines)
        found.append((script.stem, directives, waits[0] if waits else None, script))
    return found


def array_size(directives):
    return int(re.fullmatch(r"0-(\d+)(%\d+)?", directives["array"])[1]) + 1


def environment_of(number, rank):
    return {
        "SLURM_ARRAY_TASK_ID": str(rank),
        "SLURM_JOB_ID": number,
        "SLURM_NODELIST": "node1",
        "RUN_OFFSET": "0",
    }


def run_here(number, script, monkeypatch, ranks):
    """The array tasks of a script in this process, which saves an interpreter's start for each."""
    import dill

    pickled = re.search(r"launch_pickled_pipeline (\S+)", script.read_text())[1]
    handler = signal.getsignal(signal.SIGUSR1)
    for rank in ranks:
        with monkeypatch.context() as patch, open(pickled, "rb") as file:
            for name, value in environment_of(number, rank).items():
                patch.setenv(name, value)
            dill.load(file).run()  # noqa: S301 - what we wrote ourselves
    signal.signal(signal.SIGUSR1, handler)


def test_slurm_scripts(slurm_job, slurm, tmp_path, capfd):
    from datatrove.utils.logging import logger

    one = slurm_job(
        near_duplicates=True,
        slurm_time="01:30:00",
        slurm_memory_gb=6,
        slurm_options={"account": "lab", "qos": "long", "exclude": "node7"},
    )
    said = []
    sink = logger.add(said.append)
    answer = run_cluster(one)
    logger.remove(sink)
    assert isinstance(answer, Submitted)
    assert capfd.readouterr() == ("", "") and said == []
    names = ["tokenise", "sign", "match", "cluster", "plan", "write", "publish"]
    assert answer.jobs == {name: str(101 + place) for place, name in enumerate(names)}
    jobs = submitted(slurm)
    assert [number for number, *_ in jobs] == [str(101 + place) for place in range(7)]
    assert [wait for _, _, wait, _ in jobs] == [None] + [f"afterok:{101 + place}" for place in range(6)]
    assert [array_size(directives) for _, directives, _, _ in jobs] == [4, 4, 4, 1, 1, 4, 1]
    wanted = {"partition": "cpu", "time": "01:30:00", "mem-per-cpu": "6G", "kill-on-invalid-dep": "yes"}
    wanted |= {"account": "lab", "qos": "long", "exclude": "node7"}
    for name, (_, directives, _, script) in zip(names, jobs, strict=True):
        assert directives["job-name"] == f"pod-{name}"
        assert directives["array"].endswith("%2")  # data.workers at a time
        assert wanted.items() <= directives.items()
        assert directives["output"].startswith(str(answer.folder))
        assert f"{answer.folder}/" in script.read_text()
        assert f"export PATH={Path(sys.executable).parent}:$PATH PYTHONPATH=" in script.read_text()
        assert subprocess.run(["bash", "-n", script]).returncode == 0
    assert "\n" not in str(answer) and "tokenise 101" in str(answer) and str(one.output_dir) in str(answer)
    assert sorted(os.listdir(tmp_path / "out")) == ["data.work"]


@pytest.mark.slow
def test_slurm_scripts_run_by_bash_give_the_same_bytes(
    slurm_job, slurm, settings, shared, tmp_path, monkeypatch, capfd
):
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(here))
    monkeypatch.setattr(
        "pod.data.job.DEFAULT_SHARD_BYTES", DEFAULT_SHARD_BYTES
    )  # the scripts' tasks have no patches
    one = slurm_job(tasks=2, workers=None)
    answer = run_cluster(one)
    assert capfd.readouterr() == ("", "")
    finished = {"None"}
    for number, directives, waits, script in submitted(slurm):
        assert str(waits).removeprefix("afterok:") in finished
        assert "%" not in directives["array"]
        if directives["job-name"] == "pod-publish":
            run_here(number, script, monkeypatch, [0])  # without the picture
            continue
        for rank in range(array_size(directives)):
            if directives["job-name"] == "pod-write" and rank:
                continue  # there is one shard: nothing for the second task
            environment = {**os.environ, **environment_of(number, rank), "OMP_NUM_THREADS": "1"}
            done = subprocess.run(
                ["bash", script], env=environment, cwd="/", capture_output=True, text=True, timeout=3600
            )
            assert done.returncode == 0, done.stderr
        finished.add(number)
    prepare(settings(workers=1), str(shared / "tokenizer"), tmp_path / "one")
    assert checksums(tmp_path / "out" / "data") == checksums(tmp_path / "one")
    assert os.listdir(here) == []
    assert run_cluster(one).manifest["num_rows"] > 0  # the same call: the data, and what was left is gone
    assert not answer.folder.exists()


def test_slurm_tasks_killed_and_submitted_again(slurm_job, slurm, expected, tmp_path, monkeypatch):
    run_cluster(slurm_job(tasks=3))
    number, _, _, script = submitted(slurm)[0]
    tokenise = Job.tokenise

    def killed(self, unit):
        if unit == 4:  # second unit of task 1
            raise SystemExit(15)
        tokenise(self, unit)

    with monkeypatch.context() as patch:
        patch.setattr(Job, "tokenise", killed)
        run_here(number, script, monkeypatch, [0])
        with pytest.raises(SystemExit):
            run_here(number, script, monkeypatch, [1])
    run_here(number, script, monkeypatch, [2])
    one = slurm_job(tasks=3)
    assert marks(one, "tokenise") == {0, 2}
    # requeued by Slurm: the same script, the same rank; it goes on, and finished tasks do nothing
    log = next(cluster._folder(one).glob("*-tokenise-*/logs/task_00000.log"))
    before = log.stat().st_mtime_ns
    run_here(number, script, monkeypatch, [0])
    assert log.stat().st_mtime_ns == before
    # submitted anew: only what is missing, and all later steps after it
    shutil.rmtree(one.part_dir(2))
    for old in [*slurm.glob("*.slurm"), *slurm.glob("*.args")]:
        old.unlink()
    answer = run_cluster(one)
    jobs = submitted(slurm)
    assert list(answer.jobs) == ["tokenise", "plan", "write", "publish"]
    assert array_size(jobs[0][1]) == 2 and [wait for _, _, wait, _ in jobs][:2] == [
        None,
        f"afterok:{jobs[0][0]}",
    ]
    for number, directives, _, script in jobs:
        run_here(number, script, monkeypatch, range(array_size(directives)))
    assert checksums(tmp_path / "out" / "data") == expected()


def test_slurm_gets_all_steps_after_one_that_lost_a_result(job, slurm_job, slurm, monkeypatch):
    one = job()
    run_until(one, monkeypatch, "publish")
    assert run_cluster(slurm_job()).jobs == {"publish": "101"}
    assert [wait for _, _, wait, _ in submitted(slurm)] == [None]
    (slurm / "101.slurm").unlink()
    shutil.rmtree(one.part_dir(3))
    assert list(run_cluster(slurm_job()).jobs) == ["tokenise", "plan", "write", "publish"]
    assert [array_size(directives) for _, directives, _, _ in submitted(slurm)] == [1, 1, 4, 1]


def test_slurm_does_not_queue_twice(slurm_job, slurm):
    first = run_cluster(slurm_job())
    (slurm / "queue").write_text("103\n104\n")
    again = run_cluster(slurm_job())
    assert (
        again.jobs == first.jobs and "still in Slurm's queue" in str(again) and "tokenise 0/4" in str(again)
    )
    assert len(submitted(slurm)) == 4
    (slurm / "queue").unlink()
    assert run_cluster(slurm_job()).jobs["tokenise"] == "105"


def test_slurm_failures_are_told_by_the_next_call(slurm_job, slurm, sources, monkeypatch):
    with open(sources[1], "a") as file:
        file.write("not json\n")
    first = run_cluster(slurm_job(sources=sources))
    assert "failed" not in str(first)
    number, _, _, script = submitted(slurm)[0]
    run_here(number, script, monkeypatch, [0, 2, 3])
    with pytest.raises(ValueError, match=sources[1]):
        run_here(number, script, monkeypatch, [1])
    told = str(run_cluster(slurm_job(sources=sources)))
    assert (
        f"1 tasks had failed: ValueError: {sources[1]}" in told
        and "task_00001.log" in told
        and "\n" not in told
    )


def test_slurm_refuses(slurm_job, slurm):
    (slurm / "refuse-103").touch()
    with pytest.raises(
        ValueError, match=r"sbatch refused the job of step write .*scancel 101 102$"
    ) as caught:
        run_cluster(slurm_job())
    assert "\n" not in str(caught.value)


def test_many_tasks_share_the_elements_of_one_array(slurm_job, slurm, monkeypatch):
    monkeypatch.setattr(cluster, "MAX_ARRAY", 2)
    run_cluster(slurm_job(tasks=5))
    jobs = submitted(slurm)
    assert [array_size(directives) for _, directives, _, _ in jobs] == [2, 1, 2, 1]
    number, _, _, script = jobs[0]
    run_here(number, script, monkeypatch, [0, 1])
    assert slurm_job(tasks=5).missing_units() == []


# What is missing


@pytest.mark.parametrize(
    ("more", "missing", "message"),
    [
        (
            {"executor": "datatrove"},
            "datatrove",
            r"data.executor=datatrove needs the package datatrove: pip install 'pod-kv\[datatrove\]'",
        ),
        ({"executor": "ray"}, "ray", r"data.executor=ray needs the package ray: pip install 'pod-kv\[ray\]'"),
        ({"executor": "slurm", "slurm_partition": "cpu"}, None, "no command sbatch here"),
    ],
)
def test_what_is_not_installed_is_named(job, monkeypatch, more, missing, message):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else find(name))
    with pytest.raises(ValueError, match=message) as caught:
        run_cluster(job(**more))
    assert "\n" not in str(caught.value)


def test_slurm_needs_a_partition_and_a_login_node(job, slurm, monkeypatch):
    with pytest.raises(ValueError, match=r"data.slurm_partition: sinfo lists"):
        run_cluster(job(executor="slurm"))
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    with pytest.raises(ValueError, match="inside a task of a Slurm job array"):
        run_cluster(job(executor="slurm", slurm_partition="cpu"))
    assert submitted(slurm) == []


def test_a_tokenizer_that_cannot_travel(settings, tokenizer, slurm, tmp_path):
    tokenizer.handle = (one for one in ())
    try:
        with pytest.raises(ValueError, match="give its folder, file or hub id") as caught:
            run_cluster(
                Job(settings(executor="slurm", slurm_partition="cpu"), tokenizer, tmp_path / "data", 0)
            )
    finally:
        del tokenizer.handle
    assert "\n" not in str(caught.value)


# Ray, without Ray: datatrove's own class, its run() replaced


@pytest.fixture
def ray(monkeypatch):
    from datatrove.executor.base import PipelineExecutor
    from datatrove.executor.ray import RayPipelineExecutor

    def run(self):
        for rank in self.get_incomplete_ranks():
            try:
                PipelineExecutor._run_for_rank(self, rank)
            except ValueError:
                continue  # as Ray's does after some attempts

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name == "ray" else find(name))
    monkeypatch.setattr(RayPipelineExecutor, "run", run)


def test_ray_runs_the_same_steps(job, expected, ray, tmp_path):
    run_cluster(job(executor="ray"))
    assert checksums(tmp_path / "out" / "data") == expected()


def test_failed_tasks_on_ray_are_an_error(job, ray, sources):
    with open(sources[1], "a") as file:
        file.write("not json\n")
    with pytest.raises(
        ValueError, match=rf"step tokenise: 1 of 4 tasks failed on Ray \(.*{sources[1]}"
    ) as caught:
        run_cluster(job(executor="ray", sources=sources))
    assert "\n" not in str(caught.value) and "task_00001.log" in str(caught.value)


def test_relative_sources_are_read_from_where_the_job_was_made(job, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    step = Step(job(), "tokenise")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    os.chdir(elsewhere)
    step(None, 0, 6)
    relative = Job(step.job.args, step.job.tokenizer, "data")
    assert cluster._folder(relative).is_absolute()
    assert os.getcwd() == str(tmp_path) and step.job.missing_units() == [1, 2, 3, 4, 5]
