"""Would the tests see a wrong decoder or a wrong judge?

Each mutant is one small change of the code. The quick level of the tests runs on it; if it passes, the rest
runs too.

    python benchmarks/mutants.py                     # both parts, about an hour on two cores
    python benchmarks/mutants.py --part judge --out runs/mutants.json
    python benchmarks/mutants.py --levels quick      # what `make test` sees; the rest may kill a survivor

With --out a run continues: mutants that the file has are not tried again.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("pod", "tests", "configs", "examples", "benchmarks", "launch", "pyproject.toml")
LEVELS = ("quick", "rest")
SURVIVES = "none"


@dataclass(frozen=True)
class Mutant:
    """A change of code: in `file`, `old` becomes `new`. `old` stands there once."""

    file: str
    old: str
    new: str


KILL_MOST = [
    "tests/modeling/test_generation.py",
    "tests/modeling/test_oracles_ranked.py",
    "tests/modeling/test_oracles_windows.py",
    "tests/modeling/test_every_method.py",
    "tests/modeling/test_random_operations.py",
    "tests/kernels/test_attention.py",
    "tests/kernels/test_chunks.py",
    "tests/kernels/test_decode.py",
    "tests/kernels/test_window_attention.py",
]
"""Tests that kill most mutants of the decoder. They run alone first, so that most runs end early."""


def decoder_tests() -> list[str]:
    """The other test files of the decoder: they need neither a kernel compiler nor several processes."""
    files = sorted(str(file.relative_to(ROOT)) for file in (ROOT / "tests" / "modeling").glob("test_*.py"))
    return [file for file in files if file not in KILL_MOST]


TESTS = {
    "judge": [["tests/eval/test_report_rows.py", "tests/eval/test_statistics.py"]],
    "decoder": [KILL_MOST, decoder_tests()],
}
"""Test files of each part, in groups that run one after the other."""

MUTANTS = {
    "judge": [
        Mutant("pod/eval/statistics/confidence.py", "_TAIL = (1 + LEVEL) / 2", "_TAIL = LEVEL"),
        Mutant(
            "pod/eval/statistics/confidence.py",
            "return min(1.0, 2 * float(tail))",
            "return min(1.0, float(tail))",
        ),
        Mutant(
            "pod/eval/statistics/confidence.py",
            "half = critical(number - 1) * error",
            "half = critical() * error",
        ),
        Mutant("pod/eval/statistics/confidence.py", "number / (number - 1) * squares", "squares"),
        Mutant(
            "pod/eval/statistics/confidence.py", "np.square(sums - value * sizes)", "np.square(sums - value)"
        ),
        Mutant("pod/eval/statistics/confidence.py", "z2 / (4 * trials**2)", "z2 / (4 * trials)"),
        Mutant("pod/eval/statistics/confidence.py", "rate + z2 / (2 * trials)", "rate"),
        Mutant("pod/eval/statistics/confidence.py", "effect = number * squares", "effect = squares"),
        Mutant(
            "pod/eval/statistics/confidence.py",
            "number * (number + 1) / (number * effect + 1)",
            "number / effect",
        ),
        Mutant("pod/eval/statistics/confidence.py", "number == 1 or variance", "variance"),
        Mutant(
            "pod/eval/statistics/confidence.py",
            "squares = max(float(np.square(sums).sum()), float(np.square(residuals).sum()))",
            "squares = float(np.square(sums).sum())",
        ),
        Mutant("pod/eval/statistics/confidence.py", "rate * (1 - rate) / trials +", "rate / trials +"),
        Mutant("pod/eval/statistics/confidence.py", "low=max(-1.0, found.low)", "low=found.low"),
        Mutant("pod/eval/statistics/confidence.py", "if min(scores) < 0 or max(scores) > 1:", "if False:"),
        Mutant(
            "pod/eval/statistics/confidence.py",
            "-_tango_high(lost, gained, trials)",
            "-_tango_high(gained, lost, trials)",
        ),
        Mutant("pod/eval/statistics/confidence.py", "2 * only_lost + middle * (1 - middle)", "2 * only_lost"),
        Mutant(
            "pod/eval/statistics/confidence.py",
            "min(gained, lost), gained + lost, 0.5",
            "max(gained, lost), gained + lost, 0.5",
        ),
        Mutant("pod/eval/statistics/confidence.py", "if not gaps.any():", "if False:"),
        Mutant(
            "pod/eval/statistics/confidence.py",
            "(weight * half / critical(freedom)) ** 2",
            "weight * (half / critical(freedom)) ** 2",
        ),
        Mutant("pod/eval/statistics/confidence.py", "np.arange(len(order), 0, -1)", "len(order)"),
        Mutant("pod/eval/statistics/confidence.py", "np.maximum.accumulate(steps)", "steps"),
        Mutant("pod/eval/statistics/comparison.py", "self.adjusted >= CHANCE", "self.adjusted < CHANCE"),
        Mutant(
            "pod/eval/statistics/comparison.py", "(self.delta > 0) == self.higher_is_better", "self.delta > 0"
        ),
        Mutant("pod/eval/statistics/comparison.py", "gaps = [own - base", "gaps = [base - own"),
        Mutant("pod/eval/statistics/comparison.py", ".mapped(math.expm1)", ".mapped(math.exp)"),
        Mutant("pod/eval/statistics/comparison.py", "gained=sum(gap > 0", "gained=sum(gap < 0"),
        Mutant("pod/eval/statistics/comparison.py", "- {None}) > 1", "- {None}) > 2"),
        Mutant(
            "pod/eval/statistics/comparison.py", "weights[name] / total, of(rows)", "1 / len(tasks), of(rows)"
        ),
    ],
    "decoder": [
        # what tells rows of one batch apart
        Mutant(
            "pod/modeling/model/rope.py",
            "part._other_tables = {}",
            "part._other_tables = self._other_tables",
        ),
        Mutant(
            "pod/modeling/model/rows.py",
            "labels = [(counts[row], self._prompt_length(group, counts[row], step)) for row in group.rows]",
            "labels = [(0, self._prompt_length(group, counts[row], step)) for row in group.rows]",
        ),
        Mutant(
            "pod/modeling/model/rows.py",
            "labels = range(count) if self.rowwise else budget_ids",
            "labels = range(count) if self.rowwise else [0] * count",
        ),
        Mutant(
            "pod/modeling/model/rows.py",
            "labels = self.decide(group.layers, part) if self.decide else None",
            "labels = None",
        ),
        Mutant(
            "pod/modeling/methods/d2o.py",
            "return 64 * torch.finfo(cosines.dtype).eps",
            "return 0.0",
        ),
        Mutant(
            "pod/modeling/model/reference.py",
            "query - key < see.num_recent_tokens",
            "query - key <= see.num_recent_tokens",
        ),
        Mutant(
            "pod/modeling/model/reference.py",
            "(key < see.num_sink_tokens) |",
            "(key <= see.num_sink_tokens) |",
        ),
        Mutant(
            "pod/modeling/model/reference.py",
            "logits = torch.where(proximal, logits, far)",
            "logits = torch.where(proximal, far, logits)",
        ),
        Mutant(
            "pod/modeling/model/attend.py",
            "last_column - (last_row - first) - n_r + 1, last_column",
            "last_column - (last_row - first) - n_r, last_column",
        ),
        Mutant(
            "pod/modeling/model/attend.py",
            "yield Slice(late, (column + n_s, last_column - n_r), lead=True)",
            "yield Slice(late, (column + n_s, last_column - n_r), lead=False)",
        ),
        Mutant("pod/modeling/model/attend.py", "max(n_s + n_r - self.past, 0)", "max(n_s + n_r, 0)"),
        Mutant("pod/modeling/model/attend.py", "shares = (lses - total", "shares = (total - lses"),
        Mutant("pod/modeling/model/attend.py", "in spans if value >= 0]", "in spans if value >= -1]"),
        Mutant(
            "pod/modeling/model/flash.py",
            "(column < row) | (column >= row + window)",
            "(column < row) | (column > row + window)",
        ),
        Mutant(
            "pod/modeling/model/flash.py",
            "gate = torch.sigmoid(lse - part_lse)",
            "gate = torch.sigmoid(part_lse - lse)",
        ),
        Mutant(
            "pod/modeling/model/flash.py",
            "targets = (grads[3], grads[4], grads[2]) if part.lead else grads[:3]",
            "targets = grads[:3]",
        ),
        Mutant(
            "pod/modeling/model/rope.py", "torch.cat((-sin, sin), dim=-2)", "torch.cat((sin, -sin), dim=-2)"
        ),
        Mutant(
            "pod/modeling/model/rope.py",
            "angles = position_ids[:, None, :, None, None].to",
            "angles = (position_ids[:, None, :, None, None] * 2).to",
        ),
        Mutant(
            "pod/modeling/model/window_buffer.py",
            "first = max(start, n_s, length - n_r)",
            "first = max(start, n_s, length - n_r + 1)",
        ),
        Mutant(
            "pod/modeling/model/window_buffer.py",
            "(begin, n_s + (begin - n_s) % n_r, end - begin)",
            "(begin, n_s + begin % n_r, end - begin)",
        ),
        Mutant(
            "pod/modeling/model/window_buffer.py",
            "chunk = self.new[:, :, max(start - past, 0)",
            "chunk = self.new[:, :, max(start - past - 1, 0)",
        ),
        Mutant(
            "pod/modeling/model/grouped.py",
            "wrap = (length - n_s) % n_r",
            "wrap = (length - n_s + 1) % n_r",
        ),
        Mutant(
            "pod/modeling/model/grouped.py",
            "gate = torch.sigmoid(lse - call.buffers.distant_lse",
            "gate = torch.sigmoid(-lse + call.buffers.distant_lse",
        ),
        Mutant(
            "pod/modeling/model/grouped.py",
            "gate[:, head] >= call.tau, 1.0",
            "gate[:, head] >= call.tau, 0.0",
        ),
        Mutant(
            "pod/modeling/model/grouped.py",
            "reads[:, head] = (gate[:, head] < 1).any(-1)",
            "reads[:, head] = (gate[:, head] < 1).all(-1)",
        ),
        Mutant(
            "pod/modeling/model/grouped.py",
            "distant = logits[..., n_s:oldest_recent]",
            "distant = logits[..., n_s + 1 : oldest_recent]",
        ),
        Mutant(
            "pod/modeling/model/sharing.py",
            "return above is not None and above <= layer",
            "return above is not None and above < layer",
        ),
        Mutant(
            "pod/modeling/model/quantized.py",
            "self.ring[:, :, self.stop % self.room] = x",
            "self.ring[:, :, (self.stop + 1) % self.room] = x",
        ),
        Mutant("pod/modeling/methods/ranking.py", ".mean(2)\n", ".amax(2)\n"),
        Mutant("pod/modeling/methods/ranking.py", "self.kernel // 2)", "self.kernel // 2).roll(1, -1)"),
        Mutant(
            "pod/modeling/methods/h2o.py",
            "addition[..., : known.shape[2]].add_(known)",
            "addition[..., : known.shape[2]].copy_(known)",
        ),
        Mutant(
            "pod/modeling/methods/h2o.py",
            "later = numbers(self.held - 1, dropped.device) >= dropped",
            "later = numbers(self.held - 1, dropped.device) > dropped",
        ),
        Mutant(
            "pod/modeling/methods/h2o.py",
            "scores.argsort(dim=-1, descending=True, stable=True).split",
            "scores.argsort(dim=-1, stable=True).split",
        ),
        Mutant(
            "pod/modeling/methods/d2o.py",
            "return 1 / total, raw / total.gather(2, nearest)",
            "return 1 / total, raw",
        ),
        Mutant(
            "pod/modeling/methods/d2o.py",
            "return similarity.sigmoid() * merged",
            "return similarity.exp() * merged",
        ),
    ],
}


def killing_level(
    mutant: Mutant, groups: list[list[str]], folder: Path, levels: Sequence[str] = LEVELS
) -> str:
    """The first of the levels whose tests refuse the mutant, made in a copy of the tree, or "none"."""
    place = folder / mutant.file
    before = place.read_text(encoding="utf-8")
    number = before.count(mutant.old)
    if number != 1:
        raise SystemExit(
            f"{mutant.file} has {number} places with {mutant.old!r}, not one: "
            "bring benchmarks/mutants.py up to date"
        )
    place.write_text(before.replace(mutant.old, mutant.new), encoding="utf-8")
    try:
        for level in levels:
            if not groups_pass(level, groups, folder):
                return level
    finally:
        place.write_text(before, encoding="utf-8")
    return SURVIVES


def groups_pass(level: str, groups: list[list[str]], folder: Path) -> bool:
    """Whether the tests of a level pass, group by group, up to the first group that fails."""
    return all(tests_pass(level, tests, folder) for tests in groups)


def tests_pass(level: str, tests: list[str], folder: Path) -> bool:
    """Whether the tests of a level pass in a copy of the tree.

    Raises:
        SystemExit: pytest could not run them, so that its answer says nothing about the code.
    """
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    options = ["--level", level, "-q", "-x", "-n", "logical", "--maxprocesses", "4", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *tests, *options],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    nothing_selected = done.returncode == 5
    if done.returncode not in (0, 1, 2, 5):
        raise SystemExit(
            f"pytest ended with code {done.returncode}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    return done.returncode == 0 or nothing_selected


def copy_tree(folder: Path) -> None:
    """Copy what the tests need, so that the mutants never touch the checkout."""
    for part in COPIED:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / part, folder / part)


def judge_part(
    part: str, folder: Path, levels: Sequence[str], known: Sequence[dict[str, str]] = ()
) -> Iterator[dict[str, str]]:
    """The killing level of every mutant of a part that is not known, printed as it is found."""
    if not groups_pass("quick", TESTS[part], folder):
        raise SystemExit(f"the quick tests of {part} fail without any change: mend them first")
    tried = {(row["file"], row["old"], row["new"]) for row in known}
    for number, mutant in enumerate(MUTANTS[part], 1):
        if (mutant.file, mutant.old, mutant.new) in tried:
            continue
        level = killing_level(mutant, TESTS[part], folder, levels)
        print(
            f"{part} {number}/{len(MUTANTS[part])} {level}: {mutant.file}: {mutant.old} -> {mutant.new}",
            flush=True,
        )
        yield {"part": part, "killed_by": level, **asdict(mutant)}


def write_rows(file: Path, rows: list[dict[str, str]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(rows, indent=1), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=list(MUTANTS), help="only this part (default: all)")
    parser.add_argument("--levels", nargs="+", choices=LEVELS, default=LEVELS, help="default: both")
    parser.add_argument("--out", type=Path, help="write the rows to this JSON file, after each mutant")
    options = parser.parse_args()
    rows = []
    if options.out is not None and options.out.is_file():
        rows = json.loads(options.out.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_tree(folder)
        for part in [options.part] if options.part else list(MUTANTS):
            for row in judge_part(part, folder, options.levels, list(rows)):
                rows.append(row)
                if options.out is not None:
                    write_rows(options.out, rows)
    for part in MUTANTS:
        levels = [row["killed_by"] for row in rows if row["part"] == part]
        if levels:
            killed = {level: levels.count(level) for level in (*LEVELS, SURVIVES)}
            print(f"{part}: {len(levels)} mutants, killed by {killed}")
    sys.exit(any(row["killed_by"] == SURVIVES for row in rows))


if __name__ == "__main__":
    main()
