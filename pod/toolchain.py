"""Whether this machine can compile C: Triton builds the code that starts its kernels at the first launch."""

import functools
import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path

_NEED = "Triton compiles what starts its kernels with it"


def obstacle() -> str | None:
    """Why Triton cannot compile and start kernels on this machine's GPU, and what to do; None if it can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: it comes with CUDA builds of PyTorch (pip install triton)"
    return missing()


@functools.cache
def missing() -> str | None:
    """What this machine lacks for Triton to start kernels, and what to do; None when all is there.

    It is looked up once per process, because decoding asks for it in every layer and for every token.
    """
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return f"no C compiler: {_NEED} (install gcc or set CC)"
    header = python_header()
    if not header.is_file():
        return f"no {header}: {_NEED} ({how_to_get_python_header()})"
    return None


def python_header() -> Path:
    """Where Triton looks for `Python.h`: under `posix_prefix` for Debian's own Python."""
    scheme = sysconfig.get_default_scheme()
    if scheme == "posix_local":
        scheme = "posix_prefix"
    return Path(sysconfig.get_paths(scheme)["include"]) / "Python.h"


def how_to_get_python_header() -> str:
    """`install python3.11-dev`, in the words of Debian and Ubuntu, and of Fedora."""
    return f"install python{sysconfig.get_python_version()}-dev, or python3-devel"
