"""Stands in for torchvision, which does not work beside this torch: mosaicml-streaming only imports it."""
