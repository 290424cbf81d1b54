"""Scripts and captured cells as ``__main__``, in processes of their own: they take over ``sys.modules``."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from taas.errors import LaunchError
from taas_tasks.launch.script import CELL_NAME, open_cell


def run(code: str, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=60)


RUN_SCRIPT = """
import sys
from pathlib import Path
from taas_tasks.launch.script import run_script
run_script(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
"""


def test_script_sees_what_python_would_give_it(tmp_path: Path) -> None:
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "beside.py").write_text("value = 5\n")
    (folder / "train.py").write_text(
        "import sys, pickle, beside\n"
        "class Thing: pass\n"
        "if __name__ == '__main__':\n"
        "    pickle.loads(pickle.dumps(Thing()))\n"
        "    print(sys.argv, beside.value, __file__, __spec__, sys.path[0])\n"
    )
    done = run(RUN_SCRIPT, str(tmp_path), "code/train.py", "--x", "$(y) 'z'")
    assert done.returncode == 0, done.stderr
    expected = f"{['code/train.py', '--x', '''$(y) 'z' '''[:-1]]} 5 {folder / 'train.py'} None {folder}\n"
    assert done.stdout == expected


def test_missing_script_is_one_sentence(tmp_path: Path) -> None:
    done = run(RUN_SCRIPT, str(tmp_path), "none.py")
    assert "the project has no file 'none.py'" in done.stderr


def cell_file(tmp_path: Path, source: str, namespace: dict[str, Any], loaders: list[str]) -> tuple[Path, str]:
    data = cloudpickle.dumps({"format": 1, "source": source, "namespace": namespace, "loaders": loaders})
    path = tmp_path / "cell"
    path.write_bytes(data)
    return path, hashlib.sha256(data).hexdigest()


RUN_CELL = """
import sys, traceback
from pathlib import Path
from taas_tasks.launch.script import open_cell, run_cell
cell = open_cell(Path(sys.argv[1]), sys.argv[2])
try:
    run_cell(Path(sys.argv[3]), cell, loader=lambda name: [name, "delivered"])
except ValueError:
    traceback.print_exc()
"""


def notebook_functions() -> dict[str, Any]:
    """Functions as a notebook's earlier cells define them: in ``__main__``, sharing its globals."""
    names: dict[str, Any] = {"__name__": "__main__", "data_loader": "the plain one", "scale": 3}
    exec(
        "def first(): return data_loader[1]\n"
        "def uses_later(): return defined_by_the_cell * scale\n"
        "class Net:\n    def __init__(self): self.loader = data_loader\n",
        names,
    )
    return {name: names[name] for name in ("first", "uses_later", "Net")}


def test_cell_and_the_notebooks_functions_see_the_delivered_loader_and_each_other(tmp_path: Path) -> None:
    source = (
        "import pickle\n"
        "defined_by_the_cell = 7\n"
        "class Mine: pass\n"
        "pickle.loads(pickle.dumps(Mine()))\n"
        "print(data_loader, first(), uses_later(), Net().loader, __name__)\n"
    )
    path, sha256 = cell_file(tmp_path, source, notebook_functions(), ["data_loader"])
    done = run(RUN_CELL, str(path), sha256, str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "['data_loader', 'delivered'] delivered 21 ['data_loader', 'delivered'] __main__\n"


def test_traceback_shows_the_cells_line(tmp_path: Path) -> None:
    path, sha256 = cell_file(tmp_path, "x = 1\nraise ValueError('of the cell')  # here\n", {}, [])
    done = run(RUN_CELL, str(path), sha256, str(tmp_path))
    assert f'File "{CELL_NAME}", line 2' in done.stderr
    assert "raise ValueError('of the cell')  # here" in done.stderr


def test_changed_payload_is_not_opened(tmp_path: Path) -> None:
    path, sha256 = cell_file(tmp_path, "", {}, [])
    path.write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    with pytest.raises(LaunchError, match="sha256"):
        open_cell(path, sha256)


def test_unknown_format_is_refused(tmp_path: Path) -> None:
    data = cloudpickle.dumps({"format": 2})
    (tmp_path / "cell").write_bytes(data)
    with pytest.raises(LaunchError, match="unknown format"):
        open_cell(tmp_path / "cell", hashlib.sha256(data).hexdigest())
