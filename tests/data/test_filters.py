"""The user's own filter sees each document.

The error names it when it cannot be imported, fails, or says neither yes nor no.
"""

import sys

import numpy as np
import pytest

from pod.data import Document
from pod.data.read.filters import imported_filter, passes


def document(text="", tokens=None):
    return Document(text, "source", "file:3", None if tokens is None else np.array(tokens, dtype=np.uint32))


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    """own_module(code) → the name of a module with that code."""
    numbers = iter(range(100))

    def make(code):
        name = f"filter_of_a_test_{next(numbers)}"
        (tmp_path / f"{name}.py").write_text(code)
        monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
        return name

    yield make
    for name in [name for name in sys.modules if name.startswith("filter_of_a_test_")]:
        del sys.modules[name]


def test_own_filter_sees_the_document(own_module):
    name = own_module(
        "import numpy as np\n"
        "def keep(document):\n"
        "    if document.tokens is not None:\n"
        "        return np.bool_(len(document.tokens) > 2)\n"
        "    return 'x' in document.text\n"
    )
    keep = imported_filter(f"{name}:keep")
    assert keep is sys.modules[name].keep
    found = [passes(keep, name, one) for one in map(document, ("x", "y"))]
    found += [passes(keep, name, document(tokens=ids)) for ids in ([1, 2, 3], [1, 2])]
    assert found == [True, False, True, False] and all(type(one) is bool for one in found)


@pytest.mark.parametrize(
    "name, message",
    [
        ("no_colon", "must be module:function, got 'no_colon'"),
        ("no_such_module_here:f", "cannot import no_such_module_here .*is its folder on PYTHONPATH"),
        ("json:no_such_function", "json has no function no_such_function"),
    ],
)
def test_filters_that_cannot_be_imported_are_named(name, message):
    with pytest.raises(ValueError, match=message):
        imported_filter(name)


@pytest.mark.parametrize(
    "body, message",
    [
        ("return None", "returned None for file:3: it must return True"),
        ("return 1", "returned 1 for file:3"),
        ("return 'x' * 10_000", "returned 'x{79} for file:3"),
        ("raise KeyError('gone\\nwrong')", "failed on file:3: KeyError: 'gone.*wrong'"),
    ],
)
def test_own_filter_that_misbehaves_is_named(own_module, body, message):
    name = own_module(f"def keep(document):\n    {body}\n")
    keep = imported_filter(f"{name}:keep")
    with pytest.raises(ValueError, match=f"document_filter {name}:keep {message}") as raised:
        passes(keep, f"{name}:keep", document("text"))
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 400
