"""Files, clocks and processes of a host: what the supervisor and hostctl share.

Standard library only, Python >= 3.9: runs on hosts, beside the other files of ``transport.HOST_FILES``.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

KEPT_VARIABLES = ("PATH", "HOME", "LANG", "TMPDIR")


def now_s() -> float:
    """Return seconds since boot, also counting those asleep; nobody can set this clock."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def boot_id() -> str:
    """Return the name of this boot: deadlines and process ids of another one mean nothing."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def write_text(path: Path, text: str, *, sync: bool = True) -> None:
    """Write a 0600 file whole: a temporary beside it, then moved."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(text.encode("utf-8", "surrogateescape"))
            if sync:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink()
        raise


def write_json(path: Path, value: Any, *, sync: bool = True) -> None:
    """Write a JSON file whole (see ``write_text``)."""
    write_text(path, json.dumps(value), sync=sync)


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty when there is none."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def try_lock(path: Path, *, wait_s: float, shared: bool = False) -> int | None:
    """Return a descriptor that holds the flock of a file, or None when another holds it for ``wait_s``.

    A prober holds it for an instant only (shared), which is why a supervisor has to try more than once.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    give_up = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            return fd
        except BlockingIOError:
            if time.monotonic() >= give_up:
                os.close(fd)
                return None
            time.sleep(0.01)


def unlock(fd: int) -> None:
    """Release a lock, also where a fork has copied the descriptor."""
    fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def rewrite(folder: Path, files: Mapping[str, str]) -> None:
    """Replace input files of a job that it has not yet scrubbed; names that it was not started with are passed over."""
    known = read_json(folder / "spec.json").get("files", {})
    for name in known:
        if name in files and (folder / name).exists():
            write_text(folder / name, files[name])


def scrub(folder: Path, files: Iterable[str]) -> None:
    """Wipe what may hold secrets: the specification and the input files."""
    for name in ("spec.json", *files):
        try:
            (folder / name).unlink()
        except OSError:
            continue


# ---- processes ----


class Process(NamedTuple):
    """A process as ``/proc/PID/stat`` shows it; pid and start together name it exactly (within one boot)."""

    pid: int
    ppid: int
    group: int
    start: int
    lives: bool

    @property
    def name(self) -> tuple[int, int]:
        """What no other process has."""
        return (self.pid, self.start)


def read_process(pid: int) -> Process | None:
    """Return a process, or None when it is gone."""
    try:
        raw = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    fields = raw[raw.rindex(b")") + 2 :].split()
    # A zombie with threads is alive: its first thread has left, the others run on.
    lives = fields[0] not in (b"Z", b"X") or int(fields[17]) > 1
    return Process(pid, ppid=int(fields[1]), group=int(fields[2]), start=int(fields[19]), lives=lives)


def all_processes() -> dict[int, Process]:
    """Return all processes that live (zombies do not)."""
    found = (read_process(int(name)) for name in os.listdir("/proc") if name.isdigit())  # noqa: PTH208 - hot
    return {process.pid: process for process in found if process and process.lives}


def descendants(table: dict[int, Process], roots: Iterable[int]) -> set[int]:
    """Return the pids below ``roots``, which are left out."""
    children: dict[int, list[int]] = {}
    for process in table.values():
        children.setdefault(process.ppid, []).append(process.pid)
    found: set[int] = set()
    todo = list(roots)
    while todo:
        new = [pid for pid in children.get(todo.pop(), []) if pid not in found]
        found.update(new)
        todo += new
    return found


def is_marked(pid: int, job_id: str, folder: Path) -> bool:
    """Whether a process carries the job's id (and not another folder: several emulated hosts may share a machine)."""
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    entries = raw.split(b"\0")
    places = [entry for entry in entries if entry.startswith(b"TAAS_JOB_DIR=")]
    return f"TAAS_JOB_ID={job_id}".encode() in entries and places in ([], [b"TAAS_JOB_DIR=" + os.fsencode(folder)])


def job_processes(job_id: str, folder: Path, *, supervisor: int | None = None) -> list[Process]:
    """Return the processes of a job: below its supervisor, marked, remembered, and all their descendants."""
    table = all_processes()
    roots = {pid for pid in table if is_marked(pid, job_id, folder)}
    seen = read_json(folder / "seen.json")
    if seen.get("boot") == boot_id():
        roots |= {pid for pid, start in seen["processes"] if pid in table and table[pid].start == start}
    if supervisor is not None:
        roots |= descendants(table, [supervisor])
    mine = roots | descendants(table, roots)
    return [table[pid] for pid in sorted(mine - {os.getpid(), supervisor})]


def send_signal(process: Process, number: int) -> bool:
    """Signal exactly this process; False when that is not permitted. One that is gone is fine."""
    try:
        fd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return True
    except (OSError, AttributeError):
        fd = -1  # a kernel before 5.3: a pid reused within microseconds is the risk that is left
    try:
        current = read_process(process.pid)
        if current is None or current.start != process.start:
            return True
        if fd >= 0:
            signal.pidfd_send_signal(fd, number)
        else:
            os.kill(process.pid, number)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    finally:
        if fd >= 0:
            os.close(fd)
    return True


def end_processes(
    find: Callable[[], list[Process]],
    *,
    grace_s: float,
    limit_s: float = float("inf"),
    num_looks: int = 2,
    pause: Callable[[float], None] = time.sleep,
) -> list[Process]:
    """TERM, after ``grace_s`` KILL, again and again until ``num_looks`` looks in a row find none.

    Returns:
        The processes that are left: those that may not be signalled (another user's), and after ``limit_s`` all.
    """
    began = time.monotonic()
    told: set[tuple[int, int]] = set()
    forbidden: dict[tuple[int, int], Process] = {}
    num_clean, wait_s = 0, 0.01
    while num_clean < num_looks:
        found = find()
        left = [process for process in found if process.name not in forbidden]
        num_clean = 0 if left else num_clean + 1
        waited = time.monotonic() - began
        if left and waited >= limit_s:
            return found
        for process in left:
            number = signal.SIGKILL if waited >= grace_s else signal.SIGTERM
            if number == signal.SIGTERM and process.name in told:
                continue
            told.add(process.name)
            if not send_signal(process, number):
                forbidden[process.name] = process
        wait_s = min(wait_s * 1.5, 0.2)
        pause(min(wait_s, max(grace_s - waited, 0.01)))
    return list(forbidden.values())


# ---- out of memory ----


def _counter(path: Path) -> int | None:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    values = [line.split()[1] for line in lines if line.startswith("oom_kill ")]
    return int(values[0]) if values else None


def oom_kills(root: Path = Path("/")) -> dict[str, int]:
    """Return the kernel's counters of processes killed for memory: of our cgroup, and of the machine."""
    base = root / "sys/fs/cgroup"
    places = [("machine", root / "proc/vmstat")]
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if not controllers:
            places += [("cgroup", base / name.lstrip("/") / "memory.events")]
        elif "memory" in controllers.split(","):
            places += [("cgroup", base / "memory" / name.lstrip("/") / "memory.oom_control")]
    counts = [(scope, _counter(path)) for scope, path in places]
    return {scope: count for scope, count in counts if count is not None}
