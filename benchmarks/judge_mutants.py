"""Whether the judge's tests would see a wrong judge: small changes of its code, one at a time, each of which tests must refuse.

python benchmarks/judge_mutants.py
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = ("tests/eval/test_report_rows.py", "tests/eval/test_judge.py")
INTERVALS, VERDICTS = "intervals.py", "verdicts.py"
MUTANTS = [  # file of pod/eval/judge, what stands there, what stands there instead
    (INTERVALS, "_TAIL = (1 + LEVEL) / 2", "_TAIL = LEVEL"),
    (INTERVALS, "return min(1.0, 2 * float(tail))", "return min(1.0, float(tail))"),
    (INTERVALS, "half = critical(number - 1) * error", "half = critical() * error"),
    (INTERVALS, "number / (number - 1) * squares", "squares"),
    (INTERVALS, "np.square(sums - value * sizes)", "np.square(sums - value)"),
    (INTERVALS, "z2 / (4 * trials**2)", "z2 / (4 * trials)"),
    (INTERVALS, "rate + z2 / (2 * trials)", "rate"),
    (INTERVALS, "effect = number * squares", "effect = squares"),
    (INTERVALS, "number * (number + 1) / (number * effect + 1)", "number / effect"),
    (INTERVALS, "number == 1 or variance", "variance"),
    (
        INTERVALS,
        "squares = max(float(np.square(sums).sum()), float(np.square(residuals).sum()))",
        "squares = float(np.square(sums).sum())",
    ),
    (INTERVALS, "rate * (1 - rate) / trials +", "rate / trials +"),
    (INTERVALS, "low=max(-1.0, found.low)", "low=found.low"),
    (INTERVALS, "if min(scores) < 0 or max(scores) > 1:", "if False:"),
    (INTERVALS, "-_tango_high(lost, gained, trials)", "-_tango_high(gained, lost, trials)"),
    (INTERVALS, "2 * only_lost + middle * (1 - middle)", "2 * only_lost"),
    (INTERVALS, "min(gained, lost), gained + lost, 0.5", "max(gained, lost), gained + lost, 0.5"),
    (INTERVALS, "if not gaps.any():", "if False:"),
    (INTERVALS, "(weight * half / critical(freedom)) ** 2", "weight * (half / critical(freedom)) ** 2"),
    (INTERVALS, "np.arange(len(order), 0, -1)", "len(order)"),
    (INTERVALS, "np.maximum.accumulate(steps)", "steps"),
    (VERDICTS, "self.adjusted >= CHANCE", "self.adjusted < CHANCE"),
    (VERDICTS, "(self.delta > 0) == self.higher_is_better", "self.delta > 0"),
    (VERDICTS, "gaps = [own - base", "gaps = [base - own"),
    (VERDICTS, ".mapped(math.expm1)", ".mapped(math.exp)"),
    (VERDICTS, "gained=sum(gap > 0", "gained=sum(gap < 0"),
    (VERDICTS, "- {None}) > 1", "- {None}) > 2"),
    (VERDICTS, "weights[name] / total, of(rows)", "1 / len(tasks), of(rows)"),
]


def survives(file: str, old: str, new: str, folder: Path) -> bool:
    """Whether the tests pass with this change made in a copy of the tree."""
    place = folder / "pod" / "eval" / "judge" / file
    before = place.read_text(encoding="utf-8")
    if before.count(old) != 1:
        raise SystemExit(f"{file} has {before.count(old)} places with {old!r}: bring the list up to date")
    place.write_text(before.replace(old, new), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", *TESTS, "-q", "-x", "-n", "0", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=False)
    place.write_text(before, encoding="utf-8")
    return done.returncode == 0


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in ("pod", "tests", "pyproject.toml", "configs"):
            copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
            copy(ROOT / part, folder / part)
        left = [mutant for mutant in MUTANTS if survives(*mutant, folder)]
    for file, old, new in left:
        print(f"survives: {file}: {old} -> {new}")
    print(f"{len(MUTANTS) - len(left)} of {len(MUTANTS)} mutants killed")
    sys.exit(bool(left))


if __name__ == "__main__":
    main()
