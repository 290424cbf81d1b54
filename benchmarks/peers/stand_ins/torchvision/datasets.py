"""See the package."""


class VisionDataset:
    """Nothing that is measured uses it."""
