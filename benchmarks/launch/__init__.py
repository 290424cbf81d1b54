"""Launches on a cluster over SSH, beside what people would use instead."""
