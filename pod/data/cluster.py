"""The steps of `Job` as datatrove pipelines, one after the other: on this machine, on Slurm or on Ray.

    tokenise → [sign → match → cluster →] plan → write → publish          (in brackets: near duplicates, `pod.data.minhash`)

Each step has up to `data.tasks` tasks; task r does the units (groups, shards) r, r + tasks, … . All results are written by the
functions that a single process runs too, so that their bytes are the same. datatrove's completion marks and logs lie in
`<work>/cluster/<request>/<step>-<tasks>/`; a mark counts only while the results that it stands for are there. The folders must
be shared by all machines, and with Slurm tasks load `executor.pik` (dill) from there: whoever can write to it can run code as you.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import re
import shlex
import shutil
import site
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pod.data.loader import PackedDataset
from pod.data.workers import cores
from pod.files import read_json, write_json

if TYPE_CHECKING:
    from pod.data.job import Job

MAX_ARRAY = 1000
"""Elements of a Slurm job array; 1001 is what Slurm allows as it comes. More tasks share elements, because a second array of
the same step would be waited for, but not asked whether the first one succeeded."""
SUBMITTED = "submitted.json"
ROW_PLAN = "row_plan.json"


@dataclass(frozen=True)
class Submitted:
    """Slurm has the jobs; the data is not there yet. `str()` says in one line what to expect and to do."""

    jobs: dict[str, str]
    """Step → id of its Slurm job, in order."""
    output_dir: Path
    folder: Path
    """Completions, scripts and logs."""
    progress: str = ""
    """Finished tasks of each step, when the jobs were there already."""
    failure: str = ""
    """What tasks that ran and did not finish said last."""

    def __str__(self) -> str:
        jobs = ", ".join(f"{step} {number}" for step, number in self.jobs.items())
        state = (
            f"still in Slurm's queue: {jobs} ({self.progress})"
            if self.progress
            else f"submitted to Slurm: {jobs}"
        )
        failure = f"; {self.failure}" if self.failure else ""
        return (
            f"{state}{failure}; {self.output_dir} appears when all are done; the same command again shows how far they are, "
            f"or goes on after a failure; logs: {self.folder}"
        )


def run_cluster(job: Job) -> PackedDataset | Submitted:
    """Prepare `job` with datatrove's executor `job.args.executor`: the rows, or with `slurm` the jobs that will make them.

    Calling it again goes on where the last run stopped. `ValueError` in one line when something is missing or a task fails.
    """
    _check_installed(job)
    if job.is_current():
        _remove_marks(job)
        return PackedDataset(job.output_dir)
    if job.args.executor == "slurm":
        return _submit(job)
    for stage in _stages(job):
        stage.forget_what_is_not_there()
        if job.args.executor == "ray":
            _run_on_ray(stage)
        else:
            _local_executor(stage).run()
    _remove_marks(job)
    return PackedDataset(job.output_dir)


class Step:
    """A datatrove pipeline block: task `rank` of `world_size` does items rank, rank + world_size, … of a step.

    Items of a step: units, groups of units, buckets, shards, or just one. Every item is idempotent and published atomically.
    """

    def __init__(self, job: Job, name: str):
        self.job, self.name = job, name
        self.folder = os.getcwd()

    def __repr__(self) -> str:
        return f"{self.name} → {self.job.output_dir}"

    def __call__(self, data: Any, rank: int = 0, world_size: int = 1) -> None:
        """Run the task; the pipeline's `data` is not used."""
        os.chdir(self.folder)  # sources may be relative paths, and machines start tasks where they like
        for number in range(rank, self.items(), world_size):
            self.run(number)

    def items(self) -> int:
        """Number of items; needs the results of the steps before."""
        if self.name == "tokenise":
            return len(self.job.units())
        if self.name == "write":
            return self.job.num_shards()
        return self._near.items(self.name) if self.name in _near_steps(self.job) else 1

    def run(self, number: int) -> None:
        """Do item `number`."""
        if self.name in _near_steps(self.job):
            self._near.run(self.name, number)
        elif self.name in ("tokenise", "write"):
            {"tokenise": self.job.tokenise, "write": self.job.write_shard}[self.name](number)
        else:
            {"plan": self.job.plan, "publish": self.job.publish}[self.name]()

    def is_done(self, number: int) -> bool:
        """Whether the result of item `number` is on disk; `tokenise` is asked through `Job.missing_units`."""
        if self.name == "write":
            return self.job.is_written(number)
        if self.name == "publish":
            return self.job.is_current()
        if self.name in _near_steps(self.job):
            return self._near.is_done(self.name, number)
        return (self.job.rows_dir / ROW_PLAN).is_file()

    @functools.cached_property
    def _near(self) -> Any:
        from pod.data.minhash import NearDuplicates

        return NearDuplicates(self.job)


class Stage:
    """A step with its number of tasks and the folder of its completions and logs."""

    def __init__(self, job: Job, name: str, number: int, tasks: int):
        self.step, self.tasks = Step(job, name), tasks
        self.folder = _folder(job) / f"{number}-{name}-{tasks}"

    def forget_what_is_not_there(self, ready: bool = True) -> bool:
        """Remove completion marks whose results are gone or belong to older sources; whether all tasks are complete.

        ready: the step before is complete, so that this one's items are known; if not, nothing of it can be.
        """
        marks = self.folder / "completions"
        missing = set(range(self.tasks))
        if ready and marks.is_dir():
            undone = {number % self.tasks for number in self._undone()}
            missing = {rank for rank in missing if rank in undone or not (marks / f"{rank:05d}").is_file()}
        for rank in missing:
            (marks / f"{rank:05d}").unlink(missing_ok=True)
        return not missing

    def _undone(self) -> list[int]:
        if self.step.name == "tokenise":
            return self.step.job.missing_units()
        return [number for number in range(self.step.items()) if not self.step.is_done(number)]

    def num_complete(self) -> int:
        """Tasks with a completion mark."""
        marks = self.folder / "completions"
        return len(list(marks.iterdir())) if marks.is_dir() else 0


def _stages(job: Job) -> Iterator[Stage]:
    for number, name in enumerate(("tokenise", *_near_steps(job), "plan", "write", "publish"), start=1):
        yield Stage(job, name, number, _num_tasks(job, name))


def _num_tasks(job: Job, name: str) -> int:
    """Tasks of a step; known before any step has run, so that a second run finds the marks of the first."""
    if name in ("tokenise", "sign"):
        return min(job.args.tasks, len(job.units()))
    if name == "match":
        from pod.data.minhash import NUM_BUCKETS

        return min(job.args.tasks, NUM_BUCKETS)
    return job.args.tasks if name == "write" else 1


def _near_steps(job: Job) -> tuple[str, ...]:
    return ("sign", "match", "cluster") if job.args.near_duplicates else ()


def _folder(job: Job) -> Path:
    """Absolute, because the machines of a cluster do not start where the user stands."""
    return job.cluster_dir.absolute()


def _remove_marks(job: Job) -> None:
    """Remove what datatrove wrote, and the folders above that it leaves empty."""
    folder = _folder(job)
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.parent.rmdir()
        job.work_dir.rmdir()


# Executors


def _local_executor(stage: Stage) -> Any:
    from pod.data.local_executor import LocalExecutor

    return LocalExecutor(
        [stage.step],
        tasks=stage.tasks,
        workers=stage.step.job.args.workers or cores(),
        logging_dir=str(stage.folder),
        description=stage.step.name,
    )


def _slurm_executor(stage: Stage, previous: Any) -> Any:
    from datatrove.executor.slurm import SlurmPipelineExecutor

    args = stage.step.job.args
    options = {"kill-on-invalid-dep": "yes", **args.slurm_options}  # what waits for a failed job ends too
    executor = SlurmPipelineExecutor(
        [stage.step],
        tasks=stage.tasks,
        time=args.slurm_time,
        partition=str(args.slurm_partition),
        mem_per_cpu_gb=args.slurm_memory_gb,
        workers=args.workers or -1,
        job_name=f"pod-{stage.step.name}",
        qos=options.pop("qos", ""),
        env_command=_environment(),
        sbatch_args=options,
        max_array_size=MAX_ARRAY,
        tasks_per_job=-(-stage.tasks // MAX_ARRAY),
        depends=previous,
        logging_dir=str(stage.folder),
    )
    executor.launch_merge_stats = _no_statistics
    return executor


def _no_statistics() -> None:
    """In place of datatrove's extra job per step that adds up timings; they mean nothing here."""


def _environment() -> str:
    """Shell command that gives a Slurm task this Python, its packages and the folders it imports from."""
    standard = {*sysconfig.get_paths().values(), *site.getsitepackages(), site.getusersitepackages()}
    standard.add(str(sysconfig.get_config_var("DESTSHARED")))
    folders = dict.fromkeys(os.path.abspath(folder) for folder in [*sys.path, Path(__file__).parents[2]])
    own = [folder for folder in folders if os.path.isdir(folder) and folder not in standard]
    return (
        f"export PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH "
        f"PYTHONPATH={shlex.quote(os.pathsep.join(own))} TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1"
    )


def _submit(job: Job) -> Submitted:
    """Hand all steps that are not complete to Slurm, each waiting for the one before."""
    folder, failure = _folder(job), _failures(_stages(job))
    jobs = _jobs_in_queue(folder)
    if jobs:
        progress = ", ".join(f"{one.step.name} {one.num_complete()}/{one.tasks}" for one in _stages(job))
        return Submitted(jobs, job.output_dir, folder, progress, failure)
    previous, ready = None, True
    for stage in _stages(job):
        ready = stage.forget_what_is_not_there(ready)
        previous = _slurm_executor(stage, previous)
        try:
            with _without_logs():
                previous.run()
        except subprocess.CalledProcessError as error:
            left = f"; first cancel what is queued: scancel {' '.join(jobs.values())}" if jobs else ""
            raise ValueError(
                f"sbatch refused the job of step {stage.step.name} (exit code {error.returncode}, its words are above): "
                f"correct data.slurm_partition, slurm_time, slurm_memory_gb or slurm_options{left}"
            ) from error
        if previous.job_id != -1:
            jobs[stage.step.name] = str(previous.job_id)
            write_json(folder / SUBMITTED, jobs)
    return Submitted(jobs, job.output_dir, folder, failure=failure)


@contextlib.contextmanager
def _without_logs() -> Iterator[None]:
    """datatrove tells the console about every job; `Submitted` says it in one line."""
    from datatrove.utils.logging import logger

    logger.disable("datatrove.executor")
    try:
        yield
    finally:
        logger.enable("datatrove.executor")


def _jobs_in_queue(folder: Path) -> dict[str, str]:
    """What an earlier call submitted, if Slurm still knows any of it."""
    if not (folder / SUBMITTED).is_file() or shutil.which("squeue") is None:
        return {}
    jobs = read_json(folder / SUBMITTED)
    command = ["squeue", "--noheader", "--format=%i", f"--jobs={','.join(jobs.values())}"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return jobs if found.returncode == 0 and found.stdout.strip() else {}


def _run_on_ray(stage: Stage) -> None:
    from datatrove.executor.ray import RayPipelineExecutor

    workers = stage.step.job.args.workers or -1
    executor = RayPipelineExecutor(
        [stage.step], tasks=stage.tasks, workers=workers, logging_dir=str(stage.folder)
    )
    executor.run()
    failed = executor.get_incomplete_ranks()  # datatrove only warns
    if failed:
        log = stage.folder / "logs" / f"task_{failed[0]:05d}.log"
        raise ValueError(
            f"step {stage.step.name}: {len(failed)} of {stage.tasks} tasks failed on Ray ({_last_line(log)}; {log}): correct "
            "the cause and run again, finished tasks are kept"
        )


def _failures(stages: Iterable[Stage]) -> str:
    """How many tasks ended with an error when they last ran, and the first one's words; empty when none did."""
    said = []
    for stage in stages:
        for log in sorted((stage.folder / "logs").glob("task_*.log")):
            mark = stage.folder / "completions" / log.stem.removeprefix("task_")
            last = "" if mark.is_file() else _last_line(log)
            if re.match(r"[\w.]*(Error|Exception)\b", last):
                said.append(f"{last} ({log})")
    return f"{len(said)} tasks had failed: {said[0]}" if said else ""


def _last_line(log: Path) -> str:
    """The last line of a log that says something; a traceback ends with its error."""
    if not log.is_file():
        return "no log"
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "empty log"


# What must be there


def _check_installed(job: Job) -> None:
    executor = job.args.executor
    needed = {"datatrove": "datatrove"} | ({"ray": "ray"} if executor == "ray" else {})
    for package, extra in needed.items():
        if importlib.util.find_spec(package) is None:
            raise ValueError(
                f"data.executor={executor} needs the package {package}: pip install 'pod-kv[{extra}]', or set "
                "data.executor=processes"
            )
    if executor == "slurm":
        _check_slurm(job)
    if executor in ("slurm", "ray"):
        _check_can_travel(job)


def _check_slurm(job: Job) -> None:
    if shutil.which("sbatch") is None:
        raise ValueError(
            "data.executor=slurm, but there is no command sbatch here: start it on a machine of the Slurm cluster, or set "
            "data.executor=processes"
        )
    if not job.args.slurm_partition:
        raise ValueError("data.executor=slurm needs data.slurm_partition: sinfo lists the partitions")
    if "SLURM_ARRAY_TASK_ID" in os.environ:
        raise ValueError(
            "data.executor=slurm was started inside a task of a Slurm job array: start it on a login node, it submits jobs"
        )


def _check_can_travel(job: Job) -> None:
    """Tasks on other machines get the job as bytes; a tokenizer object of one's own may not allow that."""
    import dill

    try:
        dill.dumps(job)
    except (TypeError, AttributeError, dill.PicklingError) as error:
        raise ValueError(
            f"this tokenizer cannot be sent to other machines ({str(error).splitlines()[0]}): give its folder, file or hub id"
        ) from error
