"""Which rows benchmarks/judge_plans.py measures, in several processes and after an interruption."""

from pod.files import write_json


def test_the_parts_of_an_interrupted_run_stay_the_same(script, tmp_path):
    judge = script("judge_plans")

    class Bench:
        def with_refusals(self, group):
            return [(row, {"name": row.name, "refused": "here"}) for row in group]

    rows = [judge.Row(name, "pod") for name in ("a", "b", "c", "d")]
    write_json(judge.kept_at(tmp_path, "a"), {"name": "a"})
    judge.measure_missing(Bench, rows, tmp_path, part=1, parts=2)
    assert {file.stem for file in tmp_path.glob("*.json")} == {"a", "b", "d"}
    judge.measure_missing(Bench, rows, tmp_path, part=0, parts=2)
    assert {file.stem for file in tmp_path.glob("*.json")} == {"a", "b", "c", "d"}
