from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

from taas_tasks.launch.notice import WriteNotice

SCRIPT = """
import os, sys
from pathlib import Path
from taas_tasks.launch.notice import WriteNotice
WriteNotice(3, Path(sys.argv[1])).install()
os.chdir(sys.argv[1])
for call in (lambda: open("ckpt.pt", "wb").close(), lambda: open("ckpt.pt", "wb").close(),
             lambda: os.rename("ckpt.pt", "b.pt"), lambda: open("b.pt").close(), lambda: os.remove("b.pt"),
             lambda: Path("sub").mkdir(), lambda: open(sys.argv[2], "w").close()):
    call()
"""


def test_each_path_is_named_once_with_the_remedy(tmp_path: Path) -> None:
    project, outside = tmp_path / "project", tmp_path / "outside"
    project.mkdir()
    command = [sys.executable, "-c", SCRIPT, str(project), str(outside)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stderr.splitlines()
    assert [line.split("'")[1] for line in lines] == ["ckpt.pt", "b.pt", "sub"]
    assert lines[0] == (
        "[taas] rank 3 may not write 'ckpt.pt': only rank 0 writes the project folder. Guard the save with"
        ' `if rank == 0:`, or ask for other_ranks: "scratch" to give every other rank a private copy.'
    )


def test_refusal_inside_the_project_is_explained_and_others_are_not(tmp_path: Path) -> None:
    notice = WriteNotice(1, tmp_path)
    inside = OSError(errno.EROFS, os.strerror(errno.EROFS), str(tmp_path / "a.pt"))
    elsewhere = OSError(errno.EACCES, os.strerror(errno.EACCES), "/etc/shadow")
    assert "rank 1 may not write 'a.pt'" in str(notice.explain(inside))
    assert notice.explain(elsewhere) is None
    assert notice.explain(ValueError("x")) is None
    assert "only rank 0" in str(notice.explain(RuntimeError("File x.pt cannot be opened.")))
