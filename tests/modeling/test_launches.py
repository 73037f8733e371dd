"""How many operations reach a device for 128K tokens of LLaMA-3-8B's shapes; on a GPU each is a launch.

Meta tensors stand for the device: they have shapes, but no numbers, and take no memory.
"""

from collections.abc import Callable

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pod.modeling.model.packed import Packed, Packing, tiles
from pod.modeling.model.rope import rotate

TOKENS, HEADS, GROUPS, HEAD_DIM = 131_072, 8, 4, 128
VIEWS = (
    "view",
    "slice",
    "select",
    "transpose",
    "unsqueeze",
    "squeeze",
    "expand",
    "permute",
    "detach",
    "alias",
)
VIEWS += ("as_strided", "split", "_unsafe_view", "_reshape_alias", "t.", "unbind", "empty", "new_empty")


class Launches(TorchDispatchMode):
    """Counts operations that compute or copy."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        if not name.startswith(VIEWS):
            self.count += 1
        return func(*args, **(kwargs or {}))


def launches(run: Callable[[], object]) -> int:
    with Launches() as mode, torch.no_grad():
        run()
    return mode.count


def packed_tokens(device: str, tokens: int, bits: int, per_channel: bool) -> Packed:
    """A buffer of so many packed tokens and 64 newer ones."""
    packing = Packing(bits=bits, group_size=32, per_channel=per_channel)
    like = torch.empty(1, HEADS, 0, HEAD_DIM, device=device, dtype=torch.bfloat16)
    codes, zero, scale = packing.allocate(like, tokens)
    tail = like.new_empty(1, HEADS, 64, HEAD_DIM)
    lengths = torch.full((1,), tokens, dtype=torch.int32, device=device)
    return Packed(codes, zero, scale, tail, lengths, 32, per_channel, (tokens, tokens))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("per_channel", [False, True])
def test_a_decoded_token_over_packed_tokens_takes_few_launches(bits, per_channel):
    """Scores and weighted sums of one layer over packed tokens take few launches.

    In tiles of a CPU's size they took 646 to 2,310 and 776 to 2,304.
    """
    buffer = packed_tokens("meta", TOKENS, bits, per_channel)
    q = torch.empty(1, HEADS, GROUPS, HEAD_DIM, device="meta")
    weights = torch.empty(1, HEADS, GROUPS, TOKENS, device="meta")
    scores = launches(lambda: buffer.scores(q, torch.empty_like(weights)))
    sums = launches(lambda: buffer.weighted(weights, 0, TOKENS))
    assert scores <= 50
    assert sums <= 50


def test_rotating_a_prompt_takes_few_launches():
    """Queries of one layer; in tiles of a CPU's size they took 3,072."""
    x = torch.empty(1, HEADS * GROUPS, TOKENS, HEAD_DIM, device="meta", dtype=torch.bfloat16)
    tables = torch.empty(2, 1, 1, TOKENS, 2, HEAD_DIM // 2, device="meta").unbind(0)
    assert launches(lambda: rotate(x, tables)) <= 60


def test_a_cpu_keeps_its_tiles():
    """What is converted at a time stays in its cache."""
    buffer = packed_tokens("cpu", 4096, 4, False)
    assert len(list(tiles(buffer, 0, 4096))) == 4
