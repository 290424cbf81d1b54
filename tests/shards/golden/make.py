"""Make the golden shards of format 1. Run only to add one: a committed shard is never written again.

python -m tests.shards.golden.make
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from taas_tasks.shards.writer import encode_segment
from taas_tasks.streams import nominal_index
from tests.shards.trees import Record, Sample

FOLDER = Path(__file__).parent
START, COUNT = 7, 40
STREAM, NUM_STREAMS = 1, 3


def element(index: int) -> Any:
    """Return the element that stands at ``index`` of the golden shard."""
    return {
        "image": (torch.arange(12).reshape(3, 4) + index).to(torch.uint8),
        "weights": torch.full((2,), index / 2, dtype=torch.bfloat16),
        "scalar": torch.tensor(index * 0.5, dtype=torch.float64),
        "ragged": np.arange(index % 4, dtype="<i4").reshape(1, -1),
        "when": np.datetime64("2024-01-01", "s") + np.timedelta64(index, "s"),
        "name": f"élément {index}",
        "raw": bytes([index]),
        "numbers": (index, index / 4, complex(index, -1), index % 2 == 0, None, 2**70 + index),
        "words": [str(n) for n in range(index % 3)],
        "boxes": [torch.full((n + 1, 4), float(n)) for n in range(index % 3)],
        "sample": Sample(torch.tensor([index]), index),
        "record": Record("a", torch.zeros(0)),
        "maybe": None if index % 5 else torch.ones(1),
        3: {},
    }


def sparse_element(position: int) -> Any:
    """Return the element that stands at a position of the golden stream."""
    dense = torch.arange(6.0).reshape(2, 3) * (position % 2)
    return {"position": position, "sparse": dense.to_sparse(), "rows": dense.to_sparse_csr()}


def segments() -> dict[str, list[tuple[int, Any]]]:
    """Return what each golden shard holds: a segment of an epoch, and one of a loader worker's stream."""
    plain = [(index, element(index)) for index in range(START, START + COUNT)]
    stream = [
        (nominal_index(position, STREAM, NUM_STREAMS), sparse_element(position))
        for position in range(START, START + COUNT)
    ]
    return {"format-1.arrow": plain, "format-1-stream.arrow": stream}


def main() -> None:
    """Write the files that are not there."""
    for name, elements in segments().items():
        shard = encode_segment(elements, allow_pickle=False)
        if not (FOLDER / name).exists():
            (FOLDER / name).write_bytes(b"".join(shard.parts))


if __name__ == "__main__":
    main()
