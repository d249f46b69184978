"""Drafters that are models: a second model, a masked one, trained heads."""
