"""The verbs of a host: ``python3 -I -S hostctl.py VERB`` with JSON on standard input and one line of JSON on output.

Standard library only, Python >= 3.9: runs on hosts, beside the other files of ``transport.HOST_FILES``. The local
transport calls ``call`` in process. Input: ``{"root", "python", "payload"}``. Output: ``{"ok": answer}`` or
``{"error": {"kind": "refused" | "failed", "message"}}``. Every verb may be repeated.

Whoever changes what a job's folder says holds ``JOB/control`` (flock) meanwhile; whether its supervisor lives is said
by ``JOB/lock``. ``docs/architecture.md`` lists the verbs.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or __package__:
    from taas_tasks.compute import payload as asked
    from taas_tasks.compute import processes as ps
    from taas_tasks.compute import slots as tables
else:  # on a host: the files lie side by side
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    import payload as asked
    import processes as ps
    import slots as tables

OUTCOME_LIMIT_BYTES = 256 * 1024
LOG_LIMIT_BYTES = 1024 * 1024
LIVE = ("starting", "running")
_SUPERVISOR = str(Path(__file__).with_name("supervisor.py"))
_LOST_THE_LOCK = 3


def call(root: Path, verb: str, payload: dict[str, Any], *, python: str = sys.executable) -> dict[str, Any]:
    """Run one verb on the host whose folder is ``root``.

    Raises:
        Refused: See there.
        OSError: The host's folder cannot be used, or is busy: repeat the call.
    """
    if verb not in _VERBS:
        raise asked.Refused(f"unknown verb {verb!r}; known: {', '.join(_VERBS)}")
    return _VERBS[verb](_Host(Path(os.path.realpath(root)), python), payload)


Refused = asked.Refused


class _Host:
    """The folders of this host."""

    def __init__(self, root: Path, python: str) -> None:
        self.root = root
        self.python = python

    def job(self, job_id: Any) -> Path:
        """Return the folder of a job."""
        return self.root / "jobs" / asked.job_id(job_id)


# ---- what is known ----


def _supervisor_lives(folder: Path) -> bool:
    if not (folder / "lock").exists():
        return False
    fd = ps.try_lock(folder / "lock", wait_s=0, shared=True)
    if fd is not None:
        ps.unlock(fd)
    return fd is None


def _phase(folder: Path) -> tuple[str, dict[str, Any]]:
    """Return the phase and what the supervisor wrote last, agreeing with each other."""
    while True:
        written = ps.read_json(folder / "state.json")
        if (folder / "tombstone.json").exists():
            return "tombstone", written
        if written.get("phase") == "ended":
            return "ended", written
        lives = _supervisor_lives(folder)
        if written == ps.read_json(folder / "state.json"):  # else it went on between the two looks
            break
    if lives:
        return written.get("phase", "starting"), written
    return ("lost" if written else "absent"), written


def _read(path: Path, *, offset: int = 0, limit: int) -> tuple[bytes, int] | None:
    """Return bytes of a file and its size, or None when it is no regular file. The job wrote it: trust nothing.

    Raises:
        FileNotFoundError: There is none.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError:
        return None  # a link
    try:
        found = os.fstat(fd)
        return (os.pread(fd, limit, offset), found.st_size) if stat.S_ISREG(found.st_mode) else None
    finally:
        os.close(fd)


def _outcome(folder: Path) -> tuple[dict[str, Any] | None, str | None]:
    """Return the program's outcome, and what is wrong with it."""
    try:
        read = _read(folder / "outcome.json", limit=OUTCOME_LIMIT_BYTES + 1)
    except FileNotFoundError:
        return None, None
    if read is None:
        return None, "outcome.json is no file"
    raw, _ = read
    if len(raw) > OUTCOME_LIMIT_BYTES:
        return None, f"outcome.json is larger than {OUTCOME_LIMIT_BYTES} bytes"
    try:
        value = json.loads(raw)
    except ValueError as error:
        return None, f"outcome.json is no JSON: {error}"
    return (value, None) if isinstance(value, dict) else (None, "outcome.json is no JSON object")


def _state(folder: Path) -> dict[str, Any]:
    """Return what ``JobState`` holds."""
    phase, written = _phase(folder)
    lease, tombstone = ps.read_json(folder / "lease.json"), ps.read_json(folder / "tombstone.json")
    outcome, fault = _outcome(folder)
    deadline = lease.get("deadline") if phase in LIVE else None
    names = ("exit_code", "signal", "ended_by", "cancelled_by", "started_at", "ended_at", "pid")
    flags = {name: bool(written.get(name)) for name in ("oom_killed", "killed_by_kernel_suspected")}
    return {
        "job_id": folder.name,
        "phase": phase,
        **{name: written.get(name) for name in names},
        **flags,
        "owner": lease.get("owner"),
        "lease_left_s": None if deadline is None else max(0.0, deadline - ps.now_s()),
        "outcome": outcome,
        "log_bytes": _size(folder / "log"),
        "error": tombstone.get("reason") or written.get("error") or fault,
    }


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


# ---- the life of a job ----


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock that is only ever held for moments."""
    fd = ps.try_lock(path, wait_s=30)
    if fd is None:
        raise OSError(f"{path} is busy for 30 s; the call can be repeated")
    try:
        yield
    finally:
        ps.unlock(fd)


def _control(folder: Path, *, make: bool = True) -> contextlib.AbstractContextManager[None]:
    if make:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return _locked(folder / "control")


def _write_lease(folder: Path, *, owner: str, lease_s: float | None) -> None:
    deadline = None if lease_s is None else ps.now_s() + lease_s
    ps.write_json(folder / "lease.json", {"owner": owner, "deadline": deadline}, sync=False)
    _poke(folder)


def _poke(folder: Path) -> None:
    """Make the supervisor look at once; without one nobody reads the FIFO."""
    with contextlib.suppress(OSError):
        fd = os.open(folder / "wake", os.O_WRONLY | os.O_NONBLOCK)
        os.write(fd, b"1")
        os.close(fd)


def start(host: _Host, payload: dict[str, Any]) -> dict[str, Any]:
    """Launch the job unless it was launched before; one that lives is adopted by the new owner."""
    folder = host.job(payload.get("job_id"))
    spec = asked.check_spec(payload)
    with _control(folder):
        phase, _ = _phase(folder)
        if phase == "absent":
            _keep_slot(host, spec["slots_owner"])
            ps.write_json(folder / "spec.json", spec)
        if phase in ("absent", *LIVE):
            _write_lease(folder, owner=spec["owner"], lease_s=spec["lease_s"])
        if phase == "absent":
            _launch(host, folder)
        return _state(folder)


def _launch(host: _Host, folder: Path) -> None:
    """Start the supervisor and wait until the job is under way."""
    environment = {name: os.environ[name] for name in ps.KEPT_VARIABLES if name in os.environ}
    log = os.open(folder / "supervisor.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        process = subprocess.Popen(
            [host.python, "-I", "-S", "-X", "utf8", _SUPERVISOR, str(folder)],
            env=environment,
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
            start_new_session=True,
        )
        code = process.wait(timeout=50)
    except subprocess.TimeoutExpired as error:
        raise OSError(f"the supervisor of {folder.name} did not begin within {error.timeout} s") from error
    except OSError as error:
        raise asked.Refused(f"the supervisor cannot be started with {host.python!r}: {error}") from error
    finally:
        os.close(log)
    if code not in (0, _LOST_THE_LOCK):
        raise asked.Refused(
            f"the supervisor of {folder.name} ended with {code} before the job began{_last_words(folder)}"
        )


def _last_words(folder: Path) -> str:
    """Return what a supervisor wrote when it died, as the end of a sentence."""
    try:
        said = (folder / "supervisor.log").read_text(errors="replace").strip()[-500:]
    except OSError:
        said = ""
    return f"; it said: {said}" if said else ""


def state(host: _Host, payload: dict[str, Any]) -> dict[str, Any]:
    """Tell what is known of the job."""
    return _state(host.job(payload.get("job_id")))


def renew(host: _Host, payload: dict[str, Any]) -> dict[str, Any]:
    """Move the lease's end, rewrite files; by another than the owner only with ``adopt``, which makes him the owner."""
    folder = host.job(payload.get("job_id"))
    lease_s = asked.number(payload, "lease_s")
    if not folder.exists():
        return _state(folder)
    with _control(folder):
        current = _state(folder)
        owner = payload.get("owner") or current["owner"]
        if current["phase"] in LIVE and (owner == current["owner"] or payload.get("adopt")):
            _write_lease(folder, owner=owner, lease_s=lease_s)
            ps.rewrite(folder, payload.get("files") or {})
        return _state(folder)


def cancel(host: _Host, payload: dict[str, Any]) -> dict[str, Any]:
    """Ask for the end of a job that lives, if the named owner still owns it; no owner named: whoever owns it.

    With no owner named, a job that was never started never will be.
    """
    folder, owner = host.job(payload.get("job_id")), payload.get("owner")
    with _control(folder):
        current = _state(folder)
        if current["phase"] in LIVE and owner in (None, current["owner"]) and not (folder / "cancel.json").exists():
            ps.write_json(folder / "cancel.json", {"owner": owner})
            _poke(folder)
        elif current["phase"] == "absent" and owner is None:
            _bury(folder, reason="cancelled before it was started")
        return _state(folder)


def reap(host: _Host, payload: dict[str, Any]) -> dict[str, Any]:
    """Declare a job lost that has no supervisor: kill what is left of it, then write the tombstone.

    With ``force`` a supervisor that lives (and hangs) is killed first.
    """
    folder = host.job(payload.get("job_id"))
    with _control(folder):
        phase, written = _phase(folder)
        is_forced = phase in LIVE and bool(payload.get("force"))
        if is_forced:
            _kill_supervisor(written)
        if is_forced or phase in ("absent", "lost"):
            _bury(folder, reason=f"its supervisor died{_last_words(folder)}" if written else "it was never started")
        return _state(folder)


def tombstone(host: _Host, payload: dict[str, Any]) -> dict[str, Any]:
    """Make sure that a job which was never started never will be; any other is only reported."""
    folder = host.job(payload.get("job_id"))
    with _control(folder):
        if _phase(folder)[0] == "absent":
            _bury(folder, reason=str(payload.get("reason") or "it must not start any more"))
        return _state(folder)


def _kill_supervisor(written: dict[str, Any]) -> None:
    if written.get("boot") != ps.boot_id() or not written.get("supervisor"):
        return
    pid, started = written["supervisor"]
    found = ps.read_process(pid)
    if found is not None and found.start == started:
        ps.send_signal(found, signal.SIGKILL)


def _bury(folder: Path, *, reason: str) -> None:
    """Under the supervisor's own lock: kill what is left, then write the tombstone. Does nothing when it lives."""
    fd = ps.try_lock(folder / "lock", wait_s=2)
    if fd is None:
        return
    try:
        if ps.read_json(folder / "state.json").get("phase") == "ended":
            return
        left = ps.end_processes(lambda: ps.job_processes(folder.name, folder), grace_s=0, limit_s=15)
        if left:
            raise OSError(f"{len(left)} processes of {folder.name} do not die: {[found.pid for found in left]}")
        ps.write_json(folder / "tombstone.json", {"reason": reason, "at": time.time()})
        ps.scrub(folder, ps.read_json(folder / "spec.json").get("files", {}))
    finally:
        ps.unlock(fd)


def forget(host: _Host, payload: dict[str, Any]) -> dict[str, Any]:
    """Remove all files of a job that does not live; a tombstone stays, so that a late start launches nothing."""
    folder = host.job(payload.get("job_id"))
    if not folder.exists():
        return _state(folder)
    with _control(folder):
        phase, _ = _phase(folder)
        if phase in (*LIVE, "lost"):
            raise asked.Refused(f"job {folder.name} is {phase}; cancel or reap it before it is forgotten")
        if phase != "tombstone":
            ps.write_json(folder / "tombstone.json", {"reason": "it is over and was forgotten", "at": time.time()})
        for path in folder.iterdir():
            if path.name in ("tombstone.json", "lock", "control"):
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        return _state(folder)


def log(host: _Host, payload: dict[str, Any]) -> dict[str, Any]:
    """Read a log from a byte offset on, never cutting a character while more may come."""
    folder = host.job(payload.get("job_id"))
    offset = int(asked.number(payload, "offset", default=0))
    limit = min(max(int(asked.number(payload, "limit", default=65536)), 4), LOG_LIMIT_BYTES)
    path = _log_path(folder, payload.get("name") or "log")
    may_grow = _phase(folder)[0] not in ("ended", "tombstone")
    try:
        read = _read(path, offset=offset, limit=limit)
    except FileNotFoundError:
        return {"text": "", "next_offset": 0, "size": 0}
    if read is None:
        raise asked.Refused(f"{path.name!r} is no file")
    raw, size = read
    offset = min(offset, size)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    is_last = offset + len(raw) >= size and not may_grow
    text = decoder.decode(raw, is_last)
    pending = len(decoder.getstate()[0])
    return {"text": text, "next_offset": offset + len(raw) - pending, "size": size}


def _log_path(folder: Path, name: Any) -> Path:
    """Return a log's path; never that of an input file, which may be secret."""
    asked.check_text("name", name)
    path = Path(os.path.realpath(folder / name))
    if (name != "log" and path.suffix != ".log") or folder not in path.parents:
        raise asked.Refused(f"{name!r} is no log of the job; allowed: 'log', or a name ending in '.log' in its folder")
    return path


# ---- slots ----


@contextlib.contextmanager
def _slots(host: _Host) -> Iterator[tables.Table]:
    """Hold the table of slots; it is written back when the block ends well."""
    folder = host.root / "slots"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _locked(folder / "lock"):
        table = tables.Table.read(ps.read_json(folder / "table.json"), boot=ps.boot_id(), now=ps.now_s())
        yield table
        ps.write_json(folder / "table.json", table.written())


def _sweep(host: _Host, table: tables.Table) -> None:
    """Free the slots whose owner's job does not live and whose hold has run out; an unclean owner is reaped first."""
    for index, slot in list(table.slots.items()):
        phase, _ = _phase(host.job(slot["owner"]))
        if phase in LIVE or table.holds(slot):
            continue
        try:
            if phase == "lost":
                reap(host, {"job_id": slot["owner"]})
        except OSError:
            continue  # what does not die still has the host
        del table.slots[index]


def _keep_slot(host: _Host, owner: str | None) -> None:
    """Refuse the start of a job whose slot is gone (its hold ran out, another may have the host by now)."""
    if owner is None:
        return
    with _slots(host) as table:
        if not table.extend(owner, hold_s=60):
            raise asked.Refused(f"{owner!r} holds no slot of this host (any more); take one before the job is started")


def slot_take(host: _Host, payload: dict[str, Any]) -> dict[str, Any]:
    """Take a slot, or a place in the queue for one; asking again keeps either."""
    owner = host.job(payload.get("owner")).name
    num_slots = int(asked.number(payload, "num_slots", least=1))
    hold_s = asked.number(payload, "hold_s")
    ticket = _ticket(payload, owner)
    with _slots(host) as table:
        _sweep(host, table)
        slot = table.take(owner, num_slots=num_slots, hold_s=hold_s, ticket=ticket)
        if slot is not None:
            return {"taken": True, "slot": slot}
        return {"taken": False, "held_by": table.held_by(), "ahead": table.ahead_of(owner)}


def _ticket(payload: dict[str, Any], owner: str) -> tables.Ticket:
    return tables.Ticket(
        owner,
        label=str(payload.get("label") or owner),
        asked_at=asked.number(payload, "asked_at", default=time.time()),
        ticket_s=asked.number(payload, "ticket_s", default=tables.TICKET_S),
    )


def slot_release(host: _Host, payload: dict[str, Any]) -> dict[str, Any]:
    """Give up a slot and the place in the queue; while the owner's job lives, its slot stays taken.

    With ``ticket_s`` the owner keeps (or gets) a place in the queue for that long.
    """
    owner = host.job(payload.get("owner")).name
    with _slots(host) as table:
        released = table.release(owner)
        if payload.get("ticket_s"):
            table.queue(_ticket(payload, owner))
        _sweep(host, table)
        return {"released": released}


def slots(host: _Host, payload: dict[str, Any]) -> dict[str, Any]:
    """Tell who holds and who waits."""
    with _slots(host) as table:
        held = [
            {"slot": index, "phase": _phase(host.job(slot["owner"]))[0], **table.shown(slot)}
            for index, slot in sorted(table.slots.items())
        ]
        return {"slots": held, "tickets": table.tickets_in_order()}


_FUNCTIONS = (start, state, log, renew, cancel, reap, tombstone, slot_take, slot_release, slots, forget)
_VERBS = {function.__name__: function for function in _FUNCTIONS}


def main(argv: list[str]) -> int:
    """Run the verb of the command line."""
    try:
        request = json.loads(sys.stdin.buffer.read())
        verb = argv[1] if len(argv) == 2 else ""
        answer = {"ok": call(Path(request["root"]), verb, request["payload"], python=request["python"])}
    except Refused as refused:
        answer = {"error": {"kind": "refused", "message": str(refused)}}
    except OSError as error:
        answer = {"error": {"kind": "failed", "message": str(error)}}
    sys.stdout.write("\n" + json.dumps(answer) + "\n")
    return 0


if __name__ == "__main__":
    os.umask(0o077)
    sys.exit(main(sys.argv))
