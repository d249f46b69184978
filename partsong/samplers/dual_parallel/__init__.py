"""Samples with DualParal: blocks of a long video in a queue of falling noise, layers over ranks."""
