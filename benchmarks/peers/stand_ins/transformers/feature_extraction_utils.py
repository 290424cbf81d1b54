"""See the package."""


class BatchFeature:
    """Nothing that is measured uses it."""
