"""See the package."""


class BatchEncoding:
    """Nothing that is measured uses it."""
