"""Which lanes are compared with which: long with long, short with short, and only those that count."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.delivery import table
from benchmarks.delivery.common import Lane
from benchmarks.delivery.delivery import _FULL, _is_enough, ratios
from benchmarks.delivery.lanes import EPOCHS, LaneSpec, Setting

Results = dict[LaneSpec, Lane]


def put(found: Results, name: str, library: str, mb_s: float, cpu: float, **more: Any) -> None:
    given = {"workload": "batches", "layout": "elements", "source": "nginx", "count": 16, **more}
    spec = LaneSpec(name, library, **given)
    found[spec] = Lane("delivery", name, spec.workload, spec.source, "MB/s", [mb_s], [cpu])


def measured() -> Results:
    found: Results = {}
    put(found, "ceiling", "ours", 1000, 1)
    put(found, "taas", "ours", 500, 3)
    put(found, "taas, a host of 8 ranks", "ours", 1, 99, nproc=8)
    put(found, "webdataset", "webdataset", 250, 5)
    put(found, "litdata", "litdata", 100, 4)
    put(found, "webdataset, samples", "webdataset", 50, 9, layout="samples")
    put(found, f"ceiling, {EPOCHS} times", "ours", 1000, 0.5, epochs=EPOCHS)
    put(found, f"taas, {EPOCHS} epochs", "ours", 900, 1.5, epochs=EPOCHS)
    put(found, f"webdataset, {EPOCHS} times", "webdataset", 300, 3, epochs=EPOCHS)
    put(found, f"litdata, {EPOCHS} times", "litdata", 450, 6, epochs=EPOCHS)
    put(found, f"webdataset, samples, {EPOCHS} times", "webdataset", 90, 8, layout="samples", epochs=EPOCHS)
    put(found, "taas", "ours", 200, 3, source="seaweedfs")
    put(found, "webdataset", "webdataset", 160, 4, source="seaweedfs")
    return found


def test_long_lanes_are_compared_with_long_ones_and_short_with_short() -> None:
    assert ratios(measured()) == {
        "mb_s_vs_best_peer": {"batches": 2.0},
        "cpu_vs_best_peer": {"batches": 0.5},
        "mb_s_vs_best_peer_of_samples": {"batches": 10.0},
        "vs_ceiling_by_workload": {"batches": 0.9},
        "vs_ceiling": 0.9,
        "mb_s_vs_best_peer_with_start": {"batches": 2.0},
        "cpu_vs_best_peer_with_start": {"batches": 0.75},
        "mb_s_vs_best_peer_of_samples_with_start": {"batches": 10.0},
        "vs_ceiling_with_start": {"batches": 0.5},
        "mb_s_vs_best_peer_with_start_seaweedfs": {"batches": 1.25},
        "cpu_vs_best_peer_with_start_seaweedfs": {"batches": 0.75},
    }


def test_void_lane_is_compared_with_nothing() -> None:
    found = measured()
    for spec, lane in found.items():
        if spec.name == f"litdata, {EPOCHS} times":
            lane.void = "wrong contents"
    assert ratios(found)["mb_s_vs_best_peer"] == {"batches": 3.0}


def test_table_judges_both_lengths() -> None:
    results = {"machine": {"cores": 2, "cpu": "x"}, "seconds": 1, "versions": {}, "lanes": [], "notes": []}
    text = table.markdown({**results, "ratios": ratios(measured())})
    assert "| cpu_vs_best_peer | batches 0.50 |" in text
    judged = {line.split(" | ")[0].strip("| "): line.split(": ")[-1].strip("| ") for line in text.splitlines()}
    assert judged["mb_s_vs_best_peer"] == judged["cpu_vs_best_peer"] == "met"
    assert judged["mb_s_vs_best_peer_with_start"] == "met"
    assert judged["cpu_vs_best_peer_with_start"] == "MISSED"


def test_peer_reads_its_longer_dataset_once_and_we_ours_often() -> None:
    peer = LaneSpec("litdata", "litdata", "images", "elements", "nginx", 64, Setting(1, 4, 1 << 30), epochs=EPOCHS)
    ours = LaneSpec("taas", "ours", "images", "elements", "nginx", 64, epochs=EPOCHS)
    assert (peer.passes, ours.passes) == (1, EPOCHS)
    assert str(peer.setting) == "1 worker(s), ahead 4, cache 1024 MiB"


@pytest.mark.parametrize(("seconds", "repetitions"), [(2.0, 5), (4.0, 3), (8.0, 2), (20.0, 2), (30.0, 1)])
def test_slow_lane_is_repeated_less_often(seconds: float, repetitions: int) -> None:
    lane = Lane("delivery", "x", "images", "nginx", "MB/s", [], more={"payload_bytes": 1e9})
    for _ in range(repetitions):
        assert not _is_enough(lane, _FULL)
        lane.values.append(1000 / seconds)
    assert _is_enough(lane, _FULL)
