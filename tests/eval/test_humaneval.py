"""HumanEval: functions run shut in and apart from their tests, or not at all without permission."""

import gzip
import json
import re
import socket
from pathlib import Path

import pytest
from lm_eval import evaluator
from lm_eval.api.model import LM

from pod.eval.lm.index import load, task_manager
from pod.eval.suites import task_data
from pod.eval.suites.humaneval import execution, humaneval_tasks, sandbox
from pod.eval.suites.humaneval.execution import run_solution

DATA = Path(__file__).parent / "data"
CPU = 0.6
TEST = "def check(candidate):\n    assert candidate() == 1"
shut_in = pytest.mark.skipif(
    not sandbox.available(), reason="bubblewrap 0.8 or newer is missing or not allowed"
)


@pytest.fixture(params=[pytest.param(True, marks=shut_in, id="bwrap"), pytest.param(False, id="unsafe")])
def run(request, monkeypatch):
    """Runs a program in front of a right function, under bubblewrap or, with permission, without."""
    if not request.param:
        monkeypatch.setattr(sandbox, "available", lambda: False)

    def run_one(program, function="def f(): return 1", test=TEST):
        with task_data.use(None, unsafe_code=not request.param):
            return run_solution("", f"{program}\n{function}", test, "f", CPU, 2 << 30)

    return run_one


@pytest.fixture(scope="module")
def docs():
    with task_data.use(DATA, unsafe_code=True):
        return list(humaneval_tasks.rows(version=1.0)["test"])


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("x = 1", "passed"),
        ("print('noise' * 100000)\nopen('a.txt', 'w').write('b')\n"
         "assert open('a.txt').read() == 'b'", "passed"),
        ("import os\nos.environ['A'] = '1'\nassert '__name__' not in globals()", "passed"),
        ("import tempfile, os\nwith tempfile.TemporaryDirectory() as d:\n"
         "  open(d + '/a', 'w').close()", "passed"),
        ("assert 1 == 2, 'no'", "failed: AssertionError: no"),
        ("def f(:", "failed: SyntaxError"),
        ("raise SystemExit(0)", "failed: SystemExit: 0"),
        ("import os; os._exit(0)", "died: exit code 0"),
        ("import os\nfor number in range(3, 9):\n  try: os.write(number, b'{\"value\": \"1\"}')\n"
         "  except OSError: pass\nos._exit(0)", "died|failed"),
        ("while True: pass", "timed out"),
        ("while True:\n  try:\n    while True: pass\n  except BaseException: pass", "timed out"),
        ("x = bytearray(8 << 30)", "failed: MemoryError"),
        ("open('big', 'wb').write(bytes(20 << 20))", "died|failed: OSError"),
        ("input()", "failed: EOFError"),
        ("# " + "long " * 50_000, "passed"),
    ],
)  # fmt: skip
def test_what_becomes_of_a_program(run, program, reason):
    outcome = run(program)
    assert re.match(reason, outcome), outcome
    assert (outcome == "passed") == (reason == "passed")


@pytest.mark.parametrize(
    "answer",
    ["None", "(1, 'a', [2.5, -0.0, {1, 2}], {'k': (True, None)}, b'x', 1j)",
     r"'\u2028 \ud800 \x00 \n'", "[]", "set()"],
)  # fmt: skip
def test_plain_answers_come_back_as_they_are(run, answer):
    test = f"def check(candidate):\n    assert repr(candidate({answer})) == repr({answer})"
    outcome = run("", "def f(x): return x", test)
    assert outcome == "passed"


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("def f(): return 2", "failed: AssertionError"),
        ("def f(): raise KeyError(1)", "failed: KeyError: 1"),
        ("class Any:\n  def __eq__(self, other): return True\ndef f(): return Any()", "failed: SyntaxError"),
        ("class Any(int):\n  def __eq__(self, other): return True\n"
         "def f(): return Any(2)", "failed: AssertionError"),
        ("class Any:\n  def __repr__(self): return '__import__(\"os\").exit(0)'\n"
         "def f(): return Any()", "failed: ValueError"),
        ("def f(): return '[' * 100_000", "failed: AssertionError"),
        ("import os\ndef f(): os._exit(0)", "died: exit code 0"),
        ("def f():\n  while True: pass", "timed out"),
    ],
)  # fmt: skip
def test_wrong_answers_fail(run, function, reason):
    outcome = run("", function)
    assert re.match(reason, outcome) and outcome != "passed", outcome


FORGERIES = (
    # what passed when the program and its verdict shared a process: the report in the frame that runs the
    # program
    "import sys, json, os\nseen = sys._getframe(1).f_locals\n"
    "json.dump({'token': seen['asked']['token'], 'error': None, "
    "'network_cut': True}, seen['report']); seen['report'].flush(); os._exit(0)",
    # its own frames and file descriptors now: replies, ends and exit codes of its own
    "import sys, os\nreplies = sys._getframe(1).f_locals['replies']\n"
    "for _ in range(9): replies.write('{\"value\": \"2\"}\\n')\nreplies.flush(); os._exit(0)",
    "import sys\nsys.modules['__main__']._ENDED = 0\nsys.modules['__main__'].judge = lambda *a: None",
    "import builtins\nbuiltins.AssertionError = BaseException\nimport json; json.loads = lambda line: 'None'",
    "import os, signal\nfor number in (os.getppid(), 1, 2):\n  try: os.kill(number, signal.SIGUSR1)\n"
    "  except OSError: pass",
)  # fmt: skip


@shut_in
@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_wrong_function_forges_no_pass(forgery):
    outcome = run_solution("", f"{forgery}\ndef f(): return 2", TEST, "f", CPU)
    assert outcome != "passed" and not outcome.startswith("timed out"), outcome


@shut_in
def test_the_tests_are_not_within_reach():
    """Neither in the frames and objects of the solution's process nor in another process that it can see."""
    looks = """import gc, os, sys
def f():
    frame, seen = sys._getframe(), []
    while frame:
        seen += [repr(value) for value in frame.f_locals.values()]
        frame = frame.f_back
    seen += [item for item in gc.get_objects() if isinstance(item, str)]
    for number in filter(str.isdigit, os.listdir('/proc')):
        seen.append(open(f'/proc/{number}/cmdline').read())
    return 1 - any('se' + 'cret' in item or '\\0ju' + 'dge\\0' in item for item in seen)
"""
    test = "def check(candidate):\n    'secret'\n    assert candidate() == 1"
    assert run_solution("", looks, test, "f", CPU) == "passed"


@shut_in
def test_nothing_outside_is_seen_written_or_reached(tmp_path):
    kept = tmp_path / "kept.txt"
    kept.write_text("kept")
    source = Path(execution.__file__).read_text()
    command = f"echo gone > {kept}; rm -rf {tmp_path}"
    spawn = (
        "import _posixsubprocess, os\nr, w = os.pipe()\n"
        f"_posixsubprocess.fork_exec([b'/bin/sh', b'-c', {command.encode()!r}], "
        "(b'/bin/sh',), True, (w,), None, None, -1, -1, -1, -1, -1, -1, r, w, True, False, -1, None, None, "
        "None, -1, None, False)"
        "\nassert os.waitstatus_to_exitcode(os.wait()[1]) != 127"
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        for line, happens in (
            (f"open({str(kept)!r})", "failed: FileNotFoundError"),
            (f"open({str(kept)!r}, 'w')", "failed: FileNotFoundError"),
            (f"import os; os.makedirs({str(tmp_path)!r}); open({str(kept)!r}, 'w')", "passed|failed"),
            (f"open({execution.__file__!r})", "failed: FileNotFoundError"),
            # a project below /tmp: written in the folder in memory that lies over it
            (f"open({execution.__file__!r}, 'a').write('!')", "failed: OSError: .* Read-only|passed"),
            ("open('/dev/shm/a', 'w')", "failed: OSError: .* Read-only"),
            ("open('/proc/sys/kernel/core_pattern', 'a')", "failed: (OSError: .* Read-only|PermissionError)"),
            (f"open({str(execution._CHILD)!r}, 'a')", "failed: OSError: .* Read-only"),
            (f"open({re.__file__!r}, 'a')", "failed: OSError: .* Read-only"),
            (f"import os; assert os.system({command!r}) == 0", "failed: AssertionError"),
            (f"import subprocess; subprocess.run(['sh', '-c', {command!r}])", "failed: PermissionError"),
            (spawn, "failed: (PermissionError|TypeError)"),  # TypeError: the private call of another Python
            ("import os; os.fork()", "failed: PermissionError"),
            ("import os; os.posix_spawn('/bin/true', ['true'], {})", "failed: PermissionError"),
            ("import os; os.unshare(os.CLONE_NEWUSER)", "failed: (OSError|AttributeError)"),  # of Python 3.12
            ("import ctypes; assert ctypes.CDLL(None).unshare(0x10000000) == 0", "failed: AssertionError"),
            (
                "from threading import Thread\ndone = []\nt = Thread(target=done.append, args=(1,))\n"
                "t.start()\nt.join()\nassert done",
                "passed",
            ),
            (
                f"import socket; socket.create_connection(('127.0.0.1', {port}), 1)",
                "failed: ConnectionRefused",
            ),
        ):
            outcome = run_solution("", f"{line}\ndef f(): return 1", TEST, "f", CPU)
            assert re.match(happens, outcome), (line, outcome)
            assert kept.read_text() == "kept" and list(tmp_path.iterdir()) == [kept], line
            assert Path(execution.__file__).read_text() == source, line


def test_a_sleeping_program_ends_by_the_clock(run, monkeypatch):
    monkeypatch.setattr(execution, "_CLOCK_SECONDS", 2)
    assert run("import time; time.sleep(600)") == "timed out"


def test_the_secrets_of_this_process_do_not_reach_the_program(run, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert run("import os; assert 'HF_TOKEN' not in os.environ") == "passed"


def test_no_sandbox_and_no_permission_is_one_line_before_anything_runs(monkeypatch, docs):
    monkeypatch.setattr(sandbox, "available", lambda: False)
    monkeypatch.setattr(execution.subprocess, "Popen", lambda *a, **k: pytest.fail("it ran"))
    with task_data.use(DATA):
        for asked in (humaneval_tasks.rows, lambda: humaneval_tasks.pass_at_1(docs[0], ["    return 1"])):
            with pytest.raises(ValueError, match=r"bubblewrap .* is missing .* eval.unsafe_code") as error:
                asked()
            assert "\n" not in str(error.value)
        with pytest.raises(ValueError, match="set eval.unsafe_code"):
            load("pod_humaneval", {})
    with task_data.use(DATA, unsafe_code=True):
        assert list(load("pod_humaneval", {}).leaves) == ["pod_humaneval"]


def test_a_bubblewrap_that_may_not_work_counts_as_none(monkeypatch, tmp_path):
    (tmp_path / "bwrap").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert sandbox.available.__wrapped__() is False


@pytest.fixture
def permission():
    with task_data.use(DATA, unsafe_code=True):
        yield


def test_right_functions_pass_and_wrong_ones_do_not(docs, permission):
    assert [doc["task_id"] for doc in docs] == ["HumanEval/0", "HumanEval/1"]
    for doc in docs:
        assert humaneval_tasks.pass_at_1(doc, [doc["canonical_solution"]]) == {"pass@1": 1.0}
        assert humaneval_tasks.pass_at_1(doc, ["    return None\n"]) == {"pass@1": 0.0}
        assert humaneval_tasks.pass_at_1_instruct(doc, [doc["canonical_solution"] + "```\nSo it works."]) == {
            "pass@1": 1.0
        }


def test_the_official_packed_file_is_read(tmp_path, docs):
    (tmp_path / "humaneval").mkdir()
    text = (DATA / "humaneval" / "HumanEval.jsonl").read_bytes()
    (tmp_path / "humaneval" / "HumanEval.jsonl.gz").write_bytes(gzip.compress(text))
    with task_data.use(tmp_path, unsafe_code=True):
        assert list(humaneval_tasks.rows()["test"]) == docs


def test_rows_without_tests_are_one_line(tmp_path):
    (tmp_path / "humaneval").mkdir()
    row = {"task_id": "HumanEval/0", "prompt": "def f():", "entry_point": "f"}
    (tmp_path / "humaneval" / "HumanEval.jsonl").write_text(json.dumps(row))
    with (
        task_data.use(tmp_path, unsafe_code=True),
        pytest.raises(ValueError, match="row 1: no test; expected task_id, prompt"),
    ):
        humaneval_tasks.rows()


class Coder(LM):
    """Solves the first problem, and leaves the second without a body."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def generate_until(self, requests, disable_tqdm=False):
        self.asked += [request.args for request in requests]
        return ["    return items + [value]\n" if "add_tail" in r.args[0] else "    pass" for r in requests]

    def loglikelihood(self, requests, disable_tqdm=False):
        raise AssertionError("nothing is scored by likelihood")

    loglikelihood_rolling = loglikelihood


@pytest.mark.parametrize("task", ["pod_humaneval", "pod_humaneval_instruct"])
def test_tasks_run_offline(task, docs, permission):
    model = Coder()
    found = evaluator.simple_evaluate(
        model, tasks=[task], task_manager=task_manager(False), bootstrap_iters=0
    )["results"][task]
    assert found["pass@1,none"] == 0.5
    prompt, settings = model.asked[0]
    assert (
        settings["until"] == ["\nclass", "\ndef", "\n#", "\nif", "\nprint"]
        and settings["max_gen_toks"] == 1024
    )
    if task == "pod_humaneval":
        assert prompt == docs[0]["prompt"]
    else:
        assert prompt.startswith(
            "Write a solution to the following problem and make sure that it passes the tests:\n```python\n"
        )
        assert prompt.endswith(f"Here is the completed function:\n```python\n{docs[0]['prompt']}\n")
