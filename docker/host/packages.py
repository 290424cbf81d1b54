"""Prints what a host needs of Python's packages, one a line: those of the ``host`` extra, and Lightning for users."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

if __name__ == "__main__":
    project = tomllib.loads(Path(sys.argv[1]).read_text())["project"]
    packages = [*project["dependencies"], *project["optional-dependencies"]["host"], "pytorch-lightning"]
    print(*packages, sep="\n")  # noqa: T201 - a command
