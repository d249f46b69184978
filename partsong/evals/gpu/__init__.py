"""Checks a machine with GPUs: stages that run one after the other, and rows of what each found."""
