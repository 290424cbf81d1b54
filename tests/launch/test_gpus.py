from __future__ import annotations

import os
from collections.abc import Sequence

from taas_tasks.launch.gpus import busy_findings, look, parse_gpus, parse_processes

GPUS = "0, GPU-aa11, NVIDIA A100-SXM4-80GB, 4 MiB\n1, GPU-bb22, NVIDIA A100-SXM4-80GB, 70211 MiB\n"
PROCESSES = "GPU-bb22, 4711, /usr/bin/python3 -c a,b, 70200 MiB\n"


def test_gpu_with_a_process_of_another_is_not_idle_and_the_process_is_named() -> None:
    (found,) = busy_findings(parse_gpus(GPUS), parse_processes(PROCESSES), visible=None)
    assert "GPU 1 is not idle: 70211 MB" in found
    assert "/usr/bin/python3 -c a,b (pid 4711)" in found


def test_used_memory_alone_is_a_finding() -> None:
    (found,) = busy_findings(parse_gpus(GPUS), [], visible=None)
    assert "an unseen process" in found


def test_gpu_that_the_training_does_not_see_may_be_busy() -> None:
    gpus, processes = parse_gpus(GPUS), parse_processes(PROCESSES)
    assert busy_findings(gpus, processes, visible="0") == []
    assert busy_findings(gpus, processes, visible="GPU-aa") == []
    assert len(busy_findings(gpus, processes, visible="0,1")) == 1


def test_memory_that_the_driver_does_not_tell_counts_as_none() -> None:
    assert parse_gpus("0, GPU-aa11, NVIDIA GB10, [N/A]\n")[0].used_mb == 0


def answering(gpus: str | None, processes: str | None) -> list[str]:
    def ask(argv: Sequence[str]) -> str | None:
        return gpus if any("--query-gpu" in arg for arg in argv) else processes

    return look(ask)


def test_own_process_is_not_foreign_and_no_driver_is_no_finding() -> None:
    idle = "0, GPU-aa11, Tesla T4, 300 MiB\n"
    assert answering(idle, f"GPU-aa11, {os.getpid()}, python, 290 MiB\n") == []
    assert answering(None, None) == []
