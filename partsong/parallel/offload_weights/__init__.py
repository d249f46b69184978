"""Keeps blocks' weights in the host's memory, and copies each block to the device right before it runs."""
