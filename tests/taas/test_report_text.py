from typing import Any

from taas.report_text import report_text

REPORT: dict[str, Any] = {
    "run_id": "a",
    "state": "failed",
    "verdict": "rank 3 on host-1: CUDA OOM",
    "loaders": {
        "train": {
            "asked": 100,
            "extracted": 100,
            "consumed": 96,
            "padded": 0,
            "unread": 4,
            "explained": True,
            "notes": ["broke off"],
        },
        "val": {"asked": 5, "explained": False},
    },
    "phases": [
        {
            "name": "prepare",
            "started_at": 5.0,
            "seconds": 12.34,
            "machine_seconds": 24.7,
            "cost_units": 98.7,
            "flavor": "c1.4",
        },
        {"name": "gate", "started_at": 5.0, "seconds": 1.0, "cost_units": 0.0, "flavor": None},
        {"name": "upload", "started_at": None, "seconds": 0.0, "cost_units": 0.0, "flavor": None},
    ],
    "gpu_stall": {"mean_wait_s": 1.0, "worst_wait_s": 2.5, "worst_rank": 3.0, "stall_fraction": 0.0125},
    "cost": {"total": 1234567.8},
    "artifacts": [{"path": "out/m.pt", "bytes": 3, "sha256": "ab" * 32}],
    "artifact_record": 7,
    "warnings": ["slow disk"],
}


def test_a_report_tells_everything_in_lines() -> None:
    assert report_text(REPORT).splitlines() == [
        "run a: failed",
        "verdict: rank 3 on host-1: CUDA OOM",
        "loader train: asked 100, extracted 100, consumed 96, unread 4",
        "  broke off",
        "loader val: asked 5",
        "  prepare       12.3 s             99 units: 24.7 s of c1.4",
        "  gate           1.0 s",
        "waiting for data: 1.2% of the ranks' time; rank 3 waited longest, 2.5 s",
        "cost in units of price: total 1,234,568",
        "artifacts: 1 file(s), record 7 of the project",
        "  out/m.pt  3 bytes  sha256 abababababab",
        "warning: slow disk",
    ]


def test_books_that_do_not_close_are_told_of_a_success_only() -> None:
    """Of a failed run the verdict says what is missing and why."""
    assert "loader val: asked 5 - UNEXPLAINED" in report_text({**REPORT, "state": "success"}).splitlines()


def test_a_report_of_a_run_that_did_nothing_is_short() -> None:
    assert report_text({"run_id": "a", "state": "failed"}) == "run a: failed\nartifacts: none"


def test_a_file_name_with_line_breaks_stays_on_its_line() -> None:
    artifact = {"path": "a\nwarning: fake\t\x1b[31m", "bytes": 3, "sha256": "ab" * 32}
    lines = report_text({**REPORT, "artifacts": [artifact]}).splitlines()
    assert r"  a\nwarning: fake\t\x1b[31m  3 bytes  sha256 abababababab" in lines
