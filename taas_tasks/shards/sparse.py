"""A sparse tensor as its parts: what columns hold of it, and how it is put together again."""

from __future__ import annotations

from typing import Any

import torch

_BY_ROWS = (torch.sparse_csr, torch.sparse_bsr)
_COMPRESSED = {str(one).removeprefix("torch."): one for one in (*_BY_ROWS, torch.sparse_csc, torch.sparse_bsc)}


def parts_of(tensor: torch.Tensor) -> dict[str, Any] | None:
    """Return the parts of a sparse CPU tensor, as they lie in it (not coalesced, nothing sorted); None of any other."""
    if tensor.device.type != "cpu":
        return None
    if tensor.layout is torch.sparse_coo:
        plain = tensor.detach()
        return {
            "indices": plain._indices(),
            "values": plain._values(),
            "shape": torch.tensor(tensor.shape),
            "is_coalesced": tensor.is_coalesced(),
        }
    if tensor.layout in _COMPRESSED.values():
        rows = tensor.layout in _BY_ROWS
        return {
            "compressed": tensor.crow_indices() if rows else tensor.ccol_indices(),
            "plain": tensor.col_indices() if rows else tensor.row_indices(),
            "values": tensor.values().detach(),
            "shape": torch.tensor(tensor.shape),
        }
    return None


def from_parts(layout: str, parts: dict[str, Any]) -> torch.Tensor:
    """Return the tensor of the parts; they are not copied, and were valid when they were taken."""
    shape = tuple(parts["shape"].tolist())
    if layout == "sparse_coo":
        return torch.sparse_coo_tensor(
            parts["indices"], parts["values"], shape, is_coalesced=parts["is_coalesced"], check_invariants=False
        )
    return torch.sparse_compressed_tensor(
        parts["compressed"],
        parts["plain"],
        parts["values"],
        shape,
        layout=_COMPRESSED[layout],
        check_invariants=False,
    )
