"""What tests of opening loaders change in their process, and put back."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Path]:
    """A project's folder; the current folder, ``sys.path`` and imported modules are as before afterwards."""
    folder = tmp_path / "project"
    folder.mkdir()
    cwd, path, modules = Path.cwd(), sys.path[:], set(sys.modules)
    yield folder
    os.chdir(cwd)
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "") or ""):
            del sys.modules[name]
