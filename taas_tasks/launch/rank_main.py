"""The bootstrap of one rank: from a fork of the fork server to the user's script as ``__main__``, and out again.

The order matters: the log first (everything after can be read), the write guard while there is one thread, then what
user code may see. A rank whose script has ended flushes, reports its end in a file, tells its peers that it sends
nothing more (who waits for it in a collective must fail, not hang), waits until the whole gang has ended, and leaves by
``os._exit``.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.process
import os
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from taas_tasks.delivery import install, progress
from taas_tasks.launch import stacks
from taas_tasks.launch.files import EndReport, ErrorReport, RankFiles, RankSpec, write_json
from taas_tasks.launch.guard import apply_guard
from taas_tasks.launch.notice import WriteNotice
from taas_tasks.launch.processes import die_with_parent, flush_c_streams, say_end_of_connections
from taas_tasks.launch.script import CELL_NAME, add_python_path, open_cell, run_cell, run_script
from taas_tasks.verdict import LAUNCH, class_of_exception

_TAIL_CHARS = 6000


@dataclass
class _Rank:
    """One rank while it runs."""

    rank: int
    local_rank: int
    spec: RankSpec
    files: RankFiles
    project: Path
    notice: WriteNotice | None = None


def main(spec_path: str) -> None:
    """Entry point that torch's elastic agent calls in each forked process. Never returns."""
    spec = RankSpec.model_validate_json(Path(spec_path).read_bytes())
    files = RankFiles(Path(spec.scratch))
    rank = _Rank(int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"]), spec, files, Path(spec.project_dir))
    _write_to_log(files.log(rank.rank))
    try:
        _prepare(rank)
        _run(rank)
        _close(rank)
    except SystemExit as leaving:
        _leave_by_exit(rank, leaving)
    except BaseException as error:  # noqa: BLE001  # whatever a script raises ends here, as in the interpreter
        _fail(rank, error, exit_code=1)
    _succeed(rank)


def _write_to_log(path: Path) -> None:
    """Send standard output and error, of C code and child processes too, to the rank's log, line by line."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable(file=sys.stderr, all_threads=True)


def _prepare(rank: _Rank) -> None:
    _forget_fork_server()
    if rank.rank != 0:
        _guard(rank)
    os.umask(0o022)  # jobs run with 077; what the script writes is to have the modes that it would have anywhere
    die_with_parent()  # after the guard: a change of credentials clears it
    os.chdir(rank.project)
    add_python_path()
    _set_up_torch(rank)
    os.environ["TAAS_CONTEXT"] = str(rank.files.context(rank.rank))


def _forget_fork_server() -> None:
    """Make this process look like one that was started by itself.

    A ``forkserver`` context of the script must not reuse the node agent's server: its children would not be under the
    write guard. Closing the server's pipe lets it end with the agent, and the ranks with it.
    """
    server: Any = multiprocessing.forkserver._forkserver
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
    server._forkserver_address = server._forkserver_alive_fd = server._forkserver_pid = server._inherited_fds = None
    multiprocessing.forkserver.set_forkserver_preload([])
    # A process that multiprocessing started has its own start method as default: loader workers would not be forked.
    multiprocessing.set_start_method(None, force=True)
    multiprocessing.process._parent_process = None  # type: ignore[attr-defined]
    multiprocessing.process.current_process().name = "MainProcess"
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()  # its state was drawn once, in the fork server; python's own reseeds in a fork


def _guard(rank: _Rank) -> None:
    shared = rank.project
    if rank.spec.other_ranks == "scratch":
        rank.project = rank.files.private_project(rank.rank)
    if rank.spec.guard is not None:
        apply_guard(rank.spec.guard, shared)
        if rank.spec.guard == "landlock":
            # Nothing can be created directly in a folder on the path to the project, which may be the temporary one.
            os.environ["TMPDIR"] = str(rank.files.scratch / "tmp")
        rank.notice = WriteNotice(rank.rank, shared)
        rank.notice.install()


def _set_up_torch(rank: _Rank) -> None:
    from taas_tasks.launch.emulation import keep_groups_alive, run_nccl_as_gloo

    keep_groups_alive()
    if rank.spec.emulate_gpus:
        run_nccl_as_gloo(rank=rank.rank, flavor=rank.spec.flavor)
    progress.begin(rank.files.progress(rank.rank))
    _count_optimizer_steps(rank.files.first_step(rank.rank))
    _count_elements_of_loaders()
    stacks.answer(rank.files.stacks(rank.rank))


def _count_optimizer_steps(first_step: Path) -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook

    is_noted = first_step.exists()  # a restarted gang keeps the first of all

    def count(*_: Any) -> None:
        nonlocal is_noted
        progress.note_optimizer_step()
        if not is_noted:
            is_noted = True
            write_json(first_step, repr(time.time()))

    # It stays: one that took itself away while torch goes through the hooks would break a script that has some too.
    register_optimizer_step_post_hook(count)


def _count_elements_of_loaders() -> None:
    """Count what plain DataLoaders yield, as validation on rank 0 does; delivered ones have counters of their own."""
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    original = _BaseDataLoaderIter.__next__

    @functools.wraps(original)
    def counted(self: Any) -> Any:
        element = original(self)
        progress.note()
        return element

    _BaseDataLoaderIter.__next__ = counted  # type: ignore[method-assign]


def _run(rank: _Rank) -> None:
    install(rank.files.context(rank.rank))
    if rank.spec.script is not None:
        run_script(rank.project, rank.spec.script, rank.spec.args)
        return
    import taas

    cell = open_cell(Path(str(rank.spec.cell_path)), str(rank.spec.cell_sha256))
    run_cell(rank.project, cell, loader=taas.loader)


def _close(rank: _Rank) -> None:
    """Do what the interpreter does when a script ends, short of freeing its objects."""
    threading._shutdown()  # type: ignore[attr-defined]  # joins threads that are not daemons: they may save a checkpoint
    rank.files.closing(rank.rank).touch()  # from here the node agent bounds the time
    atexit._run_exitfuncs()


def _leave_by_exit(rank: _Rank, leaving: SystemExit) -> None:
    if leaving.code is None or leaving.code == 0:
        with contextlib.suppress(Exception):
            _close(rank)
        return
    if not isinstance(leaving.code, int):
        sys.stderr.write(f"{leaving.code}\n")
    code = leaving.code & 0xFF if isinstance(leaving.code, int) else 1
    if code == 0:
        return
    _fail(rank, leaving, exit_code=code)


def _succeed(rank: _Rank) -> None:
    _flush()
    report = EndReport(rank=rank.rank, ended_at=time.time())
    write_json(rank.files.end(rank.rank), report.model_dump_json())
    say_end_of_connections()
    while not rank.files.release.exists():
        time.sleep(0.05)
    os._exit(0)


def _fail(rank: _Rank, error: BaseException, *, exit_code: int) -> None:
    failed_at = time.time()
    frames = _users_frames(error.__traceback__, rank)
    if not isinstance(error, SystemExit):
        _show(error, frames)
    report = ErrorReport(
        rank=rank.rank,
        exit_code=exit_code,
        error_class=_class_of(error),
        message=_message(error, rank.notice),
        traceback_tail="".join(traceback.format_exception(type(error), error, frames))[-_TAIL_CHARS:],
        failed_at=failed_at,
    )
    _flush()
    write_json(rank.files.error(rank.rank), report.model_dump_json())
    with contextlib.suppress(Exception):  # the node agent has the report and bounds the time
        atexit._run_exitfuncs()
    _flush()
    os._exit(exit_code)


def _show(error: BaseException, frames: TracebackType | None) -> None:
    """Print the traceback; by ``traceback``, as the interpreter's own hook does not know a cell's lines."""
    if sys.excepthook is sys.__excepthook__:
        traceback.print_exception(type(error), error, frames)
    else:
        sys.excepthook(type(error), error, frames)


def _users_frames(found: TracebackType | None, rank: _Rank) -> TracebackType | None:
    """Return the traceback from the user's first frame on; the whole of it where none is the user's."""
    step = found
    while step is not None:
        name = step.tb_frame.f_code.co_filename
        if name == CELL_NAME or name.startswith(f"{rank.project}{os.sep}"):
            return step
        step = step.tb_next
    return found


def _class_of(error: BaseException) -> str:
    names = [kind.__name__ for kind in type(error).__mro__]
    return (
        LAUNCH
        if "ValidationError" in names and "pydantic" in type(error).__module__
        else class_of_exception(names, str(error))
    )


def _message(error: BaseException, notice: WriteNotice | None) -> str:
    if isinstance(error, SystemExit):
        return f"the script called sys.exit({error.code!r})"
    text = f"{type(error).__name__}: {error}"[:2000]
    why = notice.explain(error) if notice is not None else None
    return f"{text} {why}" if why else text


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    flush_c_streams()
