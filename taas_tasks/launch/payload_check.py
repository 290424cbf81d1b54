"""Do a run's payloads open on this host? Tried in a process of its own, before any rank starts or a GPU is touched.

For payloads that no ``inspect`` has opened: loaders that ranks use as they are, and captured cells. Says what is wrong
with the user's own traceback, and with both versions where the payload was made with others.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from taas.errors import TaasError
from taas_tasks.launch.aside import Aside, AsideFailed
from taas_tasks.launch.files import RankFiles
from taas_tasks.launch.script import add_python_path, open_cell
from taas_tasks.values import LaunchPlan

_TIMEOUT_S = 120.0


def payload_findings(
    plan: LaunchPlan, files: RankFiles, project: Path, *, check: Callable[[], None] = lambda: None
) -> list[str]:
    """Return why payloads of the run cannot be opened here; nothing is started where it has none."""
    if plan.cell_payload is None and not plan.plain_payloads:
        return []
    with Aside(open_all, plan.model_dump_json(), files, project, folder=files.scratch, name="payloads") as aside:
        try:
            return list(json.loads(aside.wait(timeout_s=_TIMEOUT_S, check=check)))
        except AsideFailed as failed:
            return [f"the payloads of the run cannot be opened here: {failed}"]


def open_all(plan_json: str, files: RankFiles, project: Path) -> str:
    """Open every payload as a rank would; return the findings as JSON."""
    from taas_tasks.prep.opening import enter_project

    plan = LaunchPlan.model_validate_json(plan_json)
    enter_project(project)
    add_python_path()
    found = [text for name in plan.plain_payloads if (text := _try_loader(plan, name, files))]
    if plan.cell_payload is not None and (text := _try_cell(files.cell, str(plan.cell_sha256))):
        found.append(text)
    return json.dumps(found)


def _try_loader(plan: LaunchPlan, name: str, files: RankFiles) -> str | None:
    from taas_tasks.prep.opening import open_payload

    key, sha256 = plan.plain_payloads[name]
    try:
        open_payload(files.payload(sha256).read_bytes(), key, sha256)
    except TaasError as error:
        return _told(f"loader '{name}'", error)
    return None


def _try_cell(path: Path, sha256: str) -> str | None:
    from taas_tasks.prep.elements import users_traceback

    try:
        open_cell(path, sha256)
    except TaasError as error:
        return _told("the captured cell", error)
    except Exception as error:  # noqa: BLE001  # unpickling runs the user's code
        return f"the captured cell cannot be opened here: {type(error).__name__}: {error}\n{users_traceback(error)}"
    return None


def _told(what: str, error: TaasError) -> str:
    traceback = error.fields.get("traceback")
    return f"{what}: {error.message}" + (f"\n{traceback}" if traceback else "")
