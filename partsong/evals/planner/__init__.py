"""Measures how well the planner predicts."""
