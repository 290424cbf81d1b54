"""The table of slots and tickets, without a host."""

from __future__ import annotations

from taas_tasks.compute.slots import Table, Ticket

BOOT = "boot"


def later(table: Table, now: float) -> Table:
    """Return the table as the next call reads it; the caller frees what no longer holds."""
    read = Table.read(table.written(), boot=BOOT, now=now)
    read.slots = {index: slot for index, slot in read.slots.items() if read.holds(slot)}
    return read


def take(table: Table, owner: str, *, num_slots: int = 1, hold_s: float = 10, asked_at: float = 0) -> int | None:
    ticket = Ticket(owner, label=owner, asked_at=asked_at, ticket_s=20)
    return table.take(owner, num_slots=num_slots, hold_s=hold_s, ticket=ticket)


def test_the_lowest_free_slot_is_taken():
    table = Table(boot=BOOT, now=0)
    assert [take(table, name, num_slots=3) for name in "abc"] == [0, 1, 2]
    assert take(table, "d", num_slots=3) is None
    table.release("b")
    assert take(later(table, 1), "d", num_slots=3) == 1


def test_an_earlier_ticket_goes_first():
    table = Table(boot=BOOT, now=0)
    take(table, "holder")
    assert take(table, "first") is None
    assert take(table, "second") is None
    table.release("holder")
    table = later(table, 1)
    assert take(table, "second") is None
    assert table.ahead_of("second") == ["first"]
    assert take(table, "newcomer") is None
    assert take(table, "first") == 0


def test_a_ticket_that_is_not_renewed_lets_the_next_one_go():
    table = Table(boot=BOOT, now=0)
    take(table, "holder", hold_s=5)
    take(table, "first")
    table = later(table, 15)
    assert take(table, "second") is None
    table = later(table, 25)
    assert take(table, "second") == 0


def test_with_two_free_slots_the_second_in_the_queue_need_not_wait():
    table = Table(boot=BOOT, now=0)
    take(table, "holder", num_slots=1)
    take(table, "first", num_slots=1)
    table.release("holder")
    table = later(table, 1)
    assert take(table, "third", num_slots=2) == 0
    assert take(table, "first", num_slots=2) == 1


def test_tickets_are_ordered_by_when_the_gang_asked_first():
    table = Table(boot=BOOT, now=0)
    take(table, "holder")
    take(table, "came-later", asked_at=200)
    take(table, "came-first", asked_at=100)
    assert [ticket["owner"] for ticket in table.tickets_in_order()] == ["came-first", "came-later"]


def test_taking_again_never_shortens_the_hold():
    table = Table(boot=BOOT, now=0)
    take(table, "a", hold_s=100)
    take(table, "a", hold_s=1)
    assert later(table, 50).held_by() == ["a"]


def test_a_release_ends_the_hold_and_the_wait():
    table = Table(boot=BOOT, now=0)
    take(table, "a")
    take(table, "b")
    assert table.release("a") is True
    assert table.release("b") is False
    assert later(table, 0).held_by() == [] and table.tickets == []


def test_another_boot_has_neither_holds_nor_tickets():
    table = Table(boot=BOOT, now=1000)
    take(table, "a", hold_s=1000)
    take(table, "b")
    read = Table.read(table.written(), boot="next", now=1)
    assert not read.holds(read.slots[0])
    assert read.tickets == []
