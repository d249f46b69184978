"""Runs what the commands run: samples images, videos and texts, compares with the serial twin, writes the demo page."""
