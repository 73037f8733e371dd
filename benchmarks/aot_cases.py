"""What ``aot`` compiles: one ``AotCase`` for each launch configuration that the Triton modules ship, arguments typed as in a model.

A test records what models launch and holds these types against it.
"""

import functools
import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
import triton
from aot import AotCase, CompiledCase, compile_case

from pod.kernels import triton_decode, triton_decode_packed, triton_fused
from pod.kernels.triton_decode import ALL, FIRST, SECOND

SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def decode_cases() -> Iterator[AotCase]:
    """bf16 and fp16, head_dim 64 and 128, groups of 1 to 8, with and without threshold."""
    for dtype, head_dim, groups in (
        (torch.bfloat16, 128, 4),
        (torch.bfloat16, 128, 8),
        (torch.bfloat16, 64, 4),
        (torch.bfloat16, 64, 1),
        (torch.float16, 128, 4),
        (torch.float32, 128, 4),
    ):
        shape = triton_decode.tile(dtype, head_dim, groups)
        name = f"{SHORT[dtype]} d{head_dim} g{groups}"
        for part, suffix in ((ALL, ""), (FIRST, " tau near"), (SECOND, " tau far")):
            yield _decode_case(name + suffix, SHORT[dtype], head_dim, groups, part, shape)
        for with_gate, suffix in ((False, ""), (True, " tau")):
            yield _combine_case(
                name + suffix, SHORT[dtype], head_dim, groups, with_gate, shape.BLOCK_N, False
            )


def _decode_case(
    name: str, dtype: str, head_dim: int, groups: int, part: int, shape: triton_decode.Tile
) -> AotCase:
    types = dict.fromkeys(("q", "keys", "window", "values"), f"*{dtype}")
    types |= dict.fromkeys(("logits", "distant_lse", "part_out", "part_lse"), "*fp32")
    types |= {"lengths": "*i64", "table": "*i32", "scale": "fp32", "tau": "fp32"}
    constants = {"PART": part, "GROUPS": groups, "HEAD_DIM": head_dim}
    constants |= {"BLOCK_N": shape.BLOCK_N, "BLOCK_D": shape.BLOCK_D, "BLOCK_G": shape.BLOCK_G}
    strides = [f"{x}_{y}" for x in "kwv" for y in ("batch", "head", "row")]
    even = ("n_s", "n_r", "room", "q_batch", "q_head", *strides)
    options = {"num_warps": shape.num_warps, "num_stages": shape.num_stages}
    kernel, hot = triton_decode.decode_kernel, dtype != "fp32"
    return AotCase(f"decode {name}", kernel, types, constants, options, hot=hot, divisible=even)


def _combine_case(
    name: str, dtype: str, head_dim: int, groups: int, with_gate: bool, tokens_per_step: int, packed: bool
) -> AotCase:
    """The kernel that merges splits; lengths of native tokens stand in for those that packed ones have of their own."""
    types = {"lengths": "*i64", "packed_lengths": "*i32" if packed else "*i64", "table": "*i32"}
    types |= {"out": f"*{dtype}"} | dict.fromkeys(("distant_lse", "part_out", "part_lse"), "*fp32")
    constants = {"WITH_GATE": with_gate, "PACKED": packed, "GROUPS": groups, "HEAD_DIM": head_dim}
    block_d = max(16, triton.next_power_of_2(head_dim))
    constants |= {"BLOCK_N": tokens_per_step, "BLOCK_S": triton_decode._SPLITS, "BLOCK_D": block_d}
    even = ("n_s", "n_r", "out_batch", "out_head")
    kernel, hot = triton_decode.combine_kernel, dtype != "fp32"
    return AotCase(f"combine {name}", kernel, types, constants, {"num_warps": 4}, hot=hot, divisible=even)


def packed_cases() -> Iterator[AotCase]:
    """4 bits in groups of 32 and 64, with and without threshold."""
    tile = triton_decode_packed.tile
    for dtype, head_dim, groups, group_size in (
        (torch.bfloat16, 128, 4, 32),
        (torch.bfloat16, 128, 8, 64),
        (torch.bfloat16, 64, 4, 32),
        (torch.float32, 128, 4, 32),
    ):
        name = f"int4 {SHORT[dtype]} d{head_dim} g{groups} group {group_size}"
        for part, suffix in ((ALL, ""), (FIRST, " tau near"), (SECOND, " tau far")):
            shape = tile(dtype, head_dim, groups, part)
            yield _packed_case(name + suffix, SHORT[dtype], head_dim, groups, group_size, part, shape)
        tokens_per_step = tile(dtype, head_dim, groups).BLOCK_N
        yield _combine_case(name, SHORT[dtype], head_dim, groups, False, tokens_per_step, True)


def _packed_case(
    name: str,
    dtype: str,
    head_dim: int,
    groups: int,
    group_size: int,
    part: int,
    shape: triton_decode_packed.Tile,
) -> AotCase:
    types = dict.fromkeys(("q", "key_tail", "window", "value_tail"), f"*{dtype}")
    types |= dict.fromkeys(("key_zero", "key_scale", "value_zero", "value_scale"), "*fp16")
    types |= dict.fromkeys(("key_codes", "value_codes"), "*u8")
    types |= dict.fromkeys(("logits", "distant_lse", "part_out", "part_lse"), "*fp32")
    types |= {"lengths": "*i64", "packed_lengths": "*i32", "table": "*i32", "scale": "fp32", "tau": "fp32"}
    constants = {"PART": part, "GROUPS": groups, "HALF": head_dim // 2, "KEY_GROUP": group_size}
    constants |= {"VALUE_GROUP": group_size, "BLOCK_N": shape.BLOCK_N, "BLOCK_G": shape.BLOCK_G}
    even = ("n_s", "n_r", "room", "capacity", "ring", "q_batch", "q_head", "w_batch", "w_head", "w_row")
    options = {"num_warps": shape.num_warps, "num_stages": shape.num_stages}
    kernel, hot = triton_decode_packed.packed_decode_kernel, dtype != "fp32"
    return AotCase(f"decode {name}", kernel, types, constants, options, hot=hot, divisible=even)


def step_cases() -> Iterator[AotCase]:
    """Hidden sizes from 576 to 16,384, head_dim 64 to 128, groups of 1 to 8, with and without head norms."""
    for flag, suffix in ((False, ""), (True, " sum")):
        for short, size in (
            ("bf16", 576),
            ("bf16", 4096),
            ("bf16", 16384),
            ("fp16", 4096),
            ("fp32", 4096),
        ):
            options = triton_fused.norm_options(flag, size)
            yield _step_case(f"norm{suffix} {short} {size}", triton_fused.add_norm_kernel, short, options)
    for flag, suffix in ((False, ""), (True, " norm")):
        for short, head_dim, groups in (
            ("bf16", 128, 4),
            ("bf16", 80, 1),
            ("bf16", 64, 3),
            ("fp16", 128, 4),
            ("fp32", 128, 8),
        ):
            options = triton_fused.rotate_options(flag, groups, head_dim)
            name = f"rotate{suffix} {short} d{head_dim} g{groups}"
            yield _step_case(name, triton_fused.rotate_kernel, short, options)
    for short in SHORT.values():
        yield _step_case(f"gate {short}", triton_fused.gate_kernel, short, triton_fused.GATE)


def _step_case(name: str, kernel, short: str, settings: dict[str, Any]) -> AotCase:
    arguments = kernel.arg_names
    tensors = ("x", "delta", "weight", "total", "out", "q", "k", "v", "q_weight", "k_weight")
    types = dict.fromkeys((*tensors, "keys", "window", "values", "gate", "up"), f"*{short}")
    types |= {"cos": "*fp32", "sin": "*fp32", "past": "*i64", "table": "*i32", "eps": "fp32"}
    types = {a: t for a, t in types.items() if a in arguments}
    constants = {a: value for a, value in settings.items() if a in arguments}
    even = tuple(a for a in arguments if a.endswith(("_batch", "_head", "_row")) or a == "numbers")
    options = {"num_warps": settings["num_warps"]}
    return AotCase(name, kernel, types, constants, options, hot=short != "fp32", divisible=even)


CASES: dict[str, Callable[[], Iterator[AotCase]]] = {
    "triton_decode": decode_cases,
    "triton_decode_packed": packed_cases,
    "triton_fused": step_cases,
}
"""By the module of ``pod.kernels`` whose kernels they are."""


def all_cases() -> dict[str, AotCase]:
    """Every case, by ``"module: name"``. Raises ValueError for a name that occurs twice in a module."""
    found: dict[str, AotCase] = {}
    for module, cases in CASES.items():
        for case in cases():
            if f"{module}: {case.name}" in found:
                raise ValueError(
                    f"the cases of {module} have the name {case.name!r} twice; make names unique"
                )
            found[f"{module}: {case.name}"] = case
    return found


def compile_many(
    wanted: Iterable[tuple[str, int]], processes: int
) -> Iterator[tuple[tuple[str, int], CompiledCase]]:
    """Compile ``("module: name", capability)`` pairs in ``processes`` processes of their own; yields each with its result, in order."""
    wanted = list(wanted)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        yield from zip(wanted, pool.map(_compile_named, wanted), strict=True)


def _compile_named(wanted: tuple[str, int]) -> CompiledCase:
    name, capability = wanted
    return compile_case(_cases_of_process()[name], capability)


@functools.cache
def _cases_of_process() -> dict[str, AotCase]:
    return all_cases()
