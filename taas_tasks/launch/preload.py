"""Imported once by the fork server, so that its ranks start with torch already there.

``torch._dynamo`` takes 0.9 s and is imported by the first optimizer step; forked ranks then do not pay for it.
``TAAS_PRELOAD`` names what else the project uses and is worth it (``pytorch_lightning``: 3 s).
"""

from __future__ import annotations

import gc
import importlib
import logging
import os

import numpy as np
import torch
import torch._dynamo
import torch.distributed
import torch.distributed.elastic.multiprocessing.api
import torch.nn.parallel
import torch.utils.data

PRELOAD_VARIABLE = "TAAS_PRELOAD"

__all__ = ["PRELOAD_VARIABLE", "np", "torch"]


def _preload(names: list[str]) -> None:
    for name in names:
        try:
            importlib.import_module(name)
        except Exception:  # the script's own import will raise it where its user can see it
            logging.getLogger(__name__).warning("could not preload %s", name, exc_info=True)


_preload([name for name in os.environ.get(PRELOAD_VARIABLE, "").split(",") if name])
gc.collect()
gc.freeze()  # shared pages stay shared: the collector does not touch them in the ranks
