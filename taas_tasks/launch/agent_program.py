"""The node agent: one process per host that takes a training from the project's snapshot to a ``NodeResult``.

Started by the supervisor as ``python -m taas_tasks.launch.agent_program INPUT.json``; leaves ``outcome.json`` beside
its input. Nothing here imports torch before the fork server has begun to: the two imports run side by side.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from pydantic import ValidationError

from taas.errors import LaunchError, RunCancelled, TaasError
from taas_tasks.launch.files import write_json
from taas_tasks.launch.node import Node
from taas_tasks.program_values import AgentInput
from taas_tasks.store import ObjectStore, open_store

_log = logging.getLogger(__name__)


class _Told(BaseException):
    """A signal came; raised in the main thread so that everything that was started is ended on the way out."""


def run(input: AgentInput, store: ObjectStore) -> dict[str, Any]:
    """Run one node of the training and return ``{"node_result": key}``; the ``NodeResult`` is put either way.

    Raises:
        RankFailed: A rank of this node failed.
        PreflightFailed: The hosts are not fit.
        RunCancelled: A signal, or the run's abort object, stopped it.
        LaunchError: Another node failed, and this one stopped.
    """
    node = Node(input, store, host_env=dict(os.environ))
    try:
        with node:
            return node.run()
    except _Told as told:
        raise node.cancelled(str(told)) from None


def main(argv: list[str]) -> int:
    """Run the program of ``INPUT.json``; write ``outcome.json`` beside it. Returns 0 when the training succeeded."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("torch").setLevel(logging.WARNING)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _tell)
    # torch's agent would put its own handlers in the place of ours; it must be told some signal.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"
    path = Path(argv[0]).resolve()
    outcome = _outcome(path)
    write_json(path.with_name("outcome.json"), json.dumps(outcome))
    return 0 if outcome["ok"] else 1


def _tell(number: int, frame: FrameType | None) -> None:
    for again in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(again, signal.SIG_IGN)  # the way out is bounded; a second signal must not cut it short
    raise _Told(signal.Signals(number).name)


def _outcome(path: Path) -> dict[str, Any]:
    try:
        given = AgentInput.read(path)
        return {"ok": True, "result": run(given, open_store(given.store))}
    except TaasError as error:
        _log.error("%s", error)
        return {"ok": False, "error": error.to_dict()}
    except _Told as told:
        return {"ok": False, "error": RunCancelled(f"stopped by {told}").to_dict()}
    except ValidationError as error:
        return {"ok": False, "error": LaunchError(f"the node agent's input is wrong: {error}").to_dict()}
    except Exception as error:  # noqa: BLE001  # the last resort: whatever it is, an outcome is left
        _log.exception("the node agent failed")
        return {"ok": False, "error": LaunchError(f"the node agent failed: {type(error).__name__}: {error}").to_dict()}


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
