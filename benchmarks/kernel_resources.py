"""What every compiled kernel needs: registers, stack and shared memory on A100, H100/H200 and B200.

No GPU is needed.

    # some minutes; writes benchmarks/results/kernel_resources.json and .md
    python benchmarks/kernel_resources.py

`tests/kernels/test_kernels_compile.py` holds the kernels against the committed table: a changed kernel needs
a new one. Kernels that break a limit are named, and the table is not written.
"""

import argparse
import os
import sys
import time
from pathlib import Path

import triton
from aot import SHARED_LIMIT, AotCase, CompiledCase, fingerprint, multiplies
from aot_cases import all_cases, compile_many
from tqdm import tqdm

from pod.files import atomic_write_text, write_json
from pod.measure.machine import environment

RESULTS = Path(__file__).parent / "results" / "kernel_resources.json"
COMMAND = "python benchmarks/kernel_resources.py"
TENSOR_CORES = {"mma.sync", "wgmma", "tcgen05.mma"}
"""What a product of 16-bit tiles compiles to."""

KNOWN_SPILLS: dict[tuple[str, int], int] = {
    ("triton_decode: decode bf16 d128 g8 tau far", 90): 8,
    ("triton_decode: decode int4 bf16 d64 g4 group 32", 90): 16,
    ("triton_decode: decode int4 bf16 d64 g4 group 32 sink", 90): 24,
}
"""Hot kernels that do spill, and how many bytes per thread: not more.

One that no longer does must leave this list.
"""


def problems(name: str, case: AotCase, capability: int, found: CompiledCase) -> list[str]:
    """What is wrong with a compiled kernel, one line each."""
    where, out = f"{name} on sm_{capability}", []
    half = any(t in ("*bf16", "*fp16") for t in case.types.values())
    known = KNOWN_SPILLS.get((name, capability), 0)
    if case.hot and found.stack_bytes != known:
        out.append(f"{where}: {found.stack_bytes} bytes of stack, expected {known}: registers are spilled")
    if found.shared_bytes > SHARED_LIMIT[capability]:
        out.append(
            f"{where}: {found.shared_bytes} bytes of shared memory, at most {SHARED_LIMIT[capability]}"
        )
    if not half and "tf32" in found.instructions:
        out.append(f"{where}: TF32 products, expected full fp32")
    # of any chip: a decoded token's few queries do not fill the wide products of newer ones
    if half and case.hot and multiplies(case) and not TENSOR_CORES & found.instructions:
        out.append(f"{where}: none of {', '.join(sorted(TENSOR_CORES))} in the code")
    return out


def table(cases: dict[str, AotCase], compiled: dict[tuple[str, int], CompiledCase]) -> dict[str, dict]:
    """Kernel name → its launch configuration, and what it needs on each chip."""
    result = {}
    for name, case in cases.items():
        result[name] = {
            "fingerprint": fingerprint(case),
            "hot": case.hot,
            "num_warps": case.options.get("num_warps"),
            "num_stages": case.options.get("num_stages"),
        }
        for capability in case.capabilities:
            result[name][f"sm_{capability}"] = figures(compiled[name, capability])
    return result


def figures(found: CompiledCase) -> dict:
    """A compiled kernel as the table holds it."""
    return {**found._asdict(), "instructions": " ".join(sorted(found.instructions))}


def markdown(kernels: dict[str, dict], versions: str) -> str:
    """The table for readers: one line per kernel, one column per chip."""
    chips = [f"sm_{capability}" for capability in SHARED_LIMIT]
    lines = [
        "# Resources of the compiled kernels",
        "",
        "Registers per thread / bytes of stack per thread (0 = nothing spilled) / KiB of shared memory per "
        f"block. {versions}",
        f"Written by `{COMMAND}`; a test compares it with the kernels. **Bold**: "
        "kernels whose speed decides.",
        "Products: on sm_90, or on the one chip that a configuration is for.",
        "",
        f"| kernel | warps, stages | {' | '.join(chips)} | products |",
        "|---" * (3 + len(chips)) + "|",
    ]
    for name, entry in kernels.items():
        cells = [cell(entry[chip]) if chip in entry else "—" for chip in chips]
        shown = next(chip for chip in ("sm_90", "sm_100", "sm_80") if chip in entry)
        found = entry[shown]["instructions"].split()
        products = ", ".join(i for i in found if i in TENSOR_CORES) or "no tensor cores"
        title = f"**{name}**" if entry["hot"] else name
        lines.append(
            f"| {title} | {entry['num_warps']}, {entry['num_stages']} | {' | '.join(cells)} | {products} |"
        )
    return "\n".join(lines) + "\n"


def cell(needs: dict) -> str:
    """Registers, stack and shared memory in one cell."""
    return f"{needs['registers']} / {needs['stack_bytes']} / {needs['shared_bytes'] / 1024:.0f}"


def main() -> int:
    """Compile everything and write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="the JSON file; the .md stands beside it")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", help="only kernels whose name holds this: print the figures, write nothing")
    arguments = parser.parse_args()
    cases = {name: case for name, case in all_cases().items() if (arguments.only or "") in name}
    if not cases:
        print(f"error: no kernel's name holds {arguments.only!r}", file=sys.stderr)
        return 2
    wanted = [(name, capability) for name, case in cases.items() for capability in case.capabilities]
    began = time.perf_counter()
    compiled = dict(tqdm(compile_many(wanted, arguments.processes), total=len(wanted), desc="compiling"))
    print(
        f"compiled {len(wanted)} kernels of {len(cases)} configurations in "
        f"{time.perf_counter() - began:.0f} s"
    )
    wrong = [line for (n, c), found in compiled.items() for line in problems(n, cases[n], c, found)]
    if not arguments.only:
        wrong += [
            f"{n} on sm_{c}: in KNOWN_SPILLS, no such kernel" for n, c in KNOWN_SPILLS.keys() - compiled
        ]
    if arguments.only:
        print(markdown(table(cases, compiled), f"Triton {triton.__version__}."), *wrong, sep="\n")
        return bool(wrong)
    if wrong:
        print("\n".join(["error: the table is not written, because of", *wrong]), file=sys.stderr)
        return 1
    kernels, seen = table(cases, compiled), environment()
    header = {"schema": 1, "benchmark": "kernel_resources", "triton": triton.__version__}
    write_json(arguments.out, {**header, "date": seen["date"], "commit": seen["commit"], "kernels": kernels})
    atomic_write_text(arguments.out.with_suffix(".md"), markdown(kernels, f"Triton {triton.__version__}."))
    print(f"wrote {arguments.out} and {arguments.out.with_suffix('.md').name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
