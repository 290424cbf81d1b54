from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from taas_tasks.launch.gpus import Cuda, ask_torch, busy_findings, cuda_findings, look, parse_gpus, parse_processes

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


def test_torchs_own_reason_is_told_beside_what_the_driver_says() -> None:
    cuda = Cuda(reason="RuntimeError: The NVIDIA driver on your system is too old", built_for="13.0")
    (found,) = cuda_findings(cuda, ask=lambda _: "550.54.15, NVIDIA A100-SXM4-80GB\n550.54.15, NVIDIA A100-SXM4-80GB\n")
    assert "torch cannot use the GPUs: RuntimeError: The NVIDIA driver on your system is too old" in found
    assert "the driver shows 2 GPU(s) (550.54.15, NVIDIA A100-SXM4-80GB)" in found
    assert "built for CUDA 13.0" in found


def test_driver_that_does_not_answer_is_said() -> None:
    (found,) = cuda_findings(Cuda(reason="AssertionError: Torch not compiled with CUDA enabled"), ask=lambda _: None)
    assert "nvidia-smi does not answer" in found
    assert "built without CUDA" in found


def test_usable_gpus_are_no_finding() -> None:
    assert cuda_findings(Cuda(num_gpus=8, model="NVIDIA H100", built_for="13.0"), ask=lambda _: None) == []


@pytest.mark.usefixtures("fork_server")
def test_torch_is_asked_in_a_process_of_its_own_and_says_why_not(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there are GPUs here, and torch can use them")
    reason = ask_torch(tmp_path).reason
    assert reason is not None
    assert "CUDA" in reason or "NVIDIA" in reason
    assert not torch.cuda.is_initialized()
