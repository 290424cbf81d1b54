"""Logs of ranks in the store: numbered pieces while they run, the whole log of each rank when its node has ended.

A piece is what the ranks of one node have written since the piece before it, in one immutable object: a line of JSON
(the host and a ``Slice`` per rank), then the bytes. Pieces of a node are numbered from 1 without a gap, so whoever
follows them asks for the next one, and a cursor is one number per node. Slices are cut at ends of lines where there are
any, never within a character.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from taas.errors import ObjectMissing, RequestError
from taas.log_text import LogText
from taas_tasks.layout import RunKeys
from taas_tasks.result_values import NodeResult
from taas_tasks.store.base import ObjectStore
from taas_tasks.values import Placement, Plan, Value

CURSOR_PATTERN = r"^(|w\.\d{1,9}\.\d{1,15}|p\.\d{1,9}\.\d{1,15}(\.\d{1,6}:\d{1,9})+)$"

_PART_BYTES = 1 << 20
_MAX_PIECES = 64
"""In one answer: a rank that is read alone may have written in few of them."""


class Slice(Value):
    """What one rank wrote, of a piece. ``left_out_bytes`` are missing before it: only the whole log has them."""

    rank: int
    num_bytes: int
    left_out_bytes: int = 0


class _Head(Value):
    version: int = 1
    host: str
    slices: list[Slice]


Part: TypeAlias = tuple[Slice, bytes]


def pack(host: str, parts: Sequence[Part]) -> bytes:
    """Return the object of a piece."""
    head = _Head(host=host, slices=[one for one, _ in parts])
    return b"".join([head.to_bytes(), b"\n", *(data for _, data in parts)])


def unpack(data: bytes) -> tuple[str, list[Part]]:
    """Return a piece's host, and its slices with their bytes."""
    head, _, body = data.partition(b"\n")
    said = _Head.model_validate_json(head)
    parts, start = [], 0
    for one in said.slices:
        parts.append((one, body[start : start + one.num_bytes]))
        start += one.num_bytes
    return said.host, parts


def whole_characters(data: bytes) -> int:
    """Return the length of ``data`` without a character that is cut at its end; bytes that are no UTF-8 count."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data)
    return len(data) - len(decoder.getstate()[0])


@dataclass(frozen=True)
class LogPart:
    """What was read: in the order of each rank. ``cursor``: where to read on; ``complete``: there will be no more."""

    texts: Sequence[LogText]
    cursor: str
    complete: bool


@dataclass(frozen=True)
class _Whole:
    """A place in the whole log of a rank."""

    generation: int
    offset: int

    def __str__(self) -> str:
        return f"w.{self.generation}.{self.offset}"


@dataclass(frozen=True)
class _Pieces:
    """A place in the pieces: how many of each node have been read; ``offset``: in the log, where one rank is read."""

    generation: int
    seen: Mapping[int, int]
    offset: int = 0

    def __str__(self) -> str:
        seen = ".".join(f"{node}:{number}" for node, number in self.seen.items())
        return f"p.{self.generation}.{self.offset}.{seen}"


def _parse(cursor: str) -> _Whole | _Pieces | None:
    if not cursor:
        return None
    kind, generation, *rest = cursor.split(".")
    if kind == "w":
        return _Whole(int(generation), int(rest[0]))
    seen = {int(node): int(number) for node, _, number in (one.partition(":") for one in rest[1:])}
    return _Pieces(int(generation), seen, int(rest[0]))


def read_logs(store: ObjectStore, run: str, *, rank: int | None, cursor: str) -> LogPart:
    """Return what a rank (None: every rank) has written behind ``cursor`` ("": from the start of the newest try).

    A reader who has all of a try is led on to the next one, with a line that says so. Much is read in several calls.
    """
    return _Reader(store, RunKeys(run), rank).read(cursor)


class _Reader:
    def __init__(self, store: ObjectStore, keys: RunKeys, rank: int | None) -> None:
        self._store = store
        self._keys = keys
        self._rank = rank

    def read(self, cursor: str) -> LogPart:
        try:
            placement = Placement.model_validate_json(self._store.get(self._keys.placement("train", -1)))
        except ObjectMissing:
            return LogPart((), cursor, complete=False)
        at = _parse(cursor)
        if at is not None:
            part = self._read(at, placement)
            if at.generation == placement.generation or part.texts or part.cursor != cursor:
                return part
        at = self._start(placement)
        if at is None:
            return LogPart((), cursor, complete=False)
        if not cursor:
            return self._read(at, placement)
        return LogPart((LogText(f"[taas] try {placement.generation} of the training\n"),), str(at), complete=False)

    def _start(self, placement: Placement) -> _Whole | _Pieces | None:
        """Return where the newest try begins; None while it has no hosts."""
        generation = placement.generation
        if self._rank is None:
            return _Pieces(generation, dict.fromkeys(range(len(placement.jobs)), 0)) if placement.jobs else None
        if self._store.head(self._keys.rank_log(generation, self._rank)) is not None:
            return _Whole(generation, 0)
        return _Pieces(generation, {self._node_of(self._rank): 0}) if placement.jobs else None

    def _node_of(self, rank: int) -> int:
        plan = Plan.model_validate_json(self._store.get(self._keys.plan))
        if rank >= plan.world_size:
            raise RequestError(f"there is no rank {rank}; the ranks of run {plan.run_id!r}: 0 to {plan.world_size - 1}")
        return rank // plan.nproc_per_node

    def _read(self, at: _Whole | _Pieces, placement: Placement) -> LogPart:
        part = self._read_once(at)
        if part.texts or part.cursor != str(at) or not self._has_succeeded(placement):
            return part
        # What came between the two looks was there before the result that tells of success.
        again = self._read_once(at)
        return LogPart(again.texts, again.cursor, complete=not again.texts and again.cursor == str(at))

    def _has_succeeded(self, placement: Placement) -> bool:
        """Return whether the newest try has ended well: then there is nothing more to come."""
        for node_rank in range(len(placement.jobs)):
            try:
                said = self._store.get(self._keys.node_result(placement.generation, node_rank))
            except ObjectMissing:
                return False
            if not NodeResult.model_validate_json(said).ok:
                return False
        return True

    def _read_once(self, at: _Whole | _Pieces) -> LogPart:
        if isinstance(at, _Whole):
            return self._read_whole(at, self._rank or 0)
        part = self._read_pieces(at)
        if self._rank is None or part.cursor != str(at):
            return part
        # The last pieces may be missing: the store was down, or full.
        whole = self._read_whole(_Whole(at.generation, at.offset), self._rank)
        return whole if whole.texts else part

    def _read_whole(self, at: _Whole, rank: int) -> LogPart:
        key = self._keys.rank_log(at.generation, rank)
        info = self._store.head(key)
        if info is None or at.offset >= info.num_bytes:
            return LogPart((), str(at), complete=False)
        stop = min(info.num_bytes, at.offset + _PART_BYTES)
        data = self._store.get_range(key, at.offset, stop)
        if stop < info.num_bytes:
            data = data[: whole_characters(data)]
        text = LogText(data.decode(errors="replace"), rank=rank)
        return LogPart((text,), str(_Whole(at.generation, at.offset + len(data))), complete=False)

    def _read_pieces(self, at: _Pieces) -> LogPart:
        """Read the next pieces, one of each node in turn."""
        seen, offset, num_bytes = dict(at.seen), at.offset, 0
        texts: list[LogText] = []
        left = deque(seen)
        for _ in range(_MAX_PIECES):
            if not left or num_bytes >= _PART_BYTES:
                break
            node = left.popleft()
            try:
                piece = self._store.get(self._keys.log_piece(at.generation, node, seen[node] + 1))
            except ObjectMissing:
                continue
            seen[node] += 1
            left.append(node)
            host, parts = unpack(piece)
            mine = [part for part in parts if self._rank in (None, part[0].rank)]
            texts += [LogText(_shown(*part), host, part[0].rank) for part in mine]
            offset += sum(one.left_out_bytes + one.num_bytes for one, _ in mine)
            num_bytes += sum(one.num_bytes for one, _ in mine)
        return LogPart(texts, str(_Pieces(at.generation, seen, offset)), complete=False)


def _shown(one: Slice, data: bytes) -> str:
    text = data.decode(errors="replace")
    if not one.left_out_bytes:
        return text
    return f"\n[taas] {one.left_out_bytes} bytes are left out here while the rank runs; its whole log has them\n{text}"
