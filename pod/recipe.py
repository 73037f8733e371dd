"""The recipe, one YAML file for all commands: reading, checking, overriding and explaining it.

The string under each field is its documentation, which `--help` prints. `run` is the command line that the
commands share.
"""

import argparse
import inspect
import os
import sys
import traceback
import typing
from collections.abc import Callable, Sequence
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field

from pod.bench.args import BenchArgs
from pod.command_line import Parser, add_verbosity
from pod.data.args import DataArgs
from pod.errors import one_line
from pod.eval.args import EvalArgs
from pod.files import check_can_write
from pod.models import ModelArgs
from pod.plan.args import ExploreArgs
from pod.schema import (
    Loader,
    build,
    explain,
    field_docs,
    fields_of,
    hints_of,
    is_setting,
    nearest,
    section,
    to_yaml,
)
from pod.training.args import ExportArgs, TrainRecipe
from pod.verbosity import printing


def _folder(name: str, doc: str) -> Any:
    """A property of a recipe: a folder below its output_dir."""
    return property(lambda recipe: Path(recipe.output_dir) / name, doc=doc)


@section
class Recipe:
    """All settings of a run; each command reads some of the sections."""

    output_dir: str = "runs/run"
    """Folder for everything that the run writes: data/, plan/, train/, export/, eval/, bench/. Relative to
    the current folder."""

    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of every random choice: documents, order of rows, initial LoRA weights."""

    model: ModelArgs = field(default_factory=ModelArgs)
    """The model to start from, its windows and its layout."""

    explore: ExploreArgs = field(default_factory=ExploreArgs)
    """How costs of sharing are measured and turned into a plan."""

    data: DataArgs = field(default_factory=DataArgs)
    """Where text comes from, and how it is balanced and packed into rows."""

    train: TrainRecipe = field(default_factory=TrainRecipe)
    """How the model is fine-tuned under the plan. Settings that are null are chosen to fit the ranks and
    devices."""

    export: ExportArgs = field(default_factory=ExportArgs)
    """How the trained model is written as a Hugging Face folder."""

    eval: EvalArgs = field(default_factory=EvalArgs)
    """What is measured, and for which methods."""

    bench: BenchArgs = field(default_factory=BenchArgs)
    """What `pod bench` measures: lengths, batch sizes, methods. Methods are compared with the dense cache."""

    @property
    def held_out_tokens(self) -> int:
        """How many tokens of text to hold out of training.

        It is data.held_out_tokens where that is set. Otherwise it is the largest number that explore, eval or
        the evaluation during training needs; they read the same text.
        """
        explore, train, text = self.explore, self.train, self.eval
        if self.data.held_out_tokens is not None:
            return self.data.held_out_tokens
        return max(
            0 if explore.sources else explore.num_sequences * explore.sequence_length,
            0 if text.text else text.text_sequences * text.text_length,
            train.eval_rows * self.data.context_length if train.eval_every_steps else 0,
        )

    def __post_init__(self) -> None:
        if not self.output_dir:
            raise ValueError(
                "output_dir is empty: name a folder for the files of the run, for example runs/demo"
            )

    plan_dir = _folder("plan", "Where `pod explore` writes plan.json, the costs and the pictures.")
    data_dir = _folder("data", "Where `pod data` writes the packed shards.")
    train_dir = _folder("train", "Where `pod train` writes step-N/, latest and metrics.jsonl.")
    eval_dir = _folder("eval", "Where `pod eval` writes its JSON and report.html.")
    bench_dir = _folder("bench", "Where `pod bench` writes its JSON.")

    @property
    def export_dir(self) -> Path:
        """Where `pod export` writes the Hugging Face folder: export.path, or <output_dir>/export."""
        return Path(self.export.path or Path(self.output_dir) / "export")

    @property
    def served_dir(self) -> Path:
        """Where `pod export --format vllm` writes: export.path, or <output_dir>/export-vllm."""
        return Path(self.export.path or Path(self.output_dir) / "export-vllm")


_INSIDE = Path(__file__).parent / "recipes"
RECIPES = _INSIDE if _INSIDE.is_dir() else Path(__file__).parents[1] / "configs"
"""The recipes that come with pod: inside an installed package, or `configs/` of a checkout."""


def recipe_names() -> list[str]:
    """The names of the recipes that come with pod, as `--config` takes them: `demo`, `paper/pod_3`.

    The recipes of the papers come last.
    """
    found = [file.relative_to(RECIPES).with_suffix("").as_posix() for file in RECIPES.rglob("*.yaml")]
    return sorted(found, key=lambda name: ("/" in name, name))


def run(
    main: Callable[..., None],
    *,
    sections: Sequence[str],
    description: str | None = None,
    estimate: Callable[..., str] | None = None,
    add_arguments: Callable[[argparse.ArgumentParser], Any] | None = None,
    check_arguments: Callable[[argparse.Namespace], None] | None = None,
    argv: Sequence[str] | None = None,
) -> None:
    """Read the command line of a command that takes a recipe, then call `main(recipe)`.

    The options are `--config`, `--set`, `--dry-run`, `--help` and more. A ValueError, OSError, RuntimeError
    or ImportError ends the process with code 2 and one line on stderr; `-v` adds the traceback.

    Args:
        main: the command itself.
        sections: the recipe's sections that the command reads. `--help` explains these.
        description: the text at the top of `--help`.
        estimate: gives the text about time, memory and disk for `--dry-run`. It is called as `main` is.
        add_arguments: called with the parser. An option whose `dest` holds a dot is a shorthand:
            `parser.add_argument("--threshold", dest="explore.threshold")` equals `--set explore.threshold=…`
            and wins over it. An option whose `dest` is a parameter of `main` or of `estimate` is handed to
            it: `main(recipe, overwrite=True)`.
        check_arguments: called with the parsed arguments. It raises ValueError for options that do not go
            together.
        argv: the arguments; None takes those of the process.
    """
    parser = _parser(sections, description)
    if add_arguments is not None:
        add_arguments(parser)
    arguments = parser.parse_args(argv)
    shorthands = {key: value for key, value in vars(arguments).items() if "." in key}
    overrides = [f"{key}={value}" for key, value in shorthands.items() if value not in (None, [])]
    try:
        if check_arguments is not None:
            check_arguments(arguments)
        recipe = load_recipe(arguments.config, arguments.changes + overrides)
        if arguments.dry_run or arguments.print_config:
            if rank() == 0:
                _print_dry_run(recipe, sections, estimate, arguments)
        else:
            elsewhere = recipe.export.path if "export" in sections else None
            check_can_write(elsewhere or recipe.output_dir, "export.path" if elsewhere else "output_dir")
            with printing(arguments.verbosity):
                main(recipe, **_options_for(main, arguments))
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        exit_with(error)


def _options_for(function: Callable[..., Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """The options of the command line that are parameters of a function."""
    parameters = inspect.signature(function).parameters
    return {key: value for key, value in vars(arguments).items() if key in parameters}


def _print_dry_run(
    recipe: Recipe,
    sections: Sequence[str],
    estimate: Callable[..., str] | None,
    arguments: argparse.Namespace,
) -> None:
    """Print the estimate for `--dry-run`, and below it the resolved recipe for `--print-config`."""
    if arguments.dry_run:
        if estimate is None:
            print("There is no estimate for this command.")
        else:
            print(estimate(recipe, **_options_for(estimate, arguments)))
    if arguments.dry_run and arguments.print_config:
        print("---")
    if arguments.print_config:
        print(to_yaml(recipe, {"output_dir", "seed", *sections}), end="")


def load_recipe(path: str | os.PathLike[str] | None, overrides: Sequence[str] = ()) -> Recipe:
    """Read a YAML recipe, apply overrides `section.field=value`, and check every key, type and value.

    Args:
        path: the recipe; None means all defaults.
        overrides: each is `section.field=value`; the value is YAML.

    Raises:
        ValueError: one line names the file or the key, and what is allowed.
    """
    content = _read_recipe(_find_recipe(Path(path))) if path is not None else {}
    for override in overrides:
        _apply_override(content, override)
    try:
        return build(Recipe, content)
    except ValueError as error:
        place = f"{path}: " if path is not None and not overrides else ""
        raise ValueError(f"{place}{error}") from None


def _find_recipe(path: Path) -> Path:
    """The file of this path, else the recipe of this name that comes with pod: `demo`, `paper/pod_3`.

    The name is given with or without .yaml.
    """
    if path.exists():
        return path
    inside = path.relative_to("configs") if path.is_relative_to("configs") else path
    for file in (RECIPES / path, RECIPES / f"{path}.yaml", RECIPES / inside):
        if file.is_file():
            return file
    return path


def _apply_override(content: dict[str, Any], override: str) -> None:
    """Set one override, such as `train.max_steps=10`, in the content of a recipe file."""
    name, sign, text = override.partition("=")
    *sections, last = name.strip().split(".")
    if not sign or not all([*sections, last]):
        raise ValueError(f"--set {override!r}: expected NAME=VALUE, for example --set train.max_steps=10")
    for depth, key in enumerate(sections, start=1):
        path = sections[:depth]
        place = f"--set {override!r}: {'.'.join(path)}"
        if is_setting(Recipe, path):
            raise ValueError(f"{place} is a setting, not a section with settings of its own")
        if content.get(key) is None:
            content[key] = {}
        if not isinstance(content[key], dict):
            raise ValueError(f"{place} is {content[key]!r} in the recipe: it should be a section")
        content = content[key]
    try:
        value = yaml.load(text, Loader=Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"--set {override!r}: the value is not valid YAML ({one_line(error)})") from None
    # `data.sources=stdlib:` means the text, not the mapping {stdlib: null} that YAML sees in it.
    content[last] = text if isinstance(value, dict) and not text.lstrip().startswith("{") else value


def _read_recipe(path: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The sections of a recipe file, merged with those of the recipe that it extends.

    With `extends: NAME`, settings that the file does not have are taken from the recipe NAME: one in the same
    folder, or one that comes with pod.

    Args:
        above: the files that extend this one, directly or not. It may not extend any of them.
    """
    own = _read_yaml(path)
    name, above = own.pop("extends", None), (*above, path.resolve())
    if name is None:
        return own
    if not isinstance(name, str) or (path.parent / name).resolve() in above:
        raise ValueError(
            f"--config {path}: extends is {name!r}: it should be the name of another recipe, "
            "in the same folder or one of `pod recipes`"
        )
    content = _read_recipe(_find_extended(path.parent, name, above), above)
    for key, value in own.items():
        both = isinstance(value, dict) and isinstance(content.get(key), dict)
        content[key] = content[key] | value if both else value
    return content


def _find_extended(folder: Path, name: str, above: tuple[Path, ...]) -> Path:
    """The recipe `name`, with or without .yaml: in `folder`, else as `--config` finds it.

    The result is never one of `above`, the recipes that extend this one.
    """
    for file in (folder / name, folder / f"{name}.yaml", _find_recipe(Path(name))):
        if file.is_file() and file.resolve() not in above:
            return file
    return folder / name


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=Loader)
    except FileNotFoundError:
        near = nearest(path.with_suffix(""), recipe_names()) or nearest(path.stem, recipe_names())
        raise ValueError(
            f"--config {path}: there is no such file, and no recipe of this name{near}; "
            "`pod recipes` lists the recipes that come with pod"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--config {path}: cannot be read ({one_line(error)})") from None
    except yaml.YAMLError as error:
        raise ValueError(f"--config {path}: not valid YAML: {one_line(error)}") from None
    if content is None:
        raise ValueError(
            f"--config {path}: the recipe file is empty; `pod recipes demo_tiny` shows a recipe that works"
        )
    if not isinstance(content, dict):
        expected = ", ".join(fields_of(Recipe))
        raise ValueError(
            f"--config {path}: the file is a {type(content).__name__}; it should have sections: {expected}"
        )
    return content


def _parser(sections: Sequence[str], description: str | None) -> argparse.ArgumentParser:
    """A parser with the options that all commands share.

    Its epilog lists every field of the given sections with type, default and meaning.
    """
    lines = ["settings of the recipe (in the file of --config, or with --set NAME=VALUE):"]
    lines += explain(Recipe, "", skip_sections=True)
    for name in sections:
        lines += ["", f"[{name}] {field_docs(Recipe)[name]}", *explain(hints_of(Recipe)[name], name)]
    parser = Parser(description=description, epilog="\n".join(lines))
    add = parser.add_argument
    which = (
        "YAML recipe: a file, or the name of a recipe that comes with pod, such as demo_tiny "
        "(`pod recipes` lists them)"
    )
    add("-c", "--config", metavar="FILE", help=which)
    override = "change one setting, for example --set train.max_steps=10 (may be given several times)"
    add("--set", dest="changes", metavar="NAME=VALUE", action="append", default=[], help=override)
    add(
        "--dry-run", action="store_true", help="check the recipe, print what the command would need, and stop"
    )
    show = (
        "print the complete recipe as YAML, defaults included, and stop; with --dry-run: below the estimate"
    )
    add("--print-config", action="store_true", help=show)
    add_verbosity(parser)
    add("--local_rank", type=int, help=argparse.SUPPRESS)  # the deepspeed launcher passes it
    return parser


def exit_with(error: Exception) -> typing.NoReturn:
    """Print one line on stderr and exit with code 2.

    A RuntimeError of several lines is a bug and keeps its traceback.
    """
    if isinstance(error, BrokenPipeError):
        raise error  # the reader of the output has closed it, as `head` does
    is_bug = isinstance(error, RuntimeError) and "\n" in str(error).strip()
    if is_bug or os.environ.get("POD_TRACEBACK") == "1":
        traceback.print_exc()
    hint = " (-v shows where)" if isinstance(error, RuntimeError) else ""
    prefix = "error" if rank() == 0 else f"error (rank {rank()})"
    if not (rank() and said_by_all(error)):
        print(f"{prefix}: {one_line(error)}{hint}", file=sys.stderr, flush=True)
    sys.exit(2)


def said_by_all(error: Exception) -> bool:
    """Whether every rank raises this error, so that one message is enough.

    Errors in a recipe are found before ranks communicate, and are printed once on each machine.
    """
    ranks: Any = sys.modules.get("torch.distributed")
    alone = ranks is None or not ranks.is_initialized()
    is_first = os.environ.get("LOCAL_RANK", "0") == "0"
    return getattr(error, "of_all_ranks", False) or (isinstance(error, ValueError) and alone and not is_first)


def rank() -> int:
    """The rank of this process as its launcher says; 0 without a launcher. This needs no torch."""
    return int(os.environ.get("RANK", "0") or 0)
