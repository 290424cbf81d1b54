"""How this process keeps memory that is used again and again."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_KEPT_BYTES = 512 << 20
_LARGEST_KEPT_BYTES = 256 << 20


def keep_freed_memory() -> bool:
    """Make glibc keep what is freed for the next segment; False where there is another C library.

    By default every large tensor is mapped, faulted in page by page and unmapped: that was more than half of the CPU
    seconds of copying and encoding. What a process holds at its peak, a few segments, it then holds all the time.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)) and bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES))
