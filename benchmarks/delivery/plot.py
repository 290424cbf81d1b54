"""The results as bars: ``python plot.py delivery.json delivery.png``, in the peers' environment (matplotlib)."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def draw(results: dict[str, Any], path: Path) -> None:
    """Write one panel per workload and source: MB/s, and CPU s/GB as text."""
    lanes = [one for one in results["lanes"] if one["part"] == "delivery" and one["values"] and not one["void"]]
    lanes = [one for one in lanes if not one["name"].startswith(("taas, a host", "consumers alone"))]
    workloads = list(dict.fromkeys(one["workload"] for one in lanes))
    sources = list(dict.fromkeys(one["source"] for one in lanes))
    shape = (max(1, len(workloads)), max(1, len(sources)))
    panels = Counter((one["workload"], one["source"]) for one in lanes)
    height = 0.6 + 0.17 * max(panels.values(), default=0)
    figure, axes = plt.subplots(*shape, figsize=(6 * shape[1], height * shape[0]), squeeze=False)
    for row, workload in enumerate(workloads):
        for column, source in enumerate(sources):
            own = [one for one in lanes if (one["workload"], one["source"]) == (workload, source)]
            _panel(axes[row][column], own, f"{workload} from {source}")
    figure.suptitle("Delivery to two ranks: MB/s (median, min..max) and CPU s/GB")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def _panel(axis: Any, lanes: list[dict[str, Any]], title: str) -> None:
    names = [one["name"] for one in lanes]
    values = [one["median"] for one in lanes]
    errors = [
        [one["median"] - one["spread"][0] for one in lanes],
        [one["spread"][1] - one["median"] for one in lanes],
    ]
    shades = {"taas": "#2a6", "ceiling": "#aaa"}
    colours = [shades.get(name.split(",")[0], "#58b") for name in names]
    axis.barh(names, values, xerr=errors, color=colours, height=0.7, error_kw={"linewidth": 0.8})
    for place, one in enumerate(lanes):
        axis.text(one["spread"][1], place, f" {one['cpu_s_per_gb']:.2f} s/GB", va="center", fontsize=7)
    axis.invert_yaxis()
    axis.margins(x=0.2)
    axis.set_title(title, fontsize=9)
    axis.tick_params(labelsize=7)


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
