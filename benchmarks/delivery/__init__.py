"""The parts of ``bench_delivery.py``."""
