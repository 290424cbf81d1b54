from __future__ import annotations

import subprocess
import sys

CODE = """
import resource, sys
import numpy as np
from taas_tasks.prep.allocation import keep_freed_memory
if sys.argv[1] == "kept":
    assert keep_freed_memory()
def use():
    for size in (48 << 20, 12 << 20):
        np.ones(size, np.uint8)
use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str) -> int:
    found = subprocess.run([sys.executable, "-c", CODE, how], capture_output=True, text=True, timeout=60, check=True)
    return int(found.stdout)


def test_memory_that_was_freed_is_used_again_without_page_faults() -> None:
    assert faults("kept") < faults("by default") / 4
