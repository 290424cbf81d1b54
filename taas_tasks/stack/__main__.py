"""The command: ``python -m taas_tasks.stack up|down|status|env [--root var/stack]``."""

from __future__ import annotations

import argparse
import json
import logging
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from taas.errors import TaasError
from taas_tasks.compute.inventory import Inventory
from taas_tasks.stack.stack import Stack, StackError


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="taas", description=__doc__)
    parser.add_argument("command", choices=["up", "down", "status", "env"])
    parser.add_argument("--root", type=Path, default=Path("var/stack"), help="the folder of everything (var/stack)")
    parser.add_argument("--hosts-gpu", type=int, default=4, help="emulated g2.8 machines (4)")
    parser.add_argument("--hosts-cpu", type=int, default=8, help="emulated c1.4 machines (8)")
    parser.add_argument(
        "--inventory",
        type=Path,
        help="JSON of the hosts, instead of emulated ones; their connections (type ssh) are"
        " Airflow's own, or AIRFLOW_CONN_... variables of this command's environment",
    )
    parser.add_argument(
        "--s3-address", help="an address of this machine where the hosts reach the S3 server (127.0.0.1)"
    )
    parser.add_argument("--dags", type=Path, help="another DAG folder")
    parser.add_argument("--plugins", type=Path, help="another plugins folder")
    parser.add_argument("--json", action="store_true", help="status as JSON")
    return parser.parse_args(argv)


def main(argv: list[str], env: Mapping[str, str]) -> int:
    """Run one command; return the exit code: 0 when everything is as asked, 1 when not."""
    asked = _arguments(argv)
    # An Airflow set up elsewhere must not show through.
    clean = {name: value for name, value in env.items() if not name.startswith(("AIRFLOW", "TAAS_"))}
    try:
        inventory = _read_inventory(asked.inventory) if asked.inventory else None
        stack = Stack(
            asked.root,
            hosts_gpu=asked.hosts_gpu,
            hosts_cpu=asked.hosts_cpu,
            inventory=inventory.model_dump(exclude_defaults=True) if inventory else None,
            connections=_connections(inventory, env) if inventory else None,
            s3_address=asked.s3_address,
            dags=asked.dags,
            plugins=asked.plugins,
            env=clean,
        )
        return {"up": _up, "down": _down, "status": _status, "env": _env}[asked.command](stack, asked)
    except TaasError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201 - a command
        return 1


def _read_inventory(path: Path) -> Inventory:
    try:
        return Inventory.parse(path.read_text())
    except OSError as error:
        raise StackError(f"the inventory {path} cannot be read: {error.strerror}") from error


def _connections(inventory: Inventory, env: Mapping[str, str]) -> dict[str, str]:
    """Return the connections to the hosts that are in our environment; others Airflow may have in its database."""
    names = {f"AIRFLOW_CONN_{host.connection_id.upper()}" for host in inventory.hosts if host.connection_id}
    return {name: env[name] for name in sorted(names & env.keys())}


def _up(stack: Stack, _: argparse.Namespace) -> int:
    stack.up()
    user, password = stack.login
    print(f"Airflow  {stack.url}   user {user}, password {password}")  # noqa: T201 - a command
    print(f"S3       {stack.store_config().endpoint_url}   bucket {stack.store_config().bucket}")  # noqa: T201
    print(f"Files    {stack.files.root}")  # noqa: T201
    return 0


def _down(stack: Stack, _: argparse.Namespace) -> int:
    if stack.files.state.exists():
        stack.down()
    print("stopped")  # noqa: T201 - a command
    return 0


def _env(stack: Stack, _: argparse.Namespace) -> int:
    """Print the environment in which Airflow's own commands work on this stack: ``eval "$(taas env)"``."""
    for name, value in stack.environment().items():
        if name.startswith("AIRFLOW"):
            print(f"export {name}={shlex.quote(value)}")  # noqa: T201 - a command
    return 0


def _status(stack: Stack, asked: argparse.Namespace) -> int:
    found = stack.status()
    if asked.json:
        print(json.dumps([asdict(part) for part in found], indent=1))  # noqa: T201 - a command
    else:
        for part in found:
            print(f"{part.name:14} {part.pid or '-':>8}  {part.problem or 'healthy'}")  # noqa: T201 - a command
    return 0 if all(part.problem is None for part in found) else 1


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    sys.exit(main(sys.argv[1:], os.environ))
