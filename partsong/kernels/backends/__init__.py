"""Holds one attention kernel per file, each brought to the contract of `partsong.kernels.attention`."""
