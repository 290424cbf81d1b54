from __future__ import annotations

import mmap
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from taas_tasks.delivery.cache_files import CacheFile, CacheFiles, make_cache_folder

SIZE = 300_000


@pytest.fixture
def files(tmp_path: Path) -> Iterator[CacheFiles]:
    found = CacheFiles(tmp_path, most_bytes=4 * SIZE)
    yield found
    found.close()


def fill(file: CacheFile, value: int) -> None:
    file.view[:] = bytes([value]) * file.num_bytes


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_file_has_no_name_and_all_its_bytes_are_allocated(files: CacheFiles, tmp_path: Path) -> None:
    file = files.take(SIZE)
    with file.opened() as descriptor:
        found = os.fstat(descriptor)
    assert not list(tmp_path.iterdir())
    assert found.st_size == len(file.view) == SIZE and found.st_blocks * 512 >= SIZE
    file.close()


def test_who_gets_a_file_reads_what_was_written_and_cannot_write(files: CacheFiles) -> None:
    file = files.take(SIZE)
    fill(file, 7)
    with file.opened() as descriptor:
        assert os.pread(descriptor, SIZE, 0) == b"\7" * SIZE
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.pwrite(descriptor, b"x", 0)
        with pytest.raises(PermissionError):
            mmap.mmap(descriptor, SIZE)
    file.close()


def test_a_file_that_nobody_sees_is_used_again(files: CacheFiles) -> None:
    first = files.take(SIZE)
    files.give_back(first)
    again = files.take(SIZE - 5000)
    assert again is first and again.num_bytes == SIZE - 5000 == files.num_bytes
    again.close()


def test_a_file_used_again_has_room_for_a_part_that_is_a_little_larger(files: CacheFiles) -> None:
    first = files.take(SIZE)
    fill(first, 1)
    files.give_back(first)
    again = files.take(SIZE + 10_000)
    fill(again, 2)
    with again.opened() as descriptor:
        assert again is first and os.fstat(descriptor).st_size == SIZE + 10_000
        assert os.pread(descriptor, 2 * SIZE, 0) == b"\2" * (SIZE + 10_000)
    again.close()


@pytest.mark.parametrize("num_bytes", [SIZE * 2, SIZE // 3])
def test_a_file_of_another_size_is_not_used_again(files: CacheFiles, num_bytes: int) -> None:
    first = files.take(SIZE)
    files.give_back(first)
    other = files.take(num_bytes)
    assert other is not first and other.num_bytes == num_bytes
    other.close()


def test_a_file_that_is_still_mapped_is_never_used_again(files: CacheFiles) -> None:
    first = files.take(SIZE)
    fill(first, 1)
    with first.opened() as descriptor:
        mapping = mmap.mmap(descriptor, SIZE, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    files.give_back(first)
    other = files.take(SIZE)
    fill(other, 2)
    assert other is not first and mapping[:] == b"\1" * SIZE
    mapping.close()
    assert files.take(SIZE) is first
    first.close()
    other.close()


def test_a_file_on_its_way_to_a_rank_is_not_used_again(files: CacheFiles) -> None:
    here, there = socket.socketpair()
    with here, there:
        first = files.take(SIZE)
        with first.opened() as descriptor:
            socket.send_fds(here, [b"x"], [descriptor])
        files.give_back(first)
        other = files.take(SIZE)
        assert other is not first
        other.close()


def test_a_file_that_a_child_process_has_is_not_used_again(files: CacheFiles) -> None:
    first = files.take(SIZE)
    with first.opened() as descriptor:
        child = subprocess.Popen(["/bin/sleep", "60"], pass_fds=[descriptor])
    try:
        files.give_back(first)
        other = files.take(SIZE)
        assert other is not first
        other.close()
    finally:
        child.kill()
        child.wait()
    assert files.take(SIZE) is first
    first.close()


def test_files_rest_only_within_the_bound_and_the_oldest_goes_first(files: CacheFiles) -> None:
    taken = [files.take(SIZE) for _ in range(6)]
    assert files.num_bytes == 6 * SIZE  # what is in use is bounded by who takes it
    for one in taken:
        files.give_back(one)
    assert files.num_bytes == 4 * SIZE
    assert [files.take(SIZE) for _ in range(4)] == taken[:1:-1]
    for one in taken[2:]:
        one.close()


def test_closing_leaves_no_descriptor_open(tmp_path: Path) -> None:
    before = open_files()
    files = CacheFiles(tmp_path, most_bytes=4 * SIZE)
    for one in [files.take(SIZE) for _ in range(3)]:
        files.give_back(one)
    assert open_files() > before
    files.close()
    assert open_files() == before and files.num_bytes == 0


def test_when_the_disk_is_full_what_rests_is_given_up(small_disk: Path) -> None:
    files = CacheFiles(small_disk, most_bytes=1 << 30)
    rests, held = files.take(600_000), files.take(300_000)
    files.give_back(rests)
    new = files.take(200_000)  # of another size: there is room only where the first one was
    fill(new, 1)
    with pytest.raises(OSError, match="No space left"):
        files.take(700_000)
    assert files.num_bytes == 500_000
    held.close()
    new.close()


def test_files_that_a_killed_feeder_left_are_removed_and_others_stay(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    for name in ("part-left", "other"):
        (tmp_path / "cache" / name).write_text("")
    make_cache_folder(tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["other"]
