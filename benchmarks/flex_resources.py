"""What FlexAttention's kernels need on A100, H100 and B200: registers, stack, shared memory. It needs no GPU.

    python benchmarks/flex_resources.py        # 20 minutes; writes benchmarks/results/flex_resources.json

PyTorch's compiler writes these kernels for `pod.kernels.flex`, forward and backward, with and without shapes
that it knows. It does so here for a chip that is not there: the function is traced on the CPU, the graphs'
devices are changed to CUDA, the compiler is told the chip's properties, and Triton compiles what it wrote.
Nothing is run.
"""

import argparse
import ctypes
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from aot import CAPABILITIES, INSTRUCTIONS, SHARED_LIMIT, resources
from torch.utils._pytree import tree_map
from tqdm import tqdm

from pod.files import write_json
from pod.kernels import flex
from pod.measure.machine import environment
from pod.modeling.model.attend import Segments, Visibility

RESULTS = Path(__file__).parent / "results" / "flex_resources.json"
CASES = [("float32", 64), ("float32", 80), ("float32", 128), ("float32", 256), ("bfloat16", 128)]
TOKENS, KV_HEADS, GROUPS = 512, 2, 4
GUARD = """#include <c10/core/impl/DeviceGuardImplInterface.h>
using Guard = c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>;
namespace { c10::impl::DeviceGuardImplRegistrar registered(c10::DeviceType::CUDA, new Guard()); }
"""
"""What lets a build of PyTorch without CUDA name a CUDA device."""
CONSTANTS = ("BLOCK_M", "BLOCK_N", "BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2", "IS_DIVISIBLE")


# -- a chip that is not there -------------------------------------------------------------------------------


def load_guard() -> None:
    """Needs g++."""
    torch_folder = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "guard.cpp", Path(folder) / "guard.so"
        source.write_text(GUARD)
        includes, libraries = f"-I{torch_folder / 'include'}", f"-L{torch_folder / 'lib'}"
        command = [
            "g++",
            "-shared",
            "-fPIC",
            "-std=c++20",
            includes,
            source,
            libraries,
            "-lc10",
            "-o",
            library,
        ]
        subprocess.run(command, check=True)
        ctypes.CDLL(str(library))


def pretend(capability: int) -> None:
    """Tell PyTorch and Triton of a chip, for the rest of this process."""
    import triton  # pyright: ignore[reportMissingImports]
    from torch._dynamo.device_interface import CudaInterface
    from torch.utils import _triton
    from triton.backends.compiler import GPUTarget  # pyright: ignore[reportMissingImports]

    load_guard()
    major, minor = divmod(capability, 10)
    chip = types.SimpleNamespace(
        name="none",
        gcnArchName="none",
        major=major,
        minor=minor,
        multi_processor_count=108,
        warp_size=32,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        total_memory=80 * 2**30,
        shared_memory_per_block_optin=SHARED_LIMIT[capability],
        L2_cache_size=40 * 2**20,
    )
    known = {
        "get_device_properties": lambda device=None: chip,
        "get_device_capability": lambda device=None: (major, minor),
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "_exchange_device": lambda index: 0,
        "_maybe_exchange_device": lambda index: 0,
        "synchronize": lambda device=None: None,
        "get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda state, device=None: None,
    }
    for name, function in known.items():
        setattr(torch.cuda, name, function)
        if hasattr(CudaInterface, name):
            setattr(CudaInterface, name, staticmethod(function))
    _triton.has_triton = lambda *arguments: True
    driver = types.SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", capability, 32),
        get_active_torch_device=lambda: torch.device("cuda", 0),
        get_current_device=lambda: 0,
    )
    triton.runtime.driver.set_active(driver)  # type: ignore[arg-type]


# -- graphs -------------------------------------------------------------------------------------------------


def traced(dtype: torch.dtype, head_dim: int, dynamic: bool) -> list[tuple[Any, list]]:
    """The forward and the backward graph of a layer whose heads follow, with their inputs, on the CPU."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch import config
    from torch._functorch.aot_autograd import make_boxed_func  # pyright: ignore[reportPrivateImportUsage]
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table
    from torch.nn.attention import flex_attention as torch_flex

    graphs = []

    def keep(graph: Any, inputs: Any) -> Callable:
        graphs.append((graph, list(inputs)))
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    torch_flex._validate_device = lambda query, key, value: None  # it refuses gradients on the CPU
    config.force_non_lazy_backward_lowering = True
    n = TOKENS - 3 if dynamic else TOKENS
    layout = flex.lay_out(Segments.whole(1, n, n), (1, n, n), torch.device("cpu"))
    see = Visibility(16, 100)
    masks = [flex.block_mask(flex.runs_of(layout, see, is_far), n) for is_far in (False, True)]

    def made(heads: int) -> torch.Tensor:
        x = torch.zeros(1, n, KV_HEADS * heads, head_dim, dtype=dtype).transpose(1, 2).requires_grad_()
        return flex._sequence(x, heads, None)

    compiled = torch.compile(
        flex.attend_to_places,
        fullgraph=True,
        dynamic=dynamic,
        backend=aot_autograd(
            fw_compiler=keep,
            bw_compiler=keep,
            decompositions=select_decomp_table(),
            partition_fn=min_cut_rematerialization_partition,
        ),
    )
    compiled([made(GROUPS), made(GROUPS)], [made(1), made(1)], made(1), masks, head_dim**-0.5)
    return graphs


def on_cuda(graph: Any, inputs: list, mode: Any) -> list:
    """Change the devices of a graph and its parts; returns its inputs there, without memory."""
    device = torch.device("cuda", 0)

    def moved(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        with mode:
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)

    for part in graph.modules():
        for node in getattr(part, "graph", torch.fx.Graph()).nodes:
            if node.kwargs.get("device") is not None:
                node.kwargs = {**node.kwargs, "device": device}
            if "val" in node.meta:
                node.meta["val"] = tree_map(moved, node.meta["val"])
            for name in ("tensor_meta", "example_value", "eager_input_vals"):
                node.meta.pop(name, None)
        if hasattr(part, "recompile"):
            part.recompile()
    return [moved(x) for x in inputs]


class Written(BaseException):
    """The compiler has written its code: args[0]. No error, so that nothing on the way wraps it."""


def written(graph: Any, inputs: list, is_backward: bool) -> str:
    """The compiler's code for a graph."""
    from torch._guards import TracingContext, detect_fake_mode, tracing
    from torch._inductor import config, fx_utils
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.graph import GraphLowering

    def stop(self: Any) -> None:
        code, _ = self.codegen()
        raise Written(code.value)

    config.compile_threads, config.fx_graph_cache = 1, False
    fx_utils.FakeTensorUpdater.incremental_update = lambda self, *arguments, **options: 0
    GraphLowering._compile_to_module = stop  # type: ignore[method-assign]
    mode = detect_fake_mode(inputs)
    moved = on_cuda(graph, inputs, mode)
    try:
        with tracing(TracingContext(mode)):
            compile_fx_inner(graph, moved, is_backward=is_backward)
    except Written as found:
        return found.args[0]
    raise AssertionError("the compiler wrote nothing")


# -- kernels ------------------------------------------------------------------------------------------------


def kernels(code: str) -> Iterator[tuple[str, str]]:
    """Name and source of the kernels of attention in the compiler's code."""
    for found in re.finditer(r"async_compile\.triton\('(\w+)', '''(.*?)''', device_str", code, re.S):
        if "FLOAT32_PRECISION" in found[2]:
            yield found[1], found[2]


def compiled(name: str, source: str, capability: int, folder: Path) -> dict[str, Any]:
    """What a kernel needs on a chip."""
    import triton  # pyright: ignore[reportMissingImports]
    from triton.backends.compiler import GPUTarget  # pyright: ignore[reportMissingImports]
    from triton.compiler import ASTSource  # pyright: ignore[reportMissingImports]

    launch: dict[str, Any] = {}
    decorator, begin = source.index("@triton_heuristics"), source.index("@triton.jit")
    file = folder / f"{name}.py"
    head = source[:decorator].replace("triton_helpers.set_driver_to_gpu()", "")
    file.write_text(head + source[begin:])
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    noted = types.SimpleNamespace(template=lambda **options: launch.update(options))
    exec(source[decorator + 1 : begin], {**vars(module), "triton_heuristics": noted})
    kernel, about = getattr(module, name), launch["triton_meta"]
    signature = {argument: about["signature"].get(argument, "constexpr") for argument in kernel.arg_names}
    program = ASTSource(kernel, signature, dict(about.get("constants", {})), about["configs"][0])
    options = {key: launch[key] for key in ("num_warps", "num_stages")}
    binary = triton.compile(program, target=GPUTarget("cuda", capability, 32), options=options)
    registers, stack = resources(binary.asm["cubin"])
    constants = {key: re.search(rf"\b{key} : tl.constexpr = (\w+)", source) for key in CONSTANTS}
    return {
        **options,
        **{key: json.loads(found[1].lower()) for key, found in constants.items() if found},
        "registers": registers,
        "stack_bytes": stack,
        "shared_bytes": binary.metadata.shared,
        "instructions": " ".join(i for i in INSTRUCTIONS if i in binary.asm["ptx"]),
    }


def rows_of(capability: int) -> Iterator[dict[str, Any]]:
    """One row per kernel on one chip."""
    pretend(capability)
    for dtype, head_dim in CASES:
        for dynamic in (False, True) if head_dim == 128 else (False,):
            torch.cuda.is_available = lambda: False  # while it is traced on the CPU
            graphs = traced(getattr(torch, dtype), head_dim, dynamic)
            torch.cuda.is_available = lambda: True
            for is_backward, (graph, inputs) in enumerate(graphs):
                case = {"dtype": dtype, "head_dim": head_dim, "shapes": "any" if dynamic else "known"}
                case |= {"pass": "backward" if is_backward else "forward", "capability": capability}
                with tempfile.TemporaryDirectory() as folder:
                    for name, source in kernels(written(graph, inputs, bool(is_backward))):
                        yield case | compiled(name, source, capability, Path(folder))


def problems(row: dict[str, Any]) -> list[str]:
    """What would keep a kernel from running, or from computing in full fp32."""
    found = []
    if row["shared_bytes"] > SHARED_LIMIT[row["capability"]]:
        found.append(f"{row['shared_bytes']} bytes of shared memory")
    if row["dtype"] == "float32" and "tf32" in row["instructions"]:
        found.append("TF32 products")
    return found


def main() -> int:
    """Each chip in a process of its own."""
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--out", type=Path, default=RESULTS)
    words.add_argument(
        "--capability", type=int, choices=CAPABILITIES, help="print the rows of this chip only"
    )
    arguments = words.parse_args()
    if arguments.capability is not None:
        for row in rows_of(arguments.capability):
            print("row " + json.dumps(row), flush=True)
        return 0
    rows: list[dict[str, Any]] = []
    for capability in tqdm(CAPABILITIES, desc="chips"):
        command = [sys.executable, "-W", "ignore", __file__, "--capability", str(capability)]
        done = subprocess.run(command, env=os.environ, stdout=subprocess.PIPE, text=True, check=True)
        rows += [json.loads(line[4:]) for line in done.stdout.splitlines() if line.startswith("row ")]
    wrong = [f"{row}: {problem}" for row in rows for problem in problems(row)]
    if wrong:
        print("\n".join(["error: the table is not written, because of", *wrong]), file=sys.stderr)
        return 1
    seen = environment()
    header = {"schema": 1, "benchmark": "flex_resources", "versions": seen["versions"]}
    write_json(arguments.out, {**header, "date": seen["date"], "commit": seen["commit"], "rows": rows})
    print(f"wrote {arguments.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
