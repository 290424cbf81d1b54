"""The wire form: what counts as an answer."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from taas.errors import HostUnreachable, LaunchError
from taas_tasks.compute.piped import ProcessTransport, parse_reply


def test_the_last_line_is_the_answer_whatever_a_login_prints_before_it():
    assert parse_reply("state", b'Welcome!\n{"motd": 1}\n\n{"ok": {"a": 1}}\n', b"") == {"a": 1}


def test_a_refusal_is_a_launch_error_and_a_failure_may_be_repeated():
    with pytest.raises(LaunchError, match="too late") as refused:
        parse_reply("start", b'{"error": {"kind": "refused", "message": "too late"}}', b"")
    assert not refused.value.retryable
    with pytest.raises(HostUnreachable, match="disk full"):
        parse_reply("start", b'{"error": {"kind": "failed", "message": "disk full"}}', b"")


@pytest.mark.parametrize(
    ("stdout", "stderr", "said"),
    [(b"", b"", "nothing"), (b"{", b"", "{"), (b"[1]", b"", r"\[1\]"), (b"x", b"no such file", "no such file")],
)
def test_no_answer_is_an_unreachable_host_with_what_it_said(stdout: bytes, stderr: bytes, said: str):
    with pytest.raises(HostUnreachable, match=f"hostctl state gave no answer; it said: {said}"):
        parse_reply("state", stdout, stderr)


def test_a_command_that_is_missing_or_hangs_is_an_unreachable_host(tmp_path: Path):
    with pytest.raises(HostUnreachable, match="did not answer"):
        ProcessTransport(tmp_path, command=["/no/such/program"]).call("state", {"job_id": "x"})
    hangs = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(60)"]
    with pytest.raises(HostUnreachable, match="did not answer"):
        ProcessTransport(tmp_path, command=hangs, timeout_s=0.5).call("state", {"job_id": "x"})
