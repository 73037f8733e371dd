"""A kernel that says how the decode kernels deal their programs, for test_triton_decode.py; needs Triton."""

import triton
import triton.language as tl

from pod.kernels.triton_launch import splits, tiles


@triton.jit
def deal(out, length, leads, followers, windows, PART: tl.constexpr, COUNT: tl.constexpr):
    """``out [6, COUNT]``: programs of each lead, follower and window, and tiles of each.

    COUNT numbers of programs are dealt, from one per head on.
    """
    at = tl.arange(0, COUNT)
    zero = tl.zeros([COUNT], tl.int32)
    programs = at + leads + followers + windows
    of_lead, of_follower, of_window = splits(
        length, 0, leads, followers, windows, programs, 16, 4080, PART, 64
    )
    lead_far, lead_near = tiles(length, 0, 16, 4080, True, False, PART, 64)
    far, near = tiles(length, 0, 16, 4080, False, False, PART, 64)
    _, window_near = tiles(length, 0, 16, 4080, False, True, PART, 64)
    tl.store(out + at, of_lead + zero)
    tl.store(out + COUNT + at, of_follower + zero)
    tl.store(out + 2 * COUNT + at, of_window + zero)
    tl.store(out + 3 * COUNT + at, lead_far + lead_near + zero)
    tl.store(out + 4 * COUNT + at, far + near + zero)
    tl.store(out + 5 * COUNT + at, window_near + zero)
