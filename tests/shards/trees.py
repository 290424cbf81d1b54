"""Element trees for tests: comparing them, strategies that make them, and classes of a project."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st

from tests.prep.oracle import equal


class Sample(NamedTuple):
    image: Any
    label: Any


@dataclasses.dataclass
class Record:
    name: str
    values: Any


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenRecord:
    number: int
    tensor: Any


class Encoding(collections.UserDict):  # type: ignore[type-arg]
    pass


def same(one: Any, other: Any) -> bool:
    """Whether two trees are of the same types and values, bit for bit (NaN equals NaN)."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor) and one.layout is not torch.strided:
        return equal(one, other)
    if isinstance(one, torch.Tensor):
        fits = one.dtype == other.dtype and one.shape == other.shape
        return fits and torch.equal(_bits(one), _bits(other))
    if isinstance(one, np.ndarray | np.generic):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, float | complex):
        return np.array(one).tobytes() == np.array(other).tobytes()
    if dataclasses.is_dataclass(one):
        names = [field.name for field in dataclasses.fields(one)]
        return all(same(getattr(one, name), getattr(other, name)) for name in names)
    if isinstance(one, dict | collections.UserDict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(same(*pair) for pair in zip(one, other, strict=True))
    return bool(one == other)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor; an empty one's strides may forbid viewing it, so they are left out."""
    flat = tensor.reshape(-1).clone()
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)


TORCH_DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.bool),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
]
NUMPY_DTYPES = ["?", "i1", "<i2", "<i4", "<i8", "u1", "<u2", "<u4", "<u8", "<f2", "<f4", "<f8", "<c8", "<c16"] + [
    *(">i4", ">f8", "<M8[ns]", "<m8[s]", "<U3", "S5")
]
SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)


def make_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int, *, transposed: bool = False) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    numel = int(np.prod(shape, dtype=np.int64))
    high = 2 if dtype is torch.bool else 256
    raw = torch.from_numpy(rng.integers(0, high, numel * dtype.itemsize, dtype=np.uint8))
    tensor = raw.view(dtype).reshape(shape) if numel else torch.empty(shape, dtype=dtype)
    return tensor.mT if transposed and tensor.dim() >= 2 else tensor


def make_array(dtype: str, shape: tuple[int, ...], seed: int) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng(seed)
    if dtype in ("<U3", "S5"):
        return rng.integers(0, 99, shape).astype(dtype)
    if dtype == "?":
        return np.asarray(rng.integers(0, 2, shape), dtype="?")
    numel = int(np.prod(shape, dtype=np.int64))
    return np.frombuffer(rng.bytes(numel * np.dtype(dtype).itemsize), dtype).reshape(shape)


tensors = st.builds(make_tensor, st.sampled_from(TORCH_DTYPES), SHAPES, st.integers(0, 9), transposed=st.booleans())
arrays = st.builds(make_array, st.sampled_from(NUMPY_DTYPES), SHAPES, st.integers(0, 9))
scalars = st.one_of(
    *(st.integers(), st.floats(), st.complex_numbers(), st.booleans(), st.none(), st.text(max_size=8)),
    *(st.binary(max_size=8), arrays.filter(lambda one: one.size > 0).map(lambda one: one.reshape(-1)[0])),
)
keys = st.one_of(st.text(max_size=4), st.integers(-5, 5), st.none(), st.booleans())


def _nodes(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.lists(children, max_size=4),
        st.lists(children, max_size=4).map(tuple),
        st.dictionaries(keys, children, max_size=4),
        st.dictionaries(keys, children, max_size=2).map(collections.OrderedDict),
        st.builds(Sample, children, children),
        st.builds(Record, st.text(max_size=3), children),
        st.builds(FrozenRecord, st.integers(), children),
        st.dictionaries(st.text(max_size=3), children, max_size=2).map(Encoding),
        st.lists(st.integers() | st.text(max_size=2), min_size=9, max_size=12),
    )


trees = st.recursive(scalars | tensors | arrays, _nodes, max_leaves=8)
