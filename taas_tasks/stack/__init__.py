"""The local stack: a real S3 server, PostgreSQL and Airflow's four processes below one folder, on loopback only."""

from __future__ import annotations

from taas_tasks.stack.stack import PartStatus, Stack, StackError

__all__ = ["PartStatus", "Stack", "StackError"]
