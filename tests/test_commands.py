"""The command `pod`: what it dispatches, recipes by name, what the doctor says, and what a wheel carries."""

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import pod
from pod.commands import COMMANDS, doctor, main, note_on_data
from pod.recipe import load_recipe

ROOT = Path(__file__).resolve().parents[1]


def said(monkeypatch, capsys, *arguments):
    """(exit code, stdout, stderr) of `pod …`."""
    monkeypatch.setattr(sys, "argv", ["pod", *arguments])
    code = 0
    try:
        main()
    except SystemExit as end:
        code = end.code
    return code, *capsys.readouterr()


def test_pod_alone_lists_its_commands_and_an_unknown_one_is_refused(monkeypatch, capsys):
    for arguments in ([], ["--help"]):
        code, out, _ = said(monkeypatch, capsys, *arguments)
        assert code == 0 and all(f"\n  {name} " in out for name in COMMANDS)
    assert said(monkeypatch, capsys, "--version") == (0, f"pod-kv {pod.__version__}\n", "")
    code, out, error = said(monkeypatch, capsys, "trian")
    assert (code, out) == (2, "")
    assert error.startswith("error: pod trian: no such command; there are explore, data, train")


def test_a_list_may_be_read_in_part():
    """`pod eval --list-methods | head`"""
    command = [sys.executable, "-m", "pod", "eval", "--list-methods"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    running = subprocess.Popen(command, cwd=ROOT, **pipes)
    assert running.stdout is not None
    running.stdout.close()  # before anything is written
    assert "Traceback" not in running.communicate()[1] and running.returncode == 0


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself_under_its_name(name, monkeypatch, capsys):
    code, out, _ = said(monkeypatch, capsys, name, "--help")
    assert code == 0 and out.startswith(f"usage: pod {name}")


def test_every_launcher_is_a_command_of_the_package():
    started = re.compile(r'^    start\("(\w+)"\)$', re.MULTILINE)
    launched = [name for file in (ROOT / "launch").glob("*.py") for name in started.findall(file.read_text())]
    assert sorted(launched) == sorted({*COMMANDS} - {"doctor"})


def test_recipes_go_by_name_and_a_file_of_that_name_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = load_recipe("demo_tiny")
    assert found == load_recipe("demo_tiny.yaml") == load_recipe("configs/demo_tiny.yaml")
    assert load_recipe("paper/pod_3").output_dir == "runs/paper/pod_3"
    (tmp_path / "demo_tiny.yaml").write_text("output_dir: mine\n")
    assert load_recipe("demo_tiny.yaml").output_dir == "mine"
    with pytest.raises(ValueError, match=r"demo_tinny: cannot be read .*recipes that come along are in /"):
        load_recipe("demo_tinny")


def test_the_doctor_names_what_is_missing_and_how_to_get_it(monkeypatch, capsys):
    versions = {"torch": "2.13.0", "deepspeed": None, "numpy": "1.26.0"}
    monkeypatch.setattr(
        doctor.importlib.metadata,
        "requires",
        lambda _: ["torch>=2.11", "deepspeed>=0.19,<0.20", "numpy>=2", "jieba>=1; extra == 'eval'"],
    )
    monkeypatch.setattr(doctor, "installed", versions.get)
    code, out, _ = said(monkeypatch, capsys, "doctor")
    assert code == 1
    assert "ok   torch" in out and "bad  deepspeed       missing" in out and "jieba" not in out
    assert "\ndeepspeed: pip install 'deepspeed<0.20,>=0.19'\nnumpy: pip install 'numpy>=2'\n" in out


def test_the_doctor_says_where_pod_kv_is_not_installed(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "requirements", list)
    code, out, _ = said(monkeypatch, capsys, "doctor")
    assert code == 1 and "pod-kv is not installed in this Python" in out


def test_a_missing_package_is_one_line(monkeypatch, capsys):
    def missing(name: str):
        raise ModuleNotFoundError(f"No module named {name!r}", name="pydantic")

    monkeypatch.setattr("pod.commands.importlib.import_module", missing)
    code, _, err = said(monkeypatch, capsys, "train", "--help")
    assert code == 2 and err.startswith("error: the package pydantic is missing: pip install pod-kv")


def test_data_of_other_settings_is_told(tmp_path, capsys):
    """Once, by the first rank; rows that do not say what they were prepared with are taken."""
    recipe = load_recipe("demo_tiny", [f"output_dir={tmp_path}", "seed=5"])
    note_on_data(recipe)
    assert not capsys.readouterr().out
    settings = {"sources": ["stdlib:json"], "context_length": recipe.data.context_length}
    manifest = {"request": {"settings": settings, "seed": 0}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pod.data.rows.manifest.read_manifest", lambda folder: manifest)
        note_on_data(recipe)
        assert "other data.sources, seed than this recipe's" in capsys.readouterr().out
        patch.setenv("RANK", "1")
        note_on_data(recipe)
    assert not capsys.readouterr().out


def test_a_wheel_carries_code_recipes_and_data(tmp_path):
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("pod_kv-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    tracked = [
        file for file in (ROOT / "pod").rglob("*") if file.is_file() and "__pycache__" not in file.parts
    ]
    recipes = {
        f"pod/recipes/{file.relative_to(ROOT / 'configs')}" for file in (ROOT / "configs").rglob("*.yaml")
    }
    assert {str(file.relative_to(ROOT)) for file in tracked} | recipes <= names
    assert {name.split("/")[0] for name in names} == {"pod", f"pod_kv-{pod.__version__}.dist-info"}
    metadata = zipfile.ZipFile(wheel).read(f"pod_kv-{pod.__version__}.dist-info/METADATA").decode()
    assert "Provides-Extra: eval" in metadata and "flash-attn" not in metadata
