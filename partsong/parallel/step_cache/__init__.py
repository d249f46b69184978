"""Leaves out the blocks of some steps, and forecasts what they would have added."""
