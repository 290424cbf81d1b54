"""The checksum of lanes: CRC-32 as zlib and PNG have it, by Intel's isa-l, which takes a quarter of zlib's time."""

from __future__ import annotations

from isal.isal_zlib import crc32

__all__ = ["crc32"]
