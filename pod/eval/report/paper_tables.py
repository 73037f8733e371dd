"""Published results (docs/paper_tables/*.csv), and ours next to them where model, benchmark, task and method are the same."""

import csv
import re
from dataclasses import dataclass
from pathlib import Path

from pod.eval.report.merge import Comparison, Entry, Run, base_name, byte_share
from pod.eval.report.page import Block, Cell, Fold, Notes, Table
from pod.eval.report.summary import BASE
from pod.eval.report.tables import NONE, speed_of

COLUMNS = ("paper", "table", "model", "benchmark", "task", "method", "setting", "metric", "value")
TITLES = {
    "pod": "PoD",
    "simlayerkv": "SimLayerKV",
    "d2o": "D2O",
    "razorattention": "RazorAttention",
    "imdc": "IMDC",
}
_LONGBENCH = {
    "single_doc_qa": ("narrativeqa", "qasper", "multifieldqa_en", "multifieldqa_zh"),
    "multi_doc_qa": ("hotpotqa", "2wikimqa", "musique", "dureader"),
    "summarization": ("gov_report", "qmsum", "multi_news", "vcsum"),
    "few_shot": ("trec", "triviaqa", "samsum", "lsht"),
    "synthetic": ("passage_count", "passage_retrieval_en", "passage_retrieval_zh"),
    "code": ("lcc", "repobench-p"),
}
_CHINESE = ("multifieldqa_zh", "dureader", "vcsum", "lsht", "passage_retrieval_zh")
_MEMBERS = {
    "longbench": _LONGBENCH,
    "longbench_14": {
        name: tuple(task for task in tasks if task not in _CHINESE) for name, tasks in _LONGBENCH.items()
    },
    "leval": {
        "closed": ("coursera", "gsm100", "quality", "topic_retrieval_longchat", "tpo", "codeU", "sci_fi"),
        "open_qa": (
            "financial_qa",
            "legal_contract_qa",
            "natural_question",
            "multidoc_qa",
            "narrative_qa",
            "scientific_qa",
        ),
        "open_summarization": (
            "gov_report_summ",
            "meeting_summ",
            "news_summ",
            "paper_assistant",
            "patent_summ",
            "review_summ",
            "tv_show_summ",
        ),
    },
    "ruler": {
        "niah_single": ("niah_single_1", "niah_single_2", "niah_single_3"),
        "niah_multikey": ("niah_multikey_1", "niah_multikey_2", "niah_multikey_3"),
        "qa": ("qa_1", "qa_2"),
    },
}
_OPEN_ROWS = 12  # longer tables stand behind a line that opens them
_OURS = re.compile(r"pod_(longbench|leval|infinitebench_\d+k|ruler_\d+k)_(.+)")
_STANDARD = ("mmlu", "hellaswag", "arc_easy", "arc_challenge", "humaneval")


@dataclass(frozen=True)
class Published:
    """One printed number. value: as printed; metric `score` is 0 to 100, anything else names its unit."""

    paper: str
    table: str
    model: str
    benchmark: str
    task: str
    method: str
    setting: str
    metric: str
    value: float


def load(folder: str | Path | None = None) -> list[Published]:
    """Every row of the CSV files of a folder (default: docs/paper_tables of this checkout; empty where there is none).

    Raises: ValueError naming file and line for other columns or a value that is no number.
    """
    place = Path(__file__).resolve().parents[3] / "docs" / "paper_tables" if folder is None else Path(folder)
    files = sorted(place.glob("*.csv"))
    if folder is not None and not files:
        raise ValueError(f"{place} holds no CSV files with the columns {', '.join(COLUMNS)}")
    return [row for file in files for row in _read(file)]


def _read(file: Path) -> list[Published]:
    with file.open(encoding="utf-8", newline="") as stream:
        reader = csv.DictReader(stream)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise ValueError(
                f"{file} must have the columns {', '.join(COLUMNS)}, it has {', '.join(reader.fieldnames or ['none'])}"
            )
        rows = []
        for record in reader:
            try:
                rows.append(Published(**{**record, "value": float(record["value"])}))
            except (TypeError, ValueError):
                raise ValueError(
                    f"{file}, line {reader.line_num}: {record.get('value')!r} is no number"
                ) from None
    return rows


def same_model(ours: str, published: str) -> bool:
    """Whether a model path or hub id is the one that a paper names: `meta-llama/Meta-Llama-3-8B-Instruct` is `LLaMA3-8B-Instruct`.

    Stretched contexts (`-32K`) count as the same model; what the paper calls it is printed beside the numbers.
    """
    return _model_key(ours) == _model_key(published)


def _model_key(name: str) -> str:
    words = re.split(r"[-_\s]+", name.rstrip("/").rpartition("/")[2].lower())
    words = [re.sub(r"^llama(\d)", r"llama-\1", word) for word in words]
    dropped = re.compile(r"meta|hf|\d+k|v\d+(\.\d+)*")
    return "".join("-".join(word for word in words if not dropped.fullmatch(word)).split("-"))


def blocks(comparison: Comparison, published: list[Published], model: str | None = None) -> list[Block]:
    """A table per published table of a model that was measured. model: the paper's name, for every run."""
    found: list[Block] = []
    for name, run in _models(comparison, model).items():
        fitting = [row for row in published if same_model(name, row.model)]
        for paper, table in dict.fromkeys((row.paper, row.table) for row in fitting):
            rows = [row for row in fitting if (row.paper, row.table) == (paper, table)]
            body = _rows(comparison, run, rows)
            if body:
                title = f"{TITLES.get(paper, paper)}, Table {table}: {rows[0].model}"
                heads = [
                    "task",
                    "method",
                    "paper's setting",
                    "paper",
                    "paper's Δ",
                    "ours",
                    "ours: value",
                    "ours: Δ",
                ]
                long = len(body) > _OPEN_ROWS
                found.append(Fold(title, [Table(heads, body)]) if long else Table(heads, body, title))
    if found:
        note = (
            "Prompts, truncation and budgets of the papers differ from ours and from one another: compare the changes against full "
            "rather than the scores. Averages and categories of ours are means over the same tasks."
        )
        return [*found, Notes([note])]
    return found


def _models(comparison: Comparison, model: str | None) -> dict[str, Run | None]:
    """Names of the measured models, each with its run; one name for all when the user gives it."""
    if model is not None:
        return {model: None}
    return {run.dense_path: run for run in comparison.runs if run.dense_path}


def _rows(comparison: Comparison, run: Run | None, published: list[Published]) -> list[list[Cell]]:
    body = []
    full = {
        (row.benchmark, row.task, row.metric, row.setting): row.value
        for row in published
        if row.method == BASE
    }
    loose = {(row.benchmark, row.task, row.metric): row.value for row in published if row.method == BASE}
    for row in published:
        base = full.get(
            (row.benchmark, row.task, row.metric, row.setting),
            loose.get((row.benchmark, row.task, row.metric)),
        )
        for entry in comparison.entries:
            fits = run is None or entry.run.dense_path == run.dense_path
            if base_name(entry.method) != row.method or not fits:
                continue
            ours = _ours(comparison, entry, row, published)
            if ours is not None:
                body.append(_row(row, base, entry, *ours))
    return body


def _row(row: Published, base: float | None, entry: Entry, value: float, change: float | None) -> list[Cell]:
    score = row.metric == "score"
    name = row.task.replace("_", " ")
    task = name if score else f"{name} ({row.metric})"
    theirs = NONE
    if base is not None and row.method != BASE:
        theirs = (
            Cell(f"{row.value - base:+.1f}", sort=row.value - base) if score else _times(row.value / base)
        )
    mine = NONE
    if change is not None:
        mine = Cell(f"{change:+.1f}", sort=change) if score else _times(change)
    return [
        Cell(task, row.benchmark if row.benchmark.rpartition("_")[2].endswith("k") else ""),
        Cell(row.method),
        Cell(row.setting or "–"),
        Cell(f"{row.value:g}", sort=row.value),
        theirs,
        Cell(entry.label),
        Cell(f"{value:.1f}", sort=value),
        mine,
    ]


def _times(ratio: float) -> Cell:
    return Cell(f"× {ratio:.2f}", sort=ratio)


def _ours(
    comparison: Comparison, entry: Entry, row: Published, published: list[Published]
) -> tuple[float, float | None] | None:
    """(our value, our change against full) for a published number, None when we did not measure it."""
    if row.benchmark == "efficiency":
        return _efficiency(entry, row)
    if row.benchmark == "consistency":
        found = entry.parts.get("consistency", {}).get("metrics", {}).get(row.setting)
        return None if found is None else (100 * found["value"], None)
    if row.metric != "score":
        return None
    names = _leaves(row, published)
    value = _mean(entry, names)
    if value is None:
        return None
    base = next(
        (
            other
            for other in comparison.entries
            if other.method == BASE and other.run.dense_path == entry.run.dense_path
        ),
        None,
    )
    reference = None if base is None or base is entry else _mean(base, names)
    return 100 * value, None if reference is None else 100 * (value - reference)


def _efficiency(entry: Entry, row: Published) -> tuple[float, float | None] | None:
    if row.task == "decode":
        found = speed_of(entry)
        if found is None:
            return None
        ratio = found[1].get("speed_over_full")
        return found[1]["decode_tokens_per_second"]["median"], None if ratio is None else ratio["median"]
    if row.task == "kv_saving":
        shares = [share for task in entry.parts if (share := byte_share(entry, task)) is not None]
        return (100 * (1 - min(shares)), None) if shares else None
    return None


def _leaves(row: Published, published: list[Published]) -> list[list[str]]:
    """The tasks behind a published number: means of means. An average is over everything else that the table prints for the model."""
    if row.task == "average" and row.benchmark != "niah":
        if row.paper == "imdc":
            return []  # its averages are not the mean of what it prints
        same = [other for other in published if other.method == row.method and other.task != "average"]
        same = [other for other in same if other.benchmark.startswith(row.benchmark)]
        if row.benchmark != "infinitebench":  # its average is over lengths, which are the settings
            same = [other for other in same if other.setting == row.setting]
        return [_members(other.benchmark, other.task) for other in same]
    return [_members(row.benchmark, row.task)]


def _members(benchmark: str, task: str) -> list[str]:
    """Our names of a published task or category, as `benchmark/task`."""
    suite = re.sub(r"_\d+k$", "", benchmark)
    inside = _MEMBERS.get(suite, {}).get(task, (task,))
    place = "longbench" if suite.startswith("longbench") and benchmark != "longbench_8k" else benchmark
    return [f"{place}/{name}" for name in inside]


def _mean(entry: Entry, names: list[list[str]]) -> float | None:
    """Mean over groups of the means of their tasks (0 to 1); None when one is missing."""
    values = _values(entry)
    if not names or any(name not in values for group in names for name in group):
        return None
    groups = [sum(values[name] for name in group) / len(group) for group in names]
    return sum(groups) / len(groups)


def _values(entry: Entry) -> dict[str, float]:
    """Our scores (0 to 1) as `benchmark/task`, parts of groups included."""
    values: dict[str, float] = {}
    for task, part in entry.parts.items():
        if part["kind"] == "nll":
            continue
        inner = {name: found["value"] for name, found in (part.get("subtasks") or {}).items()}
        whole = _OURS.fullmatch(task)
        prefix = task if whole is None else task.removesuffix(f"_{whole.group(2)}")
        for name, value in {task: part["value"], **inner}.items():
            found = _OURS.fullmatch(name) or _OURS.fullmatch(f"{prefix}_{name}")
            if value is None:
                continue
            if found is not None:
                values[f"{found.group(1)}/{found.group(2)}"] = value
            plain = name.removeprefix("pod_")
            values.setdefault(f"standard/{plain}" if plain in _STANDARD else f"{plain}/{plain}", value)
        if task == "niah" and part["value"] is not None:
            values["niah/average"] = part["value"]
    return values
