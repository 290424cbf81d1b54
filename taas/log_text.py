"""What ranks wrote, as it travels from Airflow to whoever reads it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LogText:
    """Something that a rank wrote, on which host; without a rank: something that is told about all of them."""

    text: str
    host: str | None = None
    rank: int | None = None

    def as_lines(self) -> str:
        """Return the lines as a terminal would show them, each with host and rank in front."""
        if self.rank is None:
            return self.text
        lines = self.text.removesuffix("\n").split("\n")
        return "".join(f"[{self.host} r{self.rank}] {_as_shown(line)}\n" for line in lines)


def _as_shown(line: str) -> str:
    """Return what is left of a line that a progress bar has rewritten by carriage returns."""
    return next((part for part in reversed(line.split("\r")) if part), "")
