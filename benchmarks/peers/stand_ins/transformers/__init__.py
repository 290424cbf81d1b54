"""Stands in for transformers: mosaicml-streaming imports two names of it for its own DataLoader."""
