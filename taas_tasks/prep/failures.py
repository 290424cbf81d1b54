"""What a loader's failure is called: the loader, the element, the host, and the tail of the user's traceback."""

from __future__ import annotations

import re

from taas.errors import LoaderError, StreamTaken
from taas_tasks.prep.commit import Producer, Segment
from taas_tasks.prep.elements import Failure, describe, users_traceback
from taas_tasks.prep.virtual_workers import Read, WorkerDied
from taas_tasks.values import ShardRecord

_WORKER_DIED = re.compile(r"DataLoader worker \(pid|exited unexpectedly")
_NO_ROW = ("None", "[None")  # an iterable's elements are not asked for by index
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


def raised_in_stream(failure: Failure, producer: Producer, *, stream: int) -> LoaderError:
    """Return the error for an element of a loader worker's stream at which the user's code raised."""
    row = "" if failure.row.startswith(_NO_ROW) else f"dataset indices {failure.row}, "
    return LoaderError(
        f"loader {producer.loader!r} raised {failure.error} in loader worker {stream}, at element {failure.index} of"
        f" its stream in epoch {failure.epoch} ({row}on {producer.host})",
        loader=producer.loader,
        epoch=failure.epoch,
        stream=stream,
        position=failure.index,
        host=producer.host,
        traceback=failure.traceback,
    )


def died(error: WorkerDied, producer: Producer) -> LoaderError:
    """Return the error for a loader worker that ended by itself."""
    code = error.exit_code
    how = f"was killed by signal {-code}" if code is not None and code < 0 else f"exited with code {code}"
    return LoaderError(
        f"loader {producer.loader!r}: loader worker {error.stream} {how} while element {error.read.position} of its"
        f" stream in epoch {error.read.epoch} was awaited (on {producer.host}){_WORKER_HINT}",
        loader=producer.loader,
        epoch=error.read.epoch,
        stream=error.stream,
        position=error.read.position,
        host=producer.host,
        traceback="",
    )


def timed_out(timeout_s: float, awaited: list[tuple[int, Read]], producer: Producer) -> LoaderError:
    """Return the error for loader workers that gave nothing within the loader's ``timeout``."""
    stream, read = awaited[0]
    return LoaderError(
        f"loader {producer.loader!r}: no element came within its timeout of {timeout_s:g} s; loader worker {stream} was"
        f" asked for element {read.position} of its stream in epoch {read.epoch} (on {producer.host}). Raise the"
        " loader's timeout, or find what the dataset waits for",
        loader=producer.loader,
        epoch=read.epoch,
        stream=stream,
        position=read.position,
        host=producer.host,
    )


def stream_taken(segment: Segment, there: ShardRecord, producer: Producer) -> StreamTaken:
    """Return the error for a segment of a stream that another try committed otherwise."""
    return StreamTaken(
        f"loader {producer.loader!r}: segment {segment.n} of stream {segment.stream} in epoch {segment.epoch} was"
        f" committed by {there.host} (machine {there.machine}, try {there.generation}) as elements [{there.start},"
        f" {there.stop}) and differs from what {producer.host} read, [{segment.start}, {segment.stop}): another try"
        " reads the same stream, or the loader is not deterministic. A retry reads on behind what is committed",
        loader=producer.loader,
        epoch=segment.epoch,
        stream=segment.stream,
        n=segment.n,
        host=producer.host,
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
