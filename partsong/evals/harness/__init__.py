"""Models for lm-evaluation-harness and inspect."""
