"""Where Airflow is and who asks: from the environment, a file of the user's, or that of the local stack."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from taas.errors import ClientError

STACK_FILE = Path("var/stack/client.toml")
"""What the local stack writes for its client, below the folder that it was started in."""

_KEYS = ("url", "username", "password", "token", "flavors")


@dataclass(frozen=True)
class ClientConfig:
    """Where Airflow is (``url``) and who asks: username and password, or a token. ``flavors_file`` is the site's."""

    url: str
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    flavors_file: Path | None = None


def read_config(environ: Mapping[str, str], *, files: Sequence[Path]) -> ClientConfig:
    """Return the configuration that the environment and the first of the files that exists give.

    ``TAAS_URL``, ``TAAS_USERNAME``, ``TAAS_PASSWORD``, ``TAAS_TOKEN`` and ``TAAS_FLAVORS`` go before the file's
    ``url``, ``username``, ... Credentials in a file are for the URL beside them only.

    Raises:
        ClientError: nothing says where Airflow is, or a file is not as it should be.
    """
    path = next((path for path in files if path.is_file()), None)
    from_file = _read_file(path) if path else {}
    from_env = {key: environ[f"TAAS_{key.upper()}"] for key in _KEYS if environ.get(f"TAAS_{key.upper()}")}
    if "url" in from_env and from_env["url"].rstrip("/") != str(from_file.get("url")).rstrip("/"):
        from_file = {}
    merged = {**from_file, **from_env}
    if "url" not in merged:
        listed = ", ".join(map(str, files))
        raise ClientError(
            f"nothing says where Airflow is: TAAS_URL is not set, and there is none of: {listed}. "
            "Start the local stack with 'taas up', or set TAAS_URL"
        )
    return _config(merged)


def entry_config(stack_file: Path | None = None) -> ClientConfig:
    """Return the configuration of this process: its environment, ``~/.config/taas.toml``, then the local stack's file.

    For entry points (the command line, a notebook) only.
    """
    stated = os.environ.get("TAAS_CONFIG")
    files = [Path(stated)] if stated else [Path.home() / ".config" / "taas.toml", stack_file or Path.cwd() / STACK_FILE]
    return read_config(os.environ, files=files)


def _config(merged: Mapping[str, str]) -> ClientConfig:
    url = merged["url"].rstrip("/")
    if not url.startswith(("http://", "https://")):
        raise ClientError(f"got the URL '{url}'; allowed: http://... or https://...")
    flavors = merged.get("flavors")
    return ClientConfig(
        url=url,
        username=merged.get("username"),
        password=merged.get("password"),
        token=merged.get("token"),
        flavors_file=Path(flavors) if flavors else None,
    )


def _read_file(path: Path) -> dict[str, str]:
    try:
        document: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ClientError(f"cannot read {path}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ClientError(f"{path} is not a TOML file: {error}") from error
    wrong = [key for key in _KEYS if not isinstance(document.get(key, ""), str)]
    if wrong:
        raise ClientError(f"{path}: {', '.join(wrong)}: allowed: text in quotes")
    return {key: document[key] for key in _KEYS if key in document}
