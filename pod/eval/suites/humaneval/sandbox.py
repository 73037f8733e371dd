"""Run a process in a sandbox (bubblewrap).

The process sees a Python that it cannot change, an empty folder in memory, and of all processes only itself.
It has none of the user's files, no network, and cannot start processes.
"""

import functools
import platform
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_DISK_BYTES = 64 << 20
_CLONE3, _CLONE_THREAD, _X32 = 435, 0x10000, 0x40000000
# audit number of the machine; system calls that make processes only; the one that also makes threads
_MACHINES = {
    "x86_64": (0xC000003E, (57, 58), 56),
    "aarch64": (0xC00000B7, (), 220),
}
# results of the filter: allow a call, refuse it with EPERM, or with ENOSYS (the C library then uses clone)
_ALLOW, _DENY = 0x7FFF0000, 0x00050001
_ABSENT = 0x00050026


def _no_processes() -> bytes:
    """A seccomp filter (linux/filter.h) that allows new threads and refuses new processes.

    The limit RLIMIT_NPROC would not do, because it does not hold for root.
    """
    machine, forks, clone = _MACHINES[platform.machine()]
    load, equal, at_least, any_bit, leave = 0x20, 0x15, 0x35, 0x45, 0x06
    # instruction, operand, where to jump if it holds, where if not; None = go on with the next step
    steps: list[tuple[int, int, Any, Any]] = [
        (load, 4, None, None),
        (equal, machine, None, _DENY),
        (load, 0, None, None),
        (at_least, _X32, _DENY, None),
        (equal, _CLONE3, _ABSENT, None),
        *((equal, number, _DENY, None) for number in forks),
        (equal, clone, None, _ALLOW),
        (load, 16, None, None),
        (any_bit, _CLONE_THREAD, _ALLOW, _DENY),
    ]
    ends = [_ALLOW, _DENY, _ABSENT]

    def jump(step: int, end: int | None) -> int:
        return 0 if end is None else len(steps) + ends.index(end) - step - 1

    written = [(code, jump(i, yes), jump(i, no), operand) for i, (code, operand, yes, no) in enumerate(steps)]
    return b"".join(struct.pack("=HBBI", *step) for step in [*written, *((leave, 0, 0, end) for end in ends)])


def start(command: Sequence[str], seen: Path, **options: Any) -> subprocess.Popen[Any]:
    """Start a command under bubblewrap.

    Args:
        seen: a file that the command may read.
        options: of `Popen`.
    """
    apart = "--unshare-all --unshare-user --disable-userns --cap-drop ALL --die-with-parent --new-session"
    # the empty /tmp comes before the other mounts, because they may lie in the real /tmp
    places = f"--proc /proc --dev /dev --size {_DISK_BYTES} --tmpfs /tmp --chdir /tmp"
    system = ["/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", sys.base_prefix, sys.prefix, str(seen)]
    binds = [word for path in system for word in ("--ro-bind-try", path, path)]
    # without these, root could write to /proc/sys even without capabilities
    fixed = "--remount-ro /proc --remount-ro /dev --remount-ro /"
    with tempfile.TemporaryFile() as rules:
        rules.write(_no_processes())
        rules.seek(0)
        number = rules.fileno()
        settings = (*apart.split(), *places.split(), *binds, *fixed.split(), "--seccomp", str(number))
        return subprocess.Popen(["bwrap", *settings, "--", *command], pass_fds=[number], **options)


@functools.cache
def available() -> bool:
    """Whether bwrap (0.8 or newer) is installed and works on this system."""
    if shutil.which("bwrap") is None or platform.machine() not in _MACHINES:
        return False
    nothing = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    return start([sys.executable, "-I", "-c", ""], Path(__file__), **nothing).wait() == 0
