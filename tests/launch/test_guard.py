"""The write guard, in each of its ways, in processes of their own: it cannot be taken off again."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from taas_tasks.launch.guard import MODES, GuardMode, choose_guard, siblings_along

PROBE = """
import ctypes, mmap, os, subprocess, sys, tempfile
from pathlib import Path
mode, project, outside = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
from taas_tasks.launch.guard import apply_guard
apply_guard(mode, project)
os.chdir(project)
libc = ctypes.CDLL(None, use_errno=True)

def refused(call):
    try:
        return call() in (-1, False)
    except OSError:
        return True

attempts = {
    "open": lambda: open("new", "w"),
    "append": lambda: open("there", "a"),
    "c open": lambda: libc.open(b"c-new", os.O_WRONLY | os.O_CREAT, 0o644),
    "c creat absolute": lambda: libc.creat(os.fsencode(project / "c-new2"), 0o644),
    "shell": lambda: subprocess.run(["sh", "-c", "echo > by-shell"], stderr=subprocess.DEVNULL).returncode == 0,
    "mmap": lambda: mmap.mmap(os.open("there", os.O_RDWR), 1),
    "rename": lambda: os.rename("there", "elsewhere"),
    "rename out": lambda: os.rename("there", outside / "taken"),
    "rename in": lambda: os.rename(outside / "mine", project / "given"),
    "unlink": lambda: os.unlink("there"),
    "truncate": lambda: os.truncate("there", 0),
    "mkdir": lambda: os.mkdir("folder"),
    "rmdir": lambda: os.rmdir("empty"),
    "symlink": lambda: os.symlink("a", "b"),
    "link": lambda: os.link("there", "twice"),
    "below": lambda: open("empty/new", "w"),
    "fork": lambda: os.waitpid(os.spawnlp(os.P_NOWAIT, "touch", "touch", "-c", "by-child"), 0)[1] == 0
        and os.path.exists("by-child"),
}
if mode != "landlock":
    attempts["chmod"] = lambda: os.chmod("there", 0o600)
    attempts["utime"] = lambda: os.utime("there", (1, 1))
for name, call in attempts.items():
    if not refused(call):
        print("WRITTEN BY", name)
(outside / "ok").write_text("x")
with tempfile.TemporaryFile() as temporary:
    temporary.write(b"x")
with open("/dev/shm/taas-guard-test-%d" % os.getpid(), "w") as shared:
    os.unlink(shared.name)
print("read", open("there").read(), "uid", os.getuid())
"""


def works(mode: GuardMode, folder: Path) -> bool:
    return choose_guard(folder, modes=(mode,)) == mode


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "g0001" / "project"
    (folder / "empty").mkdir(parents=True)
    (folder / "there").write_text("data")
    outside = tmp_path / "g0001" / "scratch"
    outside.mkdir()
    (outside / "mine").write_text("mine")
    return folder


def probe(mode: str, project: Path, *, prefix: tuple[str, ...] = ()) -> str:
    # The temporary folder may lie on the path to the project, where Landlock lets nothing be created.
    outside = project.parent / "scratch"
    env = {**os.environ, "TMPDIR": str(outside)}
    command = [*prefix, sys.executable, "-c", PROBE, mode, str(project), str(outside)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("mode", MODES)
def test_nothing_can_write_the_project_and_everything_else_stays_writable(mode: GuardMode, project: Path) -> None:
    if not works(mode, project):
        pytest.skip(f"{mode} does not work on this host")
    assert probe(mode, project) == f"read data uid {os.getuid()}\n"
    assert sorted(path.name for path in project.rglob("*")) == ["empty", "there"]
    (project / "there").write_text("the parent still writes")


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become someone else")
@pytest.mark.parametrize("mode", ["userns", "landlock"])
def test_guard_works_for_an_ordinary_user(mode: str, project: Path, tmp_path: Path) -> None:
    # The folder must be reachable for the user: pytest's own is not.
    reachable = Path("/var/tmp") / f"taas-guard-{os.getpid()}"
    shutil.copytree(project.parent, reachable / "g0001")
    try:
        for path in [reachable, *reachable.rglob("*")]:
            os.chown(path, 65534, 65534)
        become = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=-all")
        tried = [*become, sys.executable, "-m", "taas_tasks.launch.guard", str(reachable / "g0001" / "project"), mode]
        if subprocess.run(tried, capture_output=True, text=True).stdout.strip() != mode:
            pytest.skip(f"{mode} does not work for an ordinary user on this host")
        assert probe(mode, reachable / "g0001" / "project", prefix=become) == "read data uid 65534\n"
    finally:
        shutil.rmtree(reachable)


def test_choice_is_the_first_way_that_works(project: Path) -> None:
    chosen = choose_guard(project)
    assert chosen == next((mode for mode in MODES if works(mode, project)), None)
    assert choose_guard(project, modes=()) is None


def test_siblings_leave_out_the_path_itself(project: Path) -> None:
    found = siblings_along(project)
    assert project.parent / "scratch" in found
    assert not set(found) & {project, *project.parents}
