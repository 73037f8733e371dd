"""HumanEval: functions are run in a process with limits, and only with permission."""

import gzip
import json
from pathlib import Path

import pytest
from lm_eval import evaluator
from lm_eval.api.model import LM

from pod.eval.lm.index import task_manager
from pod.eval.suites import data
from pod.eval.suites.humaneval import execution, tasks
from pod.eval.suites.humaneval.execution import run_program

DATA = Path(__file__).parent / "data"
CPU = 0.6


@pytest.fixture(scope="module")
def docs():
    with data.use(DATA):
        return list(tasks.rows(version=1.0)["test"])


@pytest.fixture(scope="module")
def manager():
    return task_manager(False)


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("x = 1", "passed"),
        ("print('noise' * 100000)\nopen('a.txt', 'w').write('b')\nassert open('a.txt').read() == 'b'", "passed"),
        ("import os\nos.environ['A'] = '1'\nassert '__name__' not in globals()", "passed"),
        ("import tempfile, os\nwith tempfile.TemporaryDirectory() as d:\n  open(d + '/a', 'w').close()", "passed"),
        ("assert 1 == 2, 'no'", "failed: AssertionError: no"),
        ("def f(:", "failed: SyntaxError"),
        ("raise SystemExit(0)", "failed: SystemExit: 0"),
        ("import os; os._exit(0)", "died: exit code 0"),
        ("import os\nfor number in range(3, 9):\n  try: os.write(number, b'{\"token\": 1}')\n  except OSError: pass\nos._exit(0)", "died"),
        ("while True: pass", "timed out"),
        ("while True:\n  try:\n    while True: pass\n  except BaseException: pass", "timed out"),
        ("x = bytearray(8 << 30)", "failed: MemoryError"),
        ("open('big', 'wb').write(bytes(20 << 20))", "died|failed: OSError"),
        ("import os; os.system('true')", "failed: PermissionError: os.system is forbidden"),
        ("import subprocess; subprocess.run(['true'])", "failed: PermissionError: subprocess.Popen is forbidden"),
        ("import os; os.fork()", "failed: PermissionError: os.fork is forbidden"),
        ("import os; os.kill(os.getppid(), 9)", "failed: PermissionError: os.kill is forbidden"),
        ("import socket; socket.create_connection(('127.0.0.1', 9))", "failed: PermissionError: socket"),
        ("input()", "failed: EOFError"),
    ],
)  # fmt: skip
def test_what_becomes_of_a_program(program, reason):
    import re

    outcome = run_program(program, cpu_seconds=CPU, memory_bytes=2 << 30)
    assert re.match(reason, outcome.reason), outcome
    assert outcome.passed == (reason == "passed")


def test_files_outside_of_the_working_folder_are_safe(tmp_path):
    kept = tmp_path / "kept.txt"
    kept.write_text("kept")
    for line in (
        f"open({str(kept)!r}, 'w')",
        f"open({str(tmp_path / 'new.txt')!r}, 'a')",
        f"import os; os.remove({str(kept)!r})",
        f"import os; os.rename({str(kept)!r}, 'mine')",
        f"import shutil; shutil.rmtree({str(tmp_path)!r})",
        f"import os; os.open('kept.txt', os.O_WRONLY | os.O_TRUNC, dir_fd=os.open({str(tmp_path)!r}, 0))",
        f"import os; os.chdir({str(tmp_path)!r}); open('kept.txt', 'w')",
        f"import os; os.symlink({str(tmp_path)!r}, 'way'); open('way/kept.txt', 'w')",
    ):
        assert not run_program(line, cpu_seconds=CPU).passed, line
        assert kept.read_text() == "kept" and list(tmp_path.iterdir()) == [kept], line


def test_a_sleeping_program_ends_by_the_clock(monkeypatch):
    monkeypatch.setattr(execution, "_CLOCK_FACTOR", 2)
    assert run_program("import time; time.sleep(600)", cpu_seconds=0.5).reason == "timed out"


def test_the_secrets_of_this_process_do_not_reach_the_program(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert run_program("import os; assert 'HF_TOKEN' not in os.environ", cpu_seconds=CPU).passed


def test_right_functions_pass_and_wrong_ones_do_not(docs):
    assert [doc["task_id"] for doc in docs] == ["HumanEval/0", "HumanEval/1"]
    for doc in docs:
        assert tasks.pass_at_1(doc, [doc["canonical_solution"]]) == {"pass@1": 1.0}
        assert tasks.pass_at_1(doc, ["    return None\n"]) == {"pass@1": 0.0}
        assert tasks.pass_at_1_instruct(doc, [doc["canonical_solution"] + "```\nSo it works."]) == {
            "pass@1": 1.0
        }
    assert tasks.program(docs[0], "    return items\n").endswith("check(add_tail)")


def test_the_official_packed_file_is_read(tmp_path, docs):
    (tmp_path / "humaneval").mkdir()
    text = (DATA / "humaneval" / "HumanEval.jsonl").read_bytes()
    (tmp_path / "humaneval" / "HumanEval.jsonl.gz").write_bytes(gzip.compress(text))
    with data.use(tmp_path):
        assert list(tasks.rows()["test"]) == docs


def test_rows_without_tests_are_one_line(tmp_path):
    (tmp_path / "humaneval").mkdir()
    row = {"task_id": "HumanEval/0", "prompt": "def f():", "entry_point": "f"}
    (tmp_path / "humaneval" / "HumanEval.jsonl").write_text(json.dumps(row))
    with data.use(tmp_path), pytest.raises(ValueError, match="row 1: no test; expected task_id, prompt"):
        tasks.rows()


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
def test_tasks_run_offline_with_permission_only(manager, task, docs):
    model = Coder()
    with data.use(DATA):
        with pytest.raises(ValueError, match="unsafe_code|confirm_run_unsafe_code|unsafe"):
            evaluator.simple_evaluate(model, tasks=[task], task_manager=manager, bootstrap_iters=0)
        assert model.asked == []
        found = evaluator.simple_evaluate(
            model, tasks=[task], task_manager=manager, bootstrap_iters=0, confirm_run_unsafe_code=True
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
