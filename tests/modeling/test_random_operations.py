"""Random conversations over every method.

Each row of a batch gets exactly the logits that it gets alone.

A conversation is a list of operations on one cache. They are prompts in random pieces, announced or not,
padded left or right or with holes; decoding (also of some rows only); rows reordered, repeated or dropped
(also in the middle of a prompt); reset; the last columns taken back; the cache copied, or saved and loaded;
and things that must be refused without harm. After each operation the cache checks itself. In some
conversations the rows have budgets of their own, so that they begin to drop tokens at different steps: what a
pass computes once for rows that are alike must not serve rows that differ. Afterwards every row is fed again,
alone, turn by turn in one piece, and one row goes through the method's oracle.

``POD_RANDOM_OPERATIONS=10000`` sets the number of conversations over all methods, beside the written ones; 50
by default.
"""

import copy
import os
import zlib
from dataclasses import dataclass, field

import oracles_ranked as ranked
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import seed as reproducible
from hypothesis import strategies as st
from oracle_tools import run_cache
from oracles_channels import ThinK
from oracles_imdc import Chunked
from oracles_pairs import MiniCache, PodQuest, Quest
from oracles_pod_selected import PodSelected
from oracles_razor import Razor
from oracles_windows import LMInfinite, StreamingLLM, WindowAttention

import pod

CONVERSATIONS = int(os.environ.get("POD_RANDOM_OPERATIONS", "50"))
SNAP = {"budget": 7, "window": 3, "kernel": 3, "pool": "avg"}
ROCO = {"num_sink_tokens": 1, "num_recent_tokens": 2, "protect_prefill": 0.2, "protect_decode": 0.3}
HEADS = [[0], [], [1], [], [0, 1]]
SHORT = {"num_sink_tokens": 2, "num_recent_tokens": 3}
STREAMING = {"prefill": "streaming", "chunk_size": 4}
IMDC = {"budget": 5, "chunk_size": 4, "window": 2, "kernel": 3}
KVZIP = {"budget": 6, "chunk_size": 4, "num_sink_tokens": 1, "repeat_ids": [[5, 9, 3], [7, 2], [4]]}


def chunked(mode, pruner="snapkv"):
    def make(model, function="linear", **options):
        return Chunked(model, mode=mode, pruner=pruner, growth=function, **options)

    return make


def streamed(oracle):
    return lambda model, prefill, **options: oracle(model, **options)


def razor(model, heads, **options):
    return Razor(model, full=heads, **options)


def selected(selection):
    return lambda model, **options: PodSelected(model, selection=selection, **options)


def anyhow(oracle):
    """An oracle for a cache with options that change no logits."""
    return oracle and (lambda model, **options: oracle(model))


# name: spec, options, oracle (None: only against the row alone)
CASES = {
    "full": ("full", {}, ranked.Full),
    "pod": ("pod", {}, selected(None)),
    "cla": ("cla", {}, None),
    "window": ("window", {}, lambda model: WindowAttention(model, budget=4)),
    "streamingllm": ("streamingllm", {"budget": 6, "num_sink_tokens": 2}, StreamingLLM),
    "lm_infinite": ("lm_infinite", {"budget": 6, "num_sink_tokens": 2}, LMInfinite),
    "wa": ("wa", {"budget": 5}, WindowAttention),
    "local_window": ("local_window", {"budget": 5}, ranked.LocalWindow),
    "snapkv": ("snapkv", SNAP, ranked.SnapKV),
    "pyramidkv": ("pyramidkv", SNAP, ranked.PyramidKV),
    "adakv": ("adakv", SNAP, ranked.AdaKV),
    "expected_attention": (
        "expected_attention",
        {"budget": 7, "num_sink_tokens": 2},
        ranked.ExpectedAttention,
    ),
    "kvzip": ("kvzip", KVZIP, ranked.KVzip),
    "h2o": ("h2o", {"budget": 6}, ranked.H2O),
    "roco": ("roco", {"budget": 8} | ROCO, ranked.RoCo),
    "d2o": ("d2o", {"budget": 8, "num_sink_tokens": 1, "gate": 1.0}, ranked.D2O),
    "simlayerkv": ("simlayerkv", SHORT | {"threshold": 0.6, "detector": "decode"}, ranked.SimLayerKV),
    "simlayerkv-prefill": (
        "simlayerkv",
        SHORT | {"threshold": 0.6, "detector": "prefill"},
        ranked.SimLayerKV,
    ),
    "razor": ("razor", SHORT | {"heads": HEADS, "compression": 4}, razor),
    "quest": ("quest", {"budget": 6, "page_size": 3}, Quest),
    "think": ("think", {"ratio": 0.5, "queries": 3, "recent": 2}, ThinK),
    "minicache": ("minicache", {"block": 3, "share": 0.1}, MiniCache),
    "fm": ("fm", IMDC, chunked("fm")),
    "im": ("im", IMDC | {"function": "sqrt"}, chunked("im")),
    "imdc": ("imdc", IMDC | {"function": "square-sqrt"}, chunked("imdc")),
    "imdc-adaptive": ("imdc", IMDC | {"function": "adaptive"}, chunked("imdc")),
    "imdc(streamingllm)": (
        "imdc(streamingllm)",
        {"budget": 5, "chunk_size": 4},
        chunked("imdc", "streamingllm"),
    ),
    "snapkv-streaming": ("snapkv", SNAP | STREAMING, streamed(ranked.SnapKV)),
    "h2o-streaming": ("h2o", {"budget": 6} | STREAMING, streamed(ranked.H2O)),
    "d2o-apart": (
        "d2o",
        {"budget": 8, "num_sink_tokens": 1, "gate": 1.0, "similarity": "both", "merge": "average"},
        ranked.D2O,
    ),
    "d2o-streaming": (
        "d2o",
        {"budget": 8, "num_sink_tokens": 1, "gate": 1.0} | STREAMING,
        streamed(ranked.D2O),
    ),
    "pod+snapkv": ("pod+snapkv", SNAP, selected("snapkv")),
    "pod+pyramidkv": ("pod+pyramidkv", SNAP, selected("pyramidkv")),
    "pod+expected_attention": ("pod+expected_attention", {"budget": 7}, selected("expected_attention")),
    "pod+quest": ("pod+quest", {"budget": 6, "page_size": 3}, PodQuest),
}
PACKED = [
    "full+int4",
    "pod+int4",
    "pod+kivi",
    "simlayerkv+int4",
    "razor+int4",
    "d2o+int8",
    "minicache+int4",
    "pod+snapkv+int4",
    "imdc+int4",
    "h2o+int8",
]
CASES |= {spec: (spec, CASES[spec.rpartition("+")[0]][1], None) for spec in PACKED}
# room for the first tokens only: it grows, and every tensor moves
ENGINES = ("full", "pod", "full+int4", "pod+int4")
CASES |= {
    f"{spec}-engine": (spec, CASES[spec][1] | {"capacity": 9}, anyhow(CASES[spec][2])) for spec in ENGINES
}
CASES |= {f"{spec}-extra": (spec, {"extra_slots": 3}, anyhow(CASES[spec][2])) for spec in ("pod", "pod+int4")}

PROMPT = st.tuples(
    st.just("prompt"),
    st.integers(1, 11),  # columns
    st.lists(st.integers(1, 6), max_size=3),  # widths of its pieces, over and over; none = one piece
    st.lists(st.integers(0, 11), max_size=3),  # padding per row; none = no padding
    st.sampled_from(["left", "left", "left", "right", "holes"]),
    st.booleans(),  # announced (a prompt in pieces always is)
    st.integers(0, 40),  # how rows move between its pieces; 0 to 3 do
)
DECODE = st.tuples(st.just("decode"), st.integers(1, 5), st.integers(0, 30))
MOVE = st.tuples(
    st.sampled_from(["reorder", "select", "repeat"]), st.lists(st.integers(0, 9), min_size=1, max_size=3)
)
CROP = st.tuples(st.just("crop"), st.integers(1, 7))
OTHER = st.tuples(
    st.sampled_from(["reset", "copy", "save", "copy", "save", "wrong batch", "wrong mask", "wrong length"])
)
EVERYTHING = [  # a group of rows that splits into three, moves, and goes on; with everything that is refused
    ("prompt", 9, [4], [], "left", True, 40),
    ("decode", 2, 30),
    ("prompt", 6, [2], [0, 3, 5], "left", True, 1),
    ("decode", 3, 2),
    ("crop", 4),
    ("save",),
    ("reorder", [2, 0, 1]),
    ("wrong mask",),
    ("decode", 1, 30),
    ("select", [2, 0]),
    ("repeat", [1]),
    ("wrong batch",),
    ("prompt", 7, [3, 1], [2, 0, 0, 6], "left", True, 2),
    ("decode", 4, 30),
    ("crop", 2),
    ("copy",),
    ("prompt", 3, [], [1, 2], "right", False, 40),
    ("decode", 1, 30),
]
SIDE_BY_SIDE = [  # rows of equal length, and of budgets that differ where there are some
    ("prompt", 11, [], [], "left", True, 40),
    ("decode", 3, 30),
    ("prompt", 4, [], [], "left", True, 40),
    ("decode", 5, 30),
]
SHORT_ROWS = [  # which reach their budgets one after the other while they decode
    ("prompt", 4, [], [0, 2, 1], "left", True, 40),
    *[("decode", 5, 30)] * 3,
    ("prompt", 5, [3], [0, 3, 1], "left", True, 40),
    ("decode", 2, 30),
]
BUDGETS = st.one_of(st.none(), st.lists(st.sampled_from([0, 0, 1, 2, 4]), min_size=4, max_size=4))
"""What each row gets beyond the budget of its case; none = one budget for all rows."""
OPERATIONS = st.lists(st.one_of(PROMPT, PROMPT, DECODE, DECODE, MOVE, OTHER, CROP), min_size=2, max_size=8)


@dataclass
class Row:
    """What one row has lived through: its turns, ``(kind, ids)``, and the logits of each of its tokens.

    ``extra``: tokens that its budget has beyond that of the case.
    """

    turns: list = field(default_factory=list)
    logits: list = field(default_factory=list)
    extra: int = 0

    def copy(self):
        return Row(list(self.turns), list(self.logits), self.extra)

    def forget(self, count):
        """The last tokens were never fed."""
        while count:
            kind, ids = self.turns.pop()
            if len(ids) > count:
                self.turns.append((kind, ids[: len(ids) - count]))
            count -= min(count, len(ids))
        left = len(joined(self.turns))
        self.logits = list(torch.cat(self.logits)[:left].split(1)) if left else []


class Conversation:
    """A cache and what should be in it.

    ``path`` is where it is saved, ``extras`` what the rows' budgets have more.
    """

    def __init__(self, model, cache, extras, seed, path):
        self.model, self.cache, self.path = model, cache, path
        self.extras, self.generator = extras, torch.Generator().manual_seed(seed)
        self.finished = []  # rows that a reset or a selection has taken away
        self.start()

    def start(self):
        self.rows = [Row(extra=extra) for extra in self.extras]
        self.mask = torch.ones(len(self.extras), 0, dtype=torch.long)

    def run(self, operations):
        for operation, *arguments in operations:
            if operation in ("prompt", "decode"):
                self.guarded(getattr(self, operation), *arguments)
            elif operation in ("reorder", "select", "repeat"):
                self.move(operation, *arguments)
            else:
                getattr(self, operation.replace(" ", "_"))(*arguments)
            self.cache.check_integrity()
        return self.finished + self.rows

    # -- feeding ---------------------------------------------------------------------------------------------

    def guarded(self, feed, *arguments):
        """A prompt that the method documents to refuse ends the conversation; anything else is an error."""
        before = [row.copy() for row in self.rows]
        try:
            feed(*arguments)
        except ValueError as error:
            message = str(error)
            refusals = "takes padding on the left only", "would have", "rows that are alike"
            if not any(refusal in message for refusal in refusals):
                raise
            self.finished += before
            self.cache.reset()
            self.start()

    def prompt(self, columns, widths, padding, side, announced, shuffle):
        mask = self.padding_mask(columns, padding, side)
        if columns == 1 and not announced and self.mask.shape[1]:
            return self.feed(mask)  # looks like a decoded token, and is one
        starts = [len(row.logits) for row in self.rows]
        pieces = []
        while sum(pieces) < columns:
            width = widths[len(pieces) % len(widths)] if widths else columns
            pieces.append(min(width, columns - sum(pieces)))
        if announced or len(pieces) > 1:
            self.cache.begin_prompt(columns)
        for row in self.rows:
            row.turns.append(("prompt", []))
        for at, width in enumerate(pieces):
            start = sum(pieces[:at])
            self.feed(mask[:, start : start + width], "prompt")
            if shuffle < 4 and at + 1 < len(pieces):
                index = [(row + shuffle) % len(self.rows) for row in range(len(self.rows))]
                self.take(index, self.cache.reorder_cache)
                mask, starts = mask[index], [starts[row] for row in index]
        for row in self.rows:
            if not row.turns[-1][1]:
                row.turns.pop()

    def padding_mask(self, columns, padding, side):
        mask = torch.ones(len(self.rows), columns, dtype=torch.long)
        for row in range(len(self.rows) if padding else 0):
            most = columns - 1 if self.mask.shape[1] == 0 else columns
            count = min(padding[row % len(padding)], most)
            if side == "left":
                mask[row, :count] = 0
            elif side == "right":
                mask[row, columns - count :] = 0
            else:
                mask[row, torch.randperm(columns, generator=self.generator)[:count]] = 0
        return mask

    def decode(self, count, sleeping):
        """Rows whose bit is set in ``sleeping`` get padding; on an empty cache there is nothing to decode."""
        for _ in range(count if self.mask.shape[1] else 0):
            mask = torch.tensor([[1 - (sleeping >> row & 1)] for row in range(len(self.rows))])
            self.feed(torch.ones_like(mask) if sleeping > 3 else mask)

    def feed(self, mask, kind="decode"):
        ids = torch.randint(3, 97, mask.shape, generator=self.generator)
        whole = torch.cat((self.mask, mask), 1)
        given = None if whole.all() else whole
        logits = self.model(ids, attention_mask=given, past_key_values=self.cache).logits
        self.mask = whole
        for row, real, tokens, out in zip(self.rows, mask.bool(), ids, logits, strict=True):
            if kind == "decode" and real.any():
                row.turns.append(("decode", []))
            if real.any():
                row.turns[-1] = (row.turns[-1][0], row.turns[-1][1] + tokens[real].tolist())
                row.logits.append(out[real])

    # -- rows ------------------------------------------------------------------------------------------------

    def move(self, how, numbers):
        if not self.mask.shape[1]:
            return
        count = len(self.rows)
        if how == "repeat":
            times = 1 + numbers[0] % 2
            if count * times <= 4:
                index = [row for row in range(count) for _ in range(times)]
                self.take(index, lambda _: self.cache.batch_repeat_interleave(times))
        elif how == "select":
            self.take([number % count for number in numbers], self.cache.batch_select_indices)
        else:
            self.take([numbers[row % len(numbers)] % count for row in range(count)], self.cache.reorder_cache)

    def take(self, index, change):
        change(torch.tensor(index))
        self.finished += [row for place, row in enumerate(self.rows) if place not in index and row.logits]
        self.rows = [self.rows[row].copy() for row in index]
        self.mask = self.mask[index]

    def reset(self):
        self.cache.reset()
        self.finished += self.rows
        self.start()

    # -- taking back, and travelling -------------------------------------------------------------------------

    def crop(self, count):
        most = self.cache.num_croppable
        with pytest.raises(ValueError, match=f"can take back {most} of its {self.mask.shape[1]} columns"):
            self.cache.crop(-most - 1)
        count = min(count, most)
        self.cache.crop(-count)
        if not count:
            return
        removed, self.mask = self.mask[:, -count:].sum(1).tolist(), self.mask[:, :-count]
        for row, tokens in zip(self.rows, removed, strict=True):
            if (
                "int" in self.cache.spec
            ):  # what was packed stays packed, so the row alone must live through the same
                row.turns.append(("crop", tokens))
            else:
                row.forget(tokens)

    def copy(self):
        self.cache = copy.deepcopy(self.cache)

    def save(self):
        if self.mask.shape[1]:
            pod.save_cache(self.model, self.cache, self.path)
            self.cache = pod.load_cache(self.model, self.path)

    # -- what is refused and must leave everything as it was -------------------------------------------------

    def wrong_batch(self):
        if self.mask.shape[1]:
            with pytest.raises(ValueError, match="rows"):
                self.model(torch.full((len(self.rows) + 1, 2), 5), past_key_values=self.cache)

    def wrong_mask(self):
        if self.mask.shape[1]:
            mask = torch.cat((1 - self.mask, torch.ones_like(self.mask[:, :1])), 1)
            with pytest.raises(ValueError, match="differently"):
                self.model(
                    torch.full((len(self.rows), 1), 5), attention_mask=mask, past_key_values=self.cache
                )

    def wrong_length(self):
        with pytest.raises(ValueError, match="at least 0 columns"):
            self.cache.begin_prompt(-1)


def lengths(turns):
    return [(kind, ids if kind == "crop" else len(ids)) for kind, ids in turns]


def joined(turns):
    return torch.tensor([token for kind, ids in turns if kind != "crop" for token in ids])


def with_budgets(options, extra):
    """The options of a case with the budget of one row, or with a list of those of all rows.

    The options stay the same without a budget.
    """
    if "budget" not in options:
        return options
    least = options["budget"]
    own = [least + each for each in extra] if isinstance(extra, list) else least + extra
    return options | {"budget": own}


def check(model, spec, options, oracle, rows):
    """Check every row that ever was against itself alone, and the longest one against the oracle.

    Returns how many there were.
    """
    rows = {f"{row.extra} {row.turns}": row for row in rows if row.logits}.values()
    for row in rows:
        cache = pod.make_cache(model, spec, **with_budgets(options, row.extra))
        alone = run_cache(model, cache, joined(row.turns)[None], lengths(row.turns))[0]
        error = (torch.cat(row.logits) - alone).abs().max()
        assert error <= 1e-9, f"differs from the row alone by {error:.1e}: {lengths(row.turns)}"
    if oracle is not None and rows:
        row = max(rows, key=lambda row: len(joined(row.turns)))
        naive = oracle(model, **with_budgets(options, row.extra))
        expected = naive.run(joined(row.turns), lengths(row.turns))
        error = (torch.cat(row.logits) - expected).abs().max()
        assert error <= 1e-9, f"differs from the oracle by {error:.1e}: {lengths(row.turns)}"
    return len(rows)


def make_model(tools, spec):
    hidden = 32 if "kivi" in spec else 24  # four codes fill a byte
    sizes = {"hidden_size": hidden, "intermediate_size": 16, "num_attention_heads": 4}
    if spec in ("cla", "window"):
        recent = {"num_recent_tokens": 4} if spec == "window" else {}
        return pod.load_model(tools.make_stock("llama", **sizes), layout=spec, **recent)
    return tools.make_pod("llama", plan=spec.startswith("pod"), windows=(2, 4), **sizes)


@pytest.mark.parametrize("name", CASES)
def test_rows_are_as_alone(tools, name, tmp_path):
    spec, options, oracle = CASES[name]
    model = make_model(tools, spec)
    conversations = compared = 0

    @reproducible(
        zlib.crc32(name.encode())
    )  # other conversations for every method, the same ones in every run
    @settings(
        max_examples=-(-CONVERSATIONS // len(CASES)), deadline=None, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(
        batch=st.sampled_from([2, 1, 3, 4]), seed=st.integers(0, 2**16), operations=OPERATIONS, extras=BUDGETS
    )
    @example(batch=3, seed=0, operations=EVERYTHING, extras=None)
    @example(batch=3, seed=1, operations=SIDE_BY_SIDE, extras=[0, 4, 1, 0])
    @example(batch=3, seed=2, operations=SHORT_ROWS, extras=[0, 2, 1, 0])
    def converse(batch, seed, operations, extras):
        nonlocal conversations, compared
        extras = ([0] * 4 if extras is None or "budget" not in options else extras)[:batch]
        with torch.no_grad():
            own = with_budgets(options, extras if any(extras) else 0)
            cache = pod.make_cache(model, spec, **own)
            rows = Conversation(model, cache, extras, seed, tmp_path / "cache.safetensors").run(operations)
            compared += check(model, spec, options, oracle, rows)
        conversations += 1

    converse()
    print(f"{name}: {conversations} conversations, {compared} rows")


@pytest.mark.parametrize("name", ["streamingllm", "d2o", "lm_infinite"])
@torch.no_grad()
def test_rows_of_equal_length_and_unlike_budgets(tools, name, tmp_path):
    """Rows of equal length and unlike budgets go through each pass together.

    What the pass computes for one budget must not serve another.
    """
    spec, options, oracle = CASES[name]
    model = make_model(tools, spec)
    for operations in (SIDE_BY_SIDE, SHORT_ROWS):
        cache = pod.make_cache(model, spec, **with_budgets(options, [0, 4, 1]))
        rows = Conversation(model, cache, [0, 4, 1], 0, tmp_path / "cache.safetensors").run(operations)
        assert check(model, spec, options, oracle, rows) == 3


def test_every_method_is_here():
    specs = {part.split("(")[0] for spec, *_ in CASES.values() for part in spec.split("+")}
    assert specs == set(pod.methods())
