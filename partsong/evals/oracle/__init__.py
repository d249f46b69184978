"""Measures decoding rules on a model that is never wrong, so that every error is the rule's own."""
