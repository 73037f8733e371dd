"""What several tests of data preparation look at."""

from pathlib import Path

from pod.data.documents import SourceReport
from pod.data.units import plan_units, read_unit


def content(folder):
    """Bytes of each file of a folder."""
    return {file.name: file.read_bytes() for file in Path(folder).iterdir()}


def read_all(args):
    """(documents, report) of all units, one after the other."""
    report = SourceReport("all")
    documents = [document for unit in plan_units(args) for document in read_unit(unit, args, report)]
    return documents, report


def texts_of(args):
    """Texts of all documents."""
    return [document.text for document in read_all(args)[0]]


def five_characters(document):
    """A `data.document_filter`."""
    return len(document.text) >= 5


def none(document):
    """One that keeps nothing."""
    return False
