"""Attention of a training step on one GPU: PoD layers against the fastest dense attention there is.

Forward and backward are measured.

    # 32K and 128K tokens; writes benchmarks/results/gpu/attention_gpu.json
    python benchmarks/attention_gpu.py
    python benchmarks/attention_gpu.py --dtype float32 --lengths 8192,16384,32768
    python benchmarks/attention_gpu.py --tiny     # toy sizes on CPU: tests the script

One layer of 32 query and 8 KV heads of 128 in bf16, windows 16+4080. 70 % of the KV heads of a model follow,
which is 5.6 of 8: a layer with 5 and one with 6 followers are measured, and weighted 0.4 and 0.6. All
contestants take turns in one process, timed by CUDA events; ratios are taken round by round against the dense
one with the lowest median. Every PoD backend must first agree with the fp32 reference on a short sequence,
output and all gradients; one that does not is no contestant.

The floor counts tiles of 128 x 128: a follower needs as many logits as a dense head, and computes the tiles
at the edges of its windows twice. Extra bytes are the peak beyond inputs, output and gradients, in units of
one fp32 number per token and query head: the log-sum-exp and Delta of flash attention are two.

`moved_bytes` is a figure on paper: what a kernel's programs load and store, tile by tile, without caches.
"""

import argparse
import importlib
import importlib.util
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from gpu_tools import (
    Race,
    choose_device,
    finish,
    goal_row,
    header,
    parser,
    ratios,
    relative_error,
    start,
)
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import pod  # noqa: F401  (registers the implementations)
from pod.kernels.flex import float32_tiles
from pod.modeling.model.attend import IMPLEMENTATIONS, SharedQK, Tokens, Visibility, attend
from pod.modeling.model.sharing import Roles

QUERY_HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
SINKS, RECENT, SHARE = 16, 4080, 0.7
GOALS = {32768: 1.20, 131072: 1.10}
TILE = 128
ERROR_LIMIT = {torch.bfloat16: 2e-2, torch.float32: 1e-4}
"""Relative error of the output and of each gradient; the reference rounds its inputs in the same way."""
NAMES = ("out", "q", "k", "v", "q_lead", "k_lead")


def layers_of_share(share: float, kv_heads: int) -> list[tuple[float, list[int]]]:
    """Weights and followers of the two kinds of layer that make a model of this share.

    In the model, `share` of the (layer, KV head) pairs follow.
    """
    few = int(share * kv_heads)
    many = min(kv_heads, few + 1)
    weight = share * kv_heads - few
    draw = random.Random(0)  # scattered, as plans have them
    kinds = [(1 - weight, sorted(draw.sample(range(kv_heads), few)))]
    return kinds + ([(weight, sorted(draw.sample(range(kv_heads), many)))] if weight else [])


def tile_floor(n: int, sinks: int, recent: int, share: float, tile: int = TILE) -> float:
    """Tiles that a layer computes, over those of dense causal attention.

    Both are computed in every pass, so time cannot be less.
    """
    dense = followers = 0
    for first in range(0, n, tile):
        last = min(n, first + tile) - 1
        causal = last // tile + 1
        window = set(range(max(0, first - recent + 1) // tile, causal))
        window |= set(range(-(-min(sinks, last + 1) // tile)))
        newest_distant = last - recent
        distant = newest_distant // tile - sinks // tile + 1 if newest_distant >= sinks else 0
        dense += causal
        followers += len(window) + distant
    return 1 + share * (followers / dense - 1)


def visible_tiles(n: int, windows: tuple[int, int], rows: int, columns: int) -> dict[str, int]:
    """Tiles of `rows` queries and `columns` keys that hold a logit: of causal attention, of sinks and window,
    and of the rest, which is distant."""
    sinks, recent = windows
    found = {"causal": 0, "near": 0, "distant": 0}
    for first in range(0, n, rows):
        stop = min(n, first + rows)
        all_columns = -(-stop // columns)
        window = max(0, first - recent + 1) // columns
        found["causal"] += all_columns
        found["near"] += all_columns - window + min(-(-min(sinks, stop) // columns), window)
        if stop - recent > sinks:
            found["distant"] += -(-(stop - recent) // columns) - sinks // columns
    return found


class Kernels(NamedTuple):
    """What decides how much a backend moves: tiles of (queries, keys), and bytes of a number.

    Attributes:
        forward, of_queries, of_keys: tiles of the forward pass and of the gradients. Flash sums the gradients
            of queries in fp32 while it makes those of the keys: None.
        parts: kernels that share a follower's near tokens (flash: window and sinks; flex: one).
        merges: whether near and distant parts are outputs of their own, which something merges.
    """

    forward: tuple[int, int]
    of_queries: tuple[int, int] | None
    of_keys: tuple[int, int]
    size: int
    parts: int
    merges: bool = True


FLASH = Kernels((128, 64), None, (64, 128), size=2, parts=2)
"""FlashAttention 2 in bf16 at a head dimension of 128."""


def flex_kernels() -> Kernels:
    """FlexAttention in fp32, with the tiles that `pod.kernels.flex` asks for."""
    tiles = float32_tiles(HEAD_DIM)
    return Kernels(tiles.forward, tiles.of_queries, tiles.of_keys, size=4, parts=1)


def triton_kernels() -> Kernels:
    """The fused kernels of `pod.kernels.triton_prefill` in bf16 on H100 and H200."""
    from pod.kernels.triton_prefill import tiles  # Triton is not everywhere

    found = tiles(torch.bfloat16, HEAD_DIM, 90)
    sizes = ((tile.BLOCK_M, tile.BLOCK_N) for tile in found)
    return Kernels(*sizes, size=2, parts=1, merges=False)


def moved_bytes(n: int, windows: tuple[int, int], kernels: Kernels) -> float:
    """Bytes that a layer's attention loads and stores, forward and backward; SHARE of its KV heads follow."""
    leads = KV_HEADS * (1 - SHARE) * _moved_by(n, windows, kernels, {"causal": 1})
    parts = {"near": kernels.parts, "distant": 1}
    followers = KV_HEADS * SHARE * _moved_by(n, windows, kernels, parts)
    if not kernels.merges:
        return leads + followers
    queries, key = QUERY_HEADS // KV_HEADS * n * HEAD_DIM * kernels.size, n * HEAD_DIM * kernels.size
    count = kernels.parts + 1
    # The merge reads parts and writes their sum. Flex takes its gradient; flash sums gradients of queries.
    merged = (count + 1) * queries + (5 * queries if kernels.of_queries else 3 * queries) + 3 * count * key
    return leads + followers + KV_HEADS * SHARE * merged


def _moved_by(n: int, windows: tuple[int, int], kernels: Kernels, parts: dict[str, int]) -> float:
    """By the kernels of one KV head and its query heads; `parts`: how many kernels share which tiles."""
    groups, number = QUERY_HEADS // KV_HEADS, HEAD_DIM * kernels.size
    count, total = sum(parts.values()), 0.0
    passes = [(kernels.forward, 2), (kernels.of_queries, 3)]  # tensors of queries that a program keeps
    for tile, own in passes:
        if tile is not None:
            tiles = sum(visible_tiles(n, windows, *tile)[part] for part in parts)
            total += groups * (tiles * 2 * tile[1] * number + count * n * (own * number + 8))
    rows, columns = kernels.of_keys
    tiles = sum(visible_tiles(n, windows, rows, columns)[part] for part in parts)
    of_queries = 0 if kernels.of_queries else 2 * HEAD_DIM * 4  # read and added to, in fp32
    total += groups * tiles * rows * (2 * number + of_queries + 8) + count * 4 * n * number
    delta = 2 * number + 4 + (0 if kernels.of_queries else HEAD_DIM * 4 + number)  # and the sums' rounding
    return total + groups * count * n * delta


def make_inputs(
    shape: tuple[int, int, int, int], followers: int, dtype: torch.dtype, device: torch.device
) -> tuple[list[Tensor], Tensor]:
    """q, k, v, q_lead, k_lead with gradients and the output's gradient.

    They are transposed views of `[1, n, heads, d]`.
    """
    query_heads, kv_heads, n, head_dim = shape
    groups = query_heads // kv_heads
    generator = torch.Generator(device).manual_seed(n)

    def made(heads: int) -> Tensor:
        x = torch.randn(1, n, heads, head_dim, generator=generator, device=device, dtype=dtype)
        return x.transpose(1, 2)

    leaves = [made(h).requires_grad_() for h in (query_heads, kv_heads, kv_heads)]
    if followers:
        leaves += [made(followers * groups).requires_grad_(), made(followers).requires_grad_()]
    return leaves, made(query_heads)


def both_ways(attention: Callable[..., Tensor], leaves: Sequence[Tensor], grad: Tensor) -> Callable:
    """A contestant: forward, then all gradients."""

    def run(mark: Callable[[], None]) -> list[Tensor]:
        out = attention(*leaves)
        mark()
        return [out, *torch.autograd.grad(out, leaves, grad)]

    return run


def pod_layer(followers: list[int], windows: tuple[int, int], backend: str) -> Callable[..., Tensor]:
    """Attention of a layer whose KV heads `followers` follow."""
    see = Visibility(*windows)

    def run(q: Tensor, k: Tensor, v: Tensor, *lead: Tensor) -> Tensor:
        roles = Roles([head for head in range(k.shape[1]) if head not in followers], followers)
        return attend(q, Tokens(k, v), SharedQK(*lead), see, backend=backend, roles=roles)[0]

    return run


def sdpa(kind: SDPBackend, repeat: bool = False) -> Callable[..., Tensor]:
    """PyTorch's dense attention by one of its backends.

    repeat: with keys and values copied to every query head.
    """

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if repeat:
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        with sdpa_kernel(kind):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=not repeat)

    return run


def flex(n: int, device: torch.device) -> Callable[..., Tensor]:
    """FlexAttention with a causal block mask, both compiled."""
    make_mask = torch.compile(create_block_mask) if device.type == "cuda" else create_block_mask
    mask = make_mask(lambda b, h, i, j: i >= j, None, None, n, n, device=device)
    run = torch.compile(flex_attention, dynamic=False) if device.type == "cuda" else flex_attention
    return lambda q, k, v: run(q, k, v, block_mask=mask, enable_gqa=True)


def flash_attn(module: str) -> Callable[..., Tensor]:
    """The flash-attn package: 2 (`flash_attn`), 3 (`flash_attn_interface`) or 4 (`flash_attn.cute`)."""
    function = importlib.import_module(module).flash_attn_func

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = function(*(x.transpose(1, 2) for x in (q, k, v)), causal=True)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return run


def own_backends(tiny: bool) -> list[str]:
    """This package's backends for whole sequences; the n x n reference only at toy sizes."""
    return [name for name in IMPLEMENTATIONS if name != "grouped" and (tiny or name != "reference")]


def dense_makers(
    n: int, tiny: bool, dtype: torch.dtype, device: torch.device
) -> dict[str, Callable[[], Callable[..., Tensor]]]:
    """Name → what builds a dense attention. Those of this package are measured and do not count as peers."""
    makers: dict[str, Callable] = {
        "cudnn": lambda: sdpa(SDPBackend.CUDNN_ATTENTION),
        "torch flash": lambda: sdpa(SDPBackend.FLASH_ATTENTION),
        "flex": lambda: flex(n, device),
    }
    if dtype == torch.float32:  # the first two do not take it
        makers["torch efficient"] = lambda: sdpa(SDPBackend.EFFICIENT_ATTENTION, repeat=True)
    for name in ("flash_attn", "flash_attn_interface", "flash_attn.cute"):
        makers[name] = lambda name=name: flash_attn(name)
    for name in own_backends(tiny) if tiny else ():  # at full size, `flash` is PyTorch's op above
        makers[f"own {name}"] = lambda name=name: lambda q, *x: attend(q, Tokens(*x), backend=name)[0]
    return makers


def relative_errors(
    followers: list[int], windows: tuple[int, int], backend: str, shape: tuple, dtype, device
) -> dict[str, float]:
    """Relative error of the output and every gradient.

    It is taken against the fp32 reference with the same rounded inputs.
    """
    leaves, grad = make_inputs(shape, len(followers), dtype, device)
    found = both_ways(pod_layer(followers, windows, backend), leaves, grad)(lambda: None)
    exact = [x.detach().float().requires_grad_() for x in leaves]
    truth = both_ways(pod_layer(followers, windows, "reference"), exact, grad.float())(lambda: None)
    pairs = zip(NAMES, found, truth, strict=True)
    return {name: relative_error(a, b) for name, a, b in pairs}


def correct(backend: str, setting: argparse.Namespace, device: torch.device) -> dict[str, float]:
    """Errors of a backend, largest over both kinds of layer; ValueError when one is too large."""
    n = sum(setting.windows) + setting.checked_rows
    shape = 2 * KV_HEADS, KV_HEADS, n, HEAD_DIM  # fewer query heads: the reference holds n x n
    worst = dict.fromkeys(NAMES, 0.0)
    for _, followers in layers_of_share(SHARE, KV_HEADS):
        errors = relative_errors(followers, setting.windows, backend, shape, setting.dtype, device)
        worst = {name: max(worst[name], errors[name]) for name in NAMES}
    if max(worst.values()) > ERROR_LIMIT[setting.dtype]:
        raise ValueError(f"wrong results, relative errors {worst}, at most {ERROR_LIMIT[setting.dtype]}")
    return worst


def measure(n: int, setting: argparse.Namespace, device: torch.device, failed: dict) -> dict[str, Any]:
    """All contestants at one length."""
    torch._dynamo.reset()  # kernels for this length alone, not for any
    race = Race(device, f"{n} tokens", failed)
    kinds = layers_of_share(SHARE, KV_HEADS)
    shape = setting.query_heads, KV_HEADS, n, HEAD_DIM
    inputs = {
        len(followers): make_inputs(shape, len(followers), setting.dtype, device) for _, followers in kinds
    }
    leaves, grad = next(iter(inputs.values()))
    errors: dict[str, dict] = {}
    for name, make in dense_makers(n, setting.tiny, setting.dtype, device).items():
        race.add(f"dense: {name}", lambda make=make: both_ways(make(), leaves[:3], grad))
    if "dense: cudnn" in race.errors:  # versions that want as many key as query heads
        repeated = sdpa(SDPBackend.CUDNN_ATTENTION, repeat=True)
        race.add("dense: cudnn, keys repeated", lambda: both_ways(repeated, leaves[:3], grad))
    for backend in own_backends(setting.tiny):

        def checked(followers: list[int], backend: str = backend) -> Callable:
            if backend not in errors:
                errors[backend] = correct(backend, setting, device)
            return both_ways(pod_layer(followers, setting.windows, backend), *inputs[len(followers)])

        for _, followers in kinds:
            name = pod_name(backend, followers)
            race.add(name, lambda followers=followers, checked=checked: checked(followers))
    race.run(setting.rounds, setting.budget)
    return report(race, kinds, setting, n, errors)


def pod_name(backend: str, followers: list[int]) -> str:
    """Name of a PoD contestant."""
    return f"pod {backend}: {len(followers)} of {KV_HEADS} follow"


def report(race: Race, kinds: list, setting: argparse.Namespace, n: int, errors: dict) -> dict[str, Any]:
    """Figures of every contestant, and each PoD backend's ratio to the fastest dense peer."""
    unit = 4 * n * setting.query_heads
    contestants = {name: race.summary(name) for name in [*race.seconds, *race.errors]}
    for name in race.seconds:
        taken = race.extra_bytes(name, beyond_results=True)
        contestants[name] |= {"extra_bytes": taken, "extra_fp32_per_token_and_head": taken and taken / unit}
        flops = 3.5 * 4 * HEAD_DIM * setting.query_heads * n * (n + 1) / 2  # forward 2 products, backward 5
        contestants[name]["dense_flops_per_second"] = flops / contestants[name]["seconds"]["median"]
    peers = [name for name in race.seconds if name.startswith("dense: ") and ": own" not in name]
    fastest = min(peers, key=lambda name: contestants[name]["seconds"]["median"], default=None)
    backends = {}
    for backend in IMPLEMENTATIONS:
        names = [(weight, pod_name(backend, followers)) for weight, followers in kinds]
        if fastest is None or not all(name in race.seconds for _, name in names):
            continue
        rounds = zip(*(race.totals(name) for _, name in names), strict=True)
        seconds = [sum(w * s for (w, _), s in zip(names, one, strict=True)) for one in rounds]
        backends[backend] = {
            "over_fastest_dense": ratios(seconds, race.totals(fastest)),
            "extra_fp32_per_token_and_head": contestants[names[-1][1]]["extra_fp32_per_token_and_head"],
            "relative_errors": errors[backend],
        }
    return {
        "length": n,
        "dtype": str(setting.dtype).removeprefix("torch."),
        "moved_bytes_on_paper": moved_on_paper(n, setting.windows),
        "floor": tile_floor(n, *setting.windows, SHARE),
        "fastest_dense": fastest,
        "contestants": contestants,
        "pod": backends,
    }


def moved_on_paper(n: int, windows: tuple[int, int]) -> dict[str, float]:
    """Bytes that a layer moves, by the kernels' name; `triton` only where Triton is."""
    kernels = {"flash, bfloat16": FLASH, "flex, float32": flex_kernels()}
    if importlib.util.find_spec("triton") is not None:
        kernels["triton, bfloat16"] = triton_kernels()
    return {name: moved_bytes(n, windows, one) for name, one in kernels.items()}


def summary_rows(found: dict[str, Any], tiny: bool) -> list[dict[str, Any]]:
    """Time and memory rows of one length, judged by the fastest PoD backend, and one for each other."""
    n = found["length"]
    is_judged = found["dtype"] == "bfloat16"
    limit = GOALS.get(n) if is_judged else None
    name = f"attention fwd+bwd, {n:,} tokens" + ("" if is_judged else f", {found['dtype']}")
    goal = f"<= {limit or 'no goal'} x dense (floor {found['floor']:.3f})"
    memory_name, memory_goal = f"{name}: extra memory", "<= 2.1 (log-sum-exp and Delta)"
    memory_unit = "fp32 numbers per token and query head"
    if not found["pod"]:
        reason = "no PoD backend or no dense peer ran; see the contestants' errors"
        return [
            goal_row(name, goal, None, "x dense", None, reason),
            goal_row(memory_name, memory_goal, None, memory_unit, None, reason),
        ]
    best = min(found["pod"], key=lambda b: found["pod"][b]["over_fastest_dense"]["median"])
    ratio, memory = (
        found["pod"][best]["over_fastest_dense"]["median"],
        found["pod"][best]["extra_fp32_per_token_and_head"],
    )
    judged = limit is not None and not tiny
    peer = f"against {found['fastest_dense'].removeprefix('dense: ')}"
    others = []
    for backend, row in found["pod"].items():
        if backend != best:
            other = row["over_fastest_dense"]["median"]
            others.append(goal_row(f"{name}: {backend}", "beside the fastest", other, "x dense", None, peer))
    return [
        goal_row(name, goal, ratio, "x dense", ratio <= limit if judged else None, f"{best}, {peer}"),
        goal_row(
            memory_name, memory_goal, memory, memory_unit, memory <= 2.1 if judged and memory else None, best
        ),
        *others,
    ]


def print_length(found: dict[str, Any]) -> None:
    """One line per contestant, then the ratios."""
    print(f"{found['length']:,} tokens, tile floor {found['floor']:.3f}")
    for name, moved in found["moved_bytes_on_paper"].items():
        print(f"  on paper {name} moves {moved / 1e9:,.0f} GB")
    for name, row in sorted(found["contestants"].items()):
        if "error" in row:
            print(f"  {name:32} {row['error']}")
            continue
        parts = " + ".join(f"{1000 * part['median']:.1f}" for part in row.get("seconds_of_parts", []))
        extra = row["extra_fp32_per_token_and_head"]
        held = "" if extra is None else f", extra {extra:.2f} fp32 per token and head"
        speed = row["dense_flops_per_second"] / 1e12
        print(f"  {name:32} {1000 * row['seconds']['median']:9.1f} ms ({parts}), {speed:6.1f} TFLOP/s{held}")
    for backend, row in found["pod"].items():
        ratio = row["over_fastest_dense"]
        print(
            f"  pod {backend}: {ratio['median']:.3f}x {found['fastest_dense']} "
            f"({ratio['min']:.3f}–{ratio['max']:.3f}), "
            f"{ratio['median'] / found['floor']:.3f}x the floor"
        )


def main(arguments: argparse.Namespace) -> int:
    """Measure every length and write the JSON."""
    device = choose_device(arguments.tiny)
    if arguments.tiny:
        sizes = {
            "lengths": [192],
            "windows": (4, 60),
            "query_heads": 16,
            "dtype": torch.float32,
            "checked_rows": 40,
        }
    else:
        lengths = [int(n) for n in arguments.lengths.split(",")]
        sizes = {"lengths": lengths, "windows": (SINKS, RECENT), "query_heads": QUERY_HEADS}
        sizes |= {"dtype": getattr(torch, arguments.dtype), "checked_rows": 1000}
    rounds = 2 if arguments.tiny else arguments.rounds
    setting = argparse.Namespace(**sizes, tiny=arguments.tiny, rounds=rounds, budget=arguments.budget)
    result = header("attention_gpu", device, arguments.tiny)
    result["setting"] = {
        "query_heads": setting.query_heads,
        "kv_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "windows": list(setting.windows),
        "share_followers": SHARE,
        "layers": [
            {"weight": weight, "followers": heads} for weight, heads in layers_of_share(SHARE, KV_HEADS)
        ],
        "dtype": str(setting.dtype).removeprefix("torch."),
    }
    result["lengths"], result["rows"] = [], []
    for n in setting.lengths:
        found = measure(n, setting, device, arguments.failed)
        print_length(found)
        result["lengths"].append(found)
        result["rows"] += summary_rows(found, arguments.tiny)
    finish(result, arguments)
    return 0


def read_arguments() -> argparse.Namespace:
    """Command line."""
    words = parser(__doc__, "attention_gpu")
    words.add_argument("--lengths", default="32768,131072", help="tokens, comma-separated")
    words.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    words.add_argument("--rounds", type=int, default=7)
    words.add_argument("--budget", type=float, default=50.0, help="seconds of timed rounds per length")
    return words.parse_args()


if __name__ == "__main__":
    sys.exit(start(main, read_arguments()))
