"""A delivered loader under Hugging Face accelerate: what ``accelerator.prepare`` does for loaders that it wraps.

accelerate must not split or dispatch what is delivered, so it is told that the loader is prepared already. What it
would have done besides is done here: elements go to its device, and it is told which element is a pass's last, at which
``accelerator.accumulate`` brings the gradients together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


class AcceleratedPass:
    """One pass, as accelerate's own loaders make it.

    Args:
        elements: the pass.
        has_ended: whether the element that was taken last is the pass's last.
    """

    remainder = -1  # nothing is to be cut from gathered metrics: padding is told by the run's report

    def __init__(self, elements: Iterator[Any], *, has_ended: Callable[[], bool]) -> None:
        from accelerate.state import GradientState, PartialState
        from accelerate.utils import send_to_device

        self.end_of_dataloader = False
        self._elements = elements
        self._has_ended = has_ended
        self._gradients: Any = GradientState()
        self._device = PartialState().device
        self._send = send_to_device
        self._is_open = False

    def __iter__(self) -> AcceleratedPass:
        return self

    def __next__(self) -> Any:
        if not self._is_open:
            self._gradients.dataloader_references += [self]
            self._is_open = True
        try:
            element = next(self._elements)
        except BaseException:
            self._close()
            raise
        self.end_of_dataloader = self._has_ended()
        return self._send(element, self._device)

    def _close(self) -> None:
        if self._is_open:
            self._is_open = False
            others = [one for one in self._gradients.dataloader_references if one is not None and one is not self]
            self._gradients.dataloader_references = [None, *others]

    def __del__(self) -> None:
        self._close()
