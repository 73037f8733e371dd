"""What is imported when: help without torch, and the package's kernels and engine with whatever comes first."""

import subprocess
import sys
from pathlib import Path

import pytest

import pod

ROOT = Path(__file__).parents[1]
LAUNCHERS = sorted(path.stem for path in (ROOT / "launch").glob("*.py"))


def run(code, *arguments):
    done = subprocess.run([sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_help_needs_no_torch(launcher):
    code = (
        "import runpy, sys\nscript = sys.argv.pop(1)\nsys.argv = [script, '--help']\n"
        "try:\n    runpy.run_path(script, run_name='__main__')\nexcept SystemExit as end:\n    assert not end.code\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    assert "--config" in run(code, f"launch/{launcher}.py")


@pytest.mark.parametrize(
    "first", ["modeling.shipped.attend", "modeling.methods", "kernels.statistics", "engine.engine"]
)
def test_kernels_and_engine_are_there_whatever_is_imported_first(first):
    code = (
        f"import pod.{first}\nfrom pod.modeling.shipped.cache import PodCache\n"
        "from pod.modeling.shipped.decode import DECODERS\n"
        "assert 'triton' in DECODERS and PodCache.attach_engine is not None"
    )
    run(code)


def test_public_names():
    assert {name: getattr(pod, name).__name__ for name in pod.__all__} == {name: name for name in pod.__all__}
    assert set(pod.__all__) <= set(dir(pod))
    with pytest.raises(AttributeError, match="'pod' has no attribute 'load_modle'"):
        _ = pod.load_modle
