"""The command ``taas``: the local stack, requests, runs and projects from a terminal.

Exit codes: 0 it worked (with ``--follow``: the run succeeded); 1 it did not (the run failed, or Airflow or the store
could not be reached or refused); 2 a mistake in the command or the request; 130 interrupted.
"""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from taas.errors import ClientError, RegisterError, RequestError, TaasError

if TYPE_CHECKING:
    from taas.client import Client
    from taas.run import Run

OK, FAILED, MISTAKE, INTERRUPTED = 0, 1, 2, 130
_STACK_VERBS = ("up", "down", "status", "env")


def main(argv: Sequence[str] | None = None, *, connect: Callable[[], Client] | None = None) -> int:
    """Run the command and return its exit code; every failure is a line on standard error.

    Args:
        argv: The command's words; those of the process by default.
        connect: Gives the client (by default that of the environment and the user's files).
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments[:1] and arguments[0] in _STACK_VERBS:
            return _stack(arguments)
        parsed = _parser().parse_args(arguments, argparse.Namespace(connect=connect or _default_client))
        result: int = parsed.action(parsed)
    except (RequestError, RegisterError) as error:
        return _complain(error.message, MISTAKE)
    except TaasError as error:
        return _complain(error.message, FAILED)
    except KeyboardInterrupt:
        return _complain("interrupted", INTERRUPTED)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output left; do not complain at exit
        return FAILED
    except SystemExit as end:  # argparse: 0 after --help, 2 after a mistake
        return int(end.code or 0)
    return result


def _complain(message: str, code: int) -> int:
    for line in message.splitlines() or [""]:
        _say(f"taas: {line}", sys.stderr)
    return code


def _say(text: str, stream: TextIO | None = None, *, end: str = "\n") -> None:
    stream = stream or sys.stdout
    stream.write(text + end)
    stream.flush()


class _Parser(argparse.ArgumentParser):
    """Says a mistake in one line, with the nearest known word, instead of the whole usage."""

    def error(self, message: str) -> NoReturn:
        wrong = re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message)
        if wrong:
            known = re.findall(r"'([^']*)'", wrong[2])
            message = f"unknown command '{wrong[1]}'; known: {', '.join(known)}.{_nearest(wrong[1], known)}"
        raise SystemExit(_complain(f"{message.rstrip('.')}. See: {self.prog} --help", MISTAKE))


def _nearest(word: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f" Did you mean '{close[0]}'?" if close else ""


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="taas", description="Distributed training as a service.", epilog=_epilog(), allow_abbrev=False
    )
    verbs = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", parser_class=_Parser)
    for verb, text in (
        ("up", "start the local stack"),
        ("down", "stop it"),
        ("status", "say how it is"),
        ("env", "print its environment, for Airflow's own commands"),
    ):
        verbs.add_parser(verb, help=text, add_help=False)
    _add_request_verbs(verbs)
    _add_run_verbs(verbs)
    _add_project_verbs(verbs)
    return parser


def _epilog() -> str:
    return "exit codes: 0 it worked; 1 it or the run failed; 2 a mistake in the command or the request; 130 interrupted"


def _add_request_verbs(verbs: Any) -> None:
    check = verbs.add_parser("check", help="name every fault of a request, without sending it")
    check.add_argument("request", help="JSON file, or - for standard input")
    check.add_argument("--flavors", type=Path, help="the site's flavors (TOML)")
    check.set_defaults(action=_check)
    schema = verbs.add_parser("schema", help="print every field of a request, as a JSON schema")
    schema.add_argument("--flavors", type=Path, help="the site's flavors (TOML)")
    schema.set_defaults(action=_schema)
    submit = verbs.add_parser("submit", help="start a run")
    submit.add_argument("request", help="JSON file, or - for standard input")
    submit.add_argument("--follow", action="store_true", help="print its progress; end with 0 or 1 as the run does")
    submit.add_argument("--run-id", help="id of the run: doing it twice with the same id starts one run")
    submit.add_argument("--json", action="store_true", help="print one JSON object on standard output")
    submit.set_defaults(action=_submit)


def _add_run_verbs(verbs: Any) -> None:
    runs = verbs.add_parser("runs", help="list the latest runs")
    runs.add_argument("--limit", type=int, default=20)
    runs.add_argument("--json", action="store_true")
    runs.set_defaults(action=_runs)
    for verb, text, action in (
        ("follow", "print the progress of a run", _follow_verb),
        ("cancel", "stop a run", _cancel),
    ):
        one = verbs.add_parser(verb, help=text)
        one.add_argument("run")
        one.set_defaults(action=action)
    report = verbs.add_parser("report", help="print the report of a run")
    report.add_argument("run")
    report.add_argument("--json", action="store_true")
    report.set_defaults(action=_report)
    logs = verbs.add_parser("logs", help="print what the ranks wrote, each line with its host and rank")
    logs.add_argument("run")
    logs.add_argument("--rank", type=int, help="only this rank, as it wrote")
    logs.add_argument("--follow", action="store_true", help="go on while it runs")
    logs.set_defaults(action=_logs)
    artifacts = verbs.add_parser("artifacts", help="write what rank 0 of a run wrote into a folder")
    artifacts.add_argument("run")
    artifacts.add_argument("folder", type=Path)
    artifacts.set_defaults(action=_artifacts)


def _add_project_verbs(verbs: Any) -> None:
    project = verbs.add_parser("project", help="files of a project: put, get, ls")
    actions = project.add_subparsers(required=True, metavar="put|get|ls", parser_class=_Parser)
    put = actions.add_parser("put", help="upload a folder's new and changed files as one record")
    put.add_argument("project")
    put.add_argument("folder", type=Path)
    put.add_argument("--delete", action="store_true", help="remove the project's files that the folder lacks")
    put.set_defaults(action=_project_put)
    get = actions.add_parser("get", help="write the project's files into a folder")
    get.add_argument("project")
    get.add_argument("folder", type=Path)
    get.add_argument("--overwrite", action="store_true", help="replace files that differ")
    get.set_defaults(action=_project_get)
    listing = actions.add_parser("ls", help="list the project's files")
    listing.add_argument("project")
    listing.add_argument("--json", action="store_true")
    listing.set_defaults(action=_project_ls)


def _stack(arguments: Sequence[str]) -> int:
    """Hand over to the engine's own command, which is another package."""
    if importlib.util.find_spec("taas_tasks") is None:
        return _complain(f"'taas {arguments[0]}' needs the package taas_tasks, which is not installed here", FAILED)
    return subprocess.call([sys.executable, "-m", "taas_tasks.stack", *arguments])


def _default_client() -> Client:
    from taas.run import default_client

    return default_client()


def _attached(parsed: argparse.Namespace) -> Run:
    from taas.run import attach

    return attach(parsed.run, client=parsed.connect())


def _read_conf(source: str) -> Any:
    from taas.request import conf_from_json

    try:
        text = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
    except OSError as error:
        raise RequestError(f"cannot read {source}: {error.strerror or error}") from error
    try:
        return conf_from_json(text)
    except RequestError as error:
        raise RequestError(f"{source}: {error.message}", **error.fields) from None


def _check(parsed: argparse.Namespace) -> int:
    from taas.flavors import load_flavors
    from taas.request import parse_request, request_digest

    request = parse_request(_read_conf(parsed.request), flavors=load_flavors(parsed.flavors))
    _say(f"{parsed.request}: no faults (digest {request_digest(request)[:12]})")
    return OK


def _schema(parsed: argparse.Namespace) -> int:
    from taas.flavors import load_flavors
    from taas.request import request_schema

    _say(json.dumps(request_schema(flavors=load_flavors(parsed.flavors)), indent=2))
    return OK


def _submit(parsed: argparse.Namespace) -> int:
    from taas.run import submit

    run = submit(_read_conf(parsed.request), parsed.run_id, client=parsed.connect())
    if not parsed.json:
        _say(f"submitted run {run.run_id}: {run.url}")
    state, code = _follow(run, to_stderr=parsed.json) if parsed.follow else ("queued", OK)
    if parsed.json:
        _say(json.dumps({"run_id": run.run_id, "url": run.url, "state": state}))
    return code


def _follow_verb(parsed: argparse.Namespace) -> int:
    return _follow(_attached(parsed), to_stderr=False)[1]


def _follow(run: Run, *, to_stderr: bool) -> tuple[str, int]:
    """Print progress until the run is over; an interrupt leaves it running."""
    stream = sys.stderr if to_stderr else sys.stdout
    try:
        state = run.wait(on_line=lambda line: _say(line, stream), poll_s=1.0)
    except KeyboardInterrupt:
        message = f"no longer following; run {run.run_id} goes on. Stop it: taas cancel {run.run_id}"
        return "running", _complain(message, INTERRUPTED)
    if state == "failed" and (verdict := _verdict(run)):
        _say(verdict, stream)
    _say(f"run {run.run_id}: {state}. Its report: taas report {run.run_id}", stream)
    return state, OK if state == "success" else FAILED


def _verdict(run: Run) -> str | None:
    """Return why the run failed, as far as it left a report."""
    try:
        return run.report().get("verdict")
    except ClientError:
        return None


def _runs(parsed: argparse.Namespace) -> int:
    from taas.run import runs

    found = runs(limit=parsed.limit, client=parsed.connect())
    if parsed.json:
        fields = [{"run_id": r.run_id, "state": r.state_when_listed, "started_at": r.started_at} for r in found]
        _say(json.dumps(fields))
        return OK
    for run in found:
        _say(f"{run.run_id}  {run.state_when_listed}  {run.started_at or ''}".rstrip())
    return OK


def _report(parsed: argparse.Namespace) -> int:
    from taas.report_text import report_text

    report = parsed.connect().report(parsed.run)
    _say(json.dumps(report, indent=2) if parsed.json else report_text(report))
    return OK


def _logs(parsed: argparse.Namespace) -> int:
    has_text = False
    for text in _attached(parsed).follow_logs(rank=parsed.rank, until_now=not parsed.follow):
        has_text = True
        _say(text, end="")
    whose = "its ranks" if parsed.rank is None else f"rank {parsed.rank}"
    return OK if has_text else _complain(f"run {parsed.run} has no log of {whose} yet", FAILED)


def _artifacts(parsed: argparse.Namespace) -> int:
    from taas.project_files import get_artifacts

    files = get_artifacts(parsed.connect(), parsed.run, parsed.folder)
    for file in files:
        _say(f"{file.sha256[:12]}  {file.bytes:>12}  {file.path}")
    _say(f"{len(files)} file(s) of run {parsed.run} in {parsed.folder}")
    return OK


def _cancel(parsed: argparse.Namespace) -> int:
    before = _attached(parsed).cancel()
    over = before in ("success", "failed")
    _say(f"run {parsed.run} is over already: {before}" if over else f"run {parsed.run} is being stopped")
    return OK


def _project_put(parsed: argparse.Namespace) -> int:
    from taas.project_files import put_folder

    done = put_folder(parsed.connect(), parsed.project, parsed.folder, delete=parsed.delete)
    removed = f", {done.num_removed} removed" if done.num_removed else ""
    if done.num_changed or done.num_removed:
        _say(f"project {parsed.project}: record {done.record}, {done.num_changed} file(s) new or changed{removed}")
    else:
        _say(f"project {parsed.project}: nothing changed since record {done.record}")
    return OK


def _project_get(parsed: argparse.Namespace) -> int:
    from taas.project_files import get_project

    written = get_project(parsed.connect(), parsed.project, parsed.folder, overwrite=parsed.overwrite)
    _say(f"project {parsed.project}: {written} file(s) written to {parsed.folder}")
    return OK


def _project_ls(parsed: argparse.Namespace) -> int:
    head = parsed.connect().project_files(parsed.project)
    if parsed.json:
        files = [file.to_change() for file in head.files.values()]
        _say(json.dumps({"record": head.record, "snapshot": head.snapshot, "files": files}))
        return OK
    for file in head.files.values():
        _say(f"{file.sha256[:12]}  {file.bytes:>12}  {file.path}")
    _say(f"{len(head.files)} file(s), record {head.record}")
    return OK


if __name__ == "__main__":
    sys.exit(main())
