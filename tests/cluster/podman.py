"""Podman as the tests call it."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping

# runc: crun fails where version 1 of control groups is mounted beside version 2. Limits: its own default is above what
# a container of ours may ask for.
_SETTINGS = """[containers]
default_ulimits = ["nofile=10000:20000", "nproc=10000:10000"]
[engine]
"""


class PodmanError(Exception):
    """A command of podman's failed: which, and what it said."""


def why_not() -> str | None:
    """Return why no cluster can be made on this machine, or None when one can."""
    if os.geteuid() != 0:
        return "a network of containers that the tests reach needs root"
    missing = [name for name in ("podman", "debootstrap", "iptables", "nsenter") if shutil.which(name) is None]
    return f"not installed: {', '.join(missing)} (apt install podman runc debootstrap iptables)" if missing else None


def podman(*args: str, wait_s: float = 120, env: Mapping[str, str] | None = None) -> str:
    """Run a command of podman's and return what it printed.

    Raises:
        PodmanError: it failed, or did not end in time.
    """
    with tempfile.NamedTemporaryFile("w", suffix=".conf") as settings:
        settings.write(_SETTINGS + ('runtime = "runc"\n' if shutil.which("runc") else ""))
        settings.flush()
        environment = {**os.environ, **(env or {}), "CONTAINERS_CONF": settings.name}
        try:
            done = subprocess.run(
                ["podman", *args], capture_output=True, text=True, timeout=wait_s, check=False, env=environment
            )
        except subprocess.TimeoutExpired as error:
            raise PodmanError(f"podman {' '.join(args[:3])}: not done after {wait_s:.0f} s") from error
    if done.returncode != 0:
        raise PodmanError(f"podman {' '.join(args)}: {done.stderr.strip()[-2000:]}")
    return done.stdout.strip()


def exists(kind: str, name: str) -> bool:
    """Return whether there is an image, network or container of that name."""
    try:
        podman(kind, "exists", name)
    except PodmanError:
        return False
    return True
