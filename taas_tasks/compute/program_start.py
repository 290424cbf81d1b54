"""Starts a program on a host in the Python environment that its request wants: ``python -I program_start.py JOB``.

``JOB/start.json`` says what (``start_file``). A request's requirements become an environment below the host's folder,
made once by pip and kept under a hash of what it was made of; it sees the packages of the host's python too. This
process then becomes the program, so that nothing is between it and its supervisor. What stands in its way is left in
``JOB/outcome.json``.

Standard library only: it runs before anything else is known to be there.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

START_FILE = "start.json"
NEEDED = ("torch", "numpy", "pyarrow", "isal", "boto3", "pydantic", "cloudpickle", "packaging")
"""What the programs import; a host that is reached over SSH has it, and nothing of ours."""

_LEAST_PYTHON = (3, 11)
_PIP_LINES = 12
_SITES = (
    "import json, site;"
    "print(json.dumps([*site.getsitepackages(), site.ENABLE_USER_SITE and site.getusersitepackages()]))"
)
_MISSING = "import sys; from importlib.util import find_spec; print(*[n for n in sys.argv[1:] if find_spec(n) is None])"


def start_file(module: str, *, envs: Path, requirements: Sequence[str], engine: Path | None) -> str:
    """Return the text of ``START_FILE``.

    Args:
        module: Run as ``python -m MODULE JOB/input.json``.
        envs: Where environments are kept.
        requirements: Of the request; empty: the host's own python is used.
        engine: Where our code lies on a host that has not installed it; it is found behind all else.
    """
    value = {
        "module": module,
        "envs": str(envs),
        "requirements": list(requirements),
        "engine": None if engine is None else str(engine),
    }
    return json.dumps(value)


class _CannotStart(Exception):
    """Told to the user as it is, as an error of the given type of ``taas.errors``."""

    def __init__(self, message: str, *, type: str = "HostRefused") -> None:
        super().__init__(message)
        self.type = type


def env_name(requirements: Sequence[str], *, python: str) -> str:
    """Return the name of the environment: equal for what would be made equal."""
    made_of = [sorted(requirements), sys.version, python]
    return hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:24]


def environment(envs: Path, requirements: Sequence[str], *, python: str) -> Path:
    """Return the python of the environment that has the requirements; it is made by whoever comes first."""
    folder = envs / env_name(requirements, python=python)
    marker = folder / "complete"
    if not marker.exists():
        envs.mkdir(mode=0o700, parents=True, exist_ok=True)
        with folder.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not marker.exists():
                _make(folder, requirements, python=python)
                marker.touch()
    return folder / "bin" / "python"


def _make(folder: Path, requirements: Sequence[str], *, python: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)  # of one who was killed
    print(f"making an environment for {', '.join(sorted(requirements))}", flush=True)  # noqa: T201 - the job's log
    try:
        import venv  # some distributions have it in a package of its own

        venv.create(folder, symlinks=True)
        _see_packages_of(python, folder)
    except (ImportError, OSError, subprocess.SubprocessError) as error:
        raise _CannotStart(f"the host's python {python} can make no environment in {folder}: {error}") from error
    _install(folder / "bin" / "python", requirements)


def _see_packages_of(python: str, folder: Path) -> None:
    """Have the environment see the packages of the host's python, which ``--system-site-packages`` does for no venv."""
    told = subprocess.run([python, "-c", _SITES], env=_plain_environment(), capture_output=True, check=True, timeout=60)
    sites = [path for path in json.loads(told.stdout) if path]
    lines = "".join(f"import site; site.addsitedir({path!r})\n" for path in sites)
    own = folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    (own / "taas_host.pth").write_text(lines)


def _install(python: Path, requirements: Sequence[str]) -> None:
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "--", *requirements]
    tail: deque[str] = deque(maxlen=_PIP_LINES)
    pip = subprocess.Popen(
        command, env=_plain_environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert pip.stdout is not None
    for line in pip.stdout:
        text = line.decode(errors="replace").rstrip()
        print(text, flush=True)  # noqa: T201 - the job's log
        tail.append(text)
    if pip.wait() != 0:
        said = "\n".join(tail)
        raise _CannotStart(
            f"requirements: pip could not install {', '.join(sorted(requirements))} on the host; it said:\n{said}",
            type="RequirementsFailed",
        )


def _plain_environment() -> dict[str, str]:
    """Return our environment without what leads Python to other packages than those that are installed."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}


def _refuse_missing(python: str) -> None:
    told = subprocess.run([python, "-c", _MISSING, *NEEDED], capture_output=True, text=True, check=False, timeout=120)
    missing = told.stdout.split() if told.returncode == 0 else [told.stderr.strip()[-300:]]
    if missing:
        raise _CannotStart(
            f"the host's python {python} lacks {', '.join(missing)}; it needs: {', '.join(NEEDED)}. Install them there"
        )


def prepare(start: dict[str, Any], *, python: str) -> str:
    """Return the python to run the program with; the environment of this process is then the program's."""
    if sys.version_info < _LEAST_PYTHON:
        raise _CannotStart(f"the host's python {python} is {sys.version.split()[0]}; at least 3.11 is needed")
    if start["engine"] is not None:
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = f"{before}:{start['engine']}" if before else start["engine"]
        _refuse_missing(python)
    if start["requirements"]:
        return str(environment(Path(start["envs"]), start["requirements"], python=python))
    return python


def main(argv: Sequence[str]) -> None:
    """Become the program of the job whose folder is the argument."""
    job = Path(argv[1])
    start = json.loads((job / START_FILE).read_bytes())
    try:
        python = prepare(start, python=sys.executable)
    except _CannotStart as error:
        print(error, file=sys.stderr, flush=True)  # noqa: T201 - the job's log
        told = {"type": error.type, "message": str(error), "fields": {"requirements": start["requirements"]}}
        _leave(job, {"ok": False, "error": told})
        sys.exit(1)
    os.execv(python, [python, "-m", start["module"], str(job / "input.json")])


def _leave(job: Path, outcome: dict[str, Any]) -> None:
    temporary = job / ".outcome.json"
    temporary.write_text(json.dumps(outcome))
    temporary.replace(job / "outcome.json")


if __name__ == "__main__":
    main(sys.argv)
