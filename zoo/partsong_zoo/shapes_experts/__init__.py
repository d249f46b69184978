"""Builds `shapes-experts`: four experts that were trained apart on clusters of the `shapes` scenes, and a router.

What it draws, and the reader of its pictures, are those of `partsong_zoo.shapes`.
"""
