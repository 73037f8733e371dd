"""Runs a test file as a script under Triton's interpreter.

The interpreter is chosen when triton is imported: hence another process.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="Triton is not installed (CUDA builds of torch bring it)",
)


def broken() -> dict | None:
    """In that process, before the kernels: `{"broken": why}` or None.

    The first when the interpreter does not run here at all, else None.
    """
    import triton
    import triton.language as tl

    @triton.jit
    def count(out, n):
        total = 0
        for i in range(0, tl.minimum(n, 3)):
            total += i
        tl.store(out, total)

    try:
        count[(1,)](torch.zeros(1), 3)
    except triton.runtime.errors.InterpreterError as error:  # Triton 3.6 with NumPy 2.4
        return {"broken": f"the interpreter of Triton {triton.__version__} fails on a loop: {error}"}
    patch_once()
    return None


def patch_once() -> None:
    """Patch triton.language once per module.

    The interpreter patches it at every call of a helper in a kernel, a third of its time.
    """
    from triton.runtime import interpreter

    patch, patched = interpreter._patch_lang, set()

    def patch_new(fn):
        if id(fn.__globals__) not in patched:
            patched.add(id(fn.__globals__))
            patch(fn)
        return SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = patch_new


def answers(file: str) -> dict:
    """What `file`, started as a script, prints as JSON in its last line.

    Skips the test where the interpreter is broken.
    """
    settings = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    settings["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    result = subprocess.run([sys.executable, file], env=settings, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    content = json.loads(result.stdout.splitlines()[-1])
    if "broken" in content:
        pytest.skip(content["broken"])
    return content
