"""Which FlashAttention runs on CUDA: 2, which comes with PyTorch, or 3 or 4 instead.

``varlen`` calls the same operations of PyTorch for all of them. PyTorch's own switch
``torch.nn.attention.activate_flash_attention_impl`` changes which one runs, for the whole process.

A recipe may name a version (``model.flash_attention``), or else the environment (``POD_FLASH_ATTENTION``).
This version runs or is refused; it is never replaced by another. If neither names one, loading a model
changes nothing, so that a version that the user activated with PyTorch's switch stays.
"""

import importlib.metadata
import os
from typing import Any, NamedTuple

import torch
import torch.nn.attention as switch
from torch.torch_version import TorchVersion

VARIABLE = "POD_FLASH_ATTENTION"
"""The environment variable that names a version."""
SETTING = "model.flash_attention"
"""The setting of recipes that names a version."""
SHIPPED = "fa2"
"""The version that comes with PyTorch."""


class FlashVersion(NamedTuple):
    """A version that can replace FlashAttention 2.

    Attributes:
        number: the number of the version.
        implementation: its name in PyTorch's switch.
        package: the package that must be installed.
        modules: top-level names of the modules that PyTorch imports from the package.
        majors: the first numbers of the compute capabilities of the GPUs that it runs on.
        how_to_get: how to install it, for an error message.
    """

    number: int
    implementation: str
    package: str
    modules: tuple[str, ...]
    majors: tuple[int, ...]
    how_to_get: str


VERSIONS = {
    "fa3": FlashVersion(
        3,
        "FA3",
        "flash-attn-3",
        ("flash_attn_interface", "flash_attn_3", "flash_attn_config"),
        (9,),
        "pip install flash-attn-3 from PyTorch's package index, or build the folder hopper of "
        "Dao-AILab/flash-attention",
    ),
    "fa4": FlashVersion(
        4,
        "FA4",
        "flash-attn-4",
        ("flash_attn",),
        (9, 10),
        "pip install '.[gpu]' in a clone, or pip install 'flash-attn-4>=4.0.0b17,<4.0.0b19'",
    ),
}
ALLOWED = (SHIPPED, *VERSIONS)

# FlashAttention 4's forward pass gives more than two results since the first of these versions. PyTorch takes
# only two of them before the second (pytorch/pytorch#190212).
_MORE_RESULTS, _TAKES_TWO = "4.0.0b19", "2.14"

_chosen: str | None = None  # the version that the recipe of the running command names; it wins over VARIABLE


def asked() -> str | None:
    """The version that the recipe names, else the one that the environment names. None = neither does.

    Raises:
        ValueError: a name that is not allowed.
    """
    name = _chosen or os.environ.get(VARIABLE) or None
    if name is not None and name not in ALLOWED:
        raise ValueError(f"{_source()}={name} is not allowed: use {', '.join(ALLOWED)}")
    return name


def _source() -> str:
    """The name of the setting or variable that names the version, for messages."""
    return VARIABLE if _chosen is None else SETTING


def choose(setting: str | None) -> str:
    """Record the choice of a command's recipe. From now on it decides, or the environment if it is None.

    Args:
        setting: the version that the recipe names, or None.

    Returns:
        The version that ``use`` will activate.
    """
    global _chosen
    _chosen = setting
    return asked() or SHIPPED


def use(setting: str | None = None) -> str:
    """Activate the version that the recipe or the environment names, else FlashAttention 2.

    A command calls this before its first attention.

    Returns:
        The version that runs.

    Raises:
        ValueError: the version is unknown or cannot run here. The message is one line.
    """
    name = choose(setting)
    _activate(name)
    return name


def use_asked() -> None:
    """Activate the version that the running command's recipe or the environment names, for loading a model.

    If neither names a version, nothing changes.

    Raises:
        ValueError: as ``use`` does.
    """
    name = asked()
    if name is not None:
        _activate(name)


def check() -> None:
    """Check that the named version can run here, as far as this is known without loading it.

    Raises:
        ValueError: it cannot run here.
    """
    name = asked() or SHIPPED
    if (reason := refusal(name)) is not None:
        raise ValueError(_cannot(name, reason))


def _cannot(name: str, reason: str) -> str:
    return f"{_source()}={name} cannot run here: {reason}; or use {SHIPPED}, which comes with PyTorch"


def _activate(name: str) -> None:
    """Make PyTorch use a version. ``ValueError`` if it cannot run here or cannot be loaded."""
    if name == active_version():
        return
    if name == SHIPPED:
        switch.restore_flash_attention_impl()
        return
    if (reason := refusal(name)) is not None:
        raise ValueError(_cannot(name, reason))
    version = VERSIONS[name]
    try:
        switch.activate_flash_attention_impl(version.implementation)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in version.modules:
            raise ValueError(_cannot(name, _not_loaded(version, error))) from None
        missing = f"the package {version.package} is not installed ({version.how_to_get})"
        raise ValueError(_cannot(name, missing)) from None
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        raise ValueError(_cannot(name, _not_loaded(version, error))) from None


def _not_loaded(version: FlashVersion, error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return (
        f"{version.package} cannot be loaded ({text}): install it again for this PyTorch, {torch.__version__}"
    )


def active_version() -> str:
    """The version that runs on CUDA now: one of ``ALLOWED``, or PyTorch's name of another one."""
    implementation = _current()
    if implementation is None:
        return SHIPPED
    names = {version.implementation: name for name, version in VERSIONS.items()}
    return names.get(implementation, implementation)


def _current() -> str | None:
    """PyTorch's name of the active version. None = FlashAttention 2."""
    # PyTorch has this function since 2.11
    find: Any = getattr(switch, "current_flash_attention_impl", None)
    return None if find is None else find()


def refusal(name: str) -> str | None:
    """Why a version cannot run on this machine, and what to do. None = it can.

    The version is not loaded, so it may turn out later that it cannot run.
    """
    if name == SHIPPED:
        return None
    version = VERSIONS[name]
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return "PyTorch finds no NVIDIA GPU"
    known = getattr(switch, "list_flash_attention_impls", list)()
    if version.implementation not in known:
        return (
            f"PyTorch {torch.__version__} has no switch for FlashAttention {version.number} (update PyTorch)"
        )
    for device in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(device)
        if major not in version.majors:
            needed = " or ".join(f"{one}.0" for one in version.majors)
            return (
                f"GPU {device}, {torch.cuda.get_device_name(device)}, has compute capability "
                f"{major}.{minor}, and FlashAttention {version.number} needs {needed} "
                "(hide this GPU by CUDA_VISIBLE_DEVICES)"
            )
    return _wrong_release(version)


def _wrong_release(version: FlashVersion) -> str | None:
    """Why this PyTorch cannot call the release that is installed. None = it can."""
    found = installed(version.package)
    if version.number != 4 or found is None or TorchVersion(torch.__version__) >= _TAKES_TWO:
        return None
    if TorchVersion(found) < _MORE_RESULTS:
        return None
    return (
        f"PyTorch {torch.__version__} cannot call flash-attn-4 {found}, "
        "which gives more results than it takes "
        f"({version.how_to_get})"
    )


def installed(package: str) -> str | None:
    """The version of an installed package. None = it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def unsupported_by_version(name: str, head_dim: int, capability: tuple[int, int]) -> str | None:
    """Why a version cannot run a call that FlashAttention 2 can run. None = it can.

    Args:
        name: the version.
        head_dim: channels of a head.
        capability: compute capability of the GPU.
    """
    if name not in VERSIONS:
        return None
    version = VERSIONS[name]
    if capability[0] not in version.majors:
        needed = " or ".join(f"{one}.0" for one in version.majors)
        return f"FlashAttention {version.number} on this GPU (needs compute capability {needed})"
    # head dimension 256 has a kernel on compute capability 10, but its backward pass takes no windows
    if version.number == 4 and capability[0] == 10 and head_dim > 128:
        return f"head_dim {head_dim} with FlashAttention 4 on this GPU (at most 128; fa2 takes 256)"
    return None


def describe(name: str) -> str:
    """The version's name for a message, such as ``FlashAttention 3 (fa3)``."""
    if name in VERSIONS:
        return f"FlashAttention {VERSIONS[name].number} ({name})"
    if name == SHIPPED:
        return f"FlashAttention 2 ({name})"
    return name
