"""Gives each rank some experts of a mixture-of-experts language model."""
