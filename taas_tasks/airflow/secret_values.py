"""Resolving a request's secrets, in the Airflow task, just before the job starts.

The values go straight into the job's 0600 input. They are in no kwargs, XCom, log or object, and Airflow is told to
mask them wherever the task might print one.
"""

from __future__ import annotations

from collections.abc import Mapping

from taas.errors import RequestError


def split_reference(reference: str, *, project: str) -> tuple[str, str]:
    """Return kind (``conn`` or ``var``) and full name of a reference.

    Raises:
        RequestError: it is no reference, or leads outside ``taas/<project>/``.
    """
    kind, colon, name = reference.partition(":")
    prefix = f"taas/{project}/"
    if not colon or kind not in ("conn", "var") or not name.startswith(prefix) or ".." in name.split("/"):
        allowed = f'"conn:{prefix}<name>" or "var:{prefix}<name>"'
        message = f"got a reference outside the project's own names; allowed: {allowed}"
        raise RequestError(f"secrets: {message}", faults=[{"field": "secrets", "message": message}])
    return kind, name


def resolve_secrets(references: Mapping[str, str], *, project: str) -> dict[str, str]:
    """Return the values by environment variable: a variable's text, a connection as its URI.

    Raises:
        RequestError: names every reference that Airflow does not have.
    """
    found: dict[str, str] = {}
    faults: list[dict[str, str]] = []
    for variable, reference in references.items():
        kind, name = split_reference(reference, project=project)
        value = _connection(name) if kind == "conn" else _variable(name)
        if value is None:
            what = "connection" if kind == "conn" else "variable"
            faults.append({"field": f"secrets.{variable}", "message": f"Airflow has no {what} {name!r}; add it"})
        else:
            _mask(value)
            found[variable] = value
    if faults:
        raise RequestError("\n".join(f"{fault['field']}: {fault['message']}" for fault in faults), faults=faults)
    return found


def _connection(name: str) -> str | None:
    from airflow.sdk import Connection
    from airflow.sdk.exceptions import AirflowNotFoundException, AirflowRuntimeError

    try:
        return str(Connection.get(name).get_uri())
    except (AirflowNotFoundException, AirflowRuntimeError):
        return None


def _variable(name: str) -> str | None:
    from airflow.sdk import Variable

    value = Variable.get(name, default=None)
    return None if value is None else str(value)


def _mask(value: str) -> None:
    from airflow.sdk.log import mask_secret

    mask_secret(value)
