"""The README's table of methods is what the registry says."""

from pathlib import Path

import pod

README = Path(__file__).resolve().parents[1] / "README.md"
HEAD = ["| method | kind | what it does | paper |", "|---|---|---|---|"]


def row(method) -> str:
    name = f"[`{method.name}`](pod/modeling/methods/{method.file}.py)"
    paper = f"[{method.paper}]({method.url})" if method.url else method.paper
    return f"| {name} | {method.axis} | {method.title} | {paper} |"


def test_the_table_of_methods_is_the_registrys():
    """When it fails: put the table that the message shows into the README."""
    table = "\n".join([*HEAD, *map(row, pod.methods().values())])
    assert f"\n{table}\n\n" in README.read_text(encoding="utf-8"), f"README.md must have:\n\n{table}\n"


def test_every_method_names_its_file():
    for method in pod.methods().values():
        assert (README.parent / "pod" / "modeling" / "methods" / f"{method.file}.py").is_file(), method.name
