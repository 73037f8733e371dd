"""Fixtures of tests of benchmarks/, whose scripts import one another by name."""

import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch):
    """`script("gpu_rows")`: that script as a module."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module
