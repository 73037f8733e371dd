"""Check the installation: required and optional packages, compiler, GPUs, and where files are kept.

Each line begins with ok (found), bad (a required package is missing or has the wrong version) or - (an
optional package is missing; the line tells what needs it). The exit code is 1 when a line is bad."""

import importlib.metadata
import os
import platform
import shutil
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import pod
from pod import toolchain
from pod.command_line import Parser
from pod.commands import INSTALL
from pod.units import GIB

OPTIONAL = {
    "tiktoken": "a tokenizer.model in tiktoken's format: pip install tiktoken",
    "triton": "GPU kernels; it comes with CUDA builds of torch",
    "flash-attn": "a faster peer in `pod bench`: pip install flash-attn --no-build-isolation",
    "flash-attn-3": "model.flash_attention=fa3 on Hopper GPUs: from PyTorch's package index, pip install "
    "flash-attn-3",
    "flash-attn-4": "model.flash_attention=fa4 on Hopper and Blackwell GPUs: pip install '.[gpu]'",
    "lm-eval": "benchmarks in `pod eval`: pip install '.[eval]' in a clone of the repository",
    "wandb": "train.tracker=wandb: pip install wandb",
    "tensorboard": "train.tracker=tensorboard: pip install tensorboard",
}
"""Optional packages: name → what needs the package, and how to install it."""
TOOLS = {
    "c++": "DeepSpeed compiles its CPU optimizer with it: install a C++ compiler such as g++",
    "nvcc": "needed on GPU machines only for train.offload_optimizer=cpu: install the CUDA toolkit",
    "bwrap": "sandbox for the code that models write in HumanEval: install bubblewrap",
}
"""Optional programs: name → what needs the program, and what to install."""


def start() -> None:
    """Run the command line."""
    Parser(description=__doc__).parse_args()
    wrong = [*packages(), *parts()]
    options()
    places()
    print("\n" + "\n".join(wrong or ["all required packages are installed"]))
    sys.exit(1 if wrong else 0)


def say(mark: str, name: str, text: str) -> None:
    """Print a line such as `ok   torch          2.13.0`."""
    print(f"{mark:4} {name:15} {text}")


def packages() -> list[str]:
    """Print the packages that pod-kv requires. Returns a line for each that is missing or does not fit."""
    say("", "pod-kv", f"{pod.__version__}, Python {platform.python_version()}, {platform.platform()}")
    needs = requirements()
    wrong = [] if needs else [f"pod-kv is not installed in this Python: {INSTALL}"]
    for needed in needs:
        found = installed(needed.name)
        fits = found is not None and needed.specifier.contains(found, prereleases=True)
        say("ok" if fits else "bad", needed.name, found or "missing")
        if not fits:
            wrong.append(f"{needed.name}: pip install '{needed.name}{needed.specifier}'")
    return wrong


def requirements() -> list[Requirement]:
    """The packages that pod-kv needs without extras. Empty where pod-kv is not installed.

    They are read from the metadata of the installation, and in a clone also from pyproject.toml: the metadata
    of a clone that was installed with `pip install -e` do not change when the clone is updated.
    """
    try:
        lines = importlib.metadata.requires("pod-kv") or []
    except importlib.metadata.PackageNotFoundError:
        say("note", "pod-kv", "is not installed: required versions are unknown")
        return []
    needed = map(Requirement, [*lines, *dependencies_of_clone()])
    newest = {canonicalize_name(one.name): one for one in needed if is_required(one)}
    return list(newest.values())


def is_required(requirement: Requirement) -> bool:
    """Whether a requirement is needed here without extras."""
    return requirement.marker is None or requirement.marker.evaluate({"extra": ""})


def dependencies_of_clone() -> list[str]:
    """The dependencies in the pyproject.toml beside the package. Empty where pod-kv is not a clone."""
    file = Path(pod.__file__).parents[1] / "pyproject.toml"
    if not file.is_file():
        return []
    project = tomllib.loads(file.read_text(encoding="utf-8")).get("project", {})
    return project.get("dependencies", []) if project.get("name") == "pod-kv" else []


def installed(name: str) -> str | None:
    """The version of a package; None where it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def parts() -> list[str]:
    """Print the devices and the attention backends. Returns a line for each part that cannot work."""
    if not (installed("torch") and installed("deepspeed")):
        return []
    import torch

    for number in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(number)
        say("ok", f"GPU {number}", f"{found.name}, {found.total_memory / GIB:.0f} GiB")
    if not torch.cuda.is_available():
        say("note", "GPU", f"torch {torch.__version__} finds none; the CPU has {os.cpu_count()} cores")
    say("ok", "attention", attention_backends())
    from pod.training.deepspeed_bridge import check_parts

    wrong = []
    for check in (check_parts, flash_attention):
        try:
            check()
        except ValueError as error:
            wrong.append(str(error))
    return wrong


def attention_backends() -> str:
    """The names that `model.attention_backend` may have, as one line of text."""
    from pod.modeling.model.attend import AUTO_ORDER, IMPLEMENTATIONS

    by_name = sorted({*IMPLEMENTATIONS} - {*AUTO_ORDER})
    return f"auto takes the first of {', '.join(AUTO_ORDER)} that can; by name only: {', '.join(by_name)}"


def flash_attention() -> None:
    """Print which FlashAttention commands will run on GPUs, and which are installed.

    Raises:
        ValueError: POD_FLASH_ATTENTION names one that cannot run here.
    """
    from pod.modeling.model import flash_version

    there = [flash_version.SHIPPED]
    there += [name for name, version in flash_version.VERSIONS.items() if installed(version.package)]
    named = os.environ.get(flash_version.VARIABLE)
    try:
        flash_version.use()
    except ValueError:
        say(
            "bad",
            "FlashAttention",
            f"{flash_version.VARIABLE}={named} cannot run here; installed: {', '.join(there)}",
        )
        raise
    why = (
        f"by {flash_version.VARIABLE}"
        if named
        else f"unless a recipe or {flash_version.VARIABLE} names another"
    )
    active = flash_version.describe(flash_version.active_version())
    say("ok", "FlashAttention", f"{active} runs on GPUs, {why}; installed: {', '.join(there)}")


def options() -> None:
    """Print the optional packages and tools, and the header that Triton needs."""
    for known, look in (OPTIONAL, installed), (TOOLS, shutil.which):
        for name, use in known.items():
            found = look(name)
            say("ok" if found else "-", name, found or f"missing; {use}")
    header = toolchain.python_header()
    if header.is_file():
        say("ok", header.name, str(header))
    else:
        get = toolchain.how_to_get_python_header()
        say("-", header.name, f"missing; Triton's kernels on a GPU need it: {get}")


def places() -> None:
    """Print where recipes and converted models are, and the free disk space."""
    here = Path.cwd()
    try:
        from pod.models import cache_dir
        from pod.recipe import RECIPES, recipe_names
    except ModuleNotFoundError:  # already listed as missing
        return
    say("", "recipes", f"{len(recipe_names())} in {RECIPES}; `pod recipes` lists them")
    say("", "converted models", f"{cache_dir()} (set POD_CACHE to change it)")
    say("", "this folder", f"{here}: {shutil.disk_usage(here).free / GIB:.0f} GiB free")
