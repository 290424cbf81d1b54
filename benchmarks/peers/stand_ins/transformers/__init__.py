"""Stands in for transformers: mosaicml-streaming imports two names of it for its own DataLoader, which we do not use."""
