"""The training request: the conf JSON of one run, checked.

``TrainRequest`` holds the fields with their types, ranges and patterns; ``parse_request`` also checks what takes more
than one field, and reports every fault together. The JSON schema of the trigger form, the documentation and the client
is generated from the model (``request_schema``).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    PlainValidator,
    Strict,
    StrictBool,
    StrictInt,
    StrictStr,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError

from taas.flavors import FLAVORS, Flavor
from taas.request_faults import (
    Allowed,
    Fault,
    fault_path,
    mismatch_message,
    request_error,
    show,
    type_name,
    unknown_message,
)
from taas.request_rules import Draft, rule_faults

MAX_UNITS = 10**12
MAX_GPUS = 4096  # of any flavor; the flavor itself says which numbers
MAX_SEED = 2**53 - 1  # larger integers do not survive the browser
MAX_TIMEOUT_S = 30 * 86400
MAX_RESTARTS = 100
MAX_CACHE_GB = 65536.0

PROJECT_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_-]*(\.[A-Za-z0-9_-]+)*$"
PROJECT_TEXT = "at most 63 letters, digits, '-', '_' and single inner dots, beginning with a letter or digit"

Randomness = Literal["element", "exact"]
Remainder = Literal["pad", "drop"]
OtherRanks = Literal["refuse", "scratch"]

_UNITS_TEXT = f"an integer from 1 to {MAX_UNITS}"
_SHA256_TEXT = "a sha256 in 64 lowercase hex digits"
_START_TEXT = '"auto", "all", an integer of units (1 is one unit), or a fraction above 0 and below 1 (1.0 means all)'


def _one_of(alias: Any) -> Allowed:
    choices = get_args(alias)
    return Allowed(" or ".join(json.dumps(choice) for choice in choices), choices=choices)


def _from_list(value: Any) -> Any:
    # A string is a sequence too: it must not become a tuple of characters.
    return tuple(value) if isinstance(value, list) else value


_Strings = Annotated[tuple[StrictStr, ...], BeforeValidator(_from_list), Strict()]
_Float = Annotated[float, Strict(), Field(allow_inf_nan=False)]
_Sha256 = Annotated[StrictStr, Field(pattern=r"^[0-9a-f]{64}$")]
_Units = Annotated[StrictInt, Field(ge=1, le=MAX_UNITS)]
_Key = Annotated[StrictStr, Field(min_length=1, max_length=512)]


def _check_start(value: Any) -> str | int | float:
    """Return a start in its one form: forms send numbers as strings, and 1.0 is "all"."""
    if isinstance(value, str) and value not in ("auto", "all"):
        value = _number_in(value)
    if value in ("auto", "all") or (type(value) is int and 1 <= value <= MAX_UNITS):
        return value  # type: ignore[no-any-return]
    if type(value) is float and 0 < value <= 1:
        return value if value < 1 else "all"
    raise PydanticCustomError("taas_start", "not a start")


def _number_in(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return None


_START_SCHEMA = {
    "anyOf": [
        {"type": "string", "pattern": r"^(auto|all|[0-9]+|[0-9]*\.[0-9]+)$"},
        {"type": "integer", "minimum": 1, "maximum": MAX_UNITS},
        {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    ]
}
_Start = Annotated[str | int | float, PlainValidator(_check_start), WithJsonSchema(_START_SCHEMA)]


class PayloadRef(BaseModel):
    """An uploaded payload: its key in the store and the sha256 that hosts verify before they open it."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    payload: Annotated[_Key, Allowed("a string: the key that the upload gave")] = Field(
        title="Payload",
        description="Key of the uploaded payload in the store.",
        examples=["projects/lm/payloads/9f86d0"],
    )
    sha256: Annotated[_Sha256, Allowed(_SHA256_TEXT)] = Field(
        title="SHA-256",
        description="Hash that hosts verify before they open the payload.",
        examples=["9f86d08" + "0" * 57],
    )


class LoaderRef(BaseModel):
    """A loader of the request: a source in the project (``"data.py:make_loader"``) or an uploaded payload.

    A plain string is a source.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    source: Annotated[StrictStr | None, Allowed('a string like "data.py:make_loader"')] = Field(
        None,
        title="Source",
        description="A file of the project and the name of a loader, or of a function giving one, in it.",
        examples=["data.py:make_loader"],
    )
    payload: Annotated[_Key | None, Allowed("a string: the key that the upload gave")] = Field(
        None, title="Payload", description="Key of the uploaded loader.", examples=["projects/lm/payloads/9f86d0"]
    )
    sha256: Annotated[_Sha256 | None, Allowed(_SHA256_TEXT)] = Field(
        None,
        title="SHA-256",
        description="Hash that hosts verify before they open the payload.",
        examples=["9f86d08" + "0" * 57],
    )
    units: Annotated[_Units | None, Allowed(_UNITS_TEXT)] = Field(
        None,
        title="Units",
        description="Elements to extract from this loader, instead of the request's.",
        examples=[5000],
    )

    @model_validator(mode="before")
    @classmethod
    def _from_source(cls, value: Any) -> Any:
        return {"source": value} if isinstance(value, str) else value

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Say that a plain string will do."""
        return {"anyOf": [{"type": "string", "title": "Source"}, handler.resolve_ref_schema(handler(schema))]}


class TrainRequest(BaseModel):
    """One training request: a script, the machines it runs on, and the loaders that are prepared for it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    project: Annotated[
        StrictStr, Field(pattern=PROJECT_PATTERN, max_length=63), Allowed(f"a string of {PROJECT_TEXT}")
    ] = Field(
        title="Project", description="The project: its files are what runs, and what rank 0 writes.", examples=["lm"]
    )
    script: Annotated[StrictStr | None, Allowed('a string: a path in the project like "train.py"')] = Field(
        None,
        title="Script",
        description="Python file of the project that every rank runs. Either this or a captured cell.",
        examples=["train.py"],
    )
    args: Annotated[_Strings, Allowed('a list of strings like ["--epochs", "3"]')] = Field(
        (), title="Arguments", description="The script's arguments, each one string.", examples=[["--epochs", "3"]]
    )
    cell: Annotated[PayloadRef | None, Allowed('an object {"payload": ..., "sha256": ...}')] = Field(
        None,
        title="Cell",
        description="A captured notebook cell, uploaded by the client. Either this or a script.",
        examples=[{"payload": "projects/lm/payloads/9f86d0", "sha256": "9f86d08" + "0" * 57}],
    )
    flavor: Annotated[StrictStr, Allowed("a string: the name of a GPU flavor")] = Field(
        "g2.8", title="Flavor", description="Machine configuration that the training runs on.", examples=["g2.8"]
    )
    gpus: Annotated[
        StrictInt, Field(ge=1, le=MAX_GPUS), Allowed("an integer: the GPUs of 1, 2 or 4 hosts of the flavor")
    ] = Field(
        8,
        title="GPUs",
        description="GPUs in all, one rank each: those of 1, 2 or 4 hosts (8, 16 or 32 on g2.8).",
        examples=[8, 16, 32],
    )
    cpus: Annotated[Annotated[StrictInt, Field(ge=1, le=8)] | None, Allowed("an integer from 1 to 8")] = Field(
        None,
        title="CPU machines",
        description="c1.4 machines that prepare each loader. Together with units; without both, nothing is prepared.",
        examples=[1],
    )
    units: Annotated[_Units | None, Allowed(_UNITS_TEXT)] = Field(
        None,
        title="Units",
        description="Elements to extract from each loader (batches, for a batched loader). Together with cpus.",
        examples=[20480000],
    )
    loaders: Annotated[
        dict[str, LoaderRef],
        Allowed(
            'an object like {"data_loader": "data.py:make_loader"}',
            items='"file.py:name" or an object with source, or with payload and sha256',
        ),
    ] = Field(
        {},
        title="Loaders",
        description='Loaders by name: "file.py:name" (a loader, or a function giving one), or an uploaded payload.',
        examples=[{"data_loader": "data.py:make_loader"}],
    )
    seed: Annotated[StrictInt, Field(ge=0, le=MAX_SEED), Allowed(f"an integer from 0 to {MAX_SEED}")] = Field(
        0, title="Seed", description="Seed of the loaders' order and random numbers.", examples=[0, 42]
    )
    randomness: Annotated[Randomness, _one_of(Randomness)] = Field(
        "element",
        title="Randomness",
        description="element: seeded per element, on any number of machines; exact: bitwise the loader's own workers.",
        examples=["element"],
    )
    remainder: Annotated[Remainder, _one_of(Remainder)] = Field(
        "pad",
        title="Remainder",
        description="What happens to elements that do not fill a step of all ranks: pad (repeat some) or drop.",
        examples=["pad"],
    )
    start: Annotated[_Start, Allowed(_START_TEXT)] = Field(
        "auto",
        title="Start",
        description="When training starts: auto (when the first segments are there), all, a number of units (1 is one "
        "unit), or a fraction. "
        'The fraction 1.0 means "all".',
        examples=["auto", "all", 20480, 0.25],
    )
    reuse: Annotated[StrictBool, Allowed("true or false")] = Field(
        False,
        title="Reuse",
        description="Use elements that an earlier run prepared from the same input.",
        examples=[False],
    )
    env: Annotated[dict[str, StrictStr], Allowed('an object of strings like {"OMP_NUM_THREADS": "4"}', secret=True)] = (
        Field(
            {},
            title="Environment",
            description="Environment variables of every rank. They are shown in clear text: no secrets.",
            examples=[{"OMP_NUM_THREADS": "4"}],
        )
    )
    secrets: Annotated[
        dict[str, StrictStr],
        Allowed('an object of references like {"API_TOKEN": "var:taas/<project>/api_token"}', secret=True),
    ] = Field(
        {},
        title="Secrets",
        description="Environment variables whose values are Airflow connections or variables below taas/<project>/.",
        examples=[{"API_TOKEN": "var:taas/lm/api_token"}],
    )
    requirements: Annotated[_Strings, Allowed('a list of strings like ["einops==0.8.1"]')] = Field(
        (),
        title="Requirements",
        description="Python packages that the script needs, each pinned to one version.",
        examples=[["einops==0.8.1"]],
    )
    other_ranks: Annotated[OtherRanks, _one_of(OtherRanks)] = Field(
        "refuse",
        title="Other ranks",
        description="What writing to the project folder does on ranks other than 0: an error, or a copy not kept.",
        examples=["refuse"],
    )
    cache_gb: Annotated[
        _Float, Field(gt=0, le=MAX_CACHE_GB), Allowed(f"a number above 0, at most {MAX_CACHE_GB:.0f}")
    ] = Field(64.0, title="Cache", description="GB of each host that hold elements not yet consumed.", examples=[64])
    allow_pickle: Annotated[StrictBool, Allowed("true or false")] = Field(
        False,
        title="Allow pickle",
        description="Pickle what fits no column (slower, and flagged in the report) instead of an error.",
        examples=[False],
    )
    max_restarts: Annotated[
        StrictInt, Field(ge=0, le=MAX_RESTARTS), Allowed(f"an integer from 0 to {MAX_RESTARTS}")
    ] = Field(0, title="Restarts", description="How often a failed training is started again.", examples=[0, 3])
    timeout_s: Annotated[
        StrictInt, Field(ge=1, le=MAX_TIMEOUT_S), Allowed(f"an integer from 1 to {MAX_TIMEOUT_S} (seconds; 30 days)")
    ] = Field(86400, title="Timeout", description="Seconds after which the training is ended.", examples=[86400])
    hang_timeout_s: Annotated[
        StrictInt,
        Field(ge=0, le=MAX_TIMEOUT_S),
        Allowed(f"an integer from 1 to {MAX_TIMEOUT_S} (seconds; 30 days), or 0: never"),
    ] = Field(
        1800,
        title="Hang timeout",
        description="Seconds without progress of any rank after which the training counts as one that hangs; 0: never.",
        examples=[1800, 600, 0],
    )
    max_cost: Annotated[Annotated[_Float, Field(gt=0)] | None, Allowed("a number above 0 (units of price)")] = Field(
        None,
        title="Maximum cost",
        description="Units of price that the run may cost; no limit without.",
        examples=[250000],
    )

    def units_of(self, loader: str) -> int | None:
        """Return how many elements of a loader are extracted: its own number, else the request's; None: none."""
        return self.loaders[loader].units or self.units

    def to_conf(self) -> dict[str, Any]:
        """Return the JSON form without what is at its default; ``parse_request`` gives the same request again."""
        return self.model_dump(mode="json", exclude_defaults=True)


def parse_request(conf: Mapping[str, Any], *, flavors: Mapping[str, Flavor] = FLAVORS) -> TrainRequest:
    """Return the request that a conf describes, checked in full. A null is the same as leaving the field out.

    Raises:
        RequestError: with all faults together: one line each, and as ``fields["faults"]``.
    """
    if not isinstance(conf, Mapping):
        raise request_error([Fault("", f'got {type_name(conf)}; allowed: an object like {{"project": ...}}')])
    given = {name: value for name, value in conf.items() if value is not None}
    request, faults = _validated(given)
    faulty = {fault.field for fault in faults}
    bad = frozenset(name for name in TrainRequest.model_fields if any(_is_within(path, name) for path in faulty))
    draft = Draft(request=request, given=given, bad=bad, flavors=flavors)
    faults += [fault for fault in rule_faults(draft) if fault.field not in faulty]
    if faults:
        raise request_error(faults)
    return request


def request_from_json(text: str | bytes, *, flavors: Mapping[str, Flavor] = FLAVORS) -> TrainRequest:
    """Return the request in a JSON text, checked in full.

    Raises:
        RequestError: the text is no JSON, names a field twice, or describes no valid request.
    """
    return parse_request(conf_from_json(text), flavors=flavors)


def conf_from_json(text: str | bytes) -> Any:
    """Return what a JSON text holds; raises RequestError with the place where it is none, or where a name is twice."""
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        message = f"not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        raise request_error([Fault("", message)]) from None
    except UnicodeDecodeError:
        raise request_error([Fault("", "not valid JSON: the text is not in UTF-8")]) from None
    except (ValueError, RecursionError) as error:  # an endless number, or brackets without end
        raise request_error([Fault("", f"not a request: {str(error).partition(';')[0]}")]) from None


def request_digest(request: TrainRequest) -> str:
    """Return the sha256 of the request's canonical JSON: the same for the same request, however it was written."""
    text = json.dumps(request.to_conf(), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def request_schema(*, flavors: Mapping[str, Flavor] = FLAVORS) -> dict[str, Any]:
    """Return the JSON schema of a conf, each property whole in itself (no ``$ref``), with title, text and examples.

    Does not: say what takes more than one field (``parse_request`` does).
    """
    from taas.request_schema import build_schema

    return build_schema(TrainRequest, flavors=flavors)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise request_error([Fault(name, "is there twice; allowed: once") for name in twice])
    return dict(pairs)


def _no_constant(text: str) -> Any:
    raise request_error([Fault("", f"got {text}; allowed: finite numbers")])


def _validated(given: Mapping[str, Any]) -> tuple[TrainRequest, list[Fault]]:
    """Return the request and its faults; faulty fields are at their defaults in it."""
    try:
        return TrainRequest.model_validate(given), []
    except ValidationError as error:
        details = error.errors(include_url=False)
    faults = [Fault(fault_path(detail["loc"]), _message(detail)) for detail in details]
    faulty = {detail["loc"][0] for detail in details if detail["loc"]}
    rest = {name: value for name, value in given.items() if name not in faulty}
    return TrainRequest.model_validate({"project": "project", **rest}), faults


def _is_within(path: str, name: str) -> bool:
    return path == name or path.startswith((f"{name}.", f"{name}["))


def _message(detail: ErrorDetails) -> str:
    loc, value = detail["loc"], detail["input"]
    model, depth = _owner(loc)
    if detail["type"] == "extra_forbidden":
        return unknown_message(loc[depth], model.model_fields)
    if detail["type"] == "invalid_key" or depth >= len(loc):
        return f"got {show(value)}; allowed: names that are strings"
    allowed = _allowed(model, str(loc[depth]))
    if detail["type"] == "missing":
        return f"is missing; allowed: {allowed.text}"
    if loc[-1] == "[key]":
        return f"got {show(value)} as a name; allowed: names that are strings"
    return mismatch_message(value, allowed, is_item=len(loc) > depth + 1)


def _owner(loc: tuple[int | str, ...]) -> tuple[type[BaseModel], int]:
    """Return the model that a fault's field belongs to, and where in the path its name is."""
    if loc[:1] == ("loaders",) and len(loc) > 2 and loc[2] != "[key]":
        return LoaderRef, 2
    if loc[:1] == ("cell",) and len(loc) > 1:
        return PayloadRef, 1
    return TrainRequest, 0


def _allowed(model: type[BaseModel], name: str) -> Allowed:
    return next(item for item in model.model_fields[name].metadata if isinstance(item, Allowed))
