"""Samples with block cascading: blocks of a causal video start before those in front of them are done."""
