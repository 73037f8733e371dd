"""Longest sequence that one GPU trains: ZeRO-3, optimizer in host memory, tiled feed-forward, chunked loss; PoD against dense.

    python benchmarks/longest_sequence.py              # one GPU; writes benchmarks/results/gpu/longest_sequence.json
    python benchmarks/longest_sequence.py --tiny       # toy shapes on CPU: tests the script
    python benchmarks/longest_sequence.py --predict    # no GPU: bytes of every operation at the true shapes, no arithmetic

Shapes of a model of 1.2 billion weights, random, bf16, activation checkpointing; 70 % of the (layer, KV head) pairs follow, windows
16+4080. Contestants: dense, and PoD with train.carry = keep, offload and recompute. Every try is a process of its own: it takes one
short step, which allocates what does not grow, then forward and backward of one row. It fails when memory runs out. Two tries that
fit predict the longest row, a bisection finds it to within 3 %.

Memory is limited to --memory-gib, so that the search ends in minutes: the time of a row grows with its square, the ratio of lengths
hardly depends on the limit once activations are most of it. On a CPU, and in a prediction, the bytes of all live tensors are counted,
without those that stand for host memory; a try fails when their peak passes the limit.
"""

import argparse
import json
import multiprocessing
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from gpu_tools import RESULTS, finish, goal_row, header, parser
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import pod
from pod.eval.results import one_line
from pod.files import write_json
from pod.modeling.attention import Backend, register_backend
from pod.training import carry
from pod.training.args import TrainArgs
from pod.training.estimate import carried_heads

CONTESTANTS = ("dense", "keep", "offload", "recompute")
GOAL = 0.9
RESOLUTION, TINY_RESOLUTION = 0.03, 0.08
TRUE_SIZE = {
    "vocab_size": 128_256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_sink_tokens": 16,
    "num_recent_tokens": 4080,
}
TINY_SIZE = TRUE_SIZE | {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_sink_tokens": 2,
    "num_recent_tokens": 62,
}
SHARE_NON_LEAD = 0.7
TINY_MIB = 5


def make_plan(layers: int, heads: int, share: float = SHARE_NON_LEAD) -> list[list[int]]:
    """lead[layer][head] of random blocks in which `share` of the pairs follow."""
    draw, rows = random.Random(0), [[0] * heads for _ in range(layers)]
    leads = layers * heads - round(share * layers * heads)
    for head in range(heads):
        count = leads // heads + (head < leads % heads)
        starts = [0, *sorted(draw.sample(range(1, layers), count - 1))]
        for layer in range(layers):
            rows[layer][head] = max(start for start in starts if start <= layer)
    return rows


def model_config(contestant: str, tiny: bool) -> pod.PodConfig:
    """Sizes and plan of a contestant."""
    size = TINY_SIZE if tiny else TRUE_SIZE
    lead = (
        None if contestant == "dense" else make_plan(size["num_hidden_layers"], size["num_key_value_heads"])
    )
    return pod.PodConfig(
        **size, lead=lead, tie_word_embeddings=True, max_position_embeddings=2**24, attention_backend="auto"
    )


def train_args(contestant: str, tiny: bool) -> TrainArgs:
    """The recipe of a contestant."""
    return TrainArgs(
        carry="keep" if contestant == "dense" else contestant,  # type: ignore[arg-type]
        mlp_tile_tokens=64 if tiny else 16_384,
        loss_chunk_mib=1 if tiny else 256,
        dtype="float32" if tiny else "bfloat16",
        offload_optimizer=True,
    )


class LiveBytes(TorchDispatchMode):
    """Peak of the bytes of all tensors that operations made and that live; within `host` new ones do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.now = self.peak = 0
        self.counting = True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf.untyped_storage())
        if self.now > self.peak:  # some of these may be gone
            self._forget_dead()
            self.peak = max(self.peak, self.now)
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        known = self.live.get(storage._cdata)
        if known is not None and not known[0].expired():
            return
        size = storage.nbytes() if self.counting else 0
        self.now += size - (known[1] if known else 0)
        self.live[storage._cdata] = StorageWeakRef(storage), size

    def _forget_dead(self) -> None:
        for key in [key for key, (reference, _) in self.live.items() if reference.expired()]:
            self.now -= self.live.pop(key)[1]

    def host(self, function: Callable) -> Callable:
        """The function, with what it allocates counted as host memory."""

        def uncounted(*arguments):
            self.counting = False
            try:
                return function(*arguments)
            finally:
                self.counting = True

        return uncounted


@contextmanager
def count_on_cpu(decoder: Any) -> Iterator[LiveBytes]:
    """Count live bytes; the carry's copies are host memory."""
    with LiveBytes() as live:
        memory = getattr(decoder, "carry_memory", None)
        if isinstance(memory, carry.OffloadedCarry):
            memory.to_host = live.host(carry.host_copy)
        yield live


def make_step(contestant: str, tiny: bool, longest: int) -> tuple[Callable[[int], None], Any]:
    """(forward, backward and update of one row of that many tokens; the decoder). Random weights."""
    import deepspeed

    from pod.training.loss import LanguageModelLoss
    from pod.training.mesh import start_processes
    from pod.training.optim import make_optimizer
    from pod.training.trainer import deepspeed_config, drop_carry_hooks, save_activations

    mesh, args = start_processes(1), train_args(contestant, tiny)
    torch.manual_seed(0)
    with mesh.device:
        model = pod.PodForCausalLM(model_config(contestant, tiny))
    save_activations(model, args, longest)
    module = LanguageModelLoss(model, args.loss_chunk_mib).train()
    settings = deepspeed_config(args)
    if tiny:  # its buffers would be larger than everything else
        settings["zero_optimization"] |= {"reduce_bucket_size": 50_000, "stage3_prefetch_bucket_size": 50_000}
    engine, *_ = deepspeed.initialize(model=module, optimizer=make_optimizer(module, args), config=settings)
    drop_carry_hooks(model)

    def step(tokens: int) -> None:
        ids = torch.randint(model.vocab_size, (1, tokens), device=mesh.device)
        loss = engine(input_ids=ids, labels=ids.roll(-1, 1), doc_ids=torch.zeros_like(ids))
        engine.backward(loss / tokens)
        if tokens <= 256:
            engine.step()

    return step, model.model


def attempt(contestant: str, tokens: int, limit: int, tiny: bool) -> dict[str, Any]:
    """One try in this process: whether the row fits in `limit` bytes, the peak, and seconds of its step."""
    cuda = torch.cuda.is_available() and not tiny
    if cuda and limit:
        torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)
    try:
        step, decoder = make_step(contestant, tiny, tokens)
        step(256)
        began = time.perf_counter()
        if cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            step(tokens)
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated()
        else:
            with count_on_cpu(decoder) as live:
                step(tokens)
            peak = live.peak
    except torch.OutOfMemoryError as error:
        return {"tokens": tokens, "fits": False, "peak_bytes": None, "error": one_line(error)[:200]}
    fits = cuda or peak <= limit
    return {"tokens": tokens, "fits": fits, "peak_bytes": peak, "seconds": time.perf_counter() - began}


def start_attempt(contestant: str, tokens: int, limit: int, tiny: bool) -> dict[str, Any]:
    """`attempt` in a fresh process.

    Raises:
        RuntimeError: it ended with another error than a lack of memory.
    """
    if tiny:  # no CUDA context that a fork would break, and the imports are paid once
        import deepspeed  # noqa: F401

        with multiprocessing.get_context("fork").Pool(1) as pool:
            return pool.apply(attempt, (contestant, tokens, limit, tiny))
    settings = {"contestant": contestant, "tokens": tokens, "limit": limit, "tiny": tiny}
    command = [sys.executable, __file__, "--attempt", json.dumps(settings)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"tokens"')]
    if done.returncode or not lines:
        raise RuntimeError(f"{contestant}, {tokens} tokens: {(done.stderr or done.stdout).strip()[-2000:]}")
    return json.loads(lines[-1])


def search(
    start: Callable[[int], dict[str, Any]], first: int, unit: int, limit: int, resolution: float = RESOLUTION
) -> dict[str, Any]:
    """Bisection over row lengths in multiples of `unit` tokens.

    Args:
        start: one try of that many tokens.
        first: a row that fits. It and its double predict where the bisection begins.
        limit: bytes, for the prediction.

    Raises:
        RuntimeError: the first row does not fit.
    """
    tries = [start(first), start(2 * first)]
    if not tries[0]["fits"]:
        raise RuntimeError(f"{first} tokens do not fit in {limit / 2**20:.0f} MiB: give more memory")
    low, high = (2 * first, None) if tries[1]["fits"] else (first, 2 * first)
    slope = bytes_per_token(tries)
    guess = low + (limit - tries[-1]["peak_bytes"]) / slope if slope and high is None else low * 1.4
    while high is None or (high - low > max(unit, resolution * low)):
        if high is None:
            asked = max(low + unit, min(guess, 8 * low) * (1.02 if low > 0.97 * guess else 0.985))
            guess *= 1.1 if asked > guess else 1
        else:
            asked = (low + high) / 2
        asked = int(asked) // unit * unit
        if asked in (low, high):
            break
        tries.append(start(asked))
        low, high = (asked, high) if tries[-1]["fits"] else (low, asked)
    tries.sort(key=lambda one: one["tokens"])
    return {"longest_tokens": low, "does_not_fit": high, "bytes_per_token": slope, "tries": tries}


def bytes_per_token(tries: list[dict[str, Any]]) -> float | None:
    """Slope of the peak over the length between the last two tries that report one."""
    known = [(one["tokens"], one["peak_bytes"]) for one in tries if one["peak_bytes"] is not None][-2:]
    return (known[1][1] - known[0][1]) / (known[1][0] - known[0][0]) if len(known) == 2 else None


class CountedAttention(torch.autograd.Function):
    """Attention as a fused kernel holds it: inputs, output and log-sum-exp for backward, gradients in their own type."""

    @staticmethod
    def forward(ctx, *inputs):
        out = torch.empty_like(inputs[0])
        lse = inputs[0].new_empty(inputs[0].shape[:3], dtype=torch.float32)
        ctx.save_for_backward(*inputs, out, lse)
        return out

    @staticmethod
    def backward(ctx, *grads):
        *inputs, _, _ = ctx.saved_tensors
        return tuple(torch.empty_like(x) for x in inputs)


def counted_attention(*arguments: Any, **_: Any) -> torch.Tensor:
    """Any of the attention operations."""
    return CountedAttention.apply(*(x for x in arguments if isinstance(x, torch.Tensor)))


def predicted_peak(contestant: str, tokens: int) -> int:
    """Peak bytes of forward and backward at the true shapes without arithmetic: weights, loss and optimizer left out."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from pod.training.trainer import save_activations

    register_backend("counted", Backend(*[counted_attention] * 4))
    torch.set_default_dtype(torch.bfloat16)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            model = pod.PodForCausalLM(model_config(contestant, tiny=False)).train()
            model.config.attention_backend = "counted"
            save_activations(model, train_args(contestant, tiny=False), tokens)
            for parameter in model.parameters():  # ZeRO-3 takes gradients to the host
                parameter.register_post_accumulate_grad_hook(lambda weight: setattr(weight, "grad", None))
            with count_on_cpu(model.model) as live:
                hidden = model.model(input_ids=torch.zeros(1, tokens, dtype=torch.long)).last_hidden_state
                hidden.backward(torch.ones_like(hidden))
        return live.peak
    finally:
        torch.set_default_dtype(torch.float32)


def predict(tokens: int) -> dict[str, Any]:
    """Bytes per token of every contestant from two lengths, in bytes and in hidden states; ratios to dense."""
    result: dict[str, Any] = {"tokens": [tokens // 2, tokens], "contestants": {}}
    hidden = 2 * TRUE_SIZE["hidden_size"]
    for name in CONTESTANTS:
        peaks = [predicted_peak(name, length) for length in result["tokens"]]
        slope = (peaks[1] - peaks[0]) / (tokens - tokens // 2)
        result["contestants"][name] = {
            "peak_bytes": peaks,
            "bytes_per_token": slope,
            "hidden_states": slope / hidden,
        }
        ratio = result["contestants"]["dense"]["bytes_per_token"] / slope
        result["contestants"][name]["length_over_dense"] = ratio
        print(
            f"  {name:10} {slope / 1024:7.1f} KiB per token = {slope / hidden:.1f} hidden states, {ratio:.3f}x dense"
        )
    return result


def plan_facts(tiny: bool) -> dict[str, Any]:
    """What the plan shares and carries."""
    size = TINY_SIZE if tiny else TRUE_SIZE
    plan = pod.SharingPlan(lead=make_plan(size["num_hidden_layers"], size["num_key_value_heads"]))  # type: ignore[arg-type]
    return {"share_non_lead": plan.share_non_lead, "carried_heads": carried_heads(plan.lead)}


def race(arguments: argparse.Namespace, limit: int) -> dict[str, Any]:
    """The search of every contestant; one that ends with an error is recorded with it."""
    tiny, found = arguments.tiny, {}
    first, unit, resolution = (192, 32, TINY_RESOLUTION) if tiny else (16_384, 512, RESOLUTION)
    for name in arguments.only.split(","):
        began = time.perf_counter()
        try:
            found[name] = search(
                lambda tokens, name=name: start_attempt(name, tokens, limit, tiny),
                first,
                unit,
                limit,
                resolution,
            )
        except RuntimeError as error:
            found[name] = {"longest_tokens": None, "error": str(error)[-2000:]}
        took = time.perf_counter() - began
        print(f"  {name:10} {found[name]['longest_tokens']} tokens ({took:.0f} s)", flush=True)
    return found


def rows_of(found: dict[str, Any], tiny: bool) -> list[dict[str, Any]]:
    """A row per way to hold the carry; the goal is that of the best."""
    rows, dense = [], found.get("dense", {}).get("longest_tokens")
    for name in CONTESTANTS[1:]:
        own = found.get(name, {}).get("longest_tokens")
        ratio = own / dense if own and dense else None
        met = None if tiny or ratio is None else ratio >= GOAL
        reason = "toy shapes" if tiny else (None if ratio else "a try failed, see its error")
        goal = f">= {GOAL}x" if name != "keep" else "none: the carry kept"
        met = None if name == "keep" else met
        rows.append(goal_row(f"longest training sequence, carry {name}", goal, ratio, "x dense", met, reason))
    return rows


def main() -> int:
    """Search, or one try, or the prediction."""
    words = parser(__doc__, "longest_sequence")
    words.add_argument(
        "--memory-gib", type=float, default=16.0, help="limit of GPU memory in GiB; 0 = all of it"
    )
    words.add_argument("--only", default=",".join(CONTESTANTS), help="contestants, comma-separated")
    words.add_argument(
        "--predict", type=int, nargs="?", const=131_072, help="count bytes at this many tokens"
    )
    words.add_argument("--attempt", type=json.loads, help=argparse.SUPPRESS)
    arguments = words.parse_args()
    if arguments.attempt:
        print(json.dumps(attempt(**arguments.attempt)), flush=True)
        return 0
    if arguments.predict:
        result = header("longest_sequence_predicted", torch.device("cpu"), False)
        result |= {"plan": plan_facts(False), "size": TRUE_SIZE, "predicted": predict(arguments.predict)}
        write_json(arguments.out or RESULTS.parent / "longest_sequence_predicted.json", result)
        return 0
    # asking PyTorch for the device here would keep a CUDA context alive beside every try
    device = torch.device("cpu")
    if not arguments.tiny:
        check = subprocess.run([sys.executable, "-c", GPU_FACTS], capture_output=True, text=True, check=False)
        if check.returncode or not check.stdout.strip():
            print(
                "error: no CUDA device here; this row needs one GPU, --tiny tests the script on CPU",
                file=sys.stderr,
            )
            return 2
    result = header("longest_sequence", device, arguments.tiny)
    whole = 0
    if not arguments.tiny:
        result["device"] = json.loads(check.stdout)
        whole = result["device"]["memory_bytes"]
    limit = TINY_MIB * 2**20 if arguments.tiny else int(arguments.memory_gib * 2**30) or whole
    result |= {
        "limit_bytes": limit,
        "plan": plan_facts(arguments.tiny),
        "size": TINY_SIZE if arguments.tiny else TRUE_SIZE,
    }
    print(f"limit {limit / 2**30:.3f} GiB")
    result["contestants"] = race(arguments, limit)
    result["rows"] = rows_of(result["contestants"], arguments.tiny)
    finish(result, arguments)
    return 0


GPU_FACTS = f"""
import json, sys, torch
sys.path.insert(0, {str(Path(__file__).parent)!r})
from gpu_tools import describe
if torch.cuda.is_available():
    print(json.dumps(describe(torch.device("cuda", 0))))
"""

if __name__ == "__main__":
    raise SystemExit(main())
