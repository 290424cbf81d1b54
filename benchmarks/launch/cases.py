"""What is measured of a launch: its start, and what happens when something goes wrong. Wall time, seen from outside."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.launch import notes
from benchmarks.launch.lanes import Lane, parts
from benchmarks.launch.launchers import Launch, Taas, Wanted, names_rank
from benchmarks.launch.world import World, until

START_BOUND_S = 240.0
NUM_STEPS, ENDLESS = 5, 100_000
PAUSE_S = 0.2
_STEPS_BEFORE_FAULT = 3


@dataclass(frozen=True)
class Bounds:
    """For how long is waited: for a fault to be told, and for what is left to end."""

    fault_s: float = 120.0
    left_s: float = 60.0


class WrongResultError(Exception):
    """A launch did not do what it was to do; its lane is void."""


Case = Callable[[World, Launch, Lane, Bounds], None]


def start(world: World, launch: Launch, lane: Lane, bounds: Bounds) -> None:
    """From the trigger to the slowest rank's first optimizer step, with its parts."""
    began = time.time()
    launch.begin()
    if not until(lambda: launch.is_over, wait_s=START_BOUND_S, every_s=0.3) or launch.has_failed:
        raise WrongResultError(f"it is {launch.states()}: {launch.messages()}")
    found = _checked(world, launch.wanted)
    size = launch.wanted.world_size
    if notes.slowest(found, "done", world_size=size) is None:
        raise WrongResultError("not every rank came to its end")
    reached = {
        **launch.reached(),
        **{name: notes.slowest(found, name, world_size=size) for name in ("script", "rendezvous", "step")},
    }
    first_step = reached["step"]
    assert first_step is not None
    lane.add({"first step_s": first_step - began})
    lane.add({f"- {name}_s": seconds for name, seconds in parts(reached, start=began).items()})


def dead_rank(world: World, launch: Launch, lane: Lane, bounds: Bounds) -> None:
    """Rank 1 is killed by SIGKILL: until the user is told, by what words, and until nothing is left."""
    victim = _train(world, launch)
    pid = world.pid_outside(victim)
    struck = time.time()
    os.kill(pid, signal.SIGKILL)
    _await_failure(launch, lane, bounds, struck)
    _take_messages(launch, lane, victim)
    _await_nothing_left(world, launch, lane, bounds, struck)


def silent_network(world: World, launch: Launch, lane: Lane, bounds: Bounds) -> None:
    """The network of the last host falls silent: until the user is told, and, once it is back, what is left."""
    victim = _train(world, launch)
    cut = world.cluster.hosts[launch.wanted.num_hosts - 1].name
    world.cluster.cut_network(cut)
    try:
        struck = time.time()
        _await_failure(launch, lane, bounds, struck)
        _take_messages(launch, lane, victim, host=cut)
    finally:
        world.cluster.mend_network(cut)
    mended = time.time()
    launch.cancel()
    _await_nothing_left(world, launch, lane, bounds, mended, since_what=" after the network is back and a cancel")


def cancel(world: World, launch: Launch, lane: Lane, bounds: Bounds) -> None:
    """The user ends it: until no process of it is left on any host, and (TaaS) every slot is free."""
    _train(world, launch)
    asked = time.time()
    launch.cancel()
    _await_nothing_left(world, launch, lane, bounds, asked)
    if isinstance(launch, Taas):
        free = until(lambda: not world.held_slots(), wait_s=bounds.left_s)
        lane.add({"slots free_s": time.time() - asked}) if free else lane.add_never("slots free_s", bounds.left_s)


def restart(world: World, launch: Launch, lane: Lane, bounds: Bounds) -> None:
    """Rank 1 is killed by SIGKILL, one restart is allowed: until every rank makes a step again."""
    victim = _train(world, launch)
    pid = world.pid_outside(victim)
    before = {(one.host, one.pid) for one in world.notes(launch.wanted.mark)}
    struck = time.time()
    os.kill(pid, signal.SIGKILL)
    size = launch.wanted.world_size
    if again := until(
        lambda: notes.slowest(
            [one for one in world.notes(launch.wanted.mark) if one.at > struck],
            "step",
            world_size=size,
            without=before,
        ),
        wait_s=bounds.fault_s,
        every_s=0.5,
    ):
        _checked(world, launch.wanted)
        lane.add({"next step_s": again - struck})
    else:
        lane.add_never("next step_s", bounds.fault_s)


def _train(world: World, launch: Launch) -> notes.Note:
    """Begin, wait until every rank has made some steps, and return where rank 1 runs."""
    launch.begin()

    def all_step() -> notes.Note | None:
        if launch.has_failed:
            raise WrongResultError(f"it failed before anything was done to it: {launch.messages()}")
        found = world.notes(launch.wanted.mark)
        if notes.slowest(found, "step", world_size=launch.wanted.world_size) is None:
            return None
        steps = [one for one in found if one.rank == 1 and one.event == "step"]
        return steps[-1] if len(steps) >= _STEPS_BEFORE_FAULT else None

    victim: notes.Note | None = until(all_step, wait_s=START_BOUND_S, every_s=0.5)
    if victim is None:
        raise WrongResultError(f"no steps within {START_BOUND_S:.0f} s")
    _checked(world, launch.wanted)
    return victim


def _checked(world: World, wanted: Wanted) -> list[notes.Note]:
    found = world.notes(wanted.mark)
    if why := notes.fault(found, world_size=wanted.world_size):
        raise WrongResultError(why)
    return found


def _await_failure(launch: Launch, lane: Lane, bounds: Bounds, since: float) -> None:
    """Wait for the first part that failed, and for the last one to be over."""
    for name, is_so in (
        ("told_s", lambda: launch.has_failed or "up_for_retry" in launch.states()),
        ("failed_s", lambda: launch.has_failed),
        ("all over_s", lambda: launch.is_over),
    ):
        left_s = bounds.fault_s - (time.time() - since)
        if until(is_so, wait_s=max(0.0, left_s)):
            lane.add({name: time.time() - since})
        else:
            lane.add_never(name, bounds.fault_s)


def _take_messages(launch: Launch, lane: Lane, victim: notes.Note, *, host: str | None = None) -> None:
    """Keep what was said, and count in how many of the messages the rank (or the lost host) is named as the cause."""

    def naming(told: list[str]) -> int:
        lost = [one for one in launch.world.cluster.hosts if one.name == host]
        words = [word for one in lost for word in (one.name, one.address)]
        if words:
            return sum(any(word in one for word in words) for one in told)
        return sum(names_rank(one, victim.rank, victim.host) for one in told)

    told = launch.messages()
    lane.messages += told
    logged = naming(launch.logs())
    lane.add({"messages": len(told), "messages naming the cause": naming(told), "logs naming the cause": logged})


def _await_nothing_left(
    world: World, launch: Launch, lane: Lane, bounds: Bounds, since: float, *, since_what: str = ""
) -> None:
    name = f"nothing left{since_what}_s"
    if until(lambda: not world.left(launch.wanted.mark), wait_s=bounds.left_s):
        lane.add({name: time.time() - since})
    else:
        lane.add_never(name, bounds.left_s)
        lane.add({f"processes left{since_what}": len(world.left(launch.wanted.mark))})


CASES: dict[str, Case] = {
    "dead rank": dead_rank,
    "cancel": cancel,
    "restart": restart,
    "silent network": silent_network,
}
