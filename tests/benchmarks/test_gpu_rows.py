"""The driver of the GPU rows, tried with scripts of this file's own.

Rows are kept, killed, broken and missing; the summary says so.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
GOOD = """
import argparse, json, pathlib
words = argparse.ArgumentParser()
words.add_argument("--out")
words.add_argument("--tiny", action="store_true")
words.add_argument("--lengths")
a = words.parse_args()
counter = pathlib.Path(__file__).with_suffix(".count")
counter.write_text(str(int(counter.read_text()) + 1) if counter.exists() else "1")
row = {"name": "good " + str(a.lengths), "goal": "<= 1", "figure": 0.5, "unit": "x dense"}
row |= {"met": True, "reason": None}
json.dump({"environment": {}, "tiny": a.tiny, "rows": [row]}, open(a.out, "w"))
"""
HANGS = """
import subprocess, sys, time, pathlib
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path(__file__).with_suffix(".pid").write_text(str(child.pid))
out = sys.argv[sys.argv.index("--out") + 1]
open(out, "w").write('{"environment": {}, "rows": [')
time.sleep(600)
"""
SCRIPTS = {
    "good": GOOD,
    "hangs": HANGS,
    "raises": "raise ValueError('no memory for this')",
    "half": "import sys; open(sys.argv[sys.argv.index('--out') + 1], 'w').write('{\"rows\": [')",
    "rowless": "import sys; open(sys.argv[sys.argv.index('--out') + 1], 'w').write('{\"environment\": {}}')",
}


@pytest.fixture
def driver(script, monkeypatch, tmp_path):
    """The driver over this file's scripts; `folder` is where results go."""
    module = script("gpu_rows")
    here = tmp_path / "checkout" / "benchmarks"
    here.mkdir(parents=True)
    (here.parent / "pod").mkdir()
    for name, text in SCRIPTS.items():
        (here / f"{name}.py").write_text(text)
    rows = [
        module.Row(name, name, 1.5 if name == "hangs" else 60, name, "<= 1") for name in (*SCRIPTS, "missing")
    ]
    rows.append(module.Row("good_again", "good", 60, "good", "<= 1", ("--lengths", "7")))
    monkeypatch.setattr(module, "HERE", here)
    monkeypatch.setattr(module, "ROWS", tuple(rows))
    monkeypatch.setattr(module, "code_hash", lambda: "hash of " + (here / "good.py").read_text())
    return module


def go(
    driver, folder: Path, only: str | None = None, again: bool = False, budget: float = 1e4
) -> dict[str, str]:
    folder.mkdir(exist_ok=True)
    return driver.run_all(driver.chosen_rows(only, tiny=False), folder, False, again, budget)


def runs_of(driver) -> int:
    return int((driver.HERE / "good.count").read_text())


def test_every_kind_of_failure_is_named_and_leaves_nothing(driver, tmp_path, capfd):
    folder = tmp_path / "results"
    reasons = go(driver, folder)
    assert sorted(reasons) == ["half", "hangs", "missing", "raises", "rowless"]
    assert reasons["hangs"].startswith("stopped after its limit")
    assert reasons["raises"] == "exit code 1: ValueError: no memory for this"
    assert "no result" in reasons["half"] and "no result" in reasons["rowless"]
    assert "does not exist" in reasons["missing"]
    kept = {path.name for path in folder.iterdir()}
    assert kept == {"good.json", "good_again.json", "summary.json", "summary.md"}
    grandchild = int((driver.HERE / "hangs.pid").read_text())
    for _ in range(50):  # killed, and reaped by whoever adopted it
        if (
            not Path(f"/proc/{grandchild}").exists()
            or "\nState:\tZ" in Path(f"/proc/{grandchild}/status").read_text()
        ):
            break
        time.sleep(0.1)
    else:
        pytest.fail("a process of the stopped row is still running")
    lines = json.loads((folder / "summary.json").read_text())["rows"]
    by_row = {line["row"]: line for line in lines}
    assert list(by_row) == [row.name for row in driver.ROWS]
    assert by_row["good"]["met"] is True and by_row["good"]["current"]
    assert by_row["good_again"]["name"] == "good 7"  # its own arguments
    assert by_row["raises"]["figure"] is None and by_row["raises"]["reason"] == reasons["raises"]
    text = (folder / "summary.md").read_text()
    assert (
        "| good None | <= 1 | 0.500 x dense | met |  |" in text
        and "| raises | <= 1 | unmeasured | — | exit code" in text
    )


def test_a_row_is_kept_until_code_device_or_libraries_change(driver, tmp_path, monkeypatch):
    folder = tmp_path / "results"
    assert go(driver, folder, "good") == {} and runs_of(driver) == 1
    assert go(driver, folder, "good") == {} and runs_of(driver) == 1
    assert go(driver, folder, "good", again=True) == {} and runs_of(driver) == 2
    with open(driver.HERE / "good.py", "a") as file:
        file.write("# another kernel\n")
    lines = driver.summarise(folder, False, {})
    assert not next(line for line in lines if line["row"] == "good")["current"]
    assert "measured with other code" in (folder / "summary.md").read_text()
    assert go(driver, folder, "good") == {} and runs_of(driver) == 3
    monkeypatch.setattr(torch, "__version__", "9.9")
    assert go(driver, folder, "good") == {} and runs_of(driver) == 4
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "another chip")
    monkeypatch.setattr(driver, "describe", lambda device: {"name": "another chip"})
    assert go(driver, folder, "good") == {} and runs_of(driver) == 5
    assert go(driver, folder, "good") == {} and runs_of(driver) == 5
    content = json.loads((folder / "good.json").read_text())
    (folder / "good.json").write_text(json.dumps({**content, "tiny": True}))
    assert go(driver, folder, "good") == {} and runs_of(driver) == 6  # toy sizes are no result


def test_a_failed_repetition_keeps_the_old_result(driver, tmp_path):
    folder = tmp_path / "results"
    go(driver, folder, "good")
    before = (folder / "good.json").read_bytes()
    (driver.HERE / "good.py").write_text(SCRIPTS["raises"])
    assert "good" in go(driver, folder, "good")
    assert (folder / "good.json").read_bytes() == before


def test_no_row_starts_without_time_for_it(driver, tmp_path):
    reasons = go(driver, tmp_path / "results", "good,good_again", budget=20)
    assert sorted(reasons) == ["good", "good_again"] and "run it again" in reasons["good"]
    assert not (driver.HERE / "good.count").exists()


def test_rows_are_chosen_by_name(driver):
    assert [row.name for row in driver.chosen_rows("half,good", tiny=False)] == ["good", "half"]
    with pytest.raises(ValueError, match="no row is called hlaf; choose from good"):
        driver.chosen_rows("hlaf", tiny=False)
    names = [row.name for row in driver.chosen_rows(None, tiny=True)]
    assert names == [*SCRIPTS, "missing"]  # each script once: toy sizes do not depend on a row's arguments


def test_the_hash_is_of_code_not_of_results(script, tmp_path):
    hashed = script("gpu_rows").code_hash
    for name in ("pod/kernels/a.py", "benchmarks/b.py", "benchmarks/results/gpu/x.json", "tests/t.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("1")
    first = hashed(tmp_path)
    (tmp_path / "benchmarks/results/gpu/x.json").write_text("2")
    (tmp_path / "tests/t.py").write_text("2")
    assert hashed(tmp_path) == first
    (tmp_path / "pod/kernels/a.py").write_text("2")
    second = hashed(tmp_path)
    assert second != first
    (tmp_path / "benchmarks/b.py").rename(tmp_path / "benchmarks/c.py")
    assert hashed(tmp_path) not in (first, second)


def test_the_shipped_rows_fit_into_the_time(script):
    rows = script("gpu_rows")
    assert sum(row.seconds for row in rows.ROWS) <= rows.TOTAL_SECONDS
    assert len({row.name for row in rows.ROWS}) == len(rows.ROWS)


@pytest.mark.slow
def test_stopping_the_driver_stops_the_row(tmp_path):
    """SIGTERM while a row runs: its processes end with the driver, and no result is left."""
    code = f"""
import sys; sys.path.insert(0, {str(ROOT / "benchmarks")!r})
import gpu_rows, pathlib
gpu_rows.HERE = pathlib.Path({str(tmp_path)!r})
gpu_rows.ROWS = (gpu_rows.Row("hangs", "hangs", 100, "", ""),)
gpu_rows.code_hash = lambda: ""
sys.argv = ["gpu_rows.py", "--tiny", "--folder", {str(tmp_path / "results")!r}]
sys.exit(gpu_rows.main())
"""
    (tmp_path / "hangs.py").write_text(HANGS)
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    for _ in range(3000):
        if (tmp_path / "hangs.pid").exists() and (tmp_path / "hangs.pid").read_text():
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 143
    grandchild = Path(f"/proc/{(tmp_path / 'hangs.pid').read_text()}")
    time.sleep(0.3)
    assert not grandchild.exists() or "\nState:\tZ" in (grandchild / "status").read_text()
    assert not list((tmp_path / "results").glob("*hangs*"))
