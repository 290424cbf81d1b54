"""Figures of launches, and what is told of them."""

from __future__ import annotations

from benchmarks.launch.lanes import Lane, cell, parts, rotated, table


def lane(launcher: str, *values: float, case: str = "start") -> Lane:
    made = Lane(case, launcher, 2)
    for value in values:
        made.add({"first step_s": value})
    return made


def test_a_cell_tells_the_median_and_the_spread() -> None:
    assert cell(lane("taas", 4.0, 2.0, 9.0), "first step_s") == "4.0 (2.0..9.0)"
    assert cell(lane("taas", 4.0), "first step_s") == "4.0"
    assert cell(lane("taas", 4.0), "another_s") == cell(None, "first step_s") == "-"


def test_counts_have_no_decimals() -> None:
    counted = Lane("dead rank", "taas", 2)
    counted.add({"messages": 2})
    assert cell(counted, "messages") == "2"


def test_what_never_came_is_told_with_how_long_it_was_waited_for() -> None:
    hung = Lane("silent network", "torchrun", 2)
    hung.add_never("failed_s", 120.0)
    assert cell(hung, "failed_s") == "not within 120 s"
    hung.add({"failed_s": 60.0})
    assert cell(hung, "failed_s") == "60.0, not within 120 s 1x"


def test_a_lane_with_a_wrong_result_is_void_whatever_else_it_measured() -> None:
    wrong = lane("taas", 4.0)
    wrong.void.append("the all-reduce gave a wrong sum on rank(s) [1]")
    assert cell(wrong, "first step_s") == "void"
    assert "wrong sum" in table([wrong])


def test_the_table_has_a_row_per_figure_and_a_column_per_launcher() -> None:
    rows = table([lane("torchrun", 3.0), lane("taas", 4.0), lane("taas", 1.0, case="cancel")]).splitlines()
    assert rows[0] == "| case | hosts | figure | taas | torchrun | operator |"
    assert rows[2:] == [
        "| start | 2 | first step, s | 4.0 | 3.0 | - |",
        "| cancel | 2 | first step, s | 1.0 | - | - |",
    ]


def test_json_has_every_single_figure() -> None:
    found = lane("taas", 4.0, 2.0, 9.0).as_json()
    assert found["figures"]["first step_s"] == {"median": 4.0, "min": 2.0, "max": 9.0, "all": [4.0, 2.0, 9.0]}


def test_parts_add_up_to_the_whole_also_where_one_is_not_known() -> None:
    reached = {"planned": 12.0, "hosts held": None, "step": 15.5}
    assert parts(reached, start=10.0) == {"planned": 2.0, "step": 3.5}


def test_each_launcher_comes_first_in_turn() -> None:
    assert [rotated("abc", by)[0] for by in range(4)] == ["a", "b", "c", "a"]
    assert rotated("abc", 1) == ["b", "c", "a"]
