"""What Arrow type holds the items of a tensor or array, and which numpy dtype a torch dtype is read through."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from taas.errors import DeliveryError
from taas_tasks.shards.schema import Leaf

_BY_NUMPY: dict[str, Any] = {
    **{f"{kind}{size}": f"{name}{size * 8}" for kind, name in (("i", "int"), ("u", "uint")) for size in (1, 2, 4, 8)},
    "b1": "uint8",
    "f2": "float16",
    "f4": "float32",
    "f8": "float64",
}
_MAX_FIXED = 2**31 - 1  # Arrow counts the values of a fixed-size list in 32 bits
_READ_THROUGH = {1: "uint8", 2: "int16"}  # dtypes that numpy lacks (bfloat16, float8), by item size


@dataclass(frozen=True)
class Storage:
    """How items lie in a column: ``per_item`` values of Arrow type ``arrow``; ``numpy`` is the dtype of a view."""

    arrow: Any
    per_item: int
    numpy: Any
    torch: torch.dtype | None = None  # set for tensors
    reinterpret: bool = False  # the torch dtype is not what numpy calls it: view it after reading

    @property
    def item_bytes(self) -> int:
        """Bytes of one item."""
        return int(self.numpy.itemsize)


def _arrow_of(dtype: Any) -> tuple[Any, int]:
    if dtype.isnative or dtype.itemsize == 1:
        if dtype.kind == "c" and dtype.itemsize in (8, 16):
            return (pa.float32() if dtype.itemsize == 8 else pa.float64()), 2
        name = _BY_NUMPY.get(f"{dtype.kind}{dtype.itemsize}")
        if name:
            return getattr(pa, name)(), 1
    return pa.uint8(), dtype.itemsize


@cache
def tensor_storage(name: str) -> Storage:
    """Return the storage of the torch dtype with this name (without ``torch.``).

    Raises:
        DeliveryError: this version of torch has no such dtype.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise DeliveryError(f"a shard holds tensors of dtype '{name}', which torch {torch.__version__} does not know")
    try:
        view = torch.empty(0, dtype=dtype).numpy().dtype
    except TypeError:
        view = np.dtype(_READ_THROUGH[dtype.itemsize])
        return Storage(*_arrow_of(view), view, dtype, True)
    return Storage(*_arrow_of(view), view, dtype)


@cache
def array_storage(descr: Any) -> Storage:
    """Return the storage of a numpy dtype, given as ``numpy.lib.format.dtype_to_descr`` writes it (frozen)."""
    dtype = np.lib.format.descr_to_dtype(_thaw(descr))
    return Storage(*_arrow_of(dtype), dtype)


def storage_of(leaf: Leaf) -> Storage:
    """Return the storage of a tensor, array or scalar leaf."""
    return tensor_storage(leaf.dtype) if leaf.kind == "tensor" else array_storage(leaf.dtype)


def num_values(leaf: Leaf) -> int:
    """Return how many Arrow values one element of a leaf of fixed shape has."""
    return int(np.prod(leaf.shape or (), dtype=np.int64)) * storage_of(leaf).per_item


def is_fixed(leaf: Leaf) -> bool:
    """Whether a tensor or array lies in a column of fixed-size lists: one shape, and not too large."""
    return leaf.shape is not None and num_values(leaf) <= _MAX_FIXED


def _thaw(descr: Any) -> Any:
    if isinstance(descr, str):
        return descr
    return [_thaw_field(one) for one in descr] if isinstance(descr[0], tuple) else descr


def _thaw_field(one: Any) -> Any:
    name, inner, *shape = one
    return (name if isinstance(name, str) else tuple(name), _thaw(inner), *(tuple(dims) for dims in shape))
