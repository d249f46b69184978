"""Removable hooks on a user's modules, and the clock that says where a generation stands."""
