"""What is imported when.

Help works without torch, and the package's kernels and engine with whatever comes first.
"""

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
        "try:\n    runpy.run_path(script, run_name='__main__')\nexcept SystemExit as end:\n"
        "    assert not end.code\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    assert "--config" in run(code, f"launch/{launcher}.py")


def test_methods_and_their_rules_need_no_torch():
    code = (
        "import sys, pod\nfrom pod.eval.answer.methods import find_method\n"
        "from pod.registry.combine import chosen_methods\nfrom pod.notation import parse\n"
        "assert find_method('pod+snapkv@25%').takes_budget and 'snapkv' in pod.methods()\n"
        "assert chosen_methods(parse('imdc(snapkv)'))[1] == 'snapkv'\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    run(code)


@pytest.mark.parametrize(
    "first", ["modeling.model.attend", "modeling.methods", "kernels.statistics", "engine.decode_engine"]
)
@pytest.mark.slow
@pytest.mark.nightly
def test_kernels_and_engine_are_there_whatever_is_imported_first(first):
    code = (
        f"import pod.{first}\nfrom pod.modeling.model.cache import PodCache\n"
        "from pod.modeling.model.decode import DECODERS\n"
        "assert 'triton' in DECODERS and PodCache.attach_engine is not None"
    )
    run(code)


def test_public_names():
    assert {name: getattr(pod, name).__name__ for name in pod.__all__} == {name: name for name in pod.__all__}
    assert set(pod.__all__) <= set(dir(pod))
    with pytest.raises(AttributeError, match="'pod' has no attribute 'load_modle'"):
        _ = pod.load_modle


@pytest.mark.parametrize(
    "arguments",
    [
        ["--list-tasks"],
        ["--list-methods"],
        ["--dry-run", "--config", "configs/eval_smollm2.yaml", "--set", "eval.pod_model=/nowhere"],
        ["--dry-run", "--config", "configs/paper/d2o_2.yaml", "--tasks", "niah,gsm8k,mmlu"],
    ],
    ids=["tasks", "methods", "no export", "no model"],
)
def test_lists_and_a_dry_run_without_a_model_need_no_torch(arguments, tmp_path, monkeypatch):
    monkeypatch.setenv("POD_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    code = (
        "import runpy, sys\nsys.argv[0] = 'launch/run_eval.py'\n"
        "try:\n    runpy.run_path(sys.argv[0], run_name='__main__')\nexcept SystemExit as end:\n"
        "    assert not end.code\n"
        "assert not {'torch', 'transformers', 'lm_eval'} & set(sys.modules)"
    )
    assert "snapkv" in run(code, *arguments) or "niah" in run(code, *arguments)
