"""What differs in a rank between a machine with GPUs and one that emulates a GPU flavor, and a gloo quirk of both."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

_kept_groups: list[Any] = []


def gloo_for(backend: str) -> str:
    """Return the backend to use where ``backend`` was asked for and there is no GPU: gloo in the place of nccl."""
    if backend.lower() == "nccl":
        return "gloo"
    parts = [part for part in backend.split(",") if not part.lower().startswith("cuda:")]
    return ",".join(parts) or "gloo"


def run_nccl_as_gloo(*, rank: int, flavor: str) -> None:
    """Make ``init_process_group`` and ``new_group`` use gloo where a script asks for nccl; rank 0 says so, once."""
    if rank == 0:
        sys.stderr.write(
            f"[taas] NO GPU HERE: flavor {flavor} is emulated on the CPU. Where the script asks for 'nccl', 'gloo' runs"
            " instead; the numbers of steps and elements are real, the speed is not.\n"
        )
    _replace("init_process_group", _without_cuda(distributed_c10d.init_process_group))
    _replace("new_group", _without_cuda(distributed_c10d.new_group))


def keep_groups_alive() -> None:
    """Hold on to process groups that a script destroys, so that their destructors never run.

    ``~ProcessGroupGloo`` hung joining its thread in about 3 % of runs when a DDP model was freed after
    ``destroy_process_group()``, which is what scripts do. A rank leaves by ``os._exit``, which runs no destructor.
    """
    original = distributed_c10d.destroy_process_group

    @functools.wraps(original)
    def destroy_process_group(*args: Any, **kwargs: Any) -> Any:
        _kept_groups.extend(distributed_c10d._world.pg_map)
        return original(*args, **kwargs)

    _replace("destroy_process_group", destroy_process_group)


def _without_cuda(original: Any) -> Any:
    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], str):
            args = (gloo_for(args[0]), *args[1:])
        if isinstance(kwargs.get("backend"), str):
            kwargs["backend"] = gloo_for(kwargs["backend"])
        if str(kwargs.get("device_id", "")).startswith("cuda") or isinstance(kwargs.get("device_id"), int):
            del kwargs["device_id"]
        return original(*args, **kwargs)

    return replacement


def _replace(name: str, replacement: Any) -> None:
    """Put a function in the place of torch's, under both names by which scripts and libraries reach it."""
    setattr(dist, name, replacement)
    setattr(distributed_c10d, name, replacement)
