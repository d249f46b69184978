"""Offers models to lm-evaluation-harness and inspect."""
