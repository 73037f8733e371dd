"""Attention of one decoded token on one GPU.

A stack of PoD layers is held against the fastest dense decoding there is.

    # 32K and 128K, batch 1 and 8; writes benchmarks/results/gpu/decode_attention_gpu.json
    python benchmarks/decode_attention_gpu.py
    python benchmarks/decode_attention_gpu.py --tiny  # toy sizes on CPU: tests the script

Ten layers of 32 query and 8 KV heads of 128 in bf16, every layer with keys and values of its own, so that
nothing is found again in the L2 cache. In PoD every KV head leads in three layers and follows in seven: 70 %
follow, 35 % of the bytes are saved. Windows 16+4080. The whole stack is one CUDA graph for PoD and for every
dense contestant; they take turns in one process, and ratios are taken round by round against the dense one
with the lowest median. Dense decoding through our own kernel is a peer like the others.

Bytes are what has to be read and written: keys and values, and for PoD the rings of window keys and the
leads' logits in fp32, which are written once and read by every follower. Bandwidth is held against a large
copy measured in the same race.
"""

import argparse
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from gpu_tools import (
    Race,
    choose_device,
    copier,
    finish,
    goal_row,
    graphed,
    header,
    parser,
    ratios,
    relative_error,
    start,
)
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention

import pod  # noqa: F401  (a checkout that does not import is told from a kernel that does not run)
from pod.modeling.model import decode
from pod.modeling.model.sharing import Roles

QUERY_HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
SINKS, RECENT = 16, 4080
BLOCKS = (4, 3, 3)
"""Layers that share a lead, in turns: three leads and seven followers of ten."""
LAYERS = sum(BLOCKS)
GOALS = {32768: 0.76, 131072: 0.73}
COPY_SHARE = 0.75
COPY_BYTES = 1 << 30
ERROR_LIMIT = {torch.bfloat16: 2e-2, torch.float32: 1e-4}
TAUS = {"all skip": 1e-30, "none skips": 1.0}
"""Gate thresholds that every group passes, and that none does: between them lies every real threshold."""


def lead_table(kv_heads: int = KV_HEADS) -> list[list[int]]:
    """`lead[layer][head]`: the blocks of layers begin at other layers from head to head."""
    table = [[0] * kv_heads for _ in range(LAYERS)]
    for head in range(kv_heads):
        shift = head % len(BLOCKS)
        layer = 0
        for size in BLOCKS[shift:] + BLOCKS[:shift]:
            for offset in range(size):
                table[layer + offset][head] = layer
            layer += size
    return table


def roles_of(table: list[list[int]], layer: int) -> Roles:
    """Heads of a layer that lead, that follow, and that later layers follow."""
    heads = range(len(table[layer]))
    leads = [h for h in heads if table[layer][h] == layer]
    followed = [h for h in leads if any(row[h] == layer for row in table[layer + 1 :])]
    return Roles(leads, [h for h in heads if h not in leads], followed)


@dataclass(frozen=True)
class Shape:
    """Sizes of one setting. n: tokens of every row."""

    batch: int
    n: int
    groups: int
    windows: tuple[int, int]
    dtype: torch.dtype
    device: torch.device

    @property
    def token_bytes(self) -> int:
        """Bytes of one key or value."""
        return HEAD_DIM * self.dtype.itemsize

    def dense_bytes(self) -> int:
        """Keys and values of the stack."""
        return 2 * LAYERS * KV_HEADS * self.batch * self.n * self.token_bytes

    def pod_bytes(self, table: list[list[int]], skip: bool = False) -> int:
        """What PoD reads and writes.

        skip: without distant values of followers, as when every gate passes its threshold.
        """
        window = min(self.n, sum(self.windows))
        distant = self.n - window
        logits = 4 * self.groups * distant
        total = 0
        for layer in range(LAYERS):
            for head in range(KV_HEADS):
                if table[layer][head] == layer:
                    used = any(row[head] == layer for row in table[layer + 1 :])
                    total += 2 * self.n * self.token_bytes + logits * used
                elif skip:
                    total += 2 * window * self.token_bytes
                else:
                    total += (self.n + window) * self.token_bytes + logits
        return total * self.batch


class Stack:
    """Ten layers of stored tokens; PoD and dense share the values.

    Fewer stores, used in turns, where memory is short.
    """

    def __init__(self, shape: Shape, lengths: list[int] | None = None):
        self.shape, self.table = shape, lead_table()
        device, dtype = shape.device, shape.dtype
        generator = torch.Generator(device).manual_seed(shape.n)

        def made(*sizes: int) -> Tensor:
            return torch.randn(sizes, generator=generator, device=device, dtype=dtype)

        self.roles = [roles_of(self.table, layer) for layer in range(LAYERS)]
        stored = shape.batch, KV_HEADS, shape.n, HEAD_DIM
        stores = range(_stores_that_fit(shape))
        self.values, self.keys = [made(*stored) for _ in stores], [made(*stored) for _ in stores]
        self.lead_keys = [
            made(shape.batch, len(r.leads), shape.n, HEAD_DIM) if r.leads else None for r in self.roles
        ]
        slots = sum(shape.windows)
        self.rings = [
            made(shape.batch, len(r.followers), slots, HEAD_DIM) if r.followers else None for r in self.roles
        ]
        query_heads = KV_HEADS * shape.groups
        self.queries = [made(shape.batch, query_heads, HEAD_DIM) for _ in range(LAYERS)]
        self.outs = [torch.empty_like(q) for q in self.queries]
        self.lengths = torch.tensor(lengths or [shape.n] * shape.batch, dtype=torch.int32, device=device)
        self.buffers = decode.make_buffers(
            shape.batch, KV_HEADS, shape.groups, HEAD_DIM, shape.n, dtype, device
        )
        self.all_lead = Roles(list(range(KV_HEADS)))

    def pod(self, backend: str, tau: float | None = None) -> list[Tensor]:
        """One token through all layers."""
        for layer, roles in enumerate(self.roles):
            self._decode(layer, self.lead_keys[layer], self.rings[layer], roles, backend, tau)
        return self.outs

    def dense(self, backend: str) -> list[Tensor]:
        """The same with every head leading."""
        for layer in range(LAYERS):
            self._decode(layer, self.keys[layer % len(self.keys)], None, self.all_lead, backend, None)
        return self.outs

    def peer(self, attention: Callable[[Tensor, Tensor, Tensor], Tensor]) -> list[Tensor]:
        """The same by another dense attention of `[B, Hq, 1, d]` on `[B, H, n, d]`."""
        stores = len(self.keys)
        return [
            attention(q[:, :, None], self.keys[i % stores], self.values[i % stores])[:, :, 0]
            for i, q in enumerate(self.queries)
        ]

    def _decode(self, layer: int, keys, rings, roles: Roles, backend: str, tau: float | None) -> None:
        decode.pod_decode(
            self.queries[layer],
            keys,
            rings,
            self.values[layer % len(self.values)],
            self.lengths,
            roles,
            self.buffers,
            *self.shape.windows,
            tau=tau,
            backend=backend,
            out=self.outs[layer],
        )


def _stores_that_fit(shape: Shape) -> int:
    """Layers that get keys and values of their own: all of them, if half of the free memory holds them."""
    if shape.device.type != "cuda":
        return LAYERS
    free, _ = torch.cuda.mem_get_info(shape.device)
    return max(2, min(LAYERS, int(free / 2 / (shape.dense_bytes() / LAYERS))))


def sdpa(kind: SDPBackend, rows: bool = False) -> Callable[..., Tensor]:
    """PyTorch's attention.

    rows: the query heads of a KV head as rows of one query, which read each key once.
    """

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(kind):
            if rows:
                grouped = q.unflatten(1, (k.shape[1], -1))[:, :, :, 0]
                return F.scaled_dot_product_attention(grouped, k, v).flatten(1, 2)[:, :, None]
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    return run


def flex(device: torch.device) -> Callable[..., Tensor]:
    """FlexAttention's decoding kernel."""
    run = torch.compile(flex_attention, dynamic=False) if device.type == "cuda" else flex_attention
    return lambda q, k, v: run(q, k, v, enable_gqa=True)


def flash_kvcache(module: str) -> Callable[..., Tensor]:
    """flash-attn's decoding: `flash_attn` (2) or `flash_attn_interface` (3)."""
    function = importlib.import_module(module).flash_attn_with_kvcache
    return lambda q, k, v: function(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)


def peers(device: torch.device) -> dict[str, Callable[[], Callable[..., Tensor]]]:
    """Name → what builds a dense decoding that is not ours."""
    makers: dict[str, Callable[[], Callable[..., Tensor]]] = {
        "flex": lambda: flex(device),
        "flash_attn": lambda: flash_kvcache("flash_attn"),
        "flash_attn_interface": lambda: flash_kvcache("flash_attn_interface"),
    }
    for name, kind in (("torch flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION)):
        makers[name] = lambda kind=kind: sdpa(kind)
        makers[f"{name}, groups as rows"] = lambda kind=kind: sdpa(kind, rows=True)
    return makers


def backends(device: torch.device) -> list[str]:
    """Own backends that a CUDA graph can hold; all of them on a CPU."""
    return [name for name in decode.DECODERS if device.type != "cuda" or name != "grouped"]


def largest_error(found: list[Tensor], truth: list[Tensor]) -> float:
    """Largest relative error over the layers."""
    return max(relative_error(a, b) for a, b in zip(found, truth, strict=True))


def checked_error(setting: argparse.Namespace, backend: str, device: torch.device) -> float:
    """A backend against grouped products in fp64 with the same rounded inputs.

    Rows have unlike length. ValueError when the backend is wrong.
    """
    n = sum(setting.windows) + setting.checked_rows
    shape = Shape(2, n, QUERY_HEADS // KV_HEADS, setting.windows, setting.dtype, device)
    stack = Stack(shape, lengths=[n, n - setting.checked_rows // 2])
    found = [x.clone() for x in stack.pod(backend)]
    exact = Stack(
        Shape(2, n, shape.groups, shape.windows, torch.float64, device), lengths=stack.lengths.tolist()
    )
    for name in ("keys", "values", "lead_keys", "rings", "queries"):
        setattr(exact, name, [None if x is None else x.double() for x in getattr(stack, name)])
    error = largest_error(found, exact.pod("grouped"))
    if error > ERROR_LIMIT[setting.dtype]:
        raise ValueError(f"wrong results, relative error {error:.2e}, at most {ERROR_LIMIT[setting.dtype]}")
    return error


def check_peer(stack: Stack, found: list[Tensor]) -> None:
    """A dense contestant against plain fp32 attention, first row and layer.

    ValueError when it does something else.
    """
    q = stack.queries[0][:1].float().unflatten(1, (KV_HEADS, -1))
    k, v = stack.keys[0][:1].float(), stack.values[0][:1].float()
    truth = ((q @ k.mT * HEAD_DIM**-0.5).softmax(-1) @ v).flatten(1, 2)
    error = relative_error(found[0][:1], truth)
    if error > ERROR_LIMIT[stack.shape.dtype]:
        raise ValueError(
            f"wrong results, relative error {error:.2e}, at most {ERROR_LIMIT[stack.shape.dtype]}"
        )


def measure(shape: Shape, setting: argparse.Namespace, failed: dict) -> dict[str, Any]:
    """All contestants at one length and batch."""
    race = Race(shape.device, f"{shape.n} tokens, batch {shape.batch}", failed)
    stack = Stack(shape)
    # a replay of a tenth of a millisecond is timed as many; 3e12 bytes per second is about what today's chips
    # reach
    replays = 1 if setting.tiny else max(1, min(100, int(0.02 / (shape.dense_bytes() / 3e12))))

    def contestant(step: Callable[[], list[Tensor]], check: bool) -> Callable:
        if check:
            check_peer(stack, step())
        replay = graphed(step, shape.device)

        def run(mark: Callable[[], None]) -> None:
            for _ in range(replays):
                replay()

        return run

    for name, make in peers(shape.device).items():
        race.add(f"dense: {name}", lambda make=make: contestant(_peer_step(stack, make()), True))
    errors = {}
    for backend in backends(shape.device):
        race.add(f"dense: own {backend}", lambda b=backend: contestant(lambda: stack.dense(b), True))

        def entered(backend: str, tau: float | None = None) -> Callable:
            if backend not in errors:
                errors[backend] = checked_error(setting, backend, shape.device)
            return contestant(lambda: stack.pod(backend, tau), False)

        race.add(f"pod: {backend}", lambda b=backend, entered=entered: entered(b))
        for name, tau in TAUS.items():
            race.add(f"tau: {backend}, {name}", lambda b=backend, t=tau, entered=entered: entered(b, t))
    copy, copied = copier(shape.device, 1 << 20 if setting.tiny else COPY_BYTES)
    race.add("copy", lambda: copy)
    race.run(setting.rounds, setting.budget)
    return report(race, stack, replays, copied, errors)


def _peer_step(stack: Stack, attention: Callable[..., Tensor]) -> Callable[[], list[Tensor]]:
    return lambda: stack.peer(attention)


def report(race: Race, stack: Stack, replays: int, copied: int, errors: dict[str, float]) -> dict[str, Any]:
    """Seconds per token, bandwidth and ratios."""
    shape = stack.shape
    contestants = {name: race.summary(name) for name in [*race.seconds, *race.errors]}
    for name, row in contestants.items():
        if "seconds" in row and name != "copy":
            row["seconds"] = {
                key: x if key == "repeats" else x / replays for key, x in row["seconds"].items()
            }
    dense = [name for name in race.seconds if name.startswith("dense: ")]
    fastest = min(dense, key=lambda name: contestants[name]["seconds"]["median"], default=None)
    dense_bytes, pod_bytes = shape.dense_bytes(), shape.pod_bytes(stack.table)
    copy = copied / contestants["copy"]["seconds"]["median"] if "copy" in race.seconds else None
    for name in race.seconds:
        if name == "copy":
            continue
        skips = name.endswith("all skip")
        moved = dense_bytes if name in dense else shape.pod_bytes(stack.table, skip=skips)
        row = contestants[name]
        row["bytes"] = moved
        row["bytes_per_second"] = moved / row["seconds"]["median"]
        row["share_of_copy"] = copy and row["bytes_per_second"] / copy
        if fastest is not None:
            row["over_fastest_dense"] = ratios(race.totals(name), race.totals(fastest))
    return {
        "length": shape.n,
        "batch": shape.batch,
        "stores": len(stack.keys),
        "dense_bytes": dense_bytes,
        "pod_bytes": pod_bytes,
        "floor": pod_bytes / dense_bytes,
        "copy_bytes_per_second": copy,
        "fastest_dense": fastest,
        "relative_errors": errors,
        "contestants": contestants,
    }


def summary_rows(found: dict[str, Any], tiny: bool) -> list[dict[str, Any]]:
    """Time and bandwidth rows of one setting."""
    name = f"decode attention, {found['length']:,} tokens, batch {found['batch']}"
    limit = None if tiny else GOALS.get(found["length"])
    goal = f"<= {limit or 'no goal'} x dense (byte floor {found['floor']:.3f})"
    bandwidth_goal = f">= {COPY_SHARE} of the copy bandwidth"
    ran = [
        n for n, row in found["contestants"].items() if n.startswith("pod: ") and "over_fastest_dense" in row
    ]
    if not ran:
        reason = "no PoD backend or no dense peer ran; see the contestants' errors"
        return [
            goal_row(name, goal, None, "x dense", None, reason),
            goal_row(f"{name}: bandwidth", bandwidth_goal, None, "of copy", None, reason),
        ]
    best = min(ran, key=lambda n: found["contestants"][n]["seconds"]["median"])
    row = found["contestants"][best]
    ratio, share = row["over_fastest_dense"]["median"], row["share_of_copy"]
    note = f"{best.removeprefix('pod: ')}, against {found['fastest_dense'].removeprefix('dense: ')}"
    enough = share >= COPY_SHARE if limit and share is not None else None
    return [
        goal_row(name, goal, ratio, "x dense", ratio <= limit if limit else None, note),
        goal_row(f"{name}: bandwidth", bandwidth_goal, share, "of copy", enough, best.removeprefix("pod: ")),
    ]


def print_setting(found: dict[str, Any]) -> None:
    """One line per contestant."""
    copy = found["copy_bytes_per_second"]
    print(
        f"{found['length']:,} tokens, batch {found['batch']}: "
        f"{found['dense_bytes'] / 1e9:.2f} GB dense, byte floor "
        f"{found['floor']:.3f}, copy {(copy or 0) / 1e12:.2f} TB/s"
    )
    for name, row in sorted(found["contestants"].items()):
        if "error" in row:
            print(f"  {name:32} {row['error']}")
        elif name != "copy":
            ratio = row.get("over_fastest_dense", {"median": float("nan"), "min": 0.0, "max": 0.0})
            print(
                f"  {name:32} {1e6 * row['seconds']['median']:10.1f} us per token  "
                f"{ratio['median']:.3f}x dense "
                f"({ratio['min']:.3f}–{ratio['max']:.3f})  {row['share_of_copy'] or 0:.2f} of copy"
            )


def main(arguments: argparse.Namespace) -> int:
    """Measure every setting and write the JSON."""
    device = choose_device(arguments.tiny)
    if arguments.tiny:
        settings, windows, dtype = [(2, 64)], (4, 28), torch.float32
        checked, rounds = 20, 2
    else:
        batches = [int(b) for b in arguments.batches.split(",")]
        settings = [(batch, int(n)) for n in arguments.lengths.split(",") for batch in batches]
        windows, dtype, checked, rounds = (SINKS, RECENT), torch.bfloat16, 1000, arguments.rounds
    setting = argparse.Namespace(
        windows=windows,
        dtype=dtype,
        checked_rows=checked,
        rounds=rounds,
        budget=arguments.budget,
        tiny=arguments.tiny,
    )
    result = header("decode_attention_gpu", device, arguments.tiny)
    result["setting"] = {
        "layers": LAYERS,
        "query_heads": QUERY_HEADS,
        "kv_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "windows": list(windows),
        "lead": lead_table(),
        "dtype": str(dtype).removeprefix("torch."),
    }
    result["settings"], result["rows"] = [], []
    for batch, n in settings:
        shape = Shape(batch, n, QUERY_HEADS // KV_HEADS, windows, dtype, device)
        found = measure(shape, setting, arguments.failed)
        print_setting(found)
        result["settings"].append(found)
        result["rows"] += summary_rows(found, arguments.tiny)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    finish(result, arguments)
    return 0


def read_arguments() -> argparse.Namespace:
    """Command line."""
    words = parser(__doc__, "decode_attention_gpu")
    words.add_argument("--lengths", default="32768,131072", help="tokens, comma-separated")
    words.add_argument("--batches", default="1,8", help="rows, comma-separated")
    words.add_argument("--rounds", type=int, default=15)
    words.add_argument("--budget", type=float, default=20.0, help="seconds of timed rounds per setting")
    return words.parse_args()


if __name__ == "__main__":
    sys.exit(start(main, read_arguments()))
