"""What a loader's failure is called: the loader, the element, the host, and the tail of the user's traceback."""

from __future__ import annotations

import re

from taas.errors import LoaderError
from taas_tasks.prep.commit import Producer
from taas_tasks.prep.elements import Failure, describe, users_traceback

_WORKER_DIED = re.compile(r"DataLoader worker \(pid|exited unexpectedly")
_WORKER_HINT = (
    "; a loader worker was killed: most often the kernel does that for want of memory, or /dev/shm is full. Use fewer"
    " num_workers, a smaller batch or prefetch_factor; if it crashed in native code, that must be mended"
)


def is_worker_death(error: BaseException) -> bool:
    """Return whether torch says that a loader worker died.

    It raises that from a SIGCHLD handler too, wherever the main thread happens to be.
    """
    return isinstance(error, RuntimeError) and _WORKER_DIED.search(str(error)) is not None


def raised_at(failure: Failure, producer: Producer) -> LoaderError:
    """Return the error for an element at which the user's code raised."""
    return LoaderError(
        f"loader {producer.loader!r} raised {failure.error} at element {failure.index} of epoch {failure.epoch}"
        f" (dataset indices {failure.row}, on {producer.host})",
        loader=producer.loader,
        epoch=failure.epoch,
        index=failure.index,
        indices=failure.row,
        host=producer.host,
        traceback=failure.traceback,
    )


def raised_while_waiting(error: Exception, producer: Producer, *, epoch: int, index: int) -> LoaderError:
    """Return the error for an exception of the loader itself: its samplers, its worker_init_fn, a worker that died."""
    hint = _WORKER_HINT if is_worker_death(error) else ""
    return LoaderError(
        f"loader {producer.loader!r} raised {describe(error)} while element {index} of epoch {epoch} was awaited"
        f" (on {producer.host}){hint}",
        loader=producer.loader,
        epoch=epoch,
        index=index,
        host=producer.host,
        traceback=users_traceback(error),
    )
