"""List the recipes that come with pod, show one, or copy one to a file of your own.

pod recipes                              all recipes, one line each
pod recipes demo                         the text of one recipe
pod recipes demo --copy my_recipe.yaml   copy it, to change it and use it with --config my_recipe.yaml"""

import re
import shlex
import shutil
import textwrap
from pathlib import Path

from pod.command_line import Parser
from pod.files import atomic_write_text
from pod.recipe import RECIPES, exit_with, recipe_names
from pod.schema import nearest

_LONGEST_SUMMARY = 120


def start() -> None:
    """Run the command line."""
    parser = Parser(description=__doc__)
    parser.add_argument(
        "name", nargs="?", metavar="NAME", help="a recipe of the list, such as demo_tiny or paper/pod_3"
    )
    parser.add_argument("--copy", type=Path, metavar="FILE", help="write the recipe to this new file")
    arguments = parser.parse_args()
    try:
        if arguments.name is None and arguments.copy is None:
            print(listing())
        elif arguments.name is None:
            raise ValueError(
                "--copy: name the recipe to copy, for example `pod recipes demo --copy my_recipe.yaml`"
            )
        elif arguments.copy is None:
            print(recipe_text(arguments.name), end="")
        else:
            copy(arguments.name, arguments.copy)
    except (ValueError, OSError) as error:
        exit_with(error)


def listing() -> str:
    """Every recipe with its first sentence."""
    names = recipe_names()
    width = max(map(len, names))
    limit = max(60, shutil.get_terminal_size((_LONGEST_SUMMARY + width, 0)).columns - width - 4)
    lines = [
        f"  {name:{width}}  {textwrap.shorten(summary(name), limit, placeholder=' …')}" for name in names
    ]
    usage = (
        "Use one:  pod train --config NAME\n"
        "Show one: pod recipes NAME\n"
        "Copy one: pod recipes NAME --copy my_recipe.yaml"
    )
    return "\n".join([f"{len(names)} recipes come with pod:", "", *lines, "", usage])


def summary(name: str) -> str:
    """The first sentence of the comment at the top of a recipe."""
    comment = []
    for line in recipe_text(name).splitlines():
        if not line.startswith("#"):
            break
        comment.append(line.removeprefix("#").strip())
    return re.split(r"(?<=\.)\s", " ".join(comment), maxsplit=1)[0]


def recipe_text(name: str) -> str:
    """The YAML of a recipe that comes with pod.

    Raises:
        ValueError: the name is unknown; the message has the nearest known one.
    """
    known = recipe_names()
    wanted = name.removeprefix("configs/").removesuffix(".yaml")
    if wanted not in known:
        raise ValueError(
            f"there is no recipe {name!r}{nearest(wanted, known)}; `pod recipes` lists all recipes"
        )
    return (RECIPES / f"{wanted}.yaml").read_text(encoding="utf-8")


def copy(name: str, target: Path) -> None:
    """Write a recipe to a new file.

    Raises:
        ValueError: the file exists, or its folder does not.
    """
    if target.exists():
        raise ValueError(f"--copy {target}: this file exists already: give another name, or remove it first")
    if not target.parent.is_dir():
        raise ValueError(
            f"--copy {target}: the folder {target.parent} does not exist: create it, or choose another place"
        )
    # The recipe to extend does not lie beside the copy: name it as one that comes with pod.
    folder = Path(name.removeprefix("configs/")).parent
    text = re.sub(
        r"^extends: *(\S+?)(\.yaml)?$",
        lambda found: f"extends: {(folder / found[1]).as_posix()}",
        recipe_text(name),
        flags=re.MULTILINE,
    )
    atomic_write_text(target, text)
    print(f"written: {target}; use it with --config {shlex.quote(str(target))}")
