"""Recognising values that should not be written in clear text: a run's conf is shown to everyone who sees the run."""

from __future__ import annotations

import re

_SHAPES: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("an AWS access key", re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b")),
    ("a GitHub token", re.compile(r"\b(?:gh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,})")),
    ("a GitLab token", re.compile(r"\bglpat-[A-Za-z0-9_-]{20,}")),
    ("a Hugging Face token", re.compile(r"\bhf_[A-Za-z0-9]{20,}")),
    ("a Slack token", re.compile(r"\bxox[abeoprs]-[A-Za-z0-9-]{10,}")),
    ("a Google API key", re.compile(r"\bAIza[A-Za-z0-9_-]{35}")),
    ("an API key", re.compile(r"\bsk-[A-Za-z0-9_-]{20,}")),
    ("a JSON web token", re.compile(r"\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*")),
    ("a private key", re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----")),
    ("a URL with a password", re.compile(r"://[^/\s:@]+:[^/\s@]+@")),
)
_SECRET_NAME = re.compile(
    r"(?:^|_)(?:TOKEN|SECRET|KEY|KEY_ID|APIKEY|API_?KEY|PASSWD|PASSPHRASE|CREDENTIALS?)$|PASSWORD(?!.*_(?:FILE|PATH)$)"
)
_HARMLESS = frozenset({"", "0", "1", "true", "false", "yes", "no", "on", "off", "none"})
_OPAQUE = re.compile(r"[A-Za-z0-9+/=_-]{32,}")
_WORD = re.compile(r"[A-Z]?[a-z]{3,}")
_KINDS = (re.compile(r"[a-z]"), re.compile(r"[A-Z]"), re.compile(r"[0-9]"))
_FILE_PATH = re.compile(r"\.{0,2}/")


def known_secret(value: str) -> str | None:
    """Return what kind of secret a text holds, when it has the shape of a well-known one, else None."""
    return next((kind for kind, shape in _SHAPES if shape.search(value)), None)


def secret_reason(name: str, value: str) -> str | None:
    """Return why a variable looks like a secret, in a few words, or None when it does not.

    A name that ends in TOKEN, SECRET, KEY and the like counts unless its value is empty, a switch (``true``, ``0``) or
    a path.
    """
    kind = known_secret(value)
    if kind:
        return f"its value looks like {kind}"
    if _SECRET_NAME.search(name.upper()) and value.lower() not in _HARMLESS and not _FILE_PATH.match(value):
        return "its name says that it is a secret"
    return "its value looks like a token" if _is_opaque(value) else None


def _is_opaque(value: str) -> bool:
    # Words cover a fifth of a random base-62 text (half of one in 2 % of those of 32 characters), but most of a name.
    if not _OPAQUE.fullmatch(value) or _FILE_PATH.match(value):
        return False
    in_words = sum(len(word) for word in _WORD.findall(value))
    return all(kind.search(value) for kind in _KINDS) and in_words < 0.5 * len(value)
