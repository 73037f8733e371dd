"""Longest sequence that one GPU trains, PoD against dense.

Both use ZeRO-3, the optimizer in host memory, a tiled feed-forward part and a chunked loss.

    # one GPU; writes benchmarks/results/gpu/longest_sequence.json
    python benchmarks/longest_sequence.py
    python benchmarks/longest_sequence.py --tiny       # toy shapes on CPU: tests the script
    # no GPU: bytes of every operation at the true shapes, no arithmetic
    python benchmarks/longest_sequence.py --predict

Shapes of a model of 1.2 billion weights, random, bf16, activation checkpointing; 70 % of the (layer, KV head)
pairs follow, windows 16+4080. Contestants: dense, and PoD with train.shared_qk = keep, offload and
recompute. A try is a training step of one row, after a short one which allocates what does not grow. It fails
when memory runs out; its process then ends and the next try starts a fresh one. Two tries that fit predict
the longest row, a bisection finds it to within 3 % unless --budget ends it.

Memory is limited to --memory-gib, so that the search ends in minutes: the time of a row grows with its
square, the ratio of lengths hardly depends on the limit once activations are most of it. On a CPU, and in a
prediction, the bytes of all live tensors are counted, without those that stand for host memory; a try fails
when their peak passes the limit.
"""

import argparse
import json
import multiprocessing
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from gpu_tools import RESULTS, finish, goal_row, header, parser
from torch.utils._python_dispatch import _disable_current_modes

import pod
from pod.errors import one_line
from pod.files import write_json
from pod.measure import measured_memory
from pod.modeling.model.attend import IMPLEMENTATIONS, Call, Implementation
from pod.training.args import TrainArgs
from pod.training.predict.shapes import shared_qk_heads
from pod.training.run import shared_qk

CONTESTANTS = ("dense", "keep", "offload", "recompute")
GOAL = 0.9
RESOLUTION = 0.03
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
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_sink_tokens": 2,
    "num_recent_tokens": 30,
}
SHARE_NON_LEAD = 0.7
TINY_MIB = 2


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
        shared_qk="keep" if contestant == "dense" else contestant,  # type: ignore[arg-type]
        mlp_tile_tokens=64 if tiny else 16_384,
        loss_chunk_mib=1 if tiny else 256,
        dtype="float32" if tiny else "bfloat16",
        offload_optimizer="cpu",
    )


class LiveBytes(measured_memory.LiveBytes):
    """Bytes of all tensors that live, those left out that stand for host memory."""

    def host(self, function: Callable) -> Callable:
        """The function, with what it allocates counted as host memory."""

        def uncounted(*arguments):
            with _disable_current_modes():
                found = function(*arguments)
            self.ignore([found])
            return found

        return uncounted


@contextmanager
def count_on_cpu(decoder: Any) -> Iterator[LiveBytes]:
    """Count live bytes; `shared_qk`'s copies are host memory."""
    with LiveBytes() as live:
        held = getattr(decoder, "shared_qk_memory", None)
        if isinstance(held, shared_qk.OffloadedSharedQK):
            held.to_host = live.host(shared_qk.host_copy)
        yield live


def make_step(
    contestant: str, tiny: bool, longest: int
) -> tuple[Callable[[int], None], Callable[[], None], Any]:
    """(forward and backward of a random row of that many tokens, update, decoder). Random weights."""
    import deepspeed

    from pod.training.deepspeed_bridge import drop_shared_qk_hooks
    from pod.training.run.activations import save_activations
    from pod.training.run.loss import LanguageModelLoss
    from pod.training.run.mesh import Mesh
    from pod.training.run.optimization import deepspeed_config, make_optimizer

    mesh, args = Mesh(1), train_args(contestant, tiny)
    torch.manual_seed(0)
    with mesh.device:
        model = pod.PodForCausalLM(model_config(contestant, tiny))
    save_activations(model, args, longest)
    module = LanguageModelLoss(model, args.loss_chunk_mib).train()
    settings = deepspeed_config(args)
    if tiny:  # its buffers would be larger than everything else
        settings["zero_optimization"] |= {"reduce_bucket_size": 50_000, "stage3_prefetch_bucket_size": 50_000}
    engine, *_ = deepspeed.initialize(model=module, optimizer=make_optimizer(module, args), config=settings)
    drop_shared_qk_hooks(model)

    def run(tokens: int) -> None:
        for layer in model.model.layers:
            layer.mlp.train_tiles = args.mlp_tiles(tokens)
        ids = torch.randint(model.vocab_size, (1, tokens), device=mesh.device)
        loss = engine(input_ids=ids, labels=ids.roll(-1, 1), doc_ids=torch.zeros_like(ids))
        engine.backward(loss / tokens)

    return run, engine.step, model.model


def measured(run: Callable[[int], None], tokens: int, decoder: Any, cuda: bool) -> int:
    """Peak bytes of forward and backward."""
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        run(tokens)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()
    with count_on_cpu(decoder) as live:
        run(tokens)
    return live.peak


def serve(pipe: Any, contestant: str, limit: int, tiny: bool) -> None:
    """Tries of one process: takes lengths from the pipe, answers each.

    Ends at the first that runs out of memory.
    """
    try:
        cuda = torch.cuda.is_available() and not tiny
        if cuda:
            share = limit / torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, share))
        run, update, decoder = make_step(contestant, tiny, 256)
        run(64 if tiny else 256)
        update()
        while tokens := pipe.recv():
            began = time.perf_counter()
            try:
                peak = measured(run, tokens, decoder, cuda)
            except torch.OutOfMemoryError as error:
                pipe.send(
                    {
                        "tokens": tokens,
                        "fits": False,
                        "peak_bytes": None,
                        "error": one_line(error, with_class=True, limit=200),
                    }
                )
                return
            seconds = time.perf_counter() - began
            update()
            pipe.send(
                {"tokens": tokens, "fits": cuda or peak <= limit, "peak_bytes": peak, "seconds": seconds}
            )
    except Exception as error:  # noqa: BLE001  the parent records it
        pipe.send({"failed": one_line(error, with_class=True)[-2000:]})


class Tries:
    """Tries of a contestant in child processes; a fresh one after each that ran out of memory.

    done: results so far; after_each: called when there is one more.
    """

    def __init__(self, contestant: str, limit: int, tiny: bool, after_each: Callable[[], None]):
        self.settings, self.after_each = (contestant, limit, tiny), after_each
        self.done: list[dict[str, Any]] = []
        self.child: Any = None
        self.pipe: Any = None

    def __call__(self, tokens: int) -> dict[str, Any]:
        """One try of that many tokens.

        Raises:
            RuntimeError: it ended with another error than a lack of memory.
        """
        if self.child is None:
            # a fork pays the imports once, but breaks CUDA
            context = multiprocessing.get_context("fork" if self.settings[2] else "spawn")
            self.pipe, other = context.Pipe()
            self.child = context.Process(target=serve, args=(other, *self.settings))
            self.child.start()
            other.close()
        self.pipe.send(tokens)
        try:
            result = self.pipe.recv()
        except EOFError:
            self.child.join()
            result = {"failed": f"the process ended with code {self.child.exitcode}"}
        if "failed" in result:
            raise RuntimeError(f"{self.settings[0]}, {tokens} tokens: {result['failed']}")
        self.done.append(result)
        self.after_each()
        if result["peak_bytes"] is None:
            self.close()
        return result

    def close(self) -> None:
        """End the child, if there is one."""
        if self.child is not None:
            with suppress(OSError):
                self.pipe.send(0)
            self.child.join()
            self.child = None


def search(
    start: Callable[[int], dict[str, Any]],
    first: int,
    unit: int,
    limit: int,
    resolution: float,
    deadline: float,
) -> tuple[int, int | None]:
    """Longest row that fits and shortest that does not (None: not found before the deadline).

    Args:
        start: one try of that many tokens.
        first: a row that fits. It and its double predict where the bisection begins.
        unit: lengths are multiples of this many tokens.
        limit: bytes, for the prediction.
        resolution: stop when the two lengths differ by less than this share.
        deadline: no try starts after this time of `time.perf_counter`.

    Raises:
        RuntimeError: the first row does not fit.
    """
    tries = [start(first), start(2 * first)]
    if not tries[0]["fits"]:
        raise RuntimeError(f"{first} tokens do not fit in {limit / 2**20:.0f} MiB: give more memory")
    low, high = (2 * first, None) if tries[1]["fits"] else (first, 2 * first)
    slope = bytes_per_token(tries)
    guess = low + (limit - tries[1]["peak_bytes"]) / slope if high is None and slope else 1.4 * low
    step = -resolution / 2
    while time.perf_counter() < deadline and (high is None or high - low > max(unit, resolution * low)):
        if high is None:
            asked, step = max(low + unit, guess * (1 + step)), max(step, 0) * 2 + resolution / 2
        else:
            asked = (low + high) / 2
        asked = int(asked) // unit * unit
        if asked in (low, high):
            break
        low, high = (asked, high) if start(asked)["fits"] else (low, asked)
    return low, high


def bytes_per_token(tries: list[dict[str, Any]]) -> float | None:
    """Slope of the peak over the length between the last two tries that report one."""
    known = [(one["tokens"], one["peak_bytes"]) for one in tries if one["peak_bytes"] is not None][-2:]
    return (known[1][1] - known[0][1]) / (known[1][0] - known[0][0]) if len(known) == 2 else None


class CountedAttention(torch.autograd.Function):
    """Attention as a fused kernel holds it.

    Inputs, output and log-sum-exp for backward, gradients in their own type.
    """

    @staticmethod
    def forward(ctx, *inputs):
        out = torch.empty_like(inputs[0])
        lse = inputs[0].new_empty(inputs[0].shape[:3], dtype=torch.float32)
        ctx.save_for_backward(*inputs, out, lse)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx, *grads):
        *inputs, _, _ = ctx.saved_tensors
        return tuple(torch.empty_like(x) for x in inputs)


def counted_attention(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Of heads in any role."""
    return CountedAttention.apply(call.q, *call.tokens, *([] if call.lead is None else call.lead[:2]))


def predicted_peak(contestant: str, tokens: int) -> int:
    """Peak bytes of forward and backward at the true shapes without arithmetic.

    Weights, loss and optimizer are left out.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    from pod.training.run.activations import save_activations

    IMPLEMENTATIONS["counted"] = Implementation(counted_attention, lambda call: None)
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
    """Bytes per token of every contestant from two lengths, in bytes and in hidden states.

    Also ratios to dense.
    """
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
            f"  {name:10} {slope / 1024:7.1f} KiB per token = {slope / hidden:.1f} hidden states, "
            f"{ratio:.3f}x dense"
        )
    return result


def plan_facts(tiny: bool) -> dict[str, Any]:
    """What the plan shares and hands on."""
    size = TINY_SIZE if tiny else TRUE_SIZE
    lead = make_plan(size["num_hidden_layers"], size["num_key_value_heads"])
    plan = pod.SharingPlan(lead=lead)  # type: ignore[arg-type]
    return {"share_followers": plan.share_followers, "shared_qk_heads": shared_qk_heads(plan.lead)}


def race(arguments: argparse.Namespace, limit: int, save: Callable[[dict[str, Any]], None]) -> None:
    """The search of every contestant, saved after each try.

    One that ends with an error is recorded with it.
    """
    tiny, found = arguments.tiny, {}
    names = arguments.only.split(",")
    if tiny:
        import deepspeed  # noqa: F401  before the forks
    began = time.perf_counter()
    for place, name in enumerate(names):
        found[name] = {"longest_tokens": None}
        tries = Tries(name, limit, tiny, lambda: save(found))
        found[name]["tries"] = tries.done
        deadline = began + arguments.budget * (place + 1) / len(names)
        try:
            sizes = (128, 32, limit, 0.15) if tiny else (16_384, 512, limit, RESOLUTION)
            found[name]["longest_tokens"], found[name]["does_not_fit"] = search(tries, *sizes, deadline)
            found[name]["bytes_per_token"] = bytes_per_token(
                sorted(tries.done, key=lambda one: one["tokens"])
            )
        except RuntimeError as error:
            found[name]["error"] = str(error)[-2000:]
        tries.close()
        save(found)
        print(f"  {name:10} {found[name]['longest_tokens']} tokens ({len(tries.done)} tries)", flush=True)


def rows_of(found: dict[str, Any], tiny: bool) -> list[dict[str, Any]]:
    """A row per way to hold `shared_qk`; the goal is that of the best."""
    rows, dense = [], found.get("dense", {}).get("longest_tokens")
    for name in CONTESTANTS[1:]:
        own = found.get(name, {}).get("longest_tokens")
        ratio = own / dense if own and dense else None
        met = None if tiny or ratio is None else ratio >= GOAL
        reason = None if ratio else "a try failed, see its error"
        if tiny:
            reason = "toy shapes"
        goal = f">= {GOAL}x" if name != "keep" else "none: `shared_qk` kept"
        met = None if name == "keep" else met
        rows.append(
            goal_row(f"longest training sequence, shared_qk {name}", goal, ratio, "x dense", met, reason)
        )
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
    words.add_argument("--budget", type=float, default=220.0, help="seconds after which no try starts")
    arguments = words.parse_args()
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

    def save(found: dict[str, Any]) -> None:
        result.update(contestants=found, rows=rows_of(found, arguments.tiny))
        if arguments.out:
            write_json(arguments.out, result)

    race(arguments, limit, save)
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
