"""Scores texts by models that judge them, or that answer with numbers."""
