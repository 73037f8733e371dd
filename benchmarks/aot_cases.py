"""What ``aot`` compiles: one ``AotCase`` for each launch configuration that the Triton modules ship.

Arguments are typed as in a model. A test records what models launch and holds these types against it.
"""

import functools
import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
from aot import CAPABILITIES, AotCase, CompiledCase, compile_case

from pod.kernels import (
    triton_decode,
    triton_fused,
    triton_prefill,
    triton_prefill_backward,
    triton_prefill_forward,
)
from pod.kernels.triton_decode import ALL, FIRST, SECOND

SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def decode_cases() -> Iterator[AotCase]:
    """bf16 and fp16, head_dim 64 and 128, groups of 1 to 8; 4 bits in groups of 32 and 64.

    With and without threshold.
    """
    for dtype, head_dim, groups, group_size in (
        (torch.bfloat16, 128, 4, None),
        (torch.bfloat16, 128, 8, None),
        (torch.bfloat16, 64, 4, None),
        (torch.bfloat16, 64, 1, None),
        (torch.float16, 128, 4, None),
        (torch.float32, 128, 4, None),
        (torch.bfloat16, 128, 4, 32),
        (torch.bfloat16, 128, 8, 64),
        (torch.bfloat16, 64, 4, 32),
        (torch.float32, 128, 4, 32),
    ):
        for part, suffix in ((ALL, ""), (FIRST, " tau near"), (SECOND, " tau far")):
            yield _decode_case(suffix, dtype, head_dim, groups, group_size, part)
        yield _decode_case(" sink", dtype, head_dim, groups, group_size, ALL, with_sink=True)
        for with_gate, suffix in ((False, ""), (True, " tau")):
            yield _combine_case(suffix, dtype, head_dim, groups, group_size, with_gate)


def _decode_case(
    suffix: str,
    dtype: torch.dtype,
    head_dim: int,
    groups: int,
    group_size: int | None,
    part: int,
    with_sink: bool = False,
) -> AotCase:
    short, packed = SHORT[dtype], group_size is not None
    shape = triton_decode.tile(dtype, head_dim, groups, packed, part)._asdict()
    options = {name: shape.pop(name) for name in ("num_warps", "num_stages")}
    constants = {"PART": part, "PACKED": packed, "KEY_GROUP": group_size or 1, "VALUE_GROUP": group_size or 1}
    constants |= {"GROUPS": groups, "HEAD_DIM": head_dim, **shape}
    types = dict.fromkeys(("logits", "distant_lse", "part_out", "part_lse"), "*fp32")
    types |= {"lengths": "*i64", "table": "*i32", "scale": "fp32", "tau": "fp32"}
    types |= dict.fromkeys(("q", "window", "near_keys", "near_values"), f"*{short}")
    types |= dict.fromkeys(("keys", "values"), "*u8" if packed else f"*{short}")
    even = ["n_s", "n_r", "room", "capacity", "q_batch", "q_head"]
    even += [f"{x}_{y}" for x in "kwvn" for y in ("batch", "head", "row")]
    if packed:
        types |= dict.fromkeys(("key_zero", "key_scale", "value_zero", "value_scale"), "*fp16")
        types |= {"key_tail": f"*{short}", "value_tail": f"*{short}", "packed_lengths": "*i32"}
        even.append("ring")
    else:
        kinds = ("zero", "scale", "tail")
        constants |= dict.fromkeys([f"{x}_{y}" for x in ("key", "value") for y in kinds])
        constants |= {"packed_lengths": None, "ring": 1}
    constants |= {"WITH_SINK": with_sink}
    if with_sink:
        types |= dict.fromkeys(("sink_logits", "sink_values"), f"*{short}")
    else:
        constants |= {"sink_logits": None, "sink_values": None}
    kernel, name = triton_decode.decode_kernel, _name(dtype, head_dim, groups, group_size)
    hot = dtype != torch.float32
    return AotCase(
        f"decode {name}{suffix}", kernel, types, constants, options, hot=hot, divisible=tuple(even)
    )


def _combine_case(
    suffix: str, dtype: torch.dtype, head_dim: int, groups: int, group_size: int | None, with_gate: bool
) -> AotCase:
    """The kernel that merges splits."""
    shape, packed = triton_decode.tile(dtype, head_dim, groups), group_size is not None
    types = {"lengths": "*i64", "table": "*i32", "out": f"*{SHORT[dtype]}"}
    types |= dict.fromkeys(("distant_lse", "part_out", "part_lse"), "*fp32")
    constants: dict[str, Any] = {"WITH_GATE": with_gate, "PACKED": packed, "GROUPS": groups}
    constants |= {"HEAD_DIM": head_dim, "BLOCK_N": shape.BLOCK_N, "BLOCK_D": shape.BLOCK_D}
    constants["BLOCK_S"] = triton_decode._SPLITS
    if packed:
        types["packed_lengths"] = "*i32"
    else:
        constants["packed_lengths"] = None
    even = ("n_s", "n_r", "out_batch", "out_head")
    kernel, name = triton_decode.combine_kernel, _name(dtype, head_dim, groups, group_size)
    hot = dtype != torch.float32
    return AotCase(
        f"combine {name}{suffix}", kernel, types, constants, {"num_warps": 4}, hot=hot, divisible=even
    )


def _name(dtype: torch.dtype, head_dim: int, groups: int, group_size: int | None) -> str:
    name = f"{SHORT[dtype]} d{head_dim} g{groups}"
    return name if group_size is None else f"int4 {name} group {group_size}"


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
    buffers = ("keys", "window", "values", "near_keys", "near_values")
    types = dict.fromkeys((*tensors, *buffers, "gate", "up"), f"*{short}")
    types |= {"cos": "*fp32", "sin": "*fp32", "past": "*i64", "table": "*i32", "eps": "fp32"}
    types = {a: t for a, t in types.items() if a in arguments}
    constants = {a: value for a, value in settings.items() if a in arguments}
    even = tuple(a for a in arguments if a.endswith(("_batch", "_head", "_row")) or a == "numbers")
    options = {"num_warps": settings["num_warps"]}
    return AotCase(name, kernel, types, constants, options, hot=short != "fp32", divisible=even)


def prefill_cases() -> Iterator[AotCase]:
    """The forward kernel, with the tiles of every chip."""
    yield from _prefill_cases("forward", triton_prefill_forward.forward_kernel, 0)


def prefill_gradient_cases() -> Iterator[AotCase]:
    """The kernel for dQ and the one for dK and dV, with the tiles of every chip."""
    yield from _prefill_cases("queries", triton_prefill_backward.queries_kernel, 1)
    yield from _prefill_cases("keys", triton_prefill_backward.keys_kernel, 2)


def _prefill_cases(name: str, kernel, which: int) -> Iterator[AotCase]:
    """bf16, head_dim 64 to 256, through a lead; 128 also dense, as heads that lead run it; and fp32."""
    for capability in CAPABILITIES:
        for dtype, head_dim, has_lead in (
            (torch.bfloat16, 128, True),
            (torch.bfloat16, 128, False),
            (torch.bfloat16, 64, True),
            (torch.bfloat16, 80, True),
            (torch.bfloat16, 256, True),
            (torch.float32, 128, True),
        ):
            tile = triton_prefill.tiles(dtype, head_dim, capability)[which]
            title = f"{name} {SHORT[dtype]} d{head_dim}{'' if has_lead else ' dense'} sm_{capability}"
            yield _prefill_case(title, kernel, tile, dtype, head_dim, has_lead, capability)


def _prefill_case(
    title: str, kernel, tile, dtype: torch.dtype, head_dim: int, has_lead: bool, capability: int
) -> AotCase:
    arguments, of_lead = kernel.arg_names, ("q_lead", "k_lead", "dq_lead", "dk_lead")
    tensors = ("q", "k", "v", "out", "dout", "dq", "dk", "dv", *of_lead)
    types = dict.fromkeys(tensors, f"*{SHORT[dtype]}") | {"lse": "*fp32", "delta": "*fp32", "scale": "fp32"}
    types |= {"query_runs": "*i32", "key_runs": "*i32"}
    constants: dict[str, Any] = {"HAS_LEAD": has_lead, "HEAD_DIM": head_dim, **tile._asdict()}
    options = {key: constants.pop(key) for key in ("num_warps", "num_stages")}
    if not has_lead:
        constants |= {name: None for name in of_lead if name in arguments}
    types = {a: t for a, t in types.items() if a in arguments and a not in constants}
    strides = [a for a in arguments if a.endswith(("_batch", "_head", "_row"))]
    even = tuple(a for a in strides if a not in triton_prefill_forward.FREE)
    hot = dtype != torch.float32 and head_dim <= 128
    return AotCase(title, kernel, types, constants, options, hot, even, (capability,))


CASES: dict[str, Callable[[], Iterator[AotCase]]] = {
    "triton_decode": decode_cases,
    "triton_fused": step_cases,
    "triton_prefill_forward": prefill_cases,
    "triton_prefill_backward": prefill_gradient_cases,
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
    """Compile ``("module: name", capability)`` pairs in ``processes`` processes of their own.

    Yields each with its result, in order.
    """
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
