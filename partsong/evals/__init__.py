"""Measures decoding rules, thinking methods, kernels and strategies; what commands run is in `partsong.jobs`."""
