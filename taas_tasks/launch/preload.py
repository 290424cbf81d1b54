"""Imported once by the fork server, so that its ranks start with torch and our own modules already there.

``torch._dynamo`` takes 0.9 s and is imported by the first optimizer step; forked ranks then do not pay for it.
``TAAS_PRELOAD`` names what else the project uses and is worth it (``pytorch_lightning``: 3 s).
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
from pathlib import Path

PRELOAD_VARIABLE = "TAAS_PRELOAD"

_ALWAYS = (
    "numpy",
    "torch",
    "torch._dynamo",
    "torch.distributed.elastic.multiprocessing.api",
    "torch.nn.parallel",
    "torch.optim",
    "torch.utils.data",
    "taas_tasks.delivery.provider",
    "taas_tasks.launch.emulation",
    "taas_tasks.launch.group_check",
    "taas_tasks.launch.rank_main",
)

_log = logging.getLogger(__name__)


def _preload(names: list[str]) -> None:
    for name in names:
        try:
            importlib.import_module(name)
        except Exception:  # noqa: BLE001  # the script's own import will raise it where its user can see it
            _log.exception("could not preload %s", name)


_preload([*_ALWAYS, *(name for name in os.environ.get(PRELOAD_VARIABLE, "").split(",") if name)])
num_threads = len(list(Path("/proc/self/task").iterdir()))
if num_threads > 1 and os.environ.get("OMP_NUM_THREADS") == "1":  # else OpenBLAS has its own, and stops them to fork
    _log.warning("the fork server has %d threads: a fork may then hang", num_threads)
gc.collect()
gc.freeze()  # shared pages stay shared: the collector does not touch them in the ranks
