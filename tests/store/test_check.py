from __future__ import annotations

import pytest

from taas.errors import StoreRefused
from taas_tasks.store import ObjectInfo, ObjectStore
from taas_tasks.store.check import refuse_unfit_store
from taas_tasks.store.memory import MemoryStore


class IgnoresTheCondition(MemoryStore):
    """Writes whatever is there, as a gateway does that drops the header."""

    def put_if_absent(self, key: str, data: bytes) -> bool:
        self.put(key, data)
        return True


class WritesThenRefuses(MemoryStore):
    """Says no, but has written: the content is the loser's."""

    def put_if_absent(self, key: str, data: bytes) -> bool:
        is_first = self.head(key) is None
        self.put(key, data)
        return is_first


class OtherClock(MemoryStore):
    """Its clock is 20 minutes ahead."""

    def head(self, key: str) -> ObjectInfo | None:
        found = super().head(key)
        return found and ObjectInfo(found.key, found.num_bytes, float(int(found.modified_at + 1200)))


@pytest.mark.store
def test_a_fit_store_is_accepted_and_nothing_is_left_in_it(s3_store: ObjectStore) -> None:
    fitness = refuse_unfit_store(s3_store)
    assert abs(fitness.clock_skew_s) < 2
    assert 0 < fitness.round_trip_s < 30
    assert list(s3_store.list("")) == []


@pytest.mark.parametrize("kind", [IgnoresTheCondition, WritesThenRefuses])
def test_a_store_without_conditional_writes_is_refused_with_the_way_out(kind: type[MemoryStore]) -> None:
    store = kind()
    with pytest.raises(StoreRefused, match=r"If-None-Match.*use AWS S3"):
        refuse_unfit_store(store)
    assert list(store.list("")) == []


def test_a_clock_that_differs_is_measured() -> None:
    assert refuse_unfit_store(OtherClock()).clock_skew_s == pytest.approx(1200, abs=3)
    assert refuse_unfit_store(MemoryStore()).clock_skew_s == 0
