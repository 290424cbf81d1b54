"""The write guard: makes the project folder read-only for this process and all its descendants, by the kernel.

Three ways, best first; which one works is found by trying each in a process of its own (``choose_guard``):

- ``mount``: a private mount namespace in which the folder is bound over itself read-only (needs CAP_SYS_ADMIN);
- ``userns``: the same in a user namespace of one's own (needs unprivileged user namespaces);
- ``landlock``: Landlock (Linux 5.13) has only rules that allow, so every sibling along the path from ``/`` down to the
  folder is allowed. It does not cover chmod, chown, utime and extended attributes, and nothing can be created directly
  in a folder that is on the path; hence the last choice.

``apply_guard`` must run while the process has one thread and before user code. A working folder below the project must
be entered again afterwards: the old reference would still lead to the writable mount.

Does not: hold against code that means harm and runs as root (it can unmount what it likes).
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from typing import Literal, cast

GuardMode = Literal["mount", "userns", "landlock"]
MODES: tuple[GuardMode, ...] = ("mount", "userns", "landlock")

_CLONE_NEWNS = 0x00020000
_CLONE_NEWUSER = 0x10000000
_MS_RDONLY, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_SLAVE = 1, 32, 4096, 16384, 1 << 19
# statvfs flag -> mount flag: a remount in a user namespace may not clear those that the mount has.
_KEPT_FLAGS = {2: 2, 4: 4, 8: 8, 1024: 1024, 2048: 2048, 4096: 1 << 21}
_PR_SET_NO_NEW_PRIVS = 38
_SYS_LANDLOCK_CREATE_RULESET, _SYS_LANDLOCK_ADD_RULE, _SYS_LANDLOCK_RESTRICT_SELF = 444, 445, 446
_LANDLOCK_VERSION, _LANDLOCK_PATH_BENEATH = 1, 1
_WRITE_FILE, _REFER, _TRUNCATE = 1 << 1, 1 << 13, 1 << 14
_CHANGE_ENTRIES = sum(1 << bit for bit in range(4, 13))  # remove and make entries of every kind

_libc = ctypes.CDLL(None, use_errno=True)


class _RulesetAttr(ctypes.Structure):
    _fields_ = [("handled_access_fs", ctypes.c_uint64)]


class _PathBeneathAttr(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32)]


class _CapHeader(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]


def apply_guard(mode: GuardMode, folder: Path) -> None:
    """Make ``folder`` read-only for this process and its descendants.

    Raises:
        OSError: The kernel refused.
    """
    folder = folder.resolve()
    if mode == "landlock":
        _restrict_with_landlock(folder)
    else:
        _enter_namespaces(own_user=mode == "userns")
        _bind_read_only(folder)
        if mode == "userns":
            _drop_capabilities()


def choose_guard(folder: Path, *, modes: tuple[GuardMode, ...] = MODES) -> GuardMode | None:
    """Return the first of ``modes`` that works on this host for ``folder``, or None; each is tried in a child."""
    command = [sys.executable, "-m", "taas_tasks.launch.guard", str(folder), *modes]
    tried = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return next((mode for mode in MODES if mode == tried.stdout.strip()), None)


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def _enter_namespaces(*, own_user: bool) -> None:
    uid, gid = os.geteuid(), os.getegid()
    _check(_libc.unshare(_CLONE_NEWNS | (_CLONE_NEWUSER if own_user else 0)), "unshare")
    if own_user:
        # The same ids inside as outside: nothing but the mounts looks different to user code.
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    # Slave: what the host mounts later still appears here, and nothing of ours appears there.
    _check(_libc.mount(None, b"/", None, _MS_REC | _MS_SLAVE, None), "mount --make-rslave /")


def _bind_read_only(folder: Path) -> None:
    target = os.fsencode(folder)
    _check(_libc.mount(target, target, None, _MS_BIND | _MS_REC, None), f"mount --bind {folder}")
    has = os.statvfs(folder).f_flag
    kept = sum(mount_flag for vfs_flag, mount_flag in _KEPT_FLAGS.items() if has & vfs_flag)
    flags = _MS_REMOUNT | _MS_BIND | _MS_RDONLY | kept
    _check(_libc.mount(None, target, None, flags, None), f"mount -o remount,ro {folder}")


def _drop_capabilities() -> None:
    """Give up what the user namespace granted, so that user code is the ordinary user it was."""
    if os.geteuid() == 0:
        return
    header = _CapHeader(0x20080522, 0)
    _check(_libc.capset(ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)())), "capset")


def _restrict_with_landlock(folder: Path) -> None:
    abi = _check(_libc.syscall(_SYS_LANDLOCK_CREATE_RULESET, None, 0, _LANDLOCK_VERSION), "landlock_create_ruleset")
    handled = _WRITE_FILE | _CHANGE_ENTRIES | (_REFER if abi >= 2 else 0) | (_TRUNCATE if abi >= 3 else 0)
    attr = _RulesetAttr(handled)
    ruleset = _check(
        _libc.syscall(_SYS_LANDLOCK_CREATE_RULESET, ctypes.byref(attr), ctypes.sizeof(attr), 0),
        "landlock_create_ruleset",
    )
    try:
        for sibling in siblings_along(folder):
            _allow(ruleset, sibling, handled)
        _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(PR_SET_NO_NEW_PRIVS)")
        _check(_libc.syscall(_SYS_LANDLOCK_RESTRICT_SELF, ruleset, 0), "landlock_restrict_self")
    finally:
        os.close(ruleset)


def siblings_along(folder: Path) -> list[Path]:
    """Return all entries, links left out, beside each step of the path from ``/`` to ``folder``."""
    found = []
    for step in [folder, *folder.parents][:-1]:
        try:
            entries = sorted(step.parent.iterdir())
        except PermissionError:
            continue  # what cannot be listed cannot be allowed one by one
        found += [entry for entry in entries if entry != step and not entry.is_symlink()]
    return found


def _allow(ruleset: int, path: Path, handled: int) -> None:
    try:
        handle = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return  # it has gone, or is not ours to reach
    try:
        access = handled if path.is_dir() else handled & (_WRITE_FILE | _TRUNCATE)
        rule = _PathBeneathAttr(access, handle)
        added = _libc.syscall(_SYS_LANDLOCK_ADD_RULE, ruleset, _LANDLOCK_PATH_BENEATH, ctypes.byref(rule), 0)
        _check(added, f"landlock_add_rule {path}")
    finally:
        os.close(handle)


def _works(mode: GuardMode, folder: Path) -> bool:
    """Try one mode in a forked child: the folder refuses a new file, a temporary folder still takes one."""
    pid = os.fork()
    if pid == 0:
        os._exit(0 if _refuses(mode, folder) else 1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def _refuses(mode: GuardMode, folder: Path) -> bool:
    probe = folder / f".taas-guard-{os.getpid()}"
    try:
        apply_guard(mode, folder)
    except OSError:
        return False
    try:
        probe.touch()
    except OSError:
        return True
    probe.unlink()
    return False


def main(argv: list[str]) -> int:
    """Write the first mode that works: ``python -m taas_tasks.launch.guard FOLDER MODE...``."""
    folder = Path(argv[0])
    for name in argv[1:]:
        mode = cast(GuardMode, name)
        if _works(mode, folder):
            sys.stdout.write(mode + "\n")
            return 0
    return 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
