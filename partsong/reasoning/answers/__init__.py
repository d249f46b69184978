"""Reads, checks and counts answers: extraction, arithmetic, votes, and sandboxes for programs."""
