from __future__ import annotations

from pathlib import Path

import pytest

from taas_tasks.store.files import write_then_move


def test_a_file_appears_whole_with_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "f"
    with write_then_move(path, mode=0o600) as file:
        file.write(b"content")
        assert not path.exists()
        assert [each.stat().st_mode & 0o777 for each in path.parent.iterdir()] == [0o600]
    assert path.read_bytes() == b"content"
    assert path.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in path.parent.iterdir()] == ["f"]


def test_a_failure_leaves_the_old_file_and_no_temporary(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_text("old")
    with pytest.raises(RuntimeError, match="half"), write_then_move(path) as file:
        file.write(b"new")
        raise RuntimeError("half way")
    assert path.read_text() == "old"
    assert [each.name for each in tmp_path.iterdir()] == ["f"]


def test_a_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("target")
    (tmp_path / "link").symlink_to("target")
    with write_then_move(tmp_path / "link") as file:
        file.write(b"new")
    assert (tmp_path / "target").read_text() == "target"
    assert not (tmp_path / "link").is_symlink()
