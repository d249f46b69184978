"""Drafts with heads that others have published for a model: EAGLE-3, DFlash and DSpark."""
