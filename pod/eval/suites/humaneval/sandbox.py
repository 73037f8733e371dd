"""Runs one Python program with limits: the child of `execution.run_program`. Standard library only; never imported, run by its path.

This stops accidents, not attackers: run what a model writes only on machines where it may do harm. The program gets its own process,
an empty working folder, limits on CPU time, memory and file sizes, and, where Linux allows it, a network name space without a network.
An audit hook (PEP 578, which cannot be taken off again) forbids to start or kill processes, to open sockets, and to write, rename or
delete outside of the folder.
"""

import contextlib
import ctypes
import json
import os
import resource
import signal
import sys

_NEW_USER, _NEW_NET = 0x10000000, 0x40000000  # sched.h: CLONE_NEWUSER, CLONE_NEWNET
_FILE_BYTES = 16 << 20
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_FORBIDDEN = (
    *("os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.kill", "os.killpg"),
    *("subprocess.", "socket.", "ctypes.", "pty.", "signal.pthread_kill", "os.chroot"),
)
_DIR_FDS = {  # events on paths: how many folder descriptors end their arguments
    **{"os.remove": 1, "os.rmdir": 1, "os.mkdir": 1, "os.rename": 2, "os.link": 2, "os.symlink": 1},
    **{"os.chmod": 1, "os.chown": 1, "os.truncate": 0},
}


def cut_network() -> bool:
    """Leave this process without a network; False where the system does not allow it (sockets are forbidden to Python even so)."""
    libc = ctypes.CDLL(None, use_errno=True)
    return libc.unshare(_NEW_NET) == 0 or libc.unshare(_NEW_USER | _NEW_NET) == 0


def set_limits(cpu_seconds: float, memory_bytes: int) -> None:
    """CPU time of this process (exceeding it ends the process, whatever the program catches), address space, sizes of files."""
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (_FILE_BYTES, _FILE_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    seconds = int(cpu_seconds) + 2  # counted from the start of the process; the timer below is exact
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)


def forbid(folder: str) -> None:
    """From now on PermissionError for what a solution has no business to do."""
    inside = os.path.realpath(folder)

    def within(path: object, folder: int = -1) -> bool:
        if isinstance(path, int) or path is None:
            return True
        name = os.fsdecode(path)  # type: ignore[arg-type]
        real = os.path.realpath(name if folder < 0 else f"/proc/self/fd/{folder}/{name}")
        return real == os.devnull or os.path.commonpath([real, inside]) == inside

    def check_open(path: object, flags: object) -> None:
        if within(path):
            return
        if isinstance(flags, int) and flags & _WRITING:
            raise PermissionError("writing outside of the working folder is forbidden to evaluated code")
        if os.path.isdir(path):  # type: ignore[arg-type]
            raise PermissionError(
                "holding a folder open, relative to which files can be written, is forbidden"
            )

    def check_change(event: str, args: tuple) -> None:
        number = _DIR_FDS[event]
        folders = args[len(args) - number :] or (-1,)
        paths = [path for path in args[: len(args) - number] if isinstance(path, (str, bytes))]
        if not all(within(path, folder) for path in paths for folder in folders):
            raise PermissionError(f"{event} outside of the working folder is forbidden to evaluated code")

    def hook(event: str, args: tuple) -> None:
        if event.startswith(_FORBIDDEN):
            raise PermissionError(f"{event} is forbidden to evaluated code")
        if event == "open":
            check_open(args[0], args[2])
        elif event in _DIR_FDS:
            check_change(event, args)

    sys.addaudithook(hook)


def main() -> None:
    """Reads {program, token, cpu_seconds, memory_bytes} as JSON; writes {token, error} as JSON when the program has ended by itself.

    The token, which the program does not know, tells the parent that the end was reached: a program that exits early does not pass.
    """
    asked = json.load(sys.stdin)
    report = os.fdopen(os.dup(1), "w")
    quiet = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(quiet, number)
    network_cut = cut_network()
    set_limits(asked["cpu_seconds"], asked["memory_bytes"])
    forbid(os.getcwd())
    error = None
    try:
        exec(compile(asked["program"], "<solution>", "exec"), {})
    except BaseException as raised:  # noqa: BLE001 - whatever a solution raises, SystemExit included, is its failure
        error = f"{type(raised).__name__}: {raised}"[:200]
    signal.setitimer(signal.ITIMER_PROF, 0)
    with contextlib.suppress(OSError):
        json.dump({"token": asked["token"], "error": error, "network_cut": network_cut}, report)
        report.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
