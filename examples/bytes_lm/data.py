"""Python's own source, one object per file in a bucket that is slow: the data of the byte-level language model."""

import os
from urllib.parse import urlsplit

import torch
from torch.utils.data import DataLoader, Dataset

WINDOW = 96  # bytes of context
CROPS = 8  # windows taken from each object


class SourceFiles(Dataset):
    """Element i: ``CROPS`` random windows of ``WINDOW + 1`` bytes of object i, uint8 ``[CROPS, WINDOW + 1]``."""

    def __init__(self, url: str):
        self.url = urlsplit(url)  # http://KEY:SECRET@HOST:PORT/BUCKET/PREFIX
        self.bucket, _, self.prefix = self.url.path.lstrip("/").partition("/")
        self._client = None
        pages = self.client().get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=self.prefix)
        self.keys = [item["Key"] for page in pages for item in page.get("Contents", [])]
        self._client = None  # each loader worker opens its own

    def client(self):
        if self._client is None:
            import boto3

            self._client = boto3.client(
                "s3",
                endpoint_url=f"{self.url.scheme}://{self.url.hostname}:{self.url.port}",
                aws_access_key_id=self.url.username,
                aws_secret_access_key=self.url.password,
                region_name="us-east-1",
            )
        return self._client

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: int) -> torch.Tensor:
        body = self.client().get_object(Bucket=self.bucket, Key=self.keys[index])["Body"].read()
        text = torch.frombuffer(bytearray(body), dtype=torch.uint8)
        starts = torch.randint(0, len(text) - WINDOW, (CROPS,))
        return torch.stack([text[start : start + WINDOW + 1] for start in starts.tolist()])


def make_loader() -> DataLoader:
    """Batches of 4 objects, shuffled: each element is a uint8 tensor ``[32, 97]``."""
    return DataLoader(
        SourceFiles(os.environ["SOURCE_BUCKET"]), batch_size=4, shuffle=True, num_workers=2, collate_fn=torch.cat
    )
