"""The house rules that a machine can check: layout, import arrows, sizes, recipes, packaging."""

import ast
import importlib.util
import os
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from pod import recipe as recipes

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
LAUNCHERS = sorted((ROOT / "launch").glob("*.py"))
SOURCES = sorted(
    file for folder in ("pod", "launch", "benchmarks", "tests") for file in (ROOT / folder).rglob("*.py")
)

# Which parts of pod a part may import. `errors`, `files`, `schema` and `units` may be imported by all; the
# files at the top of pod are parts of their own, and so is `model`, which exported checkpoints carry.
ARROWS = {
    "__init__": {"model", "plan", "kernels", "modeling", "engine", "registry", "tokenizer"},
    "files": set(),
    "errors": set(),
    "units": set(),
    "verbosity": set(),
    "command_line": {"verbosity"},
    "notation": set(),
    "registry": {"notation"},
    "remote": set(),
    "families": set(),
    "toolchain": set(),
    "schema": {"notation"},
    "models": set(),
    "tokenizer": {"models"},
    "identity": {"models", "model"},
    "model": set(),
    "kernels": {"model", "toolchain"},
    "engine": {"model", "kernels"},
    "modeling": {"model", "kernels", "engine", "families", "models", "notation", "registry", "tokenizer"},
    "data": {"remote", "tokenizer", "verbosity"},
    "plan": {"model", "modeling", "kernels", "data", "training", "verbosity"},
    "training": {"model", "modeling", "kernels", "data", "toolchain", "verbosity"},
    "export": {"model", "modeling", "plan", "training", "models", "__init__"},
    "measure": {"model", "modeling"},
    "eval": {"model", "modeling", "kernels", "data", "measure", "notation", "registry", "verbosity"},
    "bench": {"eval", "measure", "model", "modeling", "__init__", "models", "recipe", "notation", "registry"},
    "recipe": {"schema", "models", "data", "plan", "training", "eval", "bench", "command_line", "verbosity"},
    "commands": {
        "command_line",
        "toolchain",
        "verbosity",
        "recipe",
        "models",
        "export",
        "data",
        "plan",
        "training",
        "eval",
        "bench",
        "kernels",
        "modeling",
        "model",
        "tokenizer",
        "__init__",
    },
    "__main__": {"commands"},
}
# Reading a recipe's model names and the package's public interface is allowed to those that work on whole
# models.
ARROWS["training"] |= {"__init__", "models", "identity", "recipe", "tokenizer"}
ARROWS["plan"] |= {"__init__", "models", "identity", "recipe", "tokenizer"}
ARROWS["eval"] |= {"__init__", "models", "identity", "recipe", "schema", "tokenizer"}


def imported_parts(file: Path) -> set[str]:
    """The parts of pod that a file imports, absolutely or relatively, at any depth.

    `if TYPE_CHECKING:` blocks do not count.
    """
    package = file.relative_to(ROOT).parent.parts
    found = set()
    for node in run_time_nodes(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            found |= {f"{module}.{alias.name}" for alias in node.names}
    ours = [name.split(".") for name in found if name.split(".")[0] == "pod"]
    return {part_of(name) for name in ours}


def run_time_nodes(tree: ast.AST):
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        yield from run_time_nodes(node)


def part_of(name: list[str]) -> str:
    """The part that a module name belongs to.

    `pod.data.rows.pack` → data, `pod.modeling.model.cache` → model; `pod` or `pod.SharingPlan`, which
    stands in pod/__init__.py → __init__.
    """
    if name[1:3] == ["modeling", "model"]:
        return "model"
    if len(name) > 1 and ((ROOT / "pod" / name[1]).is_dir() or (ROOT / "pod" / f"{name[1]}.py").is_file()):
        return name[1]
    return "__init__"


def test_kernels_of_hugging_face_is_not_shadowed():
    """No folder of this repository may hide the top-level package `kernels`.

    transformers 5 imports it.
    """
    code = (
        "import importlib.util as u; s = u.find_spec('kernels'); "
        "print(s and (s.origin or list(s.submodule_search_locations)))"
    )
    for folder in (ROOT, ROOT / "launch"):  # where scripts, tests and notebooks are started
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True
        )
        found = done.stdout.strip().replace(str(Path(sys.prefix)), "<venv>")
        assert str(ROOT) not in found
    here = importlib.util.find_spec("kernels")  # in this process, whose path pytest may have changed
    assert here is None or str(ROOT) not in f"{here.origin} {here.submodule_search_locations}".replace(
        sys.prefix, ""
    )


def test_imports_point_one_way():
    wrong = []
    for file in (ROOT / "pod").rglob("*.py"):
        part = part_of([*file.relative_to(ROOT).with_suffix("").parts])
        assert part in ARROWS, f"{part} is a new part of pod: say in ARROWS what it may import"
        not_allowed = imported_parts(file) - ARROWS[part] - {part, "errors", "files", "schema", "units"}
        wrong += [
            f"{file.relative_to(ROOT)} imports pod/{other}, allowed are {sorted(ARROWS[part])}"
            for other in not_allowed
        ]
    assert not wrong


def test_arrow_check_sees_every_kind_of_import(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    for name in ("data", "eval", "kernels", "training", "modeling"):
        (tmp_path / "pod" / name).mkdir(parents=True)
    file = tmp_path / "pod" / "kernels" / "x.py"
    file.write_text(
        "import pod.data.rows.pack\nfrom pod import eval\nfrom typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from pod.training import loss\ndef f():\n    from ..modeling import loading\n"
    )
    assert imported_parts(file) == {"data", "eval", "modeling"}
    file.write_text("from pod.modeling.model.attend import Call\nfrom ..modeling import model\n")
    assert imported_parts(file) == {"model"}


def test_files_and_functions_are_of_readable_size():
    """Files have at most 600 lines and functions at most 60, their docstrings not counted.

    A kernel may be one long function.
    """
    too_long = []
    for file in SOURCES:
        text = file.read_text(encoding="utf-8")
        if text.count("\n") > 600:
            too_long.append(f"{file.relative_to(ROOT)}: {text.count(chr(10))} lines")
        if file.is_relative_to(ROOT / "pod" / "kernels"):
            continue
        functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
        lengths = {
            node.name: (node.end_lineno or 0) - node.lineno + 1 - docstring_lines(node) for node in functions
        }
        too_long += [
            f"{file.relative_to(ROOT)}: {name} has {n} lines" for name, n in lengths.items() if n > 60
        ]
    assert not too_long


def docstring_lines(node: ast.FunctionDef) -> int:
    first = node.body[0]
    if ast.get_docstring(node) is None:
        return 0
    return (first.end_lineno or first.lineno) - first.lineno + 1


def test_no_unsafe_reading_and_no_path_of_one_machine():
    patterns = {
        r"^\s*(import|from) (pickle|cPickle|shelve)\b": "pickle runs whatever a file says",
        r"torch\.load\((?!.*weights_only=True)": "torch.load runs whatever a file says",
        r"allow_pickle=True": "np.load with pickle runs whatever a file says",
        r"[\"'](/home/|/root/|/work/|/Users/)": "a path of one machine",
    }
    found = []
    for file in SOURCES:
        if file == Path(__file__).resolve():
            continue
        text = file.read_text(encoding="utf-8")
        found += [
            f"{file.relative_to(ROOT)}: {why}"
            for pattern, why in patterns.items()
            if re.search(pattern, text, re.M)
        ]
    assert not found


@pytest.mark.parametrize("config", CONFIGS, ids=lambda f: f.name)
def test_every_recipe_loads_and_survives_a_round_trip(config, tmp_path):
    recipe = recipes.load_recipe(config)
    copy = tmp_path / "copy.yaml"
    copy.write_text(recipes.to_yaml(recipe))
    assert recipes.load_recipe(copy) == recipe


def test_the_paper_recipe_is_the_papers():
    recipe = recipes.load_recipe(ROOT / "configs" / "llama3_8b_32k_pod.yaml")
    assert (recipe.model.num_sink_tokens, recipe.model.num_recent_tokens) == (16, 4080)
    explore = recipe.explore
    assert (explore.num_sequences, explore.sequence_length, explore.num_queries) == (1000, 32768, 16)
    assert recipe.data.target_tokens == 5_000_000_000
    assert recipe.train.learning_rate == 1e-5
    assert recipe.train.tokens_per_step == 4 * 2**20
    assert recipe.train.total_tokens == 5_000_000_000
    assert recipe.train.steps(recipe.data.context_length) == 1192


@pytest.fixture
def started(monkeypatch, capsys):
    """`started("demo.py", "--help")` runs a launcher in this process (its imports are paid once).

    Returns (exit code, stdout, stderr).
    """

    def start(name: str, *arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        code = 0
        try:
            runpy.run_path(str(ROOT / "launch" / name), run_name="__main__")
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
        return code, *capsys.readouterr()

    return start


@pytest.mark.parametrize("config", CONFIGS, ids=lambda f: f.name)
def test_every_recipe_passes_a_dry_run(config, started):
    code, output, error = started("demo.py", "--config", config, "--dry-run", "--print-config")
    assert code == 0, error
    assert "output_dir: runs/" in output
    assert output.startswith("prepare: turn text into packed training rows\nexplore: measure the heads")


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda f: f.name)
def test_every_launcher_explains_its_fields_and_refuses_unknown_keys(launcher, started):
    code, output, error = started(launcher.name, "--help")
    assert code == 0, error
    assert "model.num_recent_tokens" in output or "export.path" in output
    code, output, error = started(launcher.name, "--set", "model.num_recnt_tokens=3")
    assert code == 2
    assert "did you mean 'model.num_recent_tokens'" in error


def test_a_launcher_starts_from_any_folder(launch):
    done = launch("run_eval.py", "--set", "evl.methods=full")
    assert done.returncode == 2
    assert "did you mean 'eval'" in done.stderr
    assert "Traceback" not in done.stderr


def test_every_field_of_every_section_is_documented():
    for section in ("model", "explore", "data", "train", "export", "eval", "bench"):
        cls = recipes.hints_of(recipes.Recipe)[section]
        undocumented = set(recipes.fields_of(cls)) - set(recipes.field_docs(cls))
        assert not undocumented, f"{section}: no text under {sorted(undocumented)}"


def test_pinned_versions_are_installed_and_within_the_declared_ranges():
    from importlib.metadata import version

    from packaging.requirements import Requirement

    lines = [
        line
        for name in ("requirements.txt", "requirements-nodeps.txt")
        for line in (ROOT / name).read_text().splitlines()
    ]
    pinned = [Requirement(line) for line in lines if line and not line.startswith("#")]
    pinned = [pin for pin in pinned if pin.marker is None or pin.marker.evaluate()]
    # CUDA builds of torch pin a triton of their own
    assert all(str(pin.specifier).startswith("==") or pin.name == "triton" for pin in pinned)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ranges = {r.name.lower(): r for r in map(Requirement, project["dependencies"])}
    by_name = {pin.name.lower(): pin for pin in pinned}
    assert not set(ranges) - set(by_name), "a dependency without a tested version"
    for name, wanted in ranges.items():
        assert wanted.specifier.contains(str(by_name[name].specifier).removeprefix("=="))
    wrong = {pin.name: version(pin.name) for pin in pinned if not pin.specifier.contains(version(pin.name))}
    assert not wrong, f"installed, but not what requirements.txt pins: {wrong}"


def test_missing_tools_are_named_with_the_command_that_installs_them(tmp_path):
    """`make tools` without Python, with one that is too old, and with a good one and no compiler."""
    for name in ("bash", "sh", "grep", "sed", "dirname"):
        os.symlink(f"/bin/{name}" if Path(f"/bin/{name}").exists() else f"/usr/bin/{name}", tmp_path / name)
    (tmp_path / "apt-get").write_text("#!/bin/sh\n")
    (tmp_path / "apt-get").chmod(0o755)
    make = next(p for p in ("/usr/bin/make", "/bin/make", "/usr/local/bin/make") if Path(p).exists())
    environment = {"PATH": str(tmp_path)}
    bare = subprocess.run([make, "tools"], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (
        bare.returncode != 0 and "no Python 3.11 or newer" in bare.stderr and "apt-get install" in bare.stderr
    )
    (tmp_path / "old").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "old").chmod(0o755)
    for python, code, message in (("old", 2, "is not a Python 3.11 or newer"), (sys.executable, 0, "")):
        command = [make, "tools", f"PYTHON={python}"]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == code and message in done.stderr


def test_ci_runs_what_the_readme_says():
    ci = (ROOT / ".ci" / "run").read_text()
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    readme = (ROOT / "README.md").read_text()
    for command in ("make test", "make demo", "make lint"):
        assert command in ci
    assert "make test" in readme and "make demo" in readme
