"""Predicts how much one token tells about another, for the rule that bounds total variation."""
