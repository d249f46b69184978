"""Hogwild! inference: workers that write at the same time and see each other's words as they appear."""
