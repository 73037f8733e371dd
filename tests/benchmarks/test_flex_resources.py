"""FlexAttention's kernels, compiled without a GPU: the committed table is of today's tiles, on all chips."""

import json

import pytest
import torch

from pod.kernels.flex import kernel_options


@pytest.fixture
def resources(script):
    return script("flex_resources")


def test_the_table_is_of_these_tiles(resources):
    rows = json.loads(resources.RESULTS.read_text())["rows"]
    for row in rows:
        asked = kernel_options(getattr(torch, row["dtype"]), row["head_dim"])
        kind = "fwd_" if row["pass"] == "forward" else "bwd_"
        for name, value in asked.items():
            if name.startswith(kind) or name == "num_warps":
                assert row[name.removeprefix(kind)] == value, (row, name)
        assert row["IS_DIVISIBLE"] == (row["shapes"] == "known")
        assert resources.problems(row) == []
    measured = {(row["dtype"], row["head_dim"], row["pass"], row["capability"]) for row in rows}
    passes, chips = ("forward", "backward"), resources.CAPABILITIES
    assert measured == {(*case, one, chip) for case in resources.CASES for one in passes for chip in chips}


def test_what_would_keep_a_kernel_from_running_is_named(resources):
    row = {"capability": 80, "dtype": "float32", "shared_bytes": 163 * 1024, "instructions": "fma.rn.f32"}
    assert resources.problems(row) == []
    wrong = {**row, "shared_bytes": 163 * 1024 + 1, "instructions": "mma.sync tf32"}
    assert resources.problems(wrong) == ["166913 bytes of shared memory", "TF32 products"]
    assert resources.problems({**wrong, "capability": 90, "dtype": "bfloat16"}) == []


def test_the_kernels_of_attention_are_found_in_the_code(resources):
    code = (
        "async_compile.triton('sum_0', '''one''', device_str='cuda')\n"
        "async_compile.triton('tem_1', '''FLOAT32_PRECISION''', device_str='cuda')\n"
    )
    assert list(resources.kernels(code)) == [("tem_1", "FLOAT32_PRECISION")]
