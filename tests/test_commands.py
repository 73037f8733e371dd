"""The command `pod`: what it dispatches, recipes by name, what the doctor says, and what a wheel carries."""

import importlib
import os
import re
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import psutil
import pytest

import pod
from pod.commands import COMMANDS, SUBCOMMANDS, doctor, main, note_on_data
from pod.recipe import load_recipe, recipe_names

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
    assert error.startswith("error: there is no command 'trian' (did you mean 'train'?)")


def test_the_overview_lists_every_subcommand(monkeypatch, capsys):
    _, out, _ = said(monkeypatch, capsys, "--help")
    for name in SUBCOMMANDS:
        assert f"\n    {name} " in out


@pytest.mark.parametrize("words", [[], ["train"], ["data", "inspect"], ["eval"]])
def test_help_as_a_command_is_the_help_of_that_command(words, monkeypatch, capsys):
    asked = said(monkeypatch, capsys, *words, "--help")
    assert asked[0] == 0 and asked[1].startswith(f"usage: {' '.join(['pod', *words])}")
    assert said(monkeypatch, capsys, "help", *words) == asked


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["help", "trian"], "there is no command 'trian' (did you mean 'train'?)"),
        (["train", "--confg", "demo"], "unknown argument --confg (did you mean '--config'?)"),
        (["train", "-c", "demo_tinny"], "no recipe of this name (did you mean 'demo_tiny'?)"),
        (["data", "verfy", "runs"], "there is no file or folder 'verfy' (did you mean `pod data verify`?)"),
        (["recipes", "paper/pod3"], "there is no recipe 'paper/pod3' (did you mean 'paper/pod_3'?)"),
        (["recipes", "--copy", "x.yaml"], "--copy: name the recipe to copy"),
        (["recipes", "demo", "x"], "unknown argument x"),
        (["eval", "--list-methods", "snapk"], "unknown method 'snapk' (did you mean 'snapkv'?)"),
        (["eval", "--list-tasks", "nih"], "unknown task 'nih' (did you mean 'niah'?)"),
        (["train", "-c", "demo_tiny", "--ranks", "4"], "--ranks is for estimates only: add --dry-run"),
        (["train", "-c", "demo_tiny", "--device", "h100"], "--device is for estimates only: add --dry-run"),
        (["data", "-q", "-v"], "not allowed with"),
        (["version"], "there is no command 'version' (did you mean 'pod --version'?)"),
        (
            ["train", "--trian.lr=1"],
            "unknown argument --trian.lr=1 (settings of the recipe are changed with --set "
            "trian.lr=VALUE); `pod train",
        ),
        (["recipes", "demo", "--copy.to"], "unknown argument --copy.to (did you mean '--copy'?)"),
        (
            ["recipes", "demo", "--copy", "nope/x.yaml"],
            "--copy nope/x.yaml: the folder nope does not exist: create it, or choose another place",
        ),
    ],
)
def test_a_mistake_is_one_line_with_a_suggestion(arguments, message, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    code, out, error = said(monkeypatch, capsys, *arguments)
    assert (code, out) == (2, "")
    assert error.startswith("error: ") and message in error and error.count("\n") == 1
    assert not any(tmp_path.iterdir())


def test_lists_show_what_is_named_and_nothing_else(monkeypatch, capsys):
    code, out, _ = said(monkeypatch, capsys, "eval", "--list-methods", "snapkv", "h2o,d2o")
    names = [line.split()[0] for line in out.splitlines() if re.match(r"  \w", line)]
    names = [name.partition("@")[0] for name in names]
    assert (code, names) == (0, ["snapkv", "h2o", "d2o"])
    code, out, _ = said(monkeypatch, capsys, "eval", "--list-tasks", "niah")
    assert (code, out.startswith("niah: "), "passkey" in out) == (0, True, False)
    code, out, _ = said(monkeypatch, capsys, "eval", "--list-tasks", "pod_longbench_trec")
    assert code == 0 and "pod_longbench_trec" in out and "Options of every task of lm-eval" in out


def test_recipes_are_listed_shown_and_copied(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    code, out, _ = said(monkeypatch, capsys, "recipes")
    listed = re.findall(r"^  (\S+)  +\S", out, re.MULTILINE)
    assert code == 0 and listed == recipe_names() and len(listed) > 50
    text = (ROOT / "configs" / "demo.yaml").read_text(encoding="utf-8")
    assert said(monkeypatch, capsys, "recipes", "demo") == (0, text, "")
    code, out, _ = said(monkeypatch, capsys, "recipes", "demo", "--copy", "mine.yaml")
    assert code == 0 and (tmp_path / "mine.yaml").read_text(encoding="utf-8") == text
    assert load_recipe("mine.yaml") == load_recipe("demo")
    code, _, error = said(monkeypatch, capsys, "recipes", "demo_tiny", "--copy", "mine.yaml")
    assert code == 2 and "mine.yaml: this file exists already" in error
    assert (tmp_path / "mine.yaml").read_text(encoding="utf-8") == text


def test_the_copy_of_a_recipe_that_extends_another_is_that_recipe(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    code, _, error = said(monkeypatch, capsys, "recipes", "llama3_8b_32k_cla", "--copy", "mine.yaml")
    assert code == 0, error
    assert load_recipe("mine.yaml") == load_recipe("llama3_8b_32k_cla")


def test_quiet_and_verbose(monkeypatch, capsys, tmp_path):
    """Quiet shows nothing on the screen but errors, in processes of the command as well.

    Verbose shows errors with their traceback.
    """
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.delenv("POD_TRACEBACK", raising=False)

    def fails(recipe):
        print("a result")
        raise ValueError("no such thing")

    monkeypatch.setattr("pod.commands.bench.main", fails)
    for option, expected, has_traceback in (("-q", "", False), ("-v", "a result\n", True)):
        code, out, error = said(monkeypatch, capsys, "bench", option, "--set", f"output_dir={tmp_path}")
        assert (code, out) == (2, expected) and error.endswith("error: no such thing\n")
        assert ("Traceback" in error) == has_traceback
    monkeypatch.setitem(os.environ, "POD_VERBOSITY", "loud")
    assert (
        "POD_VERBOSITY is 'loud'" in said(monkeypatch, capsys, "bench", "--set", f"output_dir={tmp_path}")[2]
    )


@pytest.mark.slow
def test_a_quiet_command_prints_nothing(tmp_path):
    command = [sys.executable, "-m", "pod", "data", "-q", "stdlib:json", "--set", f"output_dir={tmp_path}"]
    command += ["--set", "model.path=package:tiny", "--set", "data.target_tokens=20000"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (tmp_path / "data" / "manifest.json").is_file()


def heed_sigint():
    """A shell has the jobs that it starts with `&` ignore SIGINT, and the tests may be such a job."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def reading_data(tmp_path):
    """`pod data` whose two workers are reading: they wait until there is a file `go`, at most a minute."""
    sources, flag, go = tmp_path / "text", tmp_path / "reading", tmp_path / "go"
    sources.mkdir()
    for number in range(8):
        (sources / f"{number}.txt").write_text("words and more words\n" * 200)
    (tmp_path / "slow.py").write_text(
        f"import pathlib, time\ndef keep(document):\n    pathlib.Path({str(flag)!r}).touch()\n"
        "    end = time.time() + 60\n"
        f"    while time.time() < end and not pathlib.Path({str(go)!r}).exists():\n        time.sleep(0.05)\n"
        "    return True\n"
    )
    command = [sys.executable, "-m", "pod", "data", str(sources), "--set", f"output_dir={tmp_path / 'run'}"]
    for setting in (
        "model.path=package:tiny",
        "data.target_tokens=20000",
        "data.workers=2",
        "data.document_filter=slow:keep",
    ):
        command += ["--set", setting]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    running = subprocess.Popen(
        command, cwd=ROOT, env=environment, start_new_session=True, preexec_fn=heed_sigint, **pipes
    )
    while not flag.exists():
        assert running.poll() is None, running.communicate()
        time.sleep(0.1)
    return running


def test_workers_leave_ctrl_c_to_the_command(tmp_path):
    """Only the command answers to SIGINT. A worker that did would print a traceback or lose its work."""
    running = reading_data(tmp_path)
    for worker in psutil.Process(running.pid).children():
        worker.send_signal(signal.SIGINT)
    (tmp_path / "go").touch()
    _, error = running.communicate(timeout=60)
    assert running.returncode == 0 and "Traceback" not in error
    assert (tmp_path / "run" / "data" / "manifest.json").is_file()


def test_ctrl_c_is_exit_code_130_and_leaves_no_process_and_no_half_of_a_file(tmp_path):
    """As a terminal does it: the command and its workers get SIGINT, here while the workers read."""
    running = reading_data(tmp_path)
    os.killpg(running.pid, signal.SIGINT)
    _, error = running.communicate(timeout=60)
    assert running.returncode == 130 and "Traceback" not in error
    assert error.splitlines()[-1] == "interrupted; run the same command again to continue"
    with pytest.raises(ProcessLookupError):  # no worker is left
        os.killpg(running.pid, 0)
    assert not (tmp_path / "run" / "data").exists()
    assert not list((tmp_path / "run").rglob("*.tmp*"))


@pytest.mark.parametrize(
    ("words", "continues"),
    [
        (["data", "text.txt"], True),
        (["explore"], True),
        (["train", "-c", "demo"], True),
        (["eval"], True),
        (["demo"], True),
        (["data", "verify", "runs"], False),
        (["eval", "lm-eval"], False),
        (["export"], False),
        (["bench"], False),
    ],
)
def test_ctrl_c_tells_which_commands_continue(words, continues, monkeypatch, capsys):
    def stopped():
        raise KeyboardInterrupt

    module = importlib.import_module(f"pod.commands.{COMMANDS[words[0]][0]}")
    monkeypatch.setattr(module, "start", stopped, raising=False)
    expected = "interrupted; run the same command again to continue\n" if continues else "interrupted\n"
    assert said(monkeypatch, capsys, *words) == (130, "", expected)


@pytest.mark.parametrize(
    ("is_finished", "rank", "expected"),
    [
        (True, "0", "next: pod export --config demo_tiny --set 'output_dir=a run'\n"),
        (False, "0", "next: run the same command again, which continues the training\n"),
        (True, "1", ""),
    ],
)
def test_training_names_the_next_command(is_finished, rank, expected, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr("pod.training.run.start.train", lambda recipe, passkeys: is_finished)
    words = ("train", "-c", "demo_tiny", "--max-hours", "2", "--set", "output_dir=a run")
    assert said(monkeypatch, capsys, *words) == (0, expected, "")


def test_what_the_export_will_refuse_is_refused_before_training(monkeypatch, capsys, tmp_path):
    import pod

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pod.training.run.start.train", lambda recipe, passkeys: pytest.fail("it trains"))
    pod.SharingPlan([[layer, None] for layer in range(4)]).save(tmp_path / "plan.json")
    changes = ["export.format=vllm", "model.path=package:tiny", f"model.plan={tmp_path / 'plan.json'}"]
    words = ["train", *(word for change in changes for word in ("--set", change))]
    why = "the plan gives heads of layer 0 different roles, and serving engines keep whole layers"
    code, _, error = said(monkeypatch, capsys, *words)
    assert code == 2 and f"error: export.format is vllm, which will refuse the trained model: {why}" in error
    code, output, _ = said(monkeypatch, capsys, *words, "--dry-run")
    assert code == 0 and f"note: export.format is vllm, which will refuse the trained model: {why}" in output


def test_a_plan_for_vllm_is_checked_before_training_whatever_the_format(monkeypatch, capsys, tmp_path):
    """README's way gives the format to `pod export` alone."""
    import pod

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pod.training.run.start.train", lambda recipe, passkeys: pytest.fail("it trains"))
    lead = [[layer, None] for layer in range(4)]
    pod.SharingPlan(lead, provenance={"target": "vllm"}).save(tmp_path / "plan.json")
    words = ["train", "--set", "model.path=package:tiny", "--set", f"model.plan={tmp_path / 'plan.json'}"]
    why = "the plan was made for vLLM, whose export will refuse the trained model: the plan gives heads of"
    code, _, error = said(monkeypatch, capsys, *words)
    assert code == 2 and why in error
    code, output, _ = said(monkeypatch, capsys, *words, "--dry-run")
    assert code == 0 and f"note: {why}" in output


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
    assert sorted(launched) == sorted({*COMMANDS} - {"doctor", "recipes", "report"})


def test_recipes_go_by_name_and_a_file_of_that_name_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = load_recipe("demo_tiny")
    assert found == load_recipe("demo_tiny.yaml") == load_recipe("configs/demo_tiny.yaml")
    assert load_recipe("paper/pod_3").output_dir == "runs/paper/pod_3"
    (tmp_path / "demo_tiny.yaml").write_text("output_dir: mine\n")
    assert load_recipe("demo_tiny.yaml").output_dir == "mine"
    with pytest.raises(ValueError, match=r"demo_tinny: there is no such file, .*did you mean 'demo_tiny'"):
        load_recipe("demo_tinny")


def test_the_doctor_names_what_is_missing_and_how_to_get_it(monkeypatch, capsys):
    versions = {"torch": "2.13.0", "deepspeed": None, "numpy": "1.26.0"}
    monkeypatch.setattr(
        doctor.importlib.metadata,
        "requires",
        lambda _: ["torch>=2.11", "deepspeed>=0.19,<0.20", "numpy>=2", "jieba>=1; extra == 'eval'"],
    )
    monkeypatch.setattr(doctor, "installed", versions.get)
    monkeypatch.setattr(doctor, "dependencies_of_clone", list)
    code, out, _ = said(monkeypatch, capsys, "doctor")
    assert code == 1
    assert "ok   torch" in out and "bad  deepspeed       missing" in out and "jieba" not in out
    assert "\ndeepspeed: pip install 'deepspeed<0.20,>=0.19'\nnumpy: pip install 'numpy>=2'\n" in out


def test_the_doctor_names_the_backends_of_attention():
    assert doctor.attention_backends() == (
        "auto takes the first of grouped, flash, flex, reference that can; by name only: triton"
    )


def test_the_doctor_knows_a_package_that_a_clone_requires_since_it_was_installed(monkeypatch, capsys):
    """`pip install -e` wrote the metadata when sentencepiece was not required yet."""
    found = doctor.importlib.metadata.requires("pod-kv")
    before = [line for line in found if not line.startswith("sentencepiece")]
    monkeypatch.setattr(doctor.importlib.metadata, "requires", lambda _: before)
    version_of = doctor.installed
    monkeypatch.setattr(
        doctor, "installed", lambda name: None if name == "sentencepiece" else version_of(name)
    )
    code, out, _ = said(monkeypatch, capsys, "doctor")
    assert code == 1 and "bad  sentencepiece   missing" in out
    assert out.endswith("\nsentencepiece: pip install 'sentencepiece>=0.2'\n")


def test_the_doctor_says_where_pod_kv_is_not_installed(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "requirements", list)
    code, out, _ = said(monkeypatch, capsys, "doctor")
    assert code == 1 and "pod-kv is not installed in this Python" in out


def test_a_missing_package_is_one_line(monkeypatch, capsys):
    def missing(name: str):
        raise ModuleNotFoundError(f"No module named {name!r}", name="pydantic")

    monkeypatch.setattr("pod.commands.importlib.import_module", missing)
    code, _, err = said(monkeypatch, capsys, "train", "--help")
    assert code == 2 and err.startswith(
        "error: the package pydantic is missing: run `pip install .` in a clone"
    )


def test_data_of_other_settings_is_told(tmp_path, capsys):
    """Once, by the first rank; rows that do not say what they were prepared with are taken."""
    recipe = load_recipe("demo_tiny", [f"output_dir={tmp_path}", "seed=5"])
    note_on_data(recipe)
    assert not capsys.readouterr().err
    settings = {"sources": ["stdlib:json"], "context_length": recipe.data.context_length}
    manifest = {"request": {"settings": settings, "seed": 0}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pod.data.rows.manifest.read_manifest", lambda folder: manifest)
        note_on_data(recipe)
        assert "with a different data.sources, seed than this recipe has" in capsys.readouterr().err
        patch.setenv("RANK", "1")
        note_on_data(recipe)
    assert not capsys.readouterr().err


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
    assert {name.split("/")[0] for name in names} == {
        "pod",
        "pod_vllm",
        f"pod_kv-{pod.__version__}.dist-info",
    }
    metadata = zipfile.ZipFile(wheel).read(f"pod_kv-{pod.__version__}.dist-info/METADATA").decode()
    assert "Provides-Extra: eval" in metadata and "Provides-Extra: gpu" in metadata
    flash = [line for line in metadata.splitlines() if line.startswith("Requires-Dist: flash")]
    assert len(flash) == 1 and "flash-attn-4" in flash[0] and flash[0].endswith("extra == 'gpu'")
