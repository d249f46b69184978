"""Measures decoding rules, thinking methods, kernels and strategies; the commands' jobs are in `partsong.jobs`."""
