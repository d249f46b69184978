"""Benchmarks: speed beside the serial twin and beside peers."""
