"""How the tree of an element becomes columns: its spec, what two specs have in common, and the spec as JSON.

An element is a tree of dicts, lists, tuples, namedtuples and dataclasses whose leaves are torch tensors, numpy arrays
and scalars, Python numbers, ``bool``, ``None``, ``str`` and ``bytes``. A *spec* describes the form without the values:

    Leaf      a value of one kind; tensors and arrays with a dtype, and a shape unless it differs between elements
    Fields    a fixed set of children: dict, list, tuple, namedtuple, dataclass; a sparse tensor's indices and values
    Repeat    a list or tuple whose length differs between elements, its items of one spec
    Choice    what differs between elements in a way that nothing else can hold: each has one of several specs

One spec describes all elements of a segment: ``merge`` widens it, element by element.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import torch

from taas.errors import DeliveryError, ElementError
from taas_tasks.shards.sparse import parts_of

FORMAT = 1
FORMAT_KEY = b"taas.format"
SPEC_KEY = b"taas.spec"
MAX_CHOICES = 64  # an Arrow union can tell 128 apart; more than a few means that the data has no form
_LONG = 8  # lists longer than this are a Repeat where their items allow it: one column instead of many

Kind: TypeAlias = Literal[
    "tensor", "ndarray", "scalar", "int", "bigint", "float", "complex", "bool", "str", "bytes", "none", "pickle"
]
FieldsKind: TypeAlias = Literal["dict", "ordered", "list", "tuple", "namedtuple", "dataclass", "userdict", "sparse"]
Key: TypeAlias = str | int | bool | None


@dataclass(frozen=True, slots=True)
class Leaf:
    """A value. ``dtype`` and ``shape`` are those of a tensor or array; ``shape`` is None when it differs."""

    kind: Kind
    dtype: Any = None
    shape: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Fields:
    """A node with a fixed set of children. ``of`` is the class of a namedtuple or dataclass, as ``module:qualname``, or
    the layout of a sparse tensor, whose children are those of ``taas_tasks.shards.sparse``."""

    kind: FieldsKind
    keys: tuple[Key, ...]
    children: tuple[Spec, ...]
    of: str | None = None
    key_types: tuple[type, ...] = field(init=False)  # True and 1 are equal, and yet other keys

    def __post_init__(self) -> None:
        object.__setattr__(self, "key_types", tuple(map(type, self.keys)))


@dataclass(frozen=True, slots=True)
class Repeat:
    """A list or tuple of any length whose items have one spec."""

    kind: Literal["list", "tuple"]
    item: Spec


@dataclass(frozen=True, slots=True)
class Choice:
    """A node that has one of several specs in each element."""

    options: tuple[Spec, ...]


Spec: TypeAlias = Leaf | Fields | Repeat | Choice

_PLAIN: dict[type, Leaf] = {
    float: Leaf("float"),
    complex: Leaf("complex"),
    bool: Leaf("bool"),
    bytes: Leaf("bytes"),
    type(None): Leaf("none"),
}
_INT, _BIGINT, _STR = Leaf("int"), Leaf("bigint"), Leaf("str")
_TENSOR_TYPES = (torch.Tensor, torch.nn.Parameter)


def _fits_int64(value: int) -> bool:
    return -(2**63) <= value < 2**63


@dataclass
class Describer:
    """Makes the specs of elements, and keeps the paths of what had to be pickled.

    Args:
        allow_pickle: pickle what no column can hold, instead of refusing it.
    """

    allow_pickle: bool
    pickled_paths: set[str] = field(default_factory=set)

    def describe(self, value: Any, path: str = "element") -> Spec:
        """Return the spec of ``value``.

        Raises:
            ElementError: it, or something in it, fits no column and may not be pickled; names the path.
        """
        plain = _PLAIN.get(type(value))
        if plain is not None:
            return plain
        known = _BY_TYPE.get(type(value))
        spec = known(self, value, path) if known else self._described_by_base(value, path)
        return spec if spec is not None else self._pickled(value, path)

    def _described_by_base(self, value: Any, path: str) -> Spec | None:
        if isinstance(value, np.generic):
            return _array_leaf("scalar", np.asarray(value))
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return self._named("namedtuple", value, tuple(value._fields), tuple(value), path)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return self._dataclass(value, path)
        if isinstance(value, collections.UserDict):
            return self._userdict(value, path)
        return None

    def _pickled(self, value: Any, path: str) -> Leaf:
        if not self.allow_pickle:
            raise ElementError(
                f"{path}: {_looks(value)} fits no column; allowed are CPU tensors, numpy arrays, numbers, str, "
                "bytes, None, and dicts, lists, tuples, namedtuples and dataclasses of them. Convert it in the dataset "
                "or in collate_fn, or set allow_pickle: true in the request",
                path=path,
                type=type(value).__name__,
            )
        self.pickled_paths.add(path)
        return Leaf("pickle")

    def _children(self, keys: tuple[Key, ...], values: tuple[Any, ...], path: str) -> tuple[Spec, ...]:
        return tuple(self.describe(value, f"{path}[{key!r}]") for key, value in zip(keys, values, strict=True))

    def _dict(self, value: dict[Any, Any], path: str) -> Fields | None:
        keys = tuple(value)
        if not all(key is None or type(key) in (str, int, bool) for key in keys):
            return None
        kind: Literal["dict", "ordered"] = "dict" if type(value) is dict else "ordered"
        return Fields(kind, keys, self._children(keys, tuple(value.values()), path))

    def _sequence(self, value: list[Any] | tuple[Any, ...], path: str) -> Spec:
        kind: Literal["list", "tuple"] = "list" if type(value) is list else "tuple"
        if len(value) > _LONG:
            plain = _common_plain(value)
            if plain is not None:
                return Repeat(kind, plain)
        children = tuple(self.describe(item, f"{path}[{number}]") for number, item in enumerate(value))
        if len(value) > _LONG and (item := _common(children)) is not None:
            return Repeat(kind, item)
        return Fields(kind, tuple(range(len(children))), children)

    def _named(
        self, kind: Literal["namedtuple", "dataclass"], value: Any, keys: tuple[str, ...], values: Any, path: str
    ) -> Spec:
        children = tuple(self.describe(item, f"{path}.{key}") for key, item in zip(keys, values, strict=True))
        return Fields(kind, keys, children, _class_name(value))

    def _dataclass(self, value: Any, path: str) -> Spec | None:
        names = tuple(one.name for one in dataclasses.fields(value))
        if not all(hasattr(value, name) for name in names) or set(getattr(value, "__dict__", names)) - set(names):
            return None  # carries more, or less, than its fields: rebuilding it from them would not be the same
        return self._named("dataclass", value, names, [getattr(value, name) for name in names], path)

    def _userdict(self, value: Any, path: str) -> Spec | None:
        inner = self._dict(dict(value.data), path)
        return None if inner is None else dataclasses.replace(inner, kind="userdict", of=_class_name(value))


def _looks(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a {type(value).__name__} (layout {value.layout}, device {value.device.type})"
    if isinstance(value, np.ndarray):
        return f"a numpy {type(value).__name__} of dtype {value.dtype}"
    return f"a value of type {type(value).__module__}.{type(value).__qualname__}"


def _class_name(value: Any) -> str:
    return f"{type(value).__module__}:{type(value).__qualname__}"


def _describe_tensor(describer: Describer, value: torch.Tensor, path: str) -> Spec | None:
    if (parts := parts_of(value)) is not None:
        children = describer._children(tuple(parts), tuple(parts.values()), path)
        return Fields("sparse", tuple(parts), children, str(value.layout).removeprefix("torch."))
    is_plain = value.layout is torch.strided and value.device.type == "cpu" and not value.is_quantized
    fits = is_plain and value.dtype is not torch.complex32  # of 4 bytes, and unknown to numpy
    dtype = str(value.dtype).removeprefix("torch.")
    return Leaf("tensor", dtype, tuple(value.shape)) if fits and not value.is_nested else None


def _describe_ndarray(_: Describer, value: np.ndarray[Any, Any], __: str) -> Spec | None:
    return _array_leaf("ndarray", value)


def _array_leaf(kind: Kind, value: np.ndarray[Any, Any]) -> Spec | None:
    descr = _descr_of(value.dtype)
    return None if descr is None else Leaf(kind, descr, value.shape)


@cache
def _descr_of(dtype: np.dtype[Any]) -> Any:
    """Return a dtype as JSON can hold it; None where that gives no such dtype again (objects, fields out of order)."""
    if dtype.hasobject or dtype.kind not in "biufcmMSUV" or dtype.itemsize == 0:
        return None
    try:
        descr = np.lib.format.dtype_to_descr(dtype)
        return freeze(descr) if np.lib.format.descr_to_dtype(descr) == dtype else None
    except ValueError:
        return None


def _describe_int(_: Describer, value: int, __: str) -> Spec:
    return _INT if _fits_int64(value) else _BIGINT


def _describe_str(_: Describer, value: str, __: str) -> Spec | None:
    try:
        value.encode()
    except UnicodeEncodeError:
        return None
    return _STR


_BY_TYPE: dict[type, Callable[[Describer, Any, str], Spec | None]] = {
    torch.Tensor: _describe_tensor,
    torch.nn.Parameter: _describe_tensor,
    np.ndarray: _describe_ndarray,
    int: _describe_int,
    str: _describe_str,
    dict: Describer._dict,
    collections.OrderedDict: Describer._dict,
    list: Describer._sequence,
    tuple: Describer._sequence,
}


def _common_plain(values: list[Any] | tuple[Any, ...]) -> Leaf | None:
    kinds = set(map(type, values))
    kind = kinds.pop()
    if kinds:
        return None
    if kind is int:
        return _INT if _fits_int64(min(values)) and _fits_int64(max(values)) else _BIGINT
    return _PLAIN.get(kind)


def _common(specs: tuple[Spec, ...]) -> Spec | None:
    """Return the spec that all of these have in common without a Choice at the top, or None."""
    common: Spec | None = specs[0]
    for spec in specs[1:]:
        common = None if common is None else _widen(common, spec)
    return common


def merge(one: Spec, other: Spec, path: str = "element") -> Spec:
    """Return the narrowest spec that describes what either does.

    Raises:
        ElementError: more forms at one path than a shard can tell apart; names the path and two of the forms.
    """
    if one == other:
        return one
    common = _widen(one, other, path)
    return common if common is not None else _choice(one, other, path)


def _choice(one: Spec, other: Spec, path: str) -> Choice:
    options: list[Spec] = list(one.options) if isinstance(one, Choice) else [one]
    for option in other.options if isinstance(other, Choice) else (other,):
        for place, known in enumerate(options):
            if (common := _widen(known, option, path)) is not None:
                options[place] = common
                break
        else:
            options.append(option)
    if len(options) > MAX_CHOICES:
        raise ElementError(
            f"{path}: elements have more than {MAX_CHOICES} different forms here, such as {options[0]} and "
            f"{options[-1]}; give them one form in collate_fn",
            path=path,
        )
    return Choice(tuple(options))


def _widen(one: Spec, other: Spec, path: str = "element") -> Spec | None:
    if one == other:
        return one
    if isinstance(one, Leaf) and isinstance(other, Leaf):
        return _widen_leaves(one, other)
    if isinstance(one, Fields) and isinstance(other, Fields):
        return _widen_fields(one, other, path)
    if isinstance(one, Fields | Repeat) and isinstance(other, Fields | Repeat):
        return _repeat(one, other, path)
    return None


def _widen_leaves(one: Leaf, other: Leaf) -> Leaf | None:
    if one.kind == other.kind and one.dtype == other.dtype:
        return Leaf(one.kind, one.dtype, None)
    return _BIGINT if {one.kind, other.kind} == {"int", "bigint"} else None


def _widen_fields(one: Fields, other: Fields, path: str) -> Spec | None:
    if (one.kind, one.keys, one.key_types, one.of) == (other.kind, other.keys, other.key_types, other.of):
        both = zip(one.keys, one.children, other.children, strict=True)
        children = tuple(merge(ours, theirs, f"{path}[{key!r}]") for key, ours, theirs in both)
        return Fields(one.kind, one.keys, children, one.of)
    return _repeat(one, other, path)


def _repeat(one: Fields | Repeat, other: Fields | Repeat, path: str) -> Repeat | None:
    if one.kind != other.kind or not (one.kind == "list" or one.kind == "tuple"):
        return None
    items = [*_items(one), *_items(other)]
    item = items[0]
    for spec in items[1:]:
        item = merge(item, spec, f"{path}[]")
    return Repeat(one.kind, item)


def _items(spec: Fields | Repeat) -> tuple[Spec, ...]:
    return (spec.item,) if isinstance(spec, Repeat) else spec.children


def option_of(choice: Choice, spec: Spec) -> int:
    """Return which option of ``choice`` holds a value of ``spec`` (which has been merged into it)."""
    for place, option in enumerate(choice.options):
        if _widen(option, spec) == option:
            return place
    raise ElementError(f"no form of {choice} holds {spec}; the data changed while it was encoded")


def freeze(value: Any) -> Any:
    """Return a JSON value with tuples in place of lists, so that it can be compared and hashed."""
    return tuple(freeze(item) for item in value) if isinstance(value, list | tuple) else value


def to_json(spec: Spec) -> dict[str, Any]:
    """Return the JSON form of a spec."""
    if isinstance(spec, Leaf):
        shape = None if spec.shape is None else list(spec.shape)
        return {"node": "leaf", "kind": spec.kind, "dtype": spec.dtype, "shape": shape}
    if isinstance(spec, Repeat):
        return {"node": "repeat", "kind": spec.kind, "item": to_json(spec.item)}
    if isinstance(spec, Choice):
        return {"node": "choice", "options": [to_json(option) for option in spec.options]}
    children = [to_json(child) for child in spec.children]
    return {"node": "fields", "kind": spec.kind, "keys": list(spec.keys), "children": children, "of": spec.of}


_KINDS: dict[str, tuple[str, ...]] = {
    "leaf": get_args(Kind),
    "fields": get_args(FieldsKind),
    "repeat": ("list", "tuple"),
}


def from_json(value: dict[str, Any]) -> Spec:
    """Return the spec of a JSON form.

    Raises:
        DeliveryError: it describes a node that this version does not know.
    """
    node = value["node"]
    known = _KINDS.get(node)
    if known is not None and value["kind"] not in known:
        raise DeliveryError(
            f"a shard's spec has a {node} of kind '{value['kind']}'; known here: {', '.join(known)}. It was written by "
            "another release: prepare and train with the same one"
        )
    if node == "leaf":
        shape = None if value["shape"] is None else tuple(value["shape"])
        return Leaf(value["kind"], freeze(value["dtype"]), shape)
    if node == "repeat":
        return Repeat(value["kind"], from_json(value["item"]))
    if node == "choice":
        return Choice(tuple(from_json(option) for option in value["options"]))
    if node == "fields":
        children = tuple(from_json(child) for child in value["children"])
        return Fields(value["kind"], tuple(value["keys"]), children, value["of"])
    raise DeliveryError(f"a shard's spec has a node '{node}'; known here: leaf, fields, repeat, choice")
