"""Runs Hogwild! inference: workers write at the same time and see each other's words as they appear."""
