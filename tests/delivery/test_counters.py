from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from taas.errors import DeliveryError
from taas_tasks.delivery import read_passes
from taas_tasks.delivery.counters import PassCounters, next_number


def new_pass(folder: Path, *, number: int = 0, rank: int = 3, loader: str = "data") -> PassCounters:
    return PassCounters(folder, loader=loader, rank=rank, number=number, epoch=2, offset=16, replay=True)


def test_a_pass_is_there_from_its_first_moment_on(tmp_path: Path) -> None:
    counters = new_pass(tmp_path, loader="été")
    (one,) = read_passes(tmp_path)
    assert (one.loader, one.rank, one.number, one.epoch, one.offset, one.replay) == ("été", 3, 0, 2, 16, True)
    assert (one.num_steps, one.num_bytes, one.wait_s, one.complete) == (0, 0, 0.0, False)
    counters.close()


def test_counts_are_read_while_the_pass_is_under_way_and_after_it(tmp_path: Path) -> None:
    counters = new_pass(tmp_path)
    counters.steps[0] = 5
    counters.count(num_bytes=2**40, wait_s=1.25)
    (one,) = read_passes(tmp_path)
    assert (one.num_steps, one.num_bytes, one.wait_s, one.complete) == (5, 2**40, 1.25, False)
    counters.complete()
    counters.close()
    assert read_passes(tmp_path)[0].complete


def test_counts_survive_a_sigkill(tmp_path: Path) -> None:
    code = (
        "import os, sys, signal; from pathlib import Path; from taas_tasks.delivery.counters import PassCounters;"
        "one = PassCounters(Path(sys.argv[1]), loader='x', rank=0, number=0, epoch=0, offset=0, replay=False);"
        "one.steps[0] = 7; one.count(num_bytes=9, wait_s=0.5); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=dict(os.environ), timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert read_passes(tmp_path)[0].num_steps == 7


def test_passes_are_numbered_on_after_a_restart_and_sorted(tmp_path: Path) -> None:
    assert next_number(tmp_path, loader="data", rank=3) == 0
    for number, rank in ((0, 3), (11, 3), (2, 12)):
        new_pass(tmp_path, number=number, rank=rank).close()
    new_pass(tmp_path, number=40, loader="data.b").close()
    assert next_number(tmp_path, loader="data", rank=3) == 12
    assert [(one.loader, one.rank, one.number) for one in read_passes(tmp_path)] == [
        *(("data", 3, 0), ("data", 3, 11), ("data", 12, 2), ("data.b", 3, 40))
    ]


def test_a_file_that_is_not_ours_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.pass").write_bytes(b"nothing")
    with pytest.raises(DeliveryError, match=r"x\.pass is no counters file"):
        read_passes(tmp_path)


def test_reading_counters_needs_no_torch() -> None:
    code = "import sys, taas_tasks.delivery; assert 'torch' not in sys.modules and 'pyarrow' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
