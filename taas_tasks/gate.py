"""When training may start: a pure decision over the loaders' watermarks, and the sentence that explains it."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from taas.errors import RequestError
from taas_tasks.ledger import first_units
from taas_tasks.values import GateDecision, LoaderPlan, Watermark


def starting_units(start: str | int | float, loader: LoaderPlan, *, world_size: int) -> int:
    """Return the units of a loader that must be there before training starts; never more than are asked for.

    ``"auto"``: the first segment of every machine (of every stream, where the loader's workers are its streams), and
    enough for one step of every rank. ``"all"``: everything. A whole number: so many units. A fraction: that part.

    Raises:
        RequestError: ``start`` is none of these.
    """
    if start == "auto":
        return min(loader.units, max(first_units(loader), world_size))
    if start == "all":
        return loader.units
    if isinstance(start, (bool, str)) or start < 0 or (isinstance(start, float) and start > 1):
        message = f'start is {start!r}; allowed: "auto", "all", a number of units, or a fraction from 0.0 to 1.0'
        raise RequestError(message, faults=[{"field": "start", "message": message}])
    wanted = math.ceil(start * loader.units) if isinstance(start, float) else start
    return min(loader.units, wanted)


def decide(
    start: str | int | float,
    *,
    loaders: Mapping[str, LoaderPlan],
    watermarks: Sequence[Watermark],
    world_size: int,
    units_per_second: Mapping[str, float] | None = None,
    prepared: Collection[str] = (),
) -> GateDecision:
    """Return whether training may start, and why: every loader's contiguous prefix must reach its starting units.

    ``units_per_second`` (per loader, where known) only serves to say how long it will take. Of loaders that are
    ``prepared`` nothing more comes: what lacks was lost, and the hosts of the training have it made again.
    """
    by_loader = {watermark.loader: watermark for watermark in watermarks}
    starts = {name: starting_units(start, loader, world_size=world_size) for name, loader in sorted(loaders.items())}
    missing = {name: units - by_loader[name].units for name, units in starts.items() if name in by_loader}
    behind = [name for name in starts if name not in by_loader or missing[name] > 0]
    late = [name for name in behind if name not in prepared]
    rates = units_per_second or {}
    told = late or list(starts)
    sentences = [
        _sentence(name, loaders[name].units, by_loader.get(name), starts[name], rates.get(name))
        if name in late or name not in behind
        else f"{name}: prepared, but records of it are lost; the training's hosts have these segments made again"
        for name in told
    ]
    return GateDecision(
        is_open=not late,
        reason="; ".join(sentences) if sentences else "nothing is prepared, training starts at once",
        watermarks=list(watermarks),
        starts_at_units=starts,
    )


def _sentence(name: str, units: int, watermark: Watermark | None, starts_at: int, rate: float | None) -> str:
    there = 0 if watermark is None else watermark.units
    text = f"{name}: {_percent(there, units)} there, "
    if there >= starts_at:
        return f"{text}enough to start ({_percent(starts_at, units)})"
    text += f"starts at {_percent(starts_at, units)}"
    return f"{text}, in about {_duration((starts_at - there) / rate)}" if rate else text


def _percent(part: int, whole: int) -> str:
    share = 100 * part / whole if whole else 100.0
    rounded = math.floor(share) if part < whole else 100
    return f"{rounded} %" if rounded or not part else f"{share:.2g} %"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
