"""Measures strategies of `partsong.reasoning` on tasks, with samples kept on disk and intervals. Loads no torch."""
