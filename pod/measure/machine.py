"""Where and when a measurement was made: the machine, the versions of packages and the commit."""

import datetime
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

_PACKAGES = ("pod-kv", "torch", "transformers", "numpy", "lm-eval")
_ROOT = Path(__file__).resolve().parents[2]


def environment() -> dict[str, Any]:
    """The environment of a measurement, for JSON.

    It has the date (UTC), the versions of Python and packages, the commit of this package's checkout, the
    hardware, torch's number of threads, and on a GPU the version of FlashAttention.
    """
    import torch

    from pod.modeling.model.flash_version import active_version

    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in _PACKAGES},
        "commit": _commit(),
        "hardware": {
            "cpu": _cpu_name(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "threads": torch.get_num_threads(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "flash_attention": active_version() if torch.cuda.is_available() else None,
        },
    }


def version(package: str) -> str | None:
    """The version of an installed package; None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of the checkout that this package runs from; None outside a checkout.

    It ends in `+` when files differ from the commit.
    """
    describe = ("describe", "--always", "--abbrev=40", "--dirty=+", "--exclude=*")
    asked = ["git", "-C", str(_ROOT), *describe]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if (_ROOT / ".git").exists() else None


def _cpu_name() -> str:
    """The name of the CPU, from /proc/cpuinfo where there is one."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
