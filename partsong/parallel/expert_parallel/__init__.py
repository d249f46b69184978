"""Mixes denoisers that were trained apart, and gives each its rank."""
