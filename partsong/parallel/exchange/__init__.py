"""Exchanges keys, values, border rows and statistics between ranks, with one file for each strategy."""
