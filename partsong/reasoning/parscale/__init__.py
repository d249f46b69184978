"""Runs parallel streams of one model, whose outputs are weighted and summed: ParScale."""
