from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from taas_tasks.delivery.progress import Progress, read_progress

COUNTS = """
import os, pathlib, sys
from taas_tasks.delivery import progress
progress.note()  # outside a rank: nowhere
progress.begin(pathlib.Path(sys.argv[1]))
progress.note()
progress.note_optimizer_step()
with progress.waiting_for_data():
    os.kill(os.getpid(), 9)
"""


def test_what_was_counted_is_there_after_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "progress"
    assert read_progress(path) is None
    subprocess.run([sys.executable, "-c", COUNTS, str(path)], check=False)
    assert read_progress(path) == Progress(count=2, optimizer_steps=1, waits_for_data=True)
    assert list(tmp_path.iterdir()) == [path]
