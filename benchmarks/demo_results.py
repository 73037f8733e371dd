"""Copy the figures of a finished `make demo`, run from nothing, into benchmarks/results/demo_smollm2.json.

python benchmarks/demo_results.py [runs/demo]
"""

import sys
from pathlib import Path

from pod.eval.report.merge import merge
from pod.eval.report.report_tables import overview
from pod.eval.report.speed import decoding_table
from pod.files import read_json, write_json
from pod.modeling.model.sharing import SharingPlan

RESULTS = Path(__file__).parent / "results" / "demo_smollm2.json"


def main(folder: Path) -> None:
    """Raises: ValueError when the demo has not finished."""
    seconds = read_json(folder / "demo.json")
    merged = merge([folder])
    plan = SharingPlan.load(folder / "plan" / "plan.json")
    content = {
        "environment": read_json(folder / "eval" / "full.json")["environment"],
        "plan": {"asymptotic_saving": plan.asymptotic_saving, "share_followers": plan.share_followers},
        "export_check": read_json(folder / "export_check.json"),
        "seconds": seconds,
        "methods": overview(merged).texts(),
        "after longer prompts": decoding_table(merged.runs[0].speed, "").texts(),
    }
    write_json(RESULTS, content)
    print(f"wrote {RESULTS}")


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/demo"))
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
