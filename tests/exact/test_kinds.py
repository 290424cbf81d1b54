"""Every kind of loader, from end to end, against torch's own DataLoader in this process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.exact.harness import Scenario, check
from tests.exact.loaders import ITERABLE, KINDS, MAP, PROMISED_KINDS

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more loader workers than cores


def test_every_kind_that_is_promised_has_a_case() -> None:
    covered = {word for kind in KINDS.values() for word in kind.covers}
    assert covered == set(PROMISED_KINDS)


@pytest.mark.parametrize("kind", sorted(MAP))
def test_a_map_style_loader_comes_through_by_index(kind: str, tmp_path: Path) -> None:
    check(Scenario(kind, size=21, units=47, machines=2, kills=((0, 3), (1, 4)), replays=1), tmp_path)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_loader_without_loader_workers_comes_through_exactly(kind: str, tmp_path: Path) -> None:
    check(Scenario(kind, size=17, units=40, randomness="exact", kills=((0, 5),)), tmp_path)


@pytest.mark.parametrize("workers", [0, 3])
@pytest.mark.parametrize("kind", sorted(ITERABLE))
def test_an_iterable_comes_through(kind: str, workers: int, tmp_path: Path) -> None:
    scenario = Scenario(kind, size=24, workers=workers, units=50, machines=2, seed=5, nproc=4, remainder="drop")
    check(scenario, tmp_path)
