"""Are the GPUs of this host idle? What ``nvidia-smi`` says, read without touching CUDA in this process."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from taas_tasks.launch.aside import Aside, AsideFailed
from taas_tasks.values import Value

_MAX_USED_MB = 1024
_TIMEOUT_S = 20.0
_CUDA_TIMEOUT_S = 90.0
_GPU_FIELDS = "index,uuid,name,memory.used"
_APP_FIELDS = "gpu_uuid,pid,process_name,used_memory"

Ask = Callable[[Sequence[str]], str | None]


class Gpu(Value):
    """One GPU as the driver shows it."""

    index: int
    uuid: str
    name: str
    used_mb: int


class GpuProcess(Value):
    """A process that computes on a GPU."""

    uuid: str
    pid: int
    name: str


def parse_gpus(text: str) -> list[Gpu]:
    """Return the GPUs of ``nvidia-smi --query-gpu``; memory that the driver does not tell counts as none."""
    rows = _rows(text, len(_GPU_FIELDS.split(",")))
    return [Gpu(index=int(index), uuid=uuid, name=name, used_mb=_number(used)) for index, uuid, name, used in rows]


def parse_processes(text: str) -> list[GpuProcess]:
    """Return the processes of ``nvidia-smi --query-compute-apps``."""
    rows = _rows(text, len(_APP_FIELDS.split(",")))
    return [GpuProcess(uuid=uuid, pid=int(pid), name=name) for uuid, pid, name, _ in rows]


def _rows(text: str, num_fields: int) -> list[list[str]]:
    rows = []
    for line in text.splitlines():
        first, *rest = (part.strip() for part in line.split(","))
        # The name of a program may have commas in it; it is the last field but one.
        if len(rest) >= num_fields - 1:
            head, tail = [first, *rest[: num_fields - 3]], rest[-1]
            rows.append([*head, ",".join(rest[num_fields - 3 : -1]), tail])
    return rows


def _number(text: str) -> int:
    digits = text.split(" ")[0]
    return int(digits) if digits.isdigit() else 0


def busy_findings(gpus: Sequence[Gpu], processes: Sequence[GpuProcess], *, visible: str | None) -> list[str]:
    """Return what others do on the GPUs that a training would take (``visible``: CUDA_VISIBLE_DEVICES)."""
    found = []
    for gpu in gpus:
        if not _is_visible(gpu, visible):
            continue
        who = [f"{process.name} (pid {process.pid})" for process in processes if process.uuid == gpu.uuid]
        if who or gpu.used_mb > _MAX_USED_MB:
            text = f"GPU {gpu.index} is not idle: {gpu.used_mb} MB are used by {', '.join(who) or 'an unseen process'}"
            found.append(f"{text}; no process and at most {_MAX_USED_MB} MB are needed: end what runs there")
    return found


def _is_visible(gpu: Gpu, visible: str | None) -> bool:
    if visible is None:
        return True
    names = [name.strip() for name in visible.split(",") if name.strip()]
    return any(name == str(gpu.index) or (name.startswith("GPU-") and gpu.uuid.startswith(name)) for name in names)


class Cuda(Value):
    """What torch makes of the GPUs here. ``reason``: torch's own, where it cannot use them."""

    num_gpus: int = 0
    model: str | None = None
    reason: str | None = None
    built_for: str | None = None  # the CUDA version of torch's build; None: built without


def ask_torch(folder: Path, *, check: Callable[[], None] = lambda: None) -> Cuda:
    """Return what torch makes of the GPUs, asked in a process of its own: the agent never touches CUDA."""
    with Aside(_use_every_gpu, folder=folder, name="cuda") as aside:
        try:
            return Cuda.model_validate_json(aside.wait(timeout_s=_CUDA_TIMEOUT_S, check=check))
        except AsideFailed as failed:
            return Cuda(reason=str(failed))


def _use_every_gpu() -> str:
    import torch

    built_for = torch.version.cuda
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        num_gpus = torch.cuda.device_count()
        for index in range(num_gpus):
            torch.ones(1, device=f"cuda:{index}").add_(1).item()  # a kernel: the build may lack this GPU's kind
        return Cuda(num_gpus=num_gpus, model=torch.cuda.get_device_name(0), built_for=built_for).model_dump_json()
    except Exception as error:  # noqa: BLE001  # RuntimeError, AssertionError, AcceleratorError, ...
        return Cuda(reason=f"{type(error).__name__}: {error}", built_for=built_for).model_dump_json()


def cuda_findings(cuda: Cuda, *, ask: Ask | None = None) -> list[str]:
    """Return why torch cannot use the GPUs, in torch's own words and beside what the driver says."""
    if cuda.reason is None:
        return []
    said = (ask or _ask)(["nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader"])
    shown = said.splitlines() if said else []
    driver = f"the driver shows {len(shown)} GPU(s) ({shown[0]})" if shown else "nvidia-smi does not answer"
    build = f"this torch is built for CUDA {cuda.built_for}" if cuda.built_for else "this torch is built without CUDA"
    mend = "install the driver and the torch build that fit each other"
    return [f"torch cannot use the GPUs: {cuda.reason.strip().splitlines()[-1]}; {driver}, {build}: {mend}"]


def look(ask: Ask | None = None) -> list[str]:
    """Return what is wrong with the GPUs' use now; nothing where the driver's program is missing or says nothing."""
    ask = ask or _ask
    gpus = ask(["nvidia-smi", f"--query-gpu={_GPU_FIELDS}", "--format=csv,noheader"])
    processes = ask(["nvidia-smi", f"--query-compute-apps={_APP_FIELDS}", "--format=csv,noheader"])
    if gpus is None or processes is None:
        return []
    others = [process for process in parse_processes(processes) if process.pid != os.getpid()]
    return busy_findings(parse_gpus(gpus), others, visible=os.environ.get("CUDA_VISIBLE_DEVICES"))


def _ask(argv: Sequence[str]) -> str | None:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
