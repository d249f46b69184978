"""Measures decoding rules, ways to think, kernels and strategies; what commands run is in `partsong.jobs`."""
