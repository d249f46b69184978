"""Puts removable hooks on a user's modules, and keeps the clock that says where a generation stands."""
