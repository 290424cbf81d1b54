"""Where an element lies in a shard: its lane, and the lane's place in the file.

A lane holds the elements whose index in the epoch is the same modulo 32. Lanes stand in the file in groups of eight, in
the order 0, 2, 1, 3: at 8, 16 and 32 ranks on hosts of eight, a host's lanes are one contiguous range.
"""

from __future__ import annotations

NUM_LANES = 32
LANES_IN_FILE_ORDER: tuple[int, ...] = tuple(group * 8 + lane for group in (0, 2, 1, 3) for lane in range(8))


def lane_of(index: int) -> int:
    """Return the lane of the element at ``index`` of its epoch."""
    return index % NUM_LANES


def first_in_lane(lane: int, *, start: int) -> int:
    """Return the first index from ``start`` on that lies in ``lane``."""
    return start + (lane - start) % NUM_LANES


def row_of(index: int, *, start: int) -> int:
    """Return the row of an element in its lane of the segment that begins at ``start``."""
    return (index - start) // NUM_LANES
