"""Quality gates: what they leave out, by which name, and what is refused before anything is read."""

import sys

import numpy as np
import pytest

from pod.data.args import DataArgs
from pod.data.documents import Document
from pod.data.gates import Gates, imported_filter, language_sample

ENGLISH = "The committee met on Tuesday and agreed that the old bridge should be repaired before the winter. "
GERMAN = (
    "Der Ausschuss traf sich am Dienstag und beschloss, dass die alte Brücke vor dem Winter repariert wird. "
)
FRENCH = (
    "Le comité s'est réuni mardi et a décidé que le vieux pont devait être réparé avant l'hiver prochain. "
)


def document(text="", tokens=None):
    return Document(text, "source", "file:3", None if tokens is None else np.array(tokens, dtype=np.uint32))


def reasons(args, texts):
    gates = Gates(args)
    return [gates.reason(document(text)) for text in texts]


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


def test_without_gates_everything_stays():
    assert reasons(DataArgs(), ["", "a", "x" * 10**6, "\ud800\x00"]) == [None] * 4
    assert Gates(DataArgs(token_field="ids")).reason(document(tokens=[])) is None


def test_minimum_length_counts_characters_not_bytes():
    assert reasons(DataArgs(min_characters=3), ["äöü", "äö", "abcd", ""]) == [
        None,
        "min_characters",
        None,
        "min_characters",
    ]


def test_patterns_search_anywhere():
    texts = ["a licence: MIT\nend", "a LICENCE: none", "MIT licence, secret", "nothing"]
    assert reasons(DataArgs(keep_pattern=r"(?i)licence"), texts) == [None, None, None, "keep_pattern"]
    assert reasons(DataArgs(drop_pattern=r"\bsecret\b"), texts) == [None, None, "drop_pattern", None]
    assert reasons(DataArgs(keep_pattern="licence", drop_pattern="secret$|^a"), texts) == [
        "drop_pattern",
        "keep_pattern",
        "drop_pattern",
        "keep_pattern",
    ]
    # An empty pattern is a pattern: it is found everywhere.
    assert reasons(DataArgs(keep_pattern=""), texts) == [None] * 4
    assert reasons(DataArgs(drop_pattern=""), texts) == ["drop_pattern"] * 4


def test_first_gate_that_fails_is_named():
    args = DataArgs(min_characters=5, keep_pattern="a", drop_pattern="b")
    assert reasons(args, ["bb", "bbbbbb", "ab", "aaaaab", "aaaaa"]) == [
        "min_characters",
        "keep_pattern",
        "min_characters",
        "drop_pattern",
        None,
    ]


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"keep_pattern": "(a"}, r"keep_pattern '\(a' is no regular expression: "),
        ({"drop_pattern": "*"}, r"drop_pattern '\*' is no regular expression: "),
        ({"document_filter": "somewhere"}, "document_filter must be module:function, got 'somewhere'"),
        ({"document_filter": ":f"}, "document_filter must be module:function, got ':f'"),
        ({"document_filter": "json:"}, "document_filter must be module:function, got 'json:'"),
        ({"document_filter": "no_such:f"}, "cannot import no_such .*is its folder on PYTHONPATH"),
        ({"document_filter": "json:nothing"}, "json has no function nothing"),
        ({"document_filter": "json:__name__"}, "json has no function __name__"),
        (
            {"token_field": "ids", "min_characters": 1, "languages": ["en"]},
            "min_characters, languages need text, but token_field='ids' gives tokens: unset them",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, message):
    if "languages" in settings:
        pytest.importorskip("py3langid")
    with pytest.raises(ValueError, match=message) as raised:
        Gates(DataArgs(**settings))
    assert "\n" not in str(raised.value)


def test_text_gates_refuse_documents_of_tokens():
    gates = Gates(DataArgs(min_characters=2, drop_pattern="x"))
    with pytest.raises(
        ValueError, match="min_characters, drop_pattern need text, but document file:3 gives tokens"
    ):
        gates.reason(document(tokens=[1, 2, 3]))


def test_languages():
    pytest.importorskip("py3langid")
    texts = [ENGLISH, GERMAN, FRENCH, ENGLISH * 100, GERMAN * 100]
    assert reasons(DataArgs(languages=["en"]), texts) == [None, "language", "language", None, "language"]
    assert reasons(DataArgs(languages=["fr", "de"]), texts) == ["language", None, None, "language", None]
    with pytest.raises(ValueError, match="languages: unknown 'english', 'xx'; known are .* de .* en .*"):
        Gates(DataArgs(languages=["de", "english", "xx"]))


def test_missing_language_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "py3langid", None)
    with pytest.raises(
        ValueError, match=r"data.languages needs the package py3langid: pip install 'pod-kv\[language\]'"
    ):
        Gates(DataArgs(languages=["en"]))


def test_language_is_told_by_start_and_middle():
    text = "".join(chr(0x4E00 + number) for number in range(10_000))
    assert language_sample(text) == f"{text[:1000]}\n{text[4500:5500]}"
    assert language_sample(text[:2000]) == text[:2000]
    assert language_sample(text[:2001]) == f"{text[:1000]}\n{text[1000:2000]}"  # no character twice
    pytest.importorskip("py3langid")
    # A short English licence above a long German text: the middle decides, at a bounded cost.
    assert reasons(DataArgs(languages=["de"]), [ENGLISH * 6 + GERMAN * 200]) == [None]
    assert reasons(DataArgs(languages=["de"]), [ENGLISH * 200 + GERMAN * 3]) == ["language"]


def test_own_filter_sees_the_document(own_module):
    name = own_module(
        "import numpy as np\n"
        "def keep(document):\n"
        "    if document.tokens is not None:\n"
        "        return np.bool_(len(document.tokens) > 2)\n"
        "    return 'x' in document.text\n"
    )
    gates = Gates(DataArgs(document_filter=f"{name}:keep", drop_pattern="z"))
    assert [gates.reason(document(text)) for text in ("x", "y", "xz")] == [
        None,
        "document_filter",
        "drop_pattern",
    ]
    gates = Gates(DataArgs(document_filter=f"{name}:keep", token_field="ids"))
    assert gates.reason(document(tokens=[1, 2, 3])) is None
    assert gates.reason(document(tokens=[1, 2])) == "document_filter"
    assert imported_filter(f"{name}:keep") is sys.modules[name].keep


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
    gates = Gates(DataArgs(document_filter=f"{name}:keep"))
    with pytest.raises(ValueError, match=f"document_filter {name}:keep {message}") as raised:
        gates.reason(document("text"))
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 400
