"""Ahead-of-time cases type their arguments as engines launch the kernels.

Launches are recorded on the CPU and compute nothing: what lies in memory then is as good as any logit.
"""

import importlib
import importlib.util
import os
from pathlib import Path

import pytest
import torch

import pod
from pod.kernels import fused, triton_decode, triton_fused, triton_launch
from pod.modeling.model import decode, grouped
from pod.modeling.model.attend import SharedQK, Tokens, Visibility, attend

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"),
]
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
FLAGS = ("PART", "WITH_GATE", "PACKED", "WITH_DELTA", "WITH_NORM", "HAS_LEAD", "WITH_SINK")
POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


class Recorder:
    """Stands where a kernel stands, and keeps the arguments of its launches by name."""

    def __init__(self, kernel):
        self.arg_names, self.launches = kernel.arg_names, []

    def __getitem__(self, grid):
        return lambda *arguments, **options: self.launches.append(
            dict(zip(self.arg_names, arguments, strict=False)) | options
        )


def decoding():
    """A prompt and two tokens, in native and in 4-bit buffers.

    With and without threshold and head norms, and constant sinks.
    """
    config = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    sizes = {"vocab_size": 50, "intermediate_size": 32, "num_hidden_layers": 2, "lead": [[0, 0], [0, 1]]}
    config |= sizes | {"num_sink_tokens": 2, "num_recent_tokens": 64}
    sinks = config | {"num_sink_tokens": 0, "sinks": "constant", "lead": [[0, 0], [0, None]]}
    for spec, options in (("pod", {}), ("pod+int4", {"group_size": 32, "residual": 32})):
        for tau, fields in ((None, config), (0.5, config), (None, sinks)):
            model = pod.PodForCausalLM(pod.PodConfig(**fields, qk_norm=tau is not None)).bfloat16().eval()
            cache = pod.make_cache(model, spec, tau=tau, capacity=128, **options)
            with torch.no_grad():
                model(torch.ones(2, 90, dtype=torch.long), past_key_values=cache)
                for _ in range(2):
                    model(torch.ones(2, 1, dtype=torch.long), past_key_values=cache)
            assert cache.engine.steps == 2


def training():
    """Forward and backward of heads that follow, and of heads that lead."""
    sizes = (4, 2, 2, 4, 2)
    inputs = [torch.ones(2, h, 9, 64, dtype=torch.bfloat16, requires_grad=True) for h in sizes]
    q, k, v, *of_lead = inputs
    for lead, see in ((SharedQK(*of_lead), Visibility(2, 4)), (None, Visibility())):
        attend(q, Tokens(k, v), lead, see, backend="triton")[0].sum().backward()


@pytest.fixture(scope="module")
def launches():
    """Bf16 cases by name, and by name what its kernel was launched with, in the case's variant."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        cases = {n: c for n, c in importlib.import_module("aot_cases").all_cases().items() if "bf16" in n}
        recorders = {case.kernel: Recorder(case.kernel) for case in cases.values()}
        for kernel, recorder in recorders.items():
            patch.setattr(importlib.import_module(kernel.fn.__module__), kernel.fn.__name__, recorder)
        patch.setattr(triton_launch, "unsupported", lambda x: None)
        anywhere = triton_fused.OPERATIONS._replace(unsupported=lambda x: None)
        patch.setattr(triton_fused, "OPERATIONS", anywhere)
        patch.setitem(decode.DECODE_ORDER, "cpu", ["triton"])
        patch.setitem(fused.ORDER, "cpu", ["triton"])
        decoding()
        training()
        yield cases, {name: of_variant(case, recorders[case.kernel]) for name, case in cases.items()}


def of_variant(case, recorder) -> list[dict]:
    wanted = {flag: case.constants[flag] for flag in FLAGS if flag in case.constants}
    return [x for x in recorder.launches if all(x[flag] == value for flag, value in wanted.items())]


def type_of(value) -> str:
    if isinstance(value, torch.Tensor):
        return POINTERS[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def test_cases_type_every_argument_as_it_is_launched(launches):
    cases, found = launches
    assert not [name for name, seen in found.items() if not seen], "never launched"
    wrong = set()
    for name, seen in found.items():
        constants, types = cases[name].constants, cases[name].types
        for argument, value in ((a, v) for launch in seen for a, v in launch.items()):
            if value is None:
                wrong |= {(name, argument)} if constants.get(argument, 0) is not None else set()
            elif argument in cases[name].kernel.arg_names and argument not in constants:
                wrong |= {(name, argument)} if type_of(value) != types.get(argument, "i32") else set()
    assert not wrong


@pytest.mark.parametrize(("codec", "launches_per_token"), [("int4", 2), ("kivi", 0), ("int8", 0)])
@torch.no_grad()
def test_only_buffers_of_4_bits_reach_the_kernels(monkeypatch, codec, launches_per_token):
    """Where Triton comes first, as on a GPU; other buffers go through torch, with its very numbers."""
    config = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    config |= {"vocab_size": 50, "intermediate_size": 32, "num_hidden_layers": 2, "num_recent_tokens": 64}
    model, ids = pod.PodForCausalLM(pod.PodConfig(**config)).eval(), torch.arange(93)[None] % 50
    calls, outputs = [], []
    monkeypatch.setattr(triton_launch, "unsupported", lambda x: None)
    monkeypatch.setattr(triton_decode, "decode", lambda call: calls.append(call) or grouped.decode(call))
    for order in (["grouped"], ["triton", "grouped"]):
        monkeypatch.setitem(decode.DECODE_ORDER, "cpu", order)
        cache = pod.make_cache(model, codec, group_size=32, residual=32)
        passes = (ids[:, :90], *ids[:, 90:].split(1, 1))
        outputs.append(torch.cat([model(part, past_key_values=cache).logits for part in passes], 1))
    assert len(calls) == 3 * launches_per_token
    assert torch.equal(*outputs)
