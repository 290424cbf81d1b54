"""Make the golden shard of format 1. Run only to add a format: a committed shard is never written again.

python -m tests.shards.golden.make
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.shards.trees import Record, Sample

PATH = Path(__file__).parent / "format-1.arrow"
START, COUNT = 7, 40


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


def main() -> None:
    """Write the file, unless it is there."""
    from taas_tasks.shards.writer import encode_segment

    shard = encode_segment([(index, element(index)) for index in range(START, START + COUNT)], allow_pickle=False)
    with PATH.open("xb") as file:
        file.write(b"".join(shard.parts))


if __name__ == "__main__":
    main()
