"""How often control changes file in four flows of the package, and counts of its names, tests and lines.

    python benchmarks/flows.py                  # writes benchmarks/results/flows.json and flows.md
    python benchmarks/flows.py --show token     # prints the calls of one flow as an indented list

The flows are a decoded token of `pod+snapkv`, one training step, one document from its source to a packed
row, and one answer from its prompt to the page of an evaluation. A profiler sees every call. Only functions
of files in `pod/` count, whatever torch or transformers call in between. Control changes file where a
function of one file in `pod/` calls a function of another one, and once more where that one returns.

The last three flows are commands, which run twice, the second time over a few items more (steps, documents,
answers). What the second run does more often is what the items cost. So starting up, importing and closing
do not count.

The numbers say where a reader has to jump. They are no aim of their own.
"""

import argparse
import ast
import collections
import contextlib
import io
import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "pod"
RESULTS = ROOT / "benchmarks" / "results" / "flows.json"
MOST_COLUMNS = 110
MAY_REPEAT = {"__init__.py", "__main__.py", "args.py"}
"""Names of files that several packages may have."""
LEVELS = "quick", "sample", "rest", "all"
LEAD = [[0, 0], [0, None]]
"""The plan of the decoded token: two layers with heads that lead, follow, and keep their window."""


# -- calls ---------------------------------------------------------------------------------------------------


@dataclass
class Call:
    """A function of `pod/`, called from one place of the tree of calls.

    Attributes:
        file: relative to `pod/`.
        name: qualified name of the function.
        count: how often it was called here. A generator counts whenever it goes on.
        calls: what it called, by file and name.
    """

    file: str
    name: str
    count: float = 0
    calls: dict[tuple[str, str], "Call"] = field(default_factory=dict)

    def called(self, file: str, name: str) -> "Call":
        if (file, name) not in self.calls:
            self.calls[file, name] = Call(file, name)
        return self.calls[file, name]


class Recorder:
    """Records the tree of calls in all threads while `recording` is open.

    Args:
        but: folders of `pod/` whose functions do not count.
    """

    def __init__(self, but: Sequence[str] = ()):
        self._outside = tuple(f"{PACKAGE / folder}{os.sep}" for folder in but)
        self.root = Call("", "")
        self._imports = Call("", "")
        self._stacks: dict[int, list[tuple[FrameType, Call]]] = {}
        self._prefix = f"{PACKAGE}{os.sep}"

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        if event not in ("call", "return"):
            return
        code = frame.f_code
        if not code.co_filename.startswith(self._prefix) or code.co_filename.startswith(self._outside):
            return
        stack = self._stacks.setdefault(threading.get_ident(), [])
        if event == "return":
            if stack and stack[-1][0] is frame:
                stack.pop()
            return
        caller = stack[-1][1] if stack else self.root
        if code.co_name == "<module>":  # what an import runs belongs to no flow
            caller = self._imports
        call = caller.called(code.co_filename.removeprefix(self._prefix), code.co_qualname)
        call.count += 1
        stack.append((frame, call))


def per_item(run: Callable[[int], Call], less: int, more: int) -> Call:
    """The calls of an item: what `run(more)` does beyond `run(less)`, divided by the number of items more.

    The smaller run comes first, so that what happens once in a process belongs to it.
    """
    few = run(less)
    return difference(run(more), few, more - less)


def difference(more: Call, less: Call, items: int) -> Call:
    """What `more` has beyond `less`, per item: a tree of the calls that are more frequent."""
    found = Call(more.file, more.name, max(0.0, more.count - less.count) / items)
    for key, call in more.calls.items():
        own = difference(call, less.calls.get(key, Call(*key)), items)
        if own.count or own.calls:
            found.calls[key] = own
    return found


def every_call(tree: Call) -> Iterator[tuple[Call, Call]]:
    """Every call of a tree, behind its caller."""
    for call in tree.calls.values():
        yield tree, call
        yield from every_call(call)


def counts_of(tree: Call) -> dict[str, int]:
    """Changes of file, and the number of files and functions, of a flow.

    What a comprehension or a lambda does counts for its function.
    """
    changes = 0.0
    files, functions = set(), set()
    for caller, call in every_call(tree):
        if not call.count:
            continue
        if caller.file and caller.file != call.file:
            changes += 2 * call.count
        files.add(call.file)
        functions.add((call.file, call.name.split(".<locals>.<")[0]))
    return {"changes": round(changes), "files": len(files), "functions": len(functions)}


def show(tree: Call, depth: int = 0) -> None:
    """Print the calls as an indented list, with how often each happens per item."""
    for call in tree.calls.values():
        times = "" if call.count == 1 else f"  ×{call.count:g}"
        print(f"{'  ' * depth}{call.file} {call.name}{times}")
        show(call, depth + 1)


# -- flows ---------------------------------------------------------------------------------------------------


def decoded_token(folder: Path) -> Call:
    """A token of a random model of two layers, behind a prompt and six other tokens."""
    import torch

    import pod

    config = pod.PodConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=len(LEAD),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_sink_tokens=4,
        num_recent_tokens=8,
        lead=LEAD,
    )
    torch.manual_seed(0)
    model = pod.PodForCausalLM(config).eval()
    cache = pod.make_cache(model, "pod+snapkv", budget=32, window=4, kernel=3)
    recorder = Recorder()
    with torch.no_grad():
        model(torch.randint(3, 61, (1, 72)), past_key_values=cache)
        for _ in range(6):
            model(torch.tensor([[5]]), past_key_values=cache)
        with recorder.recording():
            model(torch.tensor([[5]]), past_key_values=cache)
    return recorder.root


def training_step(folder: Path) -> Call:
    """A step of one row, under a plan, on the rows that `document` prepared."""
    plan = folder / "plan.json"
    write_plan(plan)
    settings = {"model.plan": str(plan), "train.save_every_steps": 0, "train.dtype": "float32"}
    rows = folder / "document-12" / "data"

    def run(steps: int) -> Call:
        own = folder / f"train-{steps}"
        own.mkdir()
        (own / "data").symlink_to(rows)
        with ProcessPoolExecutor(1, get_context("spawn")) as process:  # DeepSpeed starts once in a process
            return process.submit(recorded, "train", own, settings | {"train.max_steps": steps}).result()

    return per_item(run, 2, 4)


def document(folder: Path) -> Call:
    """A document of 60 words: read, tokenized, drawn, packed, written."""

    def run(documents: int) -> Call:
        source = folder / f"texts-{documents}.jsonl"
        lines = [json.dumps({"text": text(number)}) for number in range(documents)]
        source.write_text("\n".join(lines), encoding="utf-8")
        return recorded("data", folder / f"document-{documents}", {"data.sources": f"['{source}']"})

    return per_item(run, 12, 24)


def answer(folder: Path) -> Call:
    """An answer of a dense model to the passkey task, with `snapkv`. What the model does is not counted."""
    settings = {
        "model.layout": "dense",
        "eval.methods": "['snapkv[window=8]@64']",
        "eval.method_options": "{}",
        "eval.tasks": "[passkey]",
        "eval.batch_size": 1,
        "eval.passkey_new_tokens": 2,
        "eval.reuse": False,
    }

    def run(samples: int) -> Call:
        changes = settings | {"eval.passkey_samples": samples}
        return recorded("eval", folder / f"answer-{samples}", changes, but=("modeling", "engine", "kernels"))

    return per_item(run, 1, 3)


FLOWS: dict[str, tuple[str, Callable[[Path], Call]]] = {
    "token": ("a decoded token of pod+snapkv", decoded_token),
    "document": ("a document from its source to a packed row", document),
    "step": ("a training step", training_step),
    "answer": ("an answer from its prompt to the page", answer),
}
"""Every flow with a title. The training step reads what the documents wrote."""


def text(number: int) -> str:
    return " ".join(f"w{(number * 7919 + word * 104729) % 1000}" for word in range(60))


def write_plan(path: Path) -> None:
    """A plan for the four layers of the tiny model: heads that lead, follow, and keep their window."""
    import pod
    from pod.models import resolve_model

    config = json.loads((Path(resolve_model("package:tiny")) / "config.json").read_text(encoding="utf-8"))
    heads = config["num_key_value_heads"]
    rows = [[layer - layer % 2 if head % 2 else layer for head in range(heads)] for layer in range(4)]
    rows[3][0] = None
    pod.SharingPlan(rows).save(path)


def recorded(command: str, folder: Path, settings: dict[str, Any], but: Sequence[str] = ()) -> Call:
    """The calls of a command of the tiny recipe, run in this process."""
    changes = {"output_dir": folder, "data.workers": 1} | settings
    words = ["pod", command, "--config", "demo_tiny"]
    for name, value in changes.items():
        words += ["--set", f"{name}={value}"]
    recorder, arguments, output = Recorder(but), sys.argv, io.StringIO()
    from pod.commands import main

    sys.argv = words
    try:
        with contextlib.redirect_stdout(output), recorder.recording():
            main()
    except SystemExit as end:
        if end.code:
            raise RuntimeError(f"{' '.join(words)} failed:\n{output.getvalue()}") from end
    finally:
        sys.argv = arguments
    return recorder.root


# -- names, tests, lines -------------------------------------------------------------------------------------


def sources(*folders: str) -> list[Path]:
    return sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py"))


def repeated(names: list[str]) -> list[str]:
    return sorted(name for name, count in collections.Counter(names).items() if count > 1)


def class_names() -> list[str]:
    """The name of every class in `pod/`, once for each file that defines it."""
    found = []
    for file in sources("pod"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        found += {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    return found


def imports_private_depths(file: Path) -> bool:
    """Whether a file imports a module below a part of `pod`: `pod.data` is public, `pod.data.rows` is not."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        if any(name.startswith("pod.") and name.count(".") > 1 for name in names):
            return True
    return False


def number_of_lines(files: list[Path]) -> int:
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def long_lines(files: list[Path]) -> int:
    lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    return sum(len(line) > MOST_COLUMNS for line in lines)


def tests_by_level() -> dict[str, int]:
    """How many tests each level has.

    Raises:
        RuntimeError: a file of tests cannot be collected.
    """
    code = (
        "import sys, json, pytest\n"
        "class Count:\n"
        "    def pytest_collection_finish(self, session):\n"
        "        import levels\n"
        f"        counts = {{x: len(levels.split_by_level(session.items, x)[0]) for x in {LEVELS}}}\n"
        "        print('\\nCOUNTS', json.dumps(counts))\n"
        "options = ['--collect-only', '-qq', '--level', 'all', '-p', 'no:cacheprovider', 'tests']\n"
        "sys.exit(pytest.main(options, plugins=[Count()]))\n"
    )
    settings = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, env=settings
    )
    counts = None
    for line in done.stdout.splitlines():
        if line.startswith("COUNTS "):
            counts = json.loads(line.removeprefix("COUNTS "))
    if done.returncode or counts is None:
        raise RuntimeError(f"the tests cannot be collected:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return counts


def house_numbers(with_tests: bool = True) -> dict[str, Any]:
    """What the house counts about itself."""
    product, tests = sources("pod"), sources("tests")
    names = [file.name for file in product if file.name not in MAY_REPEAT]
    private = [file for file in tests if imports_private_depths(file)]
    numbers: dict[str, Any] = {
        "file names that exist twice": len(repeated(names)),
        "class names that exist twice": len(repeated(class_names())),
        "test files": len(tests),
        "test files that import below a package": len(private),
        "lines over 110 columns": long_lines(sources("pod", "tests", "benchmarks", "launch")),
        "product lines": number_of_lines(product),
        "test lines": number_of_lines(tests),
    }
    if with_tests:
        numbers |= {f"tests, level {level}": count for level, count in tests_by_level().items()}
    return numbers


# -- results -------------------------------------------------------------------------------------------------


def table(result: dict[str, Any]) -> str:
    """The results in Markdown, before and now."""
    before, now = result.get("before") or {}, result["now"]
    lines = [
        "# How often control changes file",
        "",
        "Written by `python benchmarks/flows.py`, which says how it counts.",
        "",
        "| flow | changes of file before | now | files before | now | functions before | now |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, (title, _) in FLOWS.items():
        old, new = (one.get("flows", {}).get(name) or {} for one in (before, now))
        cells = [side.get(key, "–") for key in ("changes", "files", "functions") for side in (old, new)]
        lines.append(f"| {title} | {' | '.join(map(str, cells))} |")
    lines += ["", "| | before | now |", "|---|---|---|"]
    for name, count in now["house"].items():
        lines.append(f"| {name} | {before.get('house', {}).get(name, '–')} | {count} |")
    commits = [one["commit"][:8] for one in (before, now) if one.get("commit")]
    lines += ["", f"Commits: {', '.join(commits)}."]
    return "\n".join(lines) + "\n"


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--show", choices=sorted(FLOWS), help="print the calls of this flow and write nothing")
    words.add_argument("--before", action="store_true", help="write the numbers as those from before")
    words.add_argument("--without-tests", action="store_true", help="do not collect the tests to count them")
    words.add_argument("--out", type=Path, default=RESULTS)
    arguments = words.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    os.environ |= {"DS_ACCELERATOR": "cpu", "TRANSFORMERS_VERBOSITY": "error"}
    sys.path.insert(0, str(ROOT))
    from pod.files import atomic_write_text, write_json
    from pod.measure.machine import environment

    chosen = [arguments.show] if arguments.show else list(FLOWS)
    if arguments.show == "step":
        chosen.insert(0, "document")
    flows = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in chosen:
            tree = FLOWS[name][1](Path(folder))
            flows[name] = counts_of(tree)
            print(f"{FLOWS[name][0]}: {flows[name]}", flush=True)
            if name == arguments.show:
                show(tree)
    if arguments.show:
        return
    house = house_numbers(not arguments.without_tests)
    for name, count in house.items():
        print(f"{name}: {count}")
    result = json.loads(arguments.out.read_text(encoding="utf-8")) if arguments.out.is_file() else {}
    result["before" if arguments.before else "now"] = environment() | {"flows": flows, "house": house}
    write_json(arguments.out, result)
    if "now" in result:
        atomic_write_text(arguments.out.with_suffix(".md"), table(result))
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
