"""Runs parallel streams of one model, whose outputs are weighed and summed: ParScale."""
