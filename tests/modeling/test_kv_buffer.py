"""Tokens of windows and of whole rows against lists of tokens.

Chunks of any size, rows of unlike length, and what is read back.
"""

import random

import pytest
import torch

from pod.modeling.model.attend import Segments
from pod.modeling.model.kv_buffer import KVBuffer
from pod.modeling.model.window_buffer import Recent, WindowBuffer

KINDS = [(None, None), (0, 1), (0, 7), (3, 5), (9, 2)]
"""(n_s, n_r), None = every token is kept."""


def buffer_of(sinks, recent):
    return KVBuffer() if sinks is None else WindowBuffer(sinks, recent)


def held_positions(length, sinks, recent):
    return [p for p in range(length) if sinks is None or p < sinks or p >= length - recent]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("sinks", "recent"), KINDS)
def test_rows_of_unlike_length_hold_what_lists_hold(sinks, recent, seed):
    """Rows of unlike length hold what lists hold.

    They come in chunks with other numbers of tokens in every row, some with none. Slots are those of rows
    that are alike.
    """
    chance, buffer, past = random.Random(seed), buffer_of(sinks, recent), [0, 0, 0]
    alike = [buffer_of(sinks, recent) for _ in past]
    tokens = torch.randn(3, 2, 90, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    for _ in range(8):
        counts = [chance.randint(0, 10) for _ in past]
        chunk = torch.full((3, 2, max(*counts, 1), 4), float("nan"), dtype=torch.float64)
        for row, (start, count) in enumerate(zip(past, counts, strict=True)):
            chunk[row, :, :count] = tokens[row, :, start : start + count]
            if count:
                alike[row].append(tokens[row : row + 1, :, start : start + count], start)
        rows = list(zip(past, counts, strict=True))
        buffer.append_ragged(chunk, Segments.of_rows(*zip(*rows, strict=True)))
        past = [sum(row) for row in rows]
        for row, length in enumerate(past):
            runs, held = buffer.runs(0, length, length), buffer.read(max(past))[row]
            found = {position + i: slot + i for position, slot, count in runs for i in range(count)}
            assert sorted(found) == held_positions(length, sinks, recent)
            for position, slot in found.items():
                assert torch.equal(held[:, slot], tokens[row, :, position])
            if length:
                assert torch.equal(alike[row].read(length)[0], held[:, : buffer.used_slots(length)])


@pytest.mark.parametrize(("sinks", "recent"), KINDS[1:])
def test_recent_tokens_and_the_chunk_are_read_in_order(sinks, recent):
    tokens = torch.randn(1, 2, 40, 4, dtype=torch.float64)
    for past in (0, 1, sinks, sinks + recent, 23, 31):
        buffer = WindowBuffer(sinks, recent)
        if past:
            buffer.append(tokens[:, :, :past], 0)
        source = Recent(buffer, tokens[:, :, past:37], [(past, 37 - past)])
        expected = tokens[:, :, :37].clone()
        gone = sorted(set(range(past)) - set(held_positions(past, sinks, recent)))
        expected[:, :, gone] = 0
        for start in range(0, 37, 5):
            for stop in range(start + 1, 38, 6):
                assert torch.equal(source.span(start, stop), expected[:, :, start:stop])
