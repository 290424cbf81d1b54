"""What makes a request impossible although each field is well-formed: one small rule per kind of fault.

A rule looks at a ``Draft``: values that passed the model (``request``) and what was given (``given``), so that one
faulty field does not hide the faults of the others. The table at the end names the fields that a rule takes from
``request``: it is passed over when one of them is faulty. Rules about single items look at ``given`` and pass over what
has the wrong type.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from taas.flavors import Flavor, flavor_fault, gpus_fault
from taas.request_faults import Fault, fault_path, show
from taas.secret_shapes import known_secret, secret_reason

if TYPE_CHECKING:
    from taas.request import TrainRequest

ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
LOADER_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
RESERVED_ENV = frozenset(
    [
        *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "NODE_RANK", "ROLE_NAME"),
        *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
        *("MASTER_ADDR", "MASTER_PORT"),
    ]
)
RESERVED_PREFIXES = ("TAAS_", "TORCHELASTIC_")
_DEEPEST = 4
_REFERENCE = re.compile(r"(?:conn|var):taas/(?P<project>[^/]+)/(?P<name>[A-Za-z0-9_.-]+)")


@dataclass(frozen=True)
class Draft:
    """A request that is being checked. Fields named in ``bad`` are at their defaults in ``request``."""

    request: TrainRequest
    given: Mapping[str, Any]
    bad: frozenset[str]
    flavors: Mapping[str, Flavor]

    def items(self, name: str) -> Iterator[tuple[str, str]]:
        """Yield the well-typed items of an object of strings, as given."""
        value = self.given.get(name)
        for key, item in value.items() if isinstance(value, Mapping) else ():
            if isinstance(key, str) and isinstance(item, str):
                yield key, item

    def texts(self, name: str) -> Iterator[tuple[str, str]]:
        """Yield path and text of the well-typed items of a list of strings, as given."""
        value = self.given.get(name)
        for number, item in enumerate(value if isinstance(value, list | tuple) else ()):
            if isinstance(item, str):
                yield f"{name}[{number}]", item

    @property
    def loaders(self) -> Mapping[str, Any]:
        """The loaders as given, those with a name that is a string."""
        value = self.given.get("loaders")
        return {k: v for k, v in value.items() if isinstance(k, str)} if isinstance(value, Mapping) else {}

    @property
    def has_units(self) -> bool:
        """Whether something says how many elements are extracted."""
        own = (ref.get("units") for ref in self.loaders.values() if isinstance(ref, Mapping))
        return "units" in self.given or any(units is not None for units in own)


Rule = Callable[[Draft], Iterator[Fault]]


def rule_faults(draft: Draft) -> list[Fault]:
    """Return the faults that the rules find, in the rules' order."""
    return [fault for needs, rule in _RULES if not draft.bad & needs for fault in rule(draft)]


def _text_faults(draft: Draft) -> Iterator[Fault]:
    """Every text can be an argument or environment variable, and be written as UTF-8."""
    for loc, text in _walk((), draft.given):
        if "\x00" in text:
            yield Fault(fault_path(loc), "holds a NUL character; allowed: text without. Remove it")
        elif not _is_unicode(text):
            yield Fault(fault_path(loc), "holds half of a surrogate pair; allowed: valid Unicode. Remove it")


def _walk(loc: tuple[str | int, ...], value: Any) -> Iterator[tuple[tuple[str | int, ...], str]]:
    if isinstance(value, str):
        yield loc, value
    elif len(loc) >= _DEEPEST:  # nothing in a request is that deep: it is a fault of another kind
        return
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _walk((*loc, str(key)), item)
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _walk((*loc, number), item)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _flavor_rule(draft: Draft) -> Iterator[Fault]:
    reason = flavor_fault(draft.request.flavor, draft.flavors)
    if reason:
        yield Fault("flavor", reason)


def _gpus_rule(draft: Draft) -> Iterator[Fault]:
    flavor = draft.flavors.get(draft.request.flavor)
    reason = gpus_fault(flavor, draft.request.gpus) if flavor and flavor.is_gpu else None
    if reason:
        default = "" if "gpus" in draft.given else " (8 is the default)"
        yield Fault("gpus", reason + default)


def _program_rule(draft: Draft) -> Iterator[Fault]:
    has_script, has_cell = "script" in draft.given, "cell" in draft.given
    if has_script and has_cell:
        yield Fault("script", "got both script and cell; allowed: one of them. Remove script or cell")
    if not has_script and not has_cell:
        message = 'got neither script nor cell; allowed: one of them. Add e.g. "script": "train.py"'
        yield Fault("script", message)
    if has_cell and not has_script and draft.given.get("args"):
        yield Fault("args", "got arguments for a cell; allowed: only with script. Remove args")


def _script_rule(draft: Draft) -> Iterator[Fault]:
    script = draft.given.get("script")
    reason = _path_reason(script) if isinstance(script, str) else None
    if reason:
        yield Fault("script", f'got {show(script)}, {reason}; allowed: a path in the project like "train.py"')


def _path_reason(path: str) -> str | None:
    if not path.strip():
        return "which is empty"
    if path.startswith(("/", "~")) or re.match(r"[A-Za-z]:", path):
        return "which is absolute"
    if "\\" in path:
        return "which holds a backslash (write /)"
    parts = path.split("/")
    if ".." in parts:
        return "which leaves the project by '..'"
    return "which has an empty or '.' part" if any(part in ("", ".") for part in parts) else None


def _cpus_and_units(draft: Draft) -> Iterator[Fault]:
    has_cpus = "cpus" in draft.given
    if has_cpus and not draft.has_units:
        yield Fault("units", "is missing while cpus is given; allowed: both or neither. Add units, or remove cpus")
    if draft.has_units and not has_cpus:
        yield Fault(
            "cpus", "is missing while units is given; allowed: both or neither. Add cpus (1 to 8), or remove units"
        )
    if draft.has_units and "loaders" not in draft.bad and not draft.loaders:
        message = (
            "is missing while units is given: there is nothing to extract from. Add e.g. "
            '{"data_loader": "data.py:make_loader"}, or taas.register a loader before taas.submit'
        )
        yield Fault("loaders", message)


def _own_units(draft: Draft) -> Iterator[Fault]:
    """Where only some loaders carry their own number, the others lack one."""
    if not draft.has_units or "units" in draft.given:
        return
    for name, ref in draft.loaders.items():
        if not isinstance(ref, Mapping) or ref.get("units") is None:
            yield Fault(f"loaders.{name}", "has no number of units; add its own units, or units for all loaders")


def _loader_names(draft: Draft) -> Iterator[Fault]:
    for name in draft.loaders:
        if not LOADER_NAME.fullmatch(name) or keyword.iskeyword(name):
            allowed = "a Python variable's name of at most 64 ASCII letters, digits and '_'"
            yield Fault(f"loaders.{name}", f"got the name {show(name)}; allowed: {allowed}")


def _loader_refs(draft: Draft) -> Iterator[Fault]:
    for name, ref in draft.loaders.items():
        path = f"loaders.{name}"
        if isinstance(ref, str):
            yield from _source_faults(path, ref)
        elif isinstance(ref, Mapping):
            keys = {key for key in ("source", "payload", "sha256") if ref.get(key) is not None}
            yield from _shape_faults(path, keys)
            if isinstance(ref.get("source"), str):
                yield from _source_faults(f"{path}.source", ref["source"])


def _shape_faults(path: str, keys: set[str]) -> Iterator[Fault]:
    if keys not in ({"source"}, {"payload", "sha256"}):
        got = " and ".join(sorted(keys)) or "neither source nor payload"
        yield Fault(path, f"got {got}; allowed: either source, or payload and sha256 together")


def _source_faults(path: str, source: str) -> Iterator[Fault]:
    allowed = 'a file of the project and a name in it, like "data.py:make_loader"'
    file, colon, name = source.rpartition(":")
    if not colon or not file.endswith(".py") or not name.isidentifier() or keyword.iskeyword(name):
        yield Fault(path, f"got {show(source)}; allowed: {allowed}")
        return
    reason = _path_reason(file)
    if reason:
        yield Fault(path, f"got the file {show(file)}, {reason}; allowed: {allowed}")


def _payload_keys(draft: Draft) -> Iterator[Fault]:
    refs = {f"loaders.{name}.payload": ref for name, ref in draft.loaders.items()}
    for path, ref in {**refs, "cell.payload": draft.given.get("cell")}.items():
        key = ref.get("payload") if isinstance(ref, Mapping) else None
        reason = _path_reason(key) if isinstance(key, str) else None
        if reason:
            yield Fault(path, f"got {show(key)}, {reason}; allowed: the key that the upload gave")


def _start_rule(draft: Draft) -> Iterator[Fault]:
    start = draft.request.start
    if start == "auto":
        return
    if not draft.has_units:
        message = (
            f"got {show(start)} without cpus and units: nothing is prepared to wait for. Remove start, or add them"
        )
        yield Fault("start", message)
        return
    most = max((draft.request.units_of(name) or 0 for name in draft.request.loaders), default=0)
    if type(start) is int and start > most > 0:
        yield Fault("start", f'got {start} units; allowed: at most the {most} that are extracted, or "all"')


def _remainder_rule(draft: Draft) -> Iterator[Fault]:
    if draft.request.remainder != "drop":
        return
    for name in draft.request.loaders:
        units = draft.request.units_of(name)
        if units is not None and units < draft.request.gpus:
            message = (
                f'got "drop" with {units} units of {name} for {draft.request.gpus} ranks: no step is left; '
                f'allowed: at least {draft.request.gpus} units, or "pad"'
            )
            yield Fault("remainder", message)


def _env_names(draft: Draft) -> Iterator[Fault]:
    for field in ("env", "secrets"):
        for name, _ in draft.items(field):
            reason = _env_name_reason(name)
            if reason:
                yield Fault(f"{field}.{name}", reason)


def _env_name_reason(name: str) -> str | None:
    if not ENV_NAME.fullmatch(name):
        return f"got the name {show(name)}; allowed: letters, digits and '_', not beginning with a digit"
    if name in RESERVED_ENV or name.startswith(RESERVED_PREFIXES):
        return f"{name} is set by TaaS for each rank; allowed: other names. Remove it"
    return None


def _env_secrets(draft: Draft) -> Iterator[Fault]:
    project = draft.request.project if "project" not in draft.bad else "<project>"
    for name, value in draft.items("env"):
        reason = secret_reason(name, value)
        if reason:
            message = (
                f"looks like a secret ({reason}; not shown), and a run's conf is shown in clear text. Keep it in "
                f'Airflow and refer to it: "secrets": {{"{name}": "var:taas/{project}/{name.lower()}"}}'
            )
            yield Fault(f"env.{name}", message)


def _arg_secrets(draft: Draft) -> Iterator[Fault]:
    for path, text in draft.texts("args"):
        kind = known_secret(text)
        if kind:
            message = (
                f"holds what looks like {kind} (not shown), and a run's conf is shown in clear text. "
                "Give it to the script by an environment variable of 'secrets'"
            )
            yield Fault(path, message)


def _secret_references(draft: Draft) -> Iterator[Fault]:
    project = draft.request.project if "project" not in draft.bad else None
    for name, value in draft.items("secrets"):
        allowed = f'allowed: "conn:taas/{project or "<project>"}/<name>" or "var:taas/{project or "<project>"}/<name>"'
        match = _REFERENCE.fullmatch(value)
        if match is None:
            got = show(value) if value.startswith(("conn:", "var:")) else "a value that is no reference (not shown)"
            yield Fault(f"secrets.{name}", f"got {got}; {allowed}")
        elif project is not None and match["project"] != project:
            yield Fault(
                f"secrets.{name}", f"got a secret of project {match['project']!r}; {allowed} (the run's own project)"
            )


def _env_and_secrets(draft: Draft) -> Iterator[Fault]:
    env = {name for name, _ in draft.items("env")}
    for name, _ in draft.items("secrets"):
        if name in env:
            yield Fault(f"secrets.{name}", f"{name} is in env too; allowed: one of them. Remove it from env")


def _requirements_rule(draft: Draft) -> Iterator[Fault]:
    seen: dict[str, str] = {}
    for path, text in draft.texts("requirements"):
        reason = _requirement_reason(text)
        if reason:
            yield Fault(
                path, f'got {show(text)}: {reason}; allowed: a package pinned to one version like "einops==0.8.1"'
            )
            continue
        name = canonicalize_name(Requirement(text).name)
        if name in seen:
            yield Fault(path, f"got {show(text)}, but {seen[name]} names the package too; allowed: once")
        seen.setdefault(name, path)


def _requirement_reason(text: str) -> str | None:
    if text.lstrip().startswith("-"):
        return "pip's options are not allowed"
    if "://" in text or re.search(r"\s@\s|^[./]", text):
        return "addresses and files are not allowed"
    try:
        requirement = Requirement(text)
    except InvalidRequirement as error:
        return f"not a requirement ({str(error).splitlines()[0]})"
    pins = list(requirement.specifier)
    if len(pins) != 1 or pins[0].operator != "==" or pins[0].version.endswith(".*"):
        return "not pinned to one version by =="
    return None


_RULES: tuple[tuple[frozenset[str], Rule], ...] = (
    (frozenset(), _text_faults),
    (frozenset({"flavor"}), _flavor_rule),
    (frozenset({"flavor", "gpus"}), _gpus_rule),
    (frozenset(), _program_rule),
    (frozenset(), _script_rule),
    (frozenset(), _cpus_and_units),
    (frozenset(), _own_units),
    (frozenset(), _loader_names),
    (frozenset(), _loader_refs),
    (frozenset(), _payload_keys),
    (frozenset({"start", "units", "loaders"}), _start_rule),
    (frozenset({"remainder", "units", "gpus", "loaders"}), _remainder_rule),
    (frozenset(), _env_names),
    (frozenset(), _env_secrets),
    (frozenset(), _arg_secrets),
    (frozenset(), _secret_references),
    (frozenset(), _env_and_secrets),
    (frozenset(), _requirements_rule),
)
