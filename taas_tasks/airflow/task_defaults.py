"""What all tasks share: when one is tried again, and what one that has failed for good leaves behind."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from airflow.sdk import ExceptionRetryPolicy, RetryAction, RetryRule

from taas.errors import TaasError
from taas_tasks.airflow.scope import scope_of

_DELAY = timedelta(seconds=3)


def _retryable(kind: type[TaasError]) -> list[type[TaasError]]:
    found = [kind] if kind.retryable else []
    return found + [deeper for child in kind.__subclasses__() for deeper in _retryable(child)]


def retry_policy() -> ExceptionRetryPolicy:
    """Return the policy that the errors' own ``retryable`` spells: a user's mistake fails at once.

    Errors that are not ours (Airflow's, the network's) follow the task's retries.
    """
    rules = [
        RetryRule(exception=list(_retryable(TaasError)), action=RetryAction.RETRY, reason="a retry can help"),
        RetryRule(exception=TaasError, action=RetryAction.FAIL, reason="a retry cannot help"),
    ]
    return ExceptionRetryPolicy(rules=rules)


def last_words(error: BaseException | str | None) -> str:
    """Return what people are told of a failure: its message, and the user's own traceback where one came with it."""
    if not isinstance(error, TaasError):
        return str(error or "")
    return "\n".join([error.message, *filter(None, [str(error.fields.get("traceback") or "").rstrip()])])


def leave_last_words(context: Mapping[str, Any]) -> None:
    """Failure callback: write why the task failed for good where ``report`` finds it."""
    from taas_tasks.airflow.deployment import read_store_config
    from taas_tasks.store import open_store

    scope = scope_of(context)
    words = last_words(context.get("exception"))
    if words:
        open_store(read_store_config()).put(scope.keys.last_words(scope.state_name), words.encode())


TASK_DEFAULTS: dict[str, Any] = {
    "retries": 3,
    "retry_delay": _DELAY,
    "retry_policy": retry_policy(),
    "on_failure_callback": leave_last_words,
}
