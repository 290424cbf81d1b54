"""Who may use a host: a table of slots and of numbered tickets. Decisions only: the caller reads, locks and writes.

A slot names its owner (the id of the job that runs, or will run, there) and is held until a deadline; while the owner's
job lives it stays taken whatever the deadline. Who is refused gets a ticket, kept for as long as he asks again in time:
an earlier one goes first. Tickets are ordered by ``asked_at``, which a gang gives the same on all its hosts: so two
gangs never wait for each other.

Standard library only, Python >= 3.9: runs on hosts, beside the other files of ``transport.HOST_FILES``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

TICKET_S = 60.0


class Ticket(NamedTuple):
    """A place in the queue: ``label`` is what others are told, ``ticket_s`` for how long it is kept."""

    owner: str
    label: str
    asked_at: float
    ticket_s: float


class Table:
    """The slots of one host as they are at ``now`` (seconds since boot)."""

    def __init__(self, *, boot: str, now: float) -> None:
        self.boot = boot
        self.now = now
        self.slots: dict[int, dict[str, Any]] = {}
        self.tickets: list[dict[str, Any]] = []
        self.next_number = 1

    @classmethod
    def read(cls, value: dict[str, Any], *, boot: str, now: float) -> Table:
        """Return the table in its written form; that of another boot has lost all holds and tickets."""
        table = cls(boot=boot, now=now)
        table.next_number = value.get("next_number", 1)
        is_current = value.get("boot") == boot
        for index, slot in value.get("slots", {}).items():
            table.slots[int(index)] = slot if is_current else {**slot, "until": 0.0}
        if is_current:
            table.tickets = [ticket for ticket in value.get("tickets", []) if ticket["until"] > now]
        return table

    def written(self) -> dict[str, Any]:
        """Return the form that ``read`` reads."""
        slots = {str(index): slot for index, slot in self.slots.items()}
        return {"boot": self.boot, "slots": slots, "tickets": self.tickets, "next_number": self.next_number}

    def holds(self, slot: dict[str, Any]) -> bool:
        """Whether the slot's hold has not run out."""
        return bool(slot["until"] > self.now)

    def held_by(self) -> list[str]:
        """Return who holds the slots, in their order, as people know them."""
        return [self.slots[index]["label"] for index in sorted(self.slots)]

    def take(self, owner: str, *, num_slots: int, hold_s: float, ticket: Ticket) -> int | None:
        """Return the slot that is now the owner's (again), or None: he is in the queue instead."""
        mine = self.extend(owner, hold_s=hold_s)
        free = [index for index in range(num_slots) if index not in self.slots]
        if not mine:
            self.queue(ticket)
            if len(free) <= len(self.ahead_of(owner)):
                return None
            self.slots[free[0]] = {"owner": owner, "label": ticket.label, "until": self.now + hold_s}
        self._drop_ticket(owner)
        return next(index for index, slot in self.slots.items() if slot["owner"] == owner)

    def extend(self, owner: str, *, hold_s: float) -> bool:
        """Hold the owner's slot for at least ``hold_s`` from now; False when he has none."""
        mine = [slot for slot in self.slots.values() if slot["owner"] == owner]
        for slot in mine:
            slot["until"] = max(slot["until"], self.now + hold_s)
        return bool(mine)

    def release(self, owner: str) -> bool:
        """End the owner's hold and drop his ticket; False when he held nothing."""
        self._drop_ticket(owner)
        mine = [slot for slot in self.slots.values() if slot["owner"] == owner]
        for slot in mine:
            slot["until"] = 0.0
        return bool(mine)

    def queue(self, ticket: Ticket) -> None:
        """Give the owner a ticket, or renew his; it keeps its place."""
        until = self.now + ticket.ticket_s
        for kept in self.tickets:
            if kept["owner"] == ticket.owner:
                kept["until"] = until
                return
        who = {"owner": ticket.owner, "label": ticket.label}
        self.tickets.append({**who, "asked_at": ticket.asked_at, "number": self.next_number, "until": until})
        self.next_number += 1

    def tickets_in_order(self) -> list[dict[str, Any]]:
        """Return the tickets, the next one first."""
        return sorted(self.tickets, key=lambda ticket: (ticket["asked_at"], ticket["number"]))

    def ahead_of(self, owner: str) -> list[str]:
        """Return whose tickets come before the owner's, as people know them."""
        order = self.tickets_in_order()
        places = [place for place, ticket in enumerate(order) if ticket["owner"] == owner]
        return [ticket["label"] for ticket in order[: places[0] if places else None]]

    def shown(self, slot: dict[str, Any]) -> dict[str, Any]:
        """Return a slot as the ``slots`` verb shows it."""
        return {"owner": slot["owner"], "label": slot["label"], "hold_left_s": max(0.0, slot["until"] - self.now)}

    def _drop_ticket(self, owner: str) -> None:
        self.tickets = [ticket for ticket in self.tickets if ticket["owner"] != owner]
