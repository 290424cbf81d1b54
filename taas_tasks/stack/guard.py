"""Runs a command in its own place that dies with its parent: ``python -I -m taas_tasks.stack.guard COMMAND...``.

The process asks the kernel for SIGKILL at its parent's death (``PR_SET_PDEATHSIG``), then becomes the command, so the
pid is the command's. Does not: guard what the command itself starts; ``Stack(supervise=True)`` has a warden for that.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask for SIGKILL at the parent's death; ends at once when it died before."""
    parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    die_with_parent()
    os.execv(sys.argv[1], sys.argv[1:])
