"""Decode op against an oracle that loops over heads and positions in fp64 and shares no code with it."""

import itertools
import math
from dataclasses import dataclass, field, replace

import pytest
import reference_decode
import torch

import pod  # noqa: F401  (registers the kernels)
from pod.modeling.model import grouped
from pod.modeling.model.attend import Tokens
from pod.modeling.model.decode import (
    DECODERS,
    DecodeCall,
    choose_decoder,
    make_buffers,
    pod_decode,
)
from pod.modeling.model.packed import Packed
from pod.modeling.model.sharing import Roles
from pod.modeling.model.sinks import Sink

NAN = float("nan")


@dataclass
class Layer:
    """What one layer's newest tokens are and hold.

    ``q [B, H, G, d]``, ``k, v [B, H, C, d]`` for all positions. ``lead_k``, ``held_v``: keys as leads and
    values as leads and followers hold them; of packed buffers what the codes say.
    """

    leads: list[int]
    windows: list[int]
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    lead_k: torch.Tensor
    held_v: torch.Tensor
    sink: Sink | None = None
    packed: tuple[Packed, Packed] | None = None


@dataclass
class Case:
    lengths: list[int]
    layers: list[list[int]]
    """Heads that lead, per layer."""
    windows: dict[int, list[int]] = field(default_factory=dict)
    """Heads that keep their windows, by layer."""
    num_heads: int = 2
    groups: int = 2
    head_dim: int = 16
    n_s: int = 3
    n_r: int = 5
    spare: int = 9
    """Slots of the buffers behind the longest row."""
    dtype: str = "float64"
    seed: int = 0
    group_size: int = 0
    """4-bit groups; 0 = native."""
    residual: int = 4
    has_sink: bool = False
    """Constants in the place of first tokens, for heads that keep their windows."""

    @property
    def capacity(self):
        room = max(self.lengths) + self.spare
        return -(-room // self.group_size) * self.group_size if self.group_size else room


def build(case: Case) -> list[Layer]:
    generator = torch.Generator().manual_seed(case.seed + sum(case.lengths))
    batch, heads, d = len(case.lengths), case.num_heads, case.head_dim

    def random(*shape):
        x = torch.randn(shape, generator=generator, dtype=torch.float64) * 1.5
        return x.to(getattr(torch, case.dtype))

    layers = []
    for number, leads in enumerate(case.layers):
        q, k, v = (random(batch, heads, n, d) for n in (case.groups, case.capacity, case.capacity))
        layers.append(Layer(leads, case.windows.get(number, []), q, k, v, k, v))
        if case.has_sink:
            layers[-1].sink = Sink(random(heads * case.groups), random(heads, d))
        if case.group_size:
            kv_buffers = packed(case, k, True), packed(case, v, False)
            (keys, layers[-1].lead_k), (values, layers[-1].held_v) = kv_buffers
            layers[-1].packed = keys, values
    return layers


def oracle(case: Case, layers: list[Layer], tau=None):
    """Outputs ``[layer][B, H, G, d]`` and gates ``[layer][B, H, G]`` by the definition, in fp64.

    Gates are nan but for followers.
    """
    scale = 1 / math.sqrt(case.head_dim)
    outputs, gates = [], []
    for number, layer in enumerate(layers):
        out = torch.zeros(layer.q.shape, dtype=torch.float64)
        gate = torch.full(layer.q.shape[:3], NAN, dtype=torch.float64)
        shape = range(len(case.lengths)), range(case.num_heads), range(case.groups)
        for b, h, g in itertools.product(*shape):
            sees_window_only, follows = h in layer.windows, h not in layer.leads + layer.windows
            lead = next((earlier for earlier in layers[number::-1] if h in earlier.leads), layer)
            newest, own = case.lengths[b] - 1, layer.lead_k if h in layer.leads else layer.k
            own_scores = (own[b, h].double() @ layer.q[b, h, g].double() * scale).tolist()
            lead_scores = (lead.lead_k[b, h].double() @ lead.q[b, h, g].double() * scale).tolist()
            near, far = {}, {}
            for j in range(newest + 1):
                if j < case.n_s or newest - j < case.n_r:
                    near[j] = own_scores[j]
                else:
                    far[j] = lead_scores[j]
            shares = [sum(math.exp(x) for x in part.values()) for part in (near, far)]
            gate[b, h, g] = shares[0] / sum(shares) if follows else NAN
            skips = tau is not None and follows and gate[b, h, g] >= tau
            seen = near if skips or sees_window_only else near | far
            values = (layer.v if sees_window_only else layer.held_v)[b, h, list(seen)].double()
            scores = list(seen.values())
            if sees_window_only and layer.sink is not None:
                scores.append(layer.sink.logits[h * case.groups + g].item())
                values = torch.cat((values, layer.sink.values[h, None].double()))
            weights = torch.tensor(scores, dtype=torch.float64).exp()
            out[b, h, g] = weights / weights.sum() @ values
        outputs.append(out)
        gates.append(gate)
    return outputs, gates


def stored(case: Case, layer: Layer):
    """Stores with NaN in every slot that holds no token: keys, window_keys, values, near."""
    held = [h for h in range(case.num_heads) if h not in layer.windows]
    followers = [h for h in held if h not in layer.leads]
    limit = case.n_s + case.n_r
    ring = torch.full((2, *layer.k.shape[:2], limit, case.head_dim), NAN, dtype=layer.k.dtype)
    keys, values = layer.k.clone(), layer.v.clone()
    for b, length in enumerate(case.lengths):
        keys[b, :, length:] = values[b, :, length:] = NAN
        for p in range(length):  # in order, so that a later token overwrites its slot of the ring
            slot = p if p < limit else case.n_s + (p - case.n_s) % case.n_r
            ring[0, b, :, slot], ring[1, b, :, slot] = layer.k[b, :, p], layer.v[b, :, p]
    return [
        keys[:, layer.leads] if layer.leads else None,
        ring[0][:, followers] if followers else None,
        values[:, held] if held else None,
        Tokens(*ring[:, :, layer.windows]) if layer.windows else None,
    ]


def packed(case: Case, x: torch.Tensor, per_channel: bool):
    """``x`` in 4 bits, group by group, with spoilt slots where no token is; and what it says.

    The latter is ``[B, H, C, d]`` in fp64.
    """
    size, ring = case.group_size, case.residual + case.group_size
    batch, heads, capacity, d = x.shape
    width = min(size, d)
    shape = (batch, heads, capacity // size, d) if per_channel else (batch, heads, capacity, d // width)
    zero, scale = (torch.full(shape, NAN, dtype=torch.float16) for _ in range(2))
    codes = torch.randint(256, (batch, heads, capacity, d // 2), dtype=torch.uint8)
    tail = torch.full((batch, heads, ring, d), NAN, dtype=x.dtype)
    packed_lengths = [max(0, length - case.residual) // size * size for length in case.lengths]
    meaning = x.double()
    for b, h in itertools.product(range(batch), range(heads)):
        for p in range(packed_lengths[b], case.lengths[b]):
            tail[b, h, p % ring] = x[b, h, p]
        numbers = torch.zeros(packed_lengths[b], d, dtype=torch.uint8)
        groups = itertools.product(
            range(packed_lengths[b] // (size if per_channel else 1)), range(d if per_channel else d // width)
        )
        for i, j in groups:
            part = (
                (slice(i * size, i * size + size), j)
                if per_channel
                else (i, slice(j * width, j * width + width))
            )
            group = x[(b, h, *part)].double()
            zero[b, h, i, j] = group.min().item()
            scale[b, h, i, j] = (group.max() - group.min()).item() / 15
            start, step = zero[b, h, i, j].double(), scale[b, h, i, j].double()
            numbers[part] = ((group - start) / step).round().clamp(0, 15).to(torch.uint8)
            meaning[(b, h, *part)] = start + step * numbers[part]
        codes[b, h, : packed_lengths[b]] = numbers[:, : d // 2] + 16 * numbers[:, d // 2 :]
    stop = torch.tensor(packed_lengths, dtype=torch.int32)
    bounds = min(packed_lengths), max(packed_lengths)
    return Packed(codes, zero, scale, tail, stop, size, per_channel, bounds), meaning


def packed_buffers(case: Case, layer: Layer):
    """As ``stored``, with packed keys and values."""
    assert layer.packed is not None
    found, held = stored(case, layer), [h for h in range(case.num_heads) if h not in layer.windows]
    for place, heads, x in ((0, layer.leads, layer.packed[0]), (2, held, layer.packed[1])):
        which = torch.tensor(heads, dtype=torch.long)
        parts = {name: getattr(x, name)[:, which].contiguous() for name in ("codes", "zero", "scale", "tail")}
        found[place] = x._replace(**parts) if heads else None
    return found


def roles_of(case: Case, number: int):
    """Roles of a layer, as the plan of the case says."""
    leads, windows = case.layers[number], case.windows.get(number, [])
    followers = [h for h in range(case.num_heads) if h not in leads + windows]
    above = range(number + 1, len(case.layers))
    later = {h: [case.layers[i] for i in above if h not in case.windows.get(i, [])] for h in leads}
    followed = [h for h in leads if later[h] and h not in later[h][0]]
    return Roles(*map(tuple, (leads, followers, followed, windows)))


def arguments_of(case: Case, number: int, layer: Layer, kv_buffers: list, buffers) -> dict:
    """Of ``pod_decode``, by name."""
    names = ("keys", "window_keys", "values", "near")
    return dict(zip(names, kv_buffers, strict=True)) | {
        "q": layer.q.flatten(1, 2),
        "lengths": torch.tensor(case.lengths),
        "roles": roles_of(case, number),
        "buffers": buffers,
        "num_sink_tokens": case.n_s,
        "num_recent_tokens": case.n_r,
        "sink": layer.sink,
    }


def poisoned_buffers(case: Case, programs=None):
    buffers = make_buffers(
        len(case.lengths), case.num_heads, case.groups, case.head_dim, case.capacity,
        getattr(torch, case.dtype), "cpu", programs=programs,
    )  # fmt: skip
    for x in vars(buffers).values():
        if isinstance(x, torch.Tensor):
            x.fill_(NAN)
    return buffers


def decode(
    case: Case,
    layers: list[Layer],
    backend: str,
    tau=None,
    long=False,
    programs=None,
    change=None,
    bare=False,
):
    """Outputs ``[layer][B, H, G, d]`` of the backend, and its buffers.

    ``change(number, kv_buffers)`` may spoil them.
    """
    buffers = poisoned_buffers(case, programs)
    buffers = replace(buffers, weights=None) if bare else buffers
    dtype = torch.int64 if long else torch.int32
    outputs = []
    for number, layer in enumerate(layers):
        kv_buffers = packed_buffers(case, layer) if case.group_size else stored(case, layer)
        if change:
            change(number, kv_buffers)
        out = torch.full_like(layer.q.flatten(1, 2), NAN)
        arguments = arguments_of(case, number, layer, kv_buffers, buffers)
        arguments["lengths"] = arguments["lengths"].to(dtype)
        with reference_decode.offered():
            found = pod_decode(**arguments, tau=tau, backend=backend, out=out)
        assert found is out
        outputs.append(out.unflatten(1, (case.num_heads, case.groups)))
    return outputs, buffers


def worst(found, expected):
    """Largest error relative to the largest number."""
    return max(
        ((a.double() - b).abs().max() / b.abs().max()).nan_to_num(nan=float("inf")).item()
        for a, b in zip(found, expected, strict=True)
    )


MIXED = [[0, 1, 2, 3], [1], [0, 3], [2]]  # every head leads, follows and leads anew at its own time
CASES = {
    "one token": Case([1], [[0, 1], [1]]),
    "up to the sinks": Case([3, 2], [[0, 1], [0]]),
    "fills the window": Case([8, 8], [[0, 1], [1], []]),
    "first distant token": Case([9, 9], [[0, 1], [1], []]),
    "ring wrapped often": Case([64, 64], [[0, 1], [], []]),
    "ragged": Case([1, 7, 8, 9, 40], [[0, 1], [0], []]),
    "dense": Case([13, 30], [[0, 1], [0, 1]]),
    "mixed heads": Case([31, 31], MIXED, num_heads=4),
    "mixed heads, ragged": Case([31, 12, 5], MIXED, num_heads=4, groups=3),
    "one query head per KV head": Case([20], [[0, 1], [0]], groups=1),
    "four query heads": Case([20], [[0, 1], [0]], groups=4),
    "one recent token": Case([20, 4, 1], [[0, 1], [0], []], n_r=1),
    "no sinks": Case([20, 5, 6, 1], [[0, 1], [], [1]], n_s=0),
    "no sinks, one recent": Case([20, 1, 2], [[0, 1], [], [1]], n_s=0, n_r=1),
    "head_dim 24": Case([33], [[0, 1], []], head_dim=24),
    "head_dim 64": Case([33, 9], [[0, 1], []], head_dim=64),
    "head_dim 128": Case([33], [[0, 1], []], head_dim=128),
    "no room to spare": Case([33], [[0, 1], []], spare=0),
    "leads want every program": Case([1000], [list(range(8)), [0, 1, 2, 3]], num_heads=8, groups=1),
    "blocks of tokens": Case([300, 300], [[0, 1], [0], []], n_s=10, n_r=70),
}
PACKED = {
    "nothing packed yet": Case([5], [[0, 1], []], n_r=20, group_size=16, head_dim=32),
    "packed, ragged": Case(
        [90, 36, 20, 3], [[0, 1, 2], [1], []], num_heads=3, n_r=21, group_size=16, head_dim=32
    ),
    "packed, one group per token": Case([70, 70], [[0, 1], [1], []], n_r=36, group_size=32, head_dim=32),
    "packed, no sinks": Case([70], [[0, 1], []], n_s=0, n_r=40, group_size=16, head_dim=64, groups=3),
    "packed, group above head_dim": Case([140], [[0, 1], []], n_r=70, group_size=64, head_dim=32),
    "packed, dense": Case([70, 33], [[0, 1], [0, 1]], n_r=20, group_size=16, head_dim=32),
}
WINDOWS = {  # heads of all roles, each role alone and beside each other
    "windows alone": Case([40, 8, 3, 1], [[]], windows={0: [0, 1]}),
    "windows alone, then all roles": Case(
        [50, 9, 5], [[], [0, 1, 2], [1], []], num_heads=3, groups=1, windows={0: [0, 1, 2], 2: [0], 3: [1]}
    ),
    "leads and windows": Case([33, 7, 1], [[1], [0, 2]], num_heads=3, groups=3, windows={0: [0, 2], 1: [1]}),
    "followers and windows": Case([26, 26], [[0, 1, 2], []], num_heads=3, groups=4, windows={1: [0, 2]}),
    "windows inside blocks": Case(
        [70, 31, 6],
        [[0, 1, 2, 3, 4], [2], [], [1]],
        num_heads=5,
        groups=8,
        windows={1: [0, 1, 3], 2: [1, 3], 3: [2]},
    ),
    "one recent token and windows": Case(
        [20, 1], [[0], [], []], windows={0: [1], 1: [1], 2: [0, 1]}, n_s=0, n_r=1
    ),
    "windows of many tiles": Case(
        [300, 290], [[0, 3], [3]], num_heads=4, n_s=10, n_r=150, windows={0: [1, 2], 1: [1, 2]}
    ),
    "heads at uneven distances": Case(
        [37, 37],
        [[0, 1, 2, 4, 5], [0, 1, 4], [2], [1, 4, 5]],
        num_heads=6,
        windows={0: [3], 1: [2, 3], 2: [3, 5], 3: [3]},
    ),
    "windows, no room to spare": Case([33, 33], [[0, 1], [0]], windows={1: [1]}, spare=0),
}
PACKED |= {
    "packed, windows": Case(
        [90, 36, 20, 3],
        [[0, 2], [], [0]],
        num_heads=3,
        n_r=21,
        group_size=16,
        head_dim=32,
        windows={0: [1], 1: [1], 2: [1, 2]},
    ),
    "packed, windows alone": Case([40], [[]], n_r=21, group_size=16, head_dim=32, windows={0: [0, 1]}),
}
SINKS = {
    "sinks, windows alone": Case([40, 8, 3, 1], [[]], windows={0: [0, 1]}, n_s=0, has_sink=True),
    "sinks, all roles": Case(
        [70, 31, 6],
        [[0, 1, 2, 3, 4], [2], [], [1]],
        num_heads=5,
        groups=3,
        windows={1: [0, 1, 3], 2: [1, 3], 3: [2]},
        n_s=0,
        has_sink=True,
    ),
    "sinks, many tiles": Case(
        [300, 290],
        [[0, 3], [3]],
        num_heads=4,
        n_s=0,
        n_r=150,
        windows={0: [1, 2], 1: [1, 2]},
        has_sink=True,
    ),
    "sinks, packed": replace(PACKED["packed, windows"], n_s=0, has_sink=True),
    "sinks, head_dim 24": Case([33, 2], [[0], [0]], windows={0: [1], 1: [1]}, head_dim=24, has_sink=True),
}
CASES |= PACKED | WINDOWS | SINKS
TAUS = [None, 0.0, 0.3, 0.7, 1.0]


@pytest.mark.parametrize("tau", TAUS)
@pytest.mark.parametrize("backend", ["reference", "grouped"])
@pytest.mark.parametrize("name", CASES)
def test_equals_the_definition(name, backend, tau, monkeypatch):
    monkeypatch.setitem(grouped._BLOCK_ELEMENTS, "cpu", 1 << 11)
    case = CASES[name]
    layers = build(case)
    found, _ = decode(case, layers, backend, tau, long=tau == 0.3)
    assert worst(found, oracle(case, layers, tau)[0]) < 1e-12


@pytest.mark.parametrize("cores", [1, 2, 3, 7])
@pytest.mark.parametrize("name", ["leads and windows", "heads at uneven distances", "blocks of tokens"])
def test_heads_that_are_cut_for_more_cores(name, cores, monkeypatch):
    """Heads of one row are cut for more cores.

    The products of whole heads are whole only if heads are as many as cores, or twice as many, …
    """
    monkeypatch.setattr(torch, "get_num_threads", lambda: cores)
    monkeypatch.setattr(grouped, "_FEW_TOKENS", 4)
    case = replace(CASES[name], lengths=CASES[name].lengths[:1])
    layers = build(case)
    for tau in (None, 0.3):
        assert worst(decode(case, layers, "grouped", tau)[0], oracle(case, layers, tau)[0]) < 1e-12


@pytest.mark.parametrize("name", ["mixed heads, ragged", "heads at uneven distances"])
def test_grouped_without_weights_of_its_own(name):
    """As on a GPU, where the buffers leave them out."""
    case = CASES[name]
    layers = build(case)
    for tau in (None, 0.3):
        found, _ = decode(case, layers, "grouped", tau, bare=True)
        assert worst(found, oracle(case, layers, tau)[0]) < 1e-12


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    "name",
    [
        "mixed heads, ragged",
        "ring wrapped often",
        "head_dim 128",
        "packed, ragged",
        "windows inside blocks",
        "packed, windows",
        "sinks, all roles",
    ],
)
def test_grouped_is_as_exact_as_the_reference(name, dtype, monkeypatch):
    monkeypatch.setitem(grouped._BLOCK_ELEMENTS, "cpu", 1 << 11)
    case = Case(**{**vars(CASES[name]), "dtype": dtype})
    layers = build(case)
    expected = oracle(case, layers)[0]
    limit = worst(decode(case, layers, "reference")[0], expected) + torch.finfo(getattr(torch, dtype)).eps
    assert worst(decode(case, layers, "grouped")[0], expected) <= 2 * limit


@pytest.mark.parametrize("backend", ["reference", "grouped"])
def test_leads_leave_logits_and_lse_of_distant_tokens(backend):
    case = Case([31, 9, 4], [[0, 1], [1]])
    layers = build(case)
    layer = layers[0]
    buffers = decode(case, layers[:1], backend)[1]  # the last layer that ran is the first: head 0 is followed
    for b, length in enumerate(case.lengths):
        distant = list(range(case.n_s, length - case.n_r))
        logits = torch.tensor([[float(q @ layer.k[b, 0, j]) / 4 for j in distant] for q in layer.q[b, 0]])
        assert torch.allclose(buffers.logits[b, 0, :, distant], logits.double(), atol=1e-6)
        lse = logits.double().logsumexp(-1)
        assert torch.allclose(buffers.distant_lse[b, 0], lse, atol=1e-6)
        assert distant or (buffers.distant_lse[b, 0] == -math.inf).all()


@pytest.mark.parametrize("backend", ["grouped"])
def test_skipping_groups_never_read_distant_values(backend):
    case = Case([40, 30, 8], [[0, 1, 2, 3], [2], []], num_heads=4, n_r=9)
    layers = build(case)
    tau = 0.45
    expected, gates = oracle(case, layers, tau)
    skipped = [(gate >= tau).all(-1) for gate in gates]  # [B, H]; never for leads, whose gate is nan
    assert 0 < sum(int(x.sum()) for x in skipped) < sum(int((~gate.isnan()).any(-1).sum()) for gate in gates)

    def spoil(number, kv_buffers):
        for b, h in skipped[number].nonzero().tolist():
            kv_buffers[2][b, h, case.n_s : max(case.n_s, case.lengths[b] - case.n_r)] = NAN

    found, _ = decode(case, layers, backend, tau, change=spoil)
    assert worst(found, expected) < 1e-12


def test_gate_threshold_changes_what_it_should():
    """tau = 0 leaves the proximal part alone; no threshold differs from tau = 1 at most by rounding."""
    case = CASES["mixed heads"]
    layers = build(case)
    alone, exact, one = (decode(case, layers, "grouped", tau)[0] for tau in (0.0, None, 1.0))
    assert all((a - b).abs().max() > 1e-2 for a, b in zip(alone[1:], exact[1:], strict=True))
    assert torch.equal(alone[0], exact[0])
    assert worst(one, exact) < 1e-12


def test_scale_and_new_output():
    case = CASES["mixed heads"]
    layers = build(case)
    arguments = arguments_of(case, 0, layers[0], stored(case, layers[0]), poisoned_buffers(case))
    found = pod_decode(**arguments, scale=0.5)
    layers[0].q *= 0.5 * math.sqrt(case.head_dim)
    assert worst([found.view_as(layers[0].q)], oracle(case, layers[:1])[0]) < 1e-12


BAD = {
    "unknown backend": ({"backend": "fast"}, "unknown; choose auto or one of grouped, triton"),
    "window too small": ({"num_recent_tokens": 6}, r"window_keys is .*expected \[2, 1, 9, 16\]"),
    "no keys": ({"keys": None}, "keys is None, expected"),
    "values of all heads": (
        {"values": torch.ones(2, 3, 29, 16).double()},
        r"keys is .*\[2, 1, 29, 16\]|values is .*\[2, 2,",
    ),
    "no windows": ({"near": None}, r"near.keys is None, expected \[2, 1, 8, 16\]"),
    "other dtype": ({"q": torch.ones(2, 6, 16)}, "both must agree"),
    "triton in fp64": ({"backend": "triton"}, "backend 'triton' cannot run"),
    "output": ({"out": torch.ones(2, 6, 8).double()}, "out is"),
}


@pytest.mark.parametrize("name", BAD)
def test_refusals_say_what_came_and_what_is_allowed(name):
    case = Case([20, 20], [[0, 1, 2], [1]], num_heads=3, windows={1: [2]})
    layer = build(case)[1]
    arguments = arguments_of(case, 1, layer, stored(case, layer), poisoned_buffers(case))
    change, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        pod_decode(**{**arguments, **change})


def test_buffers_of_another_size_are_refused():
    case = Case([20], [[0, 1]])
    layer = build(case)[0]
    with pytest.raises(ValueError, match="make_buffers"):
        small = make_buffers(1, 2, 2, 16, 9, torch.float64, "cpu")
        pod_decode(**arguments_of(case, 0, layer, stored(case, layer), small))
    with pytest.raises(ValueError, match="fewer than 2 KV heads"):
        make_buffers(1, 2, 2, 16, 9, torch.float64, "cpu", programs=1)


def test_auto_is_grouped_on_cpu():
    case = CASES["dense"]
    call = DecodeCall(build(case)[0].q.flatten(1, 2), *[None] * 12)  # type: ignore[arg-type]
    assert choose_decoder(call) is DECODERS["grouped"]
