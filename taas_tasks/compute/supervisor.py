"""Runs one job to its end on a host: ``python -I -S supervisor.py JOB``, where JOB is the job's folder.

Standard library only, Python >= 3.9: runs on hosts, beside the other files of ``transport.HOST_FILES``.
``hostctl start`` writes ``JOB/spec.json`` and starts this program; from then on they speak through files in the folder:

    lock            flock: whoever holds it is the supervisor (or is burying the job)
    lease.json      who owns the job, and until when it may run unless renewed
    cancel.json     asks for the end; ``wake`` (a FIFO) makes the supervisor look at once
    tombstone.json  the job must never start
    state.json      written here only: starting, running, ended
    seen.json       processes of the job, for whoever must reap them should the supervisor be killed
    log             standard output and error of the job

A job has ended when no process of it is left. They are found as descendants (this process is their subreaper: an
orphan becomes its child, however often it forked) and by ``TAAS_JOB_ID`` in their environment.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or __package__:
    from taas_tasks.compute import processes as ps
else:  # on a host: the files lie side by side
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    import processes as ps

TICK_S = 1.0
SEEN_S = 5.0
LEFTOVER_GRACE_S = 2.0
UNSEEN_S = 1.0  # a debugger may keep a dead child from being collected: then the looks are believed
LOST_THE_LOCK = 3
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, value: int) -> None:
    try:
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
    except (OSError, AttributeError):
        return  # no Linux: descendants are found by their environment only


def _set_oom_score(text: str) -> str:
    """Set how readily the kernel kills us for memory; returns what it was (empty when that is not known)."""
    path = Path("/proc/self/oom_score_adj")
    try:
        before = path.read_text().strip()
        path.write_text(text)
    except OSError:
        return ""
    return before


class Supervisor:
    """The life of one job, from the launch to the last process."""

    def __init__(self, folder: Path, spec: dict[str, Any], *, lock: int) -> None:
        self.folder = folder
        self.spec = spec
        self.lock = lock
        self.main: int | None = None
        self.status: int | None = None
        self.stopping = False
        self.has_children = False
        self.groups: set[int] = set()
        self.kill_at = float("inf")
        self.lease: dict[str, Any] = {}
        self.began = ps.now_s()
        self.looked = 0.0
        self.seen: list[tuple[int, int]] = []
        self.oom_before = ps.oom_kills()
        self.oom_score = ""
        self.state: dict[str, Any] = {"phase": "starting", "boot": ps.boot_id(), "started_at": time.time()}

    def run(self) -> None:
        """Wait for the command's end or a reason to end it, and leave no process of it."""
        while self.main is not None and self.status is None and not self.state.get("ended_by"):
            self.pause(TICK_S)
            if self.status is None:
                self.stubbornly(self.look)
        grace_s = self.spec["kill_grace_s"]
        if self.state.get("ended_by"):
            self.publish()
        else:
            grace_s = min(grace_s, LEFTOVER_GRACE_S)
        self.kill_at = ps.now_s() + grace_s
        # One look is enough: without children, a subreaper has no descendants either.
        end = partial(ps.end_processes, self.find, grace_s=grace_s, num_looks=1, pause=self.pause)
        while not self.stubbornly(end):
            time.sleep(TICK_S)
        self.finish()

    def stubbornly(self, do: Callable[[], object]) -> bool:
        """Do it; False when the machine refused (out of descriptors, disk, memory): our end would end the job."""
        try:
            do()
        except OSError:
            traceback.print_exc()
            return False
        return True

    # -- beginning --

    def prepare(self) -> None:
        """Set up signals, children and files. Raises OSError: the folder cannot be used; nothing was launched."""
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        signal.signal(signal.SIGTERM, self._stop)
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        self.oom_score = _set_oom_score("-900")
        fifo = self.folder / "wake"
        if not fifo.exists():
            os.mkfifo(fifo, 0o600)
        self._fifo = os.open(fifo, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        for name, text in self.spec["files"].items():
            ps.write_text(self.folder / name, text)
        self.state["supervisor"] = [os.getpid(), getattr(ps.read_process(os.getpid()), "start", 0)]
        ps.write_json(self.folder / "state.json", self.state)

    def launch(self) -> None:
        """Start the command in a session of its own; a command that cannot be started has ended with 127 or 126."""
        log = os.open(self.folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            self._child = subprocess.Popen(
                [self.filled(part) for part in self.spec["argv"]],
                env=self.environment(),
                cwd=self.filled(self.spec["cwd"] or "{job}"),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=self._become_command,  # noqa: PLW1509 - safe here: this process has one thread
            )
            self.main = self._child.pid
            self.groups.add(self.main)  # it leads a session and a group of its own
            self.state.update(phase="running", pid=self.main)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            self.refuse(error, log)
        finally:
            os.close(log)
        self.publish()
        self.stubbornly(self.remember)

    def refuse(self, error: Exception, log: int) -> None:
        """Note that the command could not be started."""
        code = 126 if isinstance(error, PermissionError) else 127
        message = f"the command {self.spec['argv'][0]!r} cannot be started: {error}"
        self.state.update(exit_code=code, error=message)
        os.write(log, (message + "\n").encode("utf-8", "replace"))

    def filled(self, text: str) -> str:
        """Return the text with ``{job}`` replaced by the job's folder."""
        return text.replace("{job}", str(self.folder))

    def environment(self) -> dict[str, str]:
        """Return the command's environment; a search path that it is given stands in front of the host's."""
        kept = {name: os.environ[name] for name in ps.KEPT_VARIABLES if name in os.environ}
        env = {**kept, **self.spec["env"], "TAAS_JOB_ID": self.spec["job_id"], "TAAS_JOB_DIR": str(self.folder)}
        paths = [self.spec["env"].get("PATH"), kept.get("PATH")]
        if all(paths):
            env["PATH"] = ":".join(paths)
        return env

    def _become_command(self) -> None:
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        if self.oom_score:
            _set_oom_score(self.oom_score)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a help when the supervisor is killed, never relied on
        if os.getppid() != self.state["supervisor"][0]:
            os._exit(1)

    def _stop(self, *_: object) -> None:
        self.stopping = True

    # -- waiting --

    def pause(self, seconds: float) -> None:
        """Wait until a child ends, someone wakes us or the time is over; then collect the children that ended."""
        ready, _, _ = select.select([self._wake_read, self._fifo], [], [], seconds)
        for fd in ready:
            os.read(fd, 4096)
        self.collect()

    def collect(self) -> None:
        """Collect ended children: the command, and orphans of the job that became ours."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                self.has_children = False
                return
            self.has_children = True
            if pid == 0:
                return
            if pid == self.main:
                self.status = status

    def look(self) -> None:
        """Note a reason to end the job, if there is one."""
        self.state["ended_by"] = self.reason_to_end()
        if ps.now_s() - self.looked >= min(SEEN_S, (ps.now_s() - self.began) / 2):
            self.remember()

    def reason_to_end(self) -> str | None:
        """Return why the job must end now, or None."""
        self.lease = ps.read_json(self.folder / "lease.json") or self.lease
        now, timeout_s, deadline = ps.now_s(), self.spec["timeout_s"], self.lease.get("deadline")
        cancel = ps.read_json(self.folder / "cancel.json")
        if cancel:
            self.state["cancelled_by"] = cancel.get("owner")
            return "cancel"
        if timeout_s is not None and now >= self.began + timeout_s:
            return "timeout"
        if deadline is not None and now >= deadline:
            return "lease"
        return "shutdown" if self.stopping or self.is_evicted() else None

    def is_evicted(self) -> bool:
        """Whether someone removed the job's folder: another start could then launch it a second time."""
        try:
            return os.fstat(self.lock).st_ino != (self.folder / "lock").stat().st_ino
        except FileNotFoundError:
            return True

    def remember(self) -> None:
        """Write down which processes there are, for the one who must reap them without us."""
        self.looked = ps.now_s()
        table = ps.all_processes()
        seen = sorted(table[pid].name for pid in ps.descendants(table, [os.getpid()]))
        if seen == self.seen:
            return
        ps.write_json(self.folder / "seen.json", {"boot": self.state["boot"], "processes": seen}, sync=False)
        self.seen = seen

    # -- ending --

    def find(self) -> list[ps.Process]:
        """Return the job's processes that are left: none as soon as we have no children, as orphans become ours."""
        while True:
            self.collect()
            found = ps.job_processes(self.spec["job_id"], self.folder, supervisor=os.getpid())
            self.groups.update(process.group for process in found)
            if found or not self.has_children or ps.now_s() > self.kill_at + UNSEEN_S:
                return found
            if ps.now_s() > self.kill_at:
                self.kill_unseen()
            time.sleep(0.005)

    def kill_unseen(self) -> None:
        """Kill children that no look sees (each forks the next and exits at once) by group, which is atomic."""
        for group in self.groups - {os.getpgrp()}:
            try:
                os.waitid(os.P_PGID, group, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # raises unless a child is in it
                os.killpg(group, signal.SIGKILL)
            except OSError:
                continue

    def publish(self) -> bool:
        """Write ``state.json``; False when the disk does not let us."""
        try:
            ps.write_json(self.folder / "state.json", self.state)
        except OSError:
            return False
        return True

    def finish(self) -> None:
        """Publish how it ended; with the disk full, as soon as there is room."""
        self.state.update(phase="ended", ended_at=time.time(), ended_by=self.state.get("ended_by") or "exit")
        self.judge()
        ps.scrub(self.folder, self.spec["files"])
        while not self.publish() and self.folder.exists():
            time.sleep(TICK_S)

    def judge(self) -> None:
        """Note exit code or signal, and whether the kernel killed for memory."""
        if self.status is None:
            return
        if os.WIFSIGNALED(self.status):
            self.state["signal"] = os.WTERMSIG(self.status)
        else:
            self.state["exit_code"] = os.WEXITSTATUS(self.status)
        if self.state["ended_by"] != "exit" or self.state.get("exit_code") == 0:
            return
        killed = self.state.get("signal") == signal.SIGKILL or self.state.get("exit_code") == 128 + signal.SIGKILL
        grown = {scope for scope, count in ps.oom_kills().items() if count > self.oom_before.get(scope, count)}
        self.state["oom_killed"] = "cgroup" in grown or (killed and "machine" in grown)
        self.state["killed_by_kernel_suspected"] = killed


def _daemonise() -> int:
    """Go on in a child with a session of its own; returns a pipe to close or to write to when the job is under way.

    The parent waits for that, so that whoever started us knows: exit code 0, or 1 when nothing came.
    """
    read, write = os.pipe()
    if os.fork():
        os.close(write)
        os._exit(0 if os.read(read, 1) else 1)
    os.close(read)
    os.setsid()
    return write


def main(argv: list[str]) -> int:
    """Run the job whose folder is the argument; exit code 3: another has the lock, or the job must not start."""
    folder = Path(argv[1]).resolve()
    lock = ps.try_lock(folder / "lock", wait_s=1)
    if lock is None:
        return LOST_THE_LOCK
    os.umask(0o077)
    if (folder / "tombstone.json").exists() or (folder / "state.json").exists():
        return LOST_THE_LOCK
    ready = _daemonise()
    supervisor = Supervisor(folder, ps.read_json(folder / "spec.json"), lock=lock)
    os.chdir("/")
    supervisor.prepare()
    supervisor.launch()
    os.write(ready, b"1")
    os.close(ready)
    supervisor.run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
