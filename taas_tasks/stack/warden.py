"""Ends a stack when the process that it belongs to has ended: ``python -m taas_tasks.stack.warden ROOT PID TICKS``.

It outlives that process by design: a test run that is killed leaves no server behind.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from taas_tasks.stack.processes import ProcessId
from taas_tasks.stack.stack import Stack

_EVERY_S = 0.5


def main(argv: list[str]) -> int:
    """Wait for the owner's end, then take the stack down."""
    root, owner = Path(argv[0]), ProcessId(int(argv[1]), int(argv[2]))
    while owner.is_alive():
        time.sleep(_EVERY_S)
    Stack(root).down(grace_s=1.0)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
