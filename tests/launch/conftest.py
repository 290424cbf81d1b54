from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.launch.gang import Gang
from tests.support.s3_server import S3Server

MakeGang = Callable[..., Gang]


@pytest.fixture
def make_gang(tmp_path: Path, s3_server: S3Server) -> Iterator[MakeGang]:
    """Start gangs of real node agents; every process of theirs is gone when the test ends."""
    made: list[Gang] = []

    def make(
        script: str,
        *,
        files: dict[str, str] | None = None,
        before: Callable[[Gang], None] = lambda gang: None,
        **given: Any,
    ) -> Gang:
        folder = tmp_path / f"gang-{len(made)}"
        gang = Gang(folder, s3_server.fresh_config(), {"train.py": script, **(files or {})}, **given)
        made.append(gang)
        before(gang)
        return gang.start()

    yield make
    for gang in made:
        gang.stop()
