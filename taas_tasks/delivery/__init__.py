"""Delivery: bringing shards to a host and elements to its ranks.

``feeder`` is the host's process, ``loader`` the rank's DataLoader; ``install`` gives ``taas.loader`` its meaning in a
rank, ``read_passes`` tells what the ranks consumed. This module imports no torch: the node agent reads counters.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from taas_tasks.delivery.counters import read_passes

if TYPE_CHECKING:
    from taas_tasks.delivery.provider import RankProvider

__all__ = ["delivered_namespace", "install", "read_passes"]


def install(context_path: str | Path) -> RankProvider:
    """Give ``taas.loader`` and ``taas.log`` their meaning in this rank; ``context_path`` is the node agent's file.

    Raises:
        DeliveryError: this process already belongs to a run.
    """
    from taas_tasks.delivery.provider import install as install_provider

    return install_provider(Path(context_path))


def delivered_namespace(provider: RankProvider) -> Mapping[str, Any]:
    """Return what a captured cell finds under the names of the run's loaders."""
    return {name: provider.loader(name) for name in provider.loader_names()}
