"""Stands in for torchvision, which does not work beside this torch: mosaicml-streaming imports it and uses none of it."""
