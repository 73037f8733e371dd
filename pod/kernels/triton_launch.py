"""Where our Triton kernels can run, how one is launched, and how decode kernels share out their programs.

The decode kernels have a fixed number of programs per row. They are shared out among the heads of the row on
the device, according to the row's length. ``PART`` is that of ``pod.kernels.triton_decode``.
"""

import contextlib

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from pod import toolchain


def unsupported(x: Tensor) -> str | None:
    """Why our kernels cannot run on tensors with the dtype and device of ``x``. None = they can."""
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"dtype {x.dtype} (float32, float16 or bfloat16)"
    if triton.knobs.runtime.interpret:  # pyright: ignore[reportAttributeAccessIssue]
        # The interpreter's tl.dot multiplies the bit patterns of bfloat16 (Triton 3.6 to 3.9).
        return "bfloat16 under TRITON_INTERPRET=1" if x.dtype == torch.bfloat16 else None
    if not x.is_cuda:
        return f"device {x.device.type} (CUDA, or TRITON_INTERPRET=1)"
    if torch.version.hip is not None or torch.cuda.get_device_capability(x.device) < (8, 0):
        return "this GPU (NVIDIA, compute capability 8.0 or newer)"
    return toolchain.missing()


def run(kernel, grid: tuple[int, ...], on: Tensor, *arguments, **options) -> None:
    """Launch a kernel on the device of the tensor ``on``, without waiting for the device."""
    with torch.cuda.device(on.device) if on.is_cuda else contextlib.nullcontext():
        kernel[grid](*arguments, **options)


@triton.jit
def tiles(length, tail, n_s, n_r, is_lead, is_window, PART: tl.constexpr, BLOCK_N: tl.constexpr):
    """(far tiles, near tiles): how many tiles of ``BLOCK_N`` tokens a launch reads for one head.

    Far tiles have distant tokens. Near tiles have sinks and recent tokens, or the tokens of a window. The
    newest ``tail`` tokens, which are native in packed buffers, are in near tiles of their own.
    """
    near = tl.minimum(length, n_s + n_r)
    far_tiles = tl.where(is_window, 0, tl.cdiv(length - near, BLOCK_N))
    tail = tl.where(is_window, 0, tail)
    near_tiles = tl.cdiv(near - tail, BLOCK_N) + tl.cdiv(tail, BLOCK_N)
    if PART == 1:
        far_tiles = tl.where(is_lead, far_tiles, 0)
    if PART == 2:
        far_tiles = tl.where(is_lead, 0, far_tiles)
        near_tiles = 0
    return far_tiles, near_tiles


@triton.jit
def splits(
    length, tail, leads, followers, windows, programs, n_s, n_r, PART: tl.constexpr, BLOCK_N: tl.constexpr
):
    """(programs of each lead, of each follower, of each window), given out in this order.

    A head with a tile gets at least one program. Windows get their share first, rounded. The work of leads
    and followers can be cut finer, so it fits into the remaining programs.
    """
    lead_far, lead_near = tiles(length, tail, n_s, n_r, True, False, PART, BLOCK_N)
    far, near = tiles(length, tail, n_s, n_r, False, False, PART, BLOCK_N)
    _, window_near = tiles(length, tail, n_s, n_r, False, True, PART, BLOCK_N)
    lead_cost = 2 * (lead_far + lead_near)
    if PART == 2:
        return 0, tl.minimum(programs // tl.maximum(followers, 1), far), 0
    cost = far + 2 * near
    total = leads * lead_cost + followers * cost
    window_cost = 2 * window_near
    all_cost = tl.maximum(total + windows * window_cost, 1)
    per_window = tl.maximum((2 * programs * window_cost + all_cost) // (2 * all_cost), 1)
    per_window = tl.minimum(per_window, (programs - leads - followers) // tl.maximum(windows, 1))
    per_window = tl.minimum(per_window, window_near)
    programs -= windows * per_window
    per_lead = tl.maximum(programs * lead_cost // tl.maximum(total, 1), 1)
    per_lead = tl.minimum(per_lead, (programs - followers) // tl.maximum(leads, 1))
    per_lead = tl.minimum(per_lead, lead_far + lead_near)
    per_follower = (programs - leads * per_lead) // tl.maximum(followers, 1)
    per_follower = tl.minimum(per_follower, far + near)
    return per_lead, per_follower, per_window


@triton.jit
def dealt(index, leads, followers, per_lead, per_follower, per_window):
    """(first program, number of programs) of the head at ``index`` of the table (``role_table``)."""
    of_leads, of_followers = tl.minimum(index, leads), tl.minimum(tl.maximum(index - leads, 0), followers)
    of_windows = tl.maximum(index - leads - followers, 0)
    first = of_leads * per_lead + of_followers * per_follower + of_windows * per_window
    count = tl.where(index < leads, per_lead, tl.where(index < leads + followers, per_follower, per_window))
    return first, count


@triton.jit
def boundary(split, count, far_tiles, near_tiles, near_cost):
    """The first tile of a split, such that all ``count`` splits of a head cost the same.

    Far tiles come first and cost 1 each; near tiles cost ``near_cost``.
    """
    units = split * (far_tiles + near_tiles * near_cost) // count
    return tl.where(units < far_tiles, units, far_tiles + (units - far_tiles) // near_cost)
