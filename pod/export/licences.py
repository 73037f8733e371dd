"""Licence files of this code, and of the model that the weights come from."""

import shutil
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import metadata_load, snapshot_download

import pod
from pod.export.card import Licence
from pod.models import PACKAGE

_NAMES = ("LICEN", "NOTICE", "USE_POLICY", "COPYING")
_OF_BASE = "base_model-"
_FIELDS = ("license", "license_name", "license_link")


def add_licences(folder: Path, base: str | None) -> Licence:
    """Copy the licence of this code, and the licences of the base model, into an export.

    Args:
        base: the base model as in `Origin.base`; None = unknown.

    Returns:
        What the base model's card says about its licence; the licence is `unknown` where it says nothing.
    """
    shutil.copyfile(own_licence(), folder / "LICENSE")
    files, fields = _of_base(base)
    copies = {_OF_BASE + file.name.removeprefix(_OF_BASE): file for file in files}
    for name, file in copies.items():
        shutil.copyfile(file, folder / name)
    return Licence(fields={"license": "unknown"} | fields, files=tuple(copies))


def own_licence() -> Path:
    """The licence file of this package, installed or in a clone."""
    return next(iter(_of_distribution("pod-kv")), Path(pod.__file__).parents[1] / "LICENSE")


def _of_base(base: str | None) -> tuple[list[Path], dict[str, Any]]:
    """The licence files of the base model, and the `_FIELDS` of its card."""
    if base is None:
        return [], {}
    return _of_package(base) if base.startswith(PACKAGE) else _of_model(base)


def _of_package(base: str) -> tuple[list[Path], dict[str, Any]]:
    """Files and fields of a model inside an installed package."""
    module = base.removeprefix(PACKAGE)
    for name in metadata.packages_distributions().get(module, []):
        about = metadata.metadata(name).json
        found = str(about.get("license_expression") or about.get("license") or "")
        is_name = 0 < len(found) < 40  # some packages put the whole text there
        return _of_distribution(name), {"license": found.lower()} if is_name else {}
    return [], {}


def _of_distribution(name: str) -> list[Path]:
    """The licence files of an installed distribution; none where it is not installed."""
    try:
        files = metadata.files(name) or []
    except metadata.PackageNotFoundError:
        return []
    found = [Path(str(file.locate())) for file in files if _is_licence(file.name)]
    return sorted(file for file in found if file.is_file())


def _of_model(base: str) -> tuple[list[Path], dict[str, Any]]:
    """Files and fields of a model that is a folder or a hub id.

    Those of a hub id are downloaded, or taken from this machine's cache.
    """
    folder = Path(base).expanduser()
    if not folder.is_dir():
        try:
            patterns = ["README.md", *(f"{name}*" for name in _NAMES)]
            folder = Path(snapshot_download(base, allow_patterns=patterns))
        except (OSError, ValueError):  # there is no such model, or no network and nothing on this machine
            return [], {}
    try:
        fields = metadata_load(folder / "README.md") or {}
    except (OSError, ValueError, yaml.YAMLError):  # there is no card, or it says nothing
        fields = {}
    found = sorted(file for file in folder.iterdir() if file.is_file() and _is_licence(file.name))
    # The LICENSE of an earlier export is that of its code, not of its weights.
    of_base = [file for file in found if file.name.startswith(_OF_BASE)]
    is_export = (folder / "llama.py").is_file()
    return of_base if is_export else found, {name: fields[name] for name in _FIELDS if fields.get(name)}


def _is_licence(name: str) -> bool:
    return name.removeprefix(_OF_BASE).upper().startswith(_NAMES)
