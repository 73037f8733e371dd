"""The tiny models of the model tests."""

import importlib.util
from pathlib import Path

_file = Path(__file__).parents[1] / "modeling" / "conftest.py"
_spec = importlib.util.spec_from_file_location("modeling_conftest", _file)
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
tools = _module.tools
