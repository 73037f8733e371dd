"""What Triton needs to start kernels: looked up once per process, and what is missing is said in one line."""

import importlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from interpreter import needs_triton

from pod import toolchain
from pod.commands import doctor


@pytest.fixture
def programs(monkeypatch, tmp_path):
    """Programs that are found; `.asked` for, in this order. `Python.h` is there."""
    found = SimpleNamespace(names={"gcc", "clang"}, asked=[], header=tmp_path / "Python.h")
    found.header.touch()

    def which(name):
        found.asked.append(name)
        return f"/usr/bin/{name}" if name in found.names else None

    monkeypatch.setattr(toolchain.shutil, "which", which)
    monkeypatch.setattr(toolchain, "python_header", lambda: found.header)
    monkeypatch.delenv("CC", raising=False)
    toolchain.missing.cache_clear()
    yield found
    toolchain.missing.cache_clear()


@needs_triton
def test_decoding_looks_up_the_compiler_once(programs, monkeypatch):
    triton_launch = importlib.import_module("pod.kernels.triton_launch")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    q = SimpleNamespace(dtype=torch.bfloat16, is_cuda=True, device=torch.device("cuda", 0))
    layers, tokens = 32, 3
    assert {triton_launch.unsupported(q) for _ in range(layers * tokens)} == {None}
    assert programs.asked == ["gcc"]


@pytest.mark.parametrize("names", [{"gcc"}, {"clang"}], ids=str)
def test_one_compiler_is_enough(programs, names):
    programs.names = names
    assert toolchain.missing() is None


def test_no_compiler(programs, monkeypatch):
    programs.names = set()
    assert toolchain.missing().startswith("no C compiler: ")
    toolchain.missing.cache_clear()
    monkeypatch.setenv("CC", "/opt/bin/cc")
    assert toolchain.missing() is None


def test_a_missing_header_is_named_with_its_package(programs):
    programs.header.unlink()
    said = toolchain.missing()
    assert said.startswith(f"no {programs.header}: ") and "\n" not in said
    assert "(install python3." in said


def test_the_doctor_knows_the_header(programs, capsys):
    doctor.options()
    assert f"ok   Python.h        {programs.header}\n" in capsys.readouterr().out
    programs.header.unlink()
    doctor.options()
    assert (
        "-    Python.h        missing; Triton's kernels on a GPU need it: install" in capsys.readouterr().out
    )


def test_the_header_of_debians_python_is_not_in_its_local_folder(monkeypatch):
    """As Triton has it (`triton.runtime.build`): the scheme `posix_local` names a folder without headers."""
    monkeypatch.setattr(toolchain.sysconfig, "get_default_scheme", lambda: "posix_local")
    monkeypatch.setattr(toolchain.sysconfig, "get_paths", lambda scheme: {"include": f"/{scheme}/python3"})
    assert toolchain.python_header() == Path("/posix_prefix/python3/Python.h")
