"""Decides whose requests are answered, and what each user sees."""
