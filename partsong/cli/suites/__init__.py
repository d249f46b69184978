"""Runs the suites of ``partsong eval`` that have a command of their own."""
