"""Kernels compiled ahead of time, for chips that need not be there, and what the compiled code needs of them.

``aot_cases`` lists what the package ships. This file imports without Triton; compiling needs it, and no GPU.
"""

import ast
import functools
import hashlib
import inspect
import subprocess
import tempfile
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

CAPABILITIES = (80, 90, 100)
"""A100, H100 and H200, B200."""
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Bytes of shared memory that one block may have.

Source: CUDA C++ Programming Guide, table of compute capabilities.
"""
INSTRUCTIONS = ("mma.sync", "wgmma", "tcgen05.mma", "tf32", "fma.rn.f32")
"""What ``CompiledCase.instructions`` looks for in the PTX."""


class AotCase(NamedTuple):
    """One kernel with one launch configuration.

    Attributes:
        name: unique in its module, such as ``"forward bf16 d128 sm_90"``.
        kernel: the ``@triton.jit`` function.
        types: argument → Triton type (``"*bf16"``, ``"*fp32"``, ``"*i32"``, ``"fp32"``, ``"i64"``);
            arguments that are neither here nor in ``constants`` are ``"i32"``.
        constants: values of the ``tl.constexpr`` arguments; also ``None`` for pointers that a variant does
            not use, and 1 for strides that are 1 in a model (Triton compiles both as constants when it
            launches).
        options: ``num_warps``, ``num_stages`` and other compiler options, as given at launch.
        hot: its speed decides; it must not spill registers.
        divisible: integer arguments that 16 divides in a model (strides, head_dim); pointers always count as
            aligned to 16 bytes.
        capabilities: the chips that run this configuration.
    """

    name: str
    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    options: dict[str, Any]
    hot: bool = True
    divisible: tuple[str, ...] = ()
    capabilities: tuple[int, ...] = CAPABILITIES


class CompiledCase(NamedTuple):
    """What a compiled kernel needs.

    Registers per thread, bytes of stack per thread (spilled registers), bytes of shared memory per block, and
    the instructions found.
    """

    registers: int
    stack_bytes: int
    shared_bytes: int
    instructions: set[str]


def compile_case(case: AotCase, capability: int) -> CompiledCase:
    """Compile for a chip of compute capability ``capability`` (90 = 9.0) and read what the binary needs.

    Raises:
        ValueError: types, constants or divisible arguments that the kernel does not have, or a kernel that
            was made with TRITON_INTERPRET=1 (nothing to compile).
    """
    import triton  # pyright: ignore[reportMissingImports]
    from triton.backends.compiler import GPUTarget  # pyright: ignore[reportMissingImports]
    from triton.compiler import ASTSource  # pyright: ignore[reportMissingImports]

    if not isinstance(case.kernel, triton.JITFunction):
        raise ValueError(f"case {case.name!r}: the kernel is not compiled code; unset TRITON_INTERPRET")
    signature = _signature(case)
    aligned = {i for i, (n, t) in enumerate(signature.items()) if t.startswith("*") or n in case.divisible}
    attributes = {(i,): [["tt.divisibility", 16]] for i in aligned}
    source = ASTSource(case.kernel, signature, dict(case.constants), attributes)
    binary = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(case.options))
    ptx = binary.asm["ptx"]
    if f".target sm_{capability}" not in ptx:
        raise AssertionError(f"case {case.name!r} was compiled for another chip than sm_{capability}")
    registers, stack = resources(binary.asm["cubin"])
    return CompiledCase(registers, stack, binary.metadata.shared, {i for i in INSTRUCTIONS if i in ptx})


def used_kernels(case: AotCase) -> set[str]:
    """Full names of the case's kernel and of the ``@triton.jit`` functions that it calls."""
    return {name for name, text in _reached(case.kernel).items() if text.startswith("@")}


def multiplies(case: AotCase) -> bool:
    """Whether the case's kernel has matrix products."""
    return any("tl.dot(" in text for text in _reached(case.kernel).values())


def fingerprint(case: AotCase) -> str:
    """SHA-256 of what the compiled code depends on.

    That is the kernel, the functions and constants that it uses, and the case. Comments, docstrings and line
    numbers do not count.
    """
    code = _reached(case.kernel)
    known = (sorted(part.items()) for part in (case.types, case.constants, case.options))
    settings = [*known, sorted(case.divisible)]
    return hashlib.sha256(repr([code, settings]).encode()).hexdigest()


@functools.cache
def _reached(kernel: Any) -> dict[str, str]:
    """Sources and global constants that a kernel reaches.

    Name → normalised source of a ``@triton.jit`` function and of the functions it calls; name → value of
    global constants.
    """
    found: dict[str, str] = {}
    waiting = [kernel]
    while waiting:
        function = waiting.pop().fn
        name = f"{function.__module__}.{function.__qualname__}"
        if name in found:
            continue
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        found[name] = ast.unparse(_without_docstrings(tree))
        for node in ast.walk(tree):
            value = _global_of(node, function.__globals__)
            if _is_kernel(value):
                waiting.append(value)
            elif isinstance(value, (bool, int, float, str)) or type(value).__name__ == "constexpr":
                found[ast.unparse(node)] = repr(value)
    return dict(sorted(found.items()))


def _is_kernel(value: Any) -> bool:
    return type(value).__name__ in ("JITFunction", "InterpretedFunction")


def _global_of(node: ast.AST, names: dict[str, Any]) -> Any:
    """The global that ``name`` or ``module.name`` stands for; None for anything else."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        owner = names.get(node.value.id)
        if isinstance(owner, ModuleType) and owner.__name__.startswith("pod."):
            return getattr(owner, node.attr, None)
    return None


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return tree


def _signature(case: AotCase) -> dict[str, str]:
    """Argument → type, in the kernel's order."""
    names = case.kernel.arg_names
    unknown = sorted({*case.types, *case.constants, *case.divisible} - set(names))
    if unknown:
        raise ValueError(
            f"case {case.name!r} names {', '.join(unknown)}; the kernel's arguments are {', '.join(names)}"
        )
    flags = {parameter.name for parameter in case.kernel.params if parameter.is_constexpr}
    missing = sorted(flags - set(case.constants))
    if missing:
        raise ValueError(f"case {case.name!r} gives no value to the constants {', '.join(missing)}")
    return {n: "constexpr" if n in case.constants else case.types.get(n, "i32") for n in names}


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack per thread, as ``cuobjdump`` of Triton's own package reads them."""
    import triton  # pyright: ignore[reportMissingImports]

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    usage = dict(word.split(":", 1) for word in done.stdout.split() if word.count(":") == 1)
    return int(usage["REG"]), int(usage["STACK"])
