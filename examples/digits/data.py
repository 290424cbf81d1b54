"""Handwritten digits from scikit-learn (1797 images of 8 x 8)."""

import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset


def make_loader() -> DataLoader:
    """Batches of 16, shuffled: ``(float32 [16, 64], int64 [16])``; 113 elements an epoch."""
    images, labels = load_digits(return_X_y=True)
    dataset = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels, dtype=torch.int64))
    return DataLoader(dataset, batch_size=16, shuffle=True)
