"""Judge plans and methods on one model: perplexity and passkeys behind a compressed prompt, and bytes held.

`plans_by_bytes.py` and `plans_layers.py` say which rows there are. This file measures them. Perplexity: the
last `scored` tokens of held-out texts, decoded one by one from the compressed cache. Passkeys: the text is
read and compressed first, and the question comes then. The figures of a row are kept in a file of their own,
so that a run that was stopped goes on.
"""

import argparse
import json
import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import pod
from pod.data import held_out_documents, long_sequences
from pod.eval.answer.generate import generate_behind
from pod.eval.answer.reading import Seen, branch, in_parts, judge_ahead, left_padded
from pod.eval.answer.score import score_behind
from pod.eval.statistics.comparison import perplexity_change
from pod.eval.statistics.confidence import wilson
from pod.eval.suites.buckets import Bucket
from pod.eval.tasks import passkey
from pod.files import write_json
from pod.measure.machine import environment
from pod.modeling.model.packed_bytes import RESIDUAL
from pod.modeling.model.rows import GroupedCache
from pod.modeling.model.sharing import SharingPlan
from pod.models import resolve_model
from pod.tokenizer import pad_id
from pod.training.checkpoint.run_identity import plan_sha256

GROWING = {"snapkv", "pyramidkv"}
"""Methods that keep every decoded token: their prompt gets so many slots less."""
WHOLE_PROMPT = {"snapkv", "pyramidkv", "h2o", "d2o", "roco"}
"""Methods that hold the whole prompt until it ends: it is read once for all their shares."""


@dataclass(frozen=True)
class Row:
    """What is measured.

    Attributes:
        name: file name and line of the table.
        spec: as in ``pod.make_cache``.
        plan: file of a plan in the folder of plans; None = the dense model, or the plan of ``model``.
        model: folder of an adapted model; None = the model of the recipe.
        share: of the dense bytes, for methods with a budget; None = what the method holds.
        options: parameters beside the budget.
    """

    name: str
    spec: str
    plan: str | None = None
    share: float | None = None
    options: dict[str, Any] = field(default_factory=dict)
    model: Path | None = None


@dataclass
class Found:
    """What was measured of a row so far: NLL per text, bytes of all caches, answers by length."""

    row: Row
    nll: list[float] = field(default_factory=list)
    held: int = 0
    passkeys: dict[int, list[bool]] = field(default_factory=dict)


@dataclass(frozen=True)
class Sizes:
    """How much is measured.

    Attributes:
        length: tokens of a text; the last ``scored`` of them are scored.
        key_lengths: tokens of the prompts with a passkey; ``depths`` x ``samples`` of each length.
        batch: texts or prompts that are read together.
    """

    length: int = 2048
    scored: int = 128
    texts: int = 16
    key_lengths: tuple[int, ...] = (1024, 2048)
    depths: tuple[float, ...] = tuple(i / 9 for i in range(10))
    samples: int = 5
    new_tokens: int = 8
    batch: int = 8


class Bench:
    """Texts and prompts, loaded once; the model of the last row."""

    def __init__(self, recipe: Any, plans: Path, dtype: torch.dtype, sizes: Sizes):
        self.recipe, self.plans, self.dtype, self.sizes = recipe, plans, dtype, sizes
        self.path, self.gguf = resolve_model(recipe.model.path), recipe.model.gguf_file
        self.tokenizer = pod.load_tokenizer(self.path, gguf_file=self.gguf)
        documents = held_out_documents(recipe.data_dir, self.tokenizer)
        text = long_sequences(documents, sizes.texts, sizes.length, recipe.seed + 1)
        self.text = torch.from_numpy(text)
        first = sizes.length - sizes.scored
        self.bucket = Bucket(start=sizes.length // 2, end=sizes.length, first=first)
        lengths, depths = list(sizes.key_lengths), list(sizes.depths)
        made = passkey.make_prompts(self.tokenizer, lengths, depths, sizes.samples, seed=0)
        made = [self._in_parts(prompt) for prompt in made]
        self.prompts = {length: [p for p in made if p.length == length] for length in lengths}
        self.loaded: tuple[Any, Any] = None, None

    def model(self, row: Row) -> Any:
        if self.loaded[0] != (row.plan, row.model):
            self.loaded = None, None  # one model at a time
            self.loaded = (row.plan, row.model), self._load(row)
        return self.loaded[1]

    def _load(self, row: Row) -> Any:
        if row.model is not None:
            return pod.load_model(row.model, dtype=self.dtype)
        options = {"gguf_file": self.gguf, "dtype": self.dtype}
        if row.plan is None:
            return pod.load_model(self.path, **options)
        return pod.load_model(self.path, plan=self.plans / row.plan, **options)

    def cache(self, row: Row, length: int, fed: int) -> pod.PodCache:
        """A new cache that will hold the row's share of dense bytes.

        Args:
            length: tokens that the cache will have seen then.
            fed: how many of them come behind the prompt.
        """
        budget = None
        if row.share is not None:
            budget = round(row.share * length) - (fed if row.spec.split("+")[0] in GROWING else 0)
        return pod.make_cache(self.model(row), row.spec, budget=budget, **row.options)

    def measure(self, rows: list[Row]) -> list[dict[str, Any]]:
        """NLL per text, bytes and passkeys of rows that differ in their budgets only."""
        began, found, sizes = time.perf_counter(), [Found(row) for row in rows], self.sizes
        for start in range(0, sizes.texts, sizes.batch):
            text = self.text[start : start + sizes.batch]
            read = self.read(found, text[:, : self.bucket.first - 1], None, sizes.length, sizes.scored)
            for x, cache, _ in read:
                last = text[:, self.bucket.first - 1 :][:, :1]
                seen = Seen(torch.ones_like(text[:, : self.bucket.first - 1]), last, None)
                judge_ahead(self.model(x.row), cache, seen.mask, last=last)
                targets = text[:, self.bucket.first : self.bucket.end]
                x.nll += (-score_behind(self.model(x.row), cache, seen, targets).logprobs).mean(1).tolist()
                x.held += cache.nbytes
        for length, prompts in self.prompts.items():
            for start in range(0, len(prompts), sizes.batch):
                self.ask(found, prompts[start : start + sizes.batch], length)
        now, seconds = environment(), (time.perf_counter() - began) / len(rows)
        same = {"seconds": seconds, "date": now["date"], "commit": now["commit"]}
        return [self.describe(x) | same for x in found]

    def ask(self, found: list[Found], prompts: list[passkey.PasskeyPrompt], length: int) -> None:
        """Whether each answer is right; the question comes behind the compressed text."""
        model, pad = self.model(found[0].row), pad_id(self.tokenizer)
        before, asked = in_parts(prompts)
        assert before is not None
        fed = self._num_fed(prompts)
        ids, mask = left_padded(before, pad)
        for x, cache, hidden in self.read(found, ids, mask, prompts[0].length, fed):
            judge_ahead(model, cache, mask, hidden=hidden)
            said = generate_behind(model, self.tokenizer, cache, mask, asked, self.sizes.new_tokens)
            right = [passkey.is_correct(one["answer"], p.key) for one, p in zip(said, prompts, strict=True)]
            x.passkeys.setdefault(length, []).extend(right)

    def _num_fed(self, prompts: list[passkey.PasskeyPrompt]) -> int:
        """Tokens that come behind the text of a prompt: the question and the answer."""
        return max(prompt.num_asked for prompt in prompts) + self.sizes.new_tokens

    @torch.no_grad()
    def read(
        self, found: list[Found], ids: Tensor, mask: Tensor | None, length: int, fed: int
    ) -> Iterator[tuple[Found, pod.PodCache, Tensor]]:
        """Each row, with a cache that has read the prompts, and their last hidden states ``[B, 1, D]``.

        Of several rows, the prompt up to its last token is read once.
        """
        model = self.model(found[0].row)
        common, count = self.cache(found[0].row, length, fed), ids.shape[1]

        def feed(cache: pod.PodCache, columns: slice) -> Tensor:
            seen = None if mask is None else mask[:, : columns.stop]
            given = {"input_ids": ids[:, columns], "attention_mask": seen, "past_key_values": cache}
            return model.model(**given, use_cache=True).last_hidden_state[:, -1:]

        if len(found) == 1:
            yield found[0], common, feed(common, slice(0, count))
            return
        common.begin_prompt(count)
        feed(common, slice(0, count - 1))
        for x in found:
            cache = self.cache(x.row, length, fed)
            cache.from_state(branch(common).state())
            assert isinstance(cache, GroupedCache)
            for index, layer in ((i, x) for group in cache.groups for i, x in enumerate(group.layers)):
                own = vars(cache.new_layer(index))
                vars(layer).update({name: own[name] for name in ("budget", "recents") if name in own})
            yield x, cache, feed(cache, slice(count - 1, count))

    def _in_parts(self, prompt: passkey.PasskeyPrompt) -> passkey.PasskeyPrompt:
        """The prompt with text and question as tokens of their own."""
        text, _, _ = prompt.text.rpartition(passkey.QUESTION)
        parts = (text, prompt.text.removeprefix(text))
        before, asked = (self.tokenizer(x, add_special_tokens=False)["input_ids"] for x in parts)
        return replace(prompt, token_ids=(*before, *asked), num_asked=len(asked))

    def describe(self, found: Found) -> dict[str, Any]:
        """What is kept of a row."""
        row = found.row
        return {
            "name": row.name,
            "spec": row.spec,
            "plan": self.describe_plan(row),
            "share": row.share,
            "nll": found.nll,
            "bytes_over_dense": found.held / self.sizes.texts / self.dense_bytes(row),
            "passkeys": found.passkeys,
        }

    def describe_plan(self, row: Row) -> dict[str, Any] | None:
        """What is kept of a row's plan; None for methods that have none."""
        plan = self.model(row).config.sharing_plan
        if row.spec != "pod" or plan is None:
            return None
        return {
            "leads": plan.num_leads,
            "followers": plan.num_followers,
            "windows": plan.num_windows,
            "bits": plan.bits,
            "residual": plan.residual,
            "asymptotic_saving": plan.asymptotic_saving,
            "cost": plan.provenance.get("cost"),
            "sha256": plan_sha256(plan),
        }

    def dense_bytes(self, row: Row) -> int:
        """Bytes of the keys and values of the text's tokens but the last, as the model was trained.

        Layers that were trained with windows keep these, and no more.
        """
        config, tokens = self.model(row).config, self.sizes.length - 1
        windows = map(config.window_of, range(config.num_hidden_layers))
        kept = sum(tokens if window is None else min(window, tokens) for window in windows)
        return 2 * kept * config.num_key_value_heads * config.head_dim * self.dtype.itemsize

    def with_refusals(self, group: list[Row]) -> list[tuple[Row, dict[str, Any]]]:
        """Rows with their figures, or with why a method refused."""
        refused, taken = [], []
        for row in group:
            try:
                self.cache(row, self.sizes.length, self.sizes.scored)
                for length, prompts in self.prompts.items():
                    self.cache(row, length, self._num_fed(prompts))
                taken.append(row)
            except ValueError as error:
                refused.append((row, {"name": row.name, "spec": row.spec, "refused": str(error)}))
        return refused + list(zip(taken, self.measure(taken) if taken else [], strict=True))


def kept_at(folder: Path, name: str) -> Path:
    """The file that keeps the figures of the row of this name."""
    return folder / f"{name.replace(' ', '_').replace('%', '')}.json"


def keep_committed(folder: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write rows of a committed table as files of this run, where it has none of these names."""
    for row in rows:
        file = kept_at(folder, row["name"])
        if not file.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            write_json(file, row)


def is_of_plan(found: dict[str, Any], plan: Path) -> bool:
    """Whether the kept figures of a row are of the plan in this file. Rows of old runs do not say.

    Until plans had a residual, it was 128.
    """
    measured = found.get("plan") or {}
    now = SharingPlan.load(plan)
    if measured.get("sha256") not in (None, plan_sha256(now)):
        return False
    if measured.get("residual", RESIDUAL) != now.residual:
        return False
    return "bits" not in measured or measured["bits"] == (now.bits and list(now.bits))


def of_current_plans(found: list[dict[str, Any]], plans: dict[str, Path]) -> list[dict[str, Any]]:
    """The rows without those whose plan was made anew since, which are said.

    Args:
        found: kept figures.
        plans: the file of a row's plan, by the row's name. Rows without one, or without its file, stay.
    """
    current = []
    for row in found:
        plan = plans.get(row["name"])
        if plan is None or not plan.is_file() or is_of_plan(row, plan):
            current.append(row)
        else:
            print(f"{row['name']}: the plan was made anew, so its old figures are removed")
    return current


def named(found: list[Row], only: str, parser: argparse.ArgumentParser) -> list[Row]:
    """The rows whose names match one of the patterns ``only``; all of them without patterns."""
    patterns = [pattern for pattern in only.split(",") if pattern]
    for pattern in patterns:
        if not any(fnmatch(row.name, pattern) for row in found):
            parser.error(f"no row is called {pattern!r}; there are: {', '.join(row.name for row in found)}")
    return [row for row in found if not patterns or any(fnmatch(row.name, x) for x in patterns)]


def measure_missing(
    make_bench: Any, rows: Iterable[Row], folder: Path, part: int = 0, parts: int = 1
) -> None:
    """Measure what is missing of this part.

    Args:
        make_bench: gives the ``Bench``; called once, and only when something is missing.
        folder: of the files that keep figures.
        part, parts: which share of the rows this process measures.
    """
    together: dict[Any, list[Row]] = {}
    for row in rows:
        whole = row.share is not None and row.spec in WHOLE_PROMPT
        together.setdefault((row.spec, whole or row.name), []).append(row)
    bench = None
    for number, rows_together in list(enumerate(together.values()))[part::parts]:
        group = [row for row in rows_together if not kept_at(folder, row.name).is_file()]
        if not group:
            continue
        bench = bench or make_bench()
        for row, found in bench.with_refusals(group):
            folder.mkdir(parents=True, exist_ok=True)
            write_json(kept_at(folder, row.name), found)
            print(f"{number + 1}/{len(together)} {headline(found)}", flush=True)


def read_kept(folder: Path, root: Path) -> list[dict[str, Any]]:
    """The figures that are kept, without the path of the repository."""
    texts = [
        file.read_text(encoding="utf-8").replace(f"{root}/", "") for file in sorted(folder.glob("*.json"))
    ]
    return [json.loads(text) for text in texts]


def headline(found: dict[str, Any]) -> str:
    if "refused" in found:
        return f"{found['name']}: refused: {found['refused']}"
    keys = {length: sum(right) / len(right) for length, right in found["passkeys"].items()}
    mean = math.exp(sum(found["nll"]) / len(found["nll"]))
    held = f"bytes {found['bytes_over_dense']:.1%}"
    return f"{found['name']}: perplexity {mean:.2f}, {held}, passkeys {keys}, {found['seconds']:.0f} s"


def ratio(own: list[float], dense: list[float]) -> list[float]:
    """Perplexity over dense, and its 95 % interval over texts (paired, Student's t)."""
    found = perplexity_change(own, dense, [1] * len(own))
    return [1 + end for end in (found.value, *(found.interval or ()))]


def table_head(sizes: Sizes) -> list[str]:
    """The first two lines of a table of rows."""
    lengths = (f"passkeys {n}" for n in sizes.key_lengths)
    columns = ["", "bytes of dense", "perplexity / dense (95 %)", *lengths, "L/F/W"]
    return [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]


def table_line(x: dict[str, Any], dense: dict[str, Any], more: str = "") -> str:
    """The line of a row beside a dense one; ``x`` gets its ratio to it. ``more`` stands behind its name."""
    keys = [key_cell(right) for right in x["passkeys"].values()]
    held = f"{x['bytes_over_dense']:.1%}"
    cells = [x["name"] + more, held, ratio_cell(x, dense), *keys, roles_cell(x["plan"])]
    return f"| {' | '.join(cells)} |"


def ratio_cell(x: dict[str, Any], dense: dict[str, Any]) -> str:
    """Perplexity over dense with its interval; ``x`` gets them as ``ratio``."""
    mean, low, high = x["ratio"] = ratio(x["nll"], dense["nll"])
    return f"{mean:.3f} ({low:.3f}–{high:.3f})"


def key_cell(right: list[bool]) -> str:
    """Keys found, with Wilson's interval."""
    low, high = wilson(sum(right), len(right))
    return f"{sum(right) / len(right):.0%} ({low:.0%}–{high:.0%})"


def roles_cell(plan: dict[str, Any] | None) -> str:
    """Heads that lead, follow and keep their windows."""
    return "–" if plan is None else "/".join(str(plan[k]) for k in ("leads", "followers", "windows"))
