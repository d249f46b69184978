"""Measures what papers promise of their methods, on small models, and says whether it holds here."""
