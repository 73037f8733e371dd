"""Every Triton kernel is compiled for A100, H100/H200 and B200 without a GPU.

It is held against the committed table of its resources. The table holds a fingerprint of each kernel's code
and settings, so that no kernel changes unnoticed. Its figures are held against the limits, and the kernels of
the usual shape are compiled again. POD_COMPILE_ALL=1 compiles all (minutes).
"""

import importlib
import importlib.util
import json
import os
import re
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"),
]
ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "benchmarks" / "results" / "kernel_resources.json"
COMPILE_ALL = os.environ.get("POD_COMPILE_ALL") == "1"


@pytest.fixture(scope="module")
def load():
    """A script of benchmarks/, by its name; spawned processes import them by name too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield importlib.import_module


@pytest.fixture(scope="module")
def script(load):
    """benchmarks/kernel_resources.py, which writes the table."""
    return load("kernel_resources")


@pytest.fixture(scope="module")
def cases(load):
    return load("aot_cases").all_cases()


@pytest.fixture(scope="module")
def committed():
    return json.loads(TABLE.read_text())


def test_the_table_holds_exactly_these_kernels(cases, committed, script):
    table = {name: entry["fingerprint"] for name, entry in committed["kernels"].items()}
    now = {name: script.fingerprint(case) for name, case in cases.items()}
    changed = sorted(name for name in table.keys() | now.keys() if table.get(name) != now.get(name))
    assert not changed, f"{len(changed)} kernels changed, came or went; run: {script.COMMAND}"
    chips = {
        name: {key for key in entry if key.startswith("sm_")} for name, entry in committed["kernels"].items()
    }
    assert chips == {name: {f"sm_{c}" for c in case.capabilities} for name, case in cases.items()}


def test_the_page_says_what_the_table_says(committed, script):
    page = TABLE.with_suffix(".md").read_text(encoding="utf-8")
    assert page == script.markdown(committed["kernels"], f"Triton {committed['triton']}.")
    needs = {"registers": 9, "stack_bytes": 0, "shared_bytes": 0, "instructions": "fma.rn.f32 tcgen05.mma"}
    newest = {"hot": False, "num_warps": 4, "num_stages": 2, "sm_100": needs}
    assert script.markdown({"kernel": newest}, "").splitlines()[-1].endswith("| tcgen05.mma |")


def test_every_kernel_of_the_package_is_compiled(cases, load):
    import triton

    used = set().union(*(load("aot").used_kernels(case) for case in cases.values()))
    defined = set()
    for file in (ROOT / "pod" / "kernels").glob("triton_*.py"):
        module = importlib.import_module(f"pod.kernels.{file.stem}")
        functions = [x.fn for x in vars(module).values() if isinstance(x, triton.JITFunction)]
        defined |= {f"{f.__module__}.{f.__qualname__}" for f in functions if f.__module__ == module.__name__}
    assert defined
    assert not defined - used, f"in no AotCase: {sorted(defined - used)}"


def test_the_tables_figures_keep_the_limits(cases, committed, script):
    wrong = []
    for name, case in cases.items():
        for capability in case.capabilities:
            needs = dict(committed["kernels"][name][f"sm_{capability}"])
            found = script.CompiledCase(**needs | {"instructions": set(needs["instructions"].split())})
            wrong += script.problems(name, case, capability, found)
    assert not wrong
    assert script.KNOWN_SPILLS.keys() <= {
        (name, c) for name, case in cases.items() for c in case.capabilities
    }


def usual(name: str, case) -> bool:
    """What most models run: bf16, heads of 128, groups of 4.

    Of each kernel it is the variant that holds the others' parts.
    """
    others = r"\b(g8|tau|dense)\b"
    return case.hot and "bf16" in name and "d128" in name and not re.search(others, name)


@pytest.mark.nightly
@pytest.mark.slow
def test_compiled_kernels_have_the_tables_figures(cases, committed, script):
    import triton

    wanted = [(n, c) for n, case in cases.items() for c in case.capabilities if COMPILE_ALL or usual(n, case)]
    assert {c for _, c in wanted} == set(script.SHARED_LIMIT)
    compiled = dict(script.compile_many(wanted, processes=2))
    wrong = [
        line for (name, c), found in compiled.items() for line in script.problems(name, cases[name], c, found)
    ]
    assert not wrong
    if (
        triton.__version__ == committed["triton"]
    ):  # another compiler makes other code; the limits hold for it too
        old = {key: committed["kernels"][key[0]][f"sm_{key[1]}"] for key in wanted}
        new = {key: script.figures(found) for key, found in compiled.items()}
        assert new == old, f"the table is out of date; run: {script.COMMAND}"
