"""Ahead-of-time cases.

What is refused, what a fingerprint depends on, and which compiled kernels break a limit.
"""

import importlib
import importlib.util
import os
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"),
]
ROOT = Path(__file__).resolve().parents[2]
SOURCE = '''
import triton
import triton.language as tl

FACTOR: tl.constexpr = tl.constexpr(3)
UNUSED = 5

@triton.jit
def helper(x):
    """Twice."""
    return x * 2

@triton.jit
def other(x):
    return x

@triton.jit
def kernel(out, x, n, row, SIZE: tl.constexpr):
    # a comment
    columns = tl.arange(0, SIZE)
    tl.store(out + columns * row, helper(tl.load(x + columns, mask=columns < n)) * FACTOR, mask=columns < n)
'''


@pytest.fixture
def aot(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("aot")


@pytest.fixture
def case_of(aot, tmp_path):
    """`case_of(old, new)`: the kernel above with one piece of its module replaced."""
    loaded = []

    def make(old: str = "", new: str = "", **changes):
        assert old in SOURCE
        loaded.append(0)
        file = tmp_path / f"kernels_{len(loaded)}.py"
        file.write_text(SOURCE.replace(old, new) if old else SOURCE)
        spec = importlib.util.spec_from_file_location("kernels_under_test", file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        settings = {
            "types": {"out": "*fp32", "x": "*fp32"},
            "constants": {"SIZE": 128},
            "options": {"num_warps": 4},
        }
        return aot.AotCase("a case", module.kernel, **settings | changes)

    return make


def test_the_fingerprint_is_of_what_is_compiled(aot, case_of):
    first = aot.fingerprint(case_of())
    same = [
        case_of("    # a comment\n"),
        case_of('    """Twice."""\n', '    """Two times."""\n'),
        case_of("UNUSED = 5", "UNUSED = 6\n\n\n"),
        case_of("def other(x):\n    return x", "def other(x):\n    return x + 1"),
        case_of(hot=False, capabilities=(90,)),
        case_of(types={"x": "*fp32", "out": "*fp32"}),
    ]
    assert {aot.fingerprint(case) for case in same} == {first}
    changed = [
        case_of("x * 2", "x + 2"),
        case_of("tl.constexpr(3)", "tl.constexpr(4)"),
        case_of("columns * row", "columns + row"),
        case_of(constants={"SIZE": 64}),
        case_of(types={"out": "*fp32", "x": "*bf16"}),
        case_of(options={"num_warps": 8}),
        case_of(divisible=("row",)),
    ]
    assert len({first, *(aot.fingerprint(case) for case in changed)}) == 1 + len(changed)
    assert aot.used_kernels(case_of()) == {"kernels_under_test.kernel", "kernels_under_test.helper"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"types": {"ouy": "*fp32"}}, "names ouy; the kernel's arguments are out, x, n, row, SIZE"),
        ({"divisible": ("rows",)}, "names rows"),
        ({"constants": {}}, "no value to the constants SIZE"),
        ({"constants": {"SIZE": 128, "size": 1}}, "names size"),
    ],
)
def test_a_case_that_does_not_fit_its_kernel(aot, case_of, changes, message):
    with pytest.raises(ValueError, match=message):
        aot.compile_case(case_of(**changes), 90)
    with pytest.raises(ValueError, match="unset TRITON_INTERPRET"):
        aot.compile_case(case_of()._replace(kernel=lambda: None), 90)


def test_alignment_reaches_the_compiler(aot, case_of, monkeypatch):
    """Pointers are always aligned, integers only where the case says so."""
    import triton

    seen = []
    compile_it = triton.compile

    def recorded(source, **options):
        seen.append((dict(source.attrs), dict(source.signature), options["options"]))
        return compile_it(source, **options)

    monkeypatch.setattr(triton, "compile", recorded)
    needs = aot.compile_case(case_of(divisible=("row",)), 90)
    attributes, signature, options = seen[0]
    assert set(attributes) == {(0,), (1,), (3,)}
    assert signature == {"out": "*fp32", "x": "*fp32", "n": "i32", "row": "i32", "SIZE": "constexpr"}
    assert options == {"num_warps": 4}
    assert needs.stack_bytes == 0 and 8 <= needs.registers <= 64 and "wgmma" not in needs.instructions


def test_names_are_unique_in_a_module(case_of, monkeypatch):
    cases, case = importlib.import_module("aot_cases"), case_of()
    monkeypatch.setattr(cases, "CASES", {"triton_x": lambda: iter([case, case])})
    with pytest.raises(ValueError, match="the cases of triton_x have the name 'a case' twice"):
        cases.all_cases()


@pytest.mark.parametrize(
    ("name", "types", "hot", "capability", "needs", "message"),
    [
        ("triton_fused: f", "*bf16", True, 90, (255, 8, 0, {"wgmma"}), "8 bytes of stack"),
        ("triton_fused: f", "*bf16", False, 90, (255, 8, 0, {"wgmma"}), None),
        ("triton_decode: f", "*bf16", True, 80, (255, 0, 163 * 1024, {"mma.sync"}), None),
        ("triton_decode: f", "*bf16", True, 80, (255, 0, 163 * 1024 + 1, {"mma.sync"}), "shared memory"),
        ("triton_decode: f", "*bf16", True, 90, (255, 0, 227 * 1024, {"mma.sync"}), None),
        ("triton_decode: f", "*bf16", True, 90, (255, 0, 227 * 1024 + 1, {"mma.sync"}), "shared memory"),
        ("triton_decode: f", "*bf16", False, 100, (255, 0, 227 * 1024 + 1, set()), "shared memory"),
        ("triton_decode: f", "*fp16", True, 80, (9, 0, 0, {"mma.sync"}), None),
        (
            "triton_decode: f",
            "*bf16",
            True,
            90,
            (9, 0, 0, {"fma.rn.f32"}),
            "none of mma.sync, tcgen05.mma, wgmma",
        ),
        ("triton_fused: no product", "*bf16", True, 90, (9, 0, 0, {"fma.rn.f32"}), None),
        ("triton_decode: f", "*fp32", True, 90, (9, 0, 0, {"fma.rn.f32"}), None),
        ("triton_decode: f", "*fp32", False, 90, (9, 0, 0, {"wgmma", "tf32"}), "TF32"),
    ],
)
def test_limits_of_the_table(aot, case_of, name, types, hot, capability, needs, message):
    script = importlib.import_module("kernel_resources")
    product = ("* FACTOR", "* tl.dot(x, x)") if "no product" not in name else ("", "")
    case = case_of(*product, types={"x": types}, hot=hot)
    problems = script.problems(name, case, capability, aot.CompiledCase(*needs))
    assert len(problems) == (message is not None)
    assert message is None or (message in problems[0] and f"{name} on sm_{capability}" in problems[0])
