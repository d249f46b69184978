"""Measures partsong: a folder for each topic, and results/ with what was filed; README.md says how."""
