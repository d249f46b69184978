"""Samples with structure guidance: a small picture leads patches of a large one."""
