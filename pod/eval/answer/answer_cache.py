"""Answers, kept for good: a method's answer to a prompt is computed once, whichever task asks for it again.

`<output_dir>/eval/answers/` is an `AnswerFolder`, and each `<method>.<digest>/` in it is an `AnswerCache`. It
holds the answers of one method with its options, on one model, by one version of the code that answers;
`shelf.json` says which. Every rank appends to its own file there, a line per batch, and nothing is ever
removed.

An answer's key is a digest of what was asked (prompt, budget, generation settings) and not of who asked. So
tasks that share a prompt share its answer, a run with more samples computes only the new ones, and scores are
computed from these files alone.
"""

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from tqdm import tqdm

from pod.errors import one_line
from pod.eval.answer.methods import safe_name
from pod.eval.results import fingerprint
from pod.files import write_json
from pod.measure.machine import environment
from pod.verbosity import is_quiet

if TYPE_CHECKING:
    from pod.eval.answer.ranks import Ranks

T = TypeVar("T")
JsonObject = dict[str, Any]
"""What is stored as an object of JSON: an answer's record, a sample, a payload."""
IDENTITY_FILE = "shelf.json"  # caches were called shelves when the first of these files were written


class AnswerError(RuntimeError):
    """A rank failed at a sample. Raised on every rank, so that all go on to the next task together."""


class Unanswered(RuntimeError):
    """An answer cache of a closed folder lacks answers."""

    def __init__(self, missing: int, asked: int):
        super().__init__(f"{missing} of {asked} answers are missing: run the step `answer`")


class Answer(NamedTuple):
    """The record of an answer, the machine that computed it, and how long that took (seconds)."""

    record: JsonObject
    environment: JsonObject
    seconds: float


def key_of(*asked: Any) -> str:
    """The key of what was asked: 32 hex digits of the SHA-256 of its canonical JSON."""
    text = json.dumps(asked, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def in_batches(
    items: Sequence[T], size: int, kind: Callable[[T], object] = lambda item: None
) -> list[list[T]]:
    """Batches of at most `size` items of one kind, in order. Kinds come in the order of their first item.

    Of `aabba` with the letter as the kind and size 2 it makes `aa`, `a`, `bb`.
    """
    groups: dict[object, list[T]] = {}
    for item in items:
        groups.setdefault(kind(item), []).append(item)
    return [group[start : start + size] for group in groups.values() for start in range(0, len(group), size)]


class AnswerFolder:
    """A folder of answer caches.

    Args:
        folder: None = nothing is kept beyond this process.
        reuse: False = compute every answer again. Of answers with one key the latest counts.

    Attributes:
        is_open: whether missing answers are computed. False inside `closed`.
    """

    def __init__(self, folder: Path | None, ranks: "Ranks", reuse: bool = True):
        self.folder, self.ranks, self.reuse, self.is_open = folder, ranks, reuse, True
        self._answer_cache: AnswerCache | None = None

    def answers_of(self, method: str, identity: JsonObject, reuse: bool | None = None) -> "AnswerCache":
        """The answer cache of a method.

        Args:
            identity: JSON that changes with whatever can change an answer besides what is asked.
            reuse: overrides the folder's `reuse` for this answer cache; None = the folder's.
        """
        name = f"{safe_name(method)}.{fingerprint(identity)[:12]}"
        # memory holds the answers of one method at a time
        if self._answer_cache is None or self._answer_cache.name != name:
            self._answer_cache = AnswerCache(
                name, method, identity, self, self.reuse if reuse is None else reuse
            )
        return self._answer_cache

    @contextlib.contextmanager
    def closed(self) -> Iterator[None]:
        """Inside the block no answer is computed: a missing one raises `Unanswered`."""
        before, self.is_open = self.is_open, False
        try:
            yield
        finally:
            self.is_open = before


class AnswerCache:
    """The answers of one method on one model.

    Attributes:
        label: what is being asked, for the progress bar.
    """

    def __init__(self, name: str, method: str, identity: JsonObject, store: AnswerFolder, reuse: bool = True):
        self.name, self.method, self.identity, self.ranks = name, method, identity, store.ranks
        self.folder = None if store.folder is None else store.folder / name
        self.label, self._store, self._reuse = method, store, reuse and self.folder is not None
        self._known: dict[str, Answer] | None = None
        self._environment: JsonObject = {}
        self._asked: set[str] = set()

    @contextlib.contextmanager
    def asked_by(self, task: str) -> Iterator["AnswerCache"]:
        """Inside the block, answers are asked for by `task`: the progress bar and `account` go by it."""
        self.label = f"{self.method}: {task}"
        self._asked = set()
        try:
            yield self
        finally:
            self.label = self.method

    @property
    def is_empty(self) -> bool:
        """Whether it holds no answer that may be used. It is the same on every rank."""
        return not self._load()

    def answers(
        self,
        items: Sequence[T],
        key: Callable[[T], str],
        batches: Callable[[list[T]], Iterable[list[T]]],
        compute: Callable[[list[T]], list[JsonObject]],
    ) -> list[JsonObject]:
        """A record per item, in the order of `items`, the same on every rank.

        Records that this answer cache holds are not computed again.

        Args:
            key: the key of an item (`key_of`). Items of one key get one answer.
            batches: puts items into batches. Each rank computes whole batches, and writes each as one line. A
                run that goes on after a kill, or on another number of ranks, computes the missing batches as
                they were planned, so that answers have the same bits.
            compute: the records of a batch (JSON types), one per item.
        Raises:
            Unanswered: when an answer is missing and the folder is closed.
            AnswerError: with several ranks, when `compute` fails on one of them; all of them raise it. With
                one rank, the error of `compute` is raised as it is. Answers computed before stay.
        """
        known = self._load()
        keys = [key(item) for item in items]
        unique = dict(zip(keys, items, strict=True))
        missing = unique.keys() - known.keys()
        if missing and not self._store.is_open:
            raise Unanswered(len(missing), len(unique))
        self._asked |= set(keys)
        if missing:
            self._answer(_planned(list(unique.values()), key, missing, batches), key, compute)
        return [known[name].record for name in keys]

    def _answer(self, left: list[list[T]], key: Any, compute: Any) -> None:
        """Compute the batches `left` on all ranks, and let every rank know all answers."""
        mine: list[JsonObject] = []
        failure: Exception | None = None
        try:
            mine = self._compute(self.ranks.share(left), key, compute)
        except Exception as error:
            if self.ranks.world_size == 1:
                raise
            failure = error
        outcomes = self.ranks.gather((mine, None if failure is None else one_line(failure, with_class=True)))
        for lines, _ in outcomes:
            self._take(lines)
        failed = [f"rank {rank}: {line}" for rank, (_, line) in enumerate(outcomes) if line is not None]
        if failed:
            self._known = None  # ranks that failed have lines that the others do not know
            raise AnswerError("; ".join(failed)) from failure

    def _compute(self, batches: list[list[T]], key: Any, compute: Any) -> list[JsonObject]:
        """Answer batches and write each as a line.

        Returns: the lines.
        """
        found: list[JsonObject] = []
        if not batches:
            return found
        total = sum(map(len, batches))
        silent = not self.ranks.is_first
        with (
            self._file() as write,
            tqdm(total=total, desc=self.label, unit="sample", disable=silent or is_quiet()) as bar,
        ):
            for batch in batches:
                began = time.perf_counter()
                names = [key(item) for item in batch]
                line: JsonObject = {"answers": dict(zip(names, compute(batch), strict=True))}
                line["seconds"] = round(time.perf_counter() - began, 3)
                # read back from JSON, so that it equals what a later run reads (lists for tuples, keys that
                # are text)
                found.append(json.loads(write(line)))
                if self.ranks.world_size == 1:
                    self._take(found[-1:])  # at once, because the next batch may fail
                bar.update(len(batch))
        return found

    @contextlib.contextmanager
    def _file(self) -> Iterator[Callable[[JsonObject], str]]:
        """A function that appends whole lines to this rank's file. The first line of a run is its machine."""
        if self.folder is None:
            yield json.dumps
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        said_by = self.folder / IDENTITY_FILE
        if self.ranks.is_first and not said_by.is_file():
            write_json(said_by, {"method": self.method, **self.identity})
        file = self.folder / f"{self.ranks.rank}.jsonl"
        descriptor = os.open(file, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)

        def write(line: JsonObject) -> str:
            text = json.dumps(line)
            _write_all(descriptor, (text + "\n").encode())
            return text

        try:
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                _write_all(descriptor, b"\n")  # a kill tore the last line; it is skipped
            self._environment = environment()
            write({"environment": self._environment})
            yield write
        finally:
            os.close(descriptor)

    # -- reading -------------------------------------------------------------------------------------------

    def _load(self) -> dict[str, Answer]:
        """Every known answer by key. The first rank reads the files once; without `reuse` nothing is read."""
        if self._known is None:
            self._known = {}
            self._take(self.ranks.from_first(self._read() if self.ranks.is_first and self._reuse else []))
        return self._known

    def _read(self) -> list[JsonObject]:
        """The undamaged lines of all files, whatever number of ranks wrote them.

        They are sorted by the time at which their run began, so that later answers override earlier ones.
        """
        runs: list[list[JsonObject]] = []
        for file in sorted(self.folder.glob("*.jsonl")) if self.folder is not None else ():
            with open(file, encoding="utf-8", errors="replace") as texts:
                for line in filter(None, map(_read, texts)):
                    if "environment" in line or not runs:
                        runs.append([])
                    runs[-1].append(line)
        runs.sort(key=lambda run: run[0].get("environment", {}).get("date", ""))
        return [line for run in runs for line in run]

    def _take(self, lines: list[JsonObject]) -> None:
        assert self._known is not None
        for line in lines:
            self._environment = line.get("environment", self._environment)
            answers = line.get("answers", {})
            for name, record in answers.items():
                self._known[name] = Answer(record, self._environment, line["seconds"] / len(answers))

    def account(self) -> JsonObject:
        """What a result says of the answers that were asked for inside `asked_by`.

        Returns: `environment`, the machine and time of the latest answer; `seconds` that all took; and where
            the method decided anything, its `decisions`: by name the mean per layer.
        """
        came = [self._load()[name] for name in sorted(self._asked)]
        machines = [answer.environment for answer in came if answer.environment]
        latest = max(machines, key=lambda found: found["date"], default=None)
        seconds = round(sum(answer.seconds for answer in came), 3)
        said = [answer.record["decisions"] for answer in came if "decisions" in answer.record]
        return {"environment": latest, "seconds": seconds} | ({"decisions": means(said)} if said else {})


def means(said: list[dict[str, list[float | None]]]) -> dict[str, list[float | None]]:
    """The mean of several records of decisions: by name, a number per layer.

    It is the mean of the numbers that are not None, and None where there are none.
    """
    found = {}
    for name in said[0]:
        layers = (
            [x for x in layer if x is not None] for layer in zip(*(one[name] for one in said), strict=True)
        )
        found[name] = [sum(known) / len(known) if known else None for known in layers]
    return found


def _planned(items: list[T], key: Any, missing: set[str], batches: Any) -> list[list[T]]:
    """The batches to compute.

    A planned batch without any answer stays as it is. The missing items of the other batches are put into new
    batches.
    """
    whole, rest = [], []
    for batch in batches(items):
        left = [item for item in batch if key(item) in missing]
        if len(left) == len(batch):
            whole.append(list(batch))
        else:
            rest += left
    return whole + [list(batch) for batch in (batches(rest) if rest else ())]


def _write_all(descriptor: int, data: bytes) -> None:
    """Append bytes in one call where the system allows it, and wait for the disk."""
    while data:
        data = data[os.write(descriptor, data) :]
    os.fsync(descriptor)


def _read(text: str) -> JsonObject | None:
    """A line of a file.

    Returns: None for a line that a kill tore or the machine damaged. Its samples are answered again.
    """
    try:
        line = json.loads(text)
    except ValueError:
        return None
    if not isinstance(line, dict) or not text.endswith("\n"):
        return None
    whole = isinstance(line.get("answers"), dict) and isinstance(line.get("seconds"), (int, float))
    return line if whole or isinstance(line.get("environment"), dict) else None
