"""Who may use a host: a table of slots and of numbered tickets. Decisions only: the caller reads, locks and writes.

A slot names its owner (the id of the job that runs, or will run, there) and is held until a deadline; while the owner's
job lives it stays taken whatever the deadline. Who is refused gets a ticket, kept for as long as he asks again in time:
an earlier one goes first. Tickets are ordered by ``asked_at``, which a gang gives the same on all its hosts: so two
gangs never wait for each other.

Standard library only, Python >= 3.9: copied to bare hosts with the other files of ``transport.HOST_FILES``.
"""

from __future__ import annotations

from typing import Any

TICKET_S = 60.0


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

    def owners(self) -> list[str]:
        """Return who holds the slots, in their order."""
        return [self.slots[index]["owner"] for index in sorted(self.slots)]

    def take(self, owner: str, *, num_slots: int, hold_s: float, ticket_s: float, asked_at: float) -> int | None:
        """Return the slot that is now the owner's (again), or None: he has a ticket instead."""
        mine = self.extend(owner, hold_s=hold_s)
        free = [index for index in range(num_slots) if index not in self.slots]
        if not mine:
            self.queue(owner, ticket_s=ticket_s, asked_at=asked_at)
            if len(free) <= len(self.ahead_of(owner)):
                return None
            self.slots[free[0]] = {"owner": owner, "until": self.now + hold_s}
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

    def queue(self, owner: str, *, ticket_s: float, asked_at: float) -> None:
        """Give the owner a ticket, or renew his."""
        for ticket in self.tickets:
            if ticket["owner"] == owner:
                ticket["until"] = self.now + ticket_s
                return
        ticket = {"owner": owner, "asked_at": asked_at, "number": self.next_number, "until": self.now + ticket_s}
        self.tickets.append(ticket)
        self.next_number += 1

    def tickets_in_order(self) -> list[dict[str, Any]]:
        """Return the tickets, the next one first."""
        return sorted(self.tickets, key=lambda ticket: (ticket["asked_at"], ticket["number"]))

    def ahead_of(self, owner: str) -> list[str]:
        """Return whose tickets come before the owner's."""
        order = [ticket["owner"] for ticket in self.tickets_in_order()]
        return order[: order.index(owner)] if owner in order else order

    def shown(self, slot: dict[str, Any]) -> dict[str, Any]:
        """Return a slot as the ``slots`` verb shows it."""
        return {"owner": slot["owner"], "hold_left_s": max(0.0, slot["until"] - self.now)}

    def _drop_ticket(self, owner: str) -> None:
        self.tickets = [ticket for ticket in self.tickets if ticket["owner"] != owner]
