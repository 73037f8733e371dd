"""Copy the figures of a finished `make demo` into benchmarks/results/demo_smollm2.json.

python benchmarks/demo_results.py [runs/demo]
"""

import sys
from pathlib import Path

from pod.eval.report.merge import merge
from pod.eval.report.tables import overview
from pod.files import read_json, write_json
from pod.modeling.shipped.sharing import SharingPlan

RESULTS = Path(__file__).parent / "results" / "demo_smollm2.json"


def main(folder: Path) -> None:
    """Raises: ValueError when the demo has not finished."""
    steps = read_json(folder / "demo.json")
    unfinished = [name for name, step in steps.items() if "seconds" not in step]
    if unfinished or not (folder / "eval" / "report.html").is_file():
        raise ValueError(
            f"{folder} holds no finished demo ({', '.join(unfinished) or 'no report'}): run make demo"
        )
    plan = SharingPlan.load(folder / "plan" / "plan.json")
    content = {
        "environment": read_json(folder / "eval" / "full.json")["environment"],
        "plan": {"asymptotic_saving": plan.asymptotic_saving, "share_followers": plan.share_followers},
        "export_check": read_json(folder / "export_check.json"),
        "seconds": {name: step["seconds"] for name, step in steps.items()},
        "methods": overview(merge([folder])).texts(),
    }
    write_json(RESULTS, content)
    print(f"wrote {RESULTS}")


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/demo"))
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
